"""Each counter of the scheduler half moves with what it counts, and with nothing else."""

from __future__ import annotations

import itertools

import pytest

from tests.connector.fakes import (
    FakeBlocks,
    FakeSchedulerOutput,
    finished,
    idle_step,
    ids,
    make_scheduler,
    prompt,
    run_prompt,
    start_load,
)
from tiering.connector.scheduler import OffloadingConnectorScheduler

GAUGES_AND_TIMES = {"scheduler_seconds", "jobs_active", "requests_active"}


def counted(scheduler: OffloadingConnectorScheduler) -> dict[str, int]:
    """Return the counters that are not 0, without gauges and times."""
    counters = scheduler.get_stats()["connector"]
    return {name: value for name, value in counters.items() if value and name not in GAUGES_AND_TIMES}


def test_the_time_of_every_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, _ = make_scheduler()
    monkeypatch.setattr("tiering.connector.scheduler.perf_counter", itertools.count(0.0, 0.25).__next__)
    for _ in range(3):
        scheduler.build_connector_meta(FakeSchedulerOutput())
    assert scheduler.get_stats()["connector"]["scheduler_seconds"] == 0.75


def test_a_prompt_that_no_tier_holds_is_asked_for_and_stored() -> None:
    scheduler, _ = make_scheduler()
    run_prompt(scheduler, prompt(16), ids(4))
    assert counted(scheduler) == {"queried_tokens": 16, "queried_blocks": 4, "stores": 1}


def test_a_load_counts_its_tokens_and_blocks() -> None:
    scheduler, manager = make_scheduler()
    request = prompt(32)
    manager.hold(request.keys()[:4])
    start_load(scheduler, request, ids(8))
    found = {"queried_tokens": 32, "hit_tokens": 16, "queried_blocks": 8, "hit_blocks": 4, "loads": 1}
    assert counted(scheduler) == found


def test_a_failed_load_counts_once_although_two_workers_report_it() -> None:
    scheduler, manager = make_scheduler(world_size=2)
    request = prompt(16)
    manager.hold(request.keys())
    job = start_load(scheduler, request, ids(4)).reqs_to_load["r1"].job_id
    for _ in range(2):
        scheduler.update_connector_output(finished(job, failed=[job], invalid_block_ids={1}))
    assert (counted(scheduler)["loads"], counted(scheduler)["loads_failed"]) == (1, 1)


def test_a_failed_store_counts() -> None:
    scheduler, _ = make_scheduler()
    job = run_prompt(scheduler, prompt(16), ids(4)).reqs_to_store["r1"].job_id
    scheduler.update_connector_output(finished(job, failed=[job]))
    assert (counted(scheduler)["stores"], counted(scheduler)["stores_failed"]) == (1, 1)


def test_an_offer_without_room_counts_as_refused_and_not_as_a_store() -> None:
    scheduler, manager = make_scheduler()
    manager.refuse_stores = True
    run_prompt(scheduler, prompt(16), ids(4))
    assert counted(scheduler)["stores_refused"] == 1
    assert "stores" not in counted(scheduler)


def test_a_hit_that_lost_a_block_before_its_load_counts() -> None:
    scheduler, manager = make_scheduler()
    request = prompt(16)
    manager.hold(request.keys())
    tokens, _ = scheduler.get_num_new_matched_tokens(request, 0)
    assert tokens == 16
    manager.drop(request.key(3))
    scheduler.update_state_after_alloc(request, FakeBlocks((ids(4),)), tokens)
    assert counted(scheduler)["hits_shrunk"] == 1


def test_a_step_that_reuses_the_block_of_a_running_copy_counts_the_job() -> None:
    scheduler, _ = make_scheduler()
    request = prompt(16)
    run_prompt(scheduler, request, ids(4))
    scheduler.request_finished(request, ids(4))
    run_prompt(scheduler, prompt(4, "r2"), [4])
    assert counted(scheduler)["jobs_flushed"] == 1


def test_a_request_that_waits_for_the_load_of_another_counts_once() -> None:
    scheduler, manager = make_scheduler()
    one, other = prompt(16), prompt(16, "r2")
    manager.hold(one.keys())
    start_load(scheduler, one, ids(4))
    for _ in range(3):
        assert scheduler.get_num_new_matched_tokens(other, 0) == (None, False)
    assert counted(scheduler)["sharer_waits"] == 1


class TestBlocksThatTheCpuTierWasAskedFor:
    def asked(self, scheduler: OffloadingConnectorScheduler) -> tuple[int, int, int]:
        tier = scheduler.get_stats()["tiers"]["cpu"]
        return tier["queries"], tier["hits"], tier["misses"]

    def test_are_misses_if_nothing_is_loaded(self) -> None:
        scheduler, _ = make_scheduler()
        run_prompt(scheduler, prompt(16), ids(4))
        assert self.asked(scheduler) == (4, 0, 4)

    def test_are_misses_where_another_tier_had_to_bring_them(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys()[:6])
        manager.sources = dict.fromkeys(request.keys()[2:4], "DISK")
        start_load(scheduler, request, ids(6))
        assert self.asked(scheduler) == (8, 4, 4)

    def test_are_counted_once_however_often_a_request_asks_and_starts(self) -> None:
        scheduler, _ = make_scheduler()
        request = prompt(16)
        for _ in range(3):
            scheduler.get_num_new_matched_tokens(request, 0)
        assert self.asked(scheduler) == (4, 0, 0)
        run_prompt(scheduler, request, ids(4), tokens=8)
        scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
        run_prompt(scheduler, request, ids(4), tokens=8)
        scheduler.request_finished(request, ids(4))
        idle_step(scheduler)
        assert self.asked(scheduler) == (4, 0, 4)

    def test_are_misses_of_a_request_that_ends_before_it_starts(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(16)
        manager.hold(request.keys()[:2])
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.request_finished(request, [])
        assert self.asked(scheduler) == (4, 0, 4)
