"""Contracts of the framework: keys, load/store specs, requests, events, and the two abstract sides of an offloading backend.

This module imports nothing of ours but the errors.  Terms: a *block* is the unit of offload; a *tier* is one medium that holds
blocks; the *primary* tier is the CPU one; *store* moves away from the accelerator, *load* toward it; a *step* is one iteration
of the engine's scheduler; a *row* is a block's place in the primary buffer.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiering.errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType

Rows = NDArray[np.int64]
"""Row numbers (or block ids): a one-dimensional int64 array."""

PRIMARY_TIER = "cpu"
"""The primary tier's name where tiers are told by name; no secondary tier may have it."""

# --------------------------------------------------------------------------------------------------------------------- keys

OffloadKey = bytes
"""A block's name: the block hash followed by the KV-cache group index as four big-endian unsigned bytes.

Bytes, not tuples: a table of a million keys must not be a million objects for the garbage collector.
"""

GROUP_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Name the block of group ``group_idx`` whose (last) block hash is ``block_hash``."""
    return block_hash + group_idx.to_bytes(GROUP_BYTES, "big")


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """The block hash that ``key`` was made of."""
    return key[:-GROUP_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """The KV-cache group index that ``key`` was made of."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


# -------------------------------------------------------------------------------------------------------- load/store specs


class LoadStoreSpec(ABC):
    """One side of a transfer: which blocks, on which medium."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """The name of the medium, e.g. ``"GPU"``."""


def as_rows(values: ArrayLike) -> Rows:
    """``values`` as a one-dimensional int64 array (not copied if it is one already)."""
    rows = np.asarray(values, dtype=np.int64)
    return rows if rows.ndim == 1 else rows.reshape(-1)


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """A side of a transfer that is described by block ids, held as an int64 array in ``block_ids``."""

    __slots__ = ("block_ids",)

    def __init__(self, block_ids: ArrayLike) -> None:
        self.block_ids: Rows = as_rows(block_ids)

    def __len__(self) -> int:
        return len(self.block_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks in the accelerator's KV cache, ordered by KV-cache group.

    ``group_sizes[i]`` of the ids belong to group i.  Within a group they are logically consecutive blocks of one request, and
    ``block_indices[i]`` is the logical index of the first, so that a worker can skip the leading part of an offloaded block that
    is larger than a GPU block and not aligned with it.  Where only some blocks of a request are stored, the spec covers whole
    offloaded blocks, in runs (``block_indices[i]`` is then that of the first run, and a multiple of the block size factor).

    Raises :class:`ConfigError` if the lengths disagree.
    """

    __slots__ = ("block_indices", "group_sizes")

    def __init__(self, block_ids: ArrayLike, group_sizes: Sequence[int], block_indices: Sequence[int]) -> None:
        super().__init__(block_ids)
        if sum(group_sizes) != len(self.block_ids):
            raise ConfigError(f"group_sizes {list(group_sizes)} add up to {sum(group_sizes)}, block_ids has {len(self.block_ids)}")
        if len(group_sizes) != len(block_indices):
            raise ConfigError(f"group_sizes has {len(group_sizes)} groups, block_indices {len(block_indices)}")
        self.group_sizes: tuple[int, ...] = tuple(group_sizes)
        self.block_indices: tuple[int, ...] = tuple(block_indices)

    @staticmethod
    def medium() -> str:
        return "GPU"


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Rows of the primary tier's buffer."""

    __slots__ = ()

    @staticmethod
    def medium() -> str:
        return "CPU"


TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""(source, destination) of a transfer."""

# ----------------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class ReqContext:
    """Who asks: the request's id and its ``kv_transfer_params``."""

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None


