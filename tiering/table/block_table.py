"""The table of blocks on a medium that one process owns: key → row, reference counts, eviction.

All operations work in batches. The primary tier keeps its rows in such a table, a local tier its slots. The scheduler's
thread owns the table, so there are no locks. A block costs a bytes key and an int in a dict, and some bytes in arrays;
the garbage collector tracks none of them.

A row's life, by its reference count::

           allocate           commit               pin
    FREE ------------> -1 -------------> 0 <----------------> n readers
     ^               WRITING             |        unpin           |
     |                 |  |              |                        |
     +------ abort ----+  |              |                        |
     +------ allocate for another key, evict, drop, clear         |
     |                    |                                       |
     |                    | disown, clear                         | drop, clear
     |                    v                                       |
     +-- end_writing, -- quarantined: no key leads to the row <---+
         last unpin           |
                              +--- adopt: its writer has succeeded ---> 0

``allocate`` takes evictable rows (0) where free ones do not suffice. A row that is read or written is never free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tiering.api.hints import KeptBlocks
from tiering.errors import ConfigError
from tiering.table.disposal import DISPOSAL
from tiering.table.free_rows import FREE, NO_ROWS, UNSEEN, WRITING, FreeRows
from tiering.table.key_rows import KeyRows, Keys
from tiering.table.marks import RowMarks
from tiering.table.policies.builtin import load_policy
from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows, distinct
from tiering.table.row_array import row_array

MAX_ROWS = 1 << 29
"""Largest number of rows in a table. Row numbers have 32 bits.

