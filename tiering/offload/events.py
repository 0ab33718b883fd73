"""Events that describe themselves: from the keys that tiers gained and lost to the hashes and tokens that consumers know.

The manager's events carry keys only.  While a request that stores or looks up a block is alive, the tracker takes a
snapshot of what the key stands for, and writes the block's events with it until no tier holds the block any more.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from tiering.api.keys import GROUP_BYTES, PRIMARY_TIER, OffloadKey, get_offload_block_hash, get_offload_group_idx
from tiering.api.manager import OffloadingEvent
from tiering.offload.event_types import (
    BlockRemoved,
    BlockStored,
    EngineEvents,
    EventGroupConfig,
    KVCacheEvent,
    OffloadingKVEventsConfig,
)
from tiering.offload.protocols import EngineRequest
from tiering.offload.snapshots import MAX_SNAPSHOT_TOKENS, RUN_BLOCKS, ExternalHash, Run, Snapshots

logger = logging.getLogger("kv_tiering.connector")


class _Tier(NamedTuple):
    """A tier as events name it.  ``bare`` and ``described``: its bits in the tracker's record of who holds a block."""

    medium: str
    locality: str
    ownership: str | None
    bare: int
    described: int


class OffloadingEventsTracker:
    """Converts the manager's events to those that consumers know.

    Nothing is captured or warned about unless both switches of ``config`` are on.  A snapshot lives from the store or
    the lookup of its block until no tier holds the block and nobody stores it any more.  ``max_tokens`` bounds the
    tokens of all snapshots: of the oldest beyond it only the block's own hash stays announced, and
    :attr:`snapshots_dropped` counts them.
    """

    def __init__(
        self,
        config: OffloadingKVEventsConfig,
        engine: EngineEvents | None = None,
        *,
        max_tokens: int = MAX_SNAPSHOT_TOKENS,
    ) -> None:
        self._engine = EngineEvents() if engine is None else engine
        self._external = self._engine.external_hash
        self._capture = config.enable_kv_cache_events and config.self_describing_kv_events
        self._snapshots = Snapshots(max_tokens)
        self._tiers: dict[tuple[str, str, str], _Tier] = {}
        self._held: dict[OffloadKey, int] = {}
        """Who has announced a block: two bits per tier, for its own hash only and for all of it."""
        self._storing: Counter[OffloadKey] = Counter()
        """Stores to the primary tier whose end is not seen yet."""
        self._looked_up: dict[str, _Lookups] = {}
        self._unclaimed: list[OffloadKey] = []
        """Blocks that requests which have ended looked up, and that no tier had announced then."""
        self._queued: list[KVCacheEvent] = []
        """Events that precede those that the manager has not handed out yet."""
        self._warned = False

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def snapshots_dropped(self) -> int:
        """Snapshots that were in use and had to go, since the start."""
        return self._snapshots.dropped

    # ---------------------------------------------------------------------------------------------------------- capture

    def captures(self, group: EventGroupConfig) -> bool:
        """Whether snapshots are taken of blocks of this group."""
        return self._capture and group.sliding_window_size_in_blocks is None

    def record_store(
        self, req: EngineRequest, group_config: EventGroupConfig, offload_block_idx: int, offload_key: OffloadKey
    ) -> None:
        """Take a snapshot of block ``offload_block_idx`` of a request that is alive, whose store under ``offload_key`` begins."""
        self.record_stores(req, group_config, (offload_block_idx,), (offload_key,))

    def record_stores(
        self, req: EngineRequest, group: EventGroupConfig, positions: Sequence[int], keys: Sequence[OffloadKey]
    ) -> None:
        """The batch form of :meth:`record_store`; ``positions``, ascending, and ``keys`` are co-indexed."""
        if self.captures(group):
            self._storing.update(keys)
            self._describe(req, group, positions, keys)

    def record_lookup(
        self, req: EngineRequest, group: EventGroupConfig, keys: Sequence[OffloadKey], computed: int, end: int
    ) -> None:
        """A request that is alive can use its first ``end`` blocks, ``keys`` being those of all of its blocks.

        The first ``computed`` blocks are in the engine's own cache.  What tiers announced by its own hash only, because
        the block was found and not stored, is announced again with its tokens.  Calls that repeat what is known cost
        nothing per block.
        """
        if not self.captures(group):
            return
        lookups = self._looked_up.setdefault(req.request_id, _Lookups({}, []))
        start = lookups.ends.get(group.group_idx, 0)
        if end <= start:
            return
        lookups.ends[group.group_idx] = end
        held, snapshots = self._held, self._snapshots
        positions = [
            position
            for position in range(start, end)
            if keys[position] not in snapshots and (position >= computed or held.get(keys[position]))
        ]
        if positions:
            found = [keys[position] for position in positions]
            self._describe(req, group, positions, found)
            lookups.unclaimed.extend(key for key in found if key not in held)

    def request_finished(self, req_id: str) -> None:
        """A request has ended: what it looked up and nobody holds is of no use any more."""
        lookups = self._looked_up.pop(req_id, None)
        if lookups is not None:
            self._unclaimed += lookups.unclaimed

    def store_failed(self, keys: Iterable[OffloadKey]) -> None:
        """The store of these blocks failed: they never became readable."""
        for key in keys:
            self._store_ended(key)
            self._drop_if_unused(key)

    def reset(self) -> None:
        """The manager was reset, and its events until now have been taken: no store or lookup of before counts any more."""
        self._storing.clear()
        self._looked_up.clear()
        self._unclaimed.clear()
        for key in list(self._snapshots):
            self._drop_if_unused(key)

    # ---------------------------------------------------------------------------------------------------------- convert

    def take_events(self, events: Iterable[OffloadingEvent]) -> list[KVCacheEvent]:
        """The same events as consumers know them, in the same order: one per stored block, one per group for removed ones."""
        taken, self._queued = self._queued, []
        for event in events:
            tier = self._tiers.get((event.medium, event.locality, event.tier)) or self._meet(event)
            if event.removed:
                self._add_removed(taken, event.keys, tier)
            elif self._capture:
                self._add_stored(taken, event.keys, tier, self._storing if event.tier == PRIMARY_TIER else None)
            else:
                taken.extend(self._placeholder(key, tier) for key in event.keys)
        if self._unclaimed:
            unclaimed, self._unclaimed = self._unclaimed, []
            for key in unclaimed:
                self._drop_if_unused(key)
        return taken

    def _add_stored(
        self, taken: list[KVCacheEvent], keys: Collection[OffloadKey], tier: _Tier, storing: Counter[OffloadKey] | None
    ) -> None:
        """Announce ``keys``, each once while the tier holds it; ``storing``: the stores that end with this."""
        held, find = self._held, self._snapshots.find
        known = tier.bare | tier.described
        for key in keys:
            if storing:
                self._store_ended(key)
            holders = held.get(key, 0)
            if holders & known:
                continue
            place = find(key)
            if place is None:
                self._warn_placeholder()
                held[key] = holders | tier.bare
                taken.append(self._placeholder(key, tier))
            else:
                held[key] = holders | tier.described
                taken.append(_described(*place, tier))

    def _add_removed(self, taken: list[KVCacheEvent], keys: Collection[OffloadKey], tier: _Tier) -> None:
        """Take ``keys`` back by the hashes that they were announced with."""
        groups = {key[-GROUP_BYTES:] for key in keys}
        by_group = [(next(iter(groups)), keys)] if len(groups) == 1 else groupby(sorted(keys, key=_suffix), _suffix)
        for suffix, group_keys in by_group:
            hashes: list[ExternalHash] = []
            for key in group_keys:
                hashes += self._taken_back(key, tier) if self._capture else (self._own_hash(key),)
            group_idx = int.from_bytes(suffix, "big")
            taken.append(BlockRemoved(hashes, tier.medium, group_idx, tier.locality, tier.ownership))

    def _taken_back(self, key: OffloadKey, tier: _Tier) -> Sequence[ExternalHash]:
        """The hashes that the tier has announced for ``key``, which it holds no more."""
        holders = self._held.get(key, 0)
        place = self._snapshots.find(key)
        left = holders & ~(tier.bare | tier.described)
        if left:
            self._held[key] = left
        elif holders:
            del self._held[key]
        if place is None:
            return (self._own_hash(key),)
        hashes = place[0].hashes_of(place[1])
        if not left and key not in self._storing:
            self._snapshots.discard(key)
        return hashes if holders & tier.described else hashes[-1:]

    def _meet(self, event: OffloadingEvent) -> _Tier:
        """The tier of an event, which is the first of its kind."""
        bit = 2 * len(self._tiers)
        ownership = None if event.tier == PRIMARY_TIER else event.tier
        tier = _Tier(event.medium, event.locality, ownership, 1 << bit, 2 << bit)
        self._tiers[event.medium, event.locality, event.tier] = tier
        return tier

    # -------------------------------------------------------------------------------------------------------- snapshots

    def _describe(
        self, req: EngineRequest, group: EventGroupConfig, positions: Sequence[int], keys: Sequence[OffloadKey]
    ) -> None:
        """Take snapshots of those of ``keys`` that lack one, and tell the tokens of those that are announced without."""
        if not self._snapshots.lacks_all(keys):
            missing = [index for index, key in enumerate(keys) if key not in self._snapshots]
            positions, keys = [positions[index] for index in missing], [keys[index] for index in missing]
        start = 0
        for end in range(1, len(keys) + 1):
            if end == len(keys) or end - start == RUN_BLOCKS or positions[end] != positions[end - 1] + 1:
                self._add_run(req, group, positions[start], keys[start:end])
                start = end
        while (oldest := self._snapshots.oldest_beyond_bound()) is not None:
            self._shorten(oldest)
            self._snapshots.drop(oldest)

    def _add_run(
        self, req: EngineRequest, group: EventGroupConfig, first_block: int, keys: Sequence[OffloadKey]
    ) -> None:
        factor, size, lookahead = (
            group.hash_block_size_factor,
            group.offloaded_block_size,
            self._engine.lookahead_tokens,
        )
        first, count = first_block * factor, len(keys) * factor
        hashes = req.block_hashes[first : first + count]
        tokens = array("q", req.all_token_ids[first_block * size : (first_block + len(keys)) * size + lookahead])
        if len(hashes) != count or len(tokens) < len(keys) * size:
            return
        parent = req.block_hashes[first - 1] if first else None
        lora_id, lora_name = _lora_of(req)
        kind, window = group.kv_event_group_spec
        extra_keys = self._engine.extra_keys
        run = Run(
            keys=keys,
            hashes=list(hashes if self._external is None else map(self._external, hashes)),
            parent=parent if parent is None or self._external is None else self._external(parent),
            token_ids=tokens,
            extra_keys=None if extra_keys is None else extra_keys(req, first, count, size // factor),
            factor=factor,
            block_size=size // factor,
            lookahead=lookahead,
            group_idx=group.group_idx,
            kind=kind,
            window=window,
            lora_id=lora_id,
            lora_name=lora_name,
        )
        self._snapshots.add(run)
        if not self._held.keys().isdisjoint(keys):
            for index, key in enumerate(keys):
                self._tell(run, index, key)

    def _tell(self, run: Run, index: int, key: OffloadKey) -> None:
        """Announce a block again, now with its tokens, for all tiers that hold it and have announced its own hash only."""
        for tier in self._tiers.values():
            holders = self._held.get(key, 0)
            if holders & tier.bare:
                self._held[key] = holders ^ (tier.bare | tier.described)
                self._queued += (self._own_removed(run, index, tier), _described(run, index, tier))

    def _shorten(self, run: Run) -> None:
        """Leave of the blocks of ``run`` only their own hashes announced: nobody will know the others when the blocks go."""
        if run.factor == 1:
            return
        for index, key in self._snapshots.used(run):
            for tier in self._tiers.values():
                holders = self._held.get(key, 0)
                if holders & tier.described:
                    self._held[key] = holders ^ (tier.bare | tier.described)
                    removed = BlockRemoved(
                        run.hashes_of(index), tier.medium, run.group_idx, tier.locality, tier.ownership
                    )
                    self._queued += (removed, self._placeholder(key, tier))

    def _store_ended(self, key: OffloadKey) -> None:
        stores = self._storing.get(key, 0)
        if stores > 1:
            self._storing[key] = stores - 1
        elif stores:
            del self._storing[key]

    def _drop_if_unused(self, key: OffloadKey) -> None:
        if key not in self._held and key not in self._storing:
            self._snapshots.discard(key)

    # ----------------------------------------------------------------------------------------------------------- events

    def _own_hash(self, key: OffloadKey) -> ExternalHash:
        own = get_offload_block_hash(key)
        return own if self._external is None else self._external(own)

    def _placeholder(self, key: OffloadKey, tier: _Tier) -> BlockStored:
        return BlockStored(
            block_hashes=[self._own_hash(key)],
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            medium=tier.medium,
            lora_name=None,
            group_idx=get_offload_group_idx(key),
            locality=tier.locality,
            ownership=tier.ownership,
        )

    def _own_removed(self, run: Run, index: int, tier: _Tier) -> BlockRemoved:
        return BlockRemoved(run.hashes_of(index)[-1:], tier.medium, run.group_idx, tier.locality, tier.ownership)

    def _warn_placeholder(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "some KV events carry a block's own hash and no tokens: those of sliding-window groups, and those of blocks that were "
                "found in a tier until a request uses them"
            )


class _Lookups(NamedTuple):
    """What a request that is alive has looked up: blocks per KV-cache group, and those that no tier had announced."""

    ends: dict[int, int]
    unclaimed: list[OffloadKey]


def _described(run: Run, index: int, tier: _Tier) -> BlockStored:
    first = index * run.factor
    end, size, extra_keys = first + run.factor, run.block_size, run.extra_keys
    return BlockStored(
        run.hashes[first:end],
        run.hashes[first - 1] if index else run.parent,
        run.token_ids[first * size : end * size].tolist(),
        size,
        run.lora_id,
        tier.medium,
        run.lora_name,
        None if extra_keys is None else list(extra_keys[first:end]),
        run.group_idx,
        run.kind,
        run.window,
        tier.locality,
        tier.ownership,
        run.lookahead_of(index) if run.lookahead else None,
    )


def _suffix(key: OffloadKey) -> bytes:
    return key[-GROUP_BYTES:]


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
