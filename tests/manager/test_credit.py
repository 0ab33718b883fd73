"""Blocks wait in a queue until their tier has credit for them, and may lose their rows meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.request import OffloadPolicy, ReqContext
from tiering.manager.cascade_queue import NOBODY
from tiering.manager.jobs import COUNTS_OVERDUE
from tiering.manager.row_broker import LOOK_AT, STALLED_AFTER, TAKE_AFTER
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(40))
ROWS = 8


def make_rig(*tiers: FakeTier, rows: int = ROWS) -> ManagerRig:
    """Return a rig in which time has passed since all tiers began."""
    rig = ManagerRig(rows, tiers, promotion_share=1.0)
    rig.clock.advance(10.0)
    return rig


def store(rig: ManagerRig, keys: Sequence[OffloadKey], ctx: ReqContext | None = None, *, is_last: bool = False) -> bool:
    """Store ``keys``, and return False if there is no room now; cascades stay open."""
    ctx = ctx or rig.ctx
    output = rig.manager.prepare_store(keys, ctx, is_last=is_last)
    if output is None:
        return False
    rig.manager.complete_store(output.keys_to_store, ctx)
    rig.step()
    return True


def submitted(tier: FakeTier) -> list[list[OffloadKey]]:
    return [list(job.keys) for job in tier.stores]


# --------------------------------------------------------------------------------------------------------------- credit


def test_no_more_blocks_are_submitted_than_a_tier_has_credit_for() -> None:
    tier = FakeTier(allowance=3)
    rig = make_rig(tier)
    assert store(rig, K[:5])
    assert submitted(tier) == [K[:3]]
    assert (rig.stat("blocks_queued"), rig.stat("jobs_in_flight")) == (2, 1)
    tier.finish(tier.stores[0])
    rig.step()
    assert submitted(tier) == [K[3:5]]
    assert rig.stat("blocks_queued") == 0
    tier.finish_all()
    rig.step()
    assert tier.held == set(K[:5])
    assert rig.stat("rows_evictable") == 5


def test_a_tier_without_credit_of_its_own_gets_each_block_at_once() -> None:
    tier = FakeTier(allowance=0, takes_all=True)
    rig = make_rig(tier)
    output = rig.manager.prepare_store(K[:8], rig.ctx)
    assert output is not None
    rig.manager.complete_store(K[:8], rig.ctx)
    assert submitted(tier) == [K[:8]]
    tier.finish_all()
    rig.step()
    assert rig.stat("rows_evictable") == 8


def test_a_tier_that_has_taken_a_whole_queue_is_asked_again() -> None:
    tier = FakeTier(allowance=1)
    rig = make_rig(tier)
    assert store(rig, K[:3])
    tier.allowance = None
    rig.step()
    assert submitted(tier) == [K[:1], K[1:3]]
    tier.finish_all()
    rig.step()
    tier.allowance = 2
    assert store(rig, K[3:8])
    assert submitted(tier) == [K[3:5]]
    assert rig.stat("blocks_queued") == 3


@pytest.mark.parametrize("before", [None, ROWS])
def test_credit_beyond_the_blocks_that_it_was_given_for_does_not_last(before: int | None) -> None:
    tier = FakeTier(allowance=before)
    rig = make_rig(tier)
    assert store(rig, K[:2])
    tier.finish_all()
    rig.step()
    tier.allowance = 2
    assert store(rig, K[2:8])
    assert submitted(tier) == [K[2:4]]


def test_an_intake_that_is_empty_is_one() -> None:
    class Empty(FakeTier):
        def __len__(self) -> int:
            return 0

    tier = Empty(allowance=2)
    rig = make_rig(tier)
    assert store(rig, K[:3])
    assert submitted(tier) == [K[:2]]


def test_each_tier_has_a_queue_of_its_own() -> None:
    fast, slow = FakeTier("fast"), FakeTier("slow", allowance=1)
    rig = make_rig(fast, slow)
    assert store(rig, K[:3])
    assert (submitted(fast), submitted(slow)) == ([K[:3]], [K[:1]])
    for expected in (K[1:2], K[2:3]):
        slow.finish(slow.stores[0])
        rig.step()
        assert submitted(slow) == [expected]


def test_requests_take_turns_and_heads_come_first() -> None:
    tier = FakeTier(allowance=0)
    rig = make_rig(tier, rows=16)
    other = rig.request("r2")
    assert store(rig, K[:2])
    assert store(rig, K[10:13], other)
    assert store(rig, K[2:4])
    tier.allowance = 3
    rig.step()
    assert submitted(tier) == [K[:3]]
    tier.finish_all()
    rig.step()
    assert submitted(tier) == [K[10:13]], "the other request has its turn, although the first one was not done"
    assert [job.req_context.req_id for job in tier.stores] == ["r2"]


def test_a_block_is_queued_once() -> None:
    tier = FakeTier(allowance=0)
    rig = make_rig(tier)
    assert store(rig, K[:2])
    tier.wanted = K[:2]
    rig.step()
    assert rig.stat("blocks_queued") == 2
    assert tier.offered == [K[:2]], "admission is asked once"
    tier.allowance = None
    rig.step()
    assert submitted(tier) == [K[:2]]


def test_what_is_admitted_is_queued_and_the_rest_is_not() -> None:
    tier = FakeTier(allowance=1, admits={K[0], K[2], K[3]})
    rig = make_rig(tier)
    assert store(rig, K[:4])
    assert submitted(tier) == [K[:1]]
    assert rig.stat("blocks_queued") == 2
    assert rig.stat("rows_evictable") == 1, "the declined block holds no row"
    tier.allowance = None
    rig.step()
    assert submitted(tier)[1:] == [K[2:4]]
    assert tier.offered == [K[:4]]


def test_the_tier_is_asked_for_two_of_the_longest_recent_steps() -> None:
    tier = FakeTier(allowance=1)
    rig = make_rig(tier)
    assert store(rig, K[:4])
    rig.clock.advance(0.2)
    rig.step()
    rig.clock.advance(0.05)
    rig.step()
    assert tier.horizons[-2] == pytest.approx(0.4)
    assert 0.3 < tier.horizons[-1] < 0.4
    rig.clock.advance(100.0)
    rig.step()
    assert tier.horizons[-1] < 0.4, "a pause is no step"


def test_uses_of_a_queued_block_are_not_reported() -> None:
    tier = FakeTier(allowance=0)
    rig = make_rig(tier)
    assert store(rig, K[:2])
    rig.manager.touch(K[:2], rig.ctx)
    assert tier.calls("used") == []


# --------------------------------------------------------------------------------------------------------------- losses


def test_a_burst_of_half_the_rows_over_a_tier_of_a_tenth_of_the_rate_loses_no_block() -> None:
    tier = FakeTier(allowance=2)
    rig = make_rig(tier, rows=64)
    old, burst = keys_of(*range(100, 132)), keys_of(*range(200, 232))
    for start in range(0, 32, 2):
        assert store(rig, old[start : start + 2])
        tier.finish_all()
        rig.step()
    written = tier.held.copy()
    for number, key in enumerate(burst):
        rig.clock.advance(0.01)
        assert store(rig, [key], rig.request(f"r{number}"))
        if number % 10 == 0:
            tier.finish(tier.stores[0])
            rig.step()
    while tier.stores:
        tier.finish_all()
        rig.step()
    assert tier.held == {*written, *burst}
    assert (rig.stat("queued_evicted"), rig.stat("stores_without_room")) == (0, 0)
    assert set(old) <= set(rig.primary.readable), "the other half stays"


def test_rows_that_no_queue_names_are_taken_first() -> None:
    tier = FakeTier(allowance=4)
    rig = make_rig(tier)
    assert store(rig, K[:4])
    tier.finish_all()
    tier.allowance = 0
    rig.step()
    assert store(rig, K[4:8])
    assert store(rig, K[8:10])
    assert set(rig.primary.readable) == {*K[:2], *K[4:10]} or set(rig.primary.readable) == {*K[2:4], *K[4:10]}
    assert rig.stat("queued_evicted") == 0


def test_a_block_that_another_tier_has_holds_no_row() -> None:
    fast, slow = FakeTier("fast"), FakeTier("slow", allowance=0)
    rig = make_rig(fast, slow)
    assert store(rig, K[:8])
    assert rig.stat("rows_evictable") == 0
    fast.finish_all()
    rig.step()
    assert (rig.stat("rows_evictable"), rig.stat("blocks_queued")) == (8, 8)
    assert store(rig, K[8:10])
    assert (rig.stat("queued_evicted"), rig.stat("blocks_queued")) == (2, 8)
    assert len(slow.calls("not_stored")) == 1
    assert set(slow.calls("not_stored")[0]) == set(K[:8]) - set(rig.primary.readable)  # type: ignore[call-overload]


def test_the_tail_of_a_request_is_taken_and_its_tier_is_told() -> None:
    tier = FakeTier(allowance=0)
    rig = make_rig(tier)
    assert store(rig, K[:4])
    assert store(rig, K[4:8], rig.request("r2"))
    rig.clock.advance(STALLED_AFTER)
    assert store(rig, K[8:11])
    assert set(rig.primary.readable) == {*K[:3], *K[4:6], *K[8:11]}
    assert tier.calls("not_stored") == [[K[7], K[6], K[3]]]
    assert rig.stat("queued_evicted") == 3
    tier.allowance = None
    rig.step()
    tier.finish_all()
    rig.step()
    assert tier.held == {*K[:3], *K[4:6], *K[8:11]}
    assert rig.stat("rows_evictable") == ROWS


def test_a_tier_that_makes_progress_keeps_its_blocks_for_as_long_as_a_write_takes() -> None:
    tier = FakeTier(allowance=1)
    rig = make_rig(tier)
    assert store(rig, K[:4])
    rig.manager.prepare_load(K[:4], rig.ctx)
    pins = rig.request("pins")
    assert store(rig, K[4:8], pins)
    rig.manager.prepare_load(K[4:7], pins)
    for _ in range(3):
        tier.finish(tier.stores[0])
        rig.step()
        assert not store(rig, K[8:9]), "nothing is free, and fewer than half of the rows wait unused"
        rig.clock.advance(TAKE_AFTER / 4)
    rig.clock.advance(TAKE_AFTER / 2)
    tier.finish(tier.stores[0])
    rig.step()
    assert store(rig, K[8:9]), "the store has waited long enough"
    assert rig.stat("queued_evicted") == 1


def test_half_of_the_rows_are_left_to_the_blocks_that_were_used_last() -> None:
    tier = FakeTier(allowance=1)
    rig = make_rig(tier, rows=16)
    assert store(rig, K[:1])
    assert store(rig, K[1:11])
    tier.finish(tier.stores[0])
    rig.step()
    assert not store(rig, K[11:12]), "more than half of the rows wait, and the tier makes progress"
    assert K[0] in rig.primary.readable
    assert store(rig, K[2:5]), "blocks that are held are no store"
    assert store(rig, K[12:13], rig.request("last"), is_last=True), "a last offer never waits"
    rig.clock.advance(TAKE_AFTER * 0.9)
    tier.finish(tier.stores[0])
    rig.step()
    assert not store(rig, K[11:12])
    rig.clock.advance(TAKE_AFTER * 0.2)
    assert store(rig, K[11:12])


def test_a_tier_that_ends_no_store_refuses_nothing() -> None:
    tier = FakeTier(allowance=1)
    rig = make_rig(tier, rows=16)
    assert store(rig, K[:10])
    rig.clock.advance(STALLED_AFTER)
    assert store(rig, K[10:12])
    assert rig.stat("stores_without_room") == 0


def test_a_request_waits_only_for_a_tier_that_it_may_use() -> None:
    tier, slow = FakeTier(allowance=1), FakeTier("slow")
    rig = make_rig(tier, slow, rows=16)
    assert store(rig, K[:1])
    assert store(rig, K[1:11])
    tier.finish(tier.stores[0])
    rig.step()
    assert store(rig, K[11:12], rig.request("r2", tiers=["slow"]))
    assert not store(rig, K[12:13], rig.request("r3", tiers=["slow", tier.name]))


def test_a_hung_tier_behind_another_one_costs_no_row_and_no_time() -> None:
    fast, hung = FakeTier("fast"), FakeTier("hung", allowance=1)
    rig = make_rig(fast, hung)
    for start in range(0, 32, 4):
        assert store(rig, K[start : start + 4])
        for job in list(fast.stores):
            fast.finish(job)
        rig.step()
    assert fast.held == set(K[:32])
    assert rig.stat("stores_without_room") == 0
    assert rig.stat("blocks_queued") <= ROWS


def test_no_row_is_taken_that_is_read_for_another_reason() -> None:
    tier = FakeTier(allowance=0)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    rig.clock.advance(STALLED_AFTER)
    rig.manager.prepare_load(K[1:8], rig.ctx)
    assert store(rig, K[8:9])
    assert set(rig.primary.readable) == set(K[1:9])


def test_no_block_is_lost_for_a_store_that_finds_no_room_all_the_same() -> None:
    tier = FakeTier(allowance=0)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    rig.clock.advance(STALLED_AFTER)
    rig.manager.prepare_load(K[:6], rig.ctx)
    assert not store(rig, K[8:12])
    assert (rig.stat("queued_evicted"), rig.stat("blocks_queued")) == (0, 8)


def test_the_blocks_of_a_store_are_not_taken_for_its_other_blocks() -> None:
    tier = FakeTier(allowance=0)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    rig.clock.advance(STALLED_AFTER)
    output = rig.manager.prepare_store([*K[6:8], *K[8:10]], rig.ctx)
    assert output is not None
    assert not {*K[6:10]} & set(output.evicted_keys)


def test_a_promotion_takes_rows_of_queued_blocks() -> None:
    tier = FakeTier(held=set(K[20:24]), allowance=0)
    rig = make_rig(tier)
    assert store(rig, K[:8])
    rig.clock.advance(STALLED_AFTER)
    assert rig.manager.match_prefix(K[20:24], rig.ctx) == PrefixMatch(4, True)
    assert set(rig.primary.readable) == set(K[:4])
    assert rig.stat("queued_evicted") == 4


def test_a_search_looks_at_a_bounded_number_of_blocks_and_the_next_one_at_others() -> None:
    """The rows of the last request are in use; those of the one before are found by the second search."""
    rows = 2 * LOOK_AT
    tier, keys = FakeTier(allowance=0), keys_of(*range(2 * LOOK_AT))
    rig = make_rig(tier, rows=rows)
    first, last = rig.request("first"), rig.request("last")
    assert store(rig, keys[:LOOK_AT], first, is_last=True)
    assert store(rig, keys[LOOK_AT:], last, is_last=True)
    rig.manager.prepare_load(keys[LOOK_AT:], last)
    rig.manager.prepare_load(keys[LOOK_AT // 2 : LOOK_AT], first)
    rig.clock.advance(STALLED_AFTER)
    assert not store(rig, keys_of(10_000))
    assert store(rig, keys_of(10_000))


# ---------------------------------------------------------------------------------------------- requests, resets, ends


def test_a_tier_forgets_a_request_when_its_last_queued_block_has_gone() -> None:
    tier, other = FakeTier(allowance=1), FakeTier("other")
    rig = make_rig(tier, other)
    assert store(rig, K[:2])
    rig.manager.on_request_finished(rig.ctx)
    assert (tier.calls("on_request_finished"), other.calls("on_request_finished")) == ([], ["r1"])
    tier.finish(tier.stores[0])
    rig.step()
    assert submitted(tier) == [K[1:2]]
    assert tier.stores[0].req_context is rig.ctx
    assert tier.calls("on_request_finished") == ["r1"]


def test_a_request_of_the_same_id_does_not_inherit_queued_blocks() -> None:
    tier = FakeTier(allowance=0)
    rig = make_rig(tier)
    assert store(rig, K[:2])
    rig.manager.on_request_finished(rig.ctx)
    again = rig.request("r1")
    assert tier.calls("on_request_finished") == ["r1"], "before the new request is announced"
    assert store(rig, K[2:3], again)
    tier.allowance = None
    rig.step()
    assert [(job.req_context, list(job.keys)) for job in tier.stores] == [(NOBODY, K[:2]), (again, K[2:3])]


def test_a_reset_empties_the_queues_and_counts_it() -> None:
    tiers = FakeTier("fast", allowance=1), FakeTier("slow", allowance=2)
    rig = make_rig(*tiers)
    assert store(rig, K[:4])
    rig.manager.on_request_finished(rig.ctx)
    rig.manager.reset_cache()
    assert (rig.stat("blocks_queued"), rig.stat("queued_reset")) == (0, 5)
    assert [tier.calls("on_request_finished") for tier in tiers] == [["r1"], ["r1"]]
    for tier in tiers:
        tier.finish_all()
    rig.step()
    assert (rig.stat("rows_free"), rig.stat("rows_quarantined")) == (ROWS, 0)


def test_a_new_common_epoch_empties_the_queues_and_counts_it() -> None:
    tier = FakeTier(allowance=0)
    rig = make_rig(tier)
    assert store(rig, K[:4])
    tier.has_successor = True
    rig.step()
    assert (rig.stat("blocks_queued"), rig.stat("queued_reset"), rig.stat("rows_free")) == (0, 4, ROWS)


@pytest.mark.parametrize("method", ["admit", "credit", "submit_store", "not_stored"])
def test_a_tier_that_breaks_its_contract_keeps_no_row(method: str) -> None:
    broken, other = FakeTier("broken", allowance=0), FakeTier("other", allowance=0)
    rig = make_rig(broken, other)
    assert store(rig, K[:8])
    broken.raises.add(method)
    rig.clock.advance(STALLED_AFTER)
    assert store(rig, K[8:10])
    broken.allowance = 1
    rig.step()
    assert rig.stat("tiers_out_of_service") == 1
    assert rig.stat("queued_retired") + rig.stat("queued_evicted") >= 8
    other.allowance = None
    for _ in range(3):
        rig.step()
        other.finish_all()
    for job in list(broken.stores):
        broken.finish(job)
    rig.step()
    # A tier that raises in submit_store may still read the rows of this job.
    assert rig.stat("rows_evictable") + rig.stat("rows_free") == ROWS - (method == "submit_store")
    assert not rig.manager.has_pending_work()


def test_an_idle_engine_drains_the_queue() -> None:
    tier = FakeTier(allowance=1, load_deadline=5.0)
    rig = make_rig(tier)
    assert store(rig, K[:4])
    rig.manager.on_request_finished(rig.ctx)
    steps = 0
    while rig.manager.has_pending_work():
        tier.finish_all()
        rig.step()
        steps += 1
        assert steps < 10
    assert tier.held == set(K[:4])


def test_a_hung_tier_lets_an_idle_engine_sleep() -> None:
    tier = FakeTier(allowance=1, load_deadline=5.0)
    rig = make_rig(tier)
    assert store(rig, K[:4])
    assert rig.manager.has_pending_work()
    rig.clock.advance(5.0 + COUNTS_OVERDUE + 1.0)
    rig.step()
    assert not rig.manager.has_pending_work()
    tier.finish_all()
    rig.step()
    assert rig.manager.has_pending_work(), "the tier takes blocks again"


def test_a_shutdown_stores_what_is_queued(caplog: pytest.LogCaptureFixture) -> None:
    class Draining(FakeTier):
        def drain(self, deadline: float) -> bool:
            self.finish_all()
            return super().drain(deadline)

    tier = Draining(allowance=1)
    rig = make_rig(tier)
    assert store(rig, K[:6])
    rig.manager.shutdown()
    assert tier.held == set(K[:6])
    assert "were not stored" not in caplog.text


def test_a_shutdown_reports_what_a_hung_tier_did_not_take(caplog: pytest.LogCaptureFixture) -> None:
    tier = FakeTier(allowance=1)
    rig = make_rig(tier)
    assert store(rig, K[:6])
    rig.manager.shutdown()
    assert rig.stat("queued_retired") == 5
    assert "5 blocks waited for secondary tiers at shutdown and were not stored" in caplog.text


def test_a_tier_that_wants_all_blocks_of_a_request_gets_them_as_it_has_credit() -> None:
    tier = FakeTier(allowance=1, policy=OffloadPolicy.REQUEST_LEVEL)
    rig = make_rig(tier)
    other = rig.request("r2")
    assert store(rig, K[:3])
    assert store(rig, K[:3], other)
    assert rig.stat("blocks_queued") == 3, "one block is being stored, and is offered for this request too"
    for _ in range(4):
        tier.finish_all()
        rig.step()
    assert tier.held == set(K[:3])
