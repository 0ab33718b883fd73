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

import importlib
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tiering.errors import ConfigError
from tiering.table.disposal import DISPOSAL
from tiering.table.key_rows import KeyRows, Keys
from tiering.table.policies.arc import ARCEvictionPolicy
from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows, distinct
from tiering.table.policies.recency import LRUEvictionPolicy

BUILTIN_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRUEvictionPolicy, "arc": ARCEvictionPolicy}
"""The policies that ship with the project, by name."""

MAX_ROWS = 1 << 29
"""Largest number of rows in a table. Row numbers have 32 bits.

The data of this many blocks takes about 100 GB of memory when the table is full.
"""

WRITING = -1
"""Reference count of a row that is being written. Such a row is neither readable nor evictable."""

FREE = -2
"""Reference count of a free row."""

UNSEEN = -3
"""Reference count of a row in no list of the table."""

SWEEP_ROWS = 4096
"""Rows that are examined together for free ones after :meth:`BlockTable.clear`."""

_FEW_PINS = 16384
_NO_ROWS: Rows = np.empty(0, np.int64)


def load_policy(name: str) -> type[EvictionPolicy]:
    """Return the policy called ``name``: "lru", "arc" or ``module:Class``.

    Raises:
        ConfigError: the policy is unknown or cannot be imported; the message lists the allowed names.
    """
    if name in BUILTIN_POLICIES:
        return BUILTIN_POLICIES[name]
    module_name, colon, class_name = name.partition(":")
    allowed = f"{', '.join(BUILTIN_POLICIES)} or module:Class"
    if not colon:
        raise ConfigError(f"eviction: {name!r} is not a policy; allowed are {allowed}")
    try:
        policy = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(
            f"eviction: {name!r} cannot be imported ({type(error).__name__}: {error}); allowed are {allowed}"
        ) from error
    if not (isinstance(policy, type) and issubclass(policy, EvictionPolicy)):
        raise ConfigError(f"eviction: {name!r} is not a subclass of tiering.table.policies.policy.EvictionPolicy")
    return policy


