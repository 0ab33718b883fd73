"""Jobs of tiers: cascades of promoted and of pending blocks, and tiers that break their contract."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import pytest

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.request import OffloadPolicy, ReqContext
from tiering.manager.cascade_queue import NOBODY
from tiering.secondary.contract import JobResult, TransferJob
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

A, B, C, D = K = keys_of(*range(4))


def stored(tier: FakeTier, ctx: ReqContext | None = None) -> list[list[OffloadKey]]:
    """Return the blocks of each open store of a tier, or only those for one request."""
    return [list(job.keys) for job in tier.stores if ctx is None or job.req_context is ctx]


def promote(rig: ManagerRig, tier: FakeTier, keys: list[OffloadKey], arrive: list[OffloadKey] | None = None) -> None:
    """Promote ``keys`` from a tier; ``arrive`` are the keys that the tier can load, default: all."""
    rig.manager.match_prefix(keys, rig.ctx)
    rig.step()
    tier.finish(tier.loads[0], arrive is None, arrive)
    rig.step()


def test_promoted_blocks_are_offered_to_the_faster_tiers_that_want_them() -> None:
    fast, picky, slow = FakeTier("fast"), FakeTier("picky", fill=False), FakeTier("slow", held={A, B})
    last = FakeTier("last")
    rig = ManagerRig(8, [fast, picky, slow, last])
    promote(rig, slow, [A, B])
    assert stored(fast, rig.ctx) == [[A, B]]
    assert stored(picky) == stored(slow) == stored(last) == []


def test_a_promotion_that_outlives_its_request_fills_in_nobodys_name() -> None:
    fast, slow = FakeTier("fast"), FakeTier("slow", held={A})
    rig = ManagerRig(8, [fast, slow])
    rig.manager.match_prefix([A], rig.ctx)
    rig.step()
    rig.manager.on_request_finished(rig.ctx)
    slow.finish_all()
    rig.step()
    assert stored(fast, NOBODY) == [[A]]


@pytest.mark.parametrize("field", TransferJob._fields)
def test_a_tier_cannot_change_what_the_manager_has_ordered(field: str) -> None:
    tier = FakeTier(held={A})
    rig = ManagerRig(8, [tier])
    rig.manager.match_prefix([A], rig.ctx)
    rig.step()
    (job,) = tier.loads
    with pytest.raises(AttributeError):
        setattr(job, field, None)
    with pytest.raises(ValueError, match="read-only"):
        job.block_ids[0] = 7


def test_a_job_has_the_deadline_of_its_tier_and_its_direction() -> None:
    tier = FakeTier(held={A}, load_deadline=5.0, store_deadline=60.0)
    rig = ManagerRig(8, [tier])
    rig.manager.match_prefix([A], rig.ctx)
    rig.step()
    rig.manager.prepare_store([B], rig.ctx)
    rig.manager.complete_store([B], rig.ctx)
    (load,), (store,) = tier.loads, tier.stores
    assert (load.deadline - load.submitted_at, store.deadline - store.submitted_at) == (5.0, 60.0)
    now = rig.clock()
    assert (tier.traits.deadline(now, load=True), tier.traits.deadline(now, load=False)) == (now + 5.0, now + 60.0)


def test_nothing_is_offered_if_nothing_arrived() -> None:
    fast, slow = FakeTier("fast"), FakeTier("slow", held={A, B})
    rig = ManagerRig(8, [fast, slow])
    promote(rig, slow, [A, B], arrive=[])
    assert fast.stores == []


def test_a_block_that_arrives_after_a_reset_is_offered_to_no_tier() -> None:
    fast, slow = FakeTier("fast"), FakeTier("slow", held={A})
    rig = ManagerRig(8, [fast, slow])
    rig.manager.match_prefix([A], rig.ctx)
    rig.step()
    rig.manager.reset_cache()
    slow.finish_all()
    rig.step()
    assert fast.stores == []
    assert not rig.primary.readable


def test_the_tier_of_a_promoted_block_is_not_told_of_its_use_for_ten_minutes() -> None:
    fast, slow = FakeTier("fast", fill=False), FakeTier("slow", held={A})
    rig = ManagerRig(1, [fast, slow])
    rig.store([B])
    rig.manager.touch([B], rig.ctx)
    assert fast.calls("used") == []
    rig.manager.match_prefix([A], rig.ctx)
    rig.step()
    slow.finish_all()
    rig.step()
    rig.manager.touch([A], rig.ctx)
    assert (fast.calls("used"), slow.calls("used")) == ([[A]], [])
    rig.clock.advance(599.0)
    rig.manager.touch([A], rig.ctx)
    assert slow.calls("used") == []
    rig.clock.advance(1.0)
    rig.manager.touch([A], rig.ctx)
    assert slow.calls("used") == [[A]]


def test_a_tier_that_took_only_part_of_a_store_is_told_of_the_next_use() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    rig.manager.prepare_store([A, B], rig.ctx)
    rig.manager.complete_store([A, B], rig.ctx)
    tier.finish(tier.stores[0], keys=[A])
    rig.step()
    rig.manager.touch([A, B], rig.ctx)
    assert tier.calls("used") == [[A, B]]


def test_loads_that_a_tier_can_no_longer_get_end_at_once_as_failed() -> None:
    tier = FakeTier(held={A, B}, raises={"submit_load"})
    rig = ManagerRig(8, [tier])
    other = rig.request("r2")
    rig.manager.match_prefix([A], rig.ctx)
    rig.manager.match_prefix([B], other)
    rig.step()
    assert rig.stat("tiers_out_of_service") == 1
    assert rig.manager.match_prefix([A], rig.ctx) == (0, False)
    assert rig.manager.match_prefix([B], other) == (0, False)
    assert (rig.stat("jobs_in_flight"), rig.stat("rows_quarantined"), rig.stat("rows_free")) == (1, 1, 7)


def test_what_a_retired_tier_still_loads_counts_for_nothing() -> None:
    tier = FakeTier(held={A})
    rig = ManagerRig(8, [tier])
    rig.manager.match_prefix([A], rig.ctx)
    rig.step()
    tier.raises.add("touch")
    rig.manager.touch([A], rig.ctx)
    assert rig.manager.lookup(A, rig.ctx) is False
    tier.finish_all()
    rig.step()
    assert not rig.primary.readable
    assert (rig.stat("rows_free"), rig.stat("jobs_in_flight")) == (8, 0)


def test_a_tier_that_reports_the_job_of_another_is_retired_and_the_job_stays() -> None:
    honest, liar = FakeTier("honest"), FakeTier("liar")
    rig = ManagerRig(4, [honest, liar])
    rig.manager.prepare_store([A], rig.ctx)
    rig.manager.complete_store([A], rig.ctx)
    liar.stores[:] = honest.stores
    liar.finish(liar.stores[0])
    rig.step()
    assert (rig.stat("misreported_jobs"), rig.stat("tiers_out_of_service"), rig.stat("jobs_in_flight")) == (1, 1, 2)
    honest.finish_all()
    rig.step()
    assert rig.stat("jobs_in_flight") == 1


# -------------------------------------------------------------------------------------------------------------- awaited


class Awaiting:
    """A request-level tier, request "r1" that writes blocks, and other requests that need these blocks."""

    def __init__(self) -> None:
        self.tier = FakeTier(policy=OffloadPolicy.REQUEST_LEVEL)
        self.rig = ManagerRig(8, [self.tier])
        assert self.rig.manager.prepare_store([A, B], self.rig.ctx) is not None

    def need(self, req_id: str, keys: list[OffloadKey]) -> ReqContext:
        ctx = self.rig.request(req_id)
        assert self.rig.manager.prepare_store(keys, ctx) is not None
        return ctx


def test_a_request_whose_blocks_are_still_written_does_not_hold_up_another() -> None:
    awaiting = Awaiting()
    first, second = awaiting.need("r2", [B]), awaiting.need("r3", [A])
    awaiting.rig.manager.complete_store([A], awaiting.rig.ctx)
    assert stored(awaiting.tier, first) == []
    assert stored(awaiting.tier, second) == [[A]]
    awaiting.rig.manager.complete_store([B], awaiting.rig.ctx)
    assert stored(awaiting.tier, first) == [[B]]


def test_a_request_that_is_announced_again_awaits_nothing_from_before() -> None:
    awaiting = Awaiting()
    before = awaiting.need("r2", [A])
    awaiting.rig.request("r2")
    awaiting.rig.manager.complete_store([A, B], awaiting.rig.ctx)
    assert stored(awaiting.tier, before) == []


def test_awaited_blocks_are_cascaded_in_the_order_of_the_store_and_once() -> None:
    awaiting = Awaiting()
    ctx = awaiting.need("r2", [B, A, C])
    awaiting.rig.manager.complete_store([A, B], awaiting.rig.ctx)
    assert stored(awaiting.tier, ctx) == [[B, A]]
    awaiting.rig.manager.complete_store([C], ctx)
    assert stored(awaiting.tier, ctx) == [[B, A], [C]]


def test_a_tier_of_the_block_level_gets_each_block_from_its_writer_alone() -> None:
    tier = FakeTier()
    rig = ManagerRig(8, [tier])
    rig.manager.prepare_store([A], rig.ctx)
    rig.manager.prepare_store([A, B], rig.request("r2"))
    rig.manager.complete_store([A], rig.ctx)
    assert stored(tier) == [[A]]


class Counting(FakeTier):
    """A tier that counts how often it is asked for finished jobs."""

    asked_for_results = 0

    def get_finished(self) -> Iterable[JobResult]:
        self.asked_for_results += 1
        return super().get_finished()


def test_stores_of_one_step_ask_the_tiers_for_finished_jobs_once() -> None:
    tier = Counting()
    rig = ManagerRig(8, [tier])
    for key in K:
        assert rig.manager.prepare_store([key], rig.ctx) is not None
    assert tier.asked_for_results == 1
    rig.manager.on_schedule_end()
    assert tier.asked_for_results == 2
    rig.manager.prepare_store(keys_of(4), rig.ctx)
    assert tier.asked_for_results == 3


class StrangeTier(FakeTier):
    """A fake tier whose next results a test chooses."""

    strange: Iterable[object] | None = None

    def get_finished(self) -> Iterable[JobResult]:
        strange, self.strange = self.strange, None
        return super().get_finished() if strange is None else cast("Iterable[JobResult]", strange)


@pytest.mark.parametrize(
    "strange", [[None], [7], 7, [JobResult(cast("int", []), True)]], ids=["none", "number", "no list", "no number"]
)
def test_a_tier_whose_results_are_none_is_retired_and_the_step_goes_on(strange: Iterable[object]) -> None:
    strange_tier, other = StrangeTier("strange"), FakeTier("other", held={A})
    rig = ManagerRig(8, [strange_tier, other])
    strange_tier.strange = strange
    assert rig.manager.lookup(A, rig.ctx) is None
    rig.step()
    other.finish_all()
    assert rig.manager.lookup(A, rig.ctx) is True
    assert rig.stat("tiers_out_of_service") == 1


@pytest.mark.parametrize("wanted", [7, [[]]], ids=["no list", "no keys"])
def test_a_tier_that_wants_no_keys_is_retired_and_the_step_goes_on(wanted: object) -> None:
    tier, other = FakeTier("strange"), FakeTier("other")
    rig = ManagerRig(8, [tier, other])
    rig.store([A])
    tier.wanted = cast("list[OffloadKey]", wanted)
    other.wanted = [A]
    rig.step()
    assert stored(other) == [[A]]
    assert rig.stat("tiers_out_of_service") == 1


def test_a_result_with_keys_that_are_none_releases_no_row_and_no_request_waits_for_it() -> None:
    tier = StrangeTier("strange", held={A})
    rig = ManagerRig(8, [tier])
    assert rig.manager.lookup(A, rig.ctx) is None
    rig.step()
    tier.strange = [JobResult(tier.loads[0].job_id, False, cast("list[OffloadKey]", [[]]))]
    rig.step()
    assert rig.manager.lookup(A, rig.ctx) is False
    assert rig.stat("tiers_out_of_service") == 1
    assert rig.stat("misreported_jobs") == 1
    assert rig.stat("jobs_in_flight") == 1, "the tier may still write the row"


def test_results_that_a_generator_returned_before_it_raised_count() -> None:
    def results() -> Iterator[JobResult]:
        yield JobResult(tier.loads[0].job_id, True)
        raise RuntimeError("the connection is gone")

    tier = StrangeTier("strange", held={A})
    rig = ManagerRig(8, [tier])
    assert rig.manager.lookup(A, rig.ctx) is None
    rig.step()
    tier.strange = results()
    rig.step()
    assert rig.stat("tiers_out_of_service") == 1
    assert rig.stat("jobs_in_flight") == 0
