"""The search for the longest prefix that the tiers hold.

A block counts if the primary table holds it, if it is in flight to the primary table, or if a secondary tier holds it.
Blocks that only a secondary tier holds are promoted on the way. One search probes and pins no block twice, so the cost
of a prefix with many holes grows by a small amount per hole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import compress, count, takewhile
from typing import NamedTuple

import numpy as np

from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.transfer import Rows
from tiering.manager.answers import EACH, PREFIX, lookup
from tiering.manager.engine_queue import NO_DELAYS, EngineQueue
from tiering.manager.load_gate import LoadGate
from tiering.manager.promotions import Promotions
from tiering.manager.requests import Request
from tiering.manager.tier_state import TierState
from tiering.manager.tiers import SecondaryTiers
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.runtime.typical import Typical

MAX_RUNS = 128
"""Largest number of runs of missing blocks that one search promotes; later steps promote the rest."""

HANDOVER_SECONDS = 300.0
"""Length of a period of the shortest time from a load to the request's step, in seconds."""

HANDOVER_HALF_LIFE = 10.0
"""Seconds in which the typical time falls halfway to the shortest one while none is measured."""

FIRST_WAIT = 0.01
"""Least seconds that the shortest of several first prompts waits before it shows the engine's speed.

With a known engine, all prompts but one wait at least as long for a tier that is not known, or :data:`CLEARLY`.

A computed prompt holds up the others, so that a tier whose first blocks come meanwhile, and are faster, is used for
all.
"""

FIRST_PART = 0.1
"""Part of the assumed time of computing it for which it waits besides: it holds up the others as long."""

CLEARLY = 0.2
"""Part of the time of computing within which the loads of a tier that is not known are to end."""

UNDECIDED_PATIENCE = 10.0
"""Longest time that a request waits for undecided tiers, in seconds from its first undecided lookup."""

_NONE: frozenset[OffloadKey] = frozenset()


def _leading(keys: Sequence[OffloadKey], others: Container[OffloadKey]) -> int:
    """Return the number of leading ``keys`` that are not among ``others``."""
    return next(compress(count(), map(others.__contains__, keys)), len(keys))


@dataclass(slots=True)
class _Walk:
    """The state of one search."""

    keys: Sequence[OffloadKey]
    at_least: int = 1
    """Smallest number of hits that is of use to the caller."""
    held_until: dict[int, int] = field(default_factory=dict)
    """Per tier rank, the position in ``keys`` up to which the tier holds the blocks."""
    pinned: list[Rows] = field(default_factory=list)
    """Rows of the readable keys before ``pinned_until``."""
    pinned_until: int = 0
    runs: int = 0
    """Runs of missing blocks that were looked up so far."""
    waits: bool = False
    """True if the request waits for primary rows, or its early promotions go on in a later step."""
    is_early: bool = False
    """True if the request does not wait for the answer: it is not looked up yet."""
    begun: int = 0
    """Blocks whose early promotion this search has begun."""
    is_undecided: bool = False
    """True if an early search ended because a tier is undecided."""


class EarlyMatch(NamedTuple):
    """The result of an early search."""

    hits: int
    """Leading blocks that are held or in flight."""
    begun: int
    """Those whose promotion this search has begun."""
    is_complete: bool
    """True if nothing is left to begin: the next block is missing, or there is none."""
    is_undecided: bool
    """True if a tier is undecided, so that the same search soon would find the same."""


