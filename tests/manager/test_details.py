"""Details of the manager's contract: its thread, its defaults, notices of use, counters and gauges."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.manager_rig import ManagerRig
from tiering.api.manager import OffloadingManager, PrefixMatch
from tiering.api.request import ReqContext
from tiering.errors import ConfigError, WrongThreadError
from tiering.manager.jobs import COUNTS_OVERDUE
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.testing.clock import FakeClock
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

A, B, C, D = K = keys_of(*range(4))
Call = Callable[[ManagerRig], object]

CALLS: dict[str, Call] = {
    "lookup": lambda rig: rig.manager.lookup(A, rig.ctx),
    "match_prefix": lambda rig: rig.manager.match_prefix([A], rig.ctx),
    "promote_early": lambda rig: rig.manager.promote_early([A], rig.ctx),
    "prefetch": lambda rig: rig.manager.prefetch([A], b"", 1.0),
    "prepare_load": lambda rig: rig.manager.prepare_load([], rig.ctx),
    "complete_load": lambda rig: rig.manager.complete_load([], rig.ctx),
    "touch": lambda rig: rig.manager.touch([A], rig.ctx),
    "prepare_store": lambda rig: rig.manager.prepare_store([A], rig.ctx),
    "complete_store": lambda rig: rig.manager.complete_store([], rig.ctx),
    "complete_stores": lambda rig: rig.manager.complete_stores([]),
    "hold_exclusively": lambda rig: rig.manager.hold_exclusively(None),
    "engine_holds": lambda rig: rig.manager.engine_holds([A]),
    "engine_dropped": lambda rig: rig.manager.engine_dropped([A]),
    "lacked": lambda rig: rig.manager.lacked([A]),
    "take_wanted": lambda rig: rig.manager.take_wanted(),
    "keep_unstored": lambda rig: rig.manager.keep_unstored(),
    "take_unstored": lambda rig: rig.manager.take_unstored(),
    "lookup_outcome": lambda rig: rig.manager.lookup_outcome(A, rig.ctx),
    "prepare_late_store": lambda rig: rig.manager.prepare_late_store([A]),
    "on_new_request": lambda rig: rig.manager.on_new_request(ReqContext("r2")),
    "on_request_finished": lambda rig: rig.manager.on_request_finished(rig.ctx),
    "on_schedule_end": lambda rig: rig.step(),
    "has_pending_work": lambda rig: rig.manager.has_pending_work(),
    "take_events": lambda rig: rig.manager.take_events(),
    "still_pending": lambda rig: rig.manager.still_pending(rig.ctx),
    "wait_until": lambda rig: rig.manager.wait_until(lambda: True, 0.0),
    "count_sources": lambda rig: rig.manager.count_sources([A], rig.ctx),
    "count_tiers": lambda rig: rig.manager.count_tiers([A], rig.ctx),
    "count_inherited": lambda rig: rig.manager.count_inherited(0),
    "lookup_each": lambda rig: rig.manager.lookup_each([A], rig.ctx),
    "held": lambda rig: rig.manager.held([A], rig.ctx),
    "note_compute": lambda rig: rig.manager.note_compute([0.0]),
    "measure_worth": lambda rig: rig.manager.measure_worth(rig.ctx),
    "note_scheduled": lambda rig: rig.manager.note_scheduled(rig.ctx),
    "note_first_token": lambda rig: rig.manager.note_first_token(rig.ctx, 0.0),
    "waits_until": lambda rig: rig.manager.waits_until(rig.ctx),
    "open_tier": lambda rig: rig.manager.open_tier(0, 0.0),
    "get_stats": lambda rig: rig.manager.get_stats(),
    "reset_cache": lambda rig: rig.manager.reset_cache(),
    "shutdown": lambda rig: rig.manager.shutdown(),
    "hand_over": lambda rig: rig.manager.hand_over(),
}

FOR_ALL_THREADS = {"cold_starts"}
"""Methods that any thread may call."""


def in_another_thread(call: Callable[[], object]) -> BaseException | None:
    """Return the exception that a call raises in another thread; None if it returns."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize("name", CALLS)
def test_a_manager_refuses_a_second_thread(name: str) -> None:
    rig = ManagerRig(8, [FakeTier()])
    rig.step()
    assert isinstance(in_another_thread(lambda: CALLS[name](rig)), WrongThreadError)
    rig.manager.hand_over()
    assert in_another_thread(lambda: CALLS[name](rig)) is None