class BlockTable:
    """The index of blocks by row, with reference counts, free rows and eviction.

    Rows that are being read or written during :meth:`clear` are *quarantined*. No key leads to such a row, and the row
    becomes free when its last reader or its writer is done.

    No method takes long with millions of rows. :meth:`clear` gives the dictionaries away. The free rows of a new or
    cleared table are in no list: they are found by their reference counts, in pieces, when they are needed (the
    *sweep*). A row ahead of the sweep is free if its count is 0 or :data:`FREE`, unless a block was inserted there
    since.

    Args:
        num_rows: number of rows.
        eviction: an eviction policy's name or class; default "lru".
        rows_free: True (default): all rows are free. False: no row is free until :meth:`add_free`.

    Raises:
        ConfigError: the number of rows is 0 or exceeds :data:`MAX_ROWS`, or the policy is unknown.
    """

    __slots__ = (
        "_free",
        "_free_count",
        "_inserted",
        "_many_pins",
        "_pinned",
        "_pins",
        "_quarantined",
        "_swept",
        "_unswept",
        "_withdrawn",
        "evictable",
        "keys",
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
        """Number of rows."""
        self.readable = KeyRows(num_rows)
        """Key → row of the blocks that may be read.

        Only the table's methods change it; the owner's hot paths read it.
        """
        self.pending: dict[bytes, int] = {}
        """Key → row of the blocks that are being written. Only the table's methods change it."""
        self.refs: RefCounts = np.full(num_rows, FREE if rows_free else UNSEEN, np.int32)
        """Reference count of each row: 0 evictable, n > 0 for n readers, -1 being written, -2 free, -3 unseen."""
        self.keys: RowKeys = np.empty(num_rows, object)
        """Key of each row; meaningless where no block is."""
        policy = load_policy(eviction) if isinstance(eviction, str) else eviction
        self.policy: EvictionPolicy = policy(num_rows, self.refs, self.keys)
        """The eviction policy."""
        self.evictable = 0
        """Number of rows that could be evicted now."""
        self._free: NDArray[np.int32] = np.empty(num_rows, np.int32)
        self._free_count = 0
        self._withdrawn: set[int] = set()
        """Rows in the list of free rows that are not free any more."""
        self._swept = 0 if rows_free else num_rows
        """First row ahead of the sweep."""
        self._unswept = num_rows if rows_free else 0
        """Number of free rows ahead of the sweep."""
        self._inserted: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        """Mask of the rows ahead of the sweep in which a block was inserted."""
        self._pins: list[Rows] = []
        """All pinned rows, and others that were pinned lately."""
        self._pinned = 0
        """Number of entries in the list of pinned rows."""
        self._many_pins = _FEW_PINS
        self._quarantined: set[int] = set()

    # ---------------------------------------------------------------------------------------------------------- writing

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self._free_count - len(self._withdrawn) + self._unswept

    @property
    def room(self) -> int:
        """Number of rows that :meth:`allocate` could reserve now."""
        return max(0, self.free + self.evictable)

    def allocate(self, keys: Sequence[bytes]) -> tuple[Rows, list[bytes]] | None:
        """Reserve a row for each of ``keys``, all unknown at present. The keys are pending from then on.

        Returns:
            The rows, one for each distinct key, and the keys evicted to make room; or None, with nothing changed, if
            there is no room for all.
        """
        count = len(keys)
        free = self._free_count - len(self._withdrawn) + self._unswept
        if count > free + self.evictable:
            return None
        if DISPOSAL.needs_help:
            DISPOSAL.help(count)
        evicted: list[bytes] = []
        take = min(count, free)
        rows = _NO_ROWS
        if take > self._free_count or self._withdrawn:
            self._list_free(take)
        if take:
            rows = self._free[self._free_count - take : self._free_count][::-1].astype(np.int64)
            self._free_count -= take
        if take < count:
            victims = self.policy.evict(count - take)
            evicted = self.keys[victims].tolist()
            self.readable.remove(evicted)
            self.evictable -= count - take
            rows = np.concatenate((rows, victims)) if take else victims
        self.refs[rows] = WRITING
        # An array, because numpy releases the interpreter lock while it assigns a list.
        self.keys[rows] = np.fromiter(keys, object, count)
        known = len(self.pending)
        self.pending.update(zip(keys, rows.tolist(), strict=False))
        if len(self.pending) - known < count:
            rows = self._keep_first_rows(keys, rows)
        return rows, evicted

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
        mask: NDArray[np.bool_] = refs >= WRITING
        if self._swept < stop:
            ahead = max(start, self._swept) - start
            mask[ahead:] &= (refs[ahead:] != 0) | self._inserted[start + ahead : stop]
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
        rows = distinct(rows)
        refs = self.refs[rows]
        ahead = rows >= self._swept
        free = (refs == FREE) | (ahead & (refs == 0) & ~self._inserted[rows])
        taken: Rows = rows[free]
        listed = rows[free & ~ahead]
        self._withdrawn.update(listed.tolist())
        self._unswept -= len(taken) - len(listed)
        self.withhold(taken)
        return taken

    def take_free(self, count: int) -> Rows:
        """Move up to ``count`` free rows into quarantine and return them.

        The chosen rows are among the last that :meth:`allocate` would reserve.
        """
        while self._free_count - len(self._withdrawn) < count and self._unswept:
            self._sweep()
        chosen: list[int] = []
        for start in range(0, self._free_count, SWEEP_ROWS):
            listed = self._free[start : min(start + SWEEP_ROWS, self._free_count)]
            chosen += listed[self.refs[listed] == FREE].tolist()
            if len(chosen) >= count:
                break
        rows = np.array(chosen[:count], np.int64)
        self.withdraw(rows)
        return rows

    def _list_free(self, count: int) -> None:
        """Make the last ``count`` entries of the list of free rows free rows; there are as many."""
        while self._free_count - len(self._withdrawn) < count:
            self._sweep()
        if not self._withdrawn:
            return
        parts: list[NDArray[np.int32]] = []
        missing, end = count, self._free_count
        while missing:
            listed = self._free[max(0, end - missing) : end]
            live = self.refs[listed] == FREE
            end -= len(listed)
            self._withdrawn.difference_update(listed[~live].tolist())
            parts.append(listed[live])
            missing -= len(parts[-1])
        for part in reversed(parts):
            self._free[end : end + len(part)] = part
            end += len(part)
        self._free_count = end

    def _sweep(self) -> None:
        """List the free rows among the next ones. They are reserved after all that are listed."""
        start, stop = self._swept, min(self._swept + SWEEP_ROWS, self.num_rows)
        refs = self.refs[start:stop]
        found = np.flatnonzero(((refs == 0) | (refs == FREE)) & ~self._inserted[start:stop])[::-1] + start
        self.refs[found] = FREE
        self._inserted[start:stop] = False
        end = self._free_count + len(found)
        self._free[len(found) : end] = self._free[: self._free_count].copy()
        self._free[: len(found)] = found
        self._free_count, self._swept = end, stop
        self._unswept -= len(found)

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
        refs = self.refs[start:stop]
        ahead = min(max(self._swept, start), stop) - start
        free = refs == FREE
        free[ahead:] |= (refs[ahead:] == 0) & ~self._inserted[start + ahead : stop]
        self._unswept -= int(np.count_nonzero(free[ahead:]))
        self._withdrawn.update((np.flatnonzero(free[:ahead]) + start).tolist())
        refs[free] = UNSEEN
        return int(np.count_nonzero(free))

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
        if self._swept < self.num_rows:
            self._inserted[rows] = True
        self.keys[rows] = keys
        self.readable.put(keys, rows.tolist())
        self.refs[rows] = 0
        self.evictable += len(rows)
        self.policy.insert(rows)

    def add_free(self, rows: Rows) -> None:
        """Free rows that are in no list of this table; the first is reserved first."""
        self.refs[rows] = FREE
        self.keys[rows] = None
        if self._swept < self.num_rows:
            ahead = rows >= self._swept
            self._inserted[rows[ahead]] = False
            self._unswept += int(np.count_nonzero(ahead))
            rows = rows[~ahead]
        if self._withdrawn:
            listed = self._withdrawn.intersection(rows.tolist())
            self._withdrawn -= listed
            rows = rows[np.fromiter((row not in listed for row in rows.tolist()), np.bool_, len(rows))]
        count = len(rows)
        self._free[self._free_count : self._free_count + count] = rows[::-1]
        self._free_count += count

    # ---------------------------------------------------------------------------------------------------------- reading

    def pin(self, rows: Rows, times: int = 1) -> None:
        """Add readers to rows.

        Args:
            rows: distinct rows that are readable.
            times: number of readers to add to each row; default 1.
        """
        refs = self.refs[rows]
        self.evictable -= len(rows) - int(np.count_nonzero(refs))
        self.refs[rows] = refs + times
        self._pins.append(rows)
        self._pinned += len(rows)
        if self._pinned > self._many_pins:
            self._list_pinned()

    def _list_pinned(self) -> Rows:
        """Return all pinned rows, each once, and forget the others."""
        rows = np.concatenate([_NO_ROWS, *self._pins])
        rows = distinct(rows[self.refs[rows] > 0])
        self._pins = [rows]
        self._pinned = len(rows)
        self._many_pins = max(_FEW_PINS, 2 * len(rows))
        return rows

    def unpin(self, rows: Rows) -> None:
        """Remove one reader from each of ``rows``, which are pinned and distinct."""
        refs = self.refs[rows] - 1
        self.refs[rows] = refs
        if np.count_nonzero(refs):
            rows = rows[refs == 0]
        if not len(rows):
            return
        if self._quarantined:
            rows = self._leave_quarantine(rows)
        self.evictable += len(rows)
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
                return (), _NO_ROWS
            found = [row for row in found if row is not None]
        if len(set(found)) < len(found):  # policies count the rows that change their lists
            keys, found = list(dict.fromkeys(keys)), list(dict.fromkeys(found))
        return keys, np.fromiter(found, np.int64, len(found))

    def unknown(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of ``keys`` that are neither readable nor pending."""
        readable, pending = self.readable, self.pending
        if readable.disjoint(keys) and (not pending or pending.keys().isdisjoint(keys)):
            return list(keys)
        return [key for key in keys if key not in readable and key not in pending]

    # ---------------------------------------------------------------------------------------------------------- leaving

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
        """Evict up to ``count`` blocks ahead of need, and return their keys."""
        count = min(count, self.evictable)
        if not count:
            return []
        rows = self.policy.evict(count)
        evicted: list[bytes] = self.keys[rows].tolist()
        self.readable.remove(evicted)
        self.evictable -= count
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
        self._unswept = self.free + self.evictable
        self._swept = self._free_count = self.evictable = 0
        self._withdrawn.clear()
        self._inserted = np.zeros(self.num_rows, np.bool_)
        self.policy.clear()
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
