"""The shape of vLLM's KV cache, as scheduler and workers must agree on it.

Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tiering.api.engine import EngineConfig, HeadShard, KVCacheGroup, blocks_per_chunk
from tiering.api.namespace import KVLayout
from tiering.engines.vllm.heads import head_shard
from tiering.engines.vllm.kept_groups import is_skipped, layer_specs
from tiering.errors import ConfigError
from tiering.simple.cache_config import KVCacheConfig, KVCacheTensor

_CANONICAL_FORMAT = 1
"""Version of the rows that hold the heads of all ranks in order."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of vLLM's KV cache, as scheduler and workers must agree on it."""

    engine: EngineConfig
    """The engine's configuration."""
    group_bytes: tuple[int, ...]
    """Size of an offloaded block in bytes per KV-cache group, without padding, all ranks together."""
    block_size_factor: int
    """Number of GPU blocks in one offloaded block."""
    stage_bytes: tuple[tuple[int, ...], ...]
    """Bytes of a GPU block on one rank of each pipeline stage, per KV-cache group."""
    copies: int
    """Number of neighbouring ranks that hold the same KV; rows hold it once."""
    heads: HeadShard | None
    """This rank's KV heads, if rows are canonical; None: rows hold ranks side by side."""
    rank: int
    """Rank of this worker."""
    replica: str | None
    """The data-parallel rank; None without data parallelism."""
    layer_names: tuple[str, ...]
    """Names of the layers of all stages, group by group in the order of a row."""
    group_texts: tuple[str, ...]
    """One readable description per KV-cache group, for the namespace."""
    kv_dtype: str
    """Data type of the KV cache."""


def read_geometry(
    vllm_config: Any,
    kv_cache_config: Any,
    kind_of: Callable[[Any], str],
    hash_block_size: int,
    canonical: bool = False,
    stages: Sequence[Any] = (),
) -> Geometry:
    """Return the shape that scheduler and workers must agree on.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV-cache configuration.
        kind_of: vLLM's function that returns the kind of a KV-cache spec.
        hash_block_size: number of tokens that one block hash covers.
        canonical: True if rows hold the heads of all ranks in order; default: False.
        stages: vLLM's KV-cache configuration of each pipeline stage; default: there is one stage.

    Raises:
        ConfigError: the page size of a layer is unknown, the size of offloaded blocks is invalid, there are no
            canonical rows for the model, or stages do not fit together.
    """
    parallel = vllm_config.parallel_config
    context = int(getattr(parallel, "decode_context_parallel_size", 1))
    all_groups = kv_cache_config.kv_cache_groups
    found = _offloaded(kv_cache_config, kind_of)
    groups = tuple(_group(vllm_config, index, group, kind_of, context) for index, group in found.items())
    world_size = int(parallel.world_size)
    engine = EngineConfig(
        block_sizes=tuple(group.gpu_block_size for group in groups),
        hash_block_size=hash_block_size,
        groups=groups,
        has_scratch=len(groups) < len(all_groups),
        world_size=world_size,
        enable_prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        max_batch_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
        loads_within_step=True,
        retention_interval=getattr(vllm_config.cache_config, "prefix_cache_retention_interval", None),
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
    )
    stages = stages or (kv_cache_config,)
    stage_ranks = world_size // len(stages)
    alike = _all_ranks_alike(vllm_config, kv_cache_config, stage_ranks, context)
    heads = head_shard(vllm_config, kv_cache_config, groups, alike) if canonical else None
    segments = heads.shards if heads is not None else 1 if alike else stage_ranks
    factor = blocks_per_chunk(vllm_config.kv_transfer_config.kv_connector_extra_config, engine.block_sizes)
    theirs = [_offloaded(stage, kind_of) for stage in stages]
    if any(each.keys() != found.keys() for each in theirs):
        raise ConfigError("the pipeline stages have different KV-cache groups; use tensor parallelism")
    parts = [[_part(stage, each[index]) for stage, each in zip(stages, theirs, strict=True)] for index in found]
    return Geometry(
        engine=engine,
        group_bytes=tuple(sum(sum(part.pages) for part in group) * factor * segments for group in parts),
        block_size_factor=factor,
        stage_bytes=tuple(tuple(sum(part.pages) for part in stage) for stage in zip(*parts, strict=True)),
        copies=stage_ranks // segments,
        heads=heads,
        rank=int(parallel.rank),
        replica=_replica(parallel, engine.engine_id),
        layer_names=tuple(layer for group in parts for part in group for layer in part.group.layer_names),
        group_texts=tuple(
            _text(vllm_config, group, stages_of_group, None if heads is None else segments)
            for group, stages_of_group in zip(groups, parts, strict=True)
        ),
        kv_dtype=_kv_dtype(vllm_config),
    )


class _Part(NamedTuple):
    """The part of a KV-cache group on one rank of a pipeline stage."""

    group: Any
    """vLLM's object for it."""
    pages: list[int]
    """Size of each page of a block in bytes, without padding as far as it is known."""


