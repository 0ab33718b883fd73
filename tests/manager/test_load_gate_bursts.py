"""The choice between loading and computing for prompts that come at once."""

from __future__ import annotations

import pytest

from tests.manager.test_load_gate import Rig
from tiering.api.manager import PrefixMatch
from tiering.manager.prefix_search import FIRST_WAIT


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_computing_costs_also_what_loads_that_end_meanwhile_wait_for_it(rig: Rig) -> None:
    rig.measure(0.8)
    assert rig.ask(rig.begin("a"), rig.keys("a")).pending
    assert rig.ask(rig.begin("b"), rig.keys("b")) == PrefixMatch(0, False)
    rig.measure(0.6, name="faster")
    rig = Rig()
    rig.measure(0.6)
    assert rig.ask(rig.begin("a"), rig.keys("a")).pending
    assert rig.ask(rig.begin("b"), rig.keys("b")).pending


def test_a_burst_waits_for_loads_that_pay_as_long_as_computing_all_of_it_would_take(rig: Rig) -> None:
    rig.measure(0.5)
    asked = [(rig.begin(name), rig.keys(name)) for name in ("a", "b", "c")]
    assert all(rig.manager.match_prefix(keys, ctx).pending for ctx, keys in asked)
    rig.manager.on_schedule_end()
    for count, (job, one) in enumerate(zip(list(rig.tier.loads), asked, strict=True)):
        rig.clock.advance(0.55)
        assert all(rig.ask(*other).pending for other in asked[count:])
        rig.finish(job)
        assert rig.ask(*one) == PrefixMatch(10, False)
    assert rig.stats == {"loads_gated": 0, "loads_cut": 0}


def test_the_second_prompt_of_a_step_loads_because_both_would_be_computed_together(rig: Rig) -> None:
    rig.measure(1.2)
    asked = [(rig.begin(name), rig.keys(name)) for name in ("a", "b")]
    assert [rig.manager.match_prefix(keys, ctx).pending for ctx, keys in asked] == [False, True]
    rig.manager.on_schedule_end()
    assert not rig.ask(rig.begin("next step"), rig.keys("next step")).pending


@pytest.mark.parametrize(("seconds", "is_awaited"), [(None, False), (0.05, True)])
def test_one_prompt_tries_an_unknown_tier_and_the_others_wait_for_a_fifth(
    seconds: float | None, is_awaited: bool
) -> None:
    """Ten blocks take 1 s to compute; meanwhile, one block comes, or none."""
    rig = Rig(max_load_blocks=1)
    asked = [(rig.begin(name), rig.keys(name)) for name in ("a", "b", "c")]
    assert all(rig.manager.match_prefix(keys, ctx).pending for ctx, keys in asked)
    rig.manager.on_schedule_end()
    if seconds is not None:
        rig.finish(rig.tier.loads[0], seconds)
    rig.clock.advance(0.201)
    assert [rig.ask(*one).pending for one in asked] == [True, is_awaited, is_awaited]


def test_a_burst_waits_for_a_dead_tier_no_longer_than_for_its_own_blocks(rig: Rig) -> None:
    asked = [(rig.begin(name), rig.keys(name)) for name in ("a", "b", "c")]
    assert all(rig.manager.match_prefix(keys, ctx).pending for ctx, keys in asked)
    rig.manager.on_schedule_end()
    rig.clock.advance(1.01)
    assert [rig.ask(*one) for one in asked] == 3 * [PrefixMatch(0, False)]


@pytest.mark.parametrize("seconds", [None, 0.002, 0.009])
def test_one_of_several_first_prompts_computes_soon_unless_the_tier_is_clearly_faster(seconds: float | None) -> None:
    """Ten blocks are assumed to take 0.2 s; while the second prompt waits, one block comes, or none."""
    rig = Rig(max_load_blocks=1)
    rig.manager.note_compute([0.02], is_assumed=True)
    asked = [(rig.begin(name), rig.keys(name)) for name in ("a", "b", "c")]
    assert all(rig.manager.match_prefix(keys, ctx).pending for ctx, keys in asked)
    rig.manager.on_schedule_end()
    if seconds is not None:
        rig.finish(rig.tier.loads[0], seconds)
    rig.clock.advance(FIRST_WAIT)
    assert [rig.ask(*one).pending for one in asked] == [True, seconds == 0.002, True]
