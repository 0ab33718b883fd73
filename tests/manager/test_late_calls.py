"""Calls for a request that was not announced, or has finished, leave no state behind."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tests.manager_rig import ManagerRig
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

A, B, C, D = K = keys_of(0, 1, 2, 3)


def never_announced(rig: ManagerRig, req_id: str, **params: object) -> ReqContext:
    return ReqContext(req_id, {"kv_tiering": params} if params else None)


def finished(rig: ManagerRig, req_id: str, **params: object) -> ReqContext:
    ctx = rig.request(req_id, **params)
    rig.manager.on_request_finished(ctx)
    return ctx


def finished_while_it_stores(rig: ManagerRig, req_id: str, **params: object) -> ReqContext:
    """Return a request that has finished and whose store of another block has not ended."""
    ctx = rig.request(req_id, **params)
    rig.manager.prepare_store(keys_of(9), ctx)
    rig.manager.on_request_finished(ctx)
    return ctx


Late = Callable[..., ReqContext]
late_requests = pytest.mark.parametrize("late", [never_announced, finished, finished_while_it_stores])


@late_requests
def test_a_late_lookup_finds_what_the_primary_tier_holds(late: Late) -> None:
    tier = FakeTier(held={C})
    rig = ManagerRig(8, [tier])
    rig.store([A])
    rig.manager.prepare_store([B], rig.ctx)
    ctx = late(rig, "late")
    assert rig.manager.match_prefix([A, C], ctx) == PrefixMatch(1, False)
    assert rig.manager.match_prefix([A, B, C], ctx) == PrefixMatch(2, True)
    assert [rig.manager.lookup(key, ctx) for key in K] == [True, None, False, False]
    rig.step()
    assert (tier.asked, tier.loads) == ([], [])
    assert list(rig.manager.prepare_load([A], ctx).block_ids) == [rig.primary.readable[A]]
    rig.manager.complete_load([A], ctx)
    assert rig.stat("rows_evictable") == 1


@late_requests
@pytest.mark.parametrize("params", [{"load": False}, {"load": "perhaps"}])
def test_a_late_lookup_of_a_request_that_may_not_load_finds_nothing(late: Late, params: dict[str, object]) -> None:
    rig = ManagerRig(8)
    rig.store([A])
    assert rig.manager.lookup(A, late(rig, "late", **params)) is False


def test_a_late_store_stores_nothing_though_the_tiers_of_its_request_are_unknown() -> None:
    tiers = [FakeTier("fast"), FakeTier("slow")]
    rig = ManagerRig(8, tiers)
    ctx = finished(rig, "late", tiers=["slow"])
    output = rig.manager.prepare_store([A], ctx)
    assert output is not None
    assert (output.keys_to_store, len(output.store_spec.block_ids)) == ([], 0)
    rig.manager.complete_store([A], ctx)
    assert rig.manager.lookup(A, rig.ctx) is False
    assert [tier.stores for tier in tiers] == [[], []]


@pytest.mark.parametrize("late", [never_announced, finished])
def test_nothing_grows_with_the_number_of_late_calls(late: Late) -> None:
    tier = FakeTier(held={C}, unknown={D})
    rig = ManagerRig(8, [tier])
    rig.manager.prepare_store([B], rig.ctx)
    before = rig.manager.get_stats()["manager"]
    for number in range(50):
        ctx = late(rig, f"late {number}")
        begun = len(tier.calls("on_new_request"))
        for key in K:
            rig.manager.lookup(key, ctx)
        rig.manager.prepare_store(K, ctx)
        rig.step()
        assert len(tier.calls("on_new_request")) == begun
        assert not rig.manager.still_pending(ctx)
    assert list(rig.manager._known) == ["r1"]
    assert rig.manager._open_lookups._open == {}
    after = rig.manager.get_stats()["manager"]
    assert (after, tier.loads) == (before | {"ignored_completions": 0}, [])


def test_late_calls_are_reported_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    rig = ManagerRig(8)
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            rig.manager.lookup(A, ReqContext(f"late {number}"))
    (line,) = caplog.messages
    assert "request late 0 looks up or stores blocks before on_new_request or after on_request_finished" in line
