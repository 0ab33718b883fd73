"""Lookups of many single blocks: each tier is asked about the rest, and nothing is promoted."""

from __future__ import annotations

import pytest

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(6))


def test_a_block_counts_wherever_it_is_held_or_in_flight() -> None:
    fast, slow = FakeTier("fast", held={K[2]}, unknown={K[3], K[4]}), FakeTier("slow", held={K[4]})
    rig = ManagerRig(8, [fast, slow])
    rig.store(K[:1])
    assert rig.manager.prepare_store(K[1:2], rig.ctx) is not None
    fast.held.discard(K[0])
    fast.asked.clear()
    slow.asked.clear()
    assert list(rig.manager.lookup_each(K[:6], rig.ctx)) == [True, True, True, None, True, False]
    assert fast.asked == list(K[2:6])
    assert slow.asked == list(K[3:6]), "a slower tier is asked about what the faster one does not hold"
    rig.step()
    assert fast.loads == slow.loads == []


def test_a_request_sees_the_tiers_that_it_may_use() -> None:
    tier = FakeTier(held=set(K[:2]))
    rig = ManagerRig(8, [tier])
    assert list(rig.manager.lookup_each(K[:1], rig.request("r2", load=False))) == [False]
    assert list(rig.manager.lookup_each(K[:1], rig.request("r3", tiers=[]))) == [False]
    assert list(rig.manager.lookup_each(K[:1], ReqContext("unknown"))) == [False]
    assert list(rig.manager.lookup_each(K[:1], rig.ctx)) == [True], "control"


class Odd(FakeTier):
    """A tier whose lookup returns a number."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return 1  # type: ignore[return-value]


class Raising(FakeTier):
    """A tier whose lookup raises."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        raise RuntimeError("broken")


@pytest.mark.parametrize("broken", [Odd, Raising])
def test_a_wrong_answer_takes_the_tier_out_of_service(broken: type[FakeTier], caplog: pytest.LogCaptureFixture) -> None:
    rig = ManagerRig(8, [broken("odd"), FakeTier("good", held={K[1]})])
    assert list(rig.manager.lookup_each(K[:2], rig.ctx)) == [False, True]
    assert "its lookup" in caplog.text
    assert rig.stat("tiers_out_of_service") == 1
