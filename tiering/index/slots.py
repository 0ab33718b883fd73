"""Index of a medium with slots that only this tier writes: slots of blocks, free slots, eviction.

Each slot is in exactly one of these states:

- *free*: without a block.
- *written*: reserved by :meth:`SlotIndex.plan_store`.
- *held*: lookups find its block; pinned while it is read.
- *foreign*: the slot holds a block of another namespace or an older epoch. Foreign slots are used before any block of
  this tier is evicted.
- *unseen*: not known yet, because the medium is being recovered or the room is not prepared yet. Unseen slots are
  neither allocated nor found by lookups.
- *retired*: out of use, because its device reported an error there (a *bad* slot), or on trial.

All slots are unseen at first. :meth:`SlotIndex.add_free`, :meth:`SlotIndex.merge` and ``SlotIndex.states`` record
their content. Slots that hold no block of this tier are in :mod:`tiering.index.slot_states`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import compress, islice
from operator import not_

import numpy as np
from numpy.typing import NDArray

from tiering.api.hints import KeptBlocks
from tiering.api.keys import OffloadKey
from tiering.index.slot_states import SlotStates
from tiering.index.tier_index import StorePlan, TierIndex
from tiering.medium.block_store import Place
from tiering.secondary.contract import PrefixAnswer
from tiering.table.block_table import BlockTable
from tiering.table.disposal import DISPOSAL, Table
from tiering.table.free_rows import WRITING
from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows
from tiering.table.row_array import row_array

Sequences = NDArray[np.uint64]
"""Sequence numbers of frames; a larger number was written later."""

EVICT_AT_ONCE = 4096
"""Maximum number of blocks evicted ahead of need in one call, for which the scheduler waits."""

_NONE_HELD = PrefixAnswer(0, False)

_WRITTEN_NOW = np.uint64(0)
"""Replaces a sequence number; newer than every block from before the start."""


@dataclass(frozen=True, slots=True)
class SlotsSlice:
    """Copy of the index's records of neighbouring slots; one entry per slot."""

    start: int
    keys: RowKeys
    """Key of each slot; None where no block is held or written."""
    held: NDArray[np.bool_]
    """True where a block is held."""
    written: NDArray[np.bool_]
    """True where a write is under way, so that only the medium knows the content."""
    used: NDArray[np.int64]
    """Number that grows with the last use."""
    foreign: NDArray[np.bool_]
    """True for foreign slots (see the module)."""


