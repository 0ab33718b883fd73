"""Tiny models with random weights whose output depends on all of the context, written to a directory."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512
SHARP = 0.1
"""Initializer range: with the usual 0.02 the logits of a model this small hardly depend on what came before."""


def write_llama(directory: Path, seed: int = 0, layers: int = 3) -> Path:
    """A Llama with full attention; returns ``directory``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=SHARP,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).float().save_pretrained(directory)
    return directory


WINDOW = 48
"""Tokens of :func:`write_gemma`'s sliding-window layers: not a multiple of a block, and shorter than two."""


def write_gemma(directory: Path, seed: int = 0) -> Path:
    """A Gemma 3 text model: four layers, full attention and a sliding window in turns; returns ``directory``."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=2048,
        initializer_range=SHARP,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    Gemma3ForCausalLM(config).float().save_pretrained(directory)
    return directory


def write_deepseek(directory: Path, layers: int, seed: int = 0) -> Path:
    """A DeepSeek V2 without experts; latent attention (MLA) of the size that vLLM's CPU kernel has.  Returns ``directory``."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=2048,
        initializer_range=SHARP,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    DeepseekV2ForCausalLM(config).float().save_pretrained(directory)
    return directory
