"""Long loads run as several jobs; blocks that arrive before the deadline count, from the head on."""

from __future__ import annotations

import pytest

from tests.block_tier.rig import Rig
from tests.manager_rig import ManagerRig
from tiering.block_tier import tier as block_tier
from tiering.manager.jobs import COUNTS_OVERDUE
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(12))


def loading() -> tuple[ManagerRig, FakeTier]:
    """Return a manager that loads twelve blocks from a tier whose loads have at most four."""
    tier = FakeTier("slow", held=set(K), load_deadline=2.0, max_load_blocks=4)
    rig = ManagerRig(32, [tier])
    assert rig.manager.match_prefix(K, rig.ctx) == (12, True)
    rig.manager.on_schedule_end()
    return rig, tier


def test_a_long_load_is_submitted_as_several_jobs_head_first() -> None:
    _, tier = loading()
    assert [list(job.keys) for job in tier.loads] == [K[:4], K[4:8], K[8:]]
    rows = [row for job in tier.loads for row in job.block_ids.tolist()]
    assert len(set(rows)) == 12


def test_at_the_deadline_the_request_goes_on_with_the_head_that_has_arrived() -> None:
    rig, tier = loading()
    tier.finish(tier.loads[0])
    tier.finish(tier.loads[0])
    rig.clock.advance(2.0)
    assert rig.manager.match_prefix(K, rig.ctx) == (8, False)
    assert rig.manager.get_stats()["manager"]["promotions_overdue"] == 4


def test_a_job_that_fails_takes_nothing_from_the_others() -> None:
    rig, tier = loading()
    head, middle, tail = tier.loads
    tier.finish(head)
    tier.finish(middle, success=False)
    tier.finish(tail)
    assert rig.manager.match_prefix(K, rig.ctx) == (4, False)
    assert rig.manager.match_prefix(K[8:], rig.ctx) == (4, False)


def test_every_row_comes_back_when_the_jobs_have_ended() -> None:
    rig, tier = loading()
    rig.clock.advance(2.0)
    rig.manager.on_schedule_end()
    for job in list(tier.loads):
        tier.finish(job, success=False)
    rig.manager.on_schedule_end()
    stats = rig.manager.get_stats()["manager"]
    assert (stats["rows_free"], stats["rows_quarantined"], stats["jobs_in_flight"]) == (32, 0, 0)


def test_another_request_that_asked_for_the_tail_gets_it() -> None:
    rig, tier = loading()
    other = rig.request("r2")
    assert rig.manager.match_prefix(K, other) == (12, True)
    for job in list(tier.loads):
        tier.finish(job)
    rig.manager.on_schedule_end()
    assert rig.manager.match_prefix(K, other) == (12, False)
    rig.manager.on_request_finished(rig.ctx)
    assert rig.manager.match_prefix(K, other) == (12, False)


def test_a_store_may_take_longer_than_a_load() -> None:
    tier = FakeTier("slow", load_deadline=2.0, store_deadline=30.0)
    rig = ManagerRig(8, [tier])
    output = rig.manager.prepare_store(K[:1], rig.ctx)
    assert output is not None
    rig.manager.complete_store(K[:1], rig.ctx)
    rig.clock.advance(COUNTS_OVERDUE + 29.0)
    assert rig.manager.has_pending_work()
    rig.clock.advance(1.0)
    assert not rig.manager.has_pending_work()


def test_a_late_load_from_a_disk_delivers_the_parts_that_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tier, "LOAD_PART", 4)
    medium = Rig(slots=32, deadline=5).opened()
    medium.store_blocks(K)
    rig = ManagerRig(32, [medium.tier])
    rig.clock.advance(medium.clock() - rig.clock())
    assert rig.manager.match_prefix(K, rig.ctx) == (12, True)
    rig.step()
    head, middle, _ = [job.job_id for job in medium.io.jobs if job.is_promotion]
    medium.io.finish(middle)
    medium.io.finish(head)
    rig.clock.advance(5)
    medium.clock.advance(5)
    assert rig.manager.match_prefix(K, rig.ctx) == (8, False)
