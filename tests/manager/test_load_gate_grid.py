"""With ``load_or_compute: auto``, no cell of the model is worse than never or always loading."""

from __future__ import annotations

import pytest

from benchmarks.gate_model import Cell, Comparison, GateModel, burst, burst_grid, cold, cold_grid, compare, grid
from tiering.connector import prefill

CELLS = [cell for cell in grid(80, (2_000.0, 50_000.0), (512, 4_096)) if cell.speeds[0] != 0.3][::2]
"""Half of the cells that the benchmark has for these speeds and lengths."""


def mean_regret(compared: list[Comparison]) -> float:
    return sum(one.regret for one in compared) / len(compared)


COLD = [cell for cell in cold_grid() if cell.tokens == 4_096][::2]
"""Every sixth cell that the benchmark has for a fresh engine."""


def test_the_first_prompts_of_a_fresh_engine_take_a_bounded_time() -> None:
    """A fast tier is used as with always, and a slow one costs what the assumption allows."""
    compared = [cold(cell) for cell in COLD]
    assert max(one.first for one in compared) < 6.5
    assert max(one.mean for one in compared) < 2.0
    fast = [one for one in compared if one.cell.speeds == (1.0,)]
    assert [one for one in fast if one.first > 1.01] == []


def test_the_first_prompts_of_an_engine_that_starts_again_take_no_longer_than_the_better_choice() -> None:
    compared = [cold(cell, again=True) for cell in COLD]
    assert [one for one in compared if not one.holds] == []
    assert sum(max(1.0, one.mean) for one in compared) / len(compared) < 1.01
    fresh = [cold(cell) for cell in COLD]
    assert sum(not one.holds for one in fresh) > len(fresh) / 4


def test_no_rule_that_does_not_know_the_engine_bounds_the_first_prompt_better_by_much() -> None:
    """A tier delivers a token in 200 us, and the engine computes one in 20 us or in 2 ms."""
    load, engines = 200.0, (20.0, 2_000.0)
    worst = [
        max((wait + (1.0 - wait / load) * compute) / min(load, compute) for compute in engines) for wait in range(201)
    ]
    assert min(worst) == pytest.approx(5.5)


@pytest.mark.parametrize(("assumed", "least"), [(1_000.0, 8.0), (100_000.0, 20.0)])
def test_another_assumption_costs_the_first_prompts_more(
    monkeypatch: pytest.MonkeyPatch, assumed: float, least: float
) -> None:
    monkeypatch.setattr(prefill, "ASSUMED_SPEED", assumed)
    assert max(cold(cell).first for cell in COLD) > least


def test_the_choice_is_never_worse_than_the_better_one_and_a_gate_that_always_loads_is() -> None:
    compared = [compare(cell) for cell in CELLS]
    assert [one for one in compared if not one.holds] == []
    assert mean_regret(compared) < 0.03
    always = [Comparison(one.cell, one.never, one.always, one.always) for one in compared]
    assert sum(not one.holds for one in always) > len(always) / 4
    assert mean_regret(always) > 1.0


BURSTS = [cell for cell in burst_grid() if cell.tokens == 4_096]
"""Every third cell of bursts that the model has."""


def test_a_burst_on_a_fresh_engine_is_never_slower_than_without_a_tier() -> None:
    assert [one for one in map(burst, BURSTS) if one.auto > 1.05 * one.never + 0.01] == []


def test_a_burst_takes_no_longer_than_the_better_choice_once_the_speeds_are_known() -> None:
    compared = [burst(cell, again=True) for cell in BURSTS]
    assert [one for one in compared if not one.holds] == []
    assert mean_regret(compared) < 0.01


@pytest.mark.parametrize(
    ("prefill", "speed", "prompts", "seed"),
    [(500.0, 0.01, 8, 305), (10_000.0, 0.1, 16, 300), (2_000.0, 0.1, 16, 304), (50_000.0, 0.3, 16, 302)],
)
def test_a_burst_of_short_and_long_prompts_is_divided(prefill: float, speed: float, prompts: int, seed: int) -> None:
    """Alone, each prompt would compute; what that costs the others decides."""
    assert burst(Cell(prefill, (speed,), 512, 0.1, prompts), seed, again=True).holds


def test_a_busy_tier_is_used_as_long_as_it_is_faster() -> None:
    """Requests that come during a load compute where that is faster, so that the load costs them little."""
    assert compare(Cell(50_000.0, (0.3,), 16_384, 0.5, 50), seed=2).holds


@pytest.mark.parametrize("prefill", [2_000.0, 10_000.0])
def test_the_model_leaves_and_returns_within_a_minute(prefill: float) -> None:
    """The tier is at full speed, at 1/100, and at full speed again."""
    model = GateModel(Cell(prefill, (1.0, 0.01, 1.0), 512, 0.1 if prefill < 5_000 else 0.05, 600), "auto", 1)
    ended = model.run()
    turned, recovered = model.change_times
    bad = [(arrival, loaded) for arrival, _, loaded in ended if turned + 60 < arrival < recovered]
    good = [(arrival, loaded) for arrival, _, loaded in ended if arrival > recovered + 60]
    assert len(bad) > 20
    assert len(good) > 20
    if prefill > 5_000:  # the other engine computes no faster than the tier delivers at 1/100
        assert [one for one in bad if one[1]] == []
    assert [one for one in good if not one[1]] == []
