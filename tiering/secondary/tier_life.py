"""The life of a generic tier: made from its parts, opened, moved to another epoch by a reset, and shut down."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tiering.api.keys import OffloadKey
from tiering.api.namespace import Namespace
from tiering.block_store import BlockStore, Place
from tiering.runtime.forks import inert_in_children
from tiering.secondary.contract import JobResult, SecondaryTierManager, TierContext, TransferJob
from tiering.secondary.event_log import EventLog
from tiering.secondary.index.contract import TierIndex
from tiering.secondary.inert import InertTier
from tiering.secondary.intake.admission import make_admission
from tiering.secondary.intake.offers import Offers
from tiering.secondary.intake.store_budget import StoreBudget
from tiering.secondary.io.assembly import build_io_host
from tiering.secondary.io.layers.breaker import BreakerState
from tiering.secondary.io.messages import IoResult
from tiering.secondary.io.side import IoSide
from tiering.secondary.options import TierOptions
from tiering.secondary.service.failures import FailureLog
from tiering.secondary.service.health import HealthCheck
from tiering.secondary.service.lease import Lease
from tiering.secondary.service.medium import Medium
from tiering.secondary.service.overdue import OverdueLoads
from tiering.secondary.service.service import TierService
from tiering.secondary.stats import TierStats

logger = logging.getLogger("kv_tiering.tier")

PlacePrefix = Callable[[Namespace], str]
"""Names where the blocks of a namespace (and epoch) are, on media whose places are names."""

_WAIT_SLICE = 0.1

_DRAIN_SHARE = 0.75
"""Of the time for a shutdown, what jobs may take: one that hangs must not cost the rest of it."""

_PREPARE_SHARE = 0.9
"""Of the time for a shutdown, when preparing the end must be over, so that there is some left for the end itself."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A job on the I/O side: what the manager submitted, and what of it needed no I/O."""

    job: TransferJob
    held: list[OffloadKey]
    bytes: int
    resets: int
    """Resets of the tier before it was submitted."""


