"""The cost of a prefix search, and the state after it, for prefixes with any holes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.manager.prefix_search import MAX_RUNS
from tiering.secondary.contract import PrefixAnswer
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(10))


class CountingTier(FakeTier):
    """A tier that counts the keys of its answers."""

    answered = 0

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        held = sum(1 for _ in takewhile(self.held.__contains__, keys))
        self.answered += held
        undecided = held < len(keys) and keys[held] in self.unknown
        return PrefixAnswer(held, undecided)


def holed(rig: ManagerRig, keys: list[OffloadKey]) -> None:
    """Return a manager whose primary tier holds every second block, but not the first."""
    rig.store(keys[1::2])


def test_a_tier_is_asked_once_about_a_prefix_with_many_holes() -> None:
    keys = keys_of(*range(100))
    tier = CountingTier(held=set(keys))
    rig = ManagerRig(200, [tier], promotion_share=1.0)
    holed(rig, keys)
    assert rig.manager.match_prefix(keys, rig.ctx) == (100, True)
    assert tier.answered == 100
    rig.step()
    assert [list(job.keys) for job in tier.loads] == [keys[0::2]]


def test_more_holes_than_one_search_fills_are_left_to_the_next_step() -> None:
    keys = keys_of(*range(4 * MAX_RUNS))
    tier = CountingTier(held=set(keys))
    rig = ManagerRig(2 * len(keys), [tier], promotion_share=1.0)
    holed(rig, keys)
    assert rig.manager.match_prefix(keys, rig.ctx) == (2 * MAX_RUNS, True)
    rig.step()
    tier.finish_all()
    rig.step()
    assert rig.manager.match_prefix(keys, rig.ctx) == (4 * MAX_RUNS, True)
    rig.step()
    tier.finish_all()
    rig.step()
    assert rig.manager.match_prefix(keys, rig.ctx) == (4 * MAX_RUNS, False)


def test_a_search_leaves_no_pin_behind() -> None:
    keys = keys_of(*range(20))
    tier = CountingTier(held=set(keys))
    rig = ManagerRig(40, [tier], promotion_share=1.0)
    holed(rig, keys)
    rig.manager.match_prefix(keys, rig.ctx)
    assert rig.stat("rows_evictable") == 10


def test_the_readable_part_of_a_prefix_is_not_evicted_for_its_holes() -> None:
    keys = keys_of(*range(6))
    tier = CountingTier(held=set(keys))
    rig = ManagerRig(4, [tier], promotion_share=1.0)
    rig.store([keys[0], keys[2], keys[3]])
    assert rig.manager.match_prefix(keys, rig.ctx).hits == 4
    rig.step()
    assert [list(job.keys) for job in tier.loads] == [[keys[1]]]


def test_a_run_that_may_still_grow_to_the_least_worth_loading_is_waited_for() -> None:
    keys = keys_of(*range(4))
    tier = CountingTier(held={keys[0]}, unknown={keys[1]}, min_prefix_blocks=2)
    rig = ManagerRig(8, [tier])
    assert rig.manager.match_prefix(keys, rig.ctx) == (0, True)
    tier.unknown.clear()
    assert rig.manager.match_prefix(keys, rig.ctx) == (0, False)


def test_an_heir_of_a_promotion_holds_one_reservation() -> None:
    keys = keys_of(*range(2))
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(4, [tier], promotion_share=1.0)
    heir, third = rig.request("heir"), rig.request("third")
    for ctx in (rig.ctx, heir, third):
        rig.manager.match_prefix(keys, ctx)
    rig.manager.on_request_finished(rig.ctx)
    rig.step()
    assert [job.req_context.req_id for job in tier.loads] == ["heir"]
    tier.finish_all()
    rig.step()
    assert rig.stat("rows_evictable") == 0
    rig.manager.on_request_finished(third)
    rig.manager.on_request_finished(heir)
    assert rig.stat("rows_evictable") == 2
    assert rig.stat("rows_reserved") == 0


class CountedKeys(list[OffloadKey]):
    """Keys that count how often they are gone through."""

    walks = 0

    def __iter__(self) -> Iterator[OffloadKey]:
        self.walks += 1
        return super().__iter__()


def test_a_request_that_waits_for_loads_alone_is_answered_without_a_search() -> None:
    tier = FakeTier(held=set(K[:6]))
    rig = ManagerRig(8, [tier], promotion_share=1.0)
    rig.store(K[:2])
    keys, other = CountedKeys(K[:6]), rig.request("r2")
    for ctx in (rig.ctx, other):
        assert rig.manager.match_prefix(keys, ctx) == PrefixMatch(6, True)
    rig.step()
    keys.walks = 0
    for ctx in (rig.ctx, other):
        assert rig.manager.match_prefix(keys, ctx) == PrefixMatch(6, True)
    assert keys.walks == 0
    assert rig.manager.match_prefix(keys, rig.ctx, at_least=7) == PrefixMatch(6, False)
    assert rig.manager.match_prefix(keys, other) == PrefixMatch(6, True)
    assert rig.manager.match_prefix(K[:4], other) == PrefixMatch(4, True), "another prompt"
    tier.finish_all()
    rig.step()
    assert rig.manager.match_prefix(keys, other) == PrefixMatch(6, False)


def test_a_request_whose_load_failed_in_part_goes_on_at_once() -> None:
    tier = FakeTier(held=set(K[:6]), max_load_blocks=3)
    rig = ManagerRig(8, [tier], promotion_share=1.0)
    other = rig.request("r2")
    for ctx in (rig.ctx, other):
        assert rig.manager.match_prefix(K[:6], ctx) == PrefixMatch(6, True)
    rig.step()
    for ctx in (rig.ctx, other):
        assert rig.manager.match_prefix(K[:6], ctx) == PrefixMatch(6, True)
    tier.finish(tier.loads[0], keys=K[:1])
    rig.step()
    for ctx in (rig.ctx, other):
        assert rig.manager.match_prefix(K[:6], ctx) == PrefixMatch(1, False)


def test_a_request_whose_load_is_overdue_goes_on_at_once() -> None:
    near, far = FakeTier("near", held=set(K[:3]), load_deadline=1.0), FakeTier("far", held=set(K[:6]))
    rig = ManagerRig(8, [near, far], promotion_share=1.0)
    other = rig.request("r2")
    for ctx in (rig.ctx, other):
        assert rig.manager.match_prefix(K[:6], ctx) == PrefixMatch(6, True)
    rig.step()
    rig.clock.advance(1.0)
    rig.step()
    for ctx in (rig.ctx, other):
        assert rig.manager.match_prefix(K[:6], ctx) == PrefixMatch(0, False)