class PrefixSearch:
    """Finds the leading blocks of a chain that the tiers hold together, and has them promoted."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        promotions: Promotions,
        tiers: SecondaryTiers,
        clock: Callable[[], float],
    ) -> None:
        """Create the search over a manager's parts.

        Args:
            primary: the primary tier.
            promotions: starts the promotions of blocks that a secondary tier holds.
            tiers: the secondary tiers.
            clock: monotonic clock, in seconds.
        """
        self._primary = primary
        self._readable = primary.readable
        self._pending = primary.pending
        self._promotions = promotions
        self._waiters = promotions.waiters
        self._waits = self._waiters.waits
        self._ask = tiers.ask
        self._clock = clock
        self._gates = [state.gate for state in tiers.states if state.gate is not None]
        self.gates = bool(self._gates)
        """True if loads from some tier are chosen by the time that they take."""
        self.compute_seconds: Sequence[float] = ()
        """Seconds of computing one block, by KV-cache group; unknown groups are always loaded."""
        self.is_assumed = False
        """True if :attr:`compute_seconds` are not measured yet."""
        self.is_guess = False
        """True if no engine has measured them."""
        self._first: Request | None = None
        """The request that is to show the engine's speed: the shortest one of the first ones."""
        self._first_seconds = self._taken = 0.0
        """Seconds of computing its blocks, and those by which its wait is shorter."""
        self._first_by = math.inf
        """Time until which it waits; infinity while no other one waits."""
        self.others = 0.0
        """Part by which the requests that come meanwhile lengthen :attr:`compute_seconds`."""
        self.queue = EngineQueue()
        """Requests that wait for loads from tiers with a gate, and those that compute instead."""
        self._handover = Typical(HANDOVER_SECONDS, HANDOVER_HALF_LIFE, clock())
        """Seconds from the end of a load to the step that computes the rest of the prompt: steps and a copy."""

    def match(self, request: Request, keys: Sequence[OffloadKey], position: int, at_least: int = 1) -> PrefixMatch:
        """Return the longest prefix of ``keys``, searching on from ``position``.

        Args:
            request: the request that asks.
            keys: blocks of a prompt, in their order.
            position: index of the first key that is not readable; all keys before it are readable.
            at_least: smallest useful number of hits. No block is promoted for a shorter prefix, and its answer is
                never pending.
        """
        walk = _Walk(keys, at_least)
        request.awaited = None
        try:
            return self._walk(request, walk, position)
        finally:
            for rows in walk.pinned:
                self._primary.unpin(rows)
            if not walk.waits and request in self._waits:
                self._waiters.settle(request, keys)

    def begin(self, request: Request, keys: Sequence[OffloadKey], most: int) -> EarlyMatch:
        """Promote what the tiers hold of a prefix, for a request that is not looked up yet.

        Args:
            request: the request.
            keys: blocks of a prompt, in their order.
            most: largest number of blocks to look at beyond the leading ones that the CPU tier holds.
        """
        position = self._readable.leading(keys)
        seen = keys if most >= len(keys) - position else keys[: position + most]
        walk = _Walk(seen, is_early=True)
        try:
            end = self._walk(request, walk, position).hits
        finally:
            for rows in walk.pinned:
                self._primary.unpin(rows)
        is_complete = not walk.waits and (end < len(seen) or len(seen) == len(keys))
        return EarlyMatch(end, walk.begun, is_complete, walk.is_undecided)

    def scheduled(self, request: Request) -> None:
        """Record that the step that is being built computes what a request has not loaded."""
        if request.is_cut or request.arrived_at > -math.inf:
            self.queue.begins(request)
        if request.arrived_at > -math.inf:
            now = self._clock()
            self._handover.add(now - request.arrived_at, now)
            request.arrived_at = -math.inf

    def each(self, request: Request, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Return for each of ``keys`` whether it is held or in flight, without a promotion; None: not known."""
        answers = self._primary.lookup_each(keys, request.ctx)
        for state in request.tiers:
            if not (state.in_service and state.loads):
                continue
            rest = [index for index, answer in enumerate(answers) if not answer]
            if not rest:
                break
            given = self._ask(state, EACH, lookup, state.tier, [keys[index] for index in rest], request.ctx)
            for index, answer in zip(rest, given or (), strict=False):
                if answer is not False:
                    answers[index] = answer
        return answers

    def held(self, request: Request, keys: Sequence[OffloadKey]) -> PrefixMatch:
        """Return how many leading ``keys`` are held or in flight, without a promotion.

        The answer is pending if a tier has not decided yet about the first key that none holds.
        """
        position = 0
        while position < len(keys):
            rest, undecided = keys[position:], False
            found = self._readable.leading(rest) or len(list(takewhile(self._pending.__contains__, rest)))
            for state in () if found else request.tiers:
                if state.in_service and state.loads:
                    held, open_end = self._ask(state, PREFIX, state.tier.lookup_prefix, rest, request.ctx) or (0, False)
                    found = max(found, held if held >= state.traits.min_prefix_blocks else 0)
                    undecided = undecided or open_end
            if not found:
                return PrefixMatch(position, undecided)
            position += found
        return PrefixMatch(position, False)

    def _walk(self, request: Request, walk: _Walk, position: int) -> PrefixMatch:
        keys, pending, stored_by_others = walk.keys, False, False
        while position < len(keys):
            key = keys[position]
            if key in self._readable:
                position += self._readable.leading(keys[position:])
            elif key in request.refused:
                break
            elif key in self._pending:
                run = list(takewhile(self._pending.__contains__, keys[position:]))
                if request.refused:
                    run = list(takewhile(lambda other: other not in request.refused, run))
                if self.gates and not self._joins(request, run, position, is_early=walk.is_early):
                    break
                self._promotions.join(request, run)
                pending = True
                stored_by_others = stored_by_others or not request.asked.issuperset(run)
                position += len(run)
            else:
                if walk.runs == MAX_RUNS:
                    walk.waits = walk.is_early
                    return PrefixMatch(position, True)
                walk.runs += 1
                promoted, patience = self._ask_tiers(request, walk, position)
                if walk.waits:
                    return PrefixMatch(position + promoted, True)
                if walk.is_early and patience:
                    walk.waits = walk.is_undecided = True
                    break
                if patience and request.wait_undecided(self._clock(), patience):
                    return PrefixMatch(position, True)
                if not promoted:
                    break
                pending = True
                position += promoted
        pending = pending and position >= walk.at_least
        if self.gates and not pending and not request.asked:
            request.load_by = math.inf
        if pending and not stored_by_others:
            request.awaited = (len(keys), keys[-1], position)
        return PrefixMatch(position, pending)

    def _ask_tiers(self, request: Request, walk: _Walk, position: int) -> tuple[int, float]:
        """Promote blocks from ``position`` on from the fastest tier that holds them and whose load pays.

        A tier is not asked about fewer blocks than its ``min_prefix_blocks``.

        Returns:
            The number of blocks that are being promoted now, and the longest time in seconds for which the request
                waits for an undecided tier; 0 if all are decided, or blocks are being promoted.
        """
        patience, left = 0.0, len(walk.keys) - position
        for state in request.tiers:
            least, gate = state.traits.min_prefix_blocks, state.gate
            if not state.in_service or left < least or not state.loads:
                continue
            if gate is not None and request.is_early:
                continue  # Its limit for waiting begins with its first lookup.
            end, may_grow = walk.held_until.get(state.rank, 0), False
            if end <= position:
                keys = walk.keys[position:]  # a copy, also of the whole: a tier must not change the caller's keys
                answer = self._ask(state, PREFIX, state.tier.lookup_prefix, keys, request.ctx)
                if answer is None:
                    continue
                held, open_end = answer
                end = walk.held_until[state.rank] = position + held
                may_grow = open_end and held < max(least, walk.at_least - position)
            keys = self._run_to_promote(state, request, walk, position, end) if end - position >= least else ()
            if (
                keys
                and gate is not None
                and not walk.is_early
                and not self._pays(state, gate, request, keys, position, self._lost(walk, position, keys, end))
            ):
                count = 0 if request.is_control_of(state.rank) else gate.take_probe(len(keys), self._clock())
                if count:
                    self._pin_head(walk, position)
                    self._promotions.start_probe(state, keys[-count:])
                continue
            if keys:
                self._pin_head(walk, position)
                if walk.is_early:
                    promoted, walk.waits = self._promotions.start_early(state, request, keys)
                    walk.begun += promoted
                else:
                    promoted, walk.waits = self._promotions.start(state, request, keys, position)
                return promoted, 0.0
            if may_grow:
                seconds = UNDECIDED_PATIENCE if gate is None else self._undecided_patience(gate, walk.keys, left)
                patience = max(patience, seconds)
        return 0, patience

    def _compute_seconds(self, key: OffloadKey, blocks: int) -> float:
        """Return the seconds of computing ``blocks`` of the group of ``key``; infinity if they are not known."""
        group, seconds = key[-1], self.compute_seconds
        return blocks * seconds[group] if group < len(seconds) else math.inf

    def _lost(self, walk: _Walk, position: int, keys: Sequence[OffloadKey], end: int) -> int:
        """Return the number of blocks that a request computes if it does not load ``keys``.

        Args:
            walk: the search.
            position: index of the first of ``keys``.
            keys: blocks that a tier holds and the primary tier does not.
            end: index behind the last key that the tier holds.
        """
        behind = position + len(keys)
        return max(end, behind + self._readable.leading(walk.keys[behind:])) - position

    def _pays(
        self,
        state: TierState,
        gate: LoadGate,
        request: Request,
        keys: Sequence[OffloadKey],
        position: int,
        lost: int = 0,
    ) -> bool:
        """Return True if a request is to load ``keys``, for no longer than computing them takes.

        Args:
            state: the tier.
            gate: its gate.
            request: the request.
            keys: blocks that the request does not wait for yet.
            position: number of blocks in front of them, which are handed over anyway.
            lost: number of blocks that it computes otherwise; 0 if ``keys`` are on their way already. Default 0.
        """
        now, seconds = self._clock(), self._compute_seconds(keys[0], len(keys))
        handover = 0.0 if position or (typical := self._handover.value(now)) == math.inf else typical
        queue = self._compute_seconds(keys[0], sum(one.awaited for one in self._gates))
        blocks, delays = len(keys) if lost else 0, NO_DELAYS
        if seconds < math.inf:
            delays = self.queue.delays(request, seconds, self._compute_seconds(keys[0], 1), now)
        queue += delays.before
        pays = seconds == math.inf or (seconds > 0.0 and gate.decide(blocks, seconds, sum(delays), handover, now))
        worth = state.worth
        if pays and worth is not None and not request.is_cut:
            is_known = not self.is_assumed and seconds < math.inf
            if lost and request.is_measured and request.trial is None and is_known:
                cost = self._compute_seconds(keys[0], lost)
                load = gate.expected(len(keys), now) + handover
                request.trial = worth.begin(state.rank, seconds, load, cost, now)
                request.is_measured = request.trial is not None
            if request.is_control_of(state.rank):
                self.queue.computes(request, seconds)
                return False
            pays = not worth.is_closed(now) or (request.trial is not None and request.trial.rank == state.rank)
        if request.is_cut or not pays:
            if state.rank not in request.gated:
                request.gated.add(state.rank)
                gate.gated += len(keys)
            if seconds < math.inf:
                self.queue.computes(request, seconds)
            return False
        if seconds < math.inf and request not in self._waits:  # one that waits for rows finds the same blocks again
            request.wait_longer(now, seconds, queue if lost else 0.0)
            self.queue.loads(request, gate, now + gate.expected(blocks, now) + handover, gate.last(blocks))
            if lost:
                self._limit_trial(request, gate, now, seconds)
        return True

    def _limit_trial(self, request: Request, gate: LoadGate, now: float, seconds: float) -> None:
        """Let a request wait briefly if another one shows already what is not known."""
        if self.is_guess:
            if now < self._first_by and seconds >= FIRST_WAIT:  # a shorter prompt shows little
                self._limit_first(request, now, seconds)
        elif not gate.is_known and self.queue.has_other(request, gate):
            request.shorten_wait(max(0.0, request.load_by - now - max(FIRST_WAIT, CLEARLY * seconds)))

    def _limit_first(self, request: Request, now: float, seconds: float) -> None:
        """Let the shortest one of the requests that wait before anything is known wait briefly."""
        first = self._first
        if first is request:
            self._first_seconds += seconds
            self._first_by += FIRST_PART * seconds
        elif first is None or seconds < self._first_seconds or not self.queue.awaits(first):
            if first is not None:
                first.shorten_wait(-self._taken)
            self._first_by += FIRST_PART * (seconds - self._first_seconds)
            self._first, self._first_seconds, self._taken = request, seconds, 0.0
        if self._first_by == math.inf and self.queue.has_other(request):
            self._first_by = now + FIRST_WAIT + FIRST_PART * self._first_seconds
        if self._first_by < math.inf and self._first is not None:
            taken = max(0.0, self._first.load_by - self._first_by)
            self._first.shorten_wait(taken)
            self._taken += taken

    def waits_on(self, request: Request) -> bool:
        """Return True if a request waits longer than for its own blocks, because its loads pay."""
        queue, request.load_queue = request.load_queue, 0.0
        wait = self._waits.get(request)
        key = next(iter(request.asked), None) if wait is None else wait.key
        if not queue or key is None:
            return False
        # A request that waits for rows may have asked for nothing yet.
        state = self._promotions.source(key) if wait is None else wait.state
        if state is None or (gate := state.gate) is None or not gate.is_known:
            return False
        now, blocks = self._clock(), len(request.asked) + (0 if wait is None else wait.rows)
        seconds, pays = self._compute_seconds(key, blocks), True
        if self.is_guess:
            pays = gate.expected(0, now) <= self._compute_seconds(key, gate.awaited)
        elif seconds < math.inf:
            most = seconds + sum(self.queue.delays(request, seconds, self._compute_seconds(key, 1), now))
            pays = gate.silence(now) <= seconds and gate.left(self.queue.last(request), blocks) <= most
        if not pays:
            return False
        request.load_by += queue
        return now < request.load_by

    def _joins(self, request: Request, run: Sequence[OffloadKey], position: int, *, is_early: bool) -> bool:
        """Return True if a request is to wait for blocks that are being loaded or stored for others."""
        state = None if run[0] in request.asked else self._promotions.source(run[0])
        if state is None or state.gate is None:
            return True
        if is_early:
            return not request.is_early  # a prefetch waits for nothing
        return self._pays(state, state.gate, request, run, position)

    def _undecided_patience(self, gate: LoadGate, keys: Sequence[OffloadKey], left: int) -> float:
        """Return the seconds for which a request waits for an undecided tier with a gate."""
        seconds = self._compute_seconds(keys[-1], left)
        if gate.expected(left, self._clock()) > seconds:
            return 0.0
        return min(seconds, UNDECIDED_PATIENCE)

    def _run_to_promote(
        self, state: TierState, request: Request, walk: _Walk, position: int, end: int
    ) -> Sequence[OffloadKey]:
        """Return the leading keys to promote by one load: the tier holds them, the primary tier does not.

        Args:
            state: the tier.
            request: the request that asks.
            walk: the search.
            position: index of the first missing key.
            end: index behind the last key that the tier holds.

        Returns:
            The keys; none if the tier holds too few blocks to be worth a load.
        """
        keys = walk.keys[position:end]
        for excluded in (request.refused.keys(), request.failed.get(state.rank, _NONE)):
            if excluded and not excluded.isdisjoint(keys):
                keys = keys[: _leading(keys, excluded)]
        if len(keys) < state.traits.min_prefix_blocks:
            return ()
        readable, pending = self._readable, self._pending
        if end < walk.at_least and not all(key in readable or key in pending for key in walk.keys[end : walk.at_least]):
            return ()
        if not readable.disjoint(keys):
            keys = keys[: _leading(keys, readable)]
        if pending and not pending.keys().isdisjoint(keys):
            keys = keys[: _leading(keys, pending)]
        return keys

    def _pin_head(self, walk: _Walk, position: int) -> None:
        """Pin the readable blocks before ``position``.

        A promotion must not evict blocks of its own prefix: the promoted blocks are useless without them.
        """
        head = walk.keys[walk.pinned_until : position]
        walk.pinned_until = position
        rows = np.array([row for row in self._readable.rows_or_none(head) if row is not None], np.int64)
        if len(rows):
            self._primary.pin(rows)
            walk.pinned.append(rows)
