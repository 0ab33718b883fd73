"""The contracts with an engine: its configuration, its KV-cache tensors and the offloading spec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiering.api.hints import HintBounds
from tiering.api.manager import OffloadingManager
from tiering.api.transfer import LoadStoreSpec
from tiering.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One KV-cache group of the engine: layers that share block tables."""

    layer_names: tuple[str, ...]
    """Names of the layers, as the engine gives them."""
    gpu_block_size: int
    """Size of one GPU block in tokens, context-parallel factor included."""
    sliding_window: int | None = None
    """Size of the attention window, or of a chunk of local attention, in tokens; None for full attention."""
    kind: str = "full_attention"
    """The engine's name for the kind of the group: "full_attention", "sliding_window", "mamba", ..."""
    is_eagle: bool = False
    """True if a speculative head has layers in this group."""
    retained_tokens: int = 0
    """Number of tokens before a sliding window that the engine keeps in addition to the window."""
    volatile_tokens: int = 0
    """Number of last computed tokens whose KV the engine may compute again while the request runs."""
    engine_idx: int | None = None
    """Index of the group in the engine's list; None: its place in :attr:`EngineConfig.groups`."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration that an engine passes to the framework once, at start."""

    block_sizes: tuple[int, ...]
    """Size of a GPU block in tokens, per KV-cache group, before context parallelism."""
    hash_block_size: int
    """Number of tokens that one entry of ``request.block_hashes`` covers."""
    groups: tuple[KVCacheGroup, ...]
    """The KV-cache groups that are offloaded, in the engine's order."""
    has_scratch: bool = False
    """True if the engine has other groups too, whose content it makes anew after a hit.

    Hits then end only where all offloaded groups have a border of blocks, and leave a token to compute.
    """
    world_size: int = 1
    """Number of workers that hold parts of the same KV cache."""
    context_parallel_size: int = 1
    """Product of the decode and the prefill context-parallel size."""
    enable_prefix_caching: bool = True
    """True if the engine's own prefix cache on the GPU is on."""
    max_batch_tokens: int = 8192
    """Largest number of tokens that the engine schedules in one step."""
    loads_within_step: bool = False
    """True if the engine may compute a request in the step that orders its load, behind the load.

    Its cache then has the names of the blocks from their allocation on, as those of blocks that the step computes.
    """
    retention_interval: int | None = None
    """Distance in tokens between the windows that the engine's own prefix cache keeps in a prompt.

    0: it keeps the windows at the ends of prompts, and where prompts part. None: it keeps all windows.
    """
    engine_id: str = ""
    """Name of the shared memory between scheduler and workers; empty if the engine is a single process."""


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The KV heads of one rank, for rows that hold the heads of all ranks in order."""

    heads: int
    """Number of KV heads of a rank, the same in all layers."""
    outside: bool
    """True if heads lie outside of tokens in a page; False if tokens lie outside of heads."""
    shard: int = 0
    """The part of all heads that this rank holds, from 0 to ``shards`` - 1."""
    shards: int = 1
    """Number of different parts. Each is held by as many ranks, which are neighbours."""


@dataclass(frozen=True, slots=True)
class TraceRecording:
    """Settings of the trace that a scheduler records of its requests."""

    directory: Path
    """Directory that takes the files of all processes."""
    max_bytes: int
    """Largest size of one process's files together, in bytes."""
    max_total: int
    """Largest size of all trace files in the directory together, in bytes."""
    block_bytes: int | None = None
    """Size of one block's KV in bytes, for the replay; None (default): not known."""
    salt: str = field(default="", repr=False)
    """Secret that keys the hashes; empty (default): the hashes are the engine's own."""
    shutdown_deadline: float = 30.0
    """Time in seconds that a shutdown may wait for requests that are not written yet; default 30."""


@dataclass(frozen=True, slots=True)
class MissExplaining:
    """Settings of the explanation of misses."""

    capacities: Mapping[str, int]
    """Capacity of each tier in blocks, by its name, the CPU tier first; 0 for a tier without a capacity."""
    blocks: int = 1_000_000
    """Largest number of past blocks that are followed, of 28 bytes each."""
    requests: int = 1000
    """Number of the latest requests whose explanations are kept."""
    socket: Path | None = None
    """UNIX socket on which the engine answers; None: a new one in the user's runtime directory."""
    block_bytes: int = 1
    """Bytes of the largest block; default 1.

    The unit of capacities that are not in the stack and that a tier reports.
    """


