"""Lookups and loads of a manager of tiers, and the choice between loading and computing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident

from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.misses import LookupOutcome
from tiering.api.request import ReqContext
from tiering.api.transfer import CPULoadStoreSpec
from tiering.manager.parts import ManagerParts
from tiering.runtime.news import Steps

LOOK_PAUSE = 5e-4
"""Least time between two looks of a wait for answers, in seconds.

Each end of a store is news too.
"""


class ManagerLookups(ManagerParts):
    """The part of a manager of tiers that finds the blocks of requests, and lets the engine load them."""

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
            if self._kept_speeds is not None and self._kept_speeds.gathering:
                self._kept_speeds.gather()
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
        if self._gates and request.load_by <= self._clock() and not self._search.waits_on(request):
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
        self._enter()
        if not self._jobs.collected:
            self._jobs.collect()
        request = self._known.get(req_context.req_id)
        if request is None or request.finished:
            return self.primary_tier.match_prefix(keys, req_context)
        return self._search.held(request, tuple(keys)) if request.policy.load else PrefixMatch(0, False)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[bool | None]:
        self._enter()
        if not self._jobs.collected:
            self._jobs.collect()
        request = self._known.get(req_context.req_id)
        if request is None or request.finished:
            return self.primary_tier.lookup_each(keys, req_context)
        return self._search.each(request, keys) if request.policy.load else [False] * len(keys)

    def still_pending(self, req_context: ReqContext) -> bool:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        return self._open_lookups.still_pending(req_context.req_id)

    def wait_until(self, answered: Callable[[], bool], seconds: float) -> None:
        self._owner.claim()
        self.news.wait(Steps(answered, seconds, seconds), LOOK_PAUSE)

    def lookup_outcome(self, key: OffloadKey, req_context: ReqContext) -> LookupOutcome | None:
        self._owner.claim()
        request = self._known.get(req_context.req_id)
        return None if request is None else request.outcome_of(key)

    def cold_starts(self) -> Mapping[str, str]:
        return dict(self._requests.agreement.cold_starts)

    # -------------------------------------------------------------------------------------------------- load or compute

    @property
    def gates_loads(self) -> bool:
        return self._gates

    def waits_until(self, req_context: ReqContext) -> float:
        """Return the time until which a request waits for gated loads; infinity if it does not."""
        self._owner.claim()
        request = self._known.get(req_context.req_id)
        return math.inf if request is None else request.load_by

    def note_compute(self, seconds: Sequence[float], *, others: float = 0.0, is_assumed: bool = False) -> None:
        self._owner.claim()
        search = self._search
        was_kept, search.is_guess = search.is_assumed and not search.is_guess, is_assumed
        if is_assumed and self._kept_speeds is not None:
            kept = self._kept_speeds.assumed(seconds)
            seconds, search.is_guess = kept, kept is seconds
        if search.is_assumed:
            pairs = zip(seconds, search.compute_seconds, strict=False)
            factor = next((new / old for new, old in pairs if 0.0 < old < math.inf), 1.0)
            if was_kept and not is_assumed:
                factor = min(factor, 1.0)  # the first measured step may have few tokens
            for request in self._known.values():
                request.stretch_wait(factor)
        search.compute_seconds, search.others, search.is_assumed = seconds, others, is_assumed

    def measure_worth(self, req_context: ReqContext) -> None:
        self._owner.claim()
        request = self._known.get(req_context.req_id)
        if request is not None:
            request.is_measured = True

    def note_scheduled(self, req_context: ReqContext) -> None:
        self._owner.claim()
        if self._gates and (request := self._known.get(req_context.req_id)) is not None:
            self._rest.until = None
            self._search.scheduled(request)

    def note_first_token(self, req_context: ReqContext, prefill_seconds: float) -> None:
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
        self._stats.hint_hits += self.primary_tier.count_kept(pinned)
        self._jobs.report_use(once, pinned, request, req_context)
        return CPULoadStoreSpec(rows)

    def count_sources(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        request = self._known.get(req_context.req_id)
        if request is None or not request.brought:
            return {}
        return Counter(self._states[rank].traits.medium for rank in map(request.brought.get, keys) if rank is not None)

    def count_tiers(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
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
        if self._is_exclusive:
            self._jobs.late_copies.loaded(keys, self._known.get(req_context.req_id))

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
