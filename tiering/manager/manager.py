"""The tiering manager: one CPU primary tier in front of any number of secondary tiers.

Every stored block is offered to all secondary tiers (a cascade). A lookup that misses the primary tier probes the
secondary tiers in order, fastest first. The blocks that they hold are loaded back into primary rows (a promotion).
The manager runs on the scheduler's thread and does no I/O.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from threading import get_ident
from typing import Any

from tiering.advisor.advisor import SizeAdvisor
from tiering.api.descriptions import TierDescriptions
from tiering.api.hints import KeptBlocks
from tiering.api.inert_manager import InertManager
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import OffloadingEvent, PrefixMatch, PrepareStoreOutput
from tiering.api.namespace import revision_digest
from tiering.api.request import LATE_STORE, WANTED_STORE, OffloadPolicy, ReqContext, RequestOffloadingContext
from tiering.api.transfer import CPULoadStoreSpec, Rows
from tiering.manager.answers import TRUTH
from tiering.manager.cascade_queue import NOBODY
from tiering.manager.descriptions import GuardedDescriptions
from tiering.manager.early import EarlyPromotions
from tiering.manager.jobs import TierJobs
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.miss_facts import MissFacts
from tiering.manager.open_lookups import OpenLookups
from tiering.manager.prefix_search import PrefixSearch
from tiering.manager.promotions import Promotions
from tiering.manager.report import report
from tiering.manager.requests import Request, Requests
from tiering.manager.reservations import Reservations
from tiering.manager.rest import Rest
from tiering.manager.row_broker import RowBroker
from tiering.manager.steps import TierSteps
from tiering.manager.tiers import SecondaryTiers, TierState
from tiering.manager.warm_start import WarmStart, WarmStartLimits
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.runtime.forks import inert_in_children
from tiering.runtime.news import News
from tiering.runtime.owner import OwnerThread
from tiering.secondary.agreement import EpochAgreement
from tiering.secondary.contract import SecondaryTierManager

_log = logging.getLogger("kv_tiering.manager")

COPIES_PER_BLOCK = 1.2
"""Copies per computed block, up to which an exclusive primary tier evicts held blocks first.

Blocks that left the engine's cache and had not been loaded into it were computed.
"""

BOUNDS_COPIES_FROM = 2.5
"""Rows per block of the engine's cache from which copies are bounded.

