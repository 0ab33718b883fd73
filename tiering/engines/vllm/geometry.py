"""The shape of vLLM's KV cache, and the refusal of unsupported configurations.

Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tiering.api.engine import EngineConfig, HeadShard, KVCacheGroup, blocks_per_chunk
from tiering.api.namespace import KVLayout
from tiering.engines.vllm.heads import head_shard
from tiering.engines.vllm.kept_groups import is_skipped
from tiering.errors import ConfigError
from tiering.simple.cache_config import KVCacheConfig, KVCacheTensor

_CANONICAL_FORMAT = 1
"""Version of the rows that hold the heads of all ranks in order."""
_REFUSED_KINDS = {
    "cross_attention": "its KV belongs to the encoder's input instead of tokens",
    "unknown": "its kind is not known",
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of vLLM's KV cache, as scheduler and workers must agree on it."""

    engine: EngineConfig
    """The engine's configuration."""
    group_bytes: tuple[int, ...]
    """Size of an offloaded block in bytes per KV-cache group, without padding, all ranks together."""
    block_size_factor: int
    """Number of GPU blocks in one offloaded block."""
    copies: int
    """Number of neighbouring ranks that hold the same KV; rows hold it once."""
    heads: HeadShard | None
    """This rank's KV heads, if rows are canonical; None: rows hold ranks side by side."""
    rank: int
    """Rank of this worker."""
    replica: str | None
    """The data-parallel rank; None without data parallelism."""
    group_texts: tuple[str, ...]
    """One readable description per KV-cache group, for the namespace."""
    kv_dtype: str
    """Data type of the KV cache."""


def check_supported(
    vllm_config: Any,
    kv_cache_config: Any,
    kind_of: Callable[[Any], str],
    reports_requests: bool,
    hands_over_states: bool = False,
) -> None:
    """Refuse configurations that cannot work, before anything is opened.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV-cache configuration.
        kind_of: vLLM's function that returns the kind of a KV-cache spec.
        reports_requests: True if this vLLM accepts reports of requests with failed loads, which models with several
            KV-cache groups need.
        hands_over_states: True if this vLLM names the blocks with the states that its prefix cache keeps; default:
            False.

    Raises:
        ConfigError: the configuration is unsupported; the message says what to change.
    """
    check_role(vllm_config.kv_transfer_config)
    check_parallel(vllm_config.parallel_config)
    if _cannot_continue(vllm_config):
        raise ConfigError(
            "vLLM's CPU kernels for latent attention (MLA) compute wrong results from any KV of an earlier step "
            "(vLLM turns its own prefix caching off for them); run the model without this connector"
        )
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ConfigError("the model has no KV cache: there is nothing to offload; run it without this connector")
    if all(is_skipped(group, kind_of) for group in groups):
        raise ConfigError(
            f"the blocks of the model's KV cache ({kind_of(groups[0].kv_cache_spec)}) have no hashes, so none can be "
            "looked up; run the model without this connector"
        )
    for index, group in enumerate(groups):
        kind = kind_of(group.kv_cache_spec)
        if getattr(group, "host_resident", False):
            raise ConfigError(
                f"KV-cache group {index} ({kind}, {group.layer_names[0]}, ...) lives in host memory, and a hit needs "
                "its blocks too; run the model without this connector"
            )
        if is_skipped(group, kind_of):
            continue
        if kind in _REFUSED_KINDS:
            raise ConfigError(
                f"KV-cache group {index} ({kind}, {group.layer_names[0]}, ...): {_REFUSED_KINDS[kind]}; "
                "run the model without this connector"
            )
        if kind == "mamba":
            _check_states(vllm_config, group, f"KV-cache group {index} ({kind}, {group.layer_names[0]}, ...)")
            if not hands_over_states:
                raise ConfigError(
                    f"KV-cache group {index} ({kind}, {group.layer_names[0]}, ...): this vLLM does not hand states "
                    "over to connectors; use vLLM 0.32 or newer"
                )
        if getattr(_first(group.kv_cache_spec), "rswa_window", None) is not None:
            raise ConfigError(
                f"KV-cache group {index} (reference sliding window): a running request frees blocks in its middle, so "
                "generated tokens are computed from fewer tokens than the same text in a prompt; "
                "run the model without this connector"
            )
    if len(groups) > 1 and not reports_requests:
        raise ConfigError(
            f"the model has {len(groups)} KV-cache groups, and this vLLM cannot handle failed loads of such models; "
            "use vLLM 0.30 or newer"
        )