class OffloadPolicy(enum.Enum):
    """Which blocks of a request the connector offers to the manager."""

    BLOCK_LEVEL = "block_level"
    """Newly computed blocks."""
    REQUEST_LEVEL = "request_level"
    """All blocks of the request, also those that the primary tier holds already (some tier wants them all)."""


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """What the manager answers to a new request."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


# ------------------------------------------------------------------------------------------------- what the manager answers


class PrefixMatch(NamedTuple):
    """Answer of :meth:`OffloadingManager.match_prefix`.

    ``hits``: how many leading keys are held.  ``pending``: the answer may still change (one of those is not readable yet, or the
    first key after them is undecided).
    """

    hits: int
    pending: bool


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """What to store, and where.  ``store_spec`` is co-indexed with ``keys_to_store``."""

    keys_to_store: list[OffloadKey]
    store_spec: BlockIDsLoadStoreSpec
    evicted_keys: list[OffloadKey]


MEDIUM_CPU = "CPU"
"""The medium of host memory in events."""

MEDIUM_STORAGE = "STORAGE"
"""The medium of everything slower than host memory in events."""

LOCAL = "LOCAL"
"""Locality in events of a medium that only this machine reaches."""

REMOTE = "REMOTE"
"""Locality in events of a medium that other machines reach as well."""

_event_orders = count()


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Blocks became readable in a tier (``removed`` False) or are gone from it (True).

    Make an event when its blocks come or go: all events of a process are ordered by their making.
    """

    keys: list[OffloadKey]
    """The blocks."""
    medium: str
    """:data:`MEDIUM_CPU` or :data:`MEDIUM_STORAGE`; engines and routers know no other words."""
    locality: str
    """:data:`LOCAL` or :data:`REMOTE`."""
    tier: str
    """The tier's name; :data:`PRIMARY_TIER` for the primary one."""
    removed: bool
    """True if the blocks are gone."""
    order: int = field(default_factory=_event_orders.__next__, compare=False, repr=False)
    """Position of this event among all events of the process."""


