"""Life cycle of a generic tier: construction, opening, resets, and shutdown."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tiering.api.keys import OffloadKey
from tiering.api.namespace import Namespace
from tiering.block_store import BlockStore, Place
from tiering.errors import ConfigError
from tiering.runtime.forks import inert_in_children
from tiering.secondary.contract import JobResult, SecondaryTierManager, TierContext, TransferJob
from tiering.secondary.event_log import EventLog
from tiering.secondary.index.contract import TierIndex
from tiering.secondary.inert import InertTier
from tiering.secondary.intake import Offers, StoreBudget, make_admission
from tiering.secondary.io.assembly import build_io_host
from tiering.secondary.io.layers.breaker import BreakerState
from tiering.secondary.io.messages import IoResult
from tiering.secondary.io.side import IoSide
from tiering.secondary.options import BlockTierOptions
from tiering.secondary.service.common_epoch import EpochWatch
from tiering.secondary.service.corrupt import CorruptBlocks
from tiering.secondary.service.epoch import Target
from tiering.secondary.service.failures import FailureLog
from tiering.secondary.service.health import HealthCheck
from tiering.secondary.service.lease import Lease
from tiering.secondary.service.medium import Medium
from tiering.secondary.service.overdue import OverdueLoads
from tiering.secondary.service.service import TierService
from tiering.secondary.stats import TierStats

logger = logging.getLogger("kv_tiering.tier")

PlacePrefix = Callable[[Namespace], str]
"""Function that returns the prefix of a namespace's places, on media whose places are names."""

_WAIT_SLICE = 0.1

_DRAIN_SHARE = 0.75
"""Share of the time for a shutdown that jobs may take; a job that hangs must not take the rest."""

_PREPARE_SHARE = 0.9
"""Share of the time for a shutdown after which ``before_close`` must have ended."""


@dataclass(frozen=True, slots=True)
class Flight:
    """Job that runs on the I/O side."""

    job: TransferJob
    """The job as the manager submitted it."""
    held: list[OffloadKey]
    """Keys that need no I/O, because the medium holds them already."""
    bytes: int
    """Bytes of the job that count against the store budget; 0 for loads."""
    resets: int
    """Number of resets of the tier before the job was submitted."""