def _check_states(vllm_config: Any, group: Any, name: str) -> None:
    """Check that vLLM keeps states at the borders of blocks, and keeps them whole.

    Raises:
        ConfigError: it does not.
    """
    mode = str(getattr(_first(group.kv_cache_spec), "mamba_cache_mode", "none"))
    if mode == "none":
        raise ConfigError(f"{name}: vLLM keeps no states without its own prefix cache; set --enable-prefix-caching")
    if mode != "align":
        raise ConfigError(f"{name}: --mamba-cache-mode {mode} is not supported; set --mamba-cache-mode align")
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError(
            f"{name}: vLLM moves states after the step if drafts are rejected, so models with states are not supported "
            "together with speculative decoding; turn one of the two off"
        )
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        raise ConfigError(f"{name}: ReplaySSM does not keep whole states; turn use_replayssm off")


def check_role(transfer: Any) -> None:
    """Check that the connector may both load and store.

    Raises:
        ConfigError: the role is not "kv_both".
    """
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            f'kv_role: {transfer.kv_role!r} is not supported; a cache both loads and stores: set "kv_both"'
        )


def check_parallel(parallel: Any) -> None:
    """Check that the workers of an engine can share one CPU tier.

    Args:
        parallel: vLLM's configuration of parallelism.

    Raises:
        ConfigError: they cannot; the message says what to change.
    """
    if getattr(parallel, "nnodes", 1) > 1:
        raise ConfigError(
            f"the engine spans {parallel.nnodes} hosts, but the CPU tier is shared memory of one host: "
            "keep an engine's workers on one host"
        )
    if parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "the external_launcher executor has a scheduler per rank, which cannot share one CPU tier; use mp"
        )
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError("pipeline parallelism is not supported: stages hold different layers; use tensor parallelism")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ConfigError("prefill context parallelism is not supported; set prefill_context_parallel_size to 1")


def _cannot_continue(vllm_config: Any) -> bool:
    """Return True if vLLM's kernels cannot start from a prefix; vLLM's own prefix caching is off then."""
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    latent = bool(getattr(getattr(vllm_config, "model_config", None), "use_mla", False))
    return device == "cpu" and latent and not vllm_config.cache_config.enable_prefix_caching