class OffloadingManager(ABC):
    """Keeps track of offloaded blocks.  Runs in the scheduler process, on the scheduler's thread.

    Nothing blocks, but :meth:`reset_cache` and :meth:`shutdown`, up to a deadline.  Reference count of a row: -1 being written
    (not readable, not evictable), 0 readable and evictable, n > 0 n readers.  Keys are unique within a call.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: readable in the primary tier now.  False: not held anywhere, or cannot be brought in.

        None: ask again later (being written, being promoted, or a tier does not know yet).
        """

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        """The batch form of :meth:`lookup`, with the same meaning: how many leading keys are held, and whether that may change.

        ``at_least``: fewer hits are of no use to the caller: nothing need be brought in or waited for that would not make as many.
        """
        pending = False
        for hits, key in enumerate(keys):
            answer = self.lookup(key, req_context)
            if answer is False:
                return PrefixMatch(hits, pending and hits >= at_least)
            pending = pending or answer is None
        return PrefixMatch(len(keys), pending)

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Protect ``keys`` from eviction until :meth:`complete_load` and say where they are.

        Raises :class:`tiering.errors.NotReadableError`, with nothing pinned, unless all are readable.
        """

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Mark ``keys``, a prefix in its order, as recently used, the head more recently than the tail.

        Also for blocks that the accelerator already has; unknown keys are ignored.
        """

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """End the protection that :meth:`prepare_load` gave.  Unknown keys are ignored and counted."""

    @abstractmethod
    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Take a row for each of ``keys`` that is not held yet.  All or nothing: None, and nothing changed, if there is no room.

        A key of this call that is already held is never evicted to make room for it.
        """

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Make what was stored readable; or, without success, free what was still being written.

        Keys that were readable before stay so.  Unknown keys (a reset came between) are ignored and counted.
        """

    def count_sources(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        """Of ``keys``, how many were brought in from elsewhere for this request, by medium ("DISK", "OBJECT", ...).  Changes nothing."""
        return {}

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Called exactly once for each request, before any other call for it."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Called exactly once for each request, when it ends for whatever reason."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Hand out the events since the last call, in an order that a consumer can apply.  Changes nothing else."""
        return ()

    def on_schedule_end(self) -> None:
        """The end of a step; called once per step, also without requests."""

    def has_pending_work(self) -> bool:
        """True while jobs are in flight: the engine must keep stepping."""
        return False

    def reset_cache(self, revision: str | None = None) -> bool:
        """Forget everything: this process never serves again what was stored before.  Waits for a few milliseconds at most.

        True if that is certain also after a restart.  False if a medium of our own could not confirm it yet: its tier serves nothing
        until it has.  On a medium that is shared, only this process moves, and nothing that others stored is removed.
        ``revision`` names the weights from now on: all engines that give the same text share their blocks on shared media.  Without
        it (the default) what is stored from now on is for this process alone.
        """
        return True

    def get_stats(self) -> Mapping[str, Any]:
        """What happened since the start, as plain data."""
        return {}

    def shutdown(self) -> None:
        """Drain and release everything, within a deadline.  May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()


# --------------------------------------------------------------------------------------------------------- engine geometry


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One KV-cache group of the engine: layers that share block tables.

    ``gpu_block_size``: tokens in one GPU block, context-parallel factor included.  ``sliding_window``: tokens, None for full
    attention.  ``kind``: "full_attention", "sliding_window", "mamba", ... as the engine calls it.
    ``is_eagle``: a speculative head has layers here.  ``retained_tokens``: tokens before a sliding window that the engine keeps
    besides.  ``volatile_tokens``: as many of the last computed tokens may be computed again while the request runs (default 0 each).
    """

    layer_names: tuple[str, ...]
    gpu_block_size: int
    sliding_window: int | None = None
    kind: str = "full_attention"
    is_eagle: bool = False
    retained_tokens: int = 0
    volatile_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine tells the framework about itself, once, at start.

    ``block_sizes``: tokens per GPU block for each group, before context parallelism; ``context_parallel_size`` is decode × prefill
    size.  ``hash_block_size``: tokens covered by one of ``request.block_hashes``.  ``world_size``: workers that hold KV side by side.
    """

    block_sizes: tuple[int, ...]
    hash_block_size: int
    groups: tuple[KVCacheGroup, ...]
    world_size: int = 1
    context_parallel_size: int = 1
    enable_prefix_caching: bool = True
    max_batch_tokens: int = 8192
    engine_id: str = ""


class OffloadingSpec(ABC):
    """How one engine offloads: built once on each side from the engine's configuration and the user's extra configuration.

    Raises :class:`ConfigError` for block sizes that do not fit together.
    """

    def __init__(self, engine: EngineConfig, extra_config: Mapping[str, Any] | None = None) -> None:
        extra = dict(extra_config or {})
        self.engine = engine
        self.extra_config: Mapping[str, Any] = extra
        self.offload_prompt_only: bool = bool(extra.get("offload_prompt_only", True))
        self.hash_block_size: int = engine.hash_block_size
        self.gpu_block_size: tuple[int, ...] = tuple(size * engine.context_parallel_size for size in engine.block_sizes)
        for group, size in enumerate(self.gpu_block_size):
            if size % self.hash_block_size:
                raise ConfigError(
                    f"KV-cache group {group}: the GPU block size {size} is not a multiple of the hash block size "
                    f"{self.hash_block_size}; give the engine a block size that is (for vLLM: --block-size)"
                )
        self.block_size_factor: int = self._block_size_factor(extra.get("block_size"))

    def _block_size_factor(self, block_size: object) -> int:
        if block_size is None:
            return 1
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size <= 0:
            raise ConfigError(f"block_size: {block_size!r} is not a number of tokens (a positive integer)")
        sizes = set(self.gpu_block_size)
        if len(sizes) != 1:
            raise ConfigError(
                f"block_size: {block_size} cannot be used, the KV-cache groups have different GPU block sizes {sorted(sizes)}; "
                "leave block_size out"
            )
        (gpu_size,) = sizes
        if block_size % gpu_size:
            raise ConfigError(f"block_size: {block_size} is not a multiple of the GPU block size {gpu_size}")
        return block_size // gpu_size

    @property
    def offloaded_block_size(self) -> tuple[int, ...]:
        """Tokens in one offloaded block, per KV-cache group."""
        return tuple(size * self.block_size_factor for size in self.gpu_block_size)

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """The scheduler's side.  Called once."""

    @abstractmethod
    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], Any]]:
        """The worker's side: (source spec class, destination spec class, :class:`tiering.copy.base.OffloadingHandler`)."""


# ----------------------------------------------------------------------------------------------------------- KV cache layout


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """A KV tensor whose first dimension is ``num_blocks``: int8 of shape (num_blocks, page_size_bytes), padding included."""

    tensor: Any
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """One layer (or group of layers): which of the tensors, and its page size without padding, in bytes."""

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """The unique tensors, and for each KV-cache group the refs of its layers, in the order in which a row holds them."""

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_data_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...] = field(default=())
