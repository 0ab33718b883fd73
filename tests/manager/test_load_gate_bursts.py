"""The choice between loading and computing for prompts that come at once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.manager.test_load_gate import BLOCK_SECONDS, Rig
from tiering.api.manager import PrefixMatch
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.prefix_search import FIRST_PART, FIRST_WAIT
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.testing.fake_tier import FakeTier


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


@pytest.mark.parametrize("seconds", [None, 0.002, 0.019, 0.025])
def test_one_of_several_first_prompts_computes_soon_unless_the_tier_is_faster(seconds: float | None) -> None:
    """Ten blocks are assumed to take 0.2 s; while one prompt waits, one block comes, or none."""
    rig = Rig(max_load_blocks=1)
    rig.manager.note_compute([0.02], is_assumed=True)
    asked = [(rig.begin(name), rig.keys(name)) for name in ("a", "b", "c")]
    assert all(rig.manager.match_prefix(keys, ctx).pending for ctx, keys in asked)
    rig.manager.on_schedule_end()
    if seconds is not None:
        rig.finish(rig.tier.loads[0], seconds)
    rig.clock.advance(FIRST_WAIT + 0.2 * FIRST_PART)
    assert [rig.ask(*one).pending for one in asked] == [seconds in {0.002, 0.019}, True, True]


def test_a_request_that_waits_for_rows_waits_on_for_as_long_as_computing_those_before_it_takes() -> None:
    rig = Rig(rows=16, max_load_blocks=4)
    assert rig.measure(0.4, 8).hits == 8  # as many as promotions may hold
    assert rig.ask(rig.begin("owner"), rig.keys("owner", 8)).pending
    ctx, keys = rig.begin("waits"), rig.keys("waits", 8)
    assert rig.ask(ctx, keys) == PrefixMatch(0, True)
    rig.clock.advance(0.3)
    rig.finish(rig.tier.loads[0])
    for _ in range(5):
        assert rig.ask(ctx, keys).pending
        rig.clock.advance(0.2)
    assert rig.ask(ctx, keys) == PrefixMatch(0, False)


def test_a_load_that_spares_others_a_computation_is_awaited_as_long_as_it_does() -> None:
    """Ten blocks take 1.2 s in one tier and 0.2 s in the other one, and 1 s to compute."""
    rig = Rig()
    slow, fast = (FakeTier(load_or_compute="auto", name=name, max_load_blocks=5) for name in ("slow", "fast"))
    primary = CPUPrimaryTierOffloadingManager(np.zeros((1024, 1), np.uint8).data)
    rig.manager = TieringOffloadingManager(primary, [slow, fast], clock=rig.clock)
    rig.manager.note_compute([1.0])
    for tier, seconds in ((slow, 1.2), (fast, 0.2)):
        rig.tier, ctx = tier, rig.begin(tier.name)
        assert rig.ask(ctx, rig.keys(tier.name)).pending
        rig.clock.advance(seconds)
        for job, part in zip(list(tier.loads), (0.5, 1.0), strict=True):
            rig.finish(job, part * seconds)
        assert rig.ask(ctx, rig.keys(tier.name)) == PrefixMatch(10, False)
        rig.manager.on_request_finished(ctx)
    rig.manager.note_compute([BLOCK_SECONDS])
    waiting = [rig.begin(f"fast {number}") for number in range(20)]
    for number, ctx in enumerate(waiting):
        assert rig.ask(ctx, rig.keys(f"fast {number}", 4)).pending
    rig.tier, ctx = slow, rig.begin("last")
    keys = rig.keys("last")
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(0.6)
    rig.finish(slow.loads[0])
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(0.45)
    assert rig.ask(ctx, keys).pending
    for other in waiting:
        rig.manager.on_request_finished(other)
    rig.clock.advance(8.0)
    assert rig.ask(ctx, keys) == PrefixMatch(5, False)


@pytest.mark.parametrize("is_same_step", [True, False])
def test_a_request_loads_longer_than_it_would_compute_if_another_one_begins_in_the_step(
    rig: Rig, is_same_step: bool
) -> None:
    rig.manager.note_compute([1.0])
    rig.measure(1.2)
    keys, other = rig.keys("other"), rig.begin("other")
    assert rig.ask(other, keys).pending
    rig.clock.advance(1.2)
    rig.finish(rig.tier.loads[0])
    assert rig.manager.match_prefix(keys, other) == PrefixMatch(10, False)
    rig.manager.note_scheduled(other)
    if not is_same_step:
        rig.manager.on_schedule_end()
    rig.manager.note_compute([BLOCK_SECONDS])
    assert rig.ask(rig.begin("beside"), rig.keys("beside")).pending is is_same_step


def test_a_request_that_was_cut_off_begins_in_the_step_and_one_that_no_tier_delayed_does_not(rig: Rig) -> None:
    rig.manager.note_compute([1.0])
    rig.measure(1.2)
    rig.manager.note_compute([BLOCK_SECONDS])
    rig.manager.note_scheduled(rig.begin("new"))
    assert not rig.ask(rig.begin("a"), rig.keys("a", 2)).pending
    for job in list(rig.tier.loads):  # it measures
        rig.finish(job, 0.12 * len(job.keys))
    rig.manager.on_schedule_end()
    cut = rig.begin("cut")
    rig.manager._known["cut"].is_cut = True
    rig.manager.note_scheduled(cut)
    assert rig.ask(rig.begin("b"), rig.keys("b")).pending


@pytest.mark.parametrize("blocks", [(20, 10, 30), (10, 20, 30), (30, 20, 10)])
def test_the_shortest_of_the_first_prompts_shows_the_speed_of_the_engine(blocks: tuple[int, ...]) -> None:
    rig = Rig()
    rig.manager.note_compute([BLOCK_SECONDS], is_assumed=True)
    first = {count: (rig.begin(f"{count}"), rig.keys(f"{count}", count)) for count in blocks}
    for ctx, keys in first.values():
        assert rig.ask(ctx, keys).pending
    begun = rig.clock()
    rig.clock.advance(FIRST_WAIT + 9.9 * BLOCK_SECONDS * FIRST_PART)
    assert all(rig.ask(*one).pending for one in first.values())
    rig.clock.advance(0.2 * BLOCK_SECONDS * FIRST_PART)
    assert {count: rig.ask(*one).pending for count, one in first.items()} == {10: False, 20: True, 30: True}
    later = rig.begin("later")
    assert rig.ask(later, rig.keys("later", 5)).pending
    for count in (20, 30):
        assert rig.manager.waits_until(first[count][0]) == pytest.approx(begun + count * BLOCK_SECONDS)
    assert rig.manager.waits_until(later) == pytest.approx(rig.clock() + 5 * BLOCK_SECONDS)


def test_a_first_prompt_that_comes_alone_waits_as_long_as_computing_takes() -> None:
    rig = Rig()
    rig.manager.note_compute([BLOCK_SECONDS], is_assumed=True)
    ctx, keys = rig.begin("a"), rig.keys("a")
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(0.9)
    assert rig.ask(ctx, keys).pending
