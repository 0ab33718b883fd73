"""The tiering manager: cascades, promotions, reservations, deadlines, misbehaving tiers, resets."""

from __future__ import annotations

import pytest

from tests.manager_rig import ManagerRig
from tiering.api.manager import OffloadingEvent, PrefixMatch
from tiering.api.request import OffloadPolicy, ReqContext
from tiering.api.transfer import CPULoadStoreSpec
from tiering.errors import ConfigError, NotReadableError
from tiering.secondary.contract import JobResult
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

# -------------------------------------------------------------------------------------------------------------- cascade


def test_every_stored_block_is_offered_to_all_tiers_and_pinned_until_each_has_reported() -> None:
    fast, slow = FakeTier("fast"), FakeTier("slow")
    rig = ManagerRig(4, [fast, slow])
    keys = keys_of(*range(4))
    output = rig.manager.prepare_store(keys, rig.ctx)
    assert output is not None
    assert not fast.stores
    rig.manager.complete_store(keys, rig.ctx)
    for tier in (fast, slow):
        (job,) = tier.stores
        assert list(job.keys) == keys
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        assert job.block_ids.tolist() == output.store_spec.block_ids.tolist()
        assert not job.is_promotion
    assert rig.manager.prepare_store(keys_of(10), rig.ctx) is None
    fast.finish_all()
    assert rig.manager.prepare_store(keys_of(10), rig.ctx) is None
    slow.finish(slow.stores[0], success=False)
    assert rig.manager.prepare_store(keys_of(10), rig.ctx) is not None


@pytest.mark.parametrize("success", [True, False])
def test_a_key_that_is_named_twice_has_one_row_and_leaks_none(success: bool) -> None:
    rig = ManagerRig(4)
    (key,) = keys_of(0)
    output = rig.manager.prepare_store([key, key], rig.ctx)
    assert output is not None
    assert output.keys_to_store == [key]
    assert len(output.store_spec.block_ids) == 1
    rig.manager.complete_store([key, key], rig.ctx, success)
    assert rig.manager.lookup(key, rig.ctx) is success
    assert rig.stat("rows_free") == 4 - success


def test_a_key_that_is_named_twice_is_promoted_once() -> None:
    (key,) = keys_of(0)
    tier = FakeTier(held={key})
    rig = ManagerRig(4, [tier])
    assert rig.manager.match_prefix([key, key], rig.ctx).pending
    rig.step()
    (job,) = tier.loads
    assert list(job.keys) == [key]
    tier.finish_all()
    assert rig.manager.match_prefix([key, key], rig.ctx) == PrefixMatch(2, False)
    assert rig.stat("rows_free") == 3


def test_a_failed_store_cascades_nothing() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    rig.manager.prepare_store(keys_of(*range(2)), rig.ctx)
    rig.manager.complete_store(keys_of(*range(2)), rig.ctx, success=False)
    assert not tier.stores
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is False


def test_a_cascade_does_not_change_recency() -> None:
    tier = FakeTier()
    rig = ManagerRig(2, [tier])
    rig.store(keys_of(0))
    rig.manager.prepare_store(keys_of(1), rig.ctx)
    rig.manager.complete_store(keys_of(1), rig.ctx)
    rig.manager.touch(keys_of(0), rig.ctx)
    tier.finish_all()
    rig.manager.on_schedule_end()
    output = rig.manager.prepare_store(keys_of(2), rig.ctx)
    assert output is not None
    assert output.evicted_keys == keys_of(1)


def test_without_secondary_tiers_the_manager_is_a_cpu_cache() -> None:
    rig = ManagerRig(2)
    rig.store(keys_of(*range(2)))
    assert rig.manager.match_prefix(keys_of(*range(3)), rig.ctx) == PrefixMatch(2, False)
    assert not rig.manager.has_pending_work()


