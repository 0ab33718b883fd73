"""Life cycle of a block tier: opening, epochs, resets, and shutdown.

A tier's life::

          open              entered                     shutdown
    built ----> opening -----------------> in service ----------> closed
                ^  |  ^                     |   |   ^
        backoff |  |  |  reset, invalidation|   |   | a probe succeeds, overdue loads end
                +--+  +---------------------+   |   |
               failed |                         v   |
                      |             no lookups, loads or stores: breaker open, rows of overdue loads
         enter_medium |
                      +--- suspended <--- leave_medium (the medium is not the one that was opened)

A tier is shut down from every state. A reset of a shared medium needs no opening: the tier is in the new epoch at once.
A tier in service whose ``successor`` or ``outdated`` is set stays in its epoch until the manager calls ``follow``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from tiering.api.namespace import NO_EPOCH, Namespace
from tiering.block_tier.epoch_chores import EpochRecord, EpochWatch, Lease
from tiering.block_tier.health import HealthCheck
from tiering.block_tier.parts import TierHooks, TierParts
from tiering.block_tier.service import TierService
from tiering.block_tier.transfers import BlockTransfers
from tiering.epochs.machine import judge
from tiering.epochs.opener import Opener
from tiering.epochs.state import CommonEpoch, Entered, EpochVerdict, Target
from tiering.medium.layers.breaker import BreakerState
from tiering.secondary.agreement import MetEpoch

logger = logging.getLogger("kv_tiering.tier")

PlacePrefix = Callable[[Namespace], str]
"""Function that returns the prefix of a namespace's places, on media whose places are names."""

_WAIT_SLICE = 0.1

_DRAIN_SHARE = 0.75
"""Share of the time for a shutdown that jobs may take; a job that hangs must not take the rest."""

_PREPARE_SHARE = 0.9
"""Share of the time for a shutdown after which ``before_close`` must have ended."""


