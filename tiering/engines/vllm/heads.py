"""The KV heads of a rank, for canonical rows: one format for all tensor-parallel sizes.

Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiering.api.engine import HeadShard, KVCacheGroup
from tiering.engines.vllm.kept_groups import layer_specs
from tiering.errors import ConfigError

_KINDS = ("full_attention", "sliding_window", "chunked_local_attention")
"""vLLM's names for the kinds of groups whose pages consist of KV heads."""
_LATENT = "mla_attention"
"""vLLM's name for the kind of groups with latent attention: pages of one head, which all ranks hold."""


def head_shard(vllm_config: Any, kv_cache_config: Any, groups: Sequence[KVCacheGroup], alike: bool) -> HeadShard:
    """Return the KV heads that this rank holds of all layers.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV-cache configuration.
        groups: the KV-cache groups that are offloaded.
        alike: True if all ranks hold the same KV, as with latent attention.

    Raises:
        ConfigError: rows cannot hold the heads of all ranks in order; the message has the reason.
    """
    parallel = vllm_config.parallel_config
    workers, ranks = int(parallel.world_size), int(parallel.tensor_parallel_size)
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    latent = bool(vllm_config.model_config.use_mla)
    if latent:
        total = 1
    named = (getattr(part, "kv_cache_layout", None) for part in (kv_cache_config, vllm_config.cache_config))
    order = str(next(filter(None, named), None))
    if int(getattr(parallel, "decode_context_parallel_size", 1)) > 1:
        raise _refusal("with decode context parallelism, a rank holds tokens and not heads")
    if workers != ranks * int(parallel.pipeline_parallel_size):
        raise _refusal(f"the {workers} workers are not those of tensor and pipeline parallelism alone")
    if latent and not alike:
        raise _refusal("not all workers hold the whole latent KV")
    if total < 1 or (total % ranks and ranks % total):
        raise _refusal(f"{total} KV heads cannot be divided among {ranks} workers")
    if not {"H", "N"} <= set(order):
        raise _refusal(f"vLLM does not name the order of heads and tokens in a page ({order}); use vLLM 0.31 or newer")
    heads, copies = max(1, total // ranks), max(1, ranks // total)
    for group in groups:
        spec = kv_cache_config.kv_cache_groups[group.engine_idx].kv_cache_spec
        name = f"the KV-cache group with {', '.join(group.layer_names[:1]) or 'layers of other stages'}"
        if group.kind not in ((_LATENT,) if latent else _KINDS):
            raise _refusal(f"{name} is of the kind {group.kind}, which has no KV heads")
        for layer in layer_specs(spec):
            if int(layer.num_kv_heads) != heads:
                raise _refusal(
                    f"{name} has {layer.num_kv_heads} KV heads on a worker, the model's {total} heads give {heads}"
                )
            if _is_packed(layer):
                raise _refusal(f"{name} has pages in a form of their own, such as scales beside each head")
    if copies > 1 and not latent and getattr(vllm_config, "speculative_config", None) is not None:
        raise _refusal(f"{total} KV heads are fewer than the {ranks} workers, and the drafts' heads may be others")
    shard = int(parallel.rank) % ranks // copies
    return HeadShard(heads, order.index("H") < order.index("N"), shard, ranks // copies)


def check_copies(model: Any, shards: int) -> None:
    """Check that workers which should hold the same heads do so in each layer.

    A layer with more heads than the model's configuration names would have others on each worker.

    Args:
        model: the worker's model; None: it is not found.
        shards: number of KV heads.

    Raises:
        ConfigError: a layer has another number of KV heads, or no layer has a known number.
    """
    modules = () if model is None else model.modules()
    found = {int(module.total_num_kv_heads) for module in modules if hasattr(module, "total_num_kv_heads")}
    if found != {shards}:
        numbers = ", ".join(map(str, sorted(found))) or "an unknown number"
        raise _refusal(f"workers hold copies of {shards} KV head(s), and layers of the model have {numbers}")


def _is_packed(layer: Any) -> bool:
    """Return True if a page is more than keys and values, head by head or token by token."""
    own = any(getattr(layer, word, None) is not None for word in ("num_head_slots", "state_content_bytes"))
    scaled = getattr(getattr(layer, "kv_quant_mode", None), "is_per_token_head", False)
    return bool(own or scaled or getattr(layer, "tokens_per_state", 1) != 1)


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"layout: canonical cannot be used: {reason}; set layout: plain")
