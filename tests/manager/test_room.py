"""Promotions wait for rows, bounded in time and number, and no two requests wait for each other."""

from __future__ import annotations

import pytest

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.manager import room
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

DEADLINE = 5.0
X, Y = keys_of(*range(10, 20)), keys_of(*range(20, 30))
OTHERS = keys_of(*range(100, 120))


def make_rig(rows: int, share: float = 1.0, deadline: float | None = DEADLINE) -> tuple[ManagerRig, FakeTier]:
    tier = FakeTier(held={*X, *Y}, load_deadline=deadline)
    return ManagerRig(rows, [tier], promotion_share=share, reservation_deadline=1000.0), tier


def occupy(rig: ManagerRig, blocks: int) -> list[OffloadKey]:
    """Begin a store of ``blocks`` blocks, whose rows are in use until the store ends."""
    output = rig.manager.prepare_store(OTHERS[:blocks], rig.ctx)
    assert output is not None
    return list(output.keys_to_store)


def arrive(rig: ManagerRig, tier: FakeTier) -> None:
    """Submit what is queued, and end all loads."""
    rig.step()
    tier.finish_all()
    rig.step()


def load(rig: ManagerRig, keys: list[OffloadKey], ctx: ReqContext) -> None:
    rig.manager.prepare_load(keys, ctx)
    rig.manager.complete_load(keys, ctx)


def test_a_promotion_waits_until_a_row_is_free() -> None:
    rig, tier = make_rig(4)
    stored = occupy(rig, 4)
    for _ in range(3):
        assert rig.manager.match_prefix(X[:2], rig.ctx) == PrefixMatch(0, True)
        rig.step()
    assert (rig.stat("promotions_waited"), rig.stat("promotions_without_room")) == (1, 0)
    assert not tier.loads
    rig.manager.complete_store(stored, rig.ctx, success=False)
    assert rig.manager.match_prefix(X[:2], rig.ctx) == PrefixMatch(2, True)
    arrive(rig, tier)
    assert rig.manager.match_prefix(X[:2], rig.ctx) == PrefixMatch(2, False)
    rig.clock.advance(DEADLINE)
    rig.step()
    assert rig.stat("promotions_without_room") == 0, "the wait is over"


def test_at_the_deadline_the_request_goes_on_with_the_leading_blocks_that_arrived() -> None:
    rig, tier = make_rig(4)
    occupy(rig, 2)
    assert rig.manager.match_prefix(X[:4], rig.ctx) == PrefixMatch(2, True)
    arrive(rig, tier)
    assert rig.manager.match_prefix(X[:4], rig.ctx) == PrefixMatch(2, True)
    rig.clock.advance(DEADLINE - 0.1)
    rig.step()
    assert rig.manager.match_prefix(X[:4], rig.ctx) == PrefixMatch(2, True)
    rig.clock.advance(0.1)
    rig.step()
    assert rig.manager.match_prefix(X[:4], rig.ctx) == PrefixMatch(2, False)
    assert rig.manager.lookup(X[2], rig.ctx) is False, "the miss is final for this request"
    assert rig.stat("promotions_without_room") == 1


def test_a_tier_without_a_deadline_bounds_the_wait_too() -> None:
    rig, _ = make_rig(2, deadline=None)
    occupy(rig, 2)
    assert rig.manager.lookup(X[0], rig.ctx) is None
    rig.clock.advance(room.LONGEST_WAIT - 1.0)
    rig.step()
    assert rig.manager.lookup(X[0], rig.ctx) is None
    rig.clock.advance(1.0)
    rig.step()
    assert rig.manager.lookup(X[0], rig.ctx) is False


def test_a_prompt_longer_than_the_primary_tier_does_not_wait_for_its_own_rows() -> None:
    rig, tier = make_rig(4)
    assert rig.manager.match_prefix(X[:6], rig.ctx) == PrefixMatch(4, True)
    arrive(rig, tier)
    assert rig.manager.match_prefix(X[:6], rig.ctx) == PrefixMatch(4, False)
    assert (rig.stat("promotions_waited"), rig.stat("promotions_without_room")) == (0, 1)


def test_a_prompt_whose_head_fills_the_primary_tier_does_not_wait_for_its_own_rows() -> None:
    rig, _ = make_rig(4)
    rig.store(X[:4])
    assert rig.manager.match_prefix(X[:6], rig.ctx) == PrefixMatch(4, False)
    assert (rig.stat("promotions_waited"), rig.stat("promotions_without_room")) == (0, 1)


def test_a_prompt_longer_than_the_promotions_share_does_not_wait_for_its_own_rows() -> None:
    rig, _ = make_rig(8, share=0.5)
    assert rig.manager.match_prefix(X[:6], rig.ctx) == PrefixMatch(4, True)
    assert (rig.stat("promotions_waited"), rig.stat("promotions_without_room")) == (0, 1)