def test_the_primary_tier_tells_how_full_it_is_and_what_it_evicted() -> None:
    rig = ManagerRig(3)
    row = rig.manager.primary_tier.get_kv_memoryview().nbytes // 3
    rig.store(keys_of(*range(2)))
    told = rig.manager.get_stats()["primary"]
    assert told == {"blocks": 2, "occupancy_bytes": 2 * row, "capacity_bytes": 3 * row, "evictions": 0, "available": 1}
    rig.store(keys_of(*range(2, 4)))
    told = rig.manager.get_stats()["primary"]
    assert (told["blocks"], told["evictions"]) == (3, 1)


def test_a_tier_that_wants_whole_requests_gets_held_blocks_too() -> None:
    picky = FakeTier("picky", policy=OffloadPolicy.REQUEST_LEVEL)
    rig = ManagerRig(4, [picky])
    rig.store(keys_of(*range(2)))
    second = ReqContext("r2")
    assert rig.manager.on_new_request(second).policy is OffloadPolicy.REQUEST_LEVEL
    rig.manager.prepare_store(keys_of(*range(3)), second)
    (job,) = picky.stores
    assert list(job.keys) == keys_of(*range(2))


def test_keys_that_admission_wants_later_are_cascaded_while_resident() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    rig.store(keys_of(*range(2)))
    tier.wanted = [*keys_of(0), *keys_of(7)]
    rig.step()
    assert [list(job.keys) for job in tier.stores] == [keys_of(0)]


# --------------------------------------------------------------------------------------------------------------- lookup


def test_finished_jobs_are_collected_at_most_once_per_step_by_lookups() -> None:
    tier = FakeTier(held=set(keys_of(0)))
    rig = ManagerRig(4, [tier])
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is None
    rig.step()
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is None
    tier.finish(tier.loads[0])
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is None
    rig.step()
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is True


def test_the_fastest_tier_that_has_a_block_promotes_it_and_spares_the_slower_ones_the_question() -> None:
    key = keys_of(0)
    fast, middle, slow = FakeTier("fast"), FakeTier("middle", held=set(key)), FakeTier("slow", held=set(key))
    rig = ManagerRig(4, [fast, middle, slow])
    assert rig.manager.match_prefix(key, rig.ctx) == PrefixMatch(1, True)
    rig.step()
    assert [list(job.keys) for job in middle.loads] == [key]
    assert not fast.loads
    assert not slow.asked


def test_a_tier_that_does_not_know_yet_leaves_the_answer_open_only_if_no_other_has_the_block() -> None:
    key = keys_of(0)
    undecided = FakeTier("undecided", unknown=set(key))
    holder = FakeTier("holder")
    rig = ManagerRig(4, [undecided, holder])
    assert rig.manager.lookup(key[0], rig.ctx) is None
    assert rig.manager.match_prefix(key, rig.ctx) == PrefixMatch(0, True)
    holder.held.update(key)
    assert rig.manager.match_prefix(key, rig.ctx) == PrefixMatch(1, True)
    rig.step()
    assert holder.loads
    undecided.unknown.clear()


def test_a_tier_that_never_decides_does_not_hold_a_request_for_ever() -> None:
    key = keys_of(0)
    rig = ManagerRig(4, [FakeTier(unknown=set(key))])
    assert rig.manager.match_prefix(key, rig.ctx) == PrefixMatch(0, True)
    rig.clock.advance(10.0)
    assert rig.manager.match_prefix(key, rig.ctx) == PrefixMatch(0, False)
    assert rig.manager.lookup(key[0], rig.ctx) is False
    assert rig.manager.lookup(key[0], rig.request("r2")) is None


def test_nothing_is_promoted_behind_a_definite_miss() -> None:
    keys = keys_of(*range(3))
    tier = FakeTier(held={keys[0], keys[2]})
    rig = ManagerRig(4, [tier])
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(1, True)
    rig.step()
    assert [list(job.keys) for job in tier.loads] == [[keys[0]]]