class TierLife:
    """Opens the medium of one tier, moves the tier between epochs, and shuts it down.

    Methods without a description are those that :class:`~tiering.block_tier.tier.BlockTier` describes.

    Args:
        parts: parts of the tier.
        hooks: the tier, whose hooks are called.
        jobs: jobs of the tier.
        place_prefix: for media whose places are names: prefix of the places of a namespace; None: places are slots.
    """

    def __init__(
        self, parts: TierParts, hooks: TierHooks, jobs: BlockTransfers, place_prefix: PlacePrefix | None
    ) -> None:
        context, options, store, index, io = parts.context, parts.options, parts.store, parts.index, parts.io
        self.namespace: Namespace | None = None
        """Namespace in the present epoch; None while the tier has no epoch."""
        self.serving = False
        """True while the tier answers lookups and takes loads."""
        self.storing = False
        """True while the tier takes stores."""
        self.opened = False
        """True once the medium has been open."""
        self._name = context.name
        self._clock = context.clock
        self._index = index
        self._io = io
        self._reads, self._writes = io.breakers.reads, io.breakers.writes
        self._intake = parts.intake
        self._events = parts.events
        self._hooks = hooks
        self._jobs = jobs
        self._place_prefix = place_prefix
        self._agreement = context.agreement
        self._opener = Opener(context, store, shared=index.shared, writes=options.admission != "none")
        self._durable = not store.traits.forgets
        self._record = None if index.shared else EpochRecord(parts, self._opener, lambda: jobs.stored)
        self._lease = Lease(parts)
        self._watch = EpochWatch(parts, self._opener.history, self._found)
        self.service = TierService(context, self._opener, io, options.breaker, self._entered)
        """Service of the tier, which opens the medium and enters epochs."""
        self._health = HealthCheck(parts, hooks.retire)
        self._namespace = context.namespace
        self._closed = False
        self._closing = False
        self.private = False
        """True after a reset without revision: no other process reads the blocks stored on a shared medium."""
        self._was_reset = False
        self._common: CommonEpoch | None = None
        """The common epoch that the tier is in; None if it is in none."""
        self.successor: CommonEpoch | None = None
        """The new common epoch that :meth:`follow` enters; None if there is none."""
        self.outdated = False
        """True if the tier must not be used before the manager has dropped all older blocks."""
        self._agreement.join(self)

    def tick(self, now: float) -> None:
        """Start the work that is due at ``now``, and count overdue jobs.

        The tier calls this method several times per step. Where nothing is due, a comparison replaces the call.
        """
        if not self.service.in_service:
            self.service.tick(now)
        if now >= self._lease.due:
            self._lease.tick(now)
        if self._record is not None and self._record.written is not self._agreement.met:
            self._record.tick(now)
        if now >= self._watch.due:
            self._watch.tick(now)
        if self._reads.state is not BreakerState.CLOSED or self._writes.state is not BreakerState.CLOSED:
            self._health.tick()
        if self._jobs.overdue.deadlines:
            self._jobs.expire(now)
        if now >= self._jobs.stores_due:
            self._jobs.expire_stores(now)
        self._refresh()

    @property
    def calm(self) -> bool:
        """True if the tier serves and stores, and no other epoch awaits it."""
        record = self._record
        return self.storing and self.successor is None and (record is None or record.written is self._agreement.met)

    def _refresh(self) -> None:
        """Cache for the hot path if the tier answers lookups and takes stores, in two attributes."""
        self.serving = (
            self.service.in_service
            and self.namespace is not None
            and self._reads.state is BreakerState.CLOSED
            and not (self._jobs.overdue.rows and self._jobs.overdue.spent)
            and not self.outdated
            and not self._closing
        )
        self.storing = self.serving and self._writes.state is BreakerState.CLOSED

    # --------------------------------------------------------------------------------------- may block until a deadline

    def wait(self, ended: Callable[[], bool], deadline: float) -> None:
        while not ended():
            remaining = deadline - self._clock()
            if remaining <= 0:
                return
            self._io.wait(min(remaining, _WAIT_SLICE))
            self._jobs.poll()

    def open(self, deadline: float) -> bool:
        waits = self._clock() < deadline
        self._io.start(deadline, lookups=self._index.shared)
        self.service.start()
        self.wait(lambda: not self.service.running, deadline)
        if waits and self.service.running:
            logger.error(
                "tier %s: opening takes longer than its deadline; the engine runs without the tier until it is open",
                self._name,
            )
        self._refresh()
        return self.serving

    def drain(self, deadline: float) -> bool:
        self.wait(self._jobs.begin_decided, deadline)
        self._io.drain(deadline)
        self._jobs.poll()
        self.wait(lambda: not self._jobs.places_wanted or self._index.places_ready > 0, deadline)
        return self._jobs.begin_decided() and not self._jobs.running

    def reset(self, deadline: float, revision: str | None) -> bool:
        """Begin a new epoch, and return True if the invalidation of all older blocks is certain.

        On a shared medium the reset is certain at once, because only this process moves to another epoch.
        """
        target = self._opener.target(revision)
        self.private = self._opener.shared and revision is None
        self._was_reset = True
        return self._leave_for(target, deadline)

    def _leave_for(self, target: Target, deadline: float) -> bool:
        """Leave the present epoch for that of ``target``, and return True if this is certain."""
        self.successor, self.outdated = None, False
        try:
            self._leave_epoch()
            self._intake.clear()
        finally:
            # The blocks on the medium must become foreign, whatever state the tier is in.
            self.service.leave(target)
        self._io.drop_waiting()
        self._jobs.poll()
        waits = self._clock() < deadline
        self.wait(lambda: self.reset_done or not self.service.running, deadline)
        if waits and not self.reset_done:
            logger.error(
                "tier %s: the reset is not durable yet; the tier is out of service until the reset is durable",
                self._name,
            )
        self._refresh()
        return self.reset_done

    @property
    def reset_done(self) -> bool:
        """True if the invalidation by the last reset is certain."""
        return self._opener.shared or self.service.in_service

    def shutdown(self, deadline: float) -> bool:
        """Shut the tier down until ``deadline``, and return True if it no longer touches the primary rows."""
        if self._closed:
            return True
        first = not self._closing
        self._closing = True
        self.service.stop()
        self._lease.hold(None)
        self._watch.watch(None)
        self.successor, self.outdated = None, False
        self._refresh()
        now = self._clock()
        self.drain(now + (deadline - now) * _DRAIN_SHARE)
        self._jobs.drop_undecided()
        if first:
            try:
                self._hooks.before_close(now + (deadline - now) * _PREPARE_SHARE)
            except Exception:
                logger.exception("tier %s: preparing the shutdown failed; the tier closes all the same", self._name)
        self._closed = self._io.close(deadline)
        self._jobs.poll()
        if not self._index.close(deadline - self._clock()):
            logger.warning("tier %s: a thread of its index ends later, with the process at the latest", self._name)
        if self._closed:
            self._opener.close(deadline - self._clock())
        else:
            running = self._jobs.running
            what = (
                f"{running} jobs did not end in time; their rows stay in use"
                if running
                else "a call to its medium did not end"
            )
            logger.error("tier %s: %s, and the medium is closed when its I/O ends", self._name, what)
            self._opener.close(0.0, self._io.join)
        return self._closed

    def leave_medium(self) -> None:
        self.service.suspend()
        self._leave_epoch()
        self._io.drop_waiting()
        self._refresh()

    def enter_medium(self) -> None:
        self.service.resume(self._opener.target(None) if self._was_reset else None)

    def _leave_epoch(self) -> None:
        """Leave the present epoch: no result counts for it any more, and lookups find nothing."""
        self._jobs.leave()
        self.namespace = self._common = None
        self._watch.watch(None)
        if self._record is not None:
            self._record.keep(None)
        self.serving = self.storing = False
        self._hooks.on_left()
        self._events.cleared(self._index.clear())

    def _found(self, found: CommonEpoch) -> None:
        """Act on the common epoch that a look has found.

        If blocks may be older, the tier stays in its epoch until the primary tier is empty too; the new epoch gets no
        older block.
        """
        if self.namespace is None or self._common is None or found.epoch is None or not self.service.in_service:
            return
        verdict = judge(self._common, found, self._agreement.known)
        if verdict is EpochVerdict.FOLLOW:
            logger.warning(
                "tier %s: a new common epoch has begun; the engine drops all blocks that were stored before", self._name
            )
            self.successor = found
        elif verdict is EpochVerdict.REOPEN:
            self._reopen()
        elif verdict is EpochVerdict.ENTER:
            logger.warning(
                "tier %s: the medium was restored or emptied; older blocks are ignored from now on", self._name
            )
            self._leave_for_common(found, dropped=False)
        else:
            self._common = found
        self._refresh()

    def compare(self, medium: bytes, met: MetEpoch) -> bool | None:
        """Return True if all blocks were stored in ``met``, False if some may be older, None if none can be."""
        if self._record is not None:
            return self._record.compare(medium, met)
        # The rows may hold blocks of this tier.
        younger = self._common is None or self._common.covers(met.invalidations)
        return None if younger or not self._agreement.in_use else False

    def invalidated(self, *, dropped: bool) -> None:
        """Leave the present epoch if its blocks may be older than an invalidation that was just found.

        Args:
            dropped: True if the manager is dropping all older blocks at this moment.
        """
        if self._record is not None:
            if self._record.invalidated(dropped=dropped):
                return
        elif self._common is None or self._common.covers(self._agreement.known):
            return
        if self._agreement.in_use and not dropped:
            # The rows may hold blocks of this tier.
            self.outdated = True
        elif self._record is None:
            self._reopen()
        else:
            self._leave_epoch()
            self.service.leave(self._successor())
        self._refresh()

    def follow(self, deadline: float) -> bool:
        """Leave all blocks stored before, because a new common epoch has begun in a tier of the stack.

        A tier whose common epoch has a successor enters it. Another shared tier that lacks the invalidation is out of
        service until its medium has begun an epoch for it.
        """
        (successor, self.successor), (outdated, self.outdated) = (self.successor, None), (self.outdated, False)
        if not self._opener.shared:
            return self._leave_for(self._successor(), deadline)
        if successor is not None:
            self._leave_for_common(successor, dropped=True)
        elif outdated:
            self._reopen()
        self._refresh()
        return True

    def _successor(self) -> Target:
        """Return a new epoch for the blocks of this process from now on.

        After a reset, its weights are not those of its start, so its blocks stay its own.
        """
        return self._opener.target(None) if self._was_reset else self._opener.successor()

    def _leave_for_common(self, common: CommonEpoch, *, dropped: bool) -> None:
        """Enter ``common``, whose blocks are younger than all that the machine holds or is dropping.

        Args:
            common: the common epoch.
            dropped: True if the manager is dropping all older blocks at this moment.
        """
        self._drop_work()
        common = self._opener.history.accept(common)
        self._agreement.enter(self._name, self._met(common), dropped=dropped)
        # A medium that is being opened again may have a later epoch by now, which the attempt finds.
        if common.epoch is not None and self.service.in_service and common.covers(self._agreement.known):
            self._settle(Entered(self._namespace.with_epoch(common.epoch), common))
        else:
            self.service.again()

    def _reopen(self) -> None:
        """Leave the common epoch, and open the medium again in one that has all known invalidations."""
        self._drop_work()
        self.service.again()

    def _drop_work(self) -> None:
        self._leave_epoch()
        self._intake.drop_wanted()
        self._io.drop_waiting()

    def _met(self, common: CommonEpoch) -> MetEpoch:
        return MetEpoch(
            common.epoch or NO_EPOCH,
            common.invalidations,
            common.history,
            durable=self._durable,
            unexplained=common.unexplained,
        )

    def _entered(self, entered: Entered) -> None:
        """Use the epoch that was entered, unless blocks may be older than an invalidation."""
        namespace, common = entered.namespace, entered.common
        if self._record is not None:
            self._agreement.learn(self._opener.invalidations)
            if not self._record.admits(namespace):
                logger.warning("tier %s: its blocks may be older than a new common epoch and are dropped", self._name)
                self.service.leave(self._successor())
                return
            self._record.keep(namespace)
        elif common is not None:
            if not common.covers(self._agreement.known):
                # Another tier has found an invalidation while this one was opened.
                self.service.again()
                return
            if not self._agreement.admits(self._name, self._met(common)):
                logger.warning(
                    "tier %s: blocks of this machine may be older than its common epoch; "
                    "the engine drops all blocks that were stored before",
                    self._name,
                )
                self.successor = common
                self._refresh()
                return
            entered = replace(entered, common=self._opener.history.accept(common))
            self._agreement.enter(self._name, self._met(common))
        self._settle(entered)

    def _settle(self, entered: Entered) -> None:
        """Store and look up blocks in the epoch that was entered, from now on."""
        namespace, common = entered.namespace, entered.common
        self._common = common
        self.namespace = namespace
        self._jobs.enter(namespace)
        self._lease.hold(namespace if self._opener.needs_lease(entered) else None)
        self._watch.watch(namespace if common is not None else None)
        if self._place_prefix is not None:
            self._index.enter(self._place_prefix(namespace))
        first, self.opened = not self.opened, True
        if first:
            self._hooks.on_opened(namespace)
        else:
            self._hooks.on_epoch(namespace)
        self._refresh()
