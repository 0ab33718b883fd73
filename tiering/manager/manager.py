"""The tiering manager: one CPU primary tier in front of any number of secondary tiers.

Every stored block is offered to all secondary tiers (a cascade). A lookup that misses the primary tier probes the
secondary tiers in order, fastest first. The blocks that they hold are loaded back into primary rows (a promotion).
The manager runs on the scheduler's thread and does no I/O.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count, takewhile
from operator import attrgetter
from threading import get_ident
from typing import Any

import numpy as np

from tiering.api.inert_manager import InertManager
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import OffloadingEvent, OffloadingManager, PrefixMatch, PrepareStoreOutput
from tiering.api.masking import shown_name
from tiering.api.namespace import revision_digest
from tiering.api.request import OffloadPolicy, ReqContext, RequestOffloadingContext
from tiering.api.request_policy import NEITHER, parse_request_policy
from tiering.api.transfer import CPULoadStoreSpec, Rows
from tiering.errors import ConfigError
from tiering.manager.awaited import AwaitedBlocks
from tiering.manager.prefix_search import PrefixSearch
from tiering.manager.promotions import Promotion, Promotions
from tiering.manager.requests import Request, Shares, TierState, UnknownNames
from tiering.manager.stats import ManagerStats
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.runtime.forks import inert_in_children
from tiering.runtime.news import News
from tiering.runtime.owner import OwnerThread
from tiering.secondary.contract import JobResult, SecondaryTierManager, TransferJob
from tiering.secondary.intake.offers import HELD_FOR

_log = logging.getLogger("kv_tiering.manager")


_order = attrgetter("order")

NOBODY = ReqContext("")
"""Context of cascades that belong to no request."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A job that its tier has not reported yet: a cascade or a promotion."""

    state: TierState
    rows: Rows
    """Rows that the job reads or writes; those of a cascade are pinned."""
    deadline: float
    """Time by which the tier should have reported the job."""
    promotion: Promotion | None = None
    """The promotion; None for a cascade."""


