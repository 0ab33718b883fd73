"""The manager of the primary tier: rows of a shared CPU buffer, the only tier with GPU transfers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, takewhile
from typing import NamedTuple, Protocol

import numpy as np

from tiering.api.inert_manager import InertManager
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import LOCAL, MEDIUM_CPU, OffloadingEvent, OffloadingManager, PrefixMatch, PrepareStoreOutput
from tiering.api.masking import shown_name
from tiering.api.request import ReqContext, RequestOffloadingContext
from tiering.api.transfer import CPULoadStoreSpec, Rows
from tiering.errors import ConfigError, NotReadableError
from tiering.primary.claims import Claims
from tiering.primary.memory.region import SharedRegion
from tiering.runtime.forks import inert_in_children
from tiering.table.block_table import BlockTable
from tiering.table.disposal import DISPOSAL
from tiering.table.events import EventQueue
from tiering.table.key_rows import KeyRows
from tiering.table.policies.policy import EvictionPolicy, RefCounts

_log = logging.getLogger("kv_tiering.primary")


class RowCounts(NamedTuple):
    """Number of rows in each state; rows in none of them are read, written or reserved."""

    rows: int
    """Rows of the region, in whatever state."""
    free: int
    """Rows without a block."""
    evictable: int
    """Rows with a readable block that is not pinned."""
    quarantined: int
    """Rows without a key that a copy or a job still uses."""


class RowKeeper(Protocol):
    """Records which rows hold which blocks, for a process that takes the rows over."""

    def taken(self, rows: Rows) -> None:
        """Record that the rows' content is about to change, or counts no more."""

    def written(self, rows: Rows) -> None:
        """Record that the rows hold a block each, completely."""

    def report(self, keys: Sequence[OffloadKey], rows: Rows) -> None:
        """Record that the rows, which are written, hold ``keys``, which may outlive the process."""

    def cleared(self) -> None:
        """Record that the content of no row counts any more."""

    def step(self) -> None:
        """Exchange what is known with the other process, without waiting."""