@pytest.mark.parametrize("name", CALLS)
def test_a_second_thread_is_no_matter_if_the_caller_takes_turns(name: str) -> None:
    rig = ManagerRig(8, [FakeTier()], one_thread=False)
    rig.step()
    assert in_another_thread(lambda: CALLS[name](rig)) is None


def test_every_method_of_the_contract_refuses_a_second_thread() -> None:
    parts = TieringOffloadingManager.__mro__[: TieringOffloadingManager.__mro__.index(OffloadingManager)]
    methods = {name for part in parts for name, value in vars(part).items() if callable(value) and name[0] != "_"}
    assert methods - FOR_ALL_THREADS == CALLS.keys()


def test_the_thread_that_answers_why_may_ask_for_cold_starts() -> None:
    rig = ManagerRig(8, [FakeTier()])
    rig.step()
    assert in_another_thread(rig.manager.cold_starts) is None


def test_the_thread_that_opens_the_tiers_does_not_become_the_owner() -> None:
    primary = CPUPrimaryTierOffloadingManager(np.zeros((8, 16), np.uint8).data)
    manager = TieringOffloadingManager(primary, [FakeTier()])
    assert manager.open_tier(0, 0.0)
    manager.get_stats()
    assert in_another_thread(manager.on_schedule_end) is None


# ------------------------------------------------------------------------------------------------------------- defaults


def test_promotions_and_reservations_hold_half_the_rows_for_half_a_minute() -> None:
    tier = FakeTier(held=set(K))
    rig = ManagerRig(4, [tier])
    assert rig.manager.match_prefix(K, rig.ctx).hits == 2
    rig.step()
    tier.finish_all()
    rig.step()
    assert rig.stat("rows_reserved") == 2
    rig.clock.advance(29.9)
    rig.step()
    assert rig.stat("rows_reserved") == 2
    rig.clock.advance(0.1)
    rig.step()
    assert (rig.stat("rows_reserved"), rig.stat("reservations_expired")) == (0, 2)


def test_resets_have_fifty_milliseconds_and_shutdown_thirty_seconds_which_the_tiers_share() -> None:
    tiers = [FakeTier("fast"), FakeTier("slow")]
    rig = ManagerRig(4, tiers)
    now = rig.clock()
    assert rig.manager.reset_cache()
    assert [tier.calls("reset") for tier in tiers] == [[now + 0.05], [now + 0.025]]
    rig.manager.shutdown()
    for method in ("drain", "shutdown"):
        assert [tier.calls(method) for tier in tiers] == [[now + 15], [now + 30]]


def test_events_are_collected_only_if_somebody_asks_for_them() -> None:
    primary = CPUPrimaryTierOffloadingManager(np.zeros((4, 16), np.uint8).data)
    manager = TieringOffloadingManager(primary, clock=FakeClock())
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    manager.prepare_store([A], ctx)
    manager.complete_store([A], ctx)
    assert manager.take_events() == []


def test_a_share_of_a_small_primary_tier_is_at_least_one_row() -> None:
    rig = ManagerRig(1, [FakeTier(held={A}, primary_share=0.1)], promotion_share=0.1)
    assert rig.manager.match_prefix([A], rig.ctx) == (1, True)


# ----------------------------------------------------------------------------------------------------------------- uses


def test_tiers_are_told_of_the_blocks_that_are_loaded_and_touched_until_they_hold_them() -> None:
    tier = FakeTier(settled=5.0)
    rig = ManagerRig(4, [tier])
    rig.manager.prepare_store([A, B], rig.ctx)
    rig.manager.complete_store([A, B], rig.ctx)
    rig.manager.touch([A, C], rig.ctx)
    assert tier.calls("touch") == [[A, C]]
    assert tier.calls("used") == [[A]]
    rig.manager.prepare_load([A, B], rig.ctx)
    assert tier.calls("used") == [[A], [B]]
    rig.clock.advance(5.0)
    rig.manager.touch([A, B], rig.ctx)
    assert tier.calls("used")[2:] == [[A, B]]
    tier.finish_all()
    rig.step()
    rig.clock.advance(599.0)
    rig.manager.touch([A, B], rig.ctx)
    assert len(tier.calls("used")) == 3
    rig.clock.advance(1.0)
    rig.manager.touch([A, B], rig.ctx)
    assert tier.calls("used")[3:] == [[A, B]]