def blocks_per_chunk(extra_config: Mapping[str, Any], gpu_block_sizes: Collection[int]) -> int:
    """Return the number of GPU blocks in one offloaded block, the same for all KV-cache groups.

    Args:
        extra_config: the user's extra configuration.
        gpu_block_sizes: tokens in a GPU block of each group.

    Raises:
        ConfigError: ``block_size`` or ``blocks_per_chunk`` is invalid, or both are given.
    """
    blocks, block_size = extra_config.get("blocks_per_chunk"), extra_config.get("block_size")
    sizes = set(gpu_block_sizes)
    for word, value, unit in (("blocks_per_chunk", blocks, "GPU blocks"), ("block_size", block_size, "tokens")):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
            raise ConfigError(f"{word}: {value!r} is not a number of {unit} (a positive integer)")
    if block_size is None:
        return 1 if blocks is None else int(blocks)
    if blocks is not None:
        raise ConfigError("block_size, blocks_per_chunk: both give the size of an offloaded block; leave one out")
    if len(sizes) != 1:
        raise ConfigError(
            f"block_size: {block_size} cannot be used, the KV-cache groups have different GPU block sizes "
            f"{sorted(sizes)}; set blocks_per_chunk, the number of GPU blocks in an offloaded block of each group"
        )
    (gpu_size,) = sizes
    if block_size % gpu_size:
        raise ConfigError(f"block_size: {block_size} is not a multiple of the GPU block size {gpu_size}")
    return int(block_size // gpu_size)


class OffloadingSpec(ABC):
    """The factory of one engine's offloading: its manager in the scheduler and its copies in the workers.

    The scheduler and each worker build one spec from the same configuration.

    Args:
        engine: the engine's configuration.
        extra_config: the user's extra configuration. ``block_size`` is the offloaded block size in tokens, by
            default the GPU block size; ``blocks_per_chunk`` is the same in GPU blocks, for groups of any block sizes;
            ``offload_prompt_only`` (default True) excludes generated tokens.

    Raises:
        ConfigError: the block sizes do not fit together, or a value is invalid.
    """

    def __init__(self, engine: EngineConfig, extra_config: Mapping[str, Any] | None = None) -> None:
        extra = dict(extra_config or {})
        prompt_only = extra.get("offload_prompt_only", True)
        if not isinstance(prompt_only, bool):
            raise ConfigError(f"offload_prompt_only: {prompt_only!r} is not true or false")
        if engine.hash_block_size < 1 or not engine.block_sizes or min(engine.block_sizes) < 1:
            raise ConfigError(
                f"the GPU block sizes {engine.block_sizes} and the hash block size {engine.hash_block_size} are not "
                "numbers of tokens: describe at least one KV-cache group, and give positive sizes"
            )
        self.engine = engine
        self.extra_config: Mapping[str, Any] = extra
        """The user's extra configuration."""
        self.offload_prompt_only: bool = prompt_only
        """True if generated tokens are not offloaded."""
        self.hash_block_size: int = engine.hash_block_size
        """Number of tokens that one block hash covers."""
        self.gpu_block_size: tuple[int, ...] = tuple(size * engine.context_parallel_size for size in engine.block_sizes)
        """Size of a GPU block in tokens, per KV-cache group, context-parallel factor included."""
        for group, size in enumerate(self.gpu_block_size):
            if size % self.hash_block_size:
                raise ConfigError(
                    f"KV-cache group {group}: the GPU block size {size} is not a multiple of the hash block size "
                    f"{self.hash_block_size}; give the engine a block size that is (for vLLM: --block-size)"
                )
        self.block_size_factor: int = blocks_per_chunk(extra, self.gpu_block_size)
        """Number of GPU blocks in one offloaded block."""
        self.recording: TraceRecording | None = None
        """Settings of the trace that the scheduler records; None: it records none."""
        self.hints = HintBounds(blocks=0)
        """Hints of requests that are followed; default: none."""
        self.promotes_waiting = False
        """True to promote blocks of requests that the engine has not looked up yet; default False."""
        self.explaining: MissExplaining | None = None
        """Settings of the explanation of misses; None: misses are counted only."""
        self.heads: HeadShard | None = None
        """This rank's KV heads, if rows are canonical; None: they hold ranks side by side."""
        self.tenant_key: bytes | None = None
        """Key of the tenants' names in reports of cached tokens; None: cached tokens are not reported."""

    @property
    def rows_are_prepared(self) -> bool:
        """True once scheduler and workers may use the rows; until then no block is looked up or stored."""
        return True

    @property
    def offloaded_block_size(self) -> tuple[int, ...]:
        """Size of one offloaded block in tokens, per KV-cache group."""
        return tuple(size * self.block_size_factor for size in self.gpu_block_size)

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the manager for the scheduler. The engine calls this once."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], Any]]:
        """Return the copies for the worker.

        Returns:
            Tuples of source spec class, destination spec class and
            :class:`~tiering.copy.contract.OffloadingHandler`.
        """


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """A KV tensor whose first dimension is the block."""

    tensor: Any
    """An int8 tensor of shape (num_blocks, page_size_bytes)."""
    page_size_bytes: int
    """Size of one page in bytes, padding included."""


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """The reference of a layer, or of a set of layers, to its canonical tensor."""

    tensor_idx: int
    """Index of the tensor in :attr:`CanonicalKVCaches.tensors`."""
    page_size_bytes: int
    """Size of one page in bytes, padding excluded."""
    row_offset: int | None = None
    """Offset in bytes in a GPU block with the heads of all ranks, for canonical rows; default None."""


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """The canonical form of an engine's KV cache."""

    tensors: tuple[CanonicalKVCacheTensor, ...]
    """Tensors with KV; one that several layers share is listed once."""
    group_data_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...] = field(default=())
    """References to the tensors per KV-cache group, in the order in which a row holds them."""


POOL_PART = 8
"""Quotient of all GPU blocks and those that the walk looks at, between two and four steps' need."""

SPARE_PART = 32
"""Quotient of all GPU blocks and those beyond two steps' need that it looks at in a small pool.

There, two steps' need is more than the pool's part, and without spare blocks each step would store its own few.
"""


def watched_blocks(two_steps: int, blocks: int) -> int:
    """Return the number of free blocks whose content is stored, because the engine uses them up next.

    Args:
        two_steps: the largest number of blocks that two steps can use up.
        blocks: number of GPU blocks.
    """
    return two_steps + min(two_steps, max(blocks // SPARE_PART, blocks // POOL_PART - two_steps))
