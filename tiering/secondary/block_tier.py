"""The generic secondary tier: an index on the scheduler's thread, and an I/O side that moves bytes to and from a block store.

One block's way.  Store: admission → a place from the index → one job for the I/O side → its result → the index holds the key.
Load: the index says where → one job → verified bytes are in the row → its result.  Whatever fails on the way is a miss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress

from tiering.base import OffloadingEvent, OffloadKey, ReqContext
from tiering.block_store import BlockStore, Done, Outcome, Place
from tiering.errors import CorruptBlockError, DeviceError, OverdueError
from tiering.forks import inert_in_children
from tiering.namespace import Namespace
from tiering.options import TierOptions
from tiering.secondary.admission import make_admission
from tiering.secondary.base import JobResult, PrefixAnswer, SecondaryTierManager, TierContext, TransferJob
from tiering.secondary.event_log import EventLog
from tiering.secondary.failures import FailureLog
from tiering.secondary.health import HealthCheck
from tiering.secondary.index.base import Probe, TierIndex
from tiering.secondary.inert import InertTier
from tiering.secondary.io_host import build_io_host
from tiering.secondary.io_side import IoSide
from tiering.secondary.layers.breaker import BreakerState
from tiering.secondary.lease import Lease
from tiering.secondary.medium import Medium
from tiering.secondary.messages import IoJob, IoKind, IoResult, IoTask
from tiering.secondary.offers import OFFER_AGAIN_AFTER, Offers
from tiering.secondary.overdue import OverdueLoads
from tiering.secondary.prober import held_prefix
from tiering.secondary.service import TierService
from tiering.secondary.stats import TierStats
from tiering.secondary.store_budget import StoreBudget

logger = logging.getLogger("kv_tiering.tier")

PlacePrefix = Callable[[Namespace], str]
"""Names where the blocks of a namespace (and epoch) are, on media whose places are names."""

_NO = PrefixAnswer(0, False)
_WAIT_SLICE = 0.1

_DRAIN_SHARE = 0.75
"""Of the time for a shutdown, what jobs may take: one that hangs must not cost the rest of it."""

_PREPARE_SHARE = 0.9
"""Of the time for a shutdown, when preparing the end must be over, so that there is some left for the end itself."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A job on the I/O side: what the manager submitted, and what of it needed no I/O."""

    job: TransferJob
    held: list[OffloadKey]
    bytes: int
    resets: int
    """Resets of the tier before it was submitted."""