class TierLife(SecondaryTierManager):
    """Parts of a block tier, its hooks for subclasses, and its life cycle.

    :class:`tiering.secondary.block_tier.BlockTier` documents the parameters, and adds lookups and jobs.
    """

    def __init__(
        self,
        context: TierContext,
        options: BlockTierOptions,
        store: BlockStore,
        index: TierIndex,
        *,
        place_prefix: PlacePrefix | None = None,
        element_size: int = 2,
        io: IoSide | None = None,
    ) -> None:
        if not isinstance(options, BlockTierOptions):
            raise ConfigError(
                f"tier {context.name}: its options, {type(options).__name__}, lack the words of a BlockTier; "
                "derive the class from tiering.tier.BlockTierOptions"
            )
        self.context = context
        """Environment of the tier."""
        self.options = options
        """Options of the tier."""
        self.store = store
        """The medium, without layers."""
        self.index = index
        """Index of the blocks on the medium."""
        self.io: IoSide = io or build_io_host(store, options, context, element_size=element_size, clock=context.clock)
        """I/O side of the tier."""
        self.namespace: Namespace | None = None
        """Namespace in the present epoch; None while the tier has no epoch."""
        self.stats = TierStats()
        """Counters that the scheduler's thread updates; :meth:`get_stats` adds the others."""

        self.name = context.name
        self.medium = store.traits.medium
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
        self._watch = EpochWatch(context.name, store, self.io, context.clock, self._follow)
        self._service = TierService(context.name, self._medium, self.io, options.breaker, context.clock, self._entered)
        self._health = HealthCheck(store, index, self.io, context.group_bytes, self.retire)
        self._corrupt = CorruptBlocks(context.name, index, self.io, store.traits.header_bytes, context.clock)
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
        """Process the jobs that the I/O side has ended."""

    # --------------------------------------------------------------------------------------------- hooks for subclasses

    def on_opened(self, namespace: Namespace) -> None:
        """Hook: the store is open for the first time and serves ``namespace``; the place to start recovery."""

    def on_left(self) -> None:
        """Hook: a reset has begun; :attr:`namespace` is None, and the index is about to be emptied."""

    def on_epoch(self, namespace: Namespace) -> None:
        """Hook: a reset has begun the epoch of ``namespace``.

        The index is empty, and all blocks on the medium are foreign.
        """

    def on_step(self) -> None:
        """Hook: a step has ended; the place to start periodic work.

        Start such work as an :class:`~tiering.secondary.io.messages.IoTask`.
        """

    def on_result(self, result: IoResult) -> None:
        """Hook: a job has ended, and the index has not recorded its result yet."""

    def before_close(self, deadline: float) -> None:
        """Hook: jobs have ended or their time is over, and the store is still open.

        May block until ``deadline``.
        """

    @property
    def recovering(self) -> bool:
        """True while the content of the medium is not entirely known (for subclasses with recovery)."""
        return False

    def revoked_places(self) -> Collection[Place]:
        """Return places that the medium lost while jobs ran; blocks written there do not count."""
        return ()

    def announce_removed(self, keys: Sequence[OffloadKey]) -> None:
        """Announce that ``keys`` are not held any more, though neither evicted nor corrupt (for subclasses)."""
        self._events.removed(keys)

    def announce_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Announce that ``keys`` became held without a job, by recovery (for subclasses)."""
        self._events.stored(keys)

    def retire(self, places: Sequence[Place]) -> None:
        """Take ``places`` with a device error out of use; their blocks are lost (also for subclasses)."""
        self._events.removed(self.index.retire(places))

    # --------------------------------------------------------------------------------------- may block until a deadline

    def open(self, deadline: float) -> bool:
        self._service.start()
        self._wait(lambda: not self._service.attempting, deadline)
        if self._service.attempting:
            logger.error(
                "tier %s: opening takes longer than its deadline; the engine runs without the tier until it is open",
                self.name,
            )
        self._refresh()
        self.open_error = self._service.error
        return self._serving

    def drain(self, deadline: float) -> bool:
        self.io.drain(deadline)
        self._poll()
        return not self._flights

    def reset(self, deadline: float, revision: str | None = None) -> bool:
        """Begin a new epoch; see the base class.

        On a shared medium the reset is certain at once, because only this process moves to another epoch.
        """
        target = self._medium.target(revision)
        self._was_reset = True
        try:
            self._forget_blocks()
            self._admission.clear()
            self._offers.clear()
        finally:
            # The blocks on the medium must become foreign, whatever state the tier is in.
            self._service.leave(target)
        self.io.discard()
        # Poll at least once, also if there is no time left: an attempt without a thread then uses an existing one.
        self._poll()
        self._wait(self._reset_decided, deadline)
        if not self.reset_done():
            logger.error(
                "tier %s: the reset is not durable yet; the tier is out of service until the reset is durable",
                self.name,
            )
        self._refresh()
        return self.reset_done()

    def _forget_blocks(self) -> None:
        """Leave the present epoch: no result counts for it any more, and lookups find nothing."""
        self._resets += 1
        self.namespace = None
        self._serving = False
        self._finished = [replace(result, success=False, successful_keys=[]) for result in self._finished]
        self.on_left()
        self._events.cleared(self.index.clear())

    def leave_medium(self) -> None:
        """Stop service because the medium is not the one that was opened (for subclasses).

        Lookups find nothing until :meth:`enter_medium`.
        """
        self._service.suspend()
        self._forget_blocks()
        self.io.discard()
        self._refresh()

    @property
    def idle(self) -> bool:
        """True if no job runs and the medium is not being opened (for subclasses)."""
        return not self._flights and not self._service.attempting

    def enter_medium(self) -> None:
        """Open the store again after :meth:`leave_medium` and its closing (for subclasses).

        On another medium, the blocks in the epoch of the start may be older than a reset of this process. After a
        reset, a new epoch therefore begins.
        """
        self._service.resume(self._medium.target(None) if self._was_reset else None)

    def reset_done(self) -> bool:
        return self._medium.shared or self._service.in_service

    def _follow(self, namespace: Namespace) -> None:
        """Move to the common epoch of ``namespace``, which another process has begun."""
        if not self._service.in_service or self.namespace is None:
            return
        self._medium.follow(namespace)
        self._forget_blocks()
        self._offers.clear()
        self.io.discard()
        self._service.leave(Target(namespace))

    def _reset_decided(self) -> bool:
        return self.reset_done() or not self._service.attempting

    def shutdown(self, deadline: float) -> bool:
        if self._closed:
            return True
        first = not self._closing
        self._closing = True
        self._service.stop()
        self._lease.hold(None)
        self._watch.watch(None, None)
        self._refresh()
        now = self._clock()
        self.drain(now + (deadline - now) * _DRAIN_SHARE)
        if first:
            try:
                self.before_close(now + (deadline - now) * _PREPARE_SHARE)
            except Exception:
                logger.exception("tier %s: preparing the shutdown failed; the tier closes all the same", self.name)
        self._closed = self.io.close(deadline)
        self._poll()
        if self._closed:
            self._medium.close(deadline - self._clock())
        else:
            logger.error(
                "tier %s: %d jobs did not end in time; their rows stay in use, "
                "and the medium is closed when its I/O ends",
                self.name,
                len(self._flights),
            )
            self._medium.close(0.0, self.io.join)
        return self._closed

    def _wait(self, ended: Callable[[], bool], deadline: float) -> None:
        while not ended():
            remaining = deadline - self._clock()
            if remaining <= 0:
                return
            self.io.wait(min(remaining, _WAIT_SLICE))
            self._poll()

    def _entered(self, namespace: Namespace) -> None:
        """Record that an epoch has been entered, at the first opening or by a reset."""
        self.namespace = namespace
        self._lease.hold(namespace if self._medium.needs_lease(namespace) else None)
        self._watch.watch(namespace, self._medium.common(namespace))
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
        self._watch.tick(now)
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
        """Cache for the hot path if the tier answers lookups and takes stores, in two attributes."""
        self._serving = (
            self._service.in_service
            and self.io.breakers.reads.state is BreakerState.CLOSED
            and not self._overdue.spent
            and not self._closing
        )
        self._storing = self._serving and self.io.breakers.writes.state is BreakerState.CLOSED