def test_a_prefix_may_run_through_rows_promotions_and_several_tiers() -> None:
    keys = keys_of(*range(6))
    fast, slow = FakeTier("fast", held=set(keys[2:4])), FakeTier("slow", held=set(keys[4:5]))
    rig = ManagerRig(8, [fast, slow])
    rig.manager.prepare_store(keys[:1], rig.ctx)
    rig.manager.complete_store(keys[:1], rig.ctx)
    rig.manager.prepare_store(keys[1:2], rig.ctx)
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(5, True)


def test_a_run_shorter_than_the_tiers_minimum_is_not_promoted() -> None:
    keys = keys_of(*range(3))
    tier = FakeTier(held=set(keys[:2]), min_prefix_blocks=3)
    rig = ManagerRig(8, [tier])
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(0, False)
    tier.held.update(keys)
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(3, True)


def test_a_request_may_be_limited_to_some_tiers() -> None:
    keys = keys_of(0)
    tier, other = FakeTier("tier", held=set(keys)), FakeTier("other")
    rig = ManagerRig(4, [tier, other])
    limited = rig.request("limited", tiers=["other"])
    assert rig.manager.lookup(keys[0], limited) is False
    assert rig.manager.lookup(keys[0], rig.ctx) is None
    rig.store(keys_of(5), limited)
    assert "submit_store" not in [name for name, _ in tier.log]
    assert other.calls("submit_store")


# ------------------------------------------------------------------------------------------------------------ promotion


def test_promotions_are_one_batched_job_per_tier_and_request_at_the_end_of_the_step() -> None:
    keys = keys_of(*range(4))
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(8, [tier])
    other = rig.request("r2")
    rig.manager.match_prefix(keys[:2], rig.ctx)
    rig.manager.lookup(keys[2], rig.ctx)
    rig.manager.lookup(keys[3], other)
    assert not tier.loads
    assert rig.manager.has_pending_work()
    rig.step()
    assert [(job.req_context.req_id, list(job.keys)) for job in tier.loads] == [("r1", keys[:3]), ("r2", keys[3:])]
    assert all(job.is_promotion for job in tier.loads)


def test_a_second_request_sees_a_promotion_in_flight_and_does_not_load_the_block_twice() -> None:
    keys = keys_of(*range(2))
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(8, [tier])
    other = rig.request("r2")
    rig.manager.match_prefix(keys, rig.ctx)
    assert rig.manager.match_prefix(keys, other) == PrefixMatch(2, True)
    rig.step()
    assert len(tier.loads) == 1
    tier.finish_all()
    rig.step()
    assert rig.manager.match_prefix(keys, other) == PrefixMatch(2, False)


def test_a_promoted_block_is_reserved_for_every_asker_until_it_loads_or_finishes() -> None:
    keys = keys_of(*range(2))
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(2, [tier], promotion_share=1.0)
    other = rig.request("r2")
    for ctx in (rig.ctx, other):
        rig.manager.match_prefix(keys, ctx)
    rig.step()
    tier.finish_all()
    rig.step()
    storer = rig.request("r3")
    assert rig.manager.prepare_store(keys_of(10), storer) is None
    rig.manager.prepare_load(keys, rig.ctx)
    rig.manager.complete_load(keys, rig.ctx)
    assert rig.manager.prepare_store(keys_of(10), storer) is None
    rig.manager.on_request_finished(other)
    assert rig.manager.prepare_store(keys_of(*range(10, 12)), storer) is not None
    assert rig.stat("rows_reserved") == 0


def test_a_request_can_tell_what_was_promoted_for_it_and_from_which_medium() -> None:
    disk = FakeTier("disk", held=set(keys_of(1)), medium="DISK")
    bucket = FakeTier("bucket", held=set(keys_of(*range(2, 4))), medium="OBJECT")
    rig = ManagerRig(8, [disk, bucket])
    rig.store(keys_of(0))
    other = ReqContext("other")
    rig.manager.on_new_request(other)
    assert rig.manager.match_prefix(keys_of(*range(4)), rig.ctx) == PrefixMatch(4, True)
    rig.step()
    disk.finish(disk.loads[0])
    bucket.finish(bucket.loads[0])
    rig.step()
    assert rig.manager.match_prefix(keys_of(*range(4)), rig.ctx) == PrefixMatch(4, False)
    assert rig.manager.count_sources(keys_of(*range(4)), rig.ctx) == {"DISK": 1, "OBJECT": 2}
    assert rig.manager.count_sources(keys_of(*range(3)), rig.ctx) == {"DISK": 1, "OBJECT": 1}
    assert rig.manager.count_sources(keys_of(*range(4)), other) == {}