The data of this many blocks takes about 100 GB of memory when the table is full.
"""

_FEW_PINS = 16384


class BlockTable:
    """The index of blocks by row, with reference counts, free rows and eviction.

    Rows that are being read or written during :meth:`clear` are *quarantined*. No key leads to such a row, and the row
    becomes free when its last reader or its writer is done.

    No method takes long with millions of rows. :meth:`clear` gives the dictionaries away. The free rows of a new or
    cleared table are found in pieces, when they are needed (:mod:`tiering.table.free_rows`).

    Args:
        num_rows: number of rows.
        eviction: an eviction policy's name or class; default "lru".
        rows_free: True (default): all rows are free. False: no row is free until :meth:`add_free`.

    Raises:
        ConfigError: the number of rows is 0 or exceeds :data:`MAX_ROWS`, or the policy is unknown.
    """

    __slots__ = (
        "_many_pins",
        "_pinned",
        "_pins",
        "_quarantined",
        "evictable",
        "free_rows",
        "keys",
        "marks",
        "num_rows",
        "pending",
        "policy",
        "readable",
        "refs",
    )

    def __init__(self, num_rows: int, eviction: str | type[EvictionPolicy] = "lru", *, rows_free: bool = True) -> None:
        if num_rows <= 0:
            raise ConfigError(f"a table of {num_rows} rows holds nothing")
        if num_rows > MAX_ROWS:
            raise ConfigError(
                f"room for {num_rows} blocks is more than a tier can keep track of ({MAX_ROWS}): "
                "lower its capacity, or make blocks larger"
            )
        self.num_rows = num_rows
        self.readable = KeyRows(num_rows)
        """Key → row of the blocks that may be read.

        Only the table's methods change it; the owner's hot paths read it.
        """
        self.pending: dict[bytes, int] = {}
        """Key → row of the blocks that are being written. Only the table's methods change it."""
        self.refs: RefCounts = np.full(num_rows, FREE if rows_free else UNSEEN, np.int32)
        """Reference count of each row: 0 evictable, n > 0 for n readers, -1 being written, -2 free, -3 unseen."""
        self.keys: RowKeys = row_array(num_rows, object)
        """Key of each row; meaningless where no block is."""
        policy = load_policy(eviction) if isinstance(eviction, str) else eviction
        self.policy: EvictionPolicy = policy(num_rows, self.refs, self.keys)
        """The eviction policy."""
        self.evictable = 0
        """Number of rows that could be evicted now."""
        self.marks = RowMarks(self.refs, self.keys, self.policy)
        """The marks on rows that are evicted first, or kept."""
        self.free_rows = FreeRows(self.refs, rows_free=rows_free)
        """The free rows. Only the table's methods change them."""
        self._pins: list[Rows] = []
        """All pinned rows, and others that were pinned lately."""
        self._pinned = 0
        """Number of entries in the list of pinned rows."""
        self._many_pins = _FEW_PINS
        self._quarantined: set[int] = set()

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.free_rows.count

    @property
    def room(self) -> int:
        """Number of rows that :meth:`allocate` could reserve now."""
        return max(0, self.free_rows.count + self.evictable)

    def allocate(self, keys: Sequence[bytes]) -> tuple[Rows, list[bytes]] | None:
        """Reserve a row for each of ``keys``, all unknown at present. The keys are pending from then on.

        Returns:
            The rows, one for each distinct key, and the keys evicted to make room; or None, with nothing changed, if
            there is no room for all.
        """
        count = len(keys)
        free = self.free_rows.count
        if count > free + self.evictable:
            return None
        if DISPOSAL.needs_help:
            DISPOSAL.help(count)
        evicted: list[bytes] = []
        take = min(count, free)
        rows = self.free_rows.take(take) if take else NO_ROWS
        if take < count:
            marks, needed = self.marks, count - take
            victims = marks.choose(needed, self.evictable) if marks.kinds else self.policy.evict(needed)
            evicted = self.keys[victims].tolist()
            self.readable.remove(evicted)
            self.evictable -= len(victims)
            if len(victims) > needed:
                self.add_free(victims[needed:])
                victims = victims[:needed]
            rows = np.concatenate((rows, victims)) if take else victims
        if self.marks.kinds:
            self.marks.taken(rows)
        self.refs[rows] = WRITING
        # An array, because numpy releases the interpreter lock while it assigns a list.
        self.keys[rows] = np.fromiter(keys, object, count)
        known = len(self.pending)
        self.pending.update(zip(keys, rows.tolist(), strict=False))
        if len(self.pending) - known < count:
            rows = self._keep_first_rows(keys, rows)
        return rows, evicted

    def release(self, keys: Sequence[bytes], *, kept: bool = True) -> int:
        """Let the blocks of ``keys`` be evicted first, the last one before all, until they are used again.

        Unknown keys are ignored. A block that is being written goes first as soon as it is readable.

        Args:
            keys: the keys.
            kept: False to leave the blocks alone that are kept (:meth:`keep`); default True.

        Returns:
            The number of released blocks.
        """
        rows = self._known_rows(keys)
        if not kept:
            rows = self.marks.unkept(rows)
        if len(rows):
            self.marks.release(rows)
        return len(rows)

    def keep(self, kept: KeptBlocks, clock: Callable[[], float]) -> int:
        """Keep blocks for a time: others are evicted before them. Unknown keys are ignored.

        Args:
            kept: the blocks, and the bounds.
            clock: monotonic clock in seconds, the same in all calls.

        Returns:
            The number of blocks that are kept, or kept for longer.
        """
        rows = self._known_rows(kept.keys)
        return self.marks.keep(rows, kept, clock) if len(rows) else 0

    def _known_rows(self, keys: Sequence[bytes]) -> Rows:
        """Return the rows of those of ``keys`` that are readable or pending, each once."""
        found = self.readable.rows_or_none(keys)
        if None in found:
            pending = self.pending.get
            found = [pending(key) if row is None else row for key, row in zip(keys, found, strict=True)]
        known = dict.fromkeys(found)
        known.pop(None, None)
        return np.fromiter(cast("Iterable[int]", known), np.int64, len(known))

    def _keep_first_rows(self, keys: Sequence[bytes], rows: Rows) -> Rows:
        """Free all rows but the first of each key, and return the rows that are kept."""
        first = dict(zip(reversed(keys), reversed(rows.tolist()), strict=True))
        kept = np.fromiter(map(first.__getitem__, dict.fromkeys(keys)), np.int64, len(first))
        self.pending.update(first)
        self.add_free(rows[np.fromiter(map(first.__getitem__, keys), np.int64, len(keys)) != rows])
        return kept

    def commit(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Make pending ``keys`` readable, because their ``rows`` are written.

        They become the most recent blocks, the first of ``keys`` above all others.
        """
        deque(map(self.pending.__delitem__, keys), maxlen=0)
        self.readable.put(keys, rows.tolist())
        self.refs[rows] = 0
        self.evictable += len(rows)
        self.policy.insert(rows)
        if self.marks.kinds:
            self.marks.unread(rows)

    def abort(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Free the ``rows`` of pending ``keys``, because their write failed."""
        deque(map(self.pending.__delitem__, keys), maxlen=0)
        self.add_free(rows)

    def disown(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Quarantine rows that are still being written until :meth:`end_writing`.

        No request waits for these blocks any more.

        Args:
            keys: pending keys; they become unknown at once.
            rows: row of each key.
        """
        deque(map(self.pending.__delitem__, keys), maxlen=0)
        self._quarantined.update(rows.tolist())

    def is_quarantined(self, row: int) -> bool:
        """Return True if ``row`` becomes free only when its last reader or writer is done."""
        return row in self._quarantined

    def has_block(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return a mask of the rows [start, stop) whose blocks are readable or being written."""
        refs = self.refs[start:stop]
        mask: NDArray[np.bool_] = (refs >= WRITING) & ~self.free_rows.mask(start, stop)
        if self._quarantined:
            for row in np.flatnonzero(mask & (refs != 0)).tolist():
                if start + row in self._quarantined:
                    mask[row] = False
        return mask

    def readable_in(self, start: int, stop: int) -> list[bytes]:
        """Return the keys of the readable blocks in the rows [start, stop)."""
        held = self.has_block(start, stop) & (self.refs[start:stop] >= 0)
        keys: list[bytes] = self.keys[start:stop][held].tolist()
        return keys

    def quarantined_in(self, start: int, stop: int) -> set[int]:
        """Return the rows in [start, stop) that are in quarantine."""
        return {row for row in self._quarantined if start <= row < stop}

    def any_quarantined(self, rows: Iterable[object]) -> bool:
        """Return True if one of ``rows`` is in quarantine."""
        return bool(self._quarantined) and not self._quarantined.isdisjoint(rows)

    @property
    def quarantined(self) -> int:
        """Number of rows in quarantine."""
        return len(self._quarantined)

    def withdraw(self, rows: Rows) -> Rows:
        """Move the free ones among ``rows`` into quarantine until :meth:`end_writing`, and return them."""
        taken = self.free_rows.withdraw(rows)
        self.withhold(taken)
        return taken

    def take_free(self, count: int) -> Rows:
        """Move up to ``count`` free rows into quarantine and return them.

        The chosen rows are among the last that :meth:`allocate` would reserve.
        """
        rows = self.free_rows.withdraw_last(count)
        self.withhold(rows)
        return rows

    def withhold(self, rows: Rows) -> None:
        """Put rows that are in no list of this table into quarantine until :meth:`end_writing`."""
        self.refs[rows] = WRITING
        self._quarantined.update(rows.tolist())

    def forget(self, rows: Rows) -> None:
        """Remove quarantined ``rows`` without reader or writer from every list of this table."""
        self._quarantined.difference_update(rows.tolist())
        self.refs[rows] = UNSEEN
        self.keys[rows] = None

    def forget_free(self, start: int, stop: int) -> int:
        """Remove the free rows in [start, stop) from every list of this table, and return how many there were."""
        return self.free_rows.forget(start, stop)

    def end_writing(self, rows: Rows) -> None:
        """Free quarantined ``rows``, because their writers are done."""
        self._quarantined.difference_update(rows.tolist())
        self.add_free(rows)

    def adopt(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Make quarantined rows readable, because their writers have succeeded.

        Args:
            keys: key of each row; all are unknown at present.
            rows: the quarantined rows.
        """
        self._quarantined.difference_update(rows.tolist())
        self.insert(keys, rows)

    def insert(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Make blocks of a recovered medium readable, as the most recent ones.

        Args:
            keys: key of each row.
            rows: rows that are in no list of this table and contain the blocks already.
        """
        if DISPOSAL.needs_help:
            DISPOSAL.help(len(rows))
        self.free_rows.insert(rows)
        self.keys[rows] = keys
        self.readable.put(keys, rows.tolist())
        self.refs[rows] = 0
        self.evictable += len(rows)
        self.policy.insert(rows)

    def add_free(self, rows: Rows) -> None:
        """Free rows that are in no list of this table; the first is reserved first."""
        self.keys[rows] = None
        self.free_rows.add(rows)

    def pin(self, rows: Rows) -> None:
        """Add one reader to each of ``rows``, which are readable and distinct."""
        refs = self.refs[rows]
        self.evictable -= len(rows) - len(refs.nonzero()[0])  # the method: numpy's functions are written in Python
        self.refs[rows] = refs + 1
        self._pins.append(rows)
        self._pinned += len(rows)
        if self._pinned > self._many_pins:
            self._list_pinned()

    def _list_pinned(self) -> Rows:
        """Return all pinned rows, each once, and forget the others."""
        rows = np.concatenate([NO_ROWS, *self._pins])
        rows = distinct(rows[self.refs[rows] > 0])
        self._pins = [rows]
        self._pinned = len(rows)
        self._many_pins = max(_FEW_PINS, 2 * len(rows))
        return rows

    def unpin(self, rows: Rows) -> None:
        """Remove one reader from each of ``rows``, which are pinned and distinct."""
        refs = self.refs[rows] - 1
        self.refs[rows] = refs
        if len(refs.nonzero()[0]):
            rows = rows[refs == 0]
        if not len(rows):
            return
        if self._quarantined:
            rows = self._leave_quarantine(rows)
        self.evictable += len(rows)
        if self.marks.kinds:
            self.marks.unread(rows)
        self.policy.release(rows)

    def touch(self, keys: Sequence[bytes]) -> tuple[Sequence[bytes], Rows]:
        """Record a use of ``keys``, in the order of a prefix. Keys that are not readable are ignored.

        Returns:
            The readable keys and their rows.
        """
        keys, rows = self._readable_of(keys)
        if len(rows):
            self.policy.touch(rows)
        return keys, rows

    def refresh(self, keys: Sequence[bytes]) -> tuple[Sequence[bytes], Rows]:
        """Make ``keys`` recent, in the order of a prefix, as :meth:`touch` does, without counting a use."""
        keys, rows = self._readable_of(keys)
        if len(rows):
            self.policy.refresh(rows)
        return keys, rows

    def _readable_of(self, keys: Sequence[bytes]) -> tuple[Sequence[bytes], Rows]:
        """Return those of ``keys`` that are readable, each once, and their rows."""
        found = self.readable.rows_or_none(keys)
        if None in found:
            keys = [key for key, row in zip(keys, found, strict=True) if row is not None]
            if not keys:  # most prompts are new
                return (), NO_ROWS
            found = [row for row in found if row is not None]
        if len(set(found)) < len(found):  # policies count the rows that change their lists
            keys, found = list(dict.fromkeys(keys)), list(dict.fromkeys(found))
        rows = np.fromiter(found, np.int64, len(found))
        if self.marks.kinds:
            self.marks.used(rows)
        return keys, rows

    def unknown(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of ``keys`` that are neither readable nor pending."""
        readable, pending = self.readable, self.pending
        if readable.disjoint(keys) and (not pending or pending.keys().isdisjoint(keys)):
            return list(keys)
        return [key for key in keys if key not in readable and key not in pending]

    def drop(self, keys: Sequence[bytes]) -> list[bytes]:
        """Drop lost blocks. Their keys are unknown at once.

        Rows that are being read go into quarantine; the other rows are free.

        Returns:
            The keys that were readable.
        """
        known = self.readable.known(list(dict.fromkeys(keys)))
        if known:
            rows = np.fromiter(self.readable.rows(known), np.int64, len(known))
            self.readable.remove(known)
            self.policy.remove(rows)
            busy = self.refs[rows] != 0
            self._quarantined.update(rows[busy].tolist())
            idle = rows[~busy]
            self.evictable -= len(idle)
            self.add_free(idle)
        return known

    def evict(self, count: int) -> list[bytes]:
        """Evict ``count`` blocks or a few more ahead of need, as far as there are any, and return their keys."""
        count = min(count, self.evictable)
        if not count:
            return []
        rows = self.marks.choose(count, self.evictable)
        evicted: list[bytes] = self.keys[rows].tolist()
        self.readable.remove(evicted)
        self.evictable -= len(rows)
        self.add_free(np.sort(rows))
        return evicted

    def clear(self) -> list[Keys]:
        """Drop every block, and quarantine the rows that are being read or written.

        Returns:
            The dictionaries of the keys that were readable. The caller passes them on or has them freed
            (:data:`tiering.table.disposal.DISPOSAL`), because dropping them takes long.
        """
        self._quarantined.update(self._list_pinned().tolist())
        self._quarantined.update(self.pending.values())
        self.pending.clear()
        self.free_rows.begin_sweep(self.free + self.evictable)
        self.evictable = 0
        self.policy.clear()
        self.marks.clear()
        return self.readable.take()

    def rows_of(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the row of each readable key, and None for each other key."""
        return self.readable.rows_or_none(keys)

    def _leave_quarantine(self, rows: Rows) -> Rows:
        """Free those of ``rows`` that are quarantined, and return the others."""
        quarantined = np.fromiter(map(self._quarantined.__contains__, rows.tolist()), np.bool_, len(rows))
        leaving = rows[quarantined]
        if len(leaving):
            self._quarantined.difference_update(leaving.tolist())
            self.add_free(leaving)
        return rows[~quarantined]
