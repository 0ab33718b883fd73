"""The lookup that promotes nothing."""

from __future__ import annotations

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of


def test_blocks_of_all_tiers_and_of_the_rows_count_together_and_none_is_promoted() -> None:
    keys = keys_of(*range(8))
    first, second = FakeTier("first", held={keys[1], keys[4]}), FakeTier("second", held={keys[2], keys[3]})
    rig = ManagerRig(8, [first, second])
    rig.store(keys[:1])
    output = rig.manager.prepare_store(keys[5:6], rig.ctx)
    assert output is not None
    assert rig.manager.held(keys, rig.ctx) == PrefixMatch(6, False)
    assert rig.manager.held(keys[:4], rig.ctx) == PrefixMatch(4, False)
    rig.step()
    assert not first.loads
    assert not second.loads
    rig.manager.complete_store(keys[5:6], rig.ctx)


def test_an_undecided_tier_leaves_the_answer_open_unless_another_one_holds_the_block() -> None:
    keys = keys_of(*range(3))
    undecided, holder = FakeTier("undecided", unknown=set(keys)), FakeTier("holder", held={keys[0]})
    rig = ManagerRig(4, [undecided, holder])
    assert rig.manager.held(keys, rig.ctx) == PrefixMatch(1, True)
    undecided.unknown.clear()
    assert rig.manager.held(keys, rig.ctx) == PrefixMatch(1, False)


def test_a_run_that_the_tier_would_not_load_does_not_count() -> None:
    keys = keys_of(*range(4))
    tier = FakeTier(held=set(keys[:3]), min_prefix_blocks=4)
    rig = ManagerRig(4, [tier])
    assert rig.manager.held(keys, rig.ctx) == PrefixMatch(0, False)
    tier.held.add(keys[3])
    assert rig.manager.held(keys, rig.ctx) == PrefixMatch(4, False)


class RaisingTier(FakeTier):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        raise RuntimeError("told to raise in lookup")


def test_a_tier_that_breaks_its_contract_holds_nothing() -> None:
    keys = keys_of(0)
    rig = ManagerRig(4, [RaisingTier(held=set(keys))])
    assert rig.manager.held(keys, rig.ctx) == PrefixMatch(0, False)
    assert rig.manager.held(keys, rig.ctx) == PrefixMatch(0, False)


def test_limits_of_a_request_hold_and_an_unknown_one_finds_the_rows_only() -> None:
    keys = keys_of(0, 1)
    rig = ManagerRig(4, [FakeTier("one", held=set(keys))])
    assert rig.manager.held(keys, rig.request("r2", load=False)) == PrefixMatch(0, False)
    assert rig.manager.held(keys, rig.request("r3", tiers=[])) == PrefixMatch(0, False)
    rig.store(keys[:1])
    assert rig.manager.held(keys, ReqContext("nobody")) == PrefixMatch(1, False)