def test_a_reservation_expires() -> None:
    keys = keys_of(*range(2))
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(2, [tier], promotion_share=1.0, reservation_deadline=5.0)
    rig.manager.match_prefix(keys, rig.ctx)
    rig.step()
    tier.finish_all()
    rig.step()
    rig.clock.advance(5.0)
    assert rig.manager.prepare_store(keys_of(10), rig.ctx) is not None
    assert rig.stat("reservations_expired") == 2


def test_the_share_of_rows_that_promotions_hold_is_bounded_and_a_refusal_is_final_for_the_request() -> None:
    keys = keys_of(*range(4))
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(8, [tier], promotion_share=0.25)
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(2, True)
    assert rig.stat("promotions_without_room") == 1
    rig.step()
    tier.finish_all()
    rig.step()
    rig.manager.prepare_load(keys[:2], rig.ctx)
    rig.manager.complete_load(keys[:2], rig.ctx)
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(2, False)
    assert rig.manager.lookup(keys[2], rig.ctx) is False
    assert rig.manager.match_prefix(keys, rig.request("r2")) == PrefixMatch(4, True)


def test_a_tiers_running_loads_are_bounded_by_its_share_of_rows() -> None:
    keys = keys_of(*range(8))
    tier = FakeTier(held=set(keys), primary_share=0.25)
    rig = ManagerRig(8, [tier], promotion_share=1.0)
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(2, True)


def test_no_room_in_the_primary_tier_until_the_deadline_is_a_miss_that_is_counted() -> None:
    rig = ManagerRig(2, [FakeTier(held=set(keys_of(0)), load_deadline=5.0)])
    rig.manager.prepare_store(keys_of(*range(10, 12)), rig.ctx)
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is None
    rig.clock.advance(5.0)
    rig.step()
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is False
    assert rig.stat("promotions_without_room") == 1


def test_if_the_owner_leaves_another_asker_inherits_and_what_nobody_wants_is_dropped() -> None:
    keys = keys_of(*range(3))
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(8, [tier])
    heir = rig.request("heir")
    rig.manager.match_prefix(keys, rig.ctx)
    rig.manager.match_prefix(keys[:2], heir)
    rig.manager.on_request_finished(rig.ctx)
    rig.step()
    (job,) = tier.loads
    assert job.req_context.req_id == "heir"
    assert list(job.keys) == keys[:2]
    assert rig.stat("promotions_dropped") == 1
    assert rig.stat("rows_free") == 6
    tier.finish_all()
    rig.step()
    assert rig.stat("rows_reserved") == 2


def test_with_no_asker_left_a_queued_promotion_is_dropped() -> None:
    tier = FakeTier(held=set(keys_of(*range(2))))
    rig = ManagerRig(4, [tier])
    rig.manager.match_prefix(keys_of(*range(2)), rig.ctx)
    rig.manager.on_request_finished(rig.ctx)
    rig.step()
    assert not tier.loads
    assert rig.stat("rows_free") == 4
    assert not rig.manager.has_pending_work()


def test_partial_results_count_and_the_tier_is_not_believed_again_for_that_request() -> None:
    keys = keys_of(*range(3))
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(8, [tier])
    sharer = rig.request("sharer")
    for ctx in (rig.ctx, sharer):
        rig.manager.match_prefix(keys, ctx)
    rig.step()
    tier.finish(tier.loads[0], keys=[keys[0], keys[2]])
    rig.step()
    for ctx in (rig.ctx, sharer):
        assert rig.manager.match_prefix(keys, ctx) == PrefixMatch(1, False)
        assert rig.manager.lookup(keys[2], ctx) is True
    assert rig.stat("rows_free") == 6
    assert rig.manager.match_prefix(keys, rig.request("later")) == PrefixMatch(3, True)


