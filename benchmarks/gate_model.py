"""Discrete-event model of an engine with one slow tier, for the choice between loading and computing.

The manager, its gate and the measurement of the prefill are the real ones. An engine with chunked prefill, a medium
and a clock are modelled. All requests have prefixes of their own, which the tier holds and the CPU tier does not: each
has to be loaded or computed. The time to the first token is that at which the last chunk of a prompt has ended.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from types import SimpleNamespace
from typing import Any, Literal, Self

import numpy as np

from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.request import ReqContext
from tiering.connector.prefill import PrefillSpeed
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import JobResult, PrefixAnswer, TransferJob
from tiering.secondary.speeds import Speeds, TierSpeeds
from tiering.testing.fake_tier import FakeTier

BLOCK_TOKENS = 64
CHUNK_TOKENS = 2048
"""Largest number of tokens of one step."""
STEP_SECONDS = 0.004
"""Part of a step's duration that does not depend on its tokens."""
POLL_SECONDS = 0.002
"""Duration of a step without tokens, in which waiting requests are asked again."""
TAIL_TOKENS = 48
"""Tokens at the end of each prompt that no tier holds."""
ANSWER_TOKENS = 5
"""Tokens of each answer."""
WARM_UP = 3
"""First requests of each run, which are left out: the engine's speed is not known yet.

:func:`cold` has them.
"""
BURST = 16
"""Prompts that :func:`burst` lets come at once."""
EARLIER = 30
"""Requests of the engine before."""
FRESH = 10
"""Requests of a fresh engine that :func:`cold` compares."""
PREFILLS = (2_000.0, 10_000.0, 50_000.0)
LENGTHS = (512, 4_096, 16_384)
LOADS = (0.1, 0.5)
SPEEDS = ((1.0,), (0.3,), (0.1,), (0.03,), (0.01,), (1.0, 0.01), (0.01, 1.0), (1.0, 0.05, 1.0))
ROWS = 8192
LATENCY = 0.003
"""Seconds until the first byte of a load, at full speed."""
TIER_TOKENS_PER_SECOND = 200_000.0
"""Tokens whose blocks the medium delivers per second, at full speed."""
PART_BLOCKS = 8
"""Largest number of blocks of one job."""
SHAPE = 1.5
"""Shape of the Pareto distribution of lengths: without a bound, their variance is infinite."""
LONGEST = 8.0
"""Largest length, in medians."""
_SHORTEST = math.pow(0.5, 1.0 / SHAPE)
MEAN_LENGTH = SHAPE * _SHORTEST / (SHAPE - 1.0) - 0.5 * math.pow(LONGEST, 1.0 - SHAPE) / (SHAPE - 1.0)
"""Mean length, in medians."""

Policy = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Cell:
    """Conditions of one run."""

    prefill: float
    """Prompt tokens that the engine computes per second, besides :data:`STEP_SECONDS`."""
    speeds: tuple[float, ...]
    """Shares of the medium's full speed, in equal parts of the run one after another."""
    tokens: int
    """Median length of the prompts, in tokens; the lengths have a Pareto distribution."""
    load: float
    """Share of the engine's time that computing everything would take."""
    requests: int = 160


@dataclass(slots=True, eq=False)
class _Prompt:
    arrival: float
    ctx: ReqContext
    keys: Sequence[OffloadKey]
    tokens: int
    left: int = 0
    answer: int = ANSWER_TOKENS
    is_seen: bool = False
    """True once the engine has looked at it."""


def length(dice: random.Random) -> float:
    """Return a random length in medians."""
    return min(LONGEST, _SHORTEST * dice.paretovariate(SHAPE))


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ModelledTier(FakeTier):
    """A medium that moves one job after another, with a latency, a bandwidth and some jitter."""

    clock: Callable[[], float] = field(default=lambda: 0.0)
    speed: Callable[[float], float] = field(default=lambda now: 1.0)
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    free_at: float = 0.0
    running: deque[tuple[float, TransferJob]] = field(default_factory=deque)

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        return PrefixAnswer(len(keys), False)

    def submit_load(self, job: TransferJob) -> None:
        now = self.clock()
        slow = self.dice.uniform(0.9, 1.1) / self.speed(now)
        seconds = len(job.keys) * BLOCK_TOKENS / TIER_TOKENS_PER_SECOND * slow
        self.free_at = max(now + LATENCY * slow, self.free_at) + seconds
        self.running.append((self.free_at, job))

    def get_finished(self) -> Iterable[JobResult]:
        ended = []
        while self.running and self.running[0][0] <= self.clock():
            at, job = self.running.popleft()
            ended.append(JobResult(job.job_id, True, transfer_time=at - job.submitted_at))
        return ended


class Memory(TierSpeeds):
    """The speeds that the last engine has published."""

    def __init__(self) -> None:
        self.kept: Sequence[Speeds] = ()

    def publish(self, speeds: Speeds) -> None:
        self.kept = (speeds,)

    def gather(self) -> Sequence[Speeds]:
        return self.kept


