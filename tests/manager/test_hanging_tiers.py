"""A tier that hangs or has broken its contract blocks neither the engine nor the other tiers."""

from __future__ import annotations

import pytest

from tests.manager_rig import ManagerRig
from tiering.manager.jobs import COUNTS_OVERDUE
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of


def test_what_an_overdue_load_holds_does_not_keep_other_tiers_from_promoting() -> None:
    hung = FakeTier("hung", held=set(keys_of(*range(4))), load_deadline=5.0, primary_share=0.5)
    good = FakeTier("good", held=set(keys_of(*range(10, 14))))
    rig = ManagerRig(8, [hung, good], promotion_share=0.5)
    assert rig.manager.match_prefix(keys_of(*range(4)), rig.ctx) == (4, True)
    rig.step()
    rig.clock.advance(5.0)
    rig.step()
    other = rig.request("r2")
    assert rig.manager.match_prefix(keys_of(*range(10, 14)), other) == (4, True)
    rig.step()
    hung.finish_all()
    good.finish_all()
    rig.step()
    assert rig.manager.match_prefix(keys_of(*range(10, 14)), other) == (4, False)
    rig.manager.on_request_finished(other)
    third = rig.request("r3")
    good.held.update(keys_of(*range(20, 24)))
    assert rig.manager.match_prefix(keys_of(*range(20, 24)), third) == (4, True), "the share is whole again"


@pytest.fixture
def stored() -> tuple[ManagerRig, FakeTier]:
    """A rig with a cascade of two blocks in flight, which is due after five seconds, and its tier."""
    slow = FakeTier("slow", load_deadline=5.0)
    rig = ManagerRig(8, [slow])
    output = rig.manager.prepare_store(keys_of(*range(2)), rig.ctx)
    assert output is not None
    rig.manager.complete_store(output.keys_to_store, rig.ctx)
    assert rig.manager.has_pending_work()
    return rig, slow


def test_an_idle_engine_steps_until_an_overdue_job_has_ended(stored: tuple[ManagerRig, FakeTier]) -> None:
    rig, slow = stored
    rig.clock.advance(5.0 + COUNTS_OVERDUE - 1.0)
    rig.step()
    assert rig.manager.has_pending_work()
    slow.finish_all()
    rig.step()
    assert rig.stat("rows_evictable") == 2
    assert not rig.manager.has_pending_work()


def test_an_idle_engine_steps_for_the_overdue_job_of_a_tier_whose_reset_is_not_confirmed(
    stored: tuple[ManagerRig, FakeTier],
) -> None:
    rig, slow = stored
    slow.resets = False
    assert not rig.manager.reset_cache()
    rig.clock.advance(6.0)
    assert rig.manager.has_pending_work()


def test_the_engine_need_not_step_for_a_job_that_hangs_for_ever(stored: tuple[ManagerRig, FakeTier]) -> None:
    rig, hung = stored
    rig.clock.advance(5.0 + COUNTS_OVERDUE)
    assert not rig.manager.has_pending_work()
    hung.finish_all()
    rig.step()
    assert rig.stat("jobs_in_flight") == 0
    assert rig.stat("rows_evictable") == 2


def test_a_reset_reaches_a_retired_tier_whose_blocks_would_be_served_after_a_restart() -> None:
    tier = FakeTier("broken", held=set(keys_of(*range(2))), raises={"touch"})
    rig = ManagerRig(8, [tier])
    rig.manager.touch(keys_of(*range(2)), rig.ctx)
    assert rig.stat("tiers_out_of_service") == 1
    assert rig.manager.reset_cache()
    assert len(tier.calls("reset")) == 1
    tier.resets = False
    assert not rig.manager.reset_cache()
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is False


class SlowTier(FakeTier):
    """A tier that uses all the time it is given."""

    def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
        self.rig.clock.advance(max(0.0, deadline - self.rig.clock()))
        return False

    rig: ManagerRig


def test_a_tier_that_hangs_leaves_the_others_time_for_their_reset() -> None:
    slow, good = SlowTier("slow"), FakeTier("good")
    rig = ManagerRig(8, [good, slow], reset_deadline=4.0)
    slow.rig = rig
    start = rig.clock()
    assert rig.manager.reset_cache() is False
    (deadline,) = good.calls("reset")
    assert isinstance(deadline, float)
    assert deadline > rig.clock()
    assert deadline <= start + 4.0
