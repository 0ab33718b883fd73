"""The measured worth of a tier: the choice of controls, the estimate, and the reaction to its sign."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from benchmarks.worth_model import measured
from tests.manager.test_load_gate import BLOCK_SECONDS, Rig
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.manager import worth as worth_module
from tiering.manager.load_gate import CORRECTED_SECONDS, LoadGate
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.worth import CLOSED_SECONDS, FIRST, LEAST, MOST_COST, MOST_OFTEN, SHARE, TRIED, Worth
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.testing.fake_tier import FakeTier


def run(worth: Worth, requests: int, compute: float, load: float, start: int = 0) -> list[bool]:
    """Let requests of one length pass, whose times are as given; return which were controls."""
    controls = []
    for number in range(start, start + requests):
        trial = worth.begin(0, compute, 0.5 * load, compute, float(number))
        controls.append(trial is not None and trial.is_control)
        if trial is not None:
            worth.end(trial, compute if trial.is_control else 0.0, number + (compute if trial.is_control else load))
    return controls


def always_a_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every request become a control once one has loaded."""
    for name, value in (("SHARE", 2.0), ("MOST_OFTEN", 1.0), ("FIRST", 1), ("MOST_COST", 10.0)):
        monkeypatch.setattr(worth_module, name, value)


class Measuring(Rig):
    """A manager that measures the worth of its tiers, whose requests all take part."""

    def __init__(self, *more: FakeTier) -> None:
        super().__init__()
        primary = CPUPrimaryTierOffloadingManager(np.zeros((256, 1), np.uint8).data)
        self.manager = TieringOffloadingManager(primary, [self.tier, *more], clock=self.clock, controls=0)
        self.manager.note_compute([BLOCK_SECONDS])

    def begin(self, name: str) -> ReqContext:
        ctx = super().begin(name)
        self.manager.measure_worth(ctx)
        return ctx


def test_the_first_loads_and_dear_requests_are_never_controls() -> None:
    worth = Worth("tier", 0, 0.0)
    assert not any(run(worth, FIRST, 0.1, 0.01))
    assert not any(run(worth, 10_000, 1.01 * MOST_COST, 0.01))
    assert any(run(worth, 10_000, 0.1, 0.01))


def test_controls_cost_at_most_their_share_of_what_loads_save() -> None:
    worth, cost, saved = Worth("tier", 1, 0.0), 0.0, 0.0
    for number in range(50_000):
        compute = 0.01 * 1.5 ** (number % 9)
        trial = worth.begin(0, compute, 0.001, compute, float(number))
        if trial is not None and trial.is_control:
            cost += compute
        else:
            saved += compute
        assert cost <= SHARE * saved
    assert cost > 0.5 * SHARE * saved


def test_the_probability_falls_with_the_cost_and_is_bounded() -> None:
    worth = Worth("tier", 1, 0.0)
    run(worth, 5_000, 0.4, 0.01)
    weights = []
    for compute in (0.001, 0.1, 0.2):
        while (trial := worth.begin(0, compute, 0.001, compute, 0.0)) is None or not trial.is_control:
            pass
        weights.append(trial.weight)
    assert weights[0] == pytest.approx(1.0 / MOST_OFTEN)
    assert weights[1] < weights[2]


def test_the_choice_is_that_of_the_seed() -> None:
    first, second, third = (run(Worth("tier", seed, 0.0), 20_000, 0.1, 0.01) for seed in (3, 3, 4))
    assert first == second != third


def test_the_saving_is_known_from_two_hundred_controls_on() -> None:
    worth, number = Worth("tier", 2, 0.0), 0
    while worth.known < LEAST:
        assert worth.saving is None
        assert worth.fields() == {"worth_controls": worth.known}
        run(worth, 1, 0.1, 0.04, number)
        number += 1
    assert worth.saving is not None
    # One request a second, of which almost all count, saves 0.06 seconds of waiting.
    assert worth.saving.ttft == pytest.approx(60 * 0.06, rel=0.02)
    assert worth.saving.prefill == pytest.approx(60 * 0.1, rel=0.02)
    assert worth.saving.ttft_margin < 0.1
    assert str(worth.saving).startswith("saves 5.9")
    assert str(worth.saving).endswith(f"(N {LEAST})")


def test_the_model_is_corrected_by_what_loads_really_take() -> None:
    worth = Worth("tier", 2, 0.0)
    run(worth, 60_000, 0.1, 0.04)
    assert worth.factor == pytest.approx(2.0, rel=0.05)  # half of that was expected


