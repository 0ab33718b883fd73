"""Index of a medium with slots that only this tier writes: slots of blocks, free slots, eviction.

Each slot is in exactly one of these states:

- *free*: without a block.
- *written*: reserved by :meth:`SlotIndex.plan_store`.
- *held*: lookups find its block; pinned while it is read.
- *foreign*: the slot holds a block of another namespace or an older epoch. Foreign slots are used before any block of
  this tier is evicted.
- *unseen*: not known yet, because the medium is being recovered or the room is not prepared yet. Unseen slots are
  neither allocated nor found by lookups.
- *retired*: out of use, because the medium had no space for it, or because its device reported an error there (a *bad*
  slot).

All slots are unseen at first. :meth:`SlotIndex.add_free`, :meth:`SlotIndex.add_foreign` and :meth:`SlotIndex.merge`
record their content.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.block_store import Place
from tiering.secondary.contract import PrefixAnswer
from tiering.secondary.index.contract import StorePlan, TierIndex
from tiering.table.block_table import BlockTable
from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows

Sequences = NDArray[np.uint64]
"""Sequence numbers of frames; a larger number was written later."""

EVICT_AT_ONCE = 4096
"""Maximum number of blocks evicted ahead of need in one call, for which the scheduler waits."""

_WRITTEN_NOW = np.uint64(0)
"""Replaces a sequence number; newer than every block from before the start."""


@dataclass(frozen=True, slots=True)
class SlotsSlice:
    """Copy of the index's records of neighbouring slots; one entry per slot."""

    start: int
    """Number of the first slot."""
    keys: RowKeys
    """Key of each slot; None where no block is held or written."""
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
        """Number of slots that the medium can ever have."""
        self.slots = 0
        """Number of slots in use: all except unseen and retired ones."""
        self._table = BlockTable(num_slots, eviction, rows_free=False)
        self._readable = self._table.readable
        self._high = high_watermark
        self._low = low_watermark
        self._shrinking = False
        self._used: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self._tick = 0
        self._is_foreign: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._foreign: Rows = np.empty(0, np.int64)
        self._retired: set[int] = set()
        self._bad: set[int] = set()
        """Slots with a device error: retired, or to be retired once their content is known."""
        self._condemned: set[int] = set()
        """Bad slots that are still being read or written; retired when their I/O has ended."""
        self._borrowed: dict[int, bool] = {}
        """Slots on trial; True for those that were retired before."""
        self.leaving: set[int] = set()
        """Slots that the medium lost during their I/O; unseen once the I/O has ended.

        Writes to these slots do not count.
        """
        self._sequences: Sequences | None = None

    # ----------------------------------------------------------------------------------------------------------- lookup

    def lacking(self, keys: Sequence[OffloadKey], now: float) -> Sequence[OffloadKey] | None:
        """Return those of ``keys`` that are not held.

        During recovery, the result is None unless all keys are held, because unseen slots may hold the others.
        """
        if all(map(self._readable.__contains__, keys)):
            return ()
        return None if self._sequences is not None else self._table.unknown(keys)

    def lookup_prefix(self, keys: Sequence[OffloadKey], now: float) -> PrefixAnswer:
        """Return the number of leading keys that are held, never undecided.

        Keys in slots that are unseen or being written are not found.
        """
        return PrefixAnswer(len(list(takewhile(self._readable.__contains__, keys))), False)

    @property
    def blocks(self) -> int:
        """Number of blocks held."""
        return len(self._readable)

    @property
    def free(self) -> int:
        """Number of slots that can be written without evicting a block of this tier."""
        return self._table.free + len(self._foreign)

    @property
    def retired(self) -> int:
        """Number of slots taken out of use by :meth:`retire_full` because the medium had no space."""
        return len(self._retired - self._bad - self._borrowed.keys())

    @property
    def retired_for_errors(self) -> int:
        return len(self._bad)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        slots = list(map(self._readable.get, keys))
        known = [slot for slot in slots if slot is not None] if None in slots else slots
        if known:
            rows = np.array(known, np.int64)
            self._table.policy.touch(rows)
            self._stamp(rows)

    # ----------------------------------------------------------------------------------------------------------- stores

    def plan_store(self, keys: Sequence[OffloadKey], now: float) -> StorePlan:
        table = self._table
        already_held: list[int] = []
        positions = list(range(len(keys)))
        if not (self._readable.keys().isdisjoint(keys) and table.pending.keys().isdisjoint(keys)):
            already_held = [position for position, key in enumerate(keys) if key in self._readable]
            positions = [
                position for position, key in enumerate(keys) if key not in self._readable and key not in table.pending
            ]
        held = np.array([self._readable[keys[position]] for position in already_held], np.int64)
        if len(held):
            table.pin(held)
        del positions[table.room + len(self._foreign) :]
        evicted = self._make_room(len(positions))
        chosen = [keys[position] for position in positions] if len(positions) < len(keys) else keys
        allocated = table.allocate(chosen)
        if len(held):
            table.unpin(held)
        if allocated is None:
            return StorePlan([], [], already_held, evicted)
        return StorePlan(positions, allocated[0].tolist(), already_held, evicted + allocated[1])

    def end_store(
        self, keys: Sequence[OffloadKey], places: Sequence[Place], stored: Sequence[bool], now: float
    ) -> None:
        self._end_store(keys, places, stored)
        if self.leaving:
            self._let_leave(places)

    def _end_store(self, keys: Sequence[OffloadKey], places: Sequence[Place], stored: Sequence[bool]) -> None:
        table = self._table
        rows = np.array(places, np.int64)
        good = np.array(stored, np.bool_)
        if table.any_quarantined(places):
            orphaned = np.array(
                [table.is_quarantined(row) and row not in self._retired for row in rows.tolist()], np.bool_
            )
            if orphaned.any():
                table.end_writing(rows[orphaned])
            mine = ~orphaned & np.array([row not in self._retired for row in rows.tolist()], np.bool_)
            keys = [keys[position] for position in np.flatnonzero(mine).tolist()]
            rows, good = rows[mine], good[mine]
        self._commit(
            [keys[position] for position in np.flatnonzero(good).tolist()] if not good.all() else keys, rows[good]
        )
        if not good.all():
            table.abort([keys[position] for position in np.flatnonzero(~good).tolist()], rows[~good])
        self._retire_condemned()

    def _commit(self, keys: Sequence[OffloadKey], rows: Rows) -> None:
        if not len(rows):
            return
        self._table.commit(keys, rows)
        self._stamp(rows)
        if self._sequences is not None:
            self._sequences[rows] = _WRITTEN_NOW

    def _make_room(self, count: int) -> list[OffloadKey]:
        """Free ``count`` slots as far as possible, keep the high watermark, and return the evicted keys."""
        table = self._table
        occupied = self.slots - table.free - len(self._foreign)
        if occupied + count > self._high * self.slots:
            self._shrinking = True
        excess = occupied + count - int(self._low * self.slots) if self._shrinking else 0
        if excess <= EVICT_AT_ONCE:
            self._shrinking = False
        missing = count - table.free
        if missing > 0 and len(self._foreign):
            self._use_foreign(missing)
            missing = count - table.free
        needed = max(min(excess, EVICT_AT_ONCE), missing)
        return table.evict(needed) if needed > 0 else []

    def _use_foreign(self, count: int) -> None:
        rows, self._foreign = self._foreign[:count], self._foreign[count:]
        self._is_foreign[rows] = False
        self._table.add_free(rows)

    def _stamp(self, rows: Rows) -> None:
        self._tick += len(rows)
        self._used[rows] = np.arange(self._tick, self._tick - len(rows), -1)

    # ------------------------------------------------------------------------------------------------------------ loads

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
        self._retire_condemned()
        self._let_leave(places)
        return gone

    # --------------------------------------------------------------------------------------------- content of the slots

    def clear(self) -> list[OffloadKey]:
        return self._table.clear()

    def add_free(self, slots: Rows) -> None:
        """Record that unseen ``slots`` are empty; the first is allocated first."""
        slots = slots[self._usable(slots)]
        self.slots += len(slots)
        self._table.add_free(slots)

    def add_foreign(self, slots: Rows) -> None:
        """Record that unseen ``slots`` hold blocks that this tier may not read."""
        slots = slots[self._usable(slots)]
        self.slots += len(slots)
        self._is_foreign[slots] = True
        self._foreign = np.concatenate((self._foreign, slots))

    def _usable(self, slots: Rows) -> NDArray[np.bool_]:
        """Return a mask of the unseen ``slots`` that are not bad; the bad ones become retired."""
        if not self._bad:
            return np.ones(len(slots), np.bool_)
        good = np.array([slot not in self._bad for slot in slots.tolist()], np.bool_)
        self._table.withhold(slots[~good])
        self._retired.update(slots[~good].tolist())
        return good

    def begin_recovery(self) -> None:
        """Begin recovery: :meth:`merge` will add blocks found on the medium."""
        self._sequences = np.zeros(self.num_slots, np.uint64)

    def end_recovery(self) -> None:
        """End recovery: no further blocks will be merged."""
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
        usable = self._usable(slots)
        if not usable.all():
            keys = [keys[position] for position in np.flatnonzero(usable).tolist()]
            slots, sequences = slots[usable], sequences[usable]
        self.slots += len(slots)
        stored = self._sequences
        if stored is None or (self._readable.keys().isdisjoint(keys) and table.pending.keys().isdisjoint(keys)):
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
        self._stamp(slots)
        if self._sequences is not None:
            self._sequences[slots] = sequences

    # ---------------------------------------------------------------------------------------------------- retired slots

    def retire_full(self, keys: Sequence[OffloadKey], slots: Rows) -> None:
        """Take slots for which the medium has no space out of use.

        Call this method before :meth:`end_store` of the same slots.

        Args:
            keys: keys for which the slots were planned, co-indexed.
            slots: slots whose write is about to end.
        """
        fresh = [position for position, slot in enumerate(slots.tolist()) if not self._table.is_quarantined(slot)]
        self._table.disown([keys[position] for position in fresh], slots[fresh])
        self._retired.update(slots[fresh].tolist())
        self.slots -= len(fresh)

    def restore_full(self) -> int:
        """Take the slots that :meth:`retire_full` retired back into use, and return how many there are."""
        return self._restore(self._retired - self._bad - self._borrowed.keys())

    def retire(self, places: Sequence[Place]) -> list[OffloadKey]:
        """Take slots with a device error out of use until :meth:`restore`, and return the keys held there.

        The blocks in these slots are dropped. A slot that is being read is out of use once the read has ended, and an
        unseen slot once its content is known. Call this method before :meth:`end_store` or :meth:`end_load` of the
        failed job.
        """
        table = self._table
        gone: list[OffloadKey] = []
        idle: list[int] = []
        for slot in [place for place in places if isinstance(place, int) and 0 <= place < self.num_slots]:
            if slot in self.leaving:
                continue
            self._bad.add(slot)
            if slot in self._retired:
                continue
            key = table.keys[slot]
            if self._is_foreign[slot]:
                self._foreign = self._foreign[self._foreign != slot]
                self._is_foreign[slot] = False
                table.withhold(np.array([slot]))
                self._count_out(slot)
            elif key is not None and table.pending.get(key) == slot:
                # Its writer may still run: the slot is out of use for good once the write has ended.
                table.disown([key], np.array([slot]))
                self._condemned.add(slot)
            else:
                if key is not None and self._readable.get(key) == slot:
                    gone += table.drop([key])
                if table.is_quarantined(slot):
                    self._condemned.add(slot)
                else:
                    idle.append(slot)
        self._withdraw(idle)
        return gone

    @property
    def revoked(self) -> Collection[Place]:
        """Slots whose writes do not count, however they end.

        The medium has lost these slots, or the device has reported an error there.
        """
        return self.leaving | self._bad if self._bad else self.leaving

    def mark_bad(self, slots: Sequence[int]) -> None:
        """Mark unseen slots as bad; they are retired once their content is known."""
        self._bad.update(slot for slot in slots if 0 <= slot < self.num_slots)

    def idle_bad(self, slots: Iterable[int]) -> list[int]:
        """Return those of ``slots`` that are retired as bad: no job reads or writes them, and they are empty."""
        return [slot for slot in slots if slot in self._bad and slot in self._retired and slot not in self._borrowed]

    def restore(self, slots: Iterable[int]) -> None:
        """Free slots named by :meth:`idle_bad` that could be written and read again."""
        good = self._bad.intersection(slots)
        self._bad -= good
        self._restore(self._retired & good)

    def _count_out(self, slot: int) -> None:
        self._retired.add(slot)
        self.slots -= 1

    def _retire_condemned(self) -> None:
        """Retire bad slots whose I/O has ended, before they are allocated again."""
        if self._condemned:
            idle = [slot for slot in self._condemned if not self._table.is_quarantined(slot)]
            self._condemned.difference_update(idle)
            self._withdraw(idle)

    def _withdraw(self, slots: list[int]) -> None:
        """Retire those of ``slots`` that are free; the others are unseen."""
        if slots:
            for slot in self._table.withdraw(np.array(slots, np.int64)).tolist():
                self._count_out(slot)

    def _restore(self, chosen: set[int]) -> int:
        slots = np.fromiter(chosen, np.int64, len(chosen))
        self._retired -= chosen
        self._table.end_writing(np.sort(slots))
        self.slots += len(slots)
        return len(slots)

    # ----------------------------------------------------------------------------------------------------------- trials

    def sample(self, count: int) -> list[tuple[OffloadKey, Place]]:
        if not self._readable:
            return []
        slots = np.random.default_rng().integers(0, self.num_slots, 16 * count).tolist()
        found: list[tuple[OffloadKey, Place]] = []
        for slot in slots:
            key = self._table.keys[slot]
            if key is not None and self._readable.get(key) == slot and len(found) < count:
                found.append((key, slot))
        return found or list(islice(self._readable.items(), count))

    def borrow(self, count: int) -> list[Place]:
        """Return slots for a trial; those retired for lack of space come first, because the trial tests them."""
        retired = sorted(self._retired - self._bad - self._borrowed.keys())[:count]
        self._borrowed.update(dict.fromkeys(retired, True))
        free = self._table.take_free(count - len(retired)).tolist()
        self._borrowed.update(dict.fromkeys(free, False))
        for slot in free:
            self._count_out(slot)
        places: list[Place] = [*retired, *free]
        return places

    def give_back(self, good: Sequence[Place]) -> None:
        borrowed, self._borrowed = self._borrowed, {}
        lost = self.leaving & borrowed.keys()
        self.leaving -= lost
        self._retired -= lost
        self._table.forget(np.array(sorted(lost), np.int64))
        borrowed = {slot: retired for slot, retired in borrowed.items() if slot not in lost}
        self._restore(
            {slot for slot, retired in borrowed.items() if (not retired or slot in good) and slot not in self._bad}
        )

    # ----------------------------------------------------------------------------------------- slots lost by the medium

    def lose(self, start: int, stop: int) -> list[OffloadKey]:
        """Mark slots [start, stop), which the medium has lost, as unseen, and return the keys held there.

        Slots that are read or written now are unseen once that I/O has ended; :attr:`leaving` lists them.
        """
        table = self._table
        keys = [key for key in table.keys[start:stop].tolist() if key is not None]
        held = table.drop([key for key in keys if start <= self._readable.get(key, -1) < stop])
        written = [key for key in keys if start <= table.pending.get(key, -1) < stop]
        table.disown(written, np.array([table.pending[key] for key in written], np.int64))
        retired = self._retired.intersection(range(start, stop)) - self._borrowed.keys()
        self._retired -= retired
        table.forget(np.array(sorted(retired), np.int64))
        self._condemned.difference_update(range(start, stop))
        self._bad.difference_update(range(start, stop))
        busy = {slot for slot in range(start, stop) if table.is_quarantined(slot)} - self.leaving
        self.leaving |= busy
        is_foreign = (self._foreign >= start) & (self._foreign < stop)
        self._foreign = self._foreign[~is_foreign]
        self._is_foreign[start:stop] = False
        free = table.withdraw(np.arange(start, stop))
        table.forget(free)
        self.slots -= len(free) + int(np.count_nonzero(is_foreign)) + len(busy - self._borrowed.keys())
        return held

    def _let_leave(self, places: Sequence[Place]) -> None:
        """Mark those of ``places`` that the medium has lost as unseen: their I/O has ended."""
        if not self.leaving:
            return
        ended = [slot for slot in places if slot in self.leaving and not self._table.is_quarantined(int(slot))]
        self._table.forget(self._table.withdraw(np.array(ended, np.int64)))
        self.leaving.difference_update(ended)

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def slice(self, start: int, stop: int) -> SlotsSlice:
        """Return a copy of the records of slots [start, stop), at the cost of a few array copies."""
        table = self._table
        keys = table.keys[start:stop].copy()
        refs: RefCounts = table.refs[start:stop]
        if table.quarantined:
            for slot in np.flatnonzero(refs > 0).tolist():
                if table.is_quarantined(start + slot):
                    keys[slot] = None
        return SlotsSlice(start, keys, refs < 0, self._used[start:stop].copy(), self._is_foreign[start:stop].copy())
