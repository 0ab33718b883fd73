"""Promotions before any lookup: for requests in the engine's queue, and for prefetches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.manager_rig import ManagerRig
from tiering.api.request import ReqContext
from tiering.manager import early, prefix_search
from tiering.secondary.contract import PrefixAnswer
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

KEYS = keys_of(*range(24))
ROW = 16


def rig_of(held: list[bytes], rows: int = 16, **options: float) -> tuple[ManagerRig, FakeTier]:
    tier = FakeTier(held=set(held))
    return ManagerRig(rows, [tier], **options), tier


def loading(tier: FakeTier) -> list[bytes]:
    return [key for job in tier.loads for key in job.keys]


def end_loads(rig: ManagerRig, tier: FakeTier) -> None:
    for job in list(tier.loads):
        tier.finish(job)
    rig.step()


# ------------------------------------------------------------------------------------------------- requests in a queue


def test_blocks_of_a_request_in_the_queue_are_promoted_before_it_is_looked_up() -> None:
    rig, tier = rig_of(KEYS[:4])
    rig.manager.promote_early(KEYS[:6], rig.ctx)
    rig.step()
    assert loading(tier) == KEYS[:4]
    end_loads(rig, tier)
    match = rig.manager.match_prefix(KEYS[:6], rig.ctx)
    assert (match.hits, match.pending) == (4, False)
    assert rig.manager.count_sources(KEYS[:4], rig.ctx) == {"FAKE": 4}
    assert rig.stat("rows_reserved") == 4


def test_early_promotions_take_half_of_the_rows_of_promotions_and_the_rest_later() -> None:
    rig, tier = rig_of(KEYS[:12])
    rig.manager.promote_early(KEYS[:12], rig.ctx)
    rig.step()
    assert loading(tier) == KEYS[:4], "a quarter of 16 rows"
    end_loads(rig, tier)
    rig.step()
    assert loading(tier) == [], "the first four are reserved"
    match = rig.manager.match_prefix(KEYS[:12], rig.ctx)
    assert (match.hits, match.pending) == (8, True), "a lookup has all rows of promotions"


def test_what_was_not_begun_is_dropped_when_the_request_leaves() -> None:
    rig, tier = rig_of(KEYS[:12])
    rig.manager.promote_early(KEYS[:12], rig.ctx)
    rig.manager.on_request_finished(rig.ctx)
    rig.step()
    assert (loading(tier), rig.stat("promotions_dropped")) == ([], 4)
    rig.step()
    assert not rig.manager.has_pending_work()
    assert rig.primary.free == 16


def test_a_tier_that_is_undecided_is_looked_up_again() -> None:
    rig, tier = rig_of([])
    tier.unknown = set(KEYS[:4])
    rig.manager.promote_early(KEYS[:4], rig.ctx)
    rig.step()
    assert loading(tier) == []
    tier.unknown, tier.held = set(), set(KEYS[:4])
    rig.clock.advance(early.UNDECIDED_PAUSE)
    rig.step()
    assert loading(tier) == KEYS[:4]


def test_more_holes_than_one_search_fills_are_filled_by_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_search, "MAX_RUNS", 2)
    rig, tier = rig_of(KEYS, rows=64)
    rig.store(KEYS[1:8:2])
    rig.manager.promote_early(KEYS[:8], rig.ctx)
    rig.step()
    rig.step()
    assert loading(tier) == KEYS[:8:2]


def test_a_lookup_asks_the_tiers_that_early_promotions_leave_out() -> None:
    always, auto = FakeTier("always", held=set(KEYS[:2])), FakeTier("auto", held=set(KEYS), load_or_compute="auto")
    rig = ManagerRig(32, [always, auto])
    rig.manager.note_compute([1.0])
    rig.manager.promote_early(KEYS[:6], rig.ctx)
    rig.step()
    assert (loading(always), loading(auto)) == (KEYS[:2], [])
    match = rig.manager.match_prefix(KEYS[:6], rig.ctx)
    assert (match.hits, match.pending) == (6, True)
    rig.step()
    assert loading(auto) == KEYS[2:6]


def test_no_block_becomes_a_miss_for_the_request() -> None:
    rig, tier = rig_of(KEYS[:12], promotion_share=0.1)
    rig.manager.promote_early(KEYS[:12], rig.ctx)
    rig.step()
    assert (loading(tier), rig.stat("promotions_without_room"), rig.stat("promotions_waited")) == ([], 0, 0)
    assert rig.manager.match_prefix(KEYS[:12], rig.ctx).hits == 1


def test_a_request_that_may_not_load_promotes_nothing() -> None:
    rig, tier = rig_of(KEYS[:4])
    rig.manager.promote_early(KEYS[:4], rig.request("r2", load=False))
    rig.step()
    assert (loading(tier), tier.asked) == ([], [])


def test_without_secondary_tiers_nothing_waits() -> None:
    rig = ManagerRig(8)
    rig.manager.promote_early(KEYS[:4], rig.ctx)
    rig.manager.prefetch(KEYS[:4], b"", 100.0)
    assert not rig.manager.has_pending_work()


# ---------------------------------------------------------------------------------------------------------- prefetches


def test_a_prefetch_brings_what_a_slower_tier_holds_and_reserves_nothing() -> None:
    rig, tier = rig_of(KEYS[:4])
    rig.manager.prefetch(KEYS[:6], b"", 100.0 * ROW)
    assert rig.manager.has_pending_work()
    rig.step()
    assert loading(tier) == KEYS[:4]
    end_loads(rig, tier)
    assert [key for key in KEYS if key in rig.primary.readable] == KEYS[:4]
    assert (rig.stat("rows_reserved"), rig.stat("blocks_prefetched")) == (0, 4)
    assert not rig.manager.has_pending_work()
    (ended,) = (argument for call, argument in tier.log if call == "on_request_finished")
    assert str(ended).startswith("kv_tiering prefetch ")


def test_a_prefetch_may_be_larger_than_the_rows_of_early_promotions() -> None:
    rig, tier = rig_of(KEYS[:12])
    rig.manager.prefetch(KEYS[:12], b"", 100.0 * ROW)
    rig.step()
    for end in (4, 8, 12):
        assert loading(tier) == KEYS[end - 4 : end]
        end_loads(rig, tier)
    assert [key for key in KEYS if key in rig.primary.readable] == KEYS[:12]
    assert not rig.manager.has_pending_work()


def test_a_prefetch_goes_on_behind_blocks_that_another_request_loads() -> None:
    tier = FakeTier(held=set(KEYS[:6]), load_or_compute="auto")
    rig = ManagerRig(32, [tier])
    rig.manager.note_compute([1.0])
    rig.manager.match_prefix(KEYS[:2], rig.ctx)
    rig.manager.prefetch(KEYS[:6], b"", 100.0 * ROW)
    rig.step()
    assert loading(tier) == KEYS[:6]


def test_an_engine_without_requests_steps_for_a_prefetch_only_while_it_begins_something() -> None:
    rig, tier = rig_of([])
    tier.unknown = set(KEYS)
    rig.manager.prefetch(KEYS[:8], b"", 100.0 * ROW)
    rig.step()
    assert rig.manager.has_pending_work()
    rig.clock.advance(early.AWAKE_SECONDS)
    rig.step()
    assert not rig.manager.has_pending_work()
    tier.unknown, tier.held = set(), set(KEYS[:8])
    rig.clock.advance(1.0)
    rig.step()
    assert loading(tier) == KEYS[:4], "the steps of other requests let it go on"
    rig.clock.advance(early.AWAKE_SECONDS)
    assert rig.manager.has_pending_work(), "a load is in flight"
    end_loads(rig, tier)
    assert loading(tier) == KEYS[4:8]


def test_a_slow_bound_keeps_no_engine_awake() -> None:
    rig, tier = rig_of(KEYS[:4])
    rig.manager.prefetch(KEYS[:4], b"", 0.1 * ROW)
    rig.step()
    assert loading(tier) == KEYS[:1]
    end_loads(rig, tier)
    rig.clock.advance(early.AWAKE_SECONDS)
    assert not rig.manager.has_pending_work()


def test_an_undecided_tier_is_asked_less_and_less_often() -> None:
    rig, tier = rig_of([])
    tier.unknown = set(KEYS)
    rig.manager.promote_early(KEYS[:8], rig.ctx)
    rig.manager.prefetch(KEYS[:8], b"", 100.0 * ROW)
    for _ in range(200):
        rig.step()
        rig.clock.advance(0.01)
    assert 8 <= len(tier.asked) <= 16
    tier.unknown, tier.held = set(), set(KEYS[:8])
    rig.clock.advance(1.0)
    rig.step()
    assert loading(tier)


def test_the_blocks_of_a_session_are_brought_behind_those_that_no_tier_holds() -> None:
    held = [KEYS[1], KEYS[2], KEYS[5]]
    for has_holes, brought in ((False, []), (True, held)):
        rig, tier = rig_of(held)
        rig.manager.prefetch(KEYS[:8], b"", 100.0 * ROW, has_holes=has_holes)
        rig.step()
        assert loading(tier) == brought
        end_loads(rig, tier)
        rig.step()
        assert not rig.manager._early.waiting


def test_one_look_passes_over_a_bounded_number_of_missing_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "HOLES_PER_LOOK", 4)
    rig, tier = rig_of(KEYS[10:12])
    rig.manager.prefetch(KEYS[:12], b"", 100.0 * ROW, has_holes=True)
    rig.step()
    assert (loading(tier), len(tier.asked)) == ([], 4)
    rig.step()
    rig.step()
    assert loading(tier) == KEYS[10:12]


def test_blocks_that_others_load_are_no_prefetched_ones_and_cost_no_credit() -> None:
    rig, tier = rig_of(KEYS[:8], rows=32)
    rig.manager.match_prefix(KEYS[:4], rig.ctx)
    rig.step()
    rig.manager.prefetch(KEYS[:8], b"", 4.0 * ROW)
    for _ in range(3):
        rig.step()
        end_loads(rig, tier)
    assert rig.stat("blocks_prefetched") == 4
    assert set(KEYS[:8]) <= set(rig.primary.readable)


def test_no_request_of_a_client_has_the_id_of_a_prefetch() -> None:
    rig, tier = rig_of(KEYS[:4])
    named = [rig.request(f"kv_tiering prefetch {number}") for number in range(4)]
    for _ in range(3):
        rig.manager.prefetch(KEYS[:4], b"", 100.0 * ROW)
    rig.step()
    end_loads(rig, tier)
    assert [rig.manager.match_prefix(KEYS[:4], ctx).hits for ctx in named] == [4] * 4
    assert rig.manager._known.keys() >= {ctx.req_id for ctx in named}


def test_a_prefetch_larger_than_the_cpu_tier_brings_each_block_once() -> None:
    rig, tier = rig_of(KEYS)
    rig.manager.prefetch(KEYS, b"", 100.0 * ROW)
    for _ in range(12):
        rig.step()
        end_loads(rig, tier)
    assert rig.stat("blocks_prefetched") == len(KEYS)
    assert not rig.manager.has_pending_work()


def test_the_bound_of_one_tenant_does_not_delay_another_one() -> None:
    rig, tier = rig_of(KEYS)
    rig.manager.prefetch(KEYS[:8], b"a", 2.0 * ROW)
    rig.manager.prefetch(KEYS[8:16], b"a", 2.0 * ROW)
    rig.manager.prefetch(KEYS[16:18], b"b", 2.0 * ROW)
    rig.step()
    assert loading(tier) == [*KEYS[:2], *KEYS[16:18]]
    end_loads(rig, tier)
    rig.step()
    assert loading(tier) == []
    rig.clock.advance(1.0)
    rig.step()
    assert len(loading(tier)) == 2
    assert set(loading(tier)) <= set(KEYS[2:16])


def test_a_prefetch_ends_after_its_time_whatever_is_left() -> None:
    rig, tier = rig_of([])
    tier.unknown = set(KEYS)
    rig.manager.prefetch(KEYS[:8], b"", 2.0 * ROW)
    rig.step()
    assert rig.manager.has_pending_work()
    rig.clock.advance(early.PATIENCE)
    rig.step()
    assert not rig.manager.has_pending_work()


def test_a_prefetch_whose_time_is_over_begins_nothing_more() -> None:
    rig, tier = rig_of(KEYS[:4])
    rig.manager.prefetch(KEYS[:4], b"", 100.0 * ROW)
    rig.clock.advance(early.PATIENCE)
    rig.step()
    assert (loading(tier), rig.manager.has_pending_work()) == ([], False)


def test_a_prefetch_for_later_begins_at_its_time() -> None:
    rig, tier = rig_of(KEYS[:4])
    rig.manager.prefetch(KEYS[:4], b"", 100.0 * ROW, 8.0)
    rig.clock.advance(7.9)
    rig.step()
    assert (loading(tier), rig.manager.has_pending_work()) == ([], False)
    rig.clock.advance(0.1)
    rig.step()
    assert loading(tier) == KEYS[:4]


def test_a_tenant_has_a_bounded_number_of_prefetches() -> None:
    rig, _ = rig_of([])
    for _ in range(early.MOST_PREFETCHES + 3):
        rig.manager.prefetch(KEYS[:1], b"a", ROW)
    rig.manager.prefetch(KEYS[:1], b"b", ROW)
    assert len(rig.manager._early.waiting) == early.MOST_PREFETCHES + 1
    for _ in range(4):
        rig.step()
    assert not rig.manager.has_pending_work()
    rig.manager.prefetch(KEYS[:1], b"a", ROW)
    assert len(rig.manager._early.waiting) == 1


def test_the_credit_of_a_bounded_number_of_tenants_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MOST_TENANTS", 2)
    rig, _ = rig_of(KEYS)
    for tenant in (b"a", b"b", b"c"):
        rig.manager.prefetch(KEYS[:1], tenant, ROW)
    rig.step()
    assert list(rig.manager._early._credit) == [b"b", b"c"]


def test_a_reset_ends_prefetches_and_early_promotions() -> None:
    rig, tier = rig_of(KEYS)
    rig.manager.prefetch(KEYS[:8], b"", 2.0 * ROW)
    rig.manager.prefetch(KEYS[:8], b"", 2.0 * ROW, 5.0)
    rig.manager.promote_early(KEYS[8:20], rig.ctx)
    rig.step()
    rig.manager.reset_cache()
    for job in list(tier.loads):
        tier.finish(job)
    rig.clock.advance(9.0)
    rig.step()
    assert (loading(tier), rig.manager.has_pending_work(), rig.primary.free) == ([], False, 16)


def test_nothing_begins_early_while_a_request_waits_for_rows() -> None:
    rig, tier = rig_of(KEYS)
    rig.manager.match_prefix(KEYS[:8], rig.request("r2"))
    rig.manager.match_prefix(KEYS[8:12], rig.request("r3"))
    rig.step()
    assert rig.stat("promotions_waited") == 1
    rig.manager.promote_early(KEYS[12:14], rig.ctx)
    rig.manager.prefetch(KEYS[14:16], b"", 100.0 * ROW)
    rig.step()
    assert not set(loading(tier)) & set(KEYS[12:])


def test_a_prefetch_without_a_bound_brings_all_blocks_at_once() -> None:
    rig, tier = rig_of(KEYS[:4], rows=64)
    rig.manager.prefetch(KEYS[:6], b"tenant", math.inf)
    rig.step()
    assert loading(tier) == KEYS[:4]


def test_a_search_of_a_prefetch_looks_at_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "BLOCKS_PER_LOOK", 4)
    rig, tier = rig_of([*KEYS[1:10], *KEYS[12:14]], rows=64)
    asked: list[int] = []
    lookup_prefix = tier.lookup_prefix

    def record(keys: Sequence[bytes], ctx: ReqContext) -> PrefixAnswer:
        asked.append(len(keys))
        return lookup_prefix(keys, ctx)

    monkeypatch.setattr(tier, "lookup_prefix", record)
    rig.manager.prefetch(KEYS, b"tenant", 1000.0 * ROW, has_holes=True)
    brought: list[bytes] = []
    for _ in range(8):
        rig.step()
        brought += loading(tier)
        end_loads(rig, tier)
    assert brought == [*KEYS[1:10], *KEYS[12:14]]
    assert max(asked) == 4


def test_prefetches_that_wait_for_their_time_are_shared_fairly_by_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MOST_WAITING", 6)
    rig, tier = rig_of(KEYS)
    for number in range(8):
        rig.manager.prefetch(KEYS[number : number + 1], b"greedy", 100.0 * ROW, 10.0 + number)
    for number in range(8, 12):
        rig.manager.prefetch(KEYS[number : number + 1], b"late", 100.0 * ROW, 1.0)
    rig.step()
    assert loading(tier) == []
    begun: list[bytes] = []
    for _ in range(40):
        rig.clock.advance(0.5)
        rig.step()
        begun += loading(tier)
        end_loads(rig, tier)
    assert begun == [*KEYS[8:11], *KEYS[:3]], "three each, the earliest ones"