class GateModel:
    """One run of one cell under one policy.

    Args:
        cell: the conditions.
        policy: ``load_or_compute`` of the tier.
        seed: seed of arrivals, lengths and jitter; equal for the policies that are compared.
        speeds: part of the tier that keeps speeds; default: none.
    """

    def __init__(self, cell: Cell, policy: Policy, seed: int, speeds: TierSpeeds | None = None) -> None:
        dice = random.Random(seed)
        self._cell = cell
        self._clock = clock = _Clock()
        self._prompts: deque[_Prompt] = deque()
        at = 0.0
        for number in range(cell.requests):
            at += dice.expovariate(cell.load * cell.prefill / (MEAN_LENGTH * cell.tokens))
            blocks = int(cell.tokens * length(dice)) // BLOCK_TOKENS
            keys = [make_offload_key(b"%016d%016d" % (number, block), 0) for block in range(blocks)]
            self._prompts.append(_Prompt(at, ReqContext(str(number)), keys, blocks * BLOCK_TOKENS + TAIL_TOKENS))
        part = at / len(cell.speeds)
        self.change_times = [part * (number + 1) for number in range(len(cell.speeds) - 1)]
        """Times at which the speed of the medium changes."""
        self.tier = ModelledTier(
            load_or_compute=policy,
            max_load_blocks=PART_BLOCKS,
            speeds=speeds,
            clock=clock,
            speed=lambda now: cell.speeds[min(int(now / part), len(cell.speeds) - 1)],
            dice=random.Random(seed + 1),
        )
        primary = CPUPrimaryTierOffloadingManager(np.zeros((ROWS, 1), np.uint8).data)
        self.manager = TieringOffloadingManager(primary, [self.tier], clock=clock)
        group: Any = SimpleNamespace(is_full=True, offloaded_block_size=BLOCK_TOKENS)
        self._prefill = PrefillSpeed([group], self.manager, clock)
        self.ended: list[tuple[float, float, int]] = []
        """Arrival, seconds to the first token and loaded blocks of each request."""

    def at_once(self) -> Self:
        """Let all prompts come together with the first one."""
        first = self._prompts[0].arrival
        for prompt in self._prompts:
            prompt.arrival = first
        return self

    def run(self) -> list[tuple[float, float, int]]:
        """Return the arrival, the seconds to the first token and the loaded blocks of each request."""
        clock, waiting, running = self._clock, deque[_Prompt](), deque[tuple[_Prompt, int]]()
        while self._prompts or waiting or running:
            while self._prompts and self._prompts[0].arrival <= clock.now:
                prompt = self._prompts.popleft()
                self.manager.on_new_request(prompt.ctx)
                waiting.append(prompt)
            self._step(waiting, running)
        return self.ended

    def _step(self, waiting: deque[_Prompt], running: deque[tuple[_Prompt, int]]) -> None:
        budget, scheduled, skipped = CHUNK_TOKENS, dict[str, int](), deque[_Prompt]()
        for prompt, _ in running:
            if budget:
                scheduled[prompt.ctx.req_id] = take = min(budget, prompt.left)
                budget -= take
        while waiting and budget:
            prompt = waiting.popleft()
            if not prompt.is_seen:
                prompt.is_seen = True
                self._prefill.arrived(prompt.arrival)
            match = self.manager.match_prefix(prompt.keys, prompt.ctx)
            if match.pending:
                skipped.append(prompt)
                continue
            hits = prompt.keys[: match.hits]
            if hits:
                self.manager.prepare_load(hits, prompt.ctx)
                self.manager.complete_load(hits, prompt.ctx)
            self.manager.note_scheduled(prompt.ctx)
            prompt.left = prompt.tokens - len(hits) * BLOCK_TOKENS
            scheduled[prompt.ctx.req_id] = take = min(budget, prompt.left)
            budget -= take
            running.append((prompt, len(hits)))
        waiting.extendleft(reversed(skipped))
        self.manager.on_schedule_end()
        self._prefill.built(SimpleNamespace(num_scheduled_tokens=scheduled))
        tokens = sum(scheduled.values())
        if tokens:
            self._clock.now += STEP_SECONDS + tokens / self._cell.prefill
            self._prefill.ended()
        else:
            self._clock.now = max(self._clock.now + POLL_SECONDS, self._next_event(waiting))
        for _ in range(len(running)):
            prompt, loaded = running.popleft()
            prompt.left -= scheduled.get(prompt.ctx.req_id, 0)
            if prompt.left == 0 and prompt.answer == ANSWER_TOKENS:
                self.ended.append((prompt.arrival, self._clock.now - prompt.arrival, loaded))
            if prompt.left == 0:
                prompt.answer -= 1
                prompt.left = 1
            if prompt.answer:
                running.append((prompt, loaded))
            else:
                self.manager.on_request_finished(prompt.ctx)

    def _next_event(self, waiting: Iterable[_Prompt]) -> float:
        """Return when the next request arrives, the next job ends or the first wait is over."""
        arrival = self._prompts[0].arrival if self._prompts else math.inf
        job = self.tier.running[0][0] if self.tier.running else math.inf
        waits = [self.manager.waits_until(prompt.ctx) for prompt in waiting]
        first = min(arrival, job, *waits)
        return first if first < math.inf else 0.0


