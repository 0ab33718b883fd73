"""The recency order of rows in batches, and the eviction policy LRU, which evicts in this order.

Every use gives a row a new, larger stamp and appends (row, stamp) to a log. An entry is *live* while its stamp is the
row's present stamp; the least recent row is the first live entry. A use costs one append. Finding a victim costs the
reading of dead entries, each once. A slow sweep over the log drops two dead entries for each entry appended. The log
thus stays within about twice the number of live rows, and no single call takes long. All data is in arrays, without
an object per row.

A pinned row that comes up as a victim is *parked*: it leaves the log, so that it is not examined again and again.
When the row is released, it returns with its old stamp. The order is exact, pinned rows included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiering.table.disposal import DISPOSAL
from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows, StampClock, Stamps, distinct
from tiering.table.row_array import row_array

_CHUNK = 4096
_NO_ROWS: Rows = np.empty(0, np.int64)

_FIRST_LOOK = 32
"""Smallest number of entries that a search for victims looks at first."""

_LONGEST_LOOK = 256
"""Largest number of entries that a search looks at together, unless it needs more rows.

numpy keeps the interpreter lock for so few entries.
"""

_COUNTING: Stamps = np.arange(_CHUNK)


class _Chunk:
    """A part of the log in the order of stamps; entries [start, end) are in use."""

    __slots__ = ("end", "rows", "stamps", "start")

    def __init__(self, rows: NDArray[np.int32], stamps: Stamps, end: int) -> None:
        self.rows = rows
        self.stamps = stamps
        self.start = 0
        self.end = end

    @classmethod
    def empty(cls) -> _Chunk:
        return cls(np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.int64), 0)

    def __len__(self) -> int:
        return self.end - self.start

    def append(self, rows: Rows, stamps: Stamps) -> None:
        """Add entries, for which there is room."""
        end = self.end + len(rows)
        self.rows[self.end : end] = rows
        self.stamps[self.end : end] = stamps
        self.end = end


class RecencyLog:
    """The rows of one list (the only list of LRU; T1 or T2 of ARC) in the order of their last use.

    Attributes:
        size: number of rows in the list, parked rows included.
    """

    __slots__ = ("_chunks", "_clock", "_parked", "_parked_rows", "_position", "_refs", "_returned", "_sweep", "size")

    def __init__(self, clock: StampClock, refs: RefCounts) -> None:
        self._clock = clock
        self._refs = refs
        self._parked: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._chunks: list[_Chunk] = []
        self.clear()

    def clear(self) -> None:
        """Forget every row. Stamps need not be reset, because no entry has them."""
        DISPOSAL.add_array(self._parked)
        self._parked = row_array(len(self._refs), np.bool_)
        DISPOSAL.add([dict(enumerate(self._chunks))])
        self._chunks = [_Chunk.empty()]
        self._sweep = 0
        self._position = 0
        self._parked_rows = 0
        self._returned: list[tuple[Rows, Stamps]] = []
        self.size = 0

    def append(self, rows: Rows) -> None:
        """Move new or known rows to the recent end of the list; the first becomes the most recent."""
        count = len(rows)
        clock = self._clock
        # numpy releases the interpreter lock in arange and in assignments by a reversed index, so an I/O thread would
        # run in the middle of a step. A slice of a constant and a copy of the rows avoid both.
        stamps = _COUNTING[:count] + clock.now if count <= _CHUNK else np.arange(clock.now, clock.now + count)
        clock.now += count
        rows = rows[::-1].copy()
        if self._parked_rows:
            self._unpark(rows)
        clock.stamps[rows] = stamps
        tail = self._chunks[-1]
        while (over := tail.end + len(rows) - _CHUNK) > 0:
            room = len(rows) - over
            tail.append(rows[:room], stamps[:room])
            rows, stamps = rows[room:], stamps[room:]
            tail = _Chunk.empty()
            self._chunks.append(tail)
        tail.append(rows, stamps)
        self._sweep += 2 * count
        if self._sweep >= _CHUNK:
            self._sweep_chunks()

    def take(self, count: int) -> Rows:
        """Remove and return up to ``count`` rows that are not pinned, the least recent first."""
        taken: list[Rows] = []
        missing = count
        if self._returned:
            rows = self._take_returned(missing)
            taken.append(rows)
            missing -= len(rows)
        stamps, look = self._clock.stamps, _FIRST_LOOK
        while missing:
            head = self._chunks[0]
            if head.start == head.end:
                if len(self._chunks) == 1:
                    head.start = head.end = 0
                    break
                del self._chunks[0]
                self._position = max(0, self._position - 1)
                continue
            # Most entries may be dead, so more are looked at than are missing, and those behind the last victim stay.
            stop = min(head.start + max(look, missing), head.end)
            look = min(4 * look, _LONGEST_LOOK)
            rows = head.rows[head.start : stop].astype(np.int64)
            live = (stamps[rows] == head.stamps[head.start : stop]).nonzero()[0]
            if len(live) < len(rows):
                rows = rows[live]
            refs = self._refs[rows]
            if len(refs.nonzero()[0]):
                free = (refs == 0).nonzero()[0][:missing]
                if len(free) == missing:
                    passed = int(free[-1]) + 1
                    stop = head.start + int(live[passed - 1]) + 1
                    self._park(rows[:passed], refs[:passed])
                else:
                    self._park(rows, refs)
                rows = rows[free]
            elif len(rows) > missing:
                stop = head.start + int(live[missing - 1]) + 1
                rows = rows[:missing]
            head.start = stop
            taken.append(rows)
            missing -= len(rows)
        rows = taken[0] if len(taken) == 1 else np.concatenate(taken) if taken else _NO_ROWS
        stamps[rows] = 0
        self.size -= len(rows)
        return rows

    def remove(self, rows: Rows) -> None:
        """Remove rows from the list and clear their stamps."""
        if self._parked_rows:
            self._unpark(rows)
        self._clock.stamps[rows] = 0
        self.size -= len(rows)

    def release(self, rows: Rows) -> None:
        """Make rows candidates again, with their old stamps, if they were parked."""
        if self._parked_rows:
            rows = rows[self._parked[rows]]
            if len(rows) > 1 and len(set(rows.tolist())) < len(rows):
                rows = distinct(rows)  # a row that returned twice would be taken twice
            if len(rows):
                self._parked[rows] = False
                self._parked_rows -= len(rows)
                self._returned.append((rows, self._clock.stamps[rows]))

    def detach(self, rows: Rows) -> None:
        """Remove rows that move to another list. The other list stamps them anew."""
        if self._parked_rows:
            self._unpark(rows)
        self.size -= len(rows)

    def _park(self, rows: Rows, refs: RefCounts) -> None:
        """Take the pinned ones of ``rows`` out of the log; ``refs`` are the reference counts of the rows."""
        pinned = rows[refs != 0]
        self._parked[pinned] = True
        self._parked_rows += len(pinned)

    def _unpark(self, rows: Rows) -> None:
        parked = rows[self._parked[rows]]
        if len(parked):
            self._parked[parked] = False
            self._parked_rows -= len(parked)

    def _take_returned(self, count: int) -> Rows:
        rows, entry_stamps = self._returned[0]
        if len(self._returned) > 1:
            rows = np.concatenate([part for part, _ in self._returned])
            entry_stamps = np.concatenate([part for _, part in self._returned])
        live = self._clock.stamps[rows] == entry_stamps
        if np.count_nonzero(live) < len(live):
            rows, entry_stamps = rows[live], entry_stamps[live]
        refs = self._refs[rows]
        if np.count_nonzero(refs):
            self._park(rows, refs)
            free = refs == 0
            rows, entry_stamps = rows[free], entry_stamps[free]
        order = entry_stamps.argsort()
        keep = order[count:]
        self._returned = [(rows[keep], entry_stamps[keep])] if len(keep) else []
        oldest: Rows = rows[order[:count]]
        return oldest

    def _sweep_chunks(self) -> None:
        """Drop the dead entries of the next chunks, and join neighbours that fit into one chunk.

        The last chunk is left out, because new entries are appended to it.
        """
        stamps = self._clock.stamps
        while self._sweep >= _CHUNK:
            self._sweep -= _CHUNK
            index = self._position
            if index >= len(self._chunks) - 1:
                self._position = 0
                continue
            chunk = self._chunks[index]
            rows = chunk.rows[chunk.start : chunk.end]
            entry_stamps = chunk.stamps[chunk.start : chunk.end]
            live = stamps[rows] == entry_stamps
            rows, entry_stamps = rows[live], entry_stamps[live]
            before = self._chunks[index - 1] if index else None
            if before is not None and len(before) + len(rows) <= _CHUNK:
                rows = np.concatenate((before.rows[before.start : before.end], rows))
                entry_stamps = np.concatenate((before.stamps[before.start : before.end], entry_stamps))
                del self._chunks[index]
                index -= 1
            self._chunks[index] = _Chunk(rows, entry_stamps, len(rows))
            self._position = index + 1


class LRUEvictionPolicy(EvictionPolicy):
    """The policy LRU, least recently used: evicts the row whose last use is the oldest."""

    def __init__(self, num_rows: int, refs: RefCounts, keys: RowKeys) -> None:
        super().__init__(num_rows, refs, keys)
        self._log = RecencyLog(self.clock, refs)

    def insert(self, rows: Rows) -> None:
        self._log.append(rows)
        self._log.size += len(rows)

    def touch(self, rows: Rows) -> None:
        self._log.append(rows)

    def evict(self, count: int) -> Rows:
        return self._log.take(count)

    def remove(self, rows: Rows) -> None:
        self._log.remove(rows)

    def release(self, rows: Rows) -> None:
        self._log.release(rows)

    def clear(self) -> None:
        self._log.clear()
