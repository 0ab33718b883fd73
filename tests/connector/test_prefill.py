"""The speed of the engine's prefill, from the tokens and durations of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from tests.connector.fakes import FakeManager, FakeRequest, FakeSchedulerOutput, make_spec
from tiering.api.request import ReqContext
from tiering.api.request_policy import DEFAULT_REQUEST_POLICY, RequestPolicy
from tiering.connector.groups import build_groups
from tiering.connector.prefill import ASSUMED_SPEED, PrefillSpeed
from tiering.testing.clock import FakeClock

TOKEN, STEP = 0.001, 0.02


class Noting(FakeManager):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Sequence[float]] = []
        self.others: list[float] = []
        self.assumed: list[bool] = []
        self.measured: list[str] = []
        self.first_tokens: list[tuple[str, float]] = []

    def measure_worth(self, req_context: ReqContext) -> None:
        self.measured.append(req_context.req_id)

    def note_first_token(self, req_context: ReqContext, prefill_seconds: float) -> None:
        self.first_tokens.append((req_context.req_id, prefill_seconds))

    def note_compute(self, seconds: Sequence[float], *, others: float = 0.0, is_assumed: bool = False) -> None:
        self.noted.append(seconds)
        self.others.append(others)
        self.assumed.append(is_assumed)


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

    def follow(self, name: str, policy: RequestPolicy = DEFAULT_REQUEST_POLICY, **fields: object) -> FakeRequest:
        request = FakeRequest(name, list(range(200)))
        for field, value in fields.items():
            setattr(request, field, value)
        self.speed.follow(request, ReqContext(name, request.kv_transfer_params), policy)
        return request

    @property
    def per_token(self) -> float:
        """Seconds of a token, from those of a block of four."""
        return self.manager.noted[-1][0] / 4


@pytest.fixture
def rig() -> Rig:
    return Rig(None)


def test_a_speed_is_assumed_before_the_first_prompt(rig: Rig) -> None:
    assert rig.manager.noted == [[4 / ASSUMED_SPEED]]
    rig.step({"a": 1, "b": 1}, 0.02)
    assert rig.manager.assumed == [True]
    rig.step({"a": 100}, 0.2)
    assert rig.manager.assumed == [True, False]


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


@pytest.mark.parametrize("offset", [0.0, -3600.0, 1.7e9])
@pytest.mark.parametrize(("waited", "times"), [(0.2, 2.0), (0.06, 1.3), (0.0, 1.0)])
def test_requests_that_wait_for_others_make_a_prompt_slower(
    rig: Rig, offset: float, waited: float, times: float
) -> None:
    """The engine computes half of the time, and every second request waits; their clock is another one."""
    for number in range(2000):
        rig.speed.arrived(rig.clock() + offset - waited * (number % 2))
        rig.built({"a": 101})
        rig.clock.advance(0.1)
        rig.speed.ended()
        rig.clock.advance(0.1)
    assert rig.per_token == pytest.approx(times * TOKEN, rel=0.1)


def test_a_clock_that_was_set_counts_for_some_minutes(rig: Rig) -> None:
    for number in range(6_000):
        rig.speed.arrived(rig.clock() - 100.0 * (number > 2000))
        rig.built({"a": 101})
        rig.clock.advance(0.1)
        rig.speed.ended()
        rig.clock.advance(0.1)
        if number == 2500:
            assert rig.per_token == pytest.approx(2 * TOKEN, rel=0.1)
    assert rig.per_token == pytest.approx(TOKEN, rel=0.1)


def test_prompts_of_one_step_make_each_other_slower(rig: Rig) -> None:
    for _ in range(2000):
        rig.built({"a": 51, "b": 51, "decoding": 1})
        rig.clock.advance(0.1)
        rig.speed.ended()
        rig.clock.advance(0.1)
    assert rig.per_token == pytest.approx(2 * TOKEN, rel=0.1)


def test_a_wait_for_what_is_no_prefill_does_not_make_a_prompt_slower(rig: Rig) -> None:
    rig.speed.arrived(rig.clock())
    for _ in range(50):
        rig.speed.arrived(rig.clock() - 1000.0)
        rig.step({"a": 101}, 0.1)
    assert rig.per_token == pytest.approx(TOKEN, rel=0.01)


@pytest.mark.parametrize("arrival_time", [None, math.nan, math.inf, -math.inf])
def test_a_time_of_arrival_that_is_none_leaves_the_estimate_alone(rig: Rig, arrival_time: float | None) -> None:
    rig.follow("a", arrival_time=arrival_time)
    rig.follow("b", arrival_time=arrival_time)
    for _ in range(20):
        rig.speed.arrived(rig.clock())
        rig.step({"a": 201}, 200 * TOKEN)
    assert rig.per_token == pytest.approx(TOKEN)


def test_the_wait_is_that_since_the_arrival_at_the_engine() -> None:
    rig, request = Rig(None), FakeRequest("a", list(range(200)))
    rig.clock.advance(0.1)
    for arrival_time in (1000.0, 999.9):
        request.arrival_time = arrival_time  # type: ignore[attr-defined]
        rig.speed.follow(request, ReqContext("a"), RequestPolicy(load=False))
    rig.built({"a": 101})
    rig.clock.advance(0.1)
    rig.speed.ended()
    assert rig.per_token == pytest.approx(2 * TOKEN, rel=0.02)


def test_an_engine_that_was_busy_from_its_start_takes_its_prompts_for_no_faster(rig: Rig) -> None:
    rig.built({"a": 101})
    rig.clock.advance(0.1)
    rig.speed.ended()
    rig.speed.arrived(rig.clock())
    for _ in range(2):
        rig.speed.arrived(rig.clock() - 0.2)
    rig.built({"b": 101})
    rig.clock.advance(0.1)
    rig.speed.ended()
    assert rig.per_token == pytest.approx(2 * TOKEN, rel=0.02)  # half of the time is the most that others take


def test_steps_without_tokens_and_reports_without_steps_change_nothing(rig: Rig) -> None:
    rig.built({})
    rig.speed.ended()
    rig.speed.ended()
    assert rig.manager.assumed == [True]


def test_an_engine_that_reports_no_steps_keeps_few_of_them(rig: Rig) -> None:
    for _ in range(1000):
        rig.built({"a": 50})
    assert len(rig.speed._steps) < 100


def test_windows_have_no_time_of_their_own() -> None:
    rig = Rig(None, 8)
    rig.step({"a": 101}, 0.1)
    assert rig.manager.noted[-1][1] == math.inf


def test_the_first_token_is_there_when_the_step_with_the_prompts_end_has_ended(rig: Rig) -> None:
    request = rig.follow("a")
    request.num_computed_tokens = 50  # found in a cache
    rig.step({"a": 100, "b": 1}, STEP + 100 * TOKEN)
    assert rig.manager.first_tokens == []
    request.num_computed_tokens = 150
    rig.built({"a": 50, "b": 1})
    assert rig.manager.first_tokens == []
    rig.clock.advance(STEP + 50 * TOKEN)
    rig.speed.ended()
    ((name, seconds),) = rig.manager.first_tokens
    assert name == "a"
    assert seconds == pytest.approx(150 * rig.per_token, rel=0.1)
    request.num_computed_tokens = 200
    rig.step({"a": 1}, STEP)
    assert len(rig.manager.first_tokens) == 1


def test_a_request_that_has_ended_gets_no_first_token(rig: Rig) -> None:
    rig.follow("a")
    rig.speed.finished("a")
    rig.speed.finished("never seen")
    rig.step({"a": 200}, 0.2)
    assert rig.manager.first_tokens == []


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": RequestPolicy(max_load_tokens=100)},
        {"kv_transfer_params": {"kv_tiering": {"session_id": "s"}}},
        {"kv_hints": object()},
        {"session_id": "s"},
    ],
)
def test_requests_with_hints_or_limits_take_no_part(rig: Rig, fields: dict[str, object]) -> None:
    rig.follow("a", **fields)  # type: ignore[arg-type]
    rig.follow("b", kv_transfer_params={"another connector": 1})
    assert rig.manager.measured == ["b"]
    assert list(rig.speed._prompts) == ["b"]


def test_one_long_step_counts_for_little_and_two_count(rig: Rig) -> None:
    for _ in range(10):
        rig.step({"a": 200}, 200 * TOKEN)
    rig.step({"a": 200}, 100 * 200 * TOKEN)
    assert rig.per_token == pytest.approx(TOKEN, rel=0.5)
    rig.step({"a": 200}, 200 * TOKEN)
    assert rig.per_token == pytest.approx(TOKEN, rel=0.5)
    for _ in range(4):
        rig.step({"a": 200}, 100 * 200 * TOKEN)
    assert rig.per_token > 50 * TOKEN


def test_the_first_step_without_a_prompt_shows_what_all_steps_take(rig: Rig) -> None:
    rig.step({"a": 1}, STEP)
    rig.step({"a": 200}, STEP + 199 * TOKEN)
    assert rig.per_token == pytest.approx(TOKEN)