class CPUPrimaryTierOffloadingManager(OffloadingManager):
    """A CPU cache of blocks.

    The class is a complete :class:`OffloadingManager` by itself. Under a tiering manager, all other tiers exchange
    their blocks with the GPU through its rows. Claims (the loads and stores of a request) are kept per request. A
    completion that arrives after a reset thus frees exactly the rows of its own request.

    Args:
        buffer: the shared region, or a writable memoryview of shape (num_rows, row_stride_bytes), format "B".
        eviction: an eviction policy's name or class; default "lru".
        enable_events: True to collect events; default False.

    Raises:
        ConfigError: the buffer has another type, shape or format, or the policy is unknown.
    """

    def __init__(
        self,
        buffer: SharedRegion | memoryview,
        eviction: str | type[EvictionPolicy] = "lru",
        enable_events: bool = False,
    ) -> None:
        self._region = buffer if isinstance(buffer, SharedRegion) else None
        self._is_preparing = self._region is not None
        self._view = buffer.view if isinstance(buffer, SharedRegion) else buffer
        if not isinstance(self._view, memoryview):
            raise ConfigError(
                f"the buffer of the primary tier is a {type(buffer).__name__}, but must be a SharedRegion or a "
                "writable memoryview of bytes of shape (rows, bytes), such as the .data of a numpy array of uint8"
            )
        if self._view.ndim != 2 or self._view.format != "B" or self._view.readonly:
            raise ConfigError(
                f"the primary buffer must be writable bytes of shape (rows, bytes), not {self._view.shape}"
            )
        table = BlockTable(len(self._view), eviction)
        self._table = table
        self.num_rows = table.num_rows
        """Number of rows in the buffer."""
        self.readable: KeyRows = table.readable
        """Key → row of the blocks that may be read; a live view."""
        self.pending: Mapping[OffloadKey, int] = table.pending
        """Key → row of the blocks that are being written; a live view."""
        # The table's own methods, so that the tiering manager's calls cost no second call.
        self.pin = table.pin
        """Add readers to rows; see :meth:`tiering.table.block_table.BlockTable.pin`."""
        self.unpin = table.unpin
        """Remove a reader from rows; see :meth:`tiering.table.block_table.BlockTable.unpin`."""
        self.touch_readable = table.touch
        """Record a use of keys, and return those that are readable with their rows."""
        self.refresh_readable = table.refresh
        """Make keys recent without counting a use, and return those that are readable with their rows."""
        self.release = table.release
        """Let blocks be evicted first until they are used again; see :meth:`BlockTable.release`."""
        self.keep = table.keep
        """Keep blocks for a time; see :meth:`tiering.table.block_table.BlockTable.keep`."""
        self.count_kept = table.marks.count_kept
        """Return how many of some rows a hint keeps now."""
        self.begin_first_victims = table.marks.begin_first_victims
        """Let rows be marked as first victims; see :class:`tiering.table.marks.FirstVictims`."""
        self.unknown = table.unknown
        """Return those of some keys that are neither readable nor being written."""
        self.abort = table.abort
        """Free the rows of pending keys, because their write failed."""
        self.disown = table.disown
        """Make pending keys unknown while their rows are still being written."""
        self.end_writing = table.end_writing
        """Free disowned rows, because their writers are done."""
        self.ignored_completions = 0
        """Number of completed keys that were unknown, for example after a reset."""
        self.keeper: RowKeeper | None = None
        """Records the rows for a later process; None (default): the rows end with this one."""
        self._before_reset: Callable[[], object] = lambda: None
        self._events = EventQueue()
        self._enable_events = enable_events
        self._loads = Claims()
        self._stores = Claims()
        # A forked child shares the rows but has its own table, so both processes would use one row for two blocks.
        inert_in_children(self, InertManager)

    @property
    def is_prepared(self) -> bool:
        """True if the memory of the rows is prepared; until then no row is given to a block."""
        if self._is_preparing and self._region is not None:
            self._is_preparing = not self._region.is_prepared
        return not self._is_preparing

    @property
    def is_unusable(self) -> bool:
        """True if the memory of the rows could not be prepared."""
        return self._region is not None and self._region.is_unusable

    @property
    def room(self) -> int:
        """Number of rows that :meth:`allocate` could reserve now."""
        return self._table.room

    @property
    def free(self) -> int:
        """Number of rows without a block."""
        return self._table.free

    def readers(self, rows: Rows) -> RefCounts:
        """Return the number of readers of each row; -1 for a row that is being written."""
        return self._table.refs[rows]

    def count_rows(self) -> RowCounts:
        """Return the number of rows in each state."""
        table = self._table
        return RowCounts(table.num_rows, table.free, table.evictable, table.quarantined)

    def get_kv_memoryview(self) -> memoryview:
        """Return the buffer: shape (num_rows, row_stride_bytes), format "B".

        Block b is row b (``numpy.asarray(view)[b]``).
        """
        return self._view

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if key in self.readable:
            return True
        return None if key in self.pending else False

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        readable, pending = self.readable, self.pending
        hits = readable.leading(keys)
        if hits == len(keys) or keys[hits] not in pending:
            return PrefixMatch(hits, False)
        held = sum(1 for _ in takewhile(lambda key: key in readable or key in pending, keys))
        return PrefixMatch(held, held >= at_least)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        held, pending = set(self.readable.known(keys)), self.pending
        return [key in held or key in pending for key in keys]

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext, used: bool = True) -> None:
        (self.touch_readable if used else self.refresh_readable)(keys)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        rows, _, pinned = self.claim_load(keys, req_context.req_id)
        self.pin(pinned)
        return CPULoadStoreSpec(rows)

    def claim_load(self, keys: Sequence[OffloadKey], req_id: str) -> tuple[Rows, Sequence[OffloadKey], Rows]:
        """Record that a request loads ``keys``. The caller pins the rows.

        A key that is named twice counts as one load, so its first completion ends that load.

        Returns:
            The row of each key; the keys, each once; and the rows of these, which the caller pins.

        Raises:
            NotReadableError: some keys are not readable; nothing was changed.
        """
        readable = self.readable
        try:
            rows = np.fromiter(readable.rows(keys), np.int64, len(keys))
        except KeyError:
            raise NotReadableError([key for key in keys if key not in readable]) from None
        once, claimed = keys, rows
        if len(set(keys)) < len(keys):
            distinct = dict(zip(keys, rows.tolist(), strict=True))
            once, claimed = list(distinct), np.fromiter(distinct.values(), np.int64, len(distinct))
        self._loads.add(req_id, once, claimed)
        return rows, once, claimed

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        known, rows = self._loads.release(req_context.req_id, keys)
        if len(known) < len(keys):
            self._count_ignored(len(keys) - len(known), req_context.req_id)
        if known:
            self.unpin(rows)

    def prepare_read(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Pin ``keys`` for a cascade, as :meth:`prepare_load` does, without a change to their recency."""
        return self.prepare_load(keys, req_context)

    def complete_read(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Unpin the keys of a :meth:`prepare_read`."""
        self.complete_load(keys, req_context)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        new = self._table.unknown(keys)
        if new and self._table.quarantined and (writing := self._stores.holds(req_context.req_id)):
            # Its store from before a reset is still running: the end of one could not be told from that of the other.
            new = [key for key in new if key not in writing]
        if not new:
            return PrepareStoreOutput([], CPULoadStoreSpec(()), [])
        if len(new) > self._table.room:
            return None
        held = None
        if len(new) < len(keys) and len(new) > self._table.free:
            held = self._pin_held(keys)
        taken = self.allocate(new)
        if held is not None:
            self.unpin(held)
        if taken is None:
            return None
        rows, evicted = taken
        if len(rows) < len(new):
            new = list(dict.fromkeys(new))
        self._stores.add(req_context.req_id, new, rows)
        return PrepareStoreOutput(new, CPULoadStoreSpec(rows), evicted)

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self.finish_store(keys, req_context.req_id, success)

    def finish_store(self, keys: Sequence[OffloadKey], req_id: str, success: bool) -> tuple[Sequence[OffloadKey], Rows]:
        """End the stores of a request.

        Args:
            keys: keys whose store has ended.
            req_id: the request.
            success: False if the copy failed; the rows are then freed.

        Returns:
            The keys that became readable, and their rows.
        """
        done, written = self._stores.release(req_id, keys)
        if len(done) < len(keys):
            self._count_ignored(len(keys) - len(done), req_id)
        if self._table.quarantined and done:
            done, written = self._end_quarantined(done, written)
        if not done:
            return (), written
        if not success:
            self.abort(done, written)
            return (), written
        self._commit(done, written)
        return done, written

    def mark_held(self, keys: Sequence[OffloadKey]) -> None:
        """Let the rows of readable ``keys`` be evicted before all others, the last one first."""
        if self._table.marks.first_victims is not None and not self.readable.disjoint(keys):
            found = dict.fromkeys(row for row in self._table.rows_of(keys) if row is not None)
            self._table.marks.hold(np.fromiter(found, np.int64, len(found)))

    def spare_held(self, keys: Sequence[OffloadKey], rows: Rows) -> list[OffloadKey]:
        """Return those of ``keys`` that the engine's cache has, and let their ``rows`` go before all others.

        A tier has the blocks, so that they need no further copy.
        """
        return list(compress(keys, self._table.marks.spare_held(rows).tolist()))

    def unmark_held(self, keys: Sequence[OffloadKey]) -> None:
        """Make readable ``keys`` the most recent blocks, and evict their rows first no more."""
        if self.readable.disjoint(keys):
            return
        _, rows = self.refresh_readable(keys)
        self._table.marks.unhold(rows)

    @property
    def copy_credit(self) -> float:
        """The credit of :class:`~tiering.table.marks.FirstVictims`; 0 without them."""
        victims = self._table.marks.first_victims
        return 0.0 if victims is None else victims.credit

    def grant_copies(self, copies: float) -> None:
        """Add to the credit of :class:`~tiering.table.marks.FirstVictims`; below 0, none is taken."""
        if self._table.marks.first_victims is not None:
            self._table.marks.first_victims.grant(copies)

    def prepare_write(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve rows for a tier that promotes blocks, as :meth:`prepare_store` does."""
        return self.prepare_store(keys, req_context)

    def complete_write(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """End a :meth:`prepare_write`."""
        self.complete_store(keys, req_context, success)

    def allocate(self, keys: Sequence[OffloadKey]) -> tuple[Rows, list[OffloadKey]] | None:
        """Reserve rows for unknown ``keys``, which are pending from now on.

        Returns:
            The rows, one for each distinct key, and the keys evicted for them; or None, with nothing changed, if there
            is no room for all, or the rows are still being prepared.
        """
        if self._is_preparing and not self.is_prepared:
            return None
        taken = self._table.allocate(keys)
        if self.keeper is not None and taken is not None:
            self.keeper.taken(taken[0])
        if taken is not None and taken[1] and self._enable_events:
            self._events.add(_event(taken[1], removed=True, evicted=True))
        return taken

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        """Evict readable blocks, whatever the policy would choose; the rows of those without readers are free."""
        if self.keeper is not None:
            rows = [row for row in self._table.rows_of(keys) if row is not None]
            self.keeper.taken(np.fromiter(rows, np.int64, len(rows)))
        dropped = self._table.drop(keys)
        if dropped and self._enable_events:
            self._events.add(_event(dropped, removed=True, evicted=True))

    def commit(self, keys: Sequence[OffloadKey], rows: Rows) -> None:
        """Make pending ``keys`` readable, because a tier has written their rows."""
        self._commit(keys, rows)
        if self.keeper is not None:
            self.keeper.report(keys, rows)

    def _commit(self, keys: Sequence[OffloadKey], rows: Rows) -> None:
        self._table.commit(keys, rows)
        if self.keeper is not None:
            self.keeper.written(rows)
        if self._enable_events:
            self._events.add(_event(list(keys), removed=False))

    def adopt(self, keys: Sequence[OffloadKey], rows: Rows) -> None:
        """Make blocks readable that arrived in quarantined rows after all requests stopped waiting."""
        self._table.adopt(keys, rows)
        if self.keeper is not None:
            self.keeper.written(rows)
            self.keeper.report(keys, rows)
        if self._enable_events:
            self._events.add(_event(list(keys), removed=False))

    def inherit(self, keys: Sequence[OffloadKey], rows: Rows) -> int:
        """Make blocks readable that an earlier process has left in the rows, and return how many are new here.

        Args:
            keys: keys, each once.
            rows: row of each key; those that are in use by now are left alone.
        """
        by_row = dict(zip(rows.tolist(), keys, strict=True))
        unknown = set(self._table.unknown(keys))
        wanted = [row for row, key in by_row.items() if key in unknown]
        free = self._table.withdraw(np.fromiter(wanted, np.int64, len(wanted)))
        if len(free):
            inherited = [by_row[row] for row in free.tolist()]
            self._table.adopt(inherited, free)
            if self._enable_events:
                self._events.add(_event(inherited, removed=False))
        return len(free)

    def keys_of(self, rows: Rows) -> list[OffloadKey | None]:
        """Return the key of each row, or None for one without a block."""
        keys: list[OffloadKey | None] = self._table.keys[rows].tolist()
        return keys

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def has_open_stores(self, req_id: str) -> bool:
        """Return True if a request has prepared stores that are not completed."""
        return req_id in self._stores

    def take_events(self) -> list[OffloadingEvent]:
        return self._events.take()

    def attach(self, before_reset: Callable[[], object]) -> None:
        """Call ``before_reset`` first in each :meth:`reset_cache`; a manager ends its promotions there."""
        self._before_reset = before_reset

    def reset_cache(self, revision: str | None = None) -> bool:
        self._before_reset()
        if self.keeper is not None:
            self.keeper.cleared()
        forgotten = self._table.clear()
        if self._enable_events:
            self._events.clear(_event([], removed=True), forgotten)
        else:
            DISPOSAL.add(forgotten)
        return True

    def shutdown(self) -> None:
        if self._region is not None:
            self._region.close()

    def _pin_held(self, keys: Sequence[OffloadKey]) -> Rows:
        held = dict.fromkeys(row for row in self._table.rows_of(keys) if row is not None)  # distinct rows
        rows: Rows = np.fromiter(held, np.int64, len(held))
        self.pin(rows)
        return rows

    def _end_quarantined(self, keys: Sequence[OffloadKey], rows: Rows) -> tuple[Sequence[OffloadKey], Rows]:
        """Free the rows whose blocks were dropped by a reset; return the other keys and rows."""
        late = np.fromiter(map(self._table.is_quarantined, rows.tolist()), np.bool_, len(rows))
        if not late.any():
            return keys, rows
        self._count_ignored(int(late.sum()), "a reset request")
        self.end_writing(rows[late])
        return [key for key, is_late in zip(keys, late.tolist(), strict=True) if not is_late], rows[~late]

    def _count_ignored(self, count: int, req_id: str) -> None:
        self.ignored_completions += count
        _log.debug("ignored %d completions of %s: no such copy is running", count, shown_name(req_id))


def _event(keys: list[OffloadKey], *, removed: bool, evicted: bool = False) -> OffloadingEvent:
    return OffloadingEvent(keys, MEDIUM_CPU, LOCAL, PRIMARY_TIER, removed, evicted=evicted)