class SlotIndex(TierIndex):
    """Keys and slots of one medium, owned by the scheduler's thread.

    Eviction proceeds in large batches, because neighbours that are evicted together are written together.

    Args:
        num_slots: number of slots that the medium can ever have.
        eviction: eviction policy, or its name in a stack file; default "lru".
        high_watermark: share of the slots in use above which eviction begins; default 1.
        low_watermark: share of the slots in use at which eviction ends; default 1.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        eviction: str | type[EvictionPolicy] = "lru",
        high_watermark: float = 1.0,
        low_watermark: float = 1.0,
    ) -> None:
        self.num_slots = num_slots
        self._table = BlockTable(num_slots, eviction, rows_free=False)
        self._readable = self._table.readable
        self.held: Set[OffloadKey] = self._readable.keys()
        """Keys of the blocks held; a view that follows the index."""
        self.states = SlotStates(self._table, num_slots)
        """Slots that hold no block of this tier."""
        self._high = high_watermark
        self._low = low_watermark
        self._shrinking = False
        self.growing = False
        """True while the medium prepares more slots: no block is evicted, and blocks without one are declined."""
        self._sequences: Sequences | None = None

    def lacking(self, keys: Sequence[OffloadKey], now: float) -> Sequence[OffloadKey] | None:
        """Return those of ``keys`` that are not held.

        During recovery, the result is None unless all keys are held, because unseen slots may hold the others.
        """
        if self._readable.leading(keys) == len(keys):
            return ()
        return None if self._sequences is not None else self._table.unknown(keys)

    def lookup_prefix(self, keys: Sequence[OffloadKey], now: float) -> PrefixAnswer:
        """Return the number of leading keys that are held, never undecided.

        Keys in slots that are unseen or being written are not found.
        """
        readable = self._readable
        if not keys or keys[0] not in readable:
            return _NONE_HELD
        return PrefixAnswer(readable.leading(keys), False)

    @property
    def blocks(self) -> int:
        """Number of blocks held."""
        return len(self._readable)

    @property
    def slots(self) -> int:
        """Number of slots in use: all except unseen and retired ones."""
        return self.states.in_use

    @property
    def free(self) -> int:
        """Number of slots that can be written without evicting a block of this tier."""
        return self._table.free + self.states.foreign

    def touch(self, keys: Sequence[OffloadKey], used: bool = True) -> None:
        if used:
            self._table.touch(keys)
        else:
            self._table.refresh(keys)

    def release(self, keys: Sequence[OffloadKey]) -> None:
        self._table.release(keys)

    def keep(self, kept: KeptBlocks, clock: Callable[[], float]) -> None:
        self._table.keep(kept, clock)

    @property
    def places_ready(self) -> float:
        return self.free if self.growing else math.inf

    def plan_store(self, keys: Sequence[OffloadKey], now: float) -> StorePlan:
        table = self._table
        readable, pending = self._readable, table.pending
        already_held: list[int] = []
        held: Rows | None = None
        if readable.disjoint(keys) and (not pending or pending.keys().isdisjoint(keys)):
            positions = list(range(len(keys)))
        else:
            already_held = [position for position, key in enumerate(keys) if key in readable]
            positions = [position for position, key in enumerate(keys) if key not in readable and key not in pending]
            if already_held:
                held = np.array([readable[keys[position]] for position in already_held], np.int64)
                table.pin(held)
        del positions[self.free if self.growing else table.room + self.states.foreign :]
        evicted = self._make_room(len(positions))
        chosen = [keys[position] for position in positions] if len(positions) < len(keys) else keys
        allocated = table.allocate(chosen)
        if held is not None:
            table.unpin(held)
        if allocated is None:
            return StorePlan([], [], already_held, evicted)
        return StorePlan(positions, allocated[0].tolist(), already_held, evicted + allocated[1])

    def end_store(
        self, keys: Sequence[OffloadKey], places: Sequence[Place], stored: Sequence[bool], now: float
    ) -> None:
        table = self._table
        rows = np.array(places, np.int64)
        if table.any_quarantined(places):
            orphaned = np.array([table.is_quarantined(row) for row in rows.tolist()], np.bool_)
            table.end_writing(rows[orphaned])
            keys, stored = list(compress(keys, ~orphaned)), list(compress(stored, ~orphaned))
            rows = rows[~orphaned]
        if False in stored:
            good = np.array(stored, np.bool_)
            table.abort(list(compress(keys, map(not_, stored))), rows[~good])
            keys, rows = list(compress(keys, stored)), rows[good]
        if len(rows):
            table.commit(keys, rows)
            if self._sequences is not None:
                self._sequences[rows] = _WRITTEN_NOW
        if self.states.leaving or self.states.condemned:
            self.states.end_io(places)

    def _make_room(self, count: int) -> list[OffloadKey]:
        """Free ``count`` slots as far as possible, keep the high watermark, and return the evicted keys."""
        table = self._table
        foreign = self.states.foreign
        occupied = self.states.in_use - table.free - foreign
        # The watermarks are shares of all slots that the medium will have.
        slots = self.num_slots if self.growing else self.states.in_use
        if occupied + count > self._high * slots:
            self._shrinking = True
        excess = occupied + count - int(self._low * slots) if self._shrinking else 0
        if excess <= EVICT_AT_ONCE:
            self._shrinking = False
        missing = count - table.free
        if missing > 0 and foreign:
            self.states.use_foreign(missing)
            missing = count - table.free
        needed = max(min(excess, EVICT_AT_ONCE), missing)
        return table.evict(needed) if needed > 0 else []

    def begin_load(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        slots = self._table.rows_of(keys)
        known = [slot for slot in slots if slot is not None] if None in slots else slots
        if known:
            self._table.pin(np.array(known, np.int64))
        places: list[Place | None] = []
        places.extend(slots)
        return places

    def end_load(
        self, keys: Sequence[OffloadKey], places: Sequence[Place], lost: Sequence[bool], now: float
    ) -> list[OffloadKey]:
        self._table.unpin(np.array(places, np.int64))
        gone: list[OffloadKey] = []
        if any(lost):
            gone = [
                key
                for key, place, bad in zip(keys, places, lost, strict=True)
                if bad and self._readable.get(key) == place
            ]
            gone = self._table.drop(gone)
        if self.states.leaving or self.states.condemned:
            self.states.end_io(places)
        return gone

    def clear(self) -> Sequence[Table]:
        return self._table.clear()

    def add_free(self, slots: Rows) -> None:
        """Record that unseen ``slots`` are empty; the first is allocated first."""
        self.states.add_free(slots)

    def begin_recovery(self) -> None:
        """Begin recovery: :meth:`merge` will add blocks found on the medium."""
        self._sequences = row_array(self.num_slots, np.uint64)

    def end_recovery(self) -> None:
        """End recovery: no further blocks will be merged."""
        if self._sequences is not None:
            DISPOSAL.add_array(self._sequences)
            self._sequences = None

    def merge(self, keys: Sequence[OffloadKey], slots: Rows, sequences: Sequences) -> list[OffloadKey]:
        """Add recovered blocks in unseen slots, and return the keys that are held now and were not before.

        Of two slots with one key, the higher sequence number wins. Blocks written since the start win over both. The
        other slot is free.

        Args:
            keys: keys of the blocks, each once; the first is the most recent.
            slots: slot of each block.
            sequences: sequence number of each block's frame.
        """
        table = self._table
        usable = self.states.usable(slots)
        if not usable.all():
            keys = [keys[position] for position in np.flatnonzero(usable).tolist()]
            slots, sequences = slots[usable], sequences[usable]
        self.states.in_use += len(slots)
        stored = self._sequences
        if stored is None or (self._readable.disjoint(keys) and table.pending.keys().isdisjoint(keys)):
            self._insert(keys, slots, sequences)
            return list(keys)
        winners: list[int] = []
        losers: list[int] = []
        replaced: list[OffloadKey] = []
        for position, key in enumerate(keys):
            present = self._readable.get(key)
            if key in table.pending or (present is not None and not 0 < stored[present] < sequences[position]):
                losers.append(position)
                continue
            winners.append(position)
            if present is not None:
                replaced.append(key)
        table.drop(replaced)
        chosen = [keys[position] for position in winners]
        self._insert(chosen, slots[winners], sequences[winners])
        if losers:
            table.add_free(slots[losers])
        again = set(replaced)
        return [key for key in chosen if key not in again]

    def _insert(self, keys: Sequence[OffloadKey], slots: Rows, sequences: Sequences) -> None:
        if not len(slots):
            return
        self._table.insert(keys, slots)
        if self._sequences is not None:
            self._sequences[slots] = sequences

    def retire(self, places: Sequence[Place]) -> list[OffloadKey]:
        return self.states.retire(places)

    @property
    def retired_for_errors(self) -> int:
        return len(self.states.bad)

    def sample(self, count: int) -> list[tuple[OffloadKey, Place]]:
        if not self._readable:
            return []
        found: list[tuple[OffloadKey, Place]] = []
        for slot in random.choices(range(self.num_slots), k=16 * count):
            key = self._table.keys[slot]
            if key is not None and self._readable.get(key) == slot and len(found) < count:
                found.append((key, slot))
        return found or list(islice(self._readable.items(), count))

    def borrow(self, count: int) -> list[Place]:
        return self.states.borrow(count)

    def give_back(self) -> None:
        self.states.give_back()

    def slice(self, start: int, stop: int) -> SlotsSlice:
        """Return a copy of the records of slots [start, stop), at the cost of a few array copies."""
        table = self._table
        refs: RefCounts = table.refs[start:stop]
        keys = table.keys[start:stop].copy()
        present = table.has_block(start, stop)
        keys[~present] = None
        used, foreign = table.policy.clock.stamps[start:stop].copy(), self.states.is_foreign[start:stop].copy()
        return SlotsSlice(start, keys, present & (refs >= 0), refs == WRITING, used, foreign)
