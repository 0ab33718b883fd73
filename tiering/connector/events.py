"""KV events with hashes and tokens, made from the manager's events, which contain keys only.

While a request that stores or looks up a block is alive, the tracker takes a snapshot of the hashes and tokens that the
key stands for. The tracker describes the block's events with this snapshot until no tier holds the block.
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
from tiering.connector.described_runs import DescribedRuns
from tiering.connector.event_types import (
    BlockRemoved,
    BlockStored,
    EngineEvents,
    KVCacheEvent,
    OffloadingKVEventsConfig,
)
from tiering.connector.groups import OffloadGroup
from tiering.connector.protocols import EngineRequest
from tiering.connector.snapshots import MAX_SNAPSHOT_TOKENS, RUN_BLOCKS, ExternalHash, Run, Snapshots
from tiering.connector.variants import OwnHashes

logger = logging.getLogger("kv_tiering.connector")


class _Tier(NamedTuple):
    """A tier as events name it."""

    medium: str
    """Medium of the tier: "CPU" or "STORAGE"."""
    locality: str
    """Location of the tier: "LOCAL" or "REMOTE"."""
    ownership: str | None
    """Name of a secondary tier; None for the primary tier."""
    bare: int
    """Bit that marks blocks which the tier has announced by their own hash only."""
    described: int
    """Bit that marks blocks which the tier has announced with all hashes and tokens."""
    translated: int
    """Bit that marks blocks that were announced by the engine's hash, and not by their name.

    They differ for named blocks only (:mod:`tiering.connector.variants`).
    """

    bits: int
    """All bits of the tier."""


class OffloadingEventsTracker:
    """Converter from the manager's events to the events that consumers receive.

    The tracker takes snapshots and logs warnings only if both switches of ``config`` are on. A snapshot lives from the
    store or lookup of its block until no tier holds the block and no store of it is in flight. Beyond ``max_tokens``,
    the oldest snapshots are dropped: their blocks stay announced by their own hash only, and :attr:`snapshots_dropped`
    counts them.

    Args:
        config: switches for KV events.
        engine: form of the engine's own KV events; default: hashes are published unchanged.
        max_tokens: largest number of tokens in all snapshots; default: 2**24.
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
        self.own_hashes = OwnHashes() if config.enable_kv_cache_events else None
        """The engine's hashes of blocks that have other names; None if no events are published."""
        self.snapshots = Snapshots(max_tokens)
        """Snapshots of the blocks that events may have to describe."""
        self._tiers: dict[tuple[str, str, str], _Tier] = {}
        self.held: dict[OffloadKey, int] = {}
        """Tiers that have announced a block: the bits of each tier."""
        self._storing: Counter[OffloadKey] = Counter()
        """Number of stores of each block to the primary tier that have not ended."""
        self._looked_up: dict[str, _Lookups] = {}
        """Lookups of each request that is alive, by request id."""
        self._unclaimed: list[OffloadKey] = []
        """Blocks that no tier had announced when the requests that looked them up ended."""
        self._queued: list[KVCacheEvent] = []
        """Events that consumers must receive before the next events of the manager."""
        self._warned = False
        self.described_runs: DescribedRuns | None = None
        """Descriptions for the next engine, and from the last one; None: no tier keeps any."""
        self.restored = 0
        """Number of blocks that were described by what the last engine had written, since the start."""

    def __len__(self) -> int:
        return len(self.snapshots)

    @property
    def snapshots_dropped(self) -> int:
        """Number of snapshots that were dropped while in use, since the start."""
        return self.snapshots.dropped

    def captures(self, group: OffloadGroup) -> bool:
        """Return True if the tracker takes snapshots of blocks of this group."""
        return self._capture and not group.is_state

    def record_stores(
        self, req: EngineRequest, group: OffloadGroup, positions: Sequence[int], keys: Sequence[OffloadKey]
    ) -> None:
        """Take snapshots of blocks whose stores begin.

        Args:
            req: the request, which is alive.
            group: the blocks' KV-cache group.
            positions: positions of the blocks in the request, ascending.
            keys: key of each position.
        """
        if self.captures(group):
            self._storing.update(keys)
            self._describe(req, group, positions, keys)

    def keep(self, keys: Iterable[OffloadKey]) -> None:
        """Keep the snapshots of ``keys``, if they have any, until one more store of each has ended."""
        if self._capture:
            self._storing.update(key for key in keys if key in self.snapshots)

    def record_lookup(
        self, req: EngineRequest, group: OffloadGroup, keys: Sequence[OffloadKey], computed: int, end: int
    ) -> None:
        """Take snapshots of the blocks that a request has found.

        Blocks that tiers announced by their own hash only, because they were not stored by this engine, are announced
        again with their tokens. Repeated calls cost nothing for known blocks.

        Args:
            req: the request, which is alive.
            group: the blocks' KV-cache group.
            keys: keys of all blocks of the request.
            computed: number of leading blocks in the engine's own cache.
            end: number of leading blocks that the request can use.
        """
        if not self.captures(group):
            return
        lookups = self._looked_up.setdefault(req.request_id, _Lookups({}, []))
        start = lookups.ends.get(group.group_idx, 0)
        if end <= start:
            return
        lookups.ends[group.group_idx] = end
        held, snapshots = self.held, self.snapshots
        if not group.is_full:
            computed = max(computed, group.needed_from(end * group.offloaded_block_size) // group.offloaded_block_size)
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
        """Forget the lookups of a request that has ended, and the unused snapshots of these lookups."""
        lookups = self._looked_up.pop(req_id, None)
        if lookups is not None:
            self._unclaimed += lookups.unclaimed

    def store_failed(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the stores of ``keys``, which failed; the blocks never became readable."""
        for key in keys:
            self._store_ended(key)
            self._drop_if_unused(key)

    def reset(self) -> None:
        """Forget all stores and lookups until now, because the manager was reset.

        The caller has taken the manager's events of the time before the reset.
        """
        self._storing.clear()
        self._looked_up.clear()
        self._unclaimed.clear()
        for key in list(self.snapshots):
            self._drop_if_unused(key)

    def take_events(self, events: Iterable[OffloadingEvent]) -> list[KVCacheEvent]:
        """Return ``events`` in the form that consumers receive, in the same order.

        A stored block has an event of its own. Removed blocks share one event per KV-cache group.
        """
        if self.described_runs is not None:
            self.described_runs.step()
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
        """Append a stored event for each of ``keys`` that the tier has not announced yet.

        ``storing`` counts the stores in flight; the stores of ``keys`` end with these events.
        """
        held, find = self.held, self.snapshots.find
        known = tier.bare | tier.described
        kept = self.described_runs
        if kept is not None and kept.tier != tier.ownership:
            kept = None
        last: Run | None = None
        for key in keys:
            if storing:
                self._store_ended(key)
            holders = held.get(key, 0)
            if holders & known:
                continue
            place = find(key)
            if place is None:
                self._warn_placeholder()
                held[key] = holders | tier.bare | (tier.translated if self._is_translated(key) else 0)
                taken.append(self._placeholder(key, tier))
            else:
                held[key] = holders | tier.described
                taken.append(_described(*place, tier))
                if kept is not None:
                    run, index = place
                    run.lasting |= 1 << index
                    if run is not last:
                        kept.add(last := run)

    def _add_removed(self, taken: list[KVCacheEvent], keys: Collection[OffloadKey], tier: _Tier) -> None:
        """Append events that remove ``keys`` by the hashes that were announced for them."""
        groups = {key[-GROUP_BYTES:] for key in keys}
        by_group = [(next(iter(groups)), keys)] if len(groups) == 1 else groupby(sorted(keys, key=_suffix), _suffix)
        for suffix, group_keys in by_group:
            hashes: list[ExternalHash] = []
            for key in group_keys:
                hashes += self._taken_back(key, tier) if self._capture else (self._own_hash(key),)
            group_idx = int.from_bytes(suffix, "big")
            taken.append(BlockRemoved(hashes, tier.medium, group_idx, tier.locality, tier.ownership))

    def _taken_back(self, key: OffloadKey, tier: _Tier) -> Sequence[ExternalHash]:
        """Return the hashes that the tier has announced for ``key``, and forget that the tier holds it."""
        holders = self.held.get(key, 0)
        place = self.snapshots.find(key)
        left = holders & ~tier.bits
        if left:
            self.held[key] = left
        elif holders:
            del self.held[key]
        if place is None:
            return (self._announced_hash(key, tier, holders),)
        hashes = place[0].hashes_of(place[1])
        if not left and key not in self._storing:
            self.snapshots.discard(key)
        return (self._announced_hash(key, tier, holders),) if holders & tier.bare else hashes

    def _meet(self, event: OffloadingEvent) -> _Tier:
        """Register the tier of an event, and return the tier."""
        bit = 3 * len(self._tiers)
        ownership = None if event.tier == PRIMARY_TIER else event.tier
        tier = _Tier(event.medium, event.locality, ownership, 1 << bit, 2 << bit, 4 << bit, 7 << bit)
        self._tiers[event.medium, event.locality, event.tier] = tier
        return tier

    def _describe(
        self, req: EngineRequest, group: OffloadGroup, positions: Sequence[int], keys: Sequence[OffloadKey]
    ) -> None:
        """Take snapshots of those of ``keys`` that have none, and announce their tokens where missing."""
        if not self.snapshots.lacks_all(keys):
            missing = [index for index, key in enumerate(keys) if key not in self.snapshots]
            positions, keys = [positions[index] for index in missing], [keys[index] for index in missing]
        start = 0
        for end in range(1, len(keys) + 1):
            if end == len(keys) or end - start == RUN_BLOCKS or positions[end] != positions[end - 1] + 1:
                self._add_run(req, group, positions[start], keys[start:end])
                start = end
        while (oldest := self.snapshots.oldest_beyond_bound()) is not None:
            self._shorten(oldest)
            self.snapshots.drop(oldest)

    def _add_run(self, req: EngineRequest, group: OffloadGroup, first_block: int, keys: Sequence[OffloadKey]) -> None:
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
            group_idx=group.engine_idx,
            kind=kind,
            window=window,
            lora_id=lora_id,
            lora_name=lora_name,
            session_id=getattr(req, "session_id", None),
        )
        self._announce(run)
        kept = self.described_runs
        if kept is not None and not self.held.keys().isdisjoint(keys):
            bits = sum(tier.bits for tier in self._tiers.values() if tier.ownership == kept.tier)
            run.lasting = sum(1 << index for index, key in enumerate(keys) if self.held.get(key, 0) & bits)
            if run.lasting:
                kept.add(run)

    def restore(self, run: Run) -> list[Run]:
        """Describe the blocks of ``run`` that tiers announced by their hash only; return the parts in use.

        Args:
            run: blocks that the last engine announced.
        """
        held, snapshots = self.held, self.snapshots
        names = [get_offload_block_hash(key) for key in run.keys]
        own = names if self._external is None else [self._external(name) for name in names]
        announced = run.hashes[run.factor - 1 :: run.factor]
        if (run.lora_name is None and own != announced) or type(own[0]) is not type(announced[0]):
            return []
        if run.lookahead != self._engine.lookahead_tokens or 2 * snapshots.tokens > snapshots.max_tokens:
            return []
        run.lasting = (1 << len(run.keys)) - 1
        parts = run.parts([key in held and key not in snapshots for key in run.keys])
        for part in parts:
            self._announce(part)
            self.restored += len(part.keys)
        return parts

    def _announce(self, run: Run) -> None:
        """Take the snapshots of ``run``, and announce its tokens where a tier holds its blocks without."""
        self.snapshots.add(run)
        held = self.held
        if held.keys().isdisjoint(run.keys):
            return
        for tier in self._tiers.values():
            bare = [(index, key) for index, key in enumerate(run.keys) if held.get(key, 0) & tier.bare]
            if bare:
                hashes = [self._announced_hash(key, tier, held[key]) for _, key in bare]
                self._queued.append(BlockRemoved(hashes, tier.medium, run.group_idx, tier.locality, tier.ownership))
                self._queued += [_described(run, index, tier) for index, _ in bare]
                for _, key in bare:
                    held[key] = held[key] & ~tier.bits | tier.described

    def _shorten(self, run: Run) -> None:
        """Announce the blocks of ``run`` by their own hash only, before the run is dropped.

        Without the run, the other hashes could not be removed when the blocks are removed.
        """
        for index, key in self.snapshots.used(run):
            if run.factor == 1 and self._own_hash(key) == run.hashes[index]:
                continue
            for tier in self._tiers.values():
                holders = self.held.get(key, 0)
                if holders & tier.described:
                    self.held[key] = (
                        holders & ~tier.bits | tier.bare | (tier.translated if self._is_translated(key) else 0)
                    )
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
        if key not in self.held and key not in self._storing:
            self.snapshots.discard(key)

    def _own_hash(self, key: OffloadKey) -> ExternalHash:
        own = get_offload_block_hash(key)
        if self.own_hashes:
            own = self.own_hashes.get(own, own)
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

    def _is_translated(self, key: OffloadKey) -> bool:
        """Return True if events call a block by the engine's hash, which is not the block's name."""
        known = self.own_hashes
        return known is not None and bool(known) and get_offload_block_hash(key) in known

    def _announced_hash(self, key: OffloadKey, tier: _Tier, holders: int) -> ExternalHash:
        """Return the hash by which a tier has announced a block without its tokens."""
        if holders & tier.translated or not holders & tier.bare:
            return self._own_hash(key)
        name = get_offload_block_hash(key)
        return name if self._external is None else self._external(name)

    def _warn_placeholder(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "some KV events contain only the block's own hash and no tokens: events of groups that keep states, "
                "and events of blocks that were found in a tier until a request uses them"
            )


class _Lookups(NamedTuple):
    """Lookups of a request that is alive."""

    ends: dict[int, int]
    """Number of leading blocks that were looked up, by KV-cache group."""
    unclaimed: list[OffloadKey]
    """Blocks that were found and that no tier had announced."""


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
        run.session_id,
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
