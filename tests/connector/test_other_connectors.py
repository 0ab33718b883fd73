"""Loads of other connectors: unfilled blocks, and blocks computed on top of them, are not stored."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.connector.fakes import (
    FakeBlocks,
    FakeManager,
    FakeRequest,
    FakeSchedulerOutput,
    finished,
    go_on,
    idle_step,
    ids,
    make_scheduler,
    prompt,
    run_prompt,
    stored,
)
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.suspects import STEPS_IN_FLIGHT

FILLED = 24
"""Number of tokens, of 40, that another connector claims to have loaded."""


def load_elsewhere(
    scheduler: OffloadingConnectorScheduler,
    request: FakeRequest,
    block_ids: Sequence[int],
    *,
    found: int = 0,
    filled: int = FILLED,
) -> OffloadingConnectorMetadata:
    """Build the step of a synchronous load by another connector.

    Args:
        filled: number of tokens that the other connector loads; the step computes the rest of the prompt.
    """
    scheduler.get_num_new_matched_tokens(request, found)
    scheduler.update_state_after_alloc(request, FakeBlocks((list(block_ids),)), 0)
    request.num_computed_tokens = filled
    meta = scheduler.build_connector_meta(
        FakeSchedulerOutput().new(request, request.num_tokens - filled, list(block_ids))
    )
    request.num_computed_tokens = request.num_tokens
    return meta


def job_of(meta: OffloadingConnectorMetadata, name: str = "r1") -> int:
    return meta.reqs_to_store[name].job_id


def readable(manager: FakeManager) -> set[bytes]:
    return {key for key in manager.rows if manager.refs[key] >= 0}


def test_a_store_that_ends_with_the_step_whose_load_failed_is_dropped() -> None:
    scheduler, manager = make_scheduler()
    job = job_of(load_elsewhere(scheduler, prompt(40), ids(10)))
    scheduler.update_connector_output(finished(job, invalid_block_ids={3}))
    assert readable(manager) == set()
    assert not manager.rows


def test_a_store_that_the_worker_has_only_deferred_is_dropped_when_it_ends() -> None:
    scheduler, manager = make_scheduler()
    job = job_of(load_elsewhere(scheduler, prompt(40), ids(10)))
    scheduler.update_connector_output(finished(invalid_block_ids={3}))
    assert manager.completed_stores == []
    scheduler.update_connector_output(finished(job))
    assert not manager.rows


def test_a_store_of_two_workers_is_dropped_if_one_of_them_reports_the_failure() -> None:
    scheduler, manager = make_scheduler(world_size=2)
    job = job_of(load_elsewhere(scheduler, prompt(40), ids(10)))
    scheduler.update_connector_output(finished(job, invalid_block_ids={3}))
    scheduler.update_connector_output(finished(job))
    assert not manager.rows


def test_engines_that_do_not_carry_the_workers_reports_are_heeded_too() -> None:
    scheduler, manager = make_scheduler()
    job = job_of(load_elsewhere(scheduler, prompt(40), ids(10)))
    scheduler.update_connector_output(finished())  # this engine carries the workers' reports
    output = finished(invalid_block_ids={3})
    output.kv_connector_worker_meta = None
    scheduler.update_connector_output(output)
    scheduler.update_connector_output(finished(job))
    assert not manager.rows


@pytest.mark.parametrize("deferred", [False, True])
def test_the_request_may_have_failed_before_its_blocks_are_reported(deferred: bool) -> None:
    """With vLLM's policy "fail" the engine ends the request before it reports the blocks."""
    scheduler, manager = make_scheduler()
    request = prompt(40)
    job = job_of(load_elsewhere(scheduler, request, ids(10)))
    request.num_computed_tokens = 8
    scheduler.request_finished(request, ids(2))
    scheduler.update_connector_output(finished(*([] if deferred else [job]), invalid_block_ids={3}))
    if deferred:
        scheduler.update_connector_output(finished(job))
    assert not manager.rows
    assert not scheduler.has_pending_work()


def test_a_step_that_was_scheduled_before_the_failure_was_known_stores_nothing_either() -> None:
    scheduler, manager = make_scheduler()
    request = prompt(60)
    jobs = [job_of(run_prompt(scheduler, request, ids(15), tokens=40)), job_of(go_on(scheduler, request, 20))]
    scheduler.update_connector_output(finished(invalid_block_ids={3}))
    scheduler.update_connector_output(finished(*jobs))
    assert not manager.rows


def test_nothing_is_stored_until_the_engine_has_gone_back_and_then_all_of_it() -> None:
    scheduler, manager = make_scheduler(offload_prompt_only=False)
    request = prompt(40)
    job = job_of(load_elsewhere(scheduler, request, ids(10)))
    scheduler.update_connector_output(finished(job, invalid_block_ids={3}))
    request.append(1)
    assert not go_on(scheduler, request, 1, ids(1, 11)).reqs_to_store
    request.num_computed_tokens = 8
    meta = go_on(scheduler, request, 32)
    assert stored(meta)[0].block_ids.tolist() == ids(10)
    scheduler.update_connector_output(finished(job_of(meta)))
    assert readable(manager) == set(request.keys())