def test_another_tier_may_still_bring_what_one_failed() -> None:
    keys = keys_of(0)
    liar, holder = FakeTier("liar", held=set(keys)), FakeTier("holder", held=set(keys))
    rig = ManagerRig(4, [liar, holder])
    rig.manager.lookup(keys[0], rig.ctx)
    rig.step()
    liar.finish(liar.loads[0], success=False)
    rig.step()
    assert rig.manager.lookup(keys[0], rig.ctx) is None
    rig.step()
    assert holder.loads


def test_what_comes_from_a_slower_tier_also_fills_faster_ones_that_want_it() -> None:
    keys = keys_of(*range(2))
    fast, opted_out, slow = FakeTier("fast"), FakeTier("opted-out", fill=False), FakeTier("slow", held=set(keys))
    rig = ManagerRig(4, [fast, opted_out, slow])
    rig.manager.match_prefix(keys, rig.ctx)
    rig.step()
    slow.finish_all()
    rig.step()
    assert [(list(job.keys), job.is_fill) for job in fast.stores] == [(keys, True)]
    assert not opted_out.stores
    assert not slow.stores


def test_a_fill_for_a_request_that_has_finished_belongs_to_nobody() -> None:
    keys = keys_of(0)
    fast, slow = FakeTier("fast"), FakeTier("slow", held=set(keys))
    rig = ManagerRig(4, [fast, slow])
    rig.manager.match_prefix(keys, rig.ctx)
    rig.step()
    rig.manager.on_request_finished(rig.ctx)
    slow.finish_all()
    rig.step()
    assert fast.calls("on_request_finished") == ["r1"]
    assert [job.req_context.req_id for job in fast.stores] == [""]


# ------------------------------------------------------------------------------------------------------------ deadlines


def test_an_overdue_promotion_is_a_miss_at_once_and_its_rows_stay_away_until_the_job_is_reported() -> None:
    keys = keys_of(*range(2))
    tier = FakeTier(held=set(keys), load_deadline=3.0)
    rig = ManagerRig(2, [tier], promotion_share=1.0)
    rig.manager.match_prefix(keys, rig.ctx)
    rig.step()
    rig.clock.advance(3.0)
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(0, False)
    assert rig.stat("promotions_overdue") == 2
    assert rig.manager.prepare_store(keys, rig.ctx) is None
    assert rig.manager.lookup(keys[0], rig.request("r2")) is False
    tier.finish(tier.loads[0], success=False)
    assert rig.manager.prepare_store(keys, rig.ctx) is not None


def test_at_the_deadline_a_request_goes_on_with_the_leading_blocks_that_have_arrived() -> None:
    keys = keys_of(*range(3))
    fast, slow = (
        FakeTier("fast", held={keys[0]}, load_deadline=3.0),
        FakeTier("slow", held=set(keys[1:]), load_deadline=3.0),
    )
    rig = ManagerRig(8, [fast, slow])
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(3, True)
    rig.step()
    fast.finish_all()
    rig.clock.advance(3.0)
    rig.step()
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(1, False)


def test_a_late_block_is_adopted_unless_it_was_stored_again_meanwhile() -> None:
    keys = keys_of(*range(2))
    tier = FakeTier(held=set(keys), load_deadline=1.0)
    rig = ManagerRig(8, [tier])
    rig.manager.match_prefix(keys, rig.ctx)
    rig.step()
    rig.clock.advance(1.0)
    rig.step()
    rig.manager.prepare_store(keys[:1], rig.ctx)
    tier.finish_all()
    rig.step()
    assert rig.manager.lookup(keys[0], rig.request("r2")) is None
    assert rig.manager.lookup(keys[1], rig.ctx) is True
    assert rig.stat("promotions_adopted") == 1
    assert rig.stat("rows_quarantined") == 0
    rig.manager.complete_store(keys[:1], rig.ctx)
    assert rig.manager.lookup(keys[0], rig.ctx) is True


