"""Waiting cascades hold their rows weakly: stores and promotions may take these rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.transfer import Rows
from tiering.manager.weak_rows import PART_AT_ONCE, TAKE_AFTER
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
    """A tier that answers a withdrawal with ``answer``."""

    answer: tuple[int, list[int]]

    def withdraw_stores(self, rows: Collection[int]) -> Sequence[tuple[int, Rows]]:
        job_id, given = self.answer
        return [(job_id, np.array(given, np.int64))]


@pytest.mark.parametrize("answer", [(999, [0]), (1, [6]), (1, [3, 3])], ids=["job", "rows", "a row twice"])
def test_a_tier_that_withdraws_what_is_not_its_own_is_taken_out_of_service(
    answer: tuple[int, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    tier = LyingTier(waits=True)
    tier.answer = answer
    rig = make_rig(tier)
    assert store(rig, K[:4])
    assert store(rig, K[4:8])
    assert not store(rig, K[8:9])
    assert (rig.stat("misreported_jobs"), rig.stat("tiers_out_of_service")) == (1, 1)
    assert f"withdrew rows of job {answer[0]}" in caplog.text
    assert set(rig.primary.readable) == set(K[:8])


class ListTier(FakeTier):
    """A tier that answers a withdrawal with lists, not arrays."""

    def withdraw_stores(self, rows: Collection[int]) -> Any:
        return [(job_id, given.tolist()) for job_id, given in super().withdraw_stores(rows)]


def test_a_tier_may_withdraw_rows_in_a_list() -> None:
    tier = ListTier(waits=True)
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
