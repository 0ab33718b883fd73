"""A table of blocks on a medium of our own: key → row, reference counts, free rows, eviction; in batches.

Used for the primary tier's rows and for the slots of a local tier.  Owned by the scheduler's thread; no locks.  Per
block it costs a bytes key and an int in a dict, and some bytes in arrays: no object that the garbage collector looks
at.
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
from tiering.table.policies.lru import LRUEvictionPolicy
from tiering.table.policies.policy import EvictionPolicy, RefCounts, RowKeys, Rows

BUILTIN_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRUEvictionPolicy, "arc": ARCEvictionPolicy}

MAX_ROWS = 1 << 29
"""Most rows of a table: row numbers are kept in 32 bits, and what is kept of this many takes about 100 GB of memory when full."""

WRITING = -1
"""Reference count of a row that is being written: not readable, not evictable."""


def load_policy(name: str) -> type[EvictionPolicy]:
    """The policy called ``name``: "lru", "arc" or ``module:Class``.  Raises :class:`ConfigError` with what is allowed."""
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
    """Which rows hold which blocks.

    ``readable`` (key → row) holds the blocks that may be read; ``pending`` those that are being written.  Both are for
    reading by the owner's hot paths; only the methods change them.  ``refs[row]``: -1 being written, 0 evictable (or
    free), n readers. ``keys[row]``: the row's key, None if free.  ``evictable``: rows that could be evicted now.

    Rows that were being read or written when :meth:`clear` came are *quarantined*: no key leads to them, and they are
    free once the last reader or the writer is done.
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
        """A table of ``num_rows`` rows, all free, or, without ``rows_free``, none until :meth:`add_free`."""
        if num_rows <= 0:
            raise ConfigError(f"a table of {num_rows} rows holds nothing")
        if num_rows > MAX_ROWS:
            raise ConfigError(
                f"room for {num_rows} blocks is more than a tier can keep track of ({MAX_ROWS}): lower its capacity, or make blocks larger"
            )
        self.num_rows = num_rows
        self.readable: dict[bytes, int] = {}
        self.pending: dict[bytes, int] = {}
        self.refs: RefCounts = np.zeros(num_rows, np.int32)
        self.keys: RowKeys = np.empty(num_rows, object)
        policy = load_policy(eviction) if isinstance(eviction, str) else eviction
        self.policy: EvictionPolicy = policy(num_rows, self.refs, self.keys)
        self.evictable = 0
        self._free: NDArray[np.int32] = (
            np.arange(num_rows - 1, -1, -1, dtype=np.int32) if rows_free else np.empty(num_rows, np.int32)
        )
        self._free_count = num_rows if rows_free else 0
        self._quarantined: set[int] = set()

    # ---------------------------------------------------------------------------------------------------------- writing

    @property
    def free(self) -> int:
        """Rows that hold nothing."""
        return self._free_count

    @property
    def room(self) -> int:
        """Rows that :meth:`allocate` could hand out now."""
        return self._free_count + self.evictable

    def allocate(self, keys: Sequence[bytes]) -> tuple[Rows, list[bytes]] | None:
        """Take a row for each of ``keys``, none of which is known; they are pending then.

        Returns the rows and the keys evicted to make room; None, with nothing changed, if there is no room for all.
        """
        count = len(keys)
        if count > self._free_count + self.evictable:
            return None
        evicted: list[bytes] = []
        take = min(count, self._free_count)
        rows: Rows = self._free[self._free_count - take : self._free_count][::-1].astype(np.int64)
        self._free_count -= take
        if take < count:
            victims = self.policy.evict(count - take)
            evicted = self.keys[victims].tolist()
            deque(map(self.readable.__delitem__, evicted), maxlen=0)
            self.evictable -= count - take
            rows = np.concatenate((rows, victims)) if take else victims
        self.refs[rows] = WRITING
        # An array, because numpy would hand the interpreter lock to others while it assigns a list.
        self.keys[rows] = np.fromiter(keys, object, count)
        self.pending.update(zip(keys, rows.tolist(), strict=True))
        return rows, evicted

    def commit(self, keys: Sequence[bytes], rows: Rows) -> None:
        """What :meth:`allocate` gave ``rows`` for is written: readable, and the most recent, the first of ``keys`` above all."""
        deque(map(self.pending.__delitem__, keys), maxlen=0)
        self.readable.update(zip(keys, rows.tolist(), strict=True))
        self.refs[rows] = 0
        self.evictable += len(rows)
        self.policy.insert(rows)

    def abort(self, keys: Sequence[bytes], rows: Rows) -> None:
        """What :meth:`allocate` gave ``rows`` for is not written: the rows are free."""
        deque(map(self.pending.__delitem__, keys), maxlen=0)
        self._release_to_free(rows)

    def disown(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Nobody waits for pending ``keys`` any more, but their writer still runs: quarantine the rows until :meth:`end_writing`."""
        deque(map(self.pending.__delitem__, keys), maxlen=0)
        self._quarantined.update(rows.tolist())

    def is_quarantined(self, row: int) -> bool:
        """Whether ``row`` is waiting for its last reader or writer to be free."""
        return row in self._quarantined

    def any_quarantined(self, rows: Iterable[object]) -> bool:
        """Whether one of ``rows`` is in quarantine."""
        return bool(self._quarantined) and not self._quarantined.isdisjoint(rows)

    @property
    def quarantined(self) -> int:
        """Rows in quarantine."""
        return len(self._quarantined)

    def withdraw(self, rows: Rows) -> Rows:
        """Those of ``rows`` that are free leave the free list, into quarantine until :meth:`end_writing`.  Returns them."""
        free = self._free[: self._free_count]
        chosen = np.isin(free, rows)
        taken: Rows = free[chosen].astype(np.int64)
        kept = free[~chosen]
        self._free[: len(kept)] = kept
        self._free_count = len(kept)
        self.withhold(taken)
        return taken

    def take_free(self, count: int) -> Rows:
        """Up to ``count`` free rows leave the free list, those that would be handed out last, into quarantine."""
        return self.withdraw(self._free[: min(count, self._free_count)].astype(np.int64))

    def withhold(self, rows: Rows) -> None:
        """Rows that are in no list of this table go into quarantine until :meth:`end_writing`."""
        self.refs[rows] = WRITING
        self._quarantined.update(rows.tolist())

    def forget(self, rows: Rows) -> None:
        """Quarantined ``rows``, which nobody reads or writes, leave every list of this table."""
        self._quarantined.difference_update(rows.tolist())
        self.refs[rows] = 0
        self.keys[rows] = None

    def end_writing(self, rows: Rows) -> None:
        """The writers of quarantined ``rows`` are done: the rows are free."""
        self._quarantined.difference_update(rows.tolist())
        self._release_to_free(rows)

    def adopt(self, keys: Sequence[bytes], rows: Rows) -> None:
        """The writers of quarantined ``rows`` are done and ``keys``, unknown at present, are good: make them readable."""
        self._quarantined.difference_update(rows.tolist())
        self.keys[rows] = keys
        self.readable.update(zip(keys, rows.tolist(), strict=True))
        self.refs[rows] = 0
        self.evictable += len(rows)
        self.policy.insert(rows)

    def insert(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Rows that are in no list of this table hold ``keys`` already (recovery of a medium): readable, and the most recent."""
        self.keys[rows] = keys
        self.readable.update(zip(keys, rows.tolist(), strict=True))
        self.refs[rows] = 0
        self.evictable += len(rows)
        self.policy.insert(rows)

    def add_free(self, rows: Rows) -> None:
        """Rows that are in no list of this table are free; the first is handed out first."""
        self._release_to_free(rows)

    # ---------------------------------------------------------------------------------------------------------- reading

    def pin(self, rows: Rows, times: int = 1) -> None:
        """``times`` more readers for each of ``rows``, which are readable and distinct."""
        refs = self.refs[rows]
        self.evictable -= len(rows) - int(np.count_nonzero(refs))
        self.refs[rows] = refs + times

    def unpin(self, rows: Rows) -> None:
        """One reader less for each of ``rows``, which are distinct and pinned."""
        refs = self.refs[rows] - 1
        self.refs[rows] = refs
        if refs.any():
            rows = rows[refs == 0]
        if not len(rows):
            return
        if self._quarantined:
            rows = self._leave_quarantine(rows)
        self.evictable += len(rows)
        self.policy.release(rows)

    def touch(self, keys: Sequence[bytes]) -> tuple[Sequence[bytes], Rows]:
        """``keys``, a prefix in its order, were used.  Returns those that are readable and their rows; the others are ignored."""
        readable = self.readable
        try:
            rows = np.fromiter(map(readable.__getitem__, keys), np.int64, len(keys))
        except KeyError:
            keys = [key for key in keys if key in readable]
            rows = np.fromiter(map(readable.__getitem__, keys), np.int64, len(keys))
        if len(rows):
            self.policy.touch(rows)
        return keys, rows

    def unknown(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of ``keys`` that are neither readable nor pending."""
        readable, pending = self.readable, self.pending
        if readable.keys().isdisjoint(keys) and (not pending or pending.keys().isdisjoint(keys)):
            return list(keys)
        return [key for key in keys if key not in readable and key not in pending]

    # ---------------------------------------------------------------------------------------------------------- leaving

    def drop(self, keys: Sequence[bytes]) -> list[bytes]:
        """``keys`` are lost: unknown at once, their rows free, or in quarantine while they are read.  Returns those that were held."""
        known = [key for key in keys if key in self.readable]
        if known:
            rows = np.fromiter(map(self.readable.pop, known), np.int64, len(known))
            self.policy.remove(rows)
            busy = self.refs[rows] != 0
            self._quarantined.update(rows[busy].tolist())
            idle = rows[~busy]
            self.evictable -= len(idle)
            self._release_to_free(idle)
        return known

    def evict(self, count: int) -> list[bytes]:
        """Evict up to ``count`` blocks ahead of need; their keys."""
        count = min(count, self.evictable)
        if not count:
            return []
        rows = self.policy.evict(count)
        evicted: list[bytes] = self.keys[rows].tolist()
        deque(map(self.readable.__delitem__, evicted), maxlen=0)
        self.evictable -= count
        self._release_to_free(np.sort(rows))
        return evicted

    def clear(self) -> list[bytes]:
        """Forget every block.  Rows that are read or written at this moment are quarantined.  Returns the keys that were readable."""
        forgotten = list(self.readable)
        rows = np.fromiter(self.readable.values(), np.int64, len(forgotten))
        busy = self.refs[rows] != 0
        self._quarantined.update(rows[busy].tolist())
        self._quarantined.update(self.pending.values())
        self.readable.clear()
        self.pending.clear()
        self.policy.clear()
        self.evictable = 0
        self._release_to_free(rows[~busy])
        return forgotten

    def rows_of(self, keys: Sequence[bytes]) -> list[int | None]:
        """The row of each readable key, None for the others."""
        return list(map(self.readable.get, keys, repeat(None)))

    def _leave_quarantine(self, rows: Rows) -> Rows:
        """Free those of ``rows`` that are quarantined; the others."""
        quarantined = np.fromiter(map(self._quarantined.__contains__, rows.tolist()), np.bool_, len(rows))
        leaving = rows[quarantined]
        if len(leaving):
            self._quarantined.difference_update(leaving.tolist())
            self._release_to_free(leaving)
        return rows[~quarantined]

    def _release_to_free(self, rows: Rows) -> None:
        count = len(rows)
        self.refs[rows] = 0
        self.keys[rows] = None
        self._free[self._free_count : self._free_count + count] = rows[::-1]
        self._free_count += count