def test_what_was_offered_while_the_dropped_store_ran_is_offered_again_when_it_has_ended() -> None:
    scheduler, manager = make_scheduler(offload_prompt_only=False)
    request = prompt(40)
    job = job_of(load_elsewhere(scheduler, request, ids(10)))
    scheduler.update_connector_output(finished(invalid_block_ids={3}))
    request.num_computed_tokens = 8
    assert not go_on(scheduler, request, 32).reqs_to_store  # the store of the same rows has not ended
    scheduler.update_connector_output(finished(job))
    request.append(1)
    meta = go_on(scheduler, request, 1, ids(1, 11))
    scheduler.update_connector_output(finished(job_of(meta)))
    assert readable(manager) == set(request.keys())


def test_a_request_that_found_the_blocks_in_the_engines_cache_and_does_not_go_back_is_never_stored() -> None:
    """If several requests share a block, vLLM lets only the first one recompute the block."""
    scheduler, manager = make_scheduler(offload_prompt_only=False)
    first, second = prompt(40), prompt(60, "r2")
    jobs = [job_of(load_elsewhere(scheduler, first, ids(10)))]
    jobs.append(job_of(run_prompt(scheduler, second, [*ids(10), *ids(5, 11)], computed=40), "r2"))
    scheduler.update_connector_output(finished(*jobs, invalid_block_ids={3}))
    assert not manager.rows
    first.num_computed_tokens = 8
    again = job_of(go_on(scheduler, first, 32))
    second.append(*range(60, 64))
    assert not go_on(scheduler, second, 4, ids(1, 16)).reqs_to_store
    scheduler.update_connector_output(finished(again))
    assert readable(manager) == set(first.keys())


def test_what_others_find_in_the_engines_cache_is_stored_as_far_as_it_was_recomputed() -> None:
    scheduler, _ = make_scheduler()
    request = prompt(40)
    job = job_of(load_elsewhere(scheduler, request, ids(10)))
    scheduler.update_connector_output(finished(job, invalid_block_ids={3}))
    request.num_computed_tokens = 8
    go_on(scheduler, request, 12)  # the first of several chunks: blocks 6 to 10 are not recomputed yet
    assert run_prompt(scheduler, prompt(24, "a"), [*ids(5), 20], computed=20).reqs_to_store
    assert not run_prompt(scheduler, prompt(28, "b"), [*ids(6), 21], computed=24).reqs_to_store
    go_on(scheduler, request, 20)
    fork = prompt(44, "c")
    fork.all_token_ids[-1] = 99
    fork.update_hashes()
    assert stored(run_prompt(scheduler, fork, [*ids(10), 22], computed=40), "c")[0].block_ids.tolist()[-1] == 22


def test_a_request_that_found_only_blocks_computed_on_top_is_not_stored() -> None:
    """The block that was not filled has left the second request's sliding window."""
    scheduler, manager = make_scheduler(8)
    first, second = prompt(40), prompt(60, "r2")
    jobs = [job_of(load_elsewhere(scheduler, first, ids(10)))]
    jobs.append(job_of(run_prompt(scheduler, second, [0] * 8 + [9, 10, *ids(5, 11)], computed=40), "r2"))
    scheduler.update_connector_output(finished(*jobs, invalid_block_ids={3}))
    assert not manager.rows


@pytest.mark.parametrize("ends", ["aborted", "preempted"])
def test_blocks_of_a_request_that_is_gone_when_the_failure_is_reported_are_not_stored_for_others(ends: str) -> None:
    """The engine does not revisit blocks of an ended request, so they stay in the engine's prefix cache."""
    scheduler, manager = make_scheduler()
    request = prompt(40)
    manager.refuse_stores = True
    load_elsewhere(scheduler, request, ids(10))
    manager.refuse_stores = False
    if ends == "aborted":
        scheduler.request_finished(request, ids(10))
    else:
        scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
    scheduler.update_connector_output(finished(invalid_block_ids={3}))
    assert not run_prompt(scheduler, prompt(48, "a"), [*ids(10), 21, 22], computed=40).reqs_to_store
    scheduler.request_finished(prompt(48, "a"), [])
    assert not run_prompt(scheduler, prompt(52, "b"), [*ids(10), 21, 22, 23], computed=48).reqs_to_store
    anew = run_prompt(scheduler, prompt(48, "c"), [21, 22, *ids(10)])
    assert stored(anew, "c")[0].block_ids.tolist() == [21, 22, *ids(10)]