def read_geometry(
    vllm_config: Any,
    kv_cache_config: Any,
    kind_of: Callable[[Any], str],
    hash_block_size: int,
    canonical: bool = False,
) -> Geometry:
    """Return the shape that scheduler and workers must agree on.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV-cache configuration.
        kind_of: vLLM's function that returns the kind of a KV-cache spec.
        hash_block_size: number of tokens that one block hash covers.
        canonical: True if rows hold the heads of all ranks in order; default: False.

    Raises:
        ConfigError: the page size of a layer is unknown, the size of offloaded blocks is invalid, or there are no
            canonical rows for the model.
    """
    parallel = vllm_config.parallel_config
    context = int(getattr(parallel, "decode_context_parallel_size", 1))
    all_groups = kv_cache_config.kv_cache_groups
    found = [(index, group) for index, group in enumerate(all_groups) if not is_skipped(group, kind_of)]
    groups = tuple(_group(vllm_config, index, group, kind_of, context) for index, group in found)
    world_size = int(parallel.world_size)
    engine = EngineConfig(
        block_sizes=tuple(group.gpu_block_size for group in groups),
        hash_block_size=hash_block_size,
        groups=groups,
        has_scratch=len(groups) < len(all_groups),
        world_size=world_size,
        enable_prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        max_batch_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
    )
    alike = _all_ranks_alike(vllm_config, kv_cache_config, world_size, context)
    heads = head_shard(vllm_config, kv_cache_config, groups, alike) if canonical else None
    segments = heads.shards if heads is not None else 1 if alike else world_size
    factor = blocks_per_chunk(vllm_config.kv_transfer_config.kv_connector_extra_config, engine.block_sizes)
    places, strides = _places(kv_cache_config), _strides(kv_cache_config)
    pages = [_pages(group, places, strides) for _, group in found]
    blocks = tuple(sum(sizes.values()) for sizes in pages)
    return Geometry(
        engine=engine,
        group_bytes=tuple(size * factor * segments for size in blocks),
        block_size_factor=factor,
        copies=world_size // segments,
        heads=heads,
        rank=int(parallel.rank),
        replica=_replica(parallel, engine.engine_id),
        group_texts=tuple(
            _text(group, theirs, sizes, 1 if heads is None else segments) + _state_text(vllm_config, group, theirs)
            for group, (_, theirs), sizes in zip(groups, found, pages, strict=True)
        ),
        kv_dtype=_kv_dtype(vllm_config),
    )


def simple_cache(vllm_config: Any, kv_cache_config: Any, geometry: Geometry) -> tuple[EngineConfig, KVCacheConfig]:
    """Return the engine and the KV cache of one worker in the form that the simple scheduler uses.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV-cache configuration.
        geometry: shape of the KV cache.
    """
    cache = _tensors(kv_cache_config)
    context = int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))
    engine = replace(geometry.engine, context_parallel_size=context)
    return engine, KVCacheConfig(int(kv_cache_config.num_blocks), cache, engine.groups)