class BlockTier(SecondaryTierManager):
    """A tier made of an index and a block store.

    ``place_prefix``: for media whose places are names: the index is told ``place_prefix(namespace)`` whenever an epoch is entered.
    ``element_size``: bytes of one KV element (compression splits by it).  ``io``: another I/O side than the one made here.

    Subclasses have ``context``, ``options``, ``store``, ``index``, ``io``, ``stats`` and ``namespace`` (that of the present epoch;
    None while out of service for want of one), and the hooks ``on_opened``, ``on_left``, ``on_epoch``, ``on_step``, ``on_result`` and
    ``before_close``, all called on the scheduler's thread.
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
        self._medium = Medium(context.name, store, context.namespace, revision=context.revision, shared=index.shared, writes=writes)
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
        self._flights: dict[int, _Flight] = {}
        self._finished: list[JobResult] = []
        self._hits = 0
        self._misses = 0
        inert_in_children(self, InertTier)

    # ------------------------------------------------------------------------------------------------ hooks for subclasses

    def on_opened(self, namespace: Namespace) -> None:
        """The store is open for the first time, and its blocks are to be served in ``namespace``: the place to start recovery."""

    def on_left(self) -> None:
        """A reset has begun: :attr:`namespace` is None, and the index is about to be emptied."""

    def on_epoch(self, namespace: Namespace) -> None:
        """A reset has begun the epoch of ``namespace``; the index is empty, and what is on the medium is foreign."""

    def on_step(self) -> None:
        """The end of a step: the place to start periodic work (as an :class:`~tiering.secondary.messages.IoTask`)."""

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

    # ------------------------------------------------------------------------------------------------------------- lookup

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        held, undecided = self.lookup_prefix((key,), req_context)
        return None if undecided else held == 1

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        if not self._serving:
            return _NO
        answer = self._lookup_index(keys, self._clock())
        held = answer[0]
        self._hits += held
        if held != len(keys):
            if answer[1]:
                self._start_probes()
            else:
                self._misses += 1
        return answer

    def _start_probes(self) -> None:
        for probe in self.index.take_probes(self._clock()):
            self.io.run(IoTask("probe", partial(held_prefix, self.io.store.probe, probe), partial(self._probed, probe)))

    def _probed(self, probe: Probe, held: int | None, error: BaseException | None) -> None:
        now = self._clock()
        self._offers.add(self.index.end_probe(probe, held, now), now)

    # --------------------------------------------------------------------------------------------------------------- jobs

    def submit_store(self, job: TransferJob) -> None:
        if not self._storing:
            self.stats.stores_dropped += len(job.keys)
            self._finish(job, ())
            return
        positions = self._admission.admit(job.keys, job.req_context.req_id)
        self.stats.stores_declined += len(job.keys) - len(positions)
        keys = job.keys if len(positions) == len(job.keys) else [job.keys[position] for position in positions]
        fitting = self._budget.fitting(keys)
        if fitting < len(keys):
            self.stats.stores_dropped += len(keys) - fitting
            keys, positions = keys[:fitting], positions[:fitting]
        now = self._clock()
        plan = self.index.plan_store(keys, now)
        self.stats.evictions += len(plan.evicted)
        self._events.removed(plan.evicted)
        self.stats.stores_declined += len(keys) - len(plan.positions) - len(plan.already_held)
        held = [keys[position] for position in plan.already_held]
        self._events.found(held)
        if not plan.positions:
            self._finish(job, held)
            return
        if len(plan.positions) == len(job.keys):
            rows = job.block_ids.tolist()
        else:
            chosen = [positions[position] for position in plan.positions]
            keys = [job.keys[position] for position in chosen]
            rows = job.block_ids[chosen].tolist()
        self._hand_over(job, IoKind.STORE, keys, rows, plan.places, held)

    def submit_load(self, job: TransferJob) -> None:
        if not self._serving:
            self.stats.promotions_failed += len(job.keys)
            self._finish(job, ())
            return
        places = self.index.begin_load(job.keys)
        keys, rows = job.keys, job.block_ids.tolist()
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            there = [place is not None for place in places]
            keys, rows = list(compress(keys, there)), list(compress(rows, there))
            self.stats.promotions_failed += len(places) - len(known)
        if not known:
            self._finish(job, ())
            return
        self._overdue.begin(job.job_id, job.submitted_at + self.options.deadline, len(known))
        self._hand_over(job, IoKind.LOAD, keys, rows, known, [])

    def get_finished(self) -> Iterable[JobResult]:
        self._poll()
        self._tick(self._clock())
        finished, self._finished = self._finished, []
        return finished

    def _hand_over(
        self,
        job: TransferJob,
        kind: IoKind,
        keys: Sequence[OffloadKey],
        rows: list[int],
        places: list[Place],
        held: list[OffloadKey],
    ) -> None:
        sizes = self._budget.sizes(keys)
        stored_bytes = sum(sizes) if kind is IoKind.STORE else 0
        self._budget.used += stored_bytes
        self._flights[job.job_id] = _Flight(job, held, stored_bytes, self._resets)
        if kind is IoKind.STORE:
            self.stats.cascades_active += len(keys)
        else:
            self.stats.promotions_active += len(keys)
        deadline = job.submitted_at + self.options.deadline
        fingerprint = self._fingerprint()
        self.io.submit(IoJob(job.job_id, kind, keys, rows, places, sizes, fingerprint, job.submitted_at, deadline))

    def _fingerprint(self) -> bytes:
        return self.namespace.fingerprint if self.namespace is not None else b""

    def _finish(
        self,
        job: TransferJob,
        successful: Sequence[OffloadKey],
        transfer_bytes: int | None = None,
        transfer_time: float | None = None,
    ) -> None:
        complete = len(successful) == len(job.keys)
        keys = None if complete else list(successful)
        self._finished.append(JobResult(job.job_id, complete, keys, transfer_bytes, transfer_time))

    def _poll(self) -> None:
        for result in self.io.poll():
            self._end_job(result)

    def _end_job(self, result: IoResult) -> None:
        io_job = result.job
        flight = self._flights.pop(io_job.job_id, None)
        if flight is None:
            logger.error("tier %s: the I/O side reported job %d, which is not in flight; ignored", self.name, io_job.job_id)
            return
        self.on_result(result)
        bad = [place for place, outcome in zip(io_job.places, result.outcomes, strict=True) if isinstance(outcome, DeviceError)]
        if bad:
            self.retire(bad)
        now = self._clock()
        self.stats.observe_job(now - io_job.submitted_at)
        # Across a reset nothing succeeds: neither may the index hold it, nor the manager serve it.
        current = flight.resets == self._resets
        arrived = [current and outcome is Done.DONE for outcome in result.outcomes]
        revoked = self.revoked_places()
        if revoked and io_job.kind is IoKind.STORE:
            arrived = [good and place not in revoked for good, place in zip(arrived, io_job.places, strict=True)]
        if io_job.kind is IoKind.STORE:
            self._end_store(io_job, flight, arrived, now)
        else:
            self._end_load(io_job, result.outcomes, arrived, now)
        keys = io_job.keys if all(arrived) else list(compress(io_job.keys, arrived))
        if current and len(keys) < len(io_job.keys):
            self._failures.note(io_job.kind, result.outcomes)
        held = flight.held if current else []
        self._finish(flight.job, [*held, *keys] if held else keys, result.transfer_bytes, result.transfer_time)

    def _end_store(self, io_job: IoJob, flight: _Flight, arrived: list[bool], now: float) -> None:
        self._budget.used -= flight.bytes
        self.index.end_store(io_job.keys, io_job.places, arrived, now)
        stored = io_job.keys if all(arrived) else list(compress(io_job.keys, arrived))
        self.stats.cascades += len(stored)
        self.stats.cascades_failed += len(io_job.keys) - len(stored)
        self.stats.cascades_active -= len(io_job.keys)
        self._events.stored(stored)

    def _end_load(self, io_job: IoJob, outcomes: Sequence[Outcome], arrived: list[bool], now: float) -> None:
        if not self._overdue.end(io_job.job_id):
            waited = sum(isinstance(outcome, OverdueError) for outcome in outcomes)
            self.stats.loads_overdue += waited
            if waited == len(outcomes):
                self.io.breakers.reads.record_failure(
                    f"a load of {waited} blocks was not taken up within {self.options.deadline:g} s"
                )
        if self._events.announces_found:
            self._events.found(list(compress(io_job.keys, arrived)))
        lost = [outcome is Done.ABSENT or isinstance(outcome, (CorruptBlockError, DeviceError)) for outcome in outcomes]
        self._events.removed(self.index.end_load(io_job.keys, io_job.places, lost, now))
        if self.index.shared and any(lost):
            self._delete_corrupt(io_job, outcomes)
        self.stats.promotions += sum(arrived)
        self.stats.promotions_failed += len(arrived) - sum(arrived)
        self.stats.promotions_active -= len(arrived)

    def _delete_corrupt(self, io_job: IoJob, outcomes: Sequence[Outcome]) -> None:
        """On a medium with names a broken block would be found again by every probe, and keep a good one from being stored."""
        corrupt = [isinstance(outcome, CorruptBlockError) for outcome in outcomes]
        places = list(compress(io_job.places, corrupt))
        if places:
            self.io.run(IoTask("delete", partial(self.io.store.delete, places), self._failures.not_deleted))

    # ------------------------------------------------------------------------------------------------------------ notices

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.index.touch(keys)
        self._admission.touch(keys, req_context.req_id)

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        if self.options.admission == "none":
            return math.inf
        if not self._storing:
            return 0.0
        now = self._clock()
        lacking = self.index.lacking(keys, now)
        if lacking is None:
            self._start_probes()
            return OFFER_AGAIN_AFTER
        return self._offers.add(lacking, now)

    def take_wanted_keys(self) -> Sequence[OffloadKey]:
        wanted = self._admission.take_wanted()
        return list(dict.fromkeys([*wanted, *self._offers.take()])) if self._storing else wanted

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._admission.on_request_finished(req_context.req_id)

    def on_schedule_end(self) -> None:
        self._tick(self._clock())
        self.on_step()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take()

    def has_pending_work(self) -> bool:
        return bool(self._flights or self._finished)

    def get_stats(self) -> TierStats:
        io, stats = self.io.stats, self.stats
        capacity = self.options.capacity or 0
        return replace(
            stats,
            queries=self._hits + self._misses,
            hits=self._hits,
            misses=self._misses,
            read_bytes=io.read_bytes,
            read_seconds=io.read_seconds,
            written_bytes=io.written_bytes,
            written_seconds=io.written_seconds,
            retries=io.retries,
            requests=io.requests,
            corrupt_blocks=self._failures.corrupt_blocks,
            device_errors=self._failures.device_errors,
            blocks=self.index.blocks,
            occupancy_bytes=self.index.blocks * (max(self.context.group_bytes) + self.store.header_bytes),
            capacity_bytes=capacity,
            recovering=int(self.recovering),
            slots_retired=self.index.retired_for_errors,
            breaker_state=int(self.io.breakers.state),
            breaker_opened=self.io.breakers.opened,
            available=int(self._serving),
            writable=int(self._storing),
            job_latency=list(stats.job_latency),
        )

    def _tick(self, now: float) -> None:
        self._service.tick(now)
        self._lease.tick(now)
        self._health.tick()
        for rows in self._overdue.expire(now):
            self.stats.loads_overdue += rows
            self.io.breakers.reads.record_failure(f"a load of {rows} blocks did not end within {self.options.deadline:g} s")
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

    # ----------------------------------------------------------------------------------------------- may block until a deadline

    def open(self, deadline: float) -> bool:
        self._service.start()
        self._wait(lambda: not self._service.attempting, deadline)
        if self._service.attempting:
            logger.error("tier %s: opening takes longer than its deadline; the engine runs without it until then", self.name)
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

        What another medium holds in the epoch of the start may be older than a reset of this process: then a new epoch begins.
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