def test_a_request_that_ends_before_another_connector_has_loaded_its_blocks_stores_nothing() -> None:
    """The end of a request offers refused stores again, but these blocks are not filled yet."""
    scheduler, manager = make_scheduler()
    request = prompt(40)
    manager.refuse_stores = True
    run_prompt(scheduler, request, ids(10))
    manager.refuse_stores = False
    scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, FakeBlocks((ids(10, 21),)), 0)
    idle_step(scheduler)
    request.num_computed_tokens = FILLED  # vLLM counts these tokens as computed while an asynchronous load runs
    scheduler.request_finished(request, ids(6, 21))
    assert not idle_step(scheduler).reqs_to_store


@pytest.mark.parametrize("reported_first", [True, False])
def test_what_is_offered_at_the_end_of_a_request_is_judged_too(reported_first: bool) -> None:
    """The request was aborted during the step in which the load failed."""
    scheduler, manager = make_scheduler()
    request = prompt(40)
    manager.refuse_stores = True
    load_elsewhere(scheduler, request, ids(10))
    manager.refuse_stores = False
    scheduler.request_finished(request, ids(10))
    if reported_first:
        scheduler.update_connector_output(finished(invalid_block_ids={3}))
        assert not idle_step(scheduler).reqs_to_store
    else:
        job = job_of(idle_step(scheduler))
        scheduler.update_connector_output(finished(job, invalid_block_ids={3}))
    assert not manager.rows


def test_requests_that_have_none_of_the_blocks_go_on_as_before() -> None:
    scheduler, manager = make_scheduler(offload_prompt_only=False)
    request, other = prompt(40), FakeRequest("r2", list(range(100, 140)))
    jobs = [
        job_of(load_elsewhere(scheduler, request, ids(10))),
        job_of(run_prompt(scheduler, other, ids(10, 31)), "r2"),
    ]
    scheduler.update_connector_output(finished(*jobs, invalid_block_ids={3}))
    assert readable(manager) == set(other.keys())
    other.append(*range(4))
    assert go_on(scheduler, other, 4, ids(1, 41)).reqs_to_store


def test_a_failed_load_of_our_own_concerns_its_request_alone() -> None:
    scheduler, manager = make_scheduler()
    request = prompt(40)
    manager.hold(request.keys()[:8])
    assert scheduler.get_num_new_matched_tokens(request, 0) == (32, True)
    scheduler.update_state_after_alloc(request, FakeBlocks((ids(10),)), 32)
    job = idle_step(scheduler).reqs_to_load["r1"].job_id
    request.num_computed_tokens = 32
    scheduler.update_connector_output(finished(job, failed=[job], invalid_block_ids={4}, finished_recving={"r1"}))
    assert run_prompt(scheduler, FakeRequest("r2", list(range(100, 140))), [*ids(4), *ids(6, 31)]).reqs_to_store


class TestFences:
    """Another connector may load into blocks that our stores are still reading."""

    def deferred(self) -> tuple[OffloadingConnectorScheduler, int]:
        """Return a scheduler with a running store whose request has ended, and the store's job id."""
        scheduler, _ = make_scheduler()
        request = FakeRequest("old", list(range(100, 140)))
        job = job_of(run_prompt(scheduler, request, ids(10)), "old")
        scheduler.request_finished(request, ids(10))
        return scheduler, job

    def test_before_a_synchronous_load_the_stores_of_its_blocks_end(self) -> None:
        scheduler, job = self.deferred()
        assert load_elsewhere(scheduler, prompt(40), [*ids(2), *ids(8, 21)]).jobs_to_flush == {job}

    def test_before_an_asynchronous_load_the_stores_of_its_blocks_end(self) -> None:
        scheduler, job = self.deferred()
        request = prompt(40)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(6),)), 0)
        assert idle_step(scheduler).jobs_to_flush == {job}

    def test_blocks_that_were_found_are_only_read(self) -> None:
        scheduler, _ = self.deferred()
        assert not load_elsewhere(scheduler, prompt(40), [*ids(2), *ids(8, 21)], found=8).jobs_to_flush


def test_blocks_of_requests_that_ended_long_ago_say_nothing() -> None:
    """Other requests own these blocks now, and must not lose their stores."""
    scheduler, manager = make_scheduler()
    run_prompt(scheduler, FakeRequest("old", list(range(100, 140))), [3, *ids(9, 31)])
    scheduler.request_finished(FakeRequest("old", []), [])
    for _ in range(STEPS_IN_FLIGHT + 1):
        idle_step(scheduler)
    other = FakeRequest("r2", list(range(200, 236)))
    jobs = [
        job_of(run_prompt(scheduler, other, ids(9, 31)), "r2"),
        job_of(load_elsewhere(scheduler, prompt(40), ids(10))),
    ]
    scheduler.update_connector_output(finished(*jobs, invalid_block_ids={3}))
    assert readable(manager) == set(other.keys())
