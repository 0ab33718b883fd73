"""Events that describe themselves: from the keys that tiers gained and lost to the hashes and tokens that consumers know.

The manager's events carry keys only.  While the request that stores a block is alive, the tracker takes a snapshot of what the key
stands for, and fans the block's events out to it later.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol, TypeAlias

from tiering.base import OffloadingEvent, OffloadKey, get_offload_block_hash, get_offload_group_idx
from tiering.connector.protocols import EngineRequest

logger = logging.getLogger("kv_tiering.connector")

ExternalHash: TypeAlias = bytes | int
"""A block hash as the engine shows it to the outside."""

PRIMARY_MEDIUM = "CPU"


@dataclass(frozen=True, slots=True)
class OffloadingKVEventsConfig:
    """The engine's switch for KV events, and the user's opt-in to events that describe themselves."""

    enable_kv_cache_events: bool = False
    self_describing_kv_events: bool = False


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block became readable on ``medium``.  ``block_size``: tokens per hash; 0 with no tokens: only the hash is known."""

    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks are gone from ``medium``."""

    block_hashes: list[ExternalHash]
    medium: str | None
    group_idx: int | None = None


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved


class EventGroupConfig(Protocol):
    """What the tracker needs to know of a KV-cache group.

    ``sliding_window_size_in_blocks`` is not None also for state-space groups; ``kv_event_group_spec`` is (kind, window in tokens).
    """

    @property
    def group_idx(self) -> int: ...
    @property
    def offloaded_block_size(self) -> int: ...
    @property
    def hash_block_size_factor(self) -> int: ...
    @property
    def sliding_window_size_in_blocks(self) -> int | None: ...
    @property
    def kv_event_group_spec(self) -> tuple[str | None, int | None]: ...


class _Snapshot(NamedTuple):
    """What a key stands for.  ``uses``: stores of the key whose removal was not seen yet."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: array[int]
    block_size: int
    lora_id: int | None
    lora_name: str | None
    kind: str | None
    window: int | None
    uses: int


def _unchanged(block_hash: bytes) -> ExternalHash:
    return block_hash


class OffloadingEventsTracker:
    """Snapshots by key, and the conversion of the manager's events.

    Inert (nothing captured, nothing warned about) unless both switches of ``config`` are on.  A snapshot lives from the store of its block to the block's
    removal from the primary tier, or to the failure of the store, so that there are never more than that tier has rows, but for
    those whose removal was not taken yet.
    """

    def __init__(self, config: OffloadingKVEventsConfig, external_hash: Callable[[bytes], ExternalHash] = _unchanged) -> None:
        self._capture = config.enable_kv_cache_events and config.self_describing_kv_events
        self._external = external_hash
        self._snapshots: dict[OffloadKey, _Snapshot] = {}
        self._warned = False

    def __len__(self) -> int:
        return len(self._snapshots)

    def captures(self, group: EventGroupConfig) -> bool:
        """Whether snapshots are taken of blocks of this group."""
        return self._capture and group.sliding_window_size_in_blocks is None

    def record_store(
        self, req: EngineRequest, group_config: EventGroupConfig, offload_block_idx: int, offload_key: OffloadKey
    ) -> None:
        """Take a snapshot of block ``offload_block_idx`` of a request that is alive, whose store under ``offload_key`` begins."""
        if not self.captures(group_config):
            return
        factor, size = group_config.hash_block_size_factor, group_config.offloaded_block_size
        first = offload_block_idx * factor
        hashes = tuple(req.block_hashes[first : first + factor])
        tokens = array("q", req.all_token_ids[offload_block_idx * size : (offload_block_idx + 1) * size])
        if len(hashes) != factor or len(tokens) != size:
            return
        lora_id, lora_name = _lora_of(req)
        kind, window = group_config.kv_event_group_spec
        known = self._snapshots.get(offload_key)
        self._snapshots[offload_key] = _Snapshot(
            hashes=hashes,
            parent=req.block_hashes[first - 1] if first else None,
            token_ids=tokens,
            block_size=size // factor,
            lora_id=lora_id,
            lora_name=lora_name,
            kind=kind,
            window=window,
            uses=1 if known is None else known.uses + 1,
        )

    def store_failed(self, keys: Iterable[OffloadKey]) -> None:
        """The store of these blocks failed: they never became readable."""
        for key in keys:
            self._drop(key)

    def take_events(self, events: Iterable[OffloadingEvent]) -> list[KVCacheEvent]:
        """The same events as consumers know them, in the same order: one per stored block, one per group for removed ones."""
        taken: list[KVCacheEvent] = []
        for event in events:
            if event.removed:
                self._add_removed(taken, event.keys, event.medium)
            else:
                taken.extend(self._stored(key, event.medium) for key in event.keys)
        return taken

    def reset(self) -> None:
        """Forget all snapshots: the manager was reset."""
        self._snapshots.clear()

    def _stored(self, key: OffloadKey, medium: str) -> BlockStored:
        group_idx = get_offload_group_idx(key)
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            self._warn_placeholder()
            own_hash = self._external(get_offload_block_hash(key))
            return BlockStored([own_hash], None, [], 0, None, medium, None, group_idx=group_idx)
        return BlockStored(
            block_hashes=list(map(self._external, snapshot.hashes)),
            parent_block_hash=None if snapshot.parent is None else self._external(snapshot.parent),
            token_ids=snapshot.token_ids.tolist(),
            block_size=snapshot.block_size,
            lora_id=snapshot.lora_id,
            medium=medium,
            lora_name=snapshot.lora_name,
            extra_keys=None,
            group_idx=group_idx,
            kv_cache_spec_kind=snapshot.kind,
            kv_cache_spec_sliding_window=snapshot.window,
        )

    def _add_removed(self, taken: list[KVCacheEvent], keys: Collection[OffloadKey], medium: str) -> None:
        for group_idx, group_keys in groupby(sorted(keys, key=get_offload_group_idx), key=get_offload_group_idx):
            hashes: list[ExternalHash] = []
            for key in group_keys:
                snapshot = self._snapshots.get(key)
                constituents: Sequence[bytes] = (get_offload_block_hash(key),) if snapshot is None else snapshot.hashes
                hashes.extend(map(self._external, constituents))
                if medium == PRIMARY_MEDIUM:
                    self._drop(key)
            taken.append(BlockRemoved(hashes, medium, group_idx))

    def _drop(self, key: OffloadKey) -> None:
        snapshot = self._snapshots.get(key)
        if snapshot is not None:
            if snapshot.uses > 1:
                self._snapshots[key] = snapshot._replace(uses=snapshot.uses - 1)
            else:
                del self._snapshots[key]

    def _warn_placeholder(self) -> None:
        if self._capture and not self._warned:
            self._warned = True
            logger.warning(
                "some KV events carry a block's own hash and no tokens: nothing is known of blocks of sliding-window groups and of "
                "blocks stored in an earlier life of a tier"
            )


def _lora_of(req: EngineRequest) -> tuple[int | None, str | None]:
    lora = req.lora_request
    if lora is None:
        return None, None
    lora_id = getattr(lora, "adapter_id", None)
    name = getattr(lora, "name", None)
    return (
        getattr(lora, "lora_int_id", None) if lora_id is None else lora_id,
        getattr(lora, "lora_name", None) if name is None else name,
    )