An inclusive tier of that size has most of the hits as well, and copies each computed block once. With secondary tiers,
computed blocks are copied in any case, and nothing bounds the second copy.
"""


class TieringOffloadingManager(MissFacts):
    """A manager of a primary and secondary tiers that cascades stored blocks and promotes missing ones.

    Without secondary tiers, the manager is a CPU cache. A tier breaks its contract if it raises, returns what its
    contract does not allow, or reports a job that is not its own. Such a tier is logged, counted and taken out of
    service; the engine goes on.

    A call for a request before :meth:`on_new_request` or after :meth:`on_request_finished` leaves no state behind. Its
    lookup finds only what the primary tier holds, and its store has no blocks to store.
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
        agreement: EpochAgreement | None = None,
        one_thread: bool = True,
        advisor: SizeAdvisor | None = None,
        exclusive: bool = False,
        warm_start: WarmStartLimits | None = None,
        controls: int | None = None,
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
            agreement: the object by which the tiers agree on common epochs, as in their contexts. By default, blocks in
                the rows are not compared with a common epoch that a tier finds late.
            one_thread: the first thread that uses the manager owns it. Other threads get a :class:`WrongThreadError`
                until :meth:`hand_over`. If False, the caller ensures that no two threads use the manager at the same
                time.
            advisor: estimates the hit rates at other capacities of the tiers; default: none.
            exclusive: prefer blocks that the engine's own cache does not hold, if the engine shows it; default: False.
            warm_start: bounds of the promotions of blocks that engines used before this start; default: none, and
                this engine publishes nothing either.
            controls: seed of the choice of requests that show what the loads from tiers with a gate save; default: none
                are chosen.
        """
        self._clock = clock
        self.news = news or News()
        """Announcements of finished jobs; :mod:`tiering.manager.waiting` listens to them."""
        self._owner = OwnerThread(enabled=one_thread)
        self.primary_tier = primary_tier
        primary_tier.attach(self._before_reset)
        self.secondary_tiers: tuple[SecondaryTierManager, ...] = tuple(secondary_tiers or ())
        self._readable = primary_tier.readable
        self._enable_events = enable_events
        self._reset_deadline = reset_deadline
        self._shutdown_deadline = shutdown_deadline
        self._keep_secondary = keep_secondary
        self._stats = ManagerStats()
        rows = primary_tier.num_rows
        self._reservations = Reservations(primary_tier, self._stats, clock, reservation_deadline)
        self._tiers = SecondaryTiers(self.secondary_tiers, rows, self._stats, clock, self._on_failed, controls)
        self._states = self._tiers.states
        self._call = self._tiers.call
        self._broker = RowBroker(primary_tier, self._tiers, self._stats, clock)
        self._promotions = Promotions(
            primary_tier, self._reservations, self._broker, self._stats, clock, max(1, int(promotion_share * rows))
        )
        self._waiters = self._promotions.waiters
        self._waits = self._waiters.waits
        self._jobs = TierJobs(
            primary_tier, self._tiers, self._promotions, self._reservations, self._broker, self._stats, clock
        )
        self._steps = TierSteps(self._tiers, self._jobs, self._readable)
        self._search = PrefixSearch(primary_tier, self._promotions, self._tiers, clock)
        self._gates = self._search.gates
        self._open_lookups = OpenLookups(
            self.news, all(tier.traits.announces_news for tier in self.secondary_tiers), clock
        )
        self._rest = Rest(self.news)
        self._requests = Requests(self._tiers, agreement or EpochAgreement(), clock)
        self._known = self._requests.known
        self._early = EarlyPromotions(
            self._search, self._promotions, self._requests, self.on_request_finished, self._stats, clock
        )
        self._warm = None
        if warm_start is not None:
            self._warm = WarmStart(warm_start, primary_tier, self._promotions, self._tiers, self._stats, clock)
        self._descriptions = GuardedDescriptions.of(self._tiers) if enable_events else None
        self._shut_down = False
        self._advisor = advisor
        self._exclusive = exclusive
        self._is_exclusive = False
        """True if the engine shows which blocks its own cache holds, and the primary tier prefers others."""
        self._bounds_copies = False
        self._wanting: dict[OffloadKey, TierState] = {}
        """Blocks that are being stored because a tier wants them, with the tier."""
        inert_in_children(self, InertManager)

    # ----------------------------------------------------------------------------------------------------------- lookup

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        match = self.match_prefix((key,), req_context)
        return None if match.pending else match.hits == 1

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        if not self._jobs.collected:
            self._open_lookups.collecting()
            self._jobs.collect()
            if self.primary_tier.keeper is not None:
                self.primary_tier.keeper.step()
        request = self._known.get(req_context.req_id)
        if request is None or request.finished:
            if not self._requests.admit_late_load(req_context):
                return PrefixMatch(0, False)
            return self.primary_tier.match_prefix(keys, req_context, at_least=at_least)
        if not request.policy.load:
            return PrefixMatch(0, False)
        if request.is_early:
            request.is_early, request.awaited = False, None  # the early search has left some tiers out
        if self._advisor is not None:
            self._advisor.looked_up(request.advised, keys)
        if self._gates and request.load_by <= self._clock():
            self._promotions.cut(request)
        position = None
        if request.awaited is not None:
            position = request.awaited_hits(keys, at_least)
        elif request in self._waits:
            position = self._promotions.awaited_rows(request, keys)
        if position is not None:
            self._open_lookups.note(req_context.req_id, request.load_by)
            return PrefixMatch(position, True)
        hits = self._readable.leading(keys)
        if hits == len(keys):
            if request in self._waits:
                self._waiters.settle(request, keys)
            if self._gates and not request.asked:
                request.load_by = math.inf
            return PrefixMatch(hits, False)
        if not request.tiers and keys[hits] not in self.primary_tier.pending:
            return PrefixMatch(hits, False)
        match = self._search.match(request, keys, hits, at_least)
        if match.pending:
            self._open_lookups.note(req_context.req_id, request.load_by)
        return match

    def held(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixMatch:
        """Return how many leading ``keys`` any tier holds, without promoting them.

        The answer is pending while a tier has not decided yet; the caller asks again after the end of a step. A block
        that is held may be evicted before it is loaded, or turn out to be damaged then.
        """
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        if not self._jobs.collected:
            self._jobs.collect()
        request = self._known.get(req_context.req_id)
        if request is None or request.finished:
            return self.primary_tier.match_prefix(keys, req_context)
        return self._search.held(request, tuple(keys)) if request.policy.load else PrefixMatch(0, False)

    def still_pending(self, req_context: ReqContext) -> bool:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        return self._open_lookups.still_pending(req_context.req_id)

    @property
    def gates_loads(self) -> bool:
        return self._gates

    def waits_until(self, req_context: ReqContext) -> float:
        """Return the time until which a request waits for gated loads; infinity if it does not."""
        if get_ident() != self._owner.ident:
            self._owner.claim()
        request = self._known.get(req_context.req_id)
        return math.inf if request is None else request.load_by

    def note_compute(self, seconds: Sequence[float]) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._search.compute_seconds = seconds

    def measure_worth(self, req_context: ReqContext) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        request = self._known.get(req_context.req_id)
        if request is not None:
            request.is_measured = True

    def note_first_token(self, req_context: ReqContext, prefill_seconds: float) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        request = self._known.get(req_context.req_id)
        if request is None:
            return
        trial, request.trial, request.is_measured = request.trial, None, False
        if trial is not None and (worth := self._states[trial.rank].worth) is not None:
            now, gate = self._clock(), self._states[trial.rank].gate
            if worth.end(trial, prefill_seconds, now) and gate is not None:
                gate.correct(worth.factor, now)

    # --------------------------------------------------------------------------------------------------- load and touch

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        rows, once, pinned = self.primary_tier.claim_load(keys, req_context.req_id)
        request = self._known.get(req_context.req_id)
        if request is not None and request.reserved:
            self._reservations.claim(request, once, pinned)
        else:
            self.primary_tier.pin(pinned)
        self._jobs.report_use(once, pinned, request, req_context)
        return CPULoadStoreSpec(rows)

    def count_sources(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        request = self._known.get(req_context.req_id)
        if request is None or not request.brought:
            return {}
        return Counter(self._states[rank].medium for rank in map(request.brought.get, keys) if rank is not None)

    def count_tiers(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        request = self._known.get(req_context.req_id)
        if request is None or not request.brought:
            return {}
        ranks = Counter(rank for rank in map(request.brought.get, keys) if rank is not None)
        return {self._states[rank].name: blocks for rank, blocks in sorted(ranks.items())}

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        self.primary_tier.complete_load(keys, req_context)
        if self._bounds_copies:
            self.primary_tier.grant_copies(-COPIES_PER_BLOCK * len(keys))

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext, used: bool = True) -> None:
        """Make blocks recent in all tiers of the request, and report the use of the readable ones."""
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        primary = self.primary_tier
        readable, rows = primary.touch_readable(keys) if used else primary.refresh_readable(keys)
        request = self._known.get(req_context.req_id)
        shared = tuple(keys) if self._states else ()  # a tier must not change the caller's keys
        for state in self._states if request is None else request.tiers:
            if state.in_service:
                self._call(state, state.tier.touch, shared, req_context, used)
        if len(rows):
            self._jobs.report_use(readable, rows, request, req_context)
        if self._warm is not None and used:
            self._warm.used(shared, request)

    # ------------------------------------------------------------------------------------------------------------ store

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        if not self._jobs.collected:
            self._jobs.collect()
        request = self._known.get(req_context.req_id)
        if request is None or request.finished:
            self._requests.warn_of_late(req_context)
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        if not request.policy.store:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        output = None
        if is_last or not self._broker.refuses(request, keys):
            output = self.primary_tier.prepare_store(keys, req_context)
            if output is None:
                self._jobs.collect()
                output = self.primary_tier.prepare_store(keys, req_context)
                if output is None and self._broker.take_rows(keys, request, is_last=is_last):
                    output = self.primary_tier.prepare_store(keys, req_context)
        if output is None:
            self._stats.stores_without_room += 1
            if request.refused_since is None:
                request.refused_since = self._clock()
            return None
        if output.keys_to_store:
            request.refused_since = None
        self._count_evicted(output)
        if len(output.keys_to_store) < len(keys) and request.wants_all:
            self._jobs.cascade_held(request.wants_all, keys, req_context)
            self._jobs.await_others(request, keys, output.keys_to_store)
        return output

    def _count_evicted(self, output: PrepareStoreOutput) -> None:
        if output.evicted_keys:
            self._stats.evicted_blocks += len(output.evicted_keys)
            self._broker.evicted(output.evicted_keys)

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self.complete_stores(((keys, req_context, success),))

    def complete_stores(self, stores: Sequence[tuple[Sequence[OffloadKey], ReqContext, bool]]) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        finish = self.primary_tier.finish_store
        ended: list[tuple[Sequence[OffloadKey], Rows, ReqContext]] = []
        for keys, ctx, success in stores:
            stored, rows = finish(keys, ctx.req_id, success)
            if stored:
                ended.append((stored, rows, ctx))
        if ended:
            self.news.announce()  # Lookups that wait for these blocks may be repeated.
            if self._advisor is not None:
                self._advisor.stored(
                    [key for stored, _, _ in ended for key in stored] if len(ended) > 1 else ended[0][0]
                )
            if self._states:
                self._cascade_ended(ended)
            if self._is_exclusive:
                for stored, _, ctx in ended:
                    if ctx is not LATE_STORE:
                        self.primary_tier.mark_held(stored)
        if self._jobs.awaited:
            self._cascade_awaited()
        for _, ctx, _ in stores:
            request = self._known.get(ctx.req_id)
            if request is not None and request.finished:
                self._close_if_done(request)

    def _cascade_ended(self, stores: Sequence[tuple[Sequence[OffloadKey], Rows, ReqContext]]) -> None:
        """Offer the blocks of stores that have ended in one step to the tiers of their requests."""
        jobs, several = self._jobs, len(stores) > 1
        if several:
            jobs.begin_together(sum([len(keys) for keys, _, _ in stores]))
        try:
            for keys, rows, ctx in stores:
                jobs.note_refilled(rows)
                if ctx is WANTED_STORE:
                    self._cascade_wanted(keys)
                elif ctx is not LATE_STORE:
                    request = self._known.get(ctx.req_id)
                    tiers = self._states if request is None else request.tiers
                    jobs.cascade(tiers, keys, rows, ctx)
                    if self.primary_tier.keeper is not None and len(tiers) == len(self._states):
                        # What a request keeps from a tier may be private to this process.
                        self.primary_tier.keeper.report(keys, rows)
        finally:  # nothing may stay gathered: its rows are not pinned
            if several:
                jobs.submit_together()

    # -------------------------------------------------------------------------------------------------------- exclusive

    def hold_exclusively(self, holds: Callable[[Sequence[OffloadKey]], Sequence[bool]] | None, blocks: int = 0) -> bool:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if self._exclusive and holds is None:
            _log.warning("primary.inclusion: is inclusive, because the engine does not show what its own cache holds")
        elif self._exclusive and holds is not None:
            self.primary_tier.begin_first_victims(holds)
            self._is_exclusive = True
            if self._advisor is not None:
                self._advisor.exclude(PRIMARY_TIER, blocks)
            self._bounds_copies = not self._states and 0 < BOUNDS_COPIES_FROM * blocks <= self.primary_tier.num_rows
            self._steps.missing = {}
        return self._is_exclusive

    @property
    def stores_computed(self) -> bool:
        return not self._is_exclusive or bool(self._states)

    def engine_holds(self, keys: Sequence[OffloadKey]) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self.primary_tier.mark_held(keys)

    def engine_dropped(self, keys: Sequence[OffloadKey]) -> int:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self.primary_tier.unmark_held(keys)
        return len(self.primary_tier.unknown(keys))

    def take_wanted(self) -> Sequence[OffloadKey]:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        missing = self._steps.missing
        if not missing:
            return ()
        self._wanting, self._steps.missing = missing, {}
        keys = self.primary_tier.unknown(list(missing))
        self._cascade_wanted([key for key in missing if key in self._readable])
        return keys

    def _cascade_wanted(self, keys: Sequence[OffloadKey]) -> None:
        """Offer readable blocks to the tiers that want them."""
        for state in self._states:
            self._jobs.cascade_held((state,), [key for key in keys if self._wanting.get(key) is state], NOBODY)

    def prepare_late_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        self.primary_tier.unmark_held(keys)
        output = self.primary_tier.prepare_store(keys, LATE_STORE)
        if output is not None:
            self._count_evicted(output)
            if self._bounds_copies:
                self.primary_tier.grant_copies(COPIES_PER_BLOCK * len(keys) - len(output.keys_to_store))
        return output

    # --------------------------------------------------------------------------------------------------------- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        known = self._known.get(req_context.req_id)
        if known is not None:
            self._open_lookups.drop(req_context.req_id)
            self._close(known)
        request = self._requests.begin(req_context)
        policy = OffloadPolicy.REQUEST_LEVEL if request.wants_all else OffloadPolicy.BLOCK_LEVEL
        return RequestOffloadingContext(policy)

    def on_request_finished(
        self, req_context: ReqContext, released: Sequence[OffloadKey] = (), kept: Sequence[KeptBlocks] = ()
    ) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        request = self._known.get(req_context.req_id)
        if request is None or request.finished:
            return
        request.finished, request.released, request.kept = True, released, kept
        self._open_lookups.drop(req_context.req_id)
        if not self._close_if_done(request):
            self._promotions.release(request)

    def promote_early(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        request = self._known.get(req_context.req_id)
        if request is not None and request.policy.load and self._states:
            self._rest.until = None
            self._early.add(request, keys)

    def prefetch(
        self,
        keys: Sequence[OffloadKey],
        tenant: bytes,
        bytes_per_second: float,
        after: float = 0.0,
        *,
        has_holes: bool = False,
    ) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if self._states:
            self._rest.until = None
            row_bytes = (self.primary_tier.get_kv_memoryview().shape or (0, 1))[1]
            self._early.prefetch(keys, tenant, bytes_per_second / row_bytes, after, has_holes=has_holes)

    def _close_if_done(self, request: Request) -> bool:
        """Close a finished request, unless its blocks are still being stored; return True if it is closed."""
        if self.primary_tier.has_open_stores(request.ctx.req_id) or request in self._jobs.awaited:
            return False
        self._close(request)
        return True

    def _close(self, request: Request) -> None:
        request.finished = True
        self._jobs.drop_awaited(request)
        self._promotions.release(request)
        if request.released:
            self._stats.blocks_released += self.primary_tier.release(request.released)
        for kept in request.kept:
            blocks = self.primary_tier.keep(kept, self._clock)
            self._stats.blocks_pinned += blocks if kept.is_pin else 0
            self._stats.blocks_retained += 0 if kept.is_pin else blocks
        self._requests.end(request)

    def _cascade_awaited(self) -> None:
        for request in self._jobs.cascade_awaited():
            self._close_if_done(request)

    def open_tier(self, rank: int, deadline: float) -> bool:
        """Open a secondary tier, and return True if the tier is in service.

        A tier that raises is taken out of service, as in any other call.

        Args:
            rank: position of the tier; 0 is the fastest.
            deadline: time until which the call may wait.
        """
        self._owner.check()
        self._rest.until = None
        state = self._states[rank]
        opened = bool(self._tiers.ask(state, TRUTH, state.tier.open, deadline))
        if self._tiers.end_step(state).superseded:
            self._follow(deadline)
            opened = bool(self._tiers.ask(state, TRUTH, state.tier.open, deadline))
        return opened

    def hand_over(self) -> None:
        """Let another thread drive the manager: the next thread that uses the manager owns it.

        Call this method on the thread that has used the manager so far. The call is not needed if that thread has
        ended.

        Raises:
            WrongThreadError: the calling thread does not own the manager.
        """
        self._owner.hand_over()

    # ------------------------------------------------------------------------------------------------------------- step

    def on_schedule_end(self) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        rest = self._rest
        # Most steps of an engine with many small requests end here.
        if rest.until is not None and rest.heard == self.news.count and self._clock() < rest.until:
            return
        rest.listen()
        self._jobs.collect()
        if self._jobs.awaited:
            self._cascade_awaited()
        warms = self._warm is not None and self._warm.step()
        if self._early.waiting or self._early.later:
            self._early.step()
        if self._promotions.queued:
            self._jobs.submit_promotions()
        self._jobs.pull()
        if self.primary_tier.keeper is not None:
            self.primary_tier.keeper.step()
        superseded, seconds = self._steps.end()
        if superseded:
            self._follow(self._clock())
        self._jobs.collected = False
        if seconds > 0.0 and not (warms or self._jobs.awaited or self._promotions.queued or self._early.waiting):
            next_due = min(self._promotions.next_deadline, self._reservations.next_expiry, self._waiters.first_end)
            rest.until = min(self._clock() + seconds, next_due, self._early.next_due)

    def _follow(self, deadline: float) -> None:
        """Drop all blocks stored before, because a new common epoch has begun; then let the tiers enter it.

        Args:
            deadline: time until which tiers may confirm; a step of the engine gives them none.
        """
        self._stats.new_epochs += 1
        self._empty_primary()
        self._tiers.follow(deadline)

    @property
    def new_epochs(self) -> int:
        return self._stats.new_epochs

    def has_pending_work(self) -> bool:
        """Return True while jobs are in flight or queued.

        An overdue job counts for :data:`~tiering.manager.jobs.COUNTS_OVERDUE` seconds beyond its deadline, so that the
        steps of an idle engine collect its end and release its rows. A tier that hangs for longer lets the engine
        sleep; the steps of the next request then collect.
        """
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if self._early.steps_idle or (self._warm is not None and self._warm.steps_idle):
            return True
        return self._promotions.queued or self._jobs.expected() or self._jobs.queued_in_time

    @property
    def blocks_queued(self) -> int:
        """Number of readable blocks that wait for the credit of a tier, per tier."""
        return sum([len(state.queue) for state in self._states])

    @property
    def descriptions(self) -> TierDescriptions | None:
        return self._descriptions

    def take_events(self) -> list[OffloadingEvent]:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if not self._enable_events:
            return []
        events = self.primary_tier.take_events()
        events += self._tiers.take_events()
        events.sort(key=attrgetter("order"))
        return events

    def get_stats(self) -> dict[str, Any]:
        self._owner.check()
        return report(self._stats, self.primary_tier, self._tiers, self._jobs, self._reservations, self._advisor)

    # -------------------------------------------------------------------------------------------------- reset, shutdown

    def reset_cache(self, revision: str | None = None) -> bool:
        """Drop all blocks; see the base class.

        Raises:
            ConfigError: ``revision`` is not a text; nothing was reset.
        """
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        if revision is not None:
            revision_digest(revision)
        self._stats.resets += 1
        self._empty_primary()
        return self._keep_secondary or self._tiers.reset(self._reset_deadline, revision)

    def count_inherited(self, blocks: int) -> None:
        """Count blocks that an earlier engine has left in the rows."""
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._stats.inherited_blocks += blocks
        self.news.announce()

    def _empty_primary(self) -> None:
        if self._advisor is not None:
            self._advisor.forget()
        self.primary_tier.reset_cache()
        if self._warm is not None:
            self._warm.reset()

    def _on_failed(self, state: TierState) -> None:
        """Expect nothing from a tier that is out of service until a restart, and nothing for it."""
        self._promotions.fail_all(state)
        self._stats.queued_retired += self._broker.empty(state)

    def _before_reset(self) -> None:
        """Drop all promotions and queued blocks, because the primary table is about to be emptied."""
        self._promotions.drop_queued()
        self._jobs.collect()
        self._stats.queued_reset += self._jobs.drop_all()
        self._promotions.reset(self._jobs.running_promotions())
        self._requests.drop_refusals()
        self._early.clear()

    def shutdown(self) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        if self._shut_down:
            return
        self._shut_down = True
        self._promotions.drop_queued()
        if self._warm is not None:
            self._warm.publish()
        stopped = self._tiers.shut_down(self._shutdown_deadline, self._jobs.drain)
        self._jobs.collect()
        if len(self._jobs):
            _log.warning("%d jobs of secondary tiers were not finished at shutdown", len(self._jobs))
        if dropped := self._jobs.drop_all():
            self._stats.queued_retired += dropped
            _log.warning("%d blocks waited for secondary tiers at shutdown and were not stored", dropped)
        self._tiers.end_service()
        if stopped:
            self.primary_tier.shutdown()
        else:
            _log.error("a tier did not stop: the primary buffer stays mapped until the process ends")