def test_an_overdue_load_counts_against_the_tiers_share_until_it_is_reported() -> None:
    keys = keys_of(*range(4))
    tier = FakeTier(held=set(keys), load_deadline=1.0, primary_share=0.25)
    rig = ManagerRig(8, [tier])
    rig.manager.match_prefix(keys[:2], rig.ctx)
    rig.step()
    rig.clock.advance(1.0)
    rig.step()
    assert rig.manager.match_prefix(keys[2:], rig.request("r2")) == PrefixMatch(0, False)
    tier.finish_all()
    rig.step()
    assert rig.manager.match_prefix(keys[2:], rig.request("r3")) == PrefixMatch(2, True)


# ----------------------------------------------------------------------------------------------- requests, misbehaviour


def test_tiers_learn_that_a_request_finished_only_when_no_more_cascades_can_follow() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    rig.manager.prepare_store(keys_of(0), rig.ctx)
    rig.manager.on_request_finished(rig.ctx)
    assert tier.calls("on_request_finished") == []
    rig.manager.complete_store(keys_of(0), rig.ctx)
    assert [name for name, _ in tier.log][-2:] == ["submit_store", "on_request_finished"]
    rig.manager.on_request_finished(rig.ctx)
    assert tier.calls("on_request_finished") == ["r1"]


@pytest.mark.parametrize("job_id", [999, 1])
def test_an_unknown_or_duplicate_job_id_takes_the_tier_out_of_service_and_the_engine_goes_on(job_id: int) -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    rig.store(keys_of(0))
    tier.results.append(JobResult(job_id, True))
    rig.step()
    assert rig.stat("misreported_jobs") == 1
    assert rig.stat("tiers_out_of_service") == 1
    rig.store(keys_of(1))
    assert len(tier.calls("submit_store")) == 1
    assert rig.manager.lookup(keys_of(1)[0], rig.ctx) is True


def test_a_tier_that_reports_anothers_job_does_not_end_it() -> None:
    honest, thief = FakeTier("honest"), FakeTier("thief")
    rig = ManagerRig(2, [honest, thief])
    rig.manager.prepare_store(keys_of(*range(2)), rig.ctx)
    rig.manager.complete_store(keys_of(*range(2)), rig.ctx)
    thief.finish_all()
    thief.results.append(JobResult(honest.stores[0].job_id, True))
    rig.step()
    assert rig.manager.prepare_store(keys_of(5), rig.ctx) is None
    honest.finish_all()
    assert rig.manager.prepare_store(keys_of(5), rig.ctx) is not None


@pytest.mark.parametrize("method", ["submit_store", "on_new_request", "touch", "on_schedule_end", "get_finished"])
def test_a_tier_that_raises_is_taken_out_of_service_and_the_engine_goes_on(method: str) -> None:
    broken, healthy = FakeTier("broken", raises={method}), FakeTier("healthy")
    rig = ManagerRig(4, [broken, healthy])
    rig.store(keys_of(0))
    rig.manager.touch(keys_of(0), rig.ctx)
    rig.step()
    assert rig.stat("tiers_out_of_service") == 1
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is True
    assert healthy.calls("submit_store")


def test_what_a_retired_tier_still_brings_is_not_believed() -> None:
    keys = keys_of(0)
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(4, [tier])
    rig.manager.lookup(keys[0], rig.ctx)
    rig.step()
    tier.results.append(JobResult(777, True))
    rig.step()
    assert rig.manager.lookup(keys[0], rig.ctx) is False
    tier.finish_all()
    rig.step()
    assert rig.manager.lookup(keys[0], rig.ctx) is False
    assert rig.stat("rows_free") == 4


def test_touch_reaches_all_tiers_even_for_blocks_the_primary_tier_lacks() -> None:
    fast, slow = FakeTier("fast"), FakeTier("slow")
    rig = ManagerRig(4, [fast, slow])
    rig.manager.touch(keys_of(*range(3)), rig.ctx)
    assert fast.calls("touch") == slow.calls("touch") == [keys_of(*range(3))]