def cache_bytes(kv_cache_config: Any, geometry: Geometry) -> int:
    """Return the bytes of the KV caches of all workers; equal copies count once."""
    own = sum(tensor.size for tensor in _tensors(kv_cache_config))
    return own * (geometry.engine.world_size // geometry.copies)


def _tensors(kv_cache_config: Any) -> tuple[KVCacheTensor, ...]:
    tensors = kv_cache_config.kv_cache_tensors
    if hasattr(tensors[0], "layers"):  # from vLLM 0.31: each tensor is a place in one allocation and names its size
        return (KVCacheTensor(int(tensors[0].size), tuple(layer for tensor in tensors for layer in tensor.layers)),)
    return tuple(KVCacheTensor(int(tensor.size), tuple(tensor.shared_by)) for tensor in tensors)


def zeroes_early(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return True if vLLM writes to newly allocated blocks before it calls the connector for the step.

    While vLLM's second model runner prepares the step, it zeroes blocks (where caches of several precisions share
    blocks) and copies states. The first one calls ``handle_preemptions`` before anything else.
    """
    prepares_first = bool(getattr(vllm_config, "use_v2_model_runner", False))
    zeroes = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
    return prepares_first and (zeroes or any(map(_keeps_state, kv_cache_config.kv_cache_groups)))


def _keeps_state(group: Any) -> bool:
    return hasattr(_first(group.kv_cache_spec), "mamba_cache_mode")


def layout_of(geometry: Geometry, vllm_config: Any, memory_order: str, hash_seed: str) -> KVLayout:
    """Return the layout for the namespace.

    Args:
        geometry: shape of the KV cache.
        vllm_config: vLLM's configuration.
        memory_order: order of dimensions in a page.
        hash_seed: seed of the block hashes.
    """
    parallel = vllm_config.parallel_config
    sizes = (
        ("tensor", int(parallel.tensor_parallel_size)),
        ("pipeline", int(parallel.pipeline_parallel_size)),
        ("decode_context", int(getattr(parallel, "decode_context_parallel_size", 1))),
        ("context_interleave", int(getattr(parallel, "cp_kv_cache_interleave_size", 1))),
        ("replicated", int(geometry.copies > 1)),
    )
    return KVLayout(
        kv_dtype=geometry.kv_dtype,
        layer_names=tuple(name for group in geometry.engine.groups for name in group.layer_names),
        groups=geometry.group_texts,
        gpu_block_size=geometry.engine.block_sizes,
        block_size_factor=geometry.block_size_factor,
        group_bytes=geometry.group_bytes,
        memory_order=memory_order,
        parallel_sizes=sizes if geometry.heads is None else (("canonical", _CANONICAL_FORMAT),),
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        hash_seed=hash_seed,
        hash_block_size=geometry.engine.hash_block_size,
    )


def _first(spec: Any) -> Any:
    """Return the spec of a group's first layer."""
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def _group(vllm_config: Any, index: int, group: Any, kind_of: Callable[[Any], str], context: int) -> KVCacheGroup:
    spec, kind = group.kv_cache_spec, kind_of(group.kv_cache_spec)
    first = _first(spec)
    # Full attention may name a window too (hybrid manager off); vLLM then keeps all blocks of the group.
    window = int(first.sliding_window) if "sliding" in kind else None
    if kind == "chunked_local_attention":
        window = int(first.attention_chunk_size)
    sharded = context if getattr(spec, "dcp_sharded", True) else 1
    is_eagle = bool(getattr(group, "is_eagle_group", False))
    return KVCacheGroup(
        tuple(group.layer_names),
        int(spec.block_size) * sharded,
        window,
        kind,
        is_eagle=is_eagle,
        retained_tokens=0 if window is None else int(getattr(first, "extra_retained_tokens", 0)),
        volatile_tokens=_volatile_tokens(vllm_config, is_eagle),
        engine_idx=index,
    )


def _volatile_tokens(vllm_config: Any, is_eagle: bool) -> int:
    """Return the number of last computed tokens that may be computed again.

    Heads that predict several tokens begin a chunk of a prompt before the end of the previous chunk. In the layers of a
    head, the last accepted tokens are computed again after later drafts were rejected.
    """
    ahead = max(0, int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0)) - 1)
    if is_eagle:
        speculative = getattr(vllm_config, "speculative_config", None)
        ahead = max(ahead, int(getattr(speculative, "num_speculative_tokens", None) or 0)) + 1
    return ahead


def _replica(parallel: Any, engine_id: str) -> str | None:
    """Return the data-parallel rank, or None without data parallelism.

    vLLM configures each replica of a dense model as an engine of data-parallel size 1. The first replica is recognised
    by the suffix that vLLM appends to the engine ids of all replicas.
    """
    index = int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))
    several = int(getattr(parallel, "data_parallel_size", 1)) > 1 or engine_id.endswith(f"_dp{index}")
    return str(index) if several or index > 0 else None


def _places(kv_cache_config: Any) -> dict[str, tuple[int, int]]:
    """Return the place of each layer that has KV of its own.

    Layers at one place share their KV, which must not be counted twice in a group.
    """
    places: dict[str, tuple[int, int]] = {}
    for number, tensor in enumerate(kv_cache_config.kv_cache_tensors):
        if hasattr(tensor, "layers"):
            places.update({layer: (number, index) for index, layer in enumerate(tensor.layers)})
        else:
            places.update(dict.fromkeys(tensor.shared_by, (number, 0)))
    return places


