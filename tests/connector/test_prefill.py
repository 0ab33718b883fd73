"""The speed of the engine's prefill, from the tokens and durations of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from tests.connector.fakes import FakeManager, FakeSchedulerOutput, make_spec
from tiering.connector.groups import build_groups
from tiering.connector.prefill import PrefillSpeed
from tiering.testing.clock import FakeClock

TOKEN, STEP = 0.001, 0.02


class Noting(FakeManager):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Sequence[float]] = []

    def note_compute(self, seconds: Sequence[float]) -> None:
        self.noted.append(seconds)


class Rig:
    def __init__(self, *windows: int | None) -> None:
        self.clock, self.manager = FakeClock(), Noting()
        self.speed = PrefillSpeed(build_groups(make_spec(*windows)), self.manager, self.clock)

    def built(self, scheduled: Mapping[str, int]) -> None:
        output = FakeSchedulerOutput()
        output.num_scheduled_tokens.update(scheduled)
        self.speed.built(output)

    def step(self, scheduled: Mapping[str, int], seconds: float) -> None:
        self.built(scheduled)
        self.clock.advance(seconds)
        self.speed.ended()
        self.clock.advance(100.0)  # idle: other requests take no share of the steps

    @property
    def per_token(self) -> float:
        """Seconds of a token, from those of a block of four."""
        return self.manager.noted[-1][0] / 4


@pytest.fixture
def rig() -> Rig:
    return Rig(None)


def test_nothing_is_known_before_the_first_prompt(rig: Rig) -> None:
    assert rig.manager.noted == [[0.0]]
    rig.step({"a": 1, "b": 1}, 0.02)
    assert len(rig.manager.noted) == 1


def test_prompts_of_several_requests_count_together_and_without_the_fixed_part(rig: Rig) -> None:
    for chunks in ({"a": 100}, {"a": 300, "b": 200, "c": 1}, {"a": 1000}):
        rig.step(chunks, STEP + TOKEN * (sum(chunks.values()) - len(chunks)))
    assert rig.per_token == pytest.approx(TOKEN, rel=0.05)


def test_steps_that_decode_show_the_fixed_part_when_all_prompts_are_short(rig: Rig) -> None:
    for _ in range(50):
        rig.step({"a": 1}, STEP)
    rig.step({"a": 41}, STEP + 40 * TOKEN)
    assert rig.per_token == pytest.approx(TOKEN, rel=0.02)


def test_a_step_that_is_built_while_another_runs_begins_when_that_one_ends(rig: Rig) -> None:
    rig.built({"a": 101})
    rig.built({"b": 101})
    for _ in range(6):
        rig.clock.advance(0.1)
        rig.speed.ended()
        rig.built({"b": 101})
    rig.clock.advance(1000.0)
    rig.speed._steps.clear()
    rig.step({"a": 101}, 0.1)
    assert rig.per_token == pytest.approx(0.001, rel=0.1)


def test_other_requests_make_a_prompt_slower(rig: Rig) -> None:
    for _ in range(400):
        rig.built({"a": 101})
        rig.clock.advance(0.1)
        rig.speed.ended()
        rig.clock.advance(0.1)
    assert rig.per_token == pytest.approx(2 * TOKEN, rel=0.1)


def test_steps_without_tokens_and_reports_without_steps_change_nothing(rig: Rig) -> None:
    rig.built({})
    rig.speed.ended()
    rig.speed.ended()
    assert rig.manager.noted == [[0.0]]


def test_an_engine_that_reports_no_steps_keeps_few_of_them(rig: Rig) -> None:
    for _ in range(1000):
        rig.built({"a": 50})
    assert len(rig.speed._steps) < 100


def test_windows_have_no_time_of_their_own() -> None:
    rig = Rig(None, 8)
    rig.step({"a": 101}, 0.1)
    assert rig.manager.noted[-1][1] == math.inf