class TierLife(SecondaryTierManager):
    """The parts of a block tier, its hooks for subclasses, and how it comes into service and leaves it.

    :class:`tiering.secondary.block_tier.BlockTier` says what the parameters are, and adds lookups and jobs.
    """

    def __init__(
        self,
        context: TierContext,
        options: TierOptions,
        store: BlockStore,
        index: TierIndex,
        *,
        place_prefix: PlacePrefix | None = None,
        element_size: int = 2,
        io: IoSide | None = None,
    ) -> None:
        self.context = context
        self.options = options
        self.store = store
        self.index = index
        self.io: IoSide = io or build_io_host(store, options, context, element_size=element_size, clock=context.clock)
        self.namespace: Namespace | None = None
        self.stats = TierStats()

        self.name = context.name
        self.medium = store.medium
        self.load_deadline = options.deadline
        self.primary_share = options.primary_share
        self.min_prefix_blocks = options.min_prefix_blocks
        self.fill = options.fill
        self.announces_news = True

        self._clock = context.clock
        self._place_prefix = place_prefix
        self._lookup_index = index.lookup_prefix
        self._admission = make_admission(options.admission)
        self._events = EventLog(context.name, context.distance, enabled=context.enable_events, shared=index.shared)
        num_rows = context.primary_view.shape[0] if context.primary_view.shape else 0
        self._overdue = OverdueLoads(int(num_rows * options.primary_share))
        writes = options.admission != "none"
        self._medium = Medium(
            context.name, store, context.namespace, revision=context.revision, shared=index.shared, writes=writes
        )
        self._lease = Lease(context.name, store, self.io, context.clock)
        self._service = TierService(context.name, self._medium, self.io, options.breaker, context.clock, self._entered)
        self._health = HealthCheck(store, index, self.io, context.group_bytes, self.retire)
        self._budget = StoreBudget(context.group_bytes, options.max_queued)
        self._offers = Offers(self._admission, self._budget)
        self._failures = FailureLog(context.name, context.clock)

        self._serving = False
        self._storing = False
        self._opened = False
        self._closed = False
        self._closing = False
        self._resets = 0
        self._was_reset = False
        self._flights: dict[int, Flight] = {}
        self._finished: list[JobResult] = []
        self._hits = 0
        self._misses = 0
        inert_in_children(self, InertTier)

    @abstractmethod
    def _poll(self) -> None:
        """Take what the I/O side has ended."""

    # --------------------------------------------------------------------------------------------- hooks for subclasses

    def on_opened(self, namespace: Namespace) -> None:
        """The store is open for the first time, and its blocks are to be served in ``namespace``: the place to start recovery."""

    def on_left(self) -> None:
        """A reset has begun: :attr:`namespace` is None, and the index is about to be emptied."""

    def on_epoch(self, namespace: Namespace) -> None:
        """A reset has begun the epoch of ``namespace``; the index is empty, and what is on the medium is foreign."""

    def on_step(self) -> None:
        """The end of a step: the place to start periodic work (as an :class:`~tiering.secondary.io.messages.IoTask`)."""

    def on_result(self, result: IoResult) -> None:
        """A job has ended, and the index has not been told yet."""

    def before_close(self, deadline: float) -> None:
        """Jobs have ended, or their time has, and the store is still open.  May block until ``deadline``."""

    @property
    def recovering(self) -> bool:
        """Whether it is not known yet what all of the medium holds (for subclasses that recover something)."""
        return False

    def revoked_places(self) -> Collection[Place]:
        """Places that the medium lost while jobs ran: what was written there does not count."""
        return ()

    def announce_removed(self, keys: Sequence[OffloadKey]) -> None:
        """For subclasses: ``keys`` are not held any more, though neither evicted nor found corrupt."""
        self._events.removed(keys)

    def announce_stored(self, keys: Sequence[OffloadKey]) -> None:
        """For subclasses: ``keys`` became held without a job (recovery)."""
        self._events.stored(keys)

    def retire(self, places: Sequence[Place]) -> None:
        """For subclasses too: the device reported an error at ``places``; what is there is lost, and nothing is put there again."""
        self._events.removed(self.index.retire(places))

    # --------------------------------------------------------------------------------------- may block until a deadline

    def open(self, deadline: float) -> bool:
        self._service.start()
        self._wait(lambda: not self._service.attempting, deadline)
        if self._service.attempting:
            logger.error(
                "tier %s: opening takes longer than its deadline; the engine runs without it until then", self.name
            )
        self._refresh()
        return self._serving

    def drain(self, deadline: float) -> bool:
        self.io.drain(deadline)
        self._poll()
        return not self._flights

    def reset(self, deadline: float, revision: str | None = None) -> bool:
        """See the base class.  On a shared medium it is certain at once, because only this process moves to another epoch."""
        target = self._medium.target(revision)
        self._was_reset = True
        try:
            self._forget_blocks()
            self._admission.clear()
            self._offers.clear()
        finally:
            # What is on the medium must become foreign, whatever state the tier is in.
            self._service.leave(target)
        self.io.discard()
        # At least once, also if there is no time left: an attempt that no thread could be had for is tried in another
        # way then.
        self._poll()
        self._wait(self._reset_decided, deadline)
        if not self.reset_done():
            logger.error("tier %s: its reset is not certain after a restart yet; out of service until it is", self.name)
        self._refresh()
        return self.reset_done()

    def _forget_blocks(self) -> None:
        """From here on no result is of the present epoch, and nothing is answered."""
        self._resets += 1
        self.namespace = None
        self._serving = False
        self._finished = [replace(result, success=False, successful_keys=[]) for result in self._finished]
        self.on_left()
        self._events.cleared(self.index.clear())

    def leave_medium(self) -> None:
        """For subclasses: the medium is not the one that was opened.  Nothing is answered until :meth:`enter_medium`."""
        self._service.suspend()
        self._forget_blocks()
        self.io.discard()
        self._refresh()

    @property
    def idle(self) -> bool:
        """For subclasses: no job runs, and the medium is not being opened."""
        return not self._flights and not self._service.attempting

    def enter_medium(self) -> None:
        """For subclasses: the store was closed after :meth:`leave_medium`; open it again.

        What another medium holds in the epoch of the start may be older than a reset of this process: then a new epoch
        begins.
        """
        self._service.resume(self._medium.target(None) if self._was_reset else None)

    def reset_done(self) -> bool:
        return self._medium.shared or self._service.in_service

    def _reset_decided(self) -> bool:
        return self.reset_done() or not self._service.attempting

    def shutdown(self, deadline: float) -> bool:
        if self._closed:
            return True
        first = not self._closing
        self._closing = True
        self._service.stop()
        self._lease.hold(None)
        self._refresh()
        now = self._clock()
        self.drain(now + (deadline - now) * _DRAIN_SHARE)
        if first:
            try:
                self.before_close(now + (deadline - now) * _PREPARE_SHARE)
            except Exception:
                logger.exception("tier %s: preparing the end failed; closing all the same", self.name)
        self._closed = self.io.close(deadline)
        self._poll()
        if self._closed:
            self._medium.close(deadline - self._clock())
        else:
            logger.error("tier %s: %d jobs did not end in time; their rows stay in use", self.name, len(self._flights))
        return self._closed

    def _wait(self, ended: Callable[[], bool], deadline: float) -> None:
        while not ended():
            remaining = deadline - self._clock()
            if remaining <= 0:
                return
            self.io.wait(min(remaining, _WAIT_SLICE))
            self._poll()

    def _entered(self, namespace: Namespace) -> None:
        """An epoch has been entered: at the first opening, or by a reset."""
        self.namespace = namespace
        self._lease.hold(namespace if self._medium.needs_lease(namespace) else None)
        if self._place_prefix is not None:
            self.index.enter(self._place_prefix(namespace))
        first, self._opened = not self._opened, True
        if first:
            self.on_opened(namespace)
        else:
            self.on_epoch(namespace)
        self._refresh()

    def _tick(self, now: float) -> None:
        self._service.tick(now)
        self._lease.tick(now)
        self._health.tick()
        for rows in self._overdue.expire(now):
            self.stats.loads_overdue += rows
            self.io.breakers.reads.record_failure(
                f"a load of {rows} blocks did not end within {self.options.deadline:g} s"
            )
            if self._overdue.spent:
                self.io.breakers.trip(f"{self._overdue.rows} primary rows are held by loads that do not end")
        self._refresh()

    def _refresh(self) -> None:
        """Fold all that decides whether the tier answers, and takes stores, into two attributes, for the hot path."""
        self._serving = (
            self._service.in_service
            and self.io.breakers.reads.state is BreakerState.CLOSED
            and not self._overdue.spent
            and not self._closing
        )
        self._storing = self._serving and self.io.breakers.writes.state is BreakerState.CLOSED