def waits(cell: Cell, policy: Policy, seed: int = 0, speeds: TierSpeeds | None = None) -> list[float]:
    """Return the seconds to the first token of all requests of a cell, in the order of their arrival."""
    return [wait for _, wait, _ in sorted(GateModel(cell, policy, seed, speeds).run())]


def kept_speeds(cell: Cell, seed: int = 0) -> Memory:
    """Return what an engine has left that has run other requests of a cell, and was stopped."""
    memory = Memory()
    model = GateModel(replace(cell, requests=EARLIER), "auto", seed + 1000, memory)
    model.run()
    model.manager.shutdown()
    return memory


def mean_wait(cell: Cell, policy: Policy, seed: int = 0) -> float:
    """Return the mean seconds to the first token in a cell, without the first requests."""
    return mean(waits(cell, policy, seed)[WARM_UP:])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Mean seconds to the first token in one cell, by policy."""

    cell: Cell
    never: float
    always: float
    auto: float

    @property
    def best(self) -> float:
        """The better one of never and always."""
        return min(self.never, self.always)

    @property
    def regret(self) -> float:
        """Part by which the choice takes longer than the better one, at least 0."""
        return max(0.0, self.auto / self.best - 1.0)

    @property
    def holds(self) -> bool:
        """True if the choice takes at most 5% and 10 ms longer than the better one."""
        return self.auto <= 1.05 * self.best + 0.01


def compare(cell: Cell, seed: int = 0, auto: Policy = "auto") -> Comparison:
    """Return the comparison of one cell, in which ``auto`` may be replaced by another policy."""
    return Comparison(
        cell, mean_wait(cell, "never", seed), mean_wait(cell, "always", seed), mean_wait(cell, auto, seed)
    )


def grid(requests: int, prefills: Sequence[float] = PREFILLS, lengths: Sequence[int] = LENGTHS) -> list[Cell]:
    """Return the cells of the grid; those whose speed changes have more requests."""
    return [
        Cell(prefill, speeds, tokens, load, requests if len(speeds) == 1 else 3 * requests)
        for prefill in prefills
        for speeds in SPEEDS
        for tokens in lengths
        for load in LOADS
    ]


@dataclass(frozen=True, slots=True)
class Cold:
    """First prompts of a fresh engine, in times of those with the better one of never and always."""

    cell: Cell
    first: float
    """Quotient of the times to the first token of the first prompt."""
    mean: float
    """Quotient of the mean times of the first :data:`FRESH` prompts."""
    holds: bool
    """True if the first prompt takes at most 5% and 10 ms longer than the better one."""


def cold(cell: Cell, seed: int = 0, *, again: bool = False) -> Cold:
    """Return the comparison of an engine that has just started.

    Args:
        cell: the conditions.
        seed: seed of the runs.
        again: True if another engine has run before, whose speeds the tier has kept; False (default) if the speeds of
            the engine and of the tier are not known.
    """
    never, always = waits(cell, "never", seed), waits(cell, "always", seed)
    auto = waits(cell, "auto", seed, kept_speeds(cell, seed) if again else None)
    best = min(never[0], always[0])
    return Cold(cell, auto[0] / best, mean(auto) / min(mean(never), mean(always)), auto[0] <= 1.05 * best + 0.01)


def burst(cell: Cell, seed: int = 0, *, again: bool = False) -> Comparison:
    """Return the comparison of an engine that has just started, and whose prompts all come at once.

    Args:
        cell: the conditions.
        seed: seed of the runs.
        again: True if the tier has kept the speeds of another engine; default: False.
    """

    def wait(policy: Policy) -> float:
        speeds = kept_speeds(cell, seed) if again and policy == "auto" else None
        return mean(seconds for _, seconds, _ in GateModel(cell, policy, seed, speeds).at_once().run())

    return Comparison(cell, wait("never"), wait("always"), wait("auto"))


def burst_grid() -> list[Cell]:
    """Return the cells of :func:`burst`."""
    return [replace(cell, requests=BURST) for cell in cold_grid() if cell.load == LOADS[0]]


def cold_grid() -> list[Cell]:
    """Return the cells of fresh engines, with a slower engine besides."""
    return [
        Cell(prefill, speeds, tokens, load, FRESH)
        for prefill in (500.0, *PREFILLS)
        for speeds in SPEEDS
        if len(speeds) == 1
        for tokens in LENGTHS
        for load in LOADS
    ]