def test_a_tier_that_makes_requests_slower_serves_few_until_it_has_recovered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worth = Worth("bucket", 2, 0.0)
    caplog.set_level(logging.INFO, "kv_tiering.manager")
    run(worth, 60_000, 0.1, 0.2)
    assert worth.closed
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "bucket" in caplog.text
    assert "promotions only" in caplog.text
    controls = run(worth, 2_000, 0.1, 0.2, 60_000)
    assert 1.0 - sum(controls) / len(controls) == pytest.approx(TRIED, rel=0.4)
    run(worth, 20_000, 0.1, 0.01, 62_000)
    assert not worth.closed
    assert "recovered" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 2


def test_a_tier_is_used_again_if_nothing_is_measured_for_long() -> None:
    worth = Worth("bucket", 2, 0.0)
    run(worth, 60_000, 0.1, 0.2)
    assert worth.is_closed(60_000.0 + 0.9 * CLOSED_SECONDS)
    assert worth.fields()["worth_ttft_seconds"] < 0.0
    assert not worth.is_closed(60_000.0 + 2.0 * CLOSED_SECONDS)
    assert worth.fields() == {"worth_controls": 0}, "what made it slower is not known to hold any more"
    assert sum(run(worth, 5_000, 0.1, 0.01, 70_000)) < 100


def test_a_correction_fades_so_that_loads_are_tried_again() -> None:
    gate = LoadGate()
    gate.begin(10, 0.0)
    gate.end(10, 10, 1.0)
    assert gate.decide(10, 2.5, 0.0, 0.0, 1.0)
    gate.correct(4.0, 1.0)
    assert not gate.decide(10, 2.5, 0.0, 0.0, 1.0)
    assert gate.decide(10, 2.5, 0.0, 0.0, 1.0 + 2.0 * CORRECTED_SECONDS)


def test_interval_and_sign_are_right_in_long_tailed_traffic() -> None:
    runs = [one for results in measured(6).values() for one in results]
    assert all(one.sign_is_right for one in runs)
    assert sum(one.covers for one in runs) >= 0.9 * len(runs)
    assert max(one.cost for one in runs) <= SHARE


def test_a_control_computes_and_another_tier_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    always_a_control(monkeypatch)
    slower = FakeTier(name="slower")
    rig = Measuring(slower)
    assert rig.measure(0.1) == PrefixMatch(10, False)
    keys, ctx = rig.keys("control"), rig.begin("control")
    assert rig.ask(ctx, keys) == PrefixMatch(0, False)
    assert rig.ask(ctx, keys) == PrefixMatch(0, False)
    assert rig.tier.loads == []
    assert len(slower.asked) >= 1
    outcome = rig.manager.lookup_outcome(keys[0], ctx)
    assert outcome is not None
    assert outcome.control == "fake"
    fields = rig.manager.get_stats()["tiers"]["fake"]
    assert (fields["controls"], fields["loads_gated"]) == (1, 0)


def test_there_are_no_controls_while_the_speed_of_the_engine_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    always_a_control(monkeypatch)
    rig = Measuring()
    rig.manager.note_compute([BLOCK_SECONDS], is_assumed=True)
    assert [rig.measure(0.1, name=name).hits for name in ("a", "b", "c")] == [10, 10, 10]
    rig.manager.note_compute([BLOCK_SECONDS])
    assert [rig.measure(0.1, name=name).hits for name in ("d", "e")] == [10, 0]


def test_a_control_does_not_wait_for_the_loads_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Measuring()
    rig.measure(0.1)
    keys = rig.keys("shared", 20)
    other = ReqContext("other")
    rig.manager.on_new_request(other)
    always_a_control(monkeypatch)
    rig.measure(0.1, name="again")
    control = rig.begin("control")
    assert rig.ask(control, rig.keys("own")) == PrefixMatch(0, False)
    assert rig.ask(other, keys).pending
    assert rig.ask(control, keys) == PrefixMatch(0, False)


def test_requests_that_do_not_take_part_are_never_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    always_a_control(monkeypatch)
    rig = Measuring()
    rig.measure(0.1)
    ctx = ReqContext("hinted")
    rig.manager.on_new_request(ctx)
    assert rig.ask(ctx, rig.keys("hinted")).pending


def test_the_first_token_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    always_a_control(monkeypatch)
    rig = Measuring()
    rig.measure(0.1)
    ctx = rig.begin("control")
    rig.ask(ctx, rig.keys("control"))
    rig.clock.advance(1.0)
    rig.manager.note_first_token(ctx, 1.0)
    assert rig.ask(ctx, rig.keys("control")).pending  # e.g. after a preemption
    rig.manager.note_first_token(ReqContext("unknown"), 1.0)


def test_without_a_seed_or_a_gate_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    always_a_control(monkeypatch)
    rig = Rig()
    for name in ("a", "b", "c"):
        ctx = rig.begin(name)
        rig.manager.measure_worth(ctx)
        assert rig.ask(ctx, rig.keys(name)).pending
    assert "worth_controls" not in rig.manager.get_stats()["tiers"]["fake"]
