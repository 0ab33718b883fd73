"""The settings other than weights that change KV or its meaning, read from vLLM's configuration.

vLLM's block hashes cover tokens, LoRA names, multimodal content and cache salts. They do not cover the model, its
weights, data types, layout, parallelism, or the engine's settings for multimodal inputs, which therefore belong to the
namespace. Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiering.engines.vllm.weights import meaning, plain
from tiering.errors import ConfigError

_MULTIMODAL = (
    *("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate"),
    *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
)
"""vLLM's multimodal settings on which the inputs' features depend."""
_ENVIRONMENT = (
    *("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_MARLIN_INPUT_DTYPE"),
    *("VLLM_CPU_INT4_W4A8", "VLLM_XPU_INC_WNA16_BACKEND", "VLLM_B12X_MOE_FP4_FORCE_A16"),
    *("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_DEEPEPLL_NVFP4_DISPATCH"),
    *("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "VLLM_FLOAT32_MATMUL_PRECISION"),
    *("VLLM_DISABLED_KERNELS", "VLLM_HUMMING_USE_F16_ACCUM", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"),
    *("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0", "VLLM_USE_FLASHINFER_MOE_INT4"),
    *("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_LINEAR", "VLLM_ROCM_USE_AITER_LINEAR_HIPBMM"),
    *("VLLM_ROCM_USE_AITER_MOE", "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4", "VLLM_ROCM_USE_AITER_MOE_SITUV2"),
    *("VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM", "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM"),
    *("VLLM_ROCM_FP8_MFMA_PAGE_ATTN", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"),
)
"""vLLM's variables, or choices of kernels, that change how values are quantised, rounded or ordered."""
_KERNELS = {
    "aiter": "amd-aiter",
    "b12x": "b12x",
    "conch": "conch-triton-kernels",
    "cutlass": "nvidia-cutlass-dsl",
    "deep_gemm": "deep-gemm",
    "fbgemm_gpu": "fbgemm-gpu-genai",
    "flashinfer": "flashinfer-python",
    "flashinfer_cubin": "flashinfer-cubin",
    "hpc": "hpc-ops",
    "humming": "humming-kernels",
    "tilelang": "tilelang",
    "triton_kernels": "triton-kernels",
}
"""Modules of kernels for quantised weights that vLLM chooses where they are, with their distributions."""
_NOT_COUNTED = {
    "attention_config": (
        *("backend", "backend_per_kind"),  # part of the order in memory
        *("flash_attn_version", "mla_prefill_backend", "minimax_m3_msa_decode_backend", "sparse_mla_force_mqa"),
        *("flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv"),
        *("tq_max_kv_splits_for_cuda_graph", "sparse_mla_prefill_workspace_factor", "hisparse_config"),
        *("flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size", "flex_attn_kv_block_size"),
    ),
    "kernel_config": (
        *("ir_op_priority", "enable_flashinfer_autotune", "enable_rocm_segmented_attn_autotune"),
        *("enable_cutedsl_warmup", "enable_jit_warmup"),
    ),
}
"""Words of vLLM's choices of kernels that change nothing but roundings, by the configuration's name.

All other words count, because a kernel may quantise what another one does not.
"""


def overrides(vllm_config: Any, engine_version: str) -> dict[str, Any]:
    """Return the settings that change results or bytes, without weights, data types and layout.

    Args:
        vllm_config: vLLM's configuration.
        engine_version: vLLM's version, major and minor.

    Raises:
        ConfigError: a file that the settings name (quantization_config_file of hf_overrides,
            mm_encoder_fp8_scale_path, or a variable) cannot be read.
    """
    model = vllm_config.model_config
    hf_config = meaning(plain(model.hf_config.to_dict()))
    if isinstance(code := hf_config.get("auto_map"), dict):
        hf_config["auto_map"] = _without_prefix(code, f"{model.model}--")
    encoded = json.dumps(hf_config, sort_keys=True, default=str).encode()
    found: dict[str, Any] = {
        "engine": f"vllm {engine_version}",
        "architectures": plain(getattr(model.hf_config, "architectures", None)),
        "hf_config": hashlib.sha256(encoded).hexdigest(),
        "hf_overrides": _describe(getattr(model, "hf_overrides", None)),
        "quantization": _describe(getattr(model, "quantization", None)),
        "quantization_config": _describe(getattr(model, "quantization_config", None)),
        "disable_sliding_window": bool(getattr(model, "disable_sliding_window", False)),
        "model_impl": str(getattr(model, "model_impl", "auto")),
    }
    changed = getattr(model, "hf_overrides", None)
    if isinstance(changed, Mapping) and (file := changed.get("quantization_config_file")):
        found["quantization_config_file"] = digest_of_file("hf_overrides.quantization_config_file", file)
    if _rope_is_scaled(hf_config):
        found["max_model_len"] = int(model.max_model_len)  # some scalings derive their factors from this length
    if settings := _multimodal(getattr(model, "multimodal_config", None)):
        found["multimodal"] = settings
    found |= _further_settings(vllm_config)
    if getattr(model, "trust_remote_code", False) and getattr(model, "code_revision", None):
        found["code_revision"] = str(model.code_revision)
    if ahead := getattr(vllm_config, "num_hash_lookahead_tokens", 0):
        found["num_hash_lookahead_tokens"] = int(ahead)  # from vLLM 0.33: a hash covers these tokens after its block
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None:
        found["speculative"] = str(getattr(speculative, "method", None))
    return found