def _offloaded(kv_cache_config: Any, kind_of: Callable[[Any], str]) -> dict[int, Any]:
    """Return the groups that are offloaded, by their index."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {index: group for index, group in groups if not is_skipped(group, kind_of)}


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
    first, *others = map(sum, geometry.stage_bytes)
    shards = geometry.engine.world_size // len(geometry.stage_bytes) // geometry.copies
    return own * shards * (first + sum(others)) // first


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


def loads_may_come_first(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return True if nothing in a step after ``handle_preemptions`` writes to the blocks of its loads.

    The first model runner zeroes newly allocated blocks after that call, the second one before it.
    """
    prepares_first = bool(getattr(vllm_config, "use_v2_model_runner", False))
    return prepares_first or not getattr(kv_cache_config, "needs_kv_cache_zeroing", False)


def _keeps_state(group: Any) -> bool:
    return hasattr(first_spec(group.kv_cache_spec), "mamba_cache_mode")


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
        layer_names=geometry.layer_names,
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


def first_spec(spec: Any) -> Any:
    """Return the spec of a group's first layer."""
    return layer_specs(spec)[0]


def _group(vllm_config: Any, index: int, group: Any, kind_of: Callable[[Any], str], context: int) -> KVCacheGroup:
    spec, kind = group.kv_cache_spec, kind_of(group.kv_cache_spec)
    first = first_spec(spec)
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


def _part(kv_cache_config: Any, group: Any) -> _Part:
    """Return the part of a KV-cache group that one rank of a stage holds.

    Workers know the spec of each layer; the scheduler's copy of the configuration has the first layer's only. Both must
    come to the same sizes, so they use only that spec and the strides, which differ between layers if the pages do. A
    worker whose pages have other sizes is refused later (:meth:`tiering.spec.TieringOffloadingSpec.get_handlers`).
    """
    places, strides = _places(kv_cache_config), _strides(kv_cache_config)
    spec = first_spec(group.kv_cache_spec)
    size, padded = _page_bytes(spec), getattr(spec, "page_size_bytes", None)
    # A layer without a place of its own reads another layer's KV.
    layers = [layer for layer in group.layer_names if not places or layer in places]
    mixed = len({strides[layer] for layer in layers if layer in strides}) > 1
    pages: dict[object, int] = {}
    for layer in layers:
        place: object = places.get(layer, layer)
        stride = min(strides.get(layer, (0, 0)))
        pages[place] = max(pages.get(place, 0), stride if mixed and stride != padded else size)
    return _Part(group, list(pages.values()))


def _page_bytes(spec: Any) -> int:
    for word in ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes"):
        size = getattr(spec, word, None)
        if isinstance(size, int):
            return size
    raise ConfigError("the size of the pages of the KV cache is not known")


def _all_ranks_alike(vllm_config: Any, kv_cache_config: Any, stage_ranks: int, context: int) -> bool:
    """Return True if all ranks of a pipeline stage hold the same KV."""
    states = filter(_keeps_state, kv_cache_config.kv_cache_groups)
    if not all(getattr(first_spec(group.kv_cache_spec), "tp_replicated", False) for group in states):
        return False  # each rank has its own part of a state, even where all have the same latent KV
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is not None:
        return context == 1 and int(replicas) == stage_ranks
    return context == 1 and bool(vllm_config.model_config.use_mla)


def _kv_dtype(vllm_config: Any) -> str:
    dtype = vllm_config.cache_config.cache_dtype
    return str(vllm_config.model_config.dtype if dtype == "auto" else dtype).removeprefix("torch.")


def _text(vllm_config: Any, group: KVCacheGroup, parts: Sequence[_Part], shards: int | None) -> str:
    """Return a description of a group, in words that the scheduler's copy of the configuration has too.

    Args:
        vllm_config: vLLM's configuration.
        group: the group.
        parts: its part of each pipeline stage.
        shards: number of ranks of a stage whose heads are described together; None: rows hold ranks side by side.
    """
    found, ranks = next(part.group for part in parts if part.group.layer_names), shards or 1
    words = (
        "num_kv_heads",
        "head_size",
        "head_size_v",
        "dtype",
        "kv_quant_mode",
        "tokens_per_state",
        "cache_dtype_str",
    )
    first = first_spec(found.kv_cache_spec)
    values = {word: value for word in words if (value := getattr(first, word, None)) is not None}
    if ranks > 1:
        values["num_kv_heads"] *= ranks
    geometry = ", ".join(f"{word} {value}" for word, value in values.items())
    sizes = [size * ranks for part in parts for size in part.pages]
    several = f", pages of {sizes} bytes" if len(set(sizes)) > 1 else ""
    layers = [len(part.group.layer_names) for part in parts]
    # In canonical rows, no byte depends on the stages.
    split = f", by stage {layers}" if len(parts) > 1 and shards is None else ""
    described = f"{group.kind}, window {group.sliding_window}, {sum(layers)} layers, {geometry}{several}{split}"
    return described + _state_text(vllm_config, group, found)


def _state_text(vllm_config: Any, group: KVCacheGroup, found: Any) -> str:
    """Return what distinguishes the states of a group, for the namespace; empty for other kinds."""
    if group.kind != "mamba":
        return ""
    first, cache = first_spec(found.kv_cache_spec), vllm_config.cache_config
    words = ("shapes", "dtypes", "mamba_type", "mamba_cache_mode", "tp_replicated")
    settings = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
    texts = [f"{word} {getattr(first, word, None)}" for word in words]
    return ", ".join(["", *texts, *(f"{word} {getattr(cache, word, None)}" for word in settings)])