def test_a_row_with_a_new_block_is_news_to_the_tiers() -> None:
    tier = FakeTier()
    rig = ManagerRig(1, [tier])
    for keys in ([A], [B]):
        rig.store(keys)
        assert tier.calls("used") == []
        tier.held.clear()
    rig.manager.prepare_store([C], rig.ctx)
    rig.manager.complete_store([C], rig.ctx)
    tier.finish(tier.stores[0], success=False)
    rig.step()
    rig.manager.touch([C], rig.ctx)
    assert tier.calls("used") == [[C]]


def test_a_request_tells_the_tiers_that_it_may_use_and_stores_into() -> None:
    tiers = [FakeTier("fast"), FakeTier("slow")]
    rig = ManagerRig(4, tiers)
    rig.manager.prepare_store([A], rig.ctx)
    rig.manager.complete_store([A], rig.ctx)
    rig.manager.touch([A], rig.request("slow only", tiers=["slow"]))
    assert [tier.calls("touch") for tier in tiers] == [[], [[A]]]
    assert [tier.calls("used") for tier in tiers] == [[], [[A]]]
    rig.manager.touch([A], rig.request("stores nothing", store=False))
    assert [tier.calls("used") for tier in tiers] == [[], [[A]]]
    rig.manager.touch([A], ReqContext("never announced"))
    assert [tier.calls("used") for tier in tiers] == [[[A]], [[A]]]


def test_a_tier_out_of_service_is_told_nothing() -> None:
    tier = FakeTier(raises={"submit_store"})
    rig = ManagerRig(4, [tier])
    rig.manager.prepare_store([A], rig.ctx)
    rig.manager.complete_store([A], rig.ctx)
    rig.manager.touch([A], rig.ctx)
    rig.manager.on_request_finished(rig.ctx)
    rig.step()
    assert [name for name, _ in tier.log] == ["on_new_request", "submit_store"]


# ---------------------------------------------------------------------------------------------------------------- store


def test_a_store_collects_finished_jobs_before_it_is_refused() -> None:
    tier = FakeTier()
    rig = ManagerRig(1, [tier])
    rig.manager.prepare_store([A], rig.ctx)
    rig.manager.complete_store([A], rig.ctx)
    assert rig.manager.prepare_store([B], rig.ctx) is None
    assert rig.stat("stores_without_room") == 1
    tier.finish_all()
    assert rig.manager.prepare_store([B], rig.ctx) is not None
    assert rig.stat("stores_without_room") == 1


def test_a_request_that_stores_nothing_gets_no_rows() -> None:
    rig = ManagerRig(4)
    output = rig.manager.prepare_store([A], rig.request("r2", store=False))
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys, len(output.store_spec.block_ids)) == ([], [], 0)
    assert rig.stat("rows_free") == 4


def test_a_request_that_is_announced_again_ends_the_one_before() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    rig.request("r1")
    assert tier.calls("on_request_finished") == ["r1"]
    assert tier.calls("on_new_request") == ["r1", "r1"]
    rig.manager.on_request_finished(rig.ctx)
    rig.manager.on_request_finished(rig.ctx)
    assert tier.calls("on_request_finished") == ["r1", "r1"]


def test_the_tiers_hear_of_the_end_of_a_request_when_its_last_store_has_ended() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    rig.manager.prepare_store([A], rig.ctx)
    rig.manager.on_request_finished(rig.ctx)
    assert tier.calls("on_request_finished") == []
    rig.manager.complete_store([A], rig.ctx)
    assert [name for name, _ in tier.log] == ["on_new_request", "submit_store", "on_request_finished"]


def test_sources_are_counted_for_the_request_that_the_blocks_were_promoted_for() -> None:
    tier = FakeTier(held={A, B})
    rig = ManagerRig(8, [tier])
    assert rig.manager.count_sources(K, rig.ctx) == {}
    rig.manager.match_prefix([A, B], rig.ctx)
    rig.step()
    tier.finish_all()
    rig.step()
    assert rig.manager.count_sources(K, rig.ctx) == {tier.medium: 2}
    assert rig.manager.count_sources(K, rig.request("r2")) == {}
    assert rig.manager.count_sources(K, ReqContext("never announced")) == {}


# --------------------------------------------------------------------------------------------------------------- gauges


