"""The identity of vLLM's model, for the connector and for the tier of vLLM's own tiering.

The functions import vLLM when they are called.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from tiering.api.namespace import ModelIdentity
from tiering.engines.vllm.geometry import Geometry, layout_of, read_geometry
from tiering.engines.vllm.identity import digest_of_file, hash_seed, overrides


def kind_of(spec: Any) -> str:
    """Return vLLM's name for the kind of a KV-cache spec."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return str(get_kv_cache_spec_kind(spec).value)


def geometry_of(
    vllm_config: Any, kv_cache_config: Any, canonical: bool = False, stages: Sequence[Any] = ()
) -> Geometry:
    """Return the shape of vLLM's KV cache.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV-cache configuration.
        canonical: True if rows hold the heads of all ranks in order; default: False.
        stages: vLLM's KV-cache configuration of each pipeline stage; default: there is one stage.

    Raises:
        ConfigError: as :func:`~tiering.engines.vllm.geometry.read_geometry`.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    _, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return read_geometry(vllm_config, kv_cache_config, kind_of, int(hash_block_size), canonical, stages)


def model_identity(vllm_config: Any, kv_cache_config: Any, geometry: Geometry) -> ModelIdentity:
    """Return the identity of the model without its weights: instead of these it has the engine's id.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV-cache configuration.
        geometry: shape of the KV cache.
    """
    import vllm
    from vllm.v1.core import kv_cache_utils

    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = hash_seed(algorithm, os.environ.get("PYTHONHASHSEED"), kv_cache_utils.DEFAULT_NONE_HASH_SEED)
    model_config = vllm_config.model_config
    return ModelIdentity(
        name=str(model_config.model),
        weights=f"engine {geometry.engine.engine_id}",
        dtype=str(model_config.dtype).removeprefix("torch."),
        layout=layout_of(geometry, vllm_config, _memory_order(vllm_config, kv_cache_config), seed),
        overrides=overrides(vllm_config, ".".join(vllm.__version__.split(".")[:2])),
        volatile_scales=bool(getattr(vllm_config.cache_config, "calculate_kv_scales", False)),
    )


def _memory_order(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the order of dimensions in a page, and the settings that affect the packing of K and V."""
    from vllm.platforms import current_platform

    layout = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(
        vllm_config.cache_config, "kv_cache_layout", None
    )
    attention = getattr(vllm_config, "attention_config", None)
    backend = getattr(attention, "backend", None) or os.environ.get("VLLM_ATTENTION_BACKEND")
    device = _cpu(vllm_config) if current_platform.is_cpu() else current_platform.get_device_name()
    per_kind = getattr(attention, "backend_per_kind", None) or {}
    return (
        f"{layout}, {current_platform.device_type} {device}, attention {backend} {sorted(map(str, per_kind.items()))}"
    )


def _cpu(vllm_config: Any) -> str:
    """Return what vLLM's kernels for CPUs choose the packing of K and V by, and the type of activations.

    PyTorch's own word is the same with AMX and without; on a processor that is no x86 it may be "DEFAULT" as well.
    There, the packing is chosen when vLLM is compiled (on ARM, by BFMMLA), so the library of kernels itself counts.

    Raises:
        ConfigError: the library cannot be read.
    """
    import torch

    words = [str(torch.backends.cpu.get_cpu_capability())]
    if platform.machine() != "x86_64":
        library = find_spec("vllm._C")
        words += [platform.machine(), digest_of_file("vLLM's library of kernels", library and library.origin)]
    model = vllm_config.model_config
    if (model.dtype == torch.bfloat16 or model.quantization) and torch.cpu._is_amx_tile_supported():
        words.append("AMX")  # bfloat16: K and V in tiles; weights in fp8: activations that are not quantised
    return " ".join(words)