class TieringOffloadingManager(OffloadingManager):
    """A manager of a primary and secondary tiers that cascades stored blocks and promotes missing ones.

    Without secondary tiers, the manager is a CPU cache. A tier that breaks its contract (it raises, or reports a job id
    that is not its own) is logged, counted and taken out of service; the engine goes on.
    """

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: Sequence[SecondaryTierManager] | None = None,
        enable_events: bool = False,
        *,
        clock: Callable[[], float] = time.monotonic,
        promotion_share: float = 0.5,
        reservation_deadline: float = 30.0,
        reset_deadline: float = 0.05,
        shutdown_deadline: float = 30.0,
        keep_secondary: bool = False,
        news: News | None = None,
        one_thread: bool = True,
    ) -> None:
        """Create the manager; the tiers are opened by :meth:`open_tier`.

        Args:
            primary_tier: the CPU tier.
            secondary_tiers: the tiers behind it, fastest first; default: none.
            enable_events: collect the events of all tiers for :meth:`take_events`; default: False.
            clock: monotonic clock, in seconds.
            promotion_share: largest share of the primary rows that promotions and reservations may hold together.
            reservation_deadline: seconds for which a promoted block waits to be loaded before it may be evicted.
            reset_deadline: seconds for which the engine waits until all media have confirmed a reset.
            shutdown_deadline: longest duration of :meth:`shutdown`, in seconds.
            keep_secondary: a reset empties the primary tier only; default: False.
            news: the object on which tiers announce finished jobs; default: one of the manager's own.
            one_thread: the first thread that uses the manager owns it. Other threads get a :class:`WrongThreadError`
                until :meth:`hand_over`. If False, the caller ensures that no two threads use the manager at the same
                time.
        """
        self.news = news or News()
        """Announcements of finished jobs; :mod:`tiering.manager.waiting` listens to them."""
        self._owner = OwnerThread(enabled=one_thread)
        self.primary_tier = primary_tier
        primary_tier.before_reset = self._end_promotions
        self.secondary_tiers: tuple[SecondaryTierManager, ...] = tuple(secondary_tiers or ())
        self._table = primary_tier.table
        self._readable = self._table.readable
        self._pending = self._table.pending
        self._enable_events = enable_events
        self._clock = clock
        self._reset_deadline = reset_deadline
        self._shutdown_deadline = shutdown_deadline
        self._keep_secondary = keep_secondary
        self._stats = ManagerStats()
        rows = primary_tier.num_rows
        self._states = [
            TierState(tier, rank, max(1, int(tier.primary_share * rows)), np.zeros(rows))
            for rank, tier in enumerate(self.secondary_tiers)
        ]
        self._promotions = Promotions(
            primary_tier, self._stats, clock, max(1, int(promotion_share * rows)), reservation_deadline
        )
        self._search = PrefixSearch(self._table, self._promotions, self._call, clock)
        self._awaited = AwaitedBlocks(self._table)
        self._unknown_names = UnknownNames([PRIMARY_TIER, *(tier.name for tier in self.secondary_tiers)])
        self._requests: dict[str, Request] = {}
        self._jobs: dict[int, _Job] = {}
        self._job_ids = count(1)
        self._collected = False
        self._shut_down = False
        inert_in_children(self, InertManager)

    # ----------------------------------------------------------------------------------------------------------- lookup

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        match = self.match_prefix((key,), req_context)
        return None if match.pending else match.hits == 1

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if not self._collected:
            self._collect()
        request = self._request(req_context)
        if not request.policy.load:
            return PrefixMatch(0, False)
        hits = len(list(takewhile(self._readable.__contains__, keys)))
        if hits == len(keys):
            return PrefixMatch(hits, False)
        return self._search.match(request, keys, hits, at_least)

    # --------------------------------------------------------------------------------------------------- load and touch

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        rows = self.primary_tier.claim_load(keys, req_context.req_id)
        request = self._requests.get(req_context.req_id)
        if request is not None and request.reserved:
            self._promotions.claim(request, keys, rows)
        else:
            self._table.pin(rows)
        self._tell_used(keys, rows, req_context)
        return CPULoadStoreSpec(rows)

    def count_sources(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        request = self._requests.get(req_context.req_id)
        if request is None or not request.brought:
            return {}
        return Counter(filter(None, map(request.brought.get, keys)))

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self.primary_tier.complete_load(keys, req_context)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        readable, rows = self._table.touch(keys)
        for state in self._tiers_of(req_context):
            if state.in_service:
                self._call(state, state.tier.touch, keys, req_context)
        if len(rows):
            self._tell_used(readable, rows, req_context)

    def _tell_used(self, keys: Sequence[OffloadKey], rows: Rows, ctx: ReqContext) -> None:
        """Report the use of readable ``keys``; a tier that lacks some may ask for them at the step's end."""
        request = self._requests.get(ctx.req_id)
        if not self._states or (request is not None and not request.policy.store):
            return
        now = self._clock()
        for state in self._states if request is None else request.tiers:
            due = state.settled_until.take(rows) <= now
            count = np.count_nonzero(due)
            if count and state.in_service:
                asked = keys if count == len(keys) else list(compress(keys, due.tolist()))
                state.settled_until[rows[due]] = now + (self._call(state, state.tier.used, asked, ctx) or 0.0)

    # ------------------------------------------------------------------------------------------------------------ store

    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._collect()
        request = self._request(req_context)
        if not request.policy.store:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        output = self.primary_tier.prepare_store(keys, req_context)
        if output is None:
            self._collect()
            output = self.primary_tier.prepare_store(keys, req_context)
        if output is None:
            self._stats.stores_without_room += 1
            return None
        self._stats.evicted_blocks += len(output.evicted_keys)
        if len(output.keys_to_store) < len(keys) and request.wants_all:
            self._cascade_held(request.wants_all, keys, req_context)
            self._awaited.add(request, keys, output.keys_to_store)
        return output

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        stored, rows = self.primary_tier.finish_store(keys, req_context.req_id, success)
        if stored:
            self._refilled(rows)
            self._cascade(self._tiers_of(req_context), stored, rows, req_context)
        if self._awaited:
            self._cascade_awaited()
        request = self._requests.get(req_context.req_id)
        if request is not None and request.finished:
            self._close_if_done(request)

    def _refilled(self, rows: Rows) -> None:
        """Note that ``rows`` have new blocks, so that tiers are told of the next use of these blocks."""
        for state in self._states:
            state.settled_until[rows] = 0.0

    def _cascade_awaited(self) -> None:
        for request, keys in self._awaited.take():
            self._cascade_held(request.wants_all, keys, request.ctx)
            if request.finished:
                self._close_if_done(request)

    def _cascade_held(self, states: Sequence[TierState], keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        held = [key for key in dict.fromkeys(keys) if key in self._readable]
        if held:
            rows = np.fromiter(map(self._readable.__getitem__, held), np.int64, len(held))
            self._cascade(states, held, rows, ctx)

    def _cascade(self, states: Sequence[TierState], keys: Sequence[OffloadKey], rows: Rows, ctx: ReqContext) -> None:
        """Offer readable ``keys`` to tiers, one job per tier; the rows are pinned until the jobs are reported."""
        serving = [state for state in states if state.in_service]
        if not serving:
            return
        self._table.pin(rows, len(serving))
        for state in serving:
            job_id = next(self._job_ids)
            now = self._clock()
            self._jobs[job_id] = _Job(state, rows, state.deadline(now))
            self._submit(state, state.tier.submit_store, TransferJob(job_id, keys, rows, False, ctx, now))

    # --------------------------------------------------------------------------------------------------------- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        known = self._requests.pop(req_context.req_id, None)
        if known is not None:
            self._close(known)
        request = self._begin(req_context)
        policy = OffloadPolicy.REQUEST_LEVEL if request.wants_all else OffloadPolicy.BLOCK_LEVEL
        return RequestOffloadingContext(policy)

    def _begin(self, ctx: ReqContext) -> Request:
        try:
            policy = parse_request_policy(ctx.kv_transfer_params)
        except ConfigError as error:
            _log.warning("request %s neither loads nor stores KV: %s", shown_name(ctx.req_id), error)
            policy = NEITHER
        names, tiers = policy.tiers, self._states
        if names is not None:
            tiers = [state for state in tiers if state.tier.name in names]
            if len(tiers) < len(names):
                self._unknown_names.tell(ctx.req_id, names)
        request = Request(ctx, policy, tiers, [])
        for state in tiers:
            if state.in_service:
                answer = self._call(state, state.tier.on_new_request, ctx)
                if answer is not None and answer.policy is OffloadPolicy.REQUEST_LEVEL:
                    request.wants_all.append(state)
        self._requests[ctx.req_id] = request
        return request

    def _request(self, ctx: ReqContext) -> Request:
        return self._requests.get(ctx.req_id) or self._begin(ctx)

    def _tiers_of(self, ctx: ReqContext) -> list[TierState]:
        request = self._requests.get(ctx.req_id)
        return self._states if request is None else request.tiers

    def on_request_finished(self, req_context: ReqContext) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        request = self._requests.get(req_context.req_id)
        if request is None or request.finished:
            return
        request.finished = True
        self.primary_tier.on_request_finished(req_context)
        self._promotions.leave(request)
        self._close_if_done(request)

    def _close_if_done(self, request: Request) -> None:
        if not self.primary_tier.has_open_stores(request.ctx.req_id) and request not in self._awaited:
            self._requests.pop(request.ctx.req_id, None)
            self._close(request)

    def _close(self, request: Request) -> None:
        """Tell the tiers that the request has finished; no cascade for it follows."""
        request.finished = True
        self._awaited.forget(request)
        self._promotions.leave(request)
        for state in request.tiers:
            if state.in_service:
                self._call(state, state.tier.on_request_finished, request.ctx)

    def open_tier(self, rank: int, deadline: float) -> bool:
        """Open a secondary tier, and return True if the tier is in service.

        A tier that raises is taken out of service, as in any other call.

        Args:
            rank: position of the tier; 0 is the fastest.
            deadline: time until which the call may wait.
        """
        state = self._states[rank]
        return bool(self._call(state, state.tier.open, deadline))

    def hand_over(self) -> None:
        """Let another thread drive the manager: the next thread that uses the manager owns it.

        Call this method on the thread that has used the manager so far. The call is not needed if that thread has
        ended.

        Raises:
            WrongThreadError: the calling thread does not own the manager.
        """
        self._owner.hand_over()

    # ------------------------------------------------------------------------------------------------------------- jobs

    def _collect(self) -> None:
        """Take the finished jobs of all tiers, and give up overdue promotions and expired reservations."""
        self._collected = True
        for state in self._states:
            for result in self._call(state, state.tier.get_finished) or ():
                self._finish_job(state, result)
        self._promotions.expire(self._clock())

    def _finish_job(self, state: TierState, result: JobResult) -> None:
        job = self._jobs.get(result.job_id)
        if job is None or job.state is not state:
            self._stats.misreported_jobs += 1
            self._retire(state, f"it reported job {result.job_id}, which is not one of its own in flight")
            return
        del self._jobs[result.job_id]
        if job.promotion is None:
            if result.success and result.successful_keys is None:
                state.settled_until[job.rows] = self._clock() + HELD_FOR
            self._table.unpin(job.rows)
            return
        arrived = result.successful_keys
        if arrived is None and not result.success:
            arrived = ()
        if not state.in_service and not state.resetting:
            arrived = ()
        keys, rows = self._promotions.end(job.promotion, arrived)
        self._refilled(rows)
        state.settled_until[rows] = self._clock() + HELD_FOR
        if keys and not job.promotion.worthless:
            faster = [other for other in job.promotion.owner.tiers if other.rank < state.rank and other.tier.fill]
            if faster:
                owner = job.promotion.owner
                # The tiers know that a finished request has no further cascades.
                self._cascade(faster, keys, rows, NOBODY if owner.finished else owner.ctx)

    def _flush_promotions(self) -> None:
        for promotion in self._promotions.take_queued():
            job_id = next(self._job_ids)
            rows = np.array(promotion.rows, np.int64)
            now = self._clock()
            self._jobs[job_id] = _Job(promotion.state, rows, promotion.state.deadline(now), promotion)
            job = TransferJob(job_id, promotion.keys, rows, True, promotion.owner.ctx, now)
            self._submit(promotion.state, promotion.state.tier.submit_load, job)

    def _submit(self, state: TierState, submit: Callable[[TransferJob], None], job: TransferJob) -> None:
        if not state.in_service:
            self._finish_job(state, JobResult(job.job_id, False))
            return
        self._call(state, submit, job)

    def _call(self, state: TierState, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of a tier; if the method raises, take the tier out of service and return None."""
        try:
            return method(*arguments)
        except Exception as error:
            self._retire(state, f"its {getattr(method, '__name__', method)} raised {error!r}", exc_info=True)
            return None

    def _retire(self, state: TierState, reason: str, *, exc_info: bool = False) -> None:
        if state.in_service or state.resetting:
            state.in_service = state.resetting = False
            self._stats.tiers_out_of_service += 1
            _log.error("tier %s is out of service until a restart: %s", state.tier.name, reason, exc_info=exc_info)
            for job in self._jobs.values():
                if job.state is state and job.promotion is not None and job.promotion.awaited:
                    self._promotions.give_up(job.promotion)

    # ------------------------------------------------------------------------------------------------------------- step

    def on_schedule_end(self) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._collect()
        if self._awaited:
            self._cascade_awaited()
        if self._promotions.queued:
            self._flush_promotions()
        for state in self._states:
            if state.in_service:
                wanted = self._call(state, state.tier.take_wanted_keys)
                if wanted:
                    self._cascade_held((state,), wanted, NOBODY)
                self._call(state, state.tier.on_schedule_end)
            elif state.resetting:
                # A tier may need steps to complete its reset, for example to find that its directory is gone.
                self._call(state, state.tier.on_schedule_end)
                if not (state.resetting and self._call(state, state.tier.reset_done)):
                    continue
                state.in_service, state.resetting = True, False
                _log.warning("tier %s has completed its reset and is in service again", state.tier.name)
        self._collected = False

    def has_pending_work(self) -> bool:
        """Return True while jobs are in flight or queued.

        Jobs that hang beyond their tier's deadline do not count: an idle engine need not step for them.
        """
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if self._promotions.queued:
            return True
        now = self._clock()
        return any(job.state.in_service and now < job.deadline for job in self._jobs.values())

    def take_events(self) -> list[OffloadingEvent]:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if not self._enable_events:
            return []
        events = self.primary_tier.take_events()
        for state in self._states:
            events.extend(self._call(state, state.tier.take_events) or ())
        events.sort(key=_order)
        return events

    def get_stats(self) -> dict[str, Any]:
        stats, table = self._stats, self._table
        stats.ignored_completions = self.primary_tier.ignored_completions
        stats.jobs_in_flight = len(self._jobs)
        stats.rows, stats.rows_free, stats.rows_evictable = table.num_rows, table.free, table.evictable
        stats.rows_reserved, stats.rows_quarantined = self._promotions.rows_reserved, table.quarantined
        tiers = {}
        for state in self._states:
            tier_stats = self._call(state, state.tier.get_stats)
            if tier_stats is not None:
                tiers[state.tier.name] = tier_stats.as_dict()
        return {"manager": stats.as_dict(), "primary": self._primary_fields(), "tiers": tiers}

    def _primary_fields(self) -> dict[str, int]:
        """Return the fields of :class:`tiering.secondary.stats.TierStats` that apply to the primary tier."""
        buffer, blocks = self.primary_tier.get_kv_memoryview(), len(self._readable)
        return {
            "blocks": blocks,
            "occupancy_bytes": blocks * (buffer.nbytes // self._table.num_rows),
            "capacity_bytes": buffer.nbytes,
            "evictions": self._stats.evicted_blocks,
            "available": 1,
        }

    # -------------------------------------------------------------------------------------------------- reset, shutdown

    def reset_cache(self, revision: str | None = None) -> bool:
        """Forget all blocks; see the base class.

        Raises:
            ConfigError: ``revision`` is not a text; nothing was reset.
        """
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if revision is not None:
            revision_digest(revision)
        self._stats.resets += 1
        self.primary_tier.reset_cache()
        if self._keep_secondary:
            return True
        shares = Shares(self._clock, self._reset_deadline, len(self._states))
        # The slowest tier comes first: shared media need no time, and leave their share to the disks.
        promised = [self._reset_tier(state, shares.next_deadline(), revision) for state in reversed(self._states)]
        return all(promised)

    def _end_promotions(self) -> None:
        """Let no promotion bring a block into the primary table, which is about to be emptied."""
        self._promotions.drop_queued()
        self._collect()
        self._promotions.reset([job.promotion for job in self._jobs.values() if job.promotion is not None])
        for request in self._requests.values():
            request.refused.clear()
            request.failed.clear()
            request.asked.clear()

    def _reset_tier(self, state: TierState, deadline: float, revision: str | None) -> bool:
        if self._call(state, state.tier.reset, deadline, revision):
            if state.resetting:
                state.in_service, state.resetting = True, False
            return True
        if state.in_service or state.resetting:
            state.in_service, state.resetting = False, True
            _log.error(
                "tier %s is out of service until its medium has confirmed the reset: its old blocks are not served any "
                "more, but a restart before then could find them again",
                state.tier.name,
            )
        return False

    def shutdown(self) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if self._shut_down:
            return
        self._shut_down = True
        self._promotions.drop_queued()
        shares = Shares(self._clock, self._shutdown_deadline, len(self._states))
        stopped = True
        for state in self._states:
            share = shares.next_deadline()
            self._call(state, state.tier.drain, share)
            stopped = bool(self._call(state, state.tier.shutdown, share)) and stopped
        self._collect()
        if self._jobs:
            _log.warning("%d jobs of secondary tiers were not finished at shutdown", len(self._jobs))
        if stopped:
            self.primary_tier.shutdown()
        else:
            _log.error("a tier did not stop: the primary buffer stays mapped until the process ends")