def test_a_prompt_longer_than_its_tiers_share_is_loaded_in_parts() -> None:
    tier = FakeTier(held={*X, *Y}, load_deadline=DEADLINE, primary_share=0.25)
    rig = ManagerRig(8, [tier], promotion_share=1.0)
    for blocks in (2, 4, 6):
        assert rig.manager.match_prefix(X[:6], rig.ctx) == PrefixMatch(blocks, True)
        arrive(rig, tier)
    assert rig.manager.match_prefix(X[:6], rig.ctx) == PrefixMatch(6, False)


def test_a_tier_whose_share_overdue_loads_hold_is_not_waited_for() -> None:
    tier = FakeTier(held={*X, *Y}, load_deadline=DEADLINE, primary_share=0.25)
    rig = ManagerRig(8, [tier], promotion_share=1.0)
    rig.manager.match_prefix(X[:2], rig.ctx)
    rig.step()
    rig.clock.advance(DEADLINE)
    rig.step()
    assert rig.manager.match_prefix(Y[:2], rig.request("r2")) == PrefixMatch(0, False)


def test_two_requests_that_wait_for_each_others_rows_go_on_without_a_deadline() -> None:
    rig, tier = make_rig(8)
    other = rig.request("r2")
    rig.manager.match_prefix(X[:3], rig.ctx)
    rig.manager.match_prefix(Y[:3], other)
    arrive(rig, tier)
    assert rig.manager.match_prefix(X[:6], rig.ctx) == PrefixMatch(5, True)
    assert rig.manager.match_prefix(Y[:6], other) == PrefixMatch(3, False), "the second does not wait"
    load(rig, Y[:3], other)
    assert rig.manager.match_prefix(X[:6], rig.ctx) == PrefixMatch(6, True)
    arrive(rig, tier)
    assert rig.manager.match_prefix(X[:6], rig.ctx) == PrefixMatch(6, False)


def test_requests_that_share_their_rows_wait_for_a_third_one() -> None:
    """Rows that two waiting requests share count once."""
    rig, tier = make_rig(8)
    second, third = rig.request("r2"), rig.request("r3")
    for ctx in (rig.ctx, second):
        rig.manager.match_prefix(X[:4], ctx)
    rig.manager.match_prefix(Y[:4], third)
    arrive(rig, tier)
    assert rig.manager.match_prefix(X[:6], rig.ctx) == PrefixMatch(4, True)
    assert rig.manager.match_prefix(X[:6], second) == PrefixMatch(4, True)
    load(rig, Y[:4], third)
    assert rig.manager.match_prefix(X[:6], second) == PrefixMatch(6, True), "enough for the whole prompt"


def test_only_the_first_request_in_the_queue_takes_rows_that_do_not_suffice() -> None:
    rig, _ = make_rig(6)
    second = rig.request("r2")
    stored = occupy(rig, 5)
    assert rig.manager.match_prefix(X[:4], rig.ctx) == PrefixMatch(1, True)
    rig.manager.complete_store(stored, rig.ctx, success=False)
    stored = occupy(rig, 4)
    assert rig.manager.match_prefix(Y[:3], second) == PrefixMatch(0, True)
    assert set(rig.primary.pending).isdisjoint(Y)
    assert rig.manager.match_prefix(Y[:1], rig.request("r3")) == PrefixMatch(1, True), "one row suffices"
    rig.manager.on_request_finished(rig.ctx)
    rig.manager.complete_store(stored, rig.ctx, success=False)
    rig.manager.prepare_store(OTHERS[:3], second)
    assert rig.manager.match_prefix(Y[:4], second) == PrefixMatch(3, True), "it is the first now"


def test_the_number_of_requests_that_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_WAITING", 1)
    rig, _ = make_rig(2)
    occupy(rig, 2)
    assert rig.manager.lookup(X[0], rig.ctx) is None
    assert rig.manager.lookup(Y[0], rig.request("r2")) is False
    assert rig.manager.lookup(X[0], rig.ctx) is None
    assert rig.stat("promotions_without_room") == 1


def test_a_wait_ends_when_the_blocks_came_by_another_way() -> None:
    rig, tier = make_rig(4)
    occupy(rig, 4)
    assert rig.manager.lookup(X[0], rig.ctx) is None
    rig.manager.complete_store(OTHERS[:4], rig.ctx)
    tier.finish_all()
    rig.store(X[:1], rig.request("r2"))
    assert rig.manager.lookup(X[0], rig.ctx) is True
    rig.clock.advance(DEADLINE)
    rig.step()
    assert rig.stat("promotions_without_room") == 0


def test_a_wait_ends_when_the_tier_lost_the_blocks() -> None:
    rig, tier = make_rig(4)
    occupy(rig, 4)
    assert rig.manager.lookup(X[0], rig.ctx) is None
    tier.held.clear()
    assert rig.manager.lookup(X[0], rig.ctx) is False
    rig.clock.advance(DEADLINE)
    rig.step()
    assert rig.stat("promotions_without_room") == 0