def test_job_ids_grow() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    for number in range(3):
        rig.store(keys_of(number))
    ids = tier.calls("submit_store")
    assert ids == sorted(set(ids))  # type: ignore[type-var]


# ------------------------------------------------------------------------------------------------------ reset, shutdown


def test_after_a_reset_nothing_old_is_served_and_late_loads_are_worthless() -> None:
    keys = keys_of(*range(3))
    tier = FakeTier(held=set(keys), load_deadline=1.0)
    rig = ManagerRig(8, [tier])
    rig.manager.match_prefix(keys[:1], rig.ctx)
    rig.step()
    rig.clock.advance(1.0)
    rig.step()
    rig.manager.match_prefix(keys[1:2], rig.ctx)
    rig.step()
    rig.manager.match_prefix(keys[2:], rig.ctx)
    assert rig.manager.reset_cache()
    late = list(tier.loads)
    assert len(late) == 2
    tier.finish_all()
    rig.step()
    for key in keys:
        assert rig.manager.lookup(key, rig.ctx) is False
    assert rig.stat("rows_free") == 8
    assert rig.stat("rows_quarantined") == 0


def test_a_reset_of_the_primary_tier_alone_ends_the_promotions_into_it() -> None:
    keys = keys_of(*range(2))
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(4, [tier])
    rig.manager.match_prefix(keys, rig.ctx)
    rig.step()
    assert rig.manager.primary_tier.reset_cache()
    tier.finish_all()
    rig.step()
    assert rig.stat("rows_free") == 4
    rig.manager.match_prefix(keys, rig.ctx)
    rig.step()
    tier.finish_all()
    assert rig.manager.match_prefix(keys, rig.ctx) == PrefixMatch(2, False)


def test_rows_of_what_is_still_busy_at_a_reset_stay_quarantined_until_it_ends() -> None:
    tier = FakeTier()
    rig = ManagerRig(2, [tier])
    keys = keys_of(*range(2))
    rig.manager.prepare_store(keys, rig.ctx)
    rig.manager.complete_store(keys, rig.ctx)
    rig.manager.prepare_load(keys[:1], rig.ctx)
    rig.manager.reset_cache()
    assert rig.manager.prepare_store(keys_of(9), rig.ctx) is None
    tier.finish_all()
    assert rig.manager.prepare_store(keys_of(9), rig.ctx) is not None
    assert rig.manager.prepare_store(keys_of(10), rig.ctx) is None
    rig.manager.complete_load(keys[:1], rig.ctx)
    assert rig.manager.prepare_store(keys_of(10), rig.ctx) is not None


def test_a_reset_waits_for_no_job_and_moves_all_tiers_to_a_new_epoch() -> None:
    tier, other = FakeTier("one"), FakeTier("two")
    rig = ManagerRig(4, [tier, other], reset_deadline=2.0)
    rig.store(keys_of(0))
    assert rig.manager.reset_cache()
    deadline = rig.clock() + 2.0
    assert (tier.calls("drain"), other.calls("drain")) == ([], [])
    assert (tier.calls("reset"), other.calls("reset")) == ([deadline], [deadline - 1.0])


def test_a_revision_reaches_all_tiers_and_one_that_names_nothing_resets_nothing() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    keys = keys_of(0)
    rig.store(keys)
    with pytest.raises(ConfigError, match="revision"):
        rig.manager.reset_cache("")
    assert rig.manager.lookup(keys[0], rig.ctx) is True
    assert rig.manager.reset_cache("step-1")
    assert tier.revision == "step-1"


def test_keep_secondary_opts_out_of_the_epoch() -> None:
    keys = keys_of(0)
    tier = FakeTier()
    rig = ManagerRig(4, [tier], keep_secondary=True)
    rig.store(keys)
    assert rig.manager.reset_cache()
    assert tier.calls("reset") == []
    assert rig.manager.lookup(keys[0], rig.ctx) is None


