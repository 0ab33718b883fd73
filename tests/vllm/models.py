"""Tiny models with random weights whose output depends on the whole context, written to a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
SHARP = 0.1
"""Initializer range. With the usual 0.02, the logits of so small a model hardly depend on its context."""


def _write(directory: Path, kind: str, seed: int, dtype: str = "float32", **words: Any) -> Path:
    """Write a model of the transformers family ``kind`` and return ``directory``."""
    import torch
    import transformers

    config_class = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, config_class)(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        initializer_range=SHARP,
        tie_word_embeddings=False,
        dtype=dtype,
        **words,
    )
    torch.manual_seed(seed)
    getattr(transformers, f"{kind}ForCausalLM")(config).to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


def write_llama(directory: Path, seed: int = 0, layers: int = 3) -> Path:
    """Write a Llama with full attention and return ``directory``."""
    return _write(directory, "Llama", seed, num_hidden_layers=layers, num_key_value_heads=2, head_dim=32)


def int8(*, symmetric: bool) -> dict[str, Any]:
    """Return a quantisation configuration: weights of 8 bits, and activations of 8 bits, symmetric or not."""
    common = {"num_bits": 8, "type": "int"}
    weights = {**common, "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = {**common, "symmetric": symmetric, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
    }


def write_quantised(directory: Path) -> Path:
    """Write a Llama with weights of 8 bits and a scale per channel, and return ``directory``."""
    import torch
    from safetensors.torch import load_file, save_file

    write_llama(directory)
    tensors = {}
    for name, weights in load_file(directory / "model.safetensors").items():
        if name.endswith("proj.weight"):
            scale = weights.abs().amax(1, keepdim=True) / 127
            tensors[name + "_scale"] = scale
            weights = (weights / scale).round().to(torch.int8)
        tensors[name] = weights
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": int8(symmetric=True)}))
    return directory


def write_tokenizer(model: Path) -> Path:
    """Add a tokenizer with one word for each token to the model at ``model``, and return ``model``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"word{number}": number for number in range(VOCABULARY)}, unk_token="word0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="word1").save_pretrained(model)
    return model


def write_draft(directory: Path, model: Path, noise: float) -> Path:
    """Write a draft model, the Llama at ``model`` with noise on its weights, and return ``directory``.

    Some of the draft model's guesses are right.
    """
    import torch
    from transformers import LlamaForCausalLM

    draft = LlamaForCausalLM.from_pretrained(model)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in draft.parameters():
            weights += noise * torch.randn(weights.shape, generator=dice)
    draft.save_pretrained(directory)
    return directory


