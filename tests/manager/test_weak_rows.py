"""Waiting cascades hold their rows weakly: stores and promotions may take these rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.manager.weak_rows import LOOK_AT, PART_AT_ONCE, ROWS_AT_ONCE, TAKE_AFTER
from tiering.secondary.contract import JobResult, WaitingStores
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of
from tiering.testing.manager_rig import ManagerRig

K = keys_of(*range(32))
ROWS = 8


def make_rig(*tiers: FakeTier, rows: int = ROWS) -> ManagerRig:
    """Return a rig in which no tier has begun a store for a while."""
    rig = ManagerRig(rows, tiers, promotion_share=1.0)
    rig.clock.advance(1.0)
    return rig


def store(rig: ManagerRig, keys: Sequence[OffloadKey]) -> bool:
    """Store ``keys``, and return False if there is no room; cascades stay open."""
    output = rig.manager.prepare_store(keys, rig.ctx)
    if output is None:
        return False
    rig.manager.complete_store(output.keys_to_store, rig.ctx)
    rig.step()
    return True


def test_a_store_takes_the_rows_of_cascades_that_have_not_begun_the_oldest_and_its_tail_first() -> None:
    tier = FakeTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:4])
    assert store(rig, K[4:8])
    assert store(rig, K[8:11])
    assert set(rig.primary.readable) == {K[0], *K[4:11]}, "the head of the oldest store is worth the most"
    assert rig.stat("cascades_withdrawn") == 3
    tier.finish_all()
    rig.step()
    assert tier.held == {K[0], *K[4:11]}
    assert rig.stat("rows_evictable") == ROWS
    assert rig.stat("jobs_in_flight") == 0


def test_a_promotion_takes_the_rows_of_cascades_that_have_not_begun() -> None:
    tier = FakeTier(held=set(K[20:24]), waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    assert rig.manager.match_prefix(K[20:24], rig.ctx) == PrefixMatch(4, True)
    assert set(rig.primary.readable) == set(K[:4])
    assert (rig.stat("promotions_waited"), rig.stat("promotions_without_room")) == (0, 0)


def test_rows_of_cascades_that_have_begun_are_never_taken() -> None:
    tier = FakeTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    (job,) = tier.stores
    tier.begin(job)
    rig.clock.advance(100.0)
    assert not store(rig, K[8:9])
    assert set(rig.primary.readable) == set(K[:8])


def test_rows_that_are_read_for_another_reason_are_not_taken() -> None:
    tier = FakeTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    rig.manager.prepare_load(K[1:8], rig.ctx)
    assert store(rig, K[8:9])
    assert set(rig.primary.readable) == set(K[1:9])
    rig.manager.prepare_load(K[8:9], rig.ctx)
    assert not store(rig, K[9:10])
    assert rig.stat("cascades_withdrawn") == 1


def test_a_row_is_taken_only_if_no_tier_has_begun_its_cascade() -> None:
    slow, fast = FakeTier("slow", waits=True), FakeTier("fast")
    rig = make_rig(fast, slow)
    assert store(rig, K[:8])
    assert not store(rig, K[8:9])
    assert rig.stat("cascades_withdrawn") == 0, "the cascade to the other tier is not given up in vain"
    fast.finish_all()
    assert store(rig, K[8:9])
    assert rig.stat("cascades_withdrawn") == 1


def test_a_row_that_waits_for_two_tiers_is_given_up_by_both() -> None:
    tiers = FakeTier("a", waits=True), FakeTier("b", waits=True)
    rig = make_rig(*tiers)
    assert store(rig, K[:8])
    assert store(rig, K[8:10])
    assert rig.stat("cascades_withdrawn") == 4
    for tier in tiers:
        tier.finish_all()
    rig.step()
    assert rig.stat("rows_evictable") == ROWS


def test_a_tier_that_makes_progress_keeps_its_cascades_for_as_long_as_a_write_takes() -> None:
    tier = FakeTier(waits=True)
    rig = make_rig(tier)
    tier.begun_at = rig.clock()
    assert store(rig, K[:8])
    assert not store(rig, K[8:9])
    rig.clock.advance(TAKE_AFTER / 2)
    tier.begun_at = rig.clock()
    assert not store(rig, K[8:9])
    rig.clock.advance(TAKE_AFTER)
    tier.begun_at = rig.clock()
    assert store(rig, K[8:9]), "the store has waited long enough"
    assert rig.stat("stores_without_room") == 2
    assert not store(rig, K[9:10]), "the next store waits by itself"


def test_a_promotion_waits_for_a_tier_that_makes_progress_as_long_as_a_write_takes() -> None:
    tier = FakeTier(held=set(K[20:24]), waits=True)
    rig = make_rig(tier)
    tier.begun_at = rig.clock()
    assert store(rig, K[:8])
    assert rig.manager.match_prefix(K[20:22], rig.ctx) == PrefixMatch(0, True)
    rig.clock.advance(TAKE_AFTER)
    tier.begun_at = rig.clock()
    assert rig.manager.match_prefix(K[20:22], rig.ctx) == PrefixMatch(2, True)


def test_blocks_that_another_tier_has_are_taken_at_once() -> None:
    fast, bucket = FakeTier("fast"), FakeTier("bucket", waits=True)
    rig = make_rig(fast, bucket)
    bucket.begun_at = rig.clock()
    assert store(rig, K[:8])
    for job in list(fast.stores):
        fast.finish(job)
    rig.step()
    assert store(rig, K[8:12])
    assert rig.stat("cascades_withdrawn") == 4


def test_blocks_that_the_other_tier_failed_to_store_are_not_taken_at_once() -> None:
    fast, bucket = FakeTier("fast"), FakeTier("bucket", waits=True)
    rig = make_rig(fast, bucket)
    bucket.begun_at = rig.clock()
    assert store(rig, K[:8])
    for job in list(fast.stores):
        fast.finish(job, success=False)
    rig.step()
    assert not store(rig, K[8:12])


def test_no_cascade_is_given_up_for_a_store_that_finds_no_room_all_the_same() -> None:
    tier = FakeTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    rig.manager.prepare_load(K[:6], rig.ctx)
    assert not store(rig, K[8:12])
    assert rig.stat("cascades_withdrawn") == 0


def test_the_blocks_of_a_store_are_not_taken_for_its_other_blocks() -> None:
    tier = FakeTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    output = rig.manager.prepare_store([*K[6:8], *K[8:10]], rig.ctx)
    assert output is not None
    assert not {*K[6:10]} & set(output.evicted_keys)


def test_a_block_that_lost_its_cascade_and_kept_its_row_is_reported_at_its_next_use() -> None:
    """More than one of many waiting rows is taken at once; the others keep their blocks."""
    tier = FakeTier(waits=True)
    rig = make_rig(tier, rows=2 * PART_AT_ONCE)
    assert store(rig, K)
    rig.manager.touch(K, rig.ctx)
    rig.manager.touch(K, rig.ctx)
    assert tier.calls("used") == [K], "the tier has settled these blocks"
    assert store(rig, keys_of(100))
    assert rig.stat("cascades_withdrawn") == 2
    assert set(K) - set(rig.primary.readable) == {K[31]}
    rig.manager.touch(K, rig.ctx)
    assert tier.calls("used")[1:] == [[K[30]]]


class LyingTier(FakeTier):
    """A tier that answers with ``waiting`` and ``given`` instead of the truth."""

    waiting: Any = None
    given: Any = None

    def waiting_stores(self, job_ids: Sequence[int]) -> Any:
        return super().waiting_stores(job_ids) if self.waiting is None else self.waiting

    def withdraw_stores(self, rows: Mapping[int, Collection[int]]) -> Any:
        return super().withdraw_stores(rows) if self.given is None else self.given


def nothing_is_freed(rig: ManagerRig, tier: FakeTier) -> bool:
    """Store a block too many; return True if the tier is out of service and each block has its row."""
    before = dict(rig.primary.readable)
    refused = not store(rig, K[16:17]) and not store(rig, K[17:18])
    counted = (rig.stat("misreported_jobs"), rig.stat("tiers_out_of_service"), rig.stat("cascades_withdrawn"))
    return refused and counted == (1, 1, 0) and dict(rig.primary.readable) == before


@pytest.mark.parametrize(
    "given",
    [
        [(999, [0])],
        [(1, [6])],
        [(1, [3, 3])],
        [(1, [-5])],
        [(1, [ROWS])],
        [(1, [3.0])],
        [(1, ["3"])],
        [(1, [None])],
        [(1, None)],
        [(1, 3)],
        [([], [3])],
        [(1, [3]), (999, [0])],
        [(1, [3]), (1, [3])],
        [(1, [3]), (2, [6]), (3, [9])],
        [(1, [3], 1)],
        [1, 2],
        {1: [3]},
        7,
    ],
    ids=repr,
)
def test_a_tier_that_withdraws_what_it_was_not_asked_for_is_taken_out_of_service(
    given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tier = LyingTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:4])
    assert store(rig, K[4:8])
    tier.given = given
    assert nothing_is_freed(rig, tier)
    assert "its withdraw_stores gave up rows that are not to be withdrawn" in caplog.text


def test_a_tier_that_withdraws_more_than_it_was_asked_for_is_taken_out_of_service() -> None:
    """The other rows of the job may be read: no answer says that they have not begun."""
    tier = LyingTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    tier.given = [(1, [7, 6])]
    assert nothing_is_freed(rig, tier)


@pytest.mark.parametrize(
    "waiting",
    [
        ([], 0.0),
        ([[0], [4]], 0.0),
        ([[4]], 0.0),
        ([[0, 1, 2, 3, 4]], 0.0),
        ([[0, 0]], 0.0),
        ([[-1]], 0.0),
        ([[ROWS]], 0.0),
        ([[2.0]], 0.0),
        ([["0"]], 0.0),
        ([[[0]]], 0.0),
        ([range(10**9)], 0.0),
        ([None], 0.0),
        ([3], 0.0),
        (3, 0.0),
        ([[0]], "now"),
        ([[0]], None),
    ],
    ids=repr,
)
def test_a_tier_whose_waiting_rows_are_not_its_own_is_taken_out_of_service(
    waiting: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tier = LyingTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:4])
    assert store(rig, K[4:8])
    tier.waiting = WaitingStores(*waiting)
    assert nothing_is_freed(rig, tier)
    assert "its waiting_stores returned what is not its own" in caplog.text


@pytest.mark.parametrize("waiting", [([[0]], 0.0), [[0]], 7, "text"], ids=repr)
def test_a_tier_whose_answer_is_of_another_type_is_taken_out_of_service(waiting: Any) -> None:
    tier = LyingTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    tier.waiting = waiting
    assert nothing_is_freed(rig, tier)


@pytest.mark.parametrize("method", ["waiting_stores", "withdraw_stores"])
def test_a_tier_that_raises_when_rows_are_needed_is_taken_out_of_service(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("told to raise")

    tier = FakeTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    monkeypatch.setattr(tier, method, fail)
    assert not store(rig, K[8:9])
    assert (rig.stat("tiers_out_of_service"), rig.stat("cascades_withdrawn")) == (1, 0)
    assert set(rig.primary.readable) == set(K[:8])


def test_a_time_that_is_no_number_is_no_trouble() -> None:
    """Such a tier is not taken for one in trouble: its rows are taken after the wait only."""
    tier = LyingTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    tier.waiting = WaitingStores([list(range(8))], float("nan"))
    assert not store(rig, K[8:9])
    rig.clock.advance(TAKE_AFTER)
    assert store(rig, K[8:9])


class ArrayTier(FakeTier):
    """A tier that answers with arrays, not lists."""

    def waiting_stores(self, job_ids: Sequence[int]) -> Any:
        waiting = super().waiting_stores(job_ids)
        return waiting and waiting._replace(rows=[np.array(rows, np.int32) for rows in waiting.rows])  # type: ignore[misc]

    def withdraw_stores(self, rows: Mapping[int, Collection[int]]) -> Any:
        return [(job_id, np.array(given)) for job_id, given in super().withdraw_stores(rows)]


def test_a_tier_may_answer_with_arrays() -> None:
    tier = ArrayTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    rig.manager.prepare_load(K[7:8], rig.ctx)
    assert store(rig, K[8:9]), "the eviction passes over the block that is being loaded"
    rig.manager.complete_load(K[7:8], rig.ctx)
    assert store(rig, K[9:10])
    assert K[7] not in rig.primary.readable
    assert (rig.stat("cascades_withdrawn"), rig.stat("tiers_out_of_service")) == (2, 0)
    tier.finish_all()
    rig.step()
    assert rig.stat("rows_evictable") == ROWS


def test_blocks_that_the_other_tier_has_declined_are_not_taken_at_once() -> None:
    """A tier that declined a block has settled it too, but the block is nowhere else."""
    fast, bucket = FakeTier("fast"), FakeTier("bucket", waits=True)
    rig = make_rig(fast, bucket)
    bucket.begun_at = rig.clock()
    assert store(rig, K[:8])
    for job in list(fast.stores):
        fast.finish(job, success=False)
    rig.step()
    rig.manager.touch(K[:8], rig.ctx)
    assert fast.calls("used") == [K[:8]]
    assert not store(rig, K[8:9])
    rig.clock.advance(TAKE_AFTER)
    bucket.begun_at = rig.clock()
    assert store(rig, K[8:9])


def test_blocks_that_came_from_another_tier_are_taken_at_once() -> None:
    fast, bucket = FakeTier("fast", waits=True), FakeTier("bucket", held=set(K[:8]))
    rig = make_rig(fast, bucket)
    assert rig.manager.match_prefix(K[:8], rig.ctx) == PrefixMatch(8, True)
    rig.step()
    bucket.finish_all()
    rig.step()
    rig.manager.prepare_load(K[:8], rig.ctx)
    rig.manager.complete_load(K[:8], rig.ctx)
    fast.begun_at = rig.clock()
    assert store(rig, K[8:9])


# ------------------------------------------------------------------------------------------ cost, in rows looked at


def full_of_small_stores(tier: FakeTier, rows: int, **finish: Any) -> tuple[ManagerRig, list[OffloadKey]]:
    """Return a rig whose rows all wait in stores of one block each, and the keys of these blocks."""
    rig, keys = make_rig(tier, rows=rows), keys_of(*range(rows))
    for key in keys:
        assert store(rig, [key])
    tier.asked_about.clear()
    return rig, keys


def test_a_search_looks_at_a_bounded_number_of_rows_however_many_wait() -> None:
    tier = FakeTier(waits=True)
    rig, keys = full_of_small_stores(tier, 4096)
    assert store(rig, keys_of(5000))
    assert sum(map(len, tier.asked_about)) <= 2 * ROWS_AT_ONCE
    assert rig.stat("cascades_withdrawn") == ROWS_AT_ONCE
    assert [job.keys[0] for job in tier.stores[:2]] == [keys[ROWS_AT_ONCE], keys[ROWS_AT_ONCE + 1]]
    tier.asked_about.clear()
    tier.begun_at = rig.clock()
    rig.manager.prepare_load(keys[ROWS_AT_ONCE:2048], rig.ctx)
    for number in range(6000, 6000 + ROWS_AT_ONCE):
        store(rig, keys_of(number))
    assert max(map(len, tier.asked_about)) <= LOOK_AT


def test_a_search_asks_about_each_cascade_once_though_it_looks_twice() -> None:
    tier = FakeTier(waits=True)
    rig, keys = full_of_small_stores(tier, 4096)
    rig.manager.prepare_load(keys[: 2 * ROWS_AT_ONCE], rig.ctx)
    assert store(rig, keys_of(5000))
    asked = [job_id for job_ids in tier.asked_about for job_id in job_ids]
    assert len(tier.asked_about) == 2, "the first look finds no row, because all of them are being loaded"
    assert len(set(asked)) == len(asked) == LOOK_AT


def test_a_store_that_must_wait_for_the_only_tier_looks_at_few_rows() -> None:
    tier = FakeTier(waits=True)
    rig, _ = full_of_small_stores(tier, 4096)
    tier.begun_at = rig.clock()
    assert not store(rig, keys_of(5000))
    assert 0 < sum(map(len, tier.asked_about)) <= 2 * ROWS_AT_ONCE
    rig.clock.advance(TAKE_AFTER)
    tier.begun_at = rig.clock()
    assert store(rig, keys_of(5000))


def test_the_rows_that_are_looked_at_are_few_for_each_row_that_is_taken() -> None:
    tier = FakeTier(waits=True)
    rig, _ = full_of_small_stores(tier, 4096)
    for number in range(5000, 7000):
        assert store(rig, keys_of(number))
    assert sum(map(len, tier.asked_about)) <= 3 * rig.stat("cascades_withdrawn")


def test_rows_that_nothing_can_free_do_not_hide_the_rows_behind_them() -> None:
    tier = FakeTier(waits=True)
    rig, keys = full_of_small_stores(tier, 2048)
    rig.manager.prepare_load(keys[:1500], rig.ctx)
    refused = 0
    while not store(rig, keys_of(5000)):
        refused += 1
        assert refused <= 2048 // LOOK_AT
    assert refused > 1
    assert keys[1500] not in rig.primary.readable or rig.stat("cascades_withdrawn") > 0


def test_a_store_of_several_blocks_gets_its_rows_by_several_searches() -> None:
    """No search alone finds enough rows: nearly all of them are being loaded."""
    tier = FakeTier(waits=True)
    rig, keys = full_of_small_stores(tier, 2048)
    rare = keys[::100]
    rig.manager.prepare_load([key for key in keys if key not in set(rare)], rig.ctx)
    refused = 0
    while not store(rig, keys_of(*range(5000, 5008))):
        refused += 1
        assert max(map(len, tier.asked_about)) <= LOOK_AT + 8
        assert refused <= 2048 // LOOK_AT
    assert refused > 1
    assert rig.stat("cascades_withdrawn") == 8
    assert len(set(rare) & set(rig.primary.readable)) == len(rare) - 8


def test_rows_that_a_search_has_found_and_that_are_in_use_by_now_are_not_taken() -> None:
    tier = FakeTier(waits=True)
    rig, keys = full_of_small_stores(tier, 1024)
    rare = keys[::100]
    rig.manager.prepare_load([key for key in keys if key not in set(rare)], rig.ctx)
    assert not store(rig, keys_of(*range(5000, 5008)))
    rig.manager.prepare_load(rare[:2], rig.ctx)
    tier.begin(tier.stores[200])
    for _ in range(2 * 1024 // LOOK_AT):
        if store(rig, keys_of(*range(5000, 5008))):
            break
    assert {*rare[:2], keys[200]} <= set(rig.primary.readable)
    assert rig.stat("cascades_withdrawn") == 8


def test_a_search_begins_again_with_the_oldest_rows() -> None:
    """They were in use when a search passed over them, and new stores have come since."""
    tier = FakeTier(waits=True)
    rig, keys = full_of_small_stores(tier, 1024)
    rig.manager.prepare_load(keys, rig.ctx)
    assert not store(rig, keys_of(5000))
    assert not store(rig, keys_of(5000))
    rig.manager.complete_load(keys, rig.ctx)
    for number in range(5001, 5001 + 1024):
        assert store(rig, keys_of(number))
    assert not set(keys) & set(rig.primary.readable)


def test_cascades_of_a_tier_that_is_out_of_service_are_not_looked_at_again() -> None:
    broken, tier = FakeTier("broken", waits=True), FakeTier("tier", waits=True)
    rig = ManagerRig(600, (broken, tier), promotion_share=1.0)
    rig.clock.advance(1.0)
    keys = keys_of(*range(600))
    for key in keys[:300]:
        assert store(rig, [key])
    broken.raises.add("submit_store")
    for key in keys[300:]:
        assert store(rig, [key])
    refused = 0
    while not store(rig, keys_of(5000)):
        refused += 1
        assert refused <= 4
    jobs = rig.manager._jobs
    assert jobs.weak.rows <= 600 < len(jobs), "none of the broken tier's 300 jobs is left in the order"
    broken.asked_about.clear()
    for number in range(5001, 5200):
        assert store(rig, keys_of(number)), "the first search has passed over the broken tier's rows for good"
    assert broken.asked_about == []


def test_a_reset_and_a_shutdown_end_jobs_that_lost_blocks() -> None:
    tier = FakeTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    assert store(rig, K[8:10])
    rig.manager.reset_cache()
    assert rig.stat("rows_quarantined") == ROWS
    tier.finish_all()
    rig.step()
    assert (rig.stat("rows_quarantined"), rig.stat("rows_free")) == (0, ROWS)


def test_a_tier_that_reports_blocks_as_stored_that_it_gave_up_goes_out_of_service() -> None:
    tier = FakeTier(waits=True)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    assert store(rig, K[8:9])
    tier.results.append(JobResult(tier.stores[0].job_id, True))
    rig.step()
    assert rig.stat("misreported_jobs") == rig.stat("tiers_out_of_service") == 1