def test_keep_secondary_keeps_nothing_when_a_reset_names_other_weights() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier], keep_secondary=True)
    assert rig.manager.reset_cache("step-1")
    assert (len(tier.calls("reset")), tier.revision) == (1, "step-1")


def test_a_tier_that_cannot_promise_the_reset_is_out_of_service_until_it_can() -> None:
    keys = keys_of(0)
    tier = FakeTier(held=set(keys), resets=False)
    rig = ManagerRig(4, [tier])
    assert rig.manager.reset_cache() is False
    assert rig.manager.lookup(keys[0], rig.ctx) is False
    rig.step()
    assert rig.manager.lookup(keys[0], rig.ctx) is False
    tier.held.clear()
    tier.reset_later = True
    rig.step()
    tier.held.update(keys)
    assert rig.manager.lookup(keys[0], rig.ctx) is None


def test_a_tier_that_has_not_completed_its_reset_gets_every_step() -> None:
    tier = FakeTier(resets=False)
    rig = ManagerRig(4, [tier])
    assert rig.manager.reset_cache() is False
    before = len([name for name, _ in tier.log if name == "on_schedule_end"])
    rig.step()
    assert len([name for name, _ in tier.log if name == "on_schedule_end"]) == before + 1


def test_running_requests_go_on_after_a_reset() -> None:
    rig = ManagerRig(4, [FakeTier()])
    rig.store(keys_of(0))
    rig.manager.reset_cache()
    with pytest.raises(NotReadableError):
        rig.manager.prepare_load(keys_of(0), rig.ctx)
    rig.store(keys_of(0))
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is True


def test_at_shutdown_every_tier_gets_its_turn_even_if_one_raises_and_it_happens_once() -> None:
    broken, healthy = FakeTier("broken", raises={"shutdown"}), FakeTier("healthy")
    rig = ManagerRig(4, [broken, healthy])
    rig.manager.shutdown()
    rig.manager.shutdown()
    assert len(healthy.calls("shutdown")) == 1
    assert len(healthy.calls("drain")) == 1


# --------------------------------------------------------------------------------------------------------------- events


def test_events_come_in_an_order_that_a_consumer_can_apply() -> None:
    rig = ManagerRig(2)
    rig.store(keys_of(*range(2)))
    rig.store(keys_of(2))
    rig.manager.reset_cache()
    known: set[bytes] = set()
    for event in rig.manager.take_events():
        assert event.medium == "CPU"
        for key in event.keys:
            assert (key in known) is event.removed
            (known.discard if event.removed else known.add)(key)
    assert known == set()


def test_events_of_all_tiers_come_in_the_order_in_which_they_happened() -> None:
    class Announcing(FakeTier):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.said: list[OffloadingEvent] = []

        def take_events(self) -> list[OffloadingEvent]:
            said, self.said = self.said, []
            return said

    disk, bucket = Announcing("disk"), Announcing("bucket")
    rig = ManagerRig(1, [disk, bucket])
    happened = []
    for number, tier in enumerate((bucket, disk, bucket)):
        rig.store(keys_of(number))
        disk.finish_all()
        bucket.finish_all()
        rig.step()
        tier.said.append(OffloadingEvent(keys_of(number), "STORAGE", "LOCAL", tier.name, False))
        happened += [("cpu", True)] * bool(number) + [("cpu", False), (tier.name, False)]
    assert [(event.tier, event.removed) for event in rig.manager.take_events()] == happened


def test_a_promotion_announces_its_block_only_when_it_has_arrived() -> None:
    keys = keys_of(0)
    tier = FakeTier(held=set(keys))
    rig = ManagerRig(2, [tier])
    rig.manager.lookup(keys[0], rig.ctx)
    rig.step()
    assert list(rig.manager.take_events()) == []
    tier.finish_all()
    rig.step()
    (event,) = rig.manager.take_events()
    assert (event.keys, event.removed) == (keys, False)