def test_gauges_tell_where_rows_and_jobs_are() -> None:
    tier = FakeTier(held={D})
    rig = ManagerRig(8, [tier])
    rig.manager.prepare_store([A, B], rig.ctx)
    rig.manager.complete_store([A, B], rig.ctx)
    rig.manager.match_prefix([D], rig.ctx)
    rig.step()
    assert (rig.stat("jobs_in_flight"), rig.stat("rows"), rig.stat("rows_free"), rig.stat("rows_evictable")) == (
        2,
        8,
        5,
        0,
    )
    tier.finish(tier.stores[0])
    rig.step()
    assert (rig.stat("jobs_in_flight"), rig.stat("rows_evictable")) == (1, 2)
    rig.manager.reset_cache()
    assert (rig.stat("rows_quarantined"), rig.stat("resets"), rig.stat("rows_free")) == (1, 1, 7)


def test_evicted_blocks_and_unknown_completions_are_counted() -> None:
    rig = ManagerRig(2)
    rig.store([A, B])
    rig.store([C])
    rig.manager.complete_store([D], rig.ctx)
    assert (rig.stat("evicted_blocks"), rig.stat("ignored_completions")) == (1, 1)


def test_work_is_pending_while_the_end_of_a_job_is_expected() -> None:
    tier = FakeTier(held={A}, load_deadline=5.0)
    rig = ManagerRig(4, [tier])
    assert not rig.manager.has_pending_work()
    rig.manager.match_prefix([A], rig.ctx)
    assert rig.manager.has_pending_work()
    rig.step()
    assert rig.manager.has_pending_work()
    rig.clock.advance(5.0 + COUNTS_OVERDUE)
    assert not rig.manager.has_pending_work()


# ------------------------------------------------------------------------------------------------------ reset, shutdown


def test_a_reset_with_an_invalid_revision_resets_nothing() -> None:
    rig = ManagerRig(4)
    rig.store([A])
    with pytest.raises(ConfigError):
        rig.manager.reset_cache(revision=3)  # type: ignore[arg-type]
    assert rig.manager.lookup(A, rig.ctx) is True
    assert rig.stat("resets") == 0


def test_the_tiers_can_be_kept_over_a_reset() -> None:
    tier = FakeTier(resets=False)
    rig = ManagerRig(4, [tier], keep_secondary=True)
    rig.store([A])
    assert rig.manager.reset_cache()
    assert tier.calls("reset") == []
    assert not rig.primary.readable


def test_a_reset_lets_requests_look_for_blocks_anew() -> None:
    tier = FakeTier(held={A}, load_deadline=5.0)
    rig = ManagerRig(4, [tier], keep_secondary=True)
    rig.manager.match_prefix([A], rig.ctx)
    rig.step()
    tier.finish(tier.loads[0], success=False)
    rig.step()
    assert rig.manager.match_prefix([A], rig.ctx) == (0, False)
    rig.manager.reset_cache()
    assert rig.manager.match_prefix([A], rig.ctx) == (1, True)


def test_shutdown_happens_once_and_leaves_rows_mapped_that_a_tier_may_still_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = FakeTier(stops=False)
    rig = ManagerRig(4, [tier])
    rig.manager.prepare_store([A], rig.ctx)
    rig.manager.complete_store([A], rig.ctx)
    for _ in range(2):
        rig.manager.shutdown()
    assert len(tier.calls("shutdown")) == 1
    assert "1 jobs of secondary tiers were not finished at shutdown" in caplog.text
    assert "the primary buffer stays mapped" in caplog.text


def test_a_store_that_ends_after_the_shutdown_goes_to_no_tier() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    rig.manager.prepare_store([A], rig.ctx)
    rig.manager.shutdown()
    rig.manager.complete_store([A], rig.ctx)
    rig.manager.on_schedule_end()
    assert not tier.stores
    assert rig.manager.get_stats()["manager"]["tiers_out_of_service"] == 0


def test_shutdown_collects_what_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    rig.manager.prepare_store([A], rig.ctx)
    rig.manager.complete_store([A], rig.ctx)
    tier.finish_all()
    rig.manager.shutdown()
    assert caplog.text == ""


def test_a_block_that_another_request_has_stored_is_found_while_promotions_of_other_blocks_go_on() -> None:
    rig = ManagerRig(8, [FakeTier(held={K[1], K[2]})])
    other = rig.request("other")
    output = rig.manager.prepare_store([K[0]], other)
    assert output is not None
    assert rig.manager.match_prefix(K[1:3], rig.ctx) == PrefixMatch(2, True)
    assert rig.manager.match_prefix(K[:1], rig.ctx) == PrefixMatch(1, True)
    rig.manager.complete_store(output.keys_to_store, other)
    assert rig.manager.match_prefix(K[:1], rig.ctx) == PrefixMatch(1, False)
