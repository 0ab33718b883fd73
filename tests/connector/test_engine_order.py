"""Orders of calls that engines make at the ends of requests and around resets."""

from __future__ import annotations

import pytest

from tests.connector.fakes import (
    FakeBlocks,
    FakeSchedulerOutput,
    finished,
    go_on,
    idle_step,
    ids,
    loaded,
    make_scheduler,
    prompt,
    run_prompt,
)


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("prompt_tokens", [7, 6])
def test_a_block_that_the_last_sampled_token_completes_is_not_stored(
    prompt_tokens: int, runs_ahead: bool, is_refused: bool
) -> None:
    """The engine computes no KV for it, or does so only in a step that was scheduled before it was known."""
    scheduler, manager = make_scheduler(offload_prompt_only=False)
    request, manager.refuse_stores = prompt(prompt_tokens), is_refused
    run_prompt(scheduler, request, ids(2))
    if runs_ahead:
        request.num_output_placeholders = 1
        go_on(scheduler, request, 1)
    manager.refuse_stores = False
    request.append(99)
    scheduler.request_finished(request, ids(2))
    idle_step(scheduler)
    assert {key for keys in manager.offered for key in keys} == {request.key(0)}


def test_a_request_that_ends_while_it_waits_stores_nothing() -> None:
    scheduler, manager = make_scheduler()
    request = prompt(16)
    scheduler.on_new_request(request)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.request_finished(request, ())
    assert idle_step(scheduler).reqs_to_store == {}
    assert (manager.offered, manager.ended, scheduler.states) == ([], ["r1"], {})


def test_a_window_block_that_is_being_written_behind_a_missing_one_is_not_waited_for() -> None:
    scheduler, manager = make_scheduler(None, 8)
    request = prompt(17)
    manager.hold(request.keys(0) + request.keys(1)[:2] + request.keys(1)[3:])
    manager.refs[request.key(3, 1)] = -1
    assert scheduler.get_num_new_matched_tokens(request, 0) == (8, True)


def test_a_load_ordered_in_the_step_that_reports_its_request_as_preempted_goes_on() -> None:
    """An engine that empties its cache preempts running requests, and may match them in the same step."""
    scheduler, manager = make_scheduler()
    request = prompt(9)
    meta = run_prompt(scheduler, request, ids(3))
    scheduler.update_connector_output(finished(meta.reqs_to_store["r1"].job_id))
    request.num_computed_tokens = 0
    assert scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    scheduler.update_state_after_alloc(request, FakeBlocks((ids(2, 11),)), 8)
    meta = scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
    assert loaded(meta)[1].block_ids.tolist() == ids(2, 11)
    assert meta.jobs_to_flush == frozenset()
    assert scheduler.states["r1"].filled_tokens == 8
    scheduler.update_connector_output(finished(meta.reqs_to_load["r1"].job_id))
    assert manager.completed_loads == [request.keys()[:2]]
