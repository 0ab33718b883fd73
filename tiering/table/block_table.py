"""The table of blocks on a medium that one process owns: key → row, reference counts, eviction.

All operations work in batches. The primary tier keeps its rows in such a table, a local tier its slots. The scheduler's
thread owns the table, so there are no locks. A block costs a bytes key and an int in a dict, and some bytes in arrays;
the garbage collector tracks none of them.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from tiering.errors import ConfigError
from tiering.table.policies.arc import ARCEvictionPolicy
from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows
from tiering.table.policies.recency import LRUEvictionPolicy

BUILTIN_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRUEvictionPolicy, "arc": ARCEvictionPolicy}
"""The policies that ship with the project, by name."""

MAX_ROWS = 1 << 29
"""Largest number of rows in a table. Row numbers have 32 bits.

The data of this many blocks takes about 100 GB of memory when the table is full.
"""

WRITING = -1
"""Reference count of a row that is being written. Such a row is neither readable nor evictable."""

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
        "_quarantined",
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
        self.readable: dict[bytes, int] = {}
        """Key → row of the blocks that may be read.

        Only the table's methods change it; the owner's hot paths read it.
        """
        self.pending: dict[bytes, int] = {}
        """Key → row of the blocks that are being written. Only the table's methods change it."""
        self.refs: RefCounts = np.zeros(num_rows, np.int32)
        """Reference count of each row: -1 being written, 0 evictable or free, n > 0 for n readers."""
        self.keys: RowKeys = np.empty(num_rows, object)
        """Key of each row; None for a free row."""
        policy = load_policy(eviction) if isinstance(eviction, str) else eviction
        self.policy: EvictionPolicy = policy(num_rows, self.refs, self.keys)
        """The eviction policy."""
        self.evictable = 0
        """Number of rows that could be evicted now."""
        self._free: NDArray[np.int32] = (
            np.arange(num_rows - 1, -1, -1, dtype=np.int32) if rows_free else np.empty(num_rows, np.int32)
        )
        self._free_count = num_rows if rows_free else 0
        self._quarantined: set[int] = set()

    # ---------------------------------------------------------------------------------------------------------- writing

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self._free_count

    @property
    def room(self) -> int:
        """Number of rows that :meth:`allocate` could reserve now."""
        return max(0, self._free_count + self.evictable)

    def allocate(self, keys: Sequence[bytes]) -> tuple[Rows, list[bytes]] | None:
        """Reserve a row for each of ``keys``, all unknown at present. The keys are pending from then on.

        Returns:
            The rows, one for each distinct key, and the keys evicted to make room; or None, with nothing changed, if
            there is no room for all.
        """
        count = len(keys)
        if count > self._free_count + self.evictable:
            return None
        evicted: list[bytes] = []
        take = min(count, self._free_count)
        rows = _NO_ROWS
        if take:
            rows = self._free[self._free_count - take : self._free_count][::-1].astype(np.int64)
            self._free_count -= take
        if take < count:
            victims = self.policy.evict(count - take)
            evicted = self.keys[victims].tolist()
            deque(map(self.readable.__delitem__, evicted), maxlen=0)
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
        _, first = np.unique(np.fromiter(keys, object, len(keys)), return_index=True)
        kept = rows[np.sort(first)]
        self.pending.update(zip(dict.fromkeys(keys), kept.tolist(), strict=True))
        self.add_free(np.setdiff1d(rows, kept))
        return kept

    def commit(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Make pending ``keys`` readable, because their ``rows`` are written.

        They become the most recent blocks, the first of ``keys`` above all others.
        """
        deque(map(self.pending.__delitem__, keys), maxlen=0)
        self.readable.update(zip(keys, rows.tolist(), strict=True))
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

    def any_quarantined(self, rows: Iterable[object]) -> bool:
        """Return True if one of ``rows`` is in quarantine."""
        return bool(self._quarantined) and not self._quarantined.isdisjoint(rows)

    @property
    def quarantined(self) -> int:
        """Number of rows in quarantine."""
        return len(self._quarantined)

    def withdraw(self, rows: Rows) -> Rows:
        """Move the free ones among ``rows`` into quarantine until :meth:`end_writing`, and return them."""
        free = self._free[: self._free_count]
        chosen = np.isin(free, rows)
        taken: Rows = free[chosen].astype(np.int64)
        kept = free[~chosen]
        self._free[: len(kept)] = kept
        self._free_count = len(kept)
        self.withhold(taken)
        return taken

    def take_free(self, count: int) -> Rows:
        """Move up to ``count`` free rows into quarantine and return them.

        The chosen rows are those that :meth:`allocate` would reserve last.
        """
        return self.withdraw(self._free[: min(count, self._free_count)].astype(np.int64))

    def withhold(self, rows: Rows) -> None:
        """Put rows that are in no list of this table into quarantine until :meth:`end_writing`."""
        self.refs[rows] = WRITING
        self._quarantined.update(rows.tolist())

    def forget(self, rows: Rows) -> None:
        """Remove quarantined ``rows`` without reader or writer from every list of this table."""
        self._quarantined.difference_update(rows.tolist())
        self.refs[rows] = 0
        self.keys[rows] = None

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
        self.keys[rows] = keys
        self.readable.update(zip(keys, rows.tolist(), strict=True))
        self.refs[rows] = 0
        self.evictable += len(rows)
        self.policy.insert(rows)

    def add_free(self, rows: Rows) -> None:
        """Free rows that are in no list of this table; the first is reserved first."""
        count = len(rows)
        self.refs[rows] = 0
        self.keys[rows] = None
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
        readable = self.readable
        if readable.keys().isdisjoint(keys):  # most prompts are new
            return (), _NO_ROWS
        known = list(filter(readable.__contains__, keys))
        if len(set(known)) < len(known):  # policies count the rows that change their lists
            known = list(dict.fromkeys(known))
        return known, np.fromiter(map(readable.__getitem__, known), np.int64, len(known))

    def unknown(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of ``keys`` that are neither readable nor pending."""
        readable, pending = self.readable, self.pending
        if readable.keys().isdisjoint(keys) and (not pending or pending.keys().isdisjoint(keys)):
            return list(keys)
        return [key for key in keys if key not in readable and key not in pending]

    # ---------------------------------------------------------------------------------------------------------- leaving

    def drop(self, keys: Sequence[bytes]) -> list[bytes]:
        """Drop lost blocks. Their keys are unknown at once.

        Rows that are being read go into quarantine; the other rows are free.

        Returns:
            The keys that were readable.
        """
        known = [key for key in keys if key in self.readable]
        if known:
            rows = np.fromiter(map(self.readable.pop, known), np.int64, len(known))
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
        deque(map(self.readable.__delitem__, evicted), maxlen=0)
        self.evictable -= count
        self.add_free(np.sort(rows))
        return evicted

    def clear(self) -> list[bytes]:
        """Drop every block, and quarantine the rows that are being read or written.

        Returns:
            The keys that were readable.
        """
        forgotten = list(self.readable)
        rows = np.fromiter(self.readable.values(), np.int64, len(forgotten))
        busy = self.refs[rows] != 0
        self._quarantined.update(rows[busy].tolist())
        self._quarantined.update(self.pending.values())
        self.readable.clear()
        self.pending.clear()
        self.policy.clear()
        self.evictable = 0
        self.add_free(rows[~busy])
        return forgotten

    def rows_of(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the row of each readable key, and None for each other key."""
        return list(map(self.readable.get, keys, repeat(None)))

    def _leave_quarantine(self, rows: Rows) -> Rows:
        """Free those of ``rows`` that are quarantined, and return the others."""
        quarantined = np.fromiter(map(self._quarantined.__contains__, rows.tolist()), np.bool_, len(rows))
        leaving = rows[quarantined]
        if len(leaving):
            self._quarantined.difference_update(leaving.tolist())
            self.add_free(leaving)
        return rows[~quarantined]
