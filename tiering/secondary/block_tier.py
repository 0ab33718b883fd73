"""Generic secondary tier: an index on the scheduler's thread, and an I/O side that uses a block store.

- Store: admission → a place from the index → one job for the I/O side → its result → the index holds the key.
- Load: the index returns the place → one job → verified bytes are in the row → its result.

Any failure on the way is a miss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.request import ReqContext
from tiering.block_store import Done, Outcome, Place
from tiering.errors import CorruptBlockError, DeviceError, OverdueError
from tiering.secondary.contract import JobResult, PrefixAnswer, TransferJob
from tiering.secondary.index.contract import Probe
from tiering.secondary.index.prober import held_prefix
from tiering.secondary.intake import OFFER_AGAIN_AFTER
from tiering.secondary.io.messages import IoJob, IoKind, IoResult, IoTask
from tiering.secondary.stats import TierStats
from tiering.secondary.tier_life import Flight, TierLife

logger = logging.getLogger("kv_tiering.tier")

_NO = PrefixAnswer(0, False)


class BlockTier(TierLife):
    """Tier made of an index and a block store.

    Subclasses use the attributes ``context``, ``options``, ``store``, ``index``, ``io``, ``stats`` and ``namespace``.
    Their hooks are ``on_opened``, ``on_left``, ``on_epoch``, ``on_step``, ``on_result`` and ``before_close``. The
    scheduler's thread calls all hooks.

    Args:
        context: environment of the tier.
        options: options of the tier.
        store: the medium.
        index: index of the blocks on the medium.
        place_prefix: for media whose places are names: ``index.enter`` receives ``place_prefix(namespace)`` whenever
            the tier enters an epoch.
        element_size: bytes of one KV element, by which compression splits; default 2.
        io: I/O side to use; default: a new one.
    """

    # ----------------------------------------------------------------------------------------------------------- lookup

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
            run, ended = partial(held_prefix, self.io.store.probe, probe), partial(self._probed, probe)
            self.io.run(IoTask("probe", run, ended, lookup=True, expires=probe.expires))

    def _probed(self, probe: Probe, held: int | None, error: BaseException | None) -> None:
        now = self._clock()
        self._offers.add(self.index.end_probe(probe, held, now), now)

    # ------------------------------------------------------------------------------------------------------------- jobs

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
        self._flights[job.job_id] = Flight(job, held, stored_bytes, self._resets)
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
            logger.error(
                "tier %s: the I/O side reported job %d, which is not in flight; ignored", self.name, io_job.job_id
            )
            return
        self.on_result(result)
        if result.outcomes.count(Done.DONE) < len(result.outcomes):
            ended = zip(io_job.places, result.outcomes, strict=True)
            if bad := [place for place, outcome in ended if isinstance(outcome, DeviceError)]:
                self.retire(bad)
        now = self._clock()
        self.stats.observe_job(now - io_job.submitted_at)
        # No block succeeds across a reset: the index must not hold it, and the manager must not serve it.
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

    def _end_store(self, io_job: IoJob, flight: Flight, arrived: list[bool], now: float) -> None:
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
        if self.index.shared:
            self._corrupt.ended(io_job, outcomes)
        self.stats.promotions += sum(arrived)
        self.stats.promotions_failed += len(arrived) - sum(arrived)
        self.stats.promotions_active -= len(arrived)

    # ---------------------------------------------------------------------------------------------------------- notices

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
            lookups_late=self.index.late_lookups,
            blocks_deleted=self._corrupt.deleted,
            blocks=self.index.blocks,
            occupancy_bytes=self.index.blocks * (max(self.context.group_bytes) + self.store.traits.header_bytes),
            capacity_bytes=self.options.capacity_bytes or 0,
            recovering=int(self.recovering),
            slots_retired=self.index.retired_for_errors,
            breaker_state=int(self.io.breakers.state),
            breaker_opened=self.io.breakers.opened,
            available=int(self._serving),
            writable=int(self._storing),
            job_latency=list(stats.job_latency),
        )