def test_a_request_that_searches_several_groups_waits_no_longer() -> None:
    rig, tier = make_rig(4)
    group = keys_of(1, group=1)
    tier.held.update(group)
    rig.store(group)
    rig.manager.prepare_load(group, rig.ctx)
    occupy(rig, 3)
    for _ in range(5):
        assert rig.manager.match_prefix(X[:2], rig.ctx).pending
        assert rig.manager.match_prefix(group, rig.ctx) == PrefixMatch(1, False)
        rig.clock.advance(DEADLINE / 5)
        rig.step()
    assert not rig.manager.match_prefix(X[:2], rig.ctx).pending


def test_a_reset_ends_all_waits() -> None:
    rig, tier = make_rig(4)
    stored = occupy(rig, 4)
    assert rig.manager.lookup(X[0], rig.ctx) is None
    rig.manager.reset_cache()
    tier.held.update(X)
    rig.manager.complete_store(stored, rig.ctx)
    rig.clock.advance(DEADLINE)
    rig.step()
    assert rig.stat("promotions_without_room") == 0
    assert rig.manager.match_prefix(X[:2], rig.ctx) == PrefixMatch(2, True)


@pytest.mark.parametrize("blocks", [3, 4])
def test_a_tier_is_not_asked_about_fewer_blocks_than_are_worth_a_load(blocks: int) -> None:
    least = 4
    near, far = FakeTier("near"), FakeTier("far", unknown=set(X), min_prefix_blocks=least)
    rig = ManagerRig(8, [near, far])
    match = rig.manager.match_prefix(X[:blocks], rig.ctx)
    assert near.asked == [X[0]]
    assert far.asked == ([] if blocks < least else [X[0]])
    assert match == PrefixMatch(0, blocks >= least), "the far tier does not hold up a short prompt"


def test_what_is_left_of_a_prompt_decides_if_a_tier_is_asked() -> None:
    far = FakeTier("far", held=set(X), min_prefix_blocks=4)
    rig = ManagerRig(8, [far])
    rig.store(X[:4])
    assert rig.manager.match_prefix(X[:7], rig.ctx) == PrefixMatch(4, False)
    assert far.asked == []


def test_a_request_behind_the_first_is_answered_without_a_search_while_too_few_rows_are_left() -> None:
    rig, tier = make_rig(8, share=0.5)
    second, third = rig.request("r2"), rig.request("r3")
    assert rig.manager.match_prefix(X[:4], third) == PrefixMatch(4, True)
    rig.step()
    assert rig.manager.match_prefix(Y[:2], rig.ctx) == PrefixMatch(0, True)
    assert rig.manager.match_prefix(Y[4:7], second) == PrefixMatch(0, True)
    tier.asked.clear()
    for _ in range(3):
        assert rig.manager.match_prefix(Y[4:7], second) == PrefixMatch(0, True)
        rig.step()
    assert not tier.asked
    assert rig.manager.match_prefix(Y[4:6], second) == PrefixMatch(0, True)
    assert rig.manager.match_prefix(Y[8:9], second) == PrefixMatch(0, True)
    assert tier.asked == [Y[8]], "another prompt is searched for"
    assert rig.manager.match_prefix(Y[4:7], second) == PrefixMatch(0, True)
    arrive(rig, tier)
    load(rig, X[:4], third)
    assert rig.manager.match_prefix(Y[4:7], second) == PrefixMatch(3, True), "enough rows for the whole prompt"


def test_a_request_behind_the_first_does_not_wait_for_a_tier_that_is_out_of_service() -> None:
    near, far = FakeTier("near", held=set(X), load_deadline=DEADLINE), FakeTier("far", held=set(Y))
    rig = ManagerRig(8, [near, far], promotion_share=0.5)
    second, third = rig.request("r2"), rig.request("r3")
    rig.manager.match_prefix(X[:4], third)
    rig.step()
    for keys, ctx in ((Y[:2], rig.ctx), (Y[4:7], second)):
        assert rig.manager.match_prefix(keys, ctx).pending
    far.raises.add("get_finished")
    rig.step()
    assert rig.manager.match_prefix(Y[4:7], second) == PrefixMatch(0, False)


def test_a_request_behind_the_first_finds_a_block_that_came_by_another_way() -> None:
    rig, _ = make_rig(8, share=0.5)
    second, third = rig.request("r2"), rig.request("r3")
    rig.manager.match_prefix(X[:4], third)
    rig.step()
    for keys, ctx in ((Y[:2], rig.ctx), (Y[4:5], second)):
        assert rig.manager.match_prefix(keys, ctx).pending
    rig.store(Y[4:5], rig.request("r4"))
    assert rig.manager.match_prefix(Y[4:5], second) == PrefixMatch(1, False)
