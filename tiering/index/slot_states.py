"""States of the slots that hold no block of this tier: foreign, unseen, and retired slots.

:class:`tiering.index.slots.SlotIndex` describes the states. This module counts the slots in use, and takes
slots out of use: *bad* slots with a device error, slots on trial, and slots that the medium has lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.medium.block_store import Place
from tiering.table.block_table import BlockTable
from tiering.table.policies.policy import Rows
from tiering.table.row_array import row_array


class SlotStates:
    """Foreign, unseen and retired slots of one table. All slots are unseen at first.

    Args:
        table: table of the slots.
        num_slots: number of slots that the medium can ever have.
    """

    def __init__(self, table: BlockTable, num_slots: int) -> None:
        self.in_use = 0
        """Number of slots in use: all except unseen and retired ones."""
        self.leaving: set[int] = set()
        """Slots that the medium lost during their I/O; unseen once the I/O has ended.

        Writes to these slots do not count.
        """
        self._table = table
        self._num_slots = num_slots
        self.foreign = 0
        self._foreign_queue: deque[Rows] = deque()
        """Foreign slots in the order of their use, and slots that are not foreign any more."""
        self.is_foreign: NDArray[np.bool_] = row_array(num_slots, np.bool_)
        self._retired: set[int] = set()
        self.bad: set[int] = set()
        """Slots with a device error: retired, or to be retired once their content is known."""
        self.condemned: set[int] = set()
        """Bad slots that are still being read or written; retired when their I/O has ended."""
        self._borrowed: set[int] = set()

    def add_free(self, slots: Rows) -> None:
        """Record that unseen ``slots`` are empty; the first is allocated first."""
        slots = slots[self.usable(slots)]
        self.in_use += len(slots)
        self._table.add_free(slots)

    def add_foreign(self, slots: Rows) -> None:
        """Record that unseen ``slots`` hold blocks that this tier may not read."""
        slots = slots[self.usable(slots)]
        self.in_use += len(slots)
        self.is_foreign[slots] = True
        self.foreign += len(slots)
        if len(slots):
            self._foreign_queue.append(slots)

    def usable(self, slots: Rows) -> NDArray[np.bool_]:
        """Return a mask of the unseen ``slots`` that are not bad; the bad ones become retired."""
        if not self.bad:
            return np.ones(len(slots), np.bool_)
        good = np.array([slot not in self.bad for slot in slots.tolist()], np.bool_)
        self._table.withhold(slots[~good])
        self._retired.update(slots[~good].tolist())
        return good

    def use_foreign(self, count: int) -> None:
        """Free the first ``count`` foreign slots, or all if there are fewer."""
        while count > 0 and self.foreign:
            queued = self._foreign_queue.popleft()
            rows = queued[self.is_foreign[queued]]
            if len(rows) > count:
                self._foreign_queue.appendleft(rows[count:])
                rows = rows[:count]
            self.is_foreign[rows] = False
            self.foreign -= len(rows)
            count -= len(rows)
            self._table.add_free(rows)

    @property
    def revoked(self) -> Collection[Place]:
        """Slots whose writes do not count, however they end.

        The medium has lost these slots, or the device has reported an error there.
        """
        return self.leaving | self.bad if self.bad else self.leaving

    def retire(self, places: Sequence[Place]) -> list[OffloadKey]:
        """Take slots with a device error out of use until :meth:`restore`, and return the keys held there.

        The blocks in these slots are dropped. A slot that is being read is out of use once the read has ended, and an
        unseen slot once its content is known. Call this method before ``SlotIndex.end_store`` or
        ``SlotIndex.end_load`` of the failed job.
        """
        table = self._table
        gone: list[OffloadKey] = []
        idle: list[int] = []
        for slot in [place for place in places if isinstance(place, int) and 0 <= place < self._num_slots]:
            if slot in self.leaving:
                continue
            self.bad.add(slot)
            if slot in self._retired:
                continue
            key = table.keys[slot]
            if self.is_foreign[slot]:
                self.is_foreign[slot] = False
                self.foreign -= 1
                table.withhold(np.array([slot]))
                self._count_out(slot)
            elif key is not None and table.pending.get(key) == slot:
                # Its writer may still run: the slot is out of use for good once the write has ended.
                table.disown([key], np.array([slot]))
                self.condemned.add(slot)
            else:
                if key is not None and table.readable.get(key) == slot:
                    gone += table.drop([key])
                if table.is_quarantined(slot):
                    self.condemned.add(slot)
                else:
                    idle.append(slot)
        self._withdraw(idle)
        return gone

    def mark_bad(self, slots: Sequence[int]) -> None:
        """Mark unseen slots as bad; they are retired once their content is known."""
        self.bad.update(slot for slot in slots if 0 <= slot < self._num_slots)

    def idle_bad(self, slots: Iterable[int]) -> list[int]:
        """Return those of ``slots`` that are retired as bad: no job reads or writes them, and they are empty."""
        return [slot for slot in slots if slot in self.bad and slot in self._retired and slot not in self._borrowed]

    def restore(self, slots: Iterable[int]) -> None:
        """Free slots named by :meth:`idle_bad` that could be written and read again."""
        good = self.bad.intersection(slots)
        self.bad -= good
        self._restore(self._retired & good)

    def _count_out(self, slot: int) -> None:
        self._retired.add(slot)
        self.in_use -= 1

    def _withdraw(self, slots: list[int]) -> None:
        """Retire those of ``slots`` that are free; the others are unseen."""
        if slots:
            for slot in self._table.withdraw(np.array(slots, np.int64)).tolist():
                self._count_out(slot)

    def _restore(self, chosen: set[int]) -> int:
        slots = np.fromiter(chosen, np.int64, len(chosen))
        self._retired -= chosen
        self._table.end_writing(np.sort(slots))
        self.in_use += len(slots)
        return len(slots)

    def borrow(self, count: int) -> list[Place]:
        """Return free slots for a trial."""
        free = self._table.take_free(count).tolist()
        self._borrowed.update(free)
        for slot in free:
            self._count_out(slot)
        return [*free]

    def give_back(self) -> None:
        """End a trial and take all borrowed slots back."""
        borrowed, self._borrowed = self._borrowed, set()
        lost = self.leaving & borrowed
        self.leaving -= lost
        self._retired -= lost
        self._table.forget(np.array(sorted(lost), np.int64))
        self._restore(borrowed - lost - self.bad)

    def fail(self, start: int, stop: int) -> list[OffloadKey]:
        """Fail the blocks in slots [start, stop), whose medium is gone or damaged, and return their keys.

        The slots are unseen from now on.

        Slots that are read or written now are unseen once that I/O has ended; :attr:`leaving` lists them.
        """
        table = self._table
        written = [key for key, slot in table.pending.items() if start <= slot < stop]
        held: list[OffloadKey] = []
        if table.readable:  # not if the index was cleared, because the medium is another one
            held = table.drop(table.readable_in(start, stop))
        table.disown(written, np.array([table.pending[key] for key in written], np.int64))
        retired = _within(self._retired, start, stop) - self._borrowed
        self._retired -= retired
        table.forget(np.array(sorted(retired), np.int64))
        self.condemned -= _within(self.condemned, start, stop)
        self.bad -= _within(self.bad, start, stop)
        busy = table.quarantined_in(start, stop) - self.leaving
        self.leaving |= busy
        foreign = int(np.count_nonzero(self.is_foreign[start:stop]))
        self.is_foreign[start:stop] = False
        self.foreign -= foreign
        self.in_use -= table.forget_free(start, stop) + foreign + len(busy - self._borrowed)
        return held

    def end_io(self, places: Sequence[Place]) -> None:
        """Retire bad slots, and mark lost ones as unseen, whose I/O at ``places`` has ended.

        The index calls this method before these slots can be allocated again.
        """
        if self.condemned:
            idle = [slot for slot in self.condemned if not self._table.is_quarantined(slot)]
            self.condemned.difference_update(idle)
            self._withdraw(idle)
        if self.leaving:
            ended = [slot for slot in places if slot in self.leaving and not self._table.is_quarantined(int(slot))]
            self._table.forget(self._table.withdraw(np.array(ended, np.int64)))
            self.leaving.difference_update(ended)


def _within(slots: set[int], start: int, stop: int) -> set[int]:
    return {slot for slot in slots if start <= slot < stop}