def _strides(kv_cache_config: Any) -> dict[str, tuple[int, int]]:
    """Return for each layer the distances from a page to the next layer's and to the next block's.

    The smaller one is the size of a page with its padding, if both a layer's pages and a block's pages are contiguous.
    """
    strides: dict[str, tuple[int, int]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        if hasattr(tensor, "layers"):
            strides |= dict.fromkeys(tensor.layers, (int(tensor.layer_stride), int(tensor.block_stride)))
        else:
            size = int(tensor.size)
            strides |= dict.fromkeys(tensor.shared_by, (size, size // max(1, int(kv_cache_config.num_blocks))))
    return strides


def _pages(group: Any, places: dict[str, tuple[int, int]], strides: dict[str, tuple[int, int]]) -> dict[object, int]:
    """Return the size of each page of a block, without padding as far as it is known.

    Workers know the spec of each layer; the scheduler's copy of the configuration has the first layer's only. Both must
    come to the same sizes, so they use only that spec and the strides, which differ between layers if the pages do. A
    worker whose pages have other sizes is refused later (:meth:`tiering.spec.TieringOffloadingSpec.get_handlers`).
    """
    spec = _first(group.kv_cache_spec)
    size, padded = _page_bytes(spec), getattr(spec, "page_size_bytes", None)
    # A layer without a place of its own reads another layer's KV.
    layers = [layer for layer in group.layer_names if not places or layer in places]
    mixed = len({strides[layer] for layer in layers if layer in strides}) > 1
    pages: dict[object, int] = {}
    for layer in layers:
        place: object = places.get(layer, layer)
        stride = min(strides.get(layer, (0, 0)))
        pages[place] = max(pages.get(place, 0), stride if mixed and stride != padded else size)
    return pages


def _page_bytes(spec: Any) -> int:
    for word in ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes"):
        size = getattr(spec, word, None)
        if isinstance(size, int):
            return size
    raise ConfigError("the size of the pages of the KV cache is not known")


def _all_ranks_alike(vllm_config: Any, kv_cache_config: Any, world_size: int, context: int) -> bool:
    states = filter(_keeps_state, kv_cache_config.kv_cache_groups)
    if not all(getattr(_first(group.kv_cache_spec), "tp_replicated", False) for group in states):
        return False  # each rank has its own part of a state, even where all have the same latent KV
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is not None:
        return context == 1 and int(replicas) == world_size
    return context == 1 and bool(vllm_config.model_config.use_mla)


def _kv_dtype(vllm_config: Any) -> str:
    dtype = vllm_config.cache_config.cache_dtype
    return str(vllm_config.model_config.dtype if dtype == "auto" else dtype).removeprefix("torch.")


def _text(group: KVCacheGroup, found: Any, pages: dict[object, int], ranks: int) -> str:
    """Return a description of a group, in words that the scheduler's copy of the configuration has too.

    Args:
        group: the group.
        found: vLLM's object for it.
        pages: size of each page of a block.
        ranks: number of ranks whose heads are described together.
    """
    words = (
        "num_kv_heads",
        "head_size",
        "head_size_v",
        "dtype",
        "kv_quant_mode",
        "tokens_per_state",
        "cache_dtype_str",
    )
    first = _first(found.kv_cache_spec)
    values = {word: value for word in words if (value := getattr(first, word, None)) is not None}
    if ranks > 1:
        values["num_kv_heads"] *= ranks
    geometry = ", ".join(f"{word} {value}" for word, value in values.items())
    sizes = [size * ranks for size in pages.values()]
    several = f", pages of {sizes} bytes" if len(set(sizes)) > 1 else ""
    return f"{group.kind}, window {group.sliding_window}, {len(group.layer_names)} layers, {geometry}{several}"


def _state_text(vllm_config: Any, group: KVCacheGroup, found: Any) -> str:
    """Return what distinguishes the states of a group, for the namespace; empty for other kinds."""
    if group.kind != "mamba":
        return ""
    first, cache = _first(found.kv_cache_spec), vllm_config.cache_config
    words = ("shapes", "dtypes", "mamba_type", "mamba_cache_mode", "tp_replicated")
    settings = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
    texts = [f"{word} {getattr(first, word, None)}" for word in words]
    return ", ".join(["", *texts, *(f"{word} {getattr(cache, word, None)}" for word in settings)])