def write_eagle(directory: Path, model: Path, seed: int = 0) -> Path:
    """Write a speculative head (EAGLE) for the Llama at ``model`` and return ``directory``.

    Its layer is the model's first one. It is fed with a random mixture of a token and the state before that token.
    """
    import torch
    from safetensors.torch import load_file, save_file

    directory.mkdir(exist_ok=True)
    first, weights = "model.layers.0.", load_file(model / "model.safetensors")
    head = {f"layers.0.{name.removeprefix(first)}": each for name, each in weights.items() if name.startswith(first)}
    del head["layers.0.input_layernorm.weight"]
    head["fc.weight"] = torch.randn(128, 256, generator=torch.Generator().manual_seed(seed)) * SHARP
    save_file(head, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return directory


def write_mimo(directory: Path, seed: int = 0) -> Path:
    """Write a MiMo with a layer that predicts one token more (MTP), and return ``directory``.

    That layer is the model's first one. It is fed with a random mixture of a token and the state before that token.
    """
    import torch
    from safetensors.torch import load_file, save_file

    _write(directory, "Qwen2", seed, num_hidden_layers=3, num_key_value_heads=2)
    first, more = "model.layers.0.", "model.mtp_layers.0."
    weights = load_file(directory / "model.safetensors")
    weights |= {more + name.removeprefix(first): each for name, each in weights.items() if name.startswith(first)}
    mixture = torch.randn(128, 256, generator=torch.Generator().manual_seed(seed)) * SHARP
    weights[more + "input_proj.weight"] = mixture
    weights |= {f"{more}{norm}_layernorm.weight": torch.ones(128) for norm in ("token", "hidden", "final")}
    save_file({name: each.clone() for name, each in weights.items()}, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


RANK = 4
"""Rank of the adapters."""


def write_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter for :func:`write_llama` that changes K and V; return ``directory``."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    dice = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for name, width in [("q_proj", 128), ("k_proj", 64), ("v_proj", 64)]:
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, 128, generator=dice) * 0.1
            tensors[f"{at}.lora_B.weight"] = torch.randn(width, RANK, generator=dice) * 0.5
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


WINDOW = 48
"""Window of :func:`write_gemma`'s sliding-window layers in tokens: between one block and two."""


def write_gemma(directory: Path, seed: int = 0) -> Path:
    """Write a Gemma 3 text model and return ``directory``.

    Its four layers alternate between a sliding window and full attention.
    """
    return _write(
        directory,
        "Gemma3",
        seed,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def write_mistral(directory: Path, seed: int = 0) -> Path:
    """Write a Mistral, whose three layers all have a sliding window, and return ``directory``."""
    return _write(
        directory, "Mistral", seed, num_hidden_layers=3, num_key_value_heads=2, head_dim=32, sliding_window=WINDOW
    )


IMAGE_MARKS = ("<image>", "<global-img>", "<end_of_utterance>", "<fake_token_around_image>")
IMAGE = VOCABULARY
"""Token of an image in prompts for :func:`write_idefics`."""


def write_idefics(directory: Path) -> Path:
    """Write an Idefics 3 that sees images of 56 x 56 points, and return ``directory``."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    words = {f"word{number}": number for number in range(VOCABULARY)}
    words |= {mark: VOCABULARY + number for number, mark in enumerate(IMAGE_MARKS)}
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": VOCABULARY + len(IMAGE_MARKS),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 3,
            "max_position_embeddings": 2048,
            "initializer_range": SHARP,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        image_token_id=IMAGE,
        pad_token_id=0,
        initializer_range=SHARP,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(directory)
    side = {"longest_edge": 56}
    Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="word0")),
            eos_token="word1",
            additional_special_tokens=list(IMAGE_MARKS),
        ),
        image_seq_len=4,
    ).save_pretrained(directory)
    return directory


def write_llama4(directory: Path, seed: int = 0, chunk: int | None = None) -> Path:
    """Write a text-only Llama 4 and return ``directory``.

    It has no experts. Attention temperature, if vLLM turns it on, changes all but the first of its positions.

    Args:
        chunk: tokens of a chunk of local attention in all layers but the first two; default: full attention.
    """
    import torch
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        intermediate_size_mlp=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=65_536,
        initializer_range=SHARP,
        pad_token_id=0,
        attention_chunk_size=chunk,
        interleave_moe_layer_step=0,
        moe_layers=[],
        no_rope_layers=[0, 0, 1],
        floor_scale=4,
        attn_scale=1.0,
        dtype="float32",
    )
    torch.manual_seed(seed)
    transformers.Llama4ForCausalLM(config).float().save_pretrained(directory)
    return directory


def write_whisper(directory: Path) -> Path:
    """Write a Whisper, whose decoder attends to sounds by cross attention, and return ``directory``."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=128,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        decoder_start_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        dtype="float32",
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(directory)
    words = {f"word{number}": number for number in range(VOCABULARY)}
    transformers.WhisperProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(),
        tokenizer=transformers.WhisperTokenizer(vocab=words, merges=[], unk_token="word0"),
    ).save_pretrained(directory)
    return directory


def write_bidirectional(directory: Path) -> Path:
    """Write a Llama without causal attention, which keeps no KV, and return ``directory``."""
    write_llama(directory)
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["LlamaBidirectionalModel"]
    (directory / "config.json").write_text(json.dumps({**config, "pooling": "avg"}))
    return directory


def write_deepseek(directory: Path, layers: int, seed: int = 0) -> Path:
    """Write a DeepSeek V2 without experts and return ``directory``.

    Its latent attention (MLA) has the size that vLLM's CPU kernel supports.
    """
    return _write(
        directory,
        "DeepseekV2",
        seed,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )


def write_prefix_lm(directory: Path) -> Path:
    """Write an HRM text model, whose prompts are read without causality, and return ``directory``."""
    return _write(directory, "HrmText", 0, num_hidden_layers=2, head_dim=32)


STATE_BLOCK = 64
"""Block size in tokens at which a block of attention is at least as large as the states below."""


def write_granite(directory: Path, seed: int = 0) -> Path:
    """Write a Granite 4 (hybrid) without experts and return ``directory``.

    Its layers are Mamba 2, full attention and Mamba 2.
    """
    return _write(
        directory,
        "GraniteMoeHybrid",
        seed,
        num_hidden_layers=3,
        num_key_value_heads=2,
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["mamba", "attention", "mamba"],
        mamba_n_heads=8,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_head=32,
        mamba_chunk_size=32,
        position_embedding_type="rope",
        attention_multiplier=0.18,
    )


def write_falcon_h1(directory: Path, seed: int = 0) -> Path:
    """Write a Falcon-H1, with attention and Mamba 2 in each layer, and return ``directory``."""
    return _write(
        directory,
        "FalconH1",
        seed,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=32,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_head=32,
        mamba_chunk_size=32,
    )


def write_nemotron_h(directory: Path, seed: int = 0) -> Path:
    """Write a Nemotron-H and return ``directory``.

    Its layers are Mamba 2, attention, Mamba 2 and a linear one.
    """
    return _write(
        directory,
        "NemotronH",
        seed,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=1,
        ssm_state_size=16,
        chunk_size=32,
    )


def write_qwen3_next(directory: Path, seed: int = 0) -> Path:
    """Write a Qwen3-Next in bfloat16 and return ``directory``.

    Its layers are three gated delta nets, whose CPU kernel in vLLM has no other type, and full attention.
    """
    return _write(
        directory,
        "Qwen3Next",
        seed,
        dtype="bfloat16",
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=256,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        partial_rotary_factor=0.25,
    )
