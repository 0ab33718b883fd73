"""The state machine of the manager, with a tier that may answer anything to any call.

No exception leaves the manager, no reader gets another block than its own, and all rows are free in the end. The tier
may lie about everything except one matter, which the manager cannot check: a load that it reports as successful has
filled its rows. It also ends every job at some time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.manager.test_state_machine import ManagerMachine, WritingTier, choices
from tiering.api.manager import LOCAL, MEDIUM_STORAGE, OffloadingEvent
from tiering.manager.rest import LONGEST_REST
from tiering.secondary.contract import JobResult, PrefixAnswer, StepEnd
from tiering.secondary.tier_stats import TierStats
from tiering.testing.keys import keys_of


class Panic(BaseException):
    """An error outside of ``Exception``, as libraries in other languages raise."""


class Unprintable:
    """An object that raises whatever is asked of it."""

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> object:
        raise Panic(name)

    def __repr__(self) -> str:
        raise Panic("no text")

    def __bool__(self) -> bool:
        raise Panic("no truth")

    def __len__(self) -> int:
        raise Panic("no length")

    def __iter__(self) -> Iterator[object]:
        raise Panic("no elements")


def late() -> Iterator[object]:
    """Raise after the first element."""
    yield None
    raise Panic("the connection is gone")


NAN = float("nan")
LIES: list[Callable[[], object]] = [
    lambda: None, lambda: 0, lambda: 1, lambda: -1, lambda: 7, lambda: NAN, lambda: float("inf"), lambda: 10**400,
    lambda: "text", lambda: b"bytes", lambda: (), lambda: [None], lambda: [[]], dict, object, Unprintable, late,
    lambda: [Unprintable()], lambda: itertools.repeat(None), lambda: np.array([1, 2]), lambda: np.int64(3),
    lambda: np.array([True]), lambda: True, lambda: False,
    lambda: PrefixAnswer(10**9, False), lambda: PrefixAnswer(-1, True), lambda: PrefixAnswer(0, None),  # type: ignore[arg-type]
    lambda: PrefixAnswer(1, False), lambda: PrefixAnswer(0, True), lambda: (NAN, NAN),
    lambda: keys_of(*range(24)), lambda: [b""],
    lambda: [JobResult(10**9, True)], lambda: [JobResult(None, True)], lambda: [JobResult([], False)],  # type: ignore[arg-type]
    lambda: [OffloadingEvent(keys_of(1), MEDIUM_STORAGE, LOCAL, "fast", True)],
    lambda: [OffloadingEvent(None, "TAPE", LOCAL, "fast", True)],  # type: ignore[arg-type]
    lambda: TierStats(blocks=-1), lambda: TierStats(job_latency=[]), lambda: TierStats(hits="3"),  # type: ignore[arg-type]
    lambda: [0, 0], lambda: [1, 0], lambda: range(10**9), lambda: [-1], lambda: {0: 1}, lambda: 0.5,
    lambda: StepEnd(superseded=True), lambda: StepEnd(reset_done=True), lambda: StepEnd(rest=float("inf")),
    lambda: StepEnd(keys_of(*range(24))), lambda: StepEnd([None]), lambda: StepEnd(rest=-1.0),  # type: ignore[list-item]
    lambda: StepEnd(None), lambda: StepEnd(superseded=None), lambda: StepEnd(itertools.repeat(None)),  # type: ignore[arg-type]
    lambda: RuntimeError("raised"), lambda: Panic("raised"), RecursionError, StopIteration,
    GeneratorExit,
]  # fmt: skip
"""Answers of all kinds; exceptions are raised."""

TAKES_BACK = ("get_finished",)
"""Methods whose honest answer must not get lost, because it is not given twice."""

METHODS = (
    "lookup", "lookup_prefix", "submit_store", "submit_load", "get_finished", "admit", "credit", "not_stored",
    "touch", "used", "on_new_request", "on_request_finished", "on_schedule_end", "take_events", "get_stats", "drain",
    "reset", "shutdown",
)  # fmt: skip


class LyingTier(WritingTier):
    """A tier that does what it is told, and answers the next call of some methods with a lie."""

    lies: dict[str, Callable[[], object]]

    def answer(self, method: str, honest: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not hasattr(self, "lies"):
            self.lies = {}
        lie = self.lies.pop(method, None)
        if lie is None:
            return honest(self, *arguments)
        if method not in TAKES_BACK:
            honest(self, *arguments)
        answer = lie()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _lying(method: str) -> Callable[..., Any]:
    honest = getattr(WritingTier, method)

    def answer(self: LyingTier, *arguments: Any) -> Any:
        return self.answer(method, honest, arguments)

    answer.__name__ = method
    return answer


for _method in METHODS:
    setattr(LyingTier, _method, _lying(_method))


class LyingMachine(ManagerMachine):
    """The machine with a lying tier before the honest one."""

    first_tier = LyingTier
    pause = LONGEST_REST  # a tier that says that it rests may have results that it does not announce

    @rule(choice=choices, method=st.sampled_from(METHODS), lie=st.sampled_from(LIES))
    def the_tier_lies(self, choice: int, method: str, lie: Callable[[], object]) -> None:
        """Lie rarely, so that the tier has jobs of all kinds when it is taken out of service."""
        tier = self.tiers[0]
        assert isinstance(tier, LyingTier)
        if choice % 4 == 0:
            tier.lies[method] = lie

    @rule(choice=choices, method=st.sampled_from(("success", "failure")))
    def the_tier_reports_what_is_not_its_own(self, choice: int, method: str) -> None:
        """Report a job of the other tier, or one job twice."""
        jobs = [*self.tiers[1].loads, *self.tiers[1].stores]
        if choice % 8 == 0 and jobs:
            job = jobs[choice % len(jobs)]
            self.tiers[0].results.append(JobResult(job.job_id, method == "success"))
        elif choice % 8 == 1:
            self.tiers[0].results *= 2

    @rule()
    def everything_else_is_asked(self) -> None:
        self.manager.take_events()
        self.manager.get_stats()
        self.manager.has_pending_work()

    def check_breaches(self, misreported: int, out_of_service: int) -> None:
        assert out_of_service <= 1, "only one of the tiers lies"
        self.manager.shutdown()


TestLyingTiers = LyingMachine.TestCase
TestLyingTiers.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