def _further_settings(vllm_config: Any) -> dict[str, Any]:
    """Return rare settings that change KV, unless they have vLLM's defaults."""
    cache = getattr(vllm_config, "cache_config", None)
    found = {
        "model_class_overrides": plain(getattr(vllm_config.model_config, "model_class_overrides", None)),
        "kv_cache_dtype_skip_layers": plain(getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "additional_config": _additional(getattr(vllm_config, "additional_config", None)),
        "environment": _environment(),
        "kernel_packages": _packages() if getattr(vllm_config.model_config, "quantization", None) else None,
        "dummy_shards": _dummy_shards(vllm_config),
        "batch_invariant": batch_invariant(),  # what other kernels have computed differs by roundings
    }
    return {word: value for word, value in found.items() if value} | _kernels(vllm_config)


def _kernels(vllm_config: Any) -> dict[str, Any]:
    """Return the choices of kernels that are not vLLM's defaults, without those of :data:`_NOT_COUNTED`."""
    found: dict[str, Any] = {}
    for name, ignored in _NOT_COUNTED.items():
        config: Any = getattr(vllm_config, name, None)
        words = getattr(config, "__dict__", {})
        defaults = getattr(type(config)() if words else None, "__dict__", {})
        found |= {
            word: plain(value)
            for word, value in words.items()
            if word not in ignored and not word.startswith("_") and plain(value) != plain(defaults.get(word))
        }
    return found


def _packages() -> dict[str, str]:
    """Return those modules of :data:`_KERNELS` that are installed, with major and minor version if known."""
    found = {}
    for module, distribution in _KERNELS.items():
        if importlib.util.find_spec(module) is not None:
            found[module] = ""
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[module] = ".".join(importlib.metadata.version(distribution).split(".")[:2])
    return found


def _dummy_shards(vllm_config: Any) -> int:
    """Return the number of ranks that divide random weights; 0 if the weights do not depend on it.

    Each rank draws its part by itself, so the whole differs with their number, where canonical rows do not.
    """
    load_format = str(getattr(getattr(vllm_config, "load_config", None), "load_format", "auto"))
    ranks = int(getattr(getattr(vllm_config, "parallel_config", None), "tensor_parallel_size", 1))
    return ranks if load_format == "dummy" and ranks > 1 else 0


def _environment() -> dict[str, str]:
    """Return the variables of :data:`_ENVIRONMENT` that are set.

    For a file that one names, the value is the file's digest.
    """
    found = {word: value for word in _ENVIRONMENT if (value := os.environ.get(word, "").strip())}
    named = {word: value for word, value in found.items() if word.endswith("_CONFIG") and not value.startswith("{")}
    return found | {word: digest_of_file(word, value) for word, value in named.items()}


def batch_invariant() -> bool:
    """Return True if vLLM computes with kernels whose results do not depend on the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0").strip() not in ("", "0")


def _additional(config: Any) -> Any:
    """Return what identifies the settings of a platform's plugin.

    The settings are a dictionary, or an object with a hash of its own, whose text may have an address.
    """
    return config.compute_hash() if hasattr(config, "compute_hash") else plain(config)


def _multimodal(config: Any) -> dict[str, Any]:
    """Return the settings, other than the defaults, that change the features of images, videos and sounds.

    vLLM's hash of an input covers the input and the request's own settings, but none of the engine's.
    """
    values = {word: plain(getattr(config, word, None)) for word in _MULTIMODAL}
    found = {word: value for word, value in values.items() if value}
    if scales := found.pop("mm_encoder_fp8_scale_path", None):
        found["mm_encoder_fp8_scales"] = digest_of_file("mm_encoder_fp8_scale_path", scales)
    if found.get("video_pruning_rate"):
        found["video_pruning_method"] = str(getattr(config, "video_pruning_method", None))
    return found


def digest_of_file(word: str, path: Any) -> str:
    """Return the digest of the file that a setting names.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return hashlib.sha256(Path(str(path)).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{word} cannot be read: {error}") from error


def _without_prefix(code: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return ``auto_map`` without the repository's name, which transformers prepends to its entries."""
    return {word: place.removeprefix(prefix) if isinstance(place, str) else place for word, place in code.items()}


def _rope_is_scaled(hf_config: Mapping[str, Any]) -> bool:
    text = json.dumps(hf_config, default=str)
    return (
        bool(re.search(r'"(rope_type|type)": "(dynamic|longrope|su|yarn|linear|llama3|mrope)', text))
        or '"rope_scaling": {' in text
    )


def _describe(value: Any) -> Any:
    """Return plain data that changes with ``value``, as far as changes are visible."""
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"
    return plain(value)


def hash_seed(algorithm: str, environment_seed: str | None, default_seed: str) -> str:
    """Return the seed of vLLM's block hashes, or "random" if the seed differs between processes.

    Args:
        algorithm: name of the hash algorithm.
        environment_seed: value of PYTHONHASHSEED; None if it is not set.
        default_seed: vLLM's seed for cryptographic algorithms if PYTHONHASHSEED is not set.
    """
    if environment_seed is not None:
        return f"PYTHONHASHSEED={environment_seed}"
    if algorithm.startswith("sha"):
        return default_seed
    return "random"
