"""Small hits are loaded within the step in which they are found; all others are waited for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.connector.fakes import (
    FakeBlocks,
    FakeManager,
    FakeRequest,
    FakeSchedulerOutput,
    FakeSpec,
    finished,
    go_on,
    idle_step,
    ids,
    make_scheduler,
    prompt,
    run_prompt,
    start_load,
)
from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.connector.metadata import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.step_loads import ALONE, MEASURED, PROBE_BLOCKS, PROBE_EVERY, STEP_SECONDS
from tiering.connector.variants import Variant
from tiering.errors import TieringError

Scheduler = OffloadingConnectorScheduler


def scheduler_with(
    *requests: FakeRequest, blocks: int = 1000, windows: tuple[int | None, ...] = (None,), **options: Any
) -> tuple[Scheduler, FakeManager]:
    """Return a scheduler whose tier holds the requests' blocks.

    Args:
        blocks: number of blocks that may be loaded within a step; 0: nothing was measured.
    """
    scheduler, manager = make_scheduler(*windows, loads_within_step=True, **options)
    for request in requests:
        manager.hold(request.keys())
    if blocks:
        scheduler.loads.step_loads.measure(blocks, STEP_SECONDS)
    return scheduler, manager


def run(scheduler: Scheduler, request: FakeRequest, tokens: int, *block_ids: list[int]) -> OffloadingConnectorMetadata:
    """Schedule a request in the step that loads its first ``tokens`` tokens."""
    assert scheduler.get_num_new_matched_tokens(request, 0) == (tokens, False)
    assert scheduler.update_state_after_alloc(request, FakeBlocks(block_ids), tokens) == 0
    request.num_computed_tokens = tokens
    meta = scheduler.build_connector_meta(FakeSchedulerOutput().new(request, request.num_tokens - tokens, *block_ids))
    request.num_computed_tokens = request.num_tokens
    return meta


def run_another(scheduler: Scheduler) -> FakeRequest:
    """Let a request run that others are not to delay."""
    request = FakeRequest("runs", [900, 901])
    run_prompt(scheduler, request, ids(1, 90))
    return request


def test_a_hit_is_loaded_and_computed_in_one_step() -> None:
    request = prompt(18)
    scheduler, manager = scheduler_with(request)
    meta = run(scheduler, request, 16, ids(5))
    assert not meta.reqs_to_load
    order = meta.loads_within_step["r1"]
    assert order.spec[1].block_ids.tolist() == ids(4)  # type: ignore[attr-defined]
    assert set(manager.refs.values()) == {1}
    assert scheduler.fences.is_written([4])
    scheduler.update_connector_output(finished(order.job_id))
    assert set(manager.refs.values()) == {0}
    assert not scheduler.has_pending_work()
    counters = scheduler.get_stats()["connector"]
    assert (counters["loads"], counters["loads_within_step"], counters["hit_tokens"]) == (1, 1, 16)


def test_what_the_step_computes_behind_the_hit_is_stored_and_the_hit_is_not() -> None:
    request = prompt(25)
    scheduler, manager = make_scheduler(loads_within_step=True)
    manager.hold(request.keys()[:4])
    meta = run(scheduler, request, 16, ids(7))
    assert meta.reqs_to_store["r1"].spec[0].block_ids.tolist() == [5, 6]  # type: ignore[attr-defined]


def test_a_load_ends_after_the_store_that_reads_its_blocks() -> None:
    old, request = prompt(16, "old"), FakeRequest("r1", list(range(100, 118)))
    scheduler, manager = scheduler_with(request)
    store = run_prompt(scheduler, old, ids(4)).reqs_to_store["old"].job_id
    scheduler.request_finished(old, ids(4))
    meta = run(scheduler, request, 16, [9, 4, 3, 8, 7])
    assert meta.jobs_to_flush == {store}
    assert manager.refs[request.key(0)] == 1


def test_the_blocks_of_a_load_are_fenced_until_all_workers_have_reported_it() -> None:
    request, other = prompt(18), FakeRequest("r2", list(range(50, 58)))
    scheduler, _ = scheduler_with(request, world_size=2)
    job = run(scheduler, request, 16, ids(5)).loads_within_step["r1"].job_id
    scheduler.request_finished(request, ids(5))
    scheduler.update_connector_output(finished(job))
    assert job in run_prompt(scheduler, other, ids(2)).jobs_to_flush
    scheduler.update_connector_output(finished(job))
    assert not go_on(scheduler, other, 1, [4]).jobs_to_flush


def test_a_token_is_left_to_compute() -> None:
    request = prompt(16)
    scheduler, _ = scheduler_with(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (16, True)


def test_an_engine_that_does_not_ask_for_it_waits() -> None:
    request = prompt(18)
    scheduler, manager = make_scheduler()
    manager.hold(request.keys())
    scheduler.loads.step_loads.measure(1000, STEP_SECONDS)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (16, True)


def test_the_loads_of_a_step_share_its_budget() -> None:
    requests = [FakeRequest(f"r{number}", list(range(100 * number, 100 * number + 18))) for number in range(4)]
    scheduler, _ = scheduler_with(*requests, blocks=11)
    run_another(scheduler)
    for number, request in enumerate(requests[:2]):
        assert scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(5, 10 * number + 1),)), 16)
        request.num_computed_tokens = 16
    assert scheduler.get_num_new_matched_tokens(requests[2], 0) == (16, True)
    step = FakeSchedulerOutput().new(requests[0], 2, ids(5)).new(requests[1], 2, ids(5, 11))
    assert len(scheduler.build_connector_meta(step).loads_within_step) == 2
    assert scheduler.get_num_new_matched_tokens(requests[3], 0) == (16, False), "the next step has its own"


@pytest.mark.parametrize("leaves", ["ends", "is preempted"])
def test_a_step_in_which_no_request_runs_has_room_for_more(leaves: str) -> None:
    first, *hits = [FakeRequest(f"r{number}", list(range(100 * number, 100 * number + 18))) for number in range(10)]
    scheduler, _ = scheduler_with(first, *hits, blocks=4)
    running = run_another(scheduler)
    assert scheduler.get_num_new_matched_tokens(first, 0) == (16, False)
    scheduler.update_state_after_alloc(first, FakeBlocks((ids(5),)), 16)
    assert scheduler.get_num_new_matched_tokens(hits[0], 0) == (16, True), "another request runs"
    first.num_computed_tokens = 16
    job = scheduler.build_connector_meta(FakeSchedulerOutput().new(first, 2, ids(5))).loads_within_step["r0"].job_id
    scheduler.update_connector_output(finished(job))
    scheduler.request_finished(first, ids(5))
    if leaves == "ends":
        scheduler.request_finished(running, ids(1, 90))
    else:
        scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"runs"}))
    step = FakeSchedulerOutput()
    for number, request in enumerate(hits[:ALONE]):
        assert scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(5, 10 + 5 * number),)), 16)
        request.num_computed_tokens = 16
        step.new(request, 2, ids(5, 10 + 5 * number))
    assert scheduler.get_num_new_matched_tokens(hits[ALONE], 0) == (16, True)
    assert len(scheduler.build_connector_meta(step).loads_within_step) == ALONE
    assert scheduler.get_num_new_matched_tokens(hits[ALONE], 0) == (16, False), "there is room for one beside them"


def test_a_hit_that_got_no_blocks_takes_no_room() -> None:
    first, second = prompt(18), FakeRequest("r2", list(range(100, 118)))
    scheduler, _ = scheduler_with(first, second, blocks=4)
    run_another(scheduler)
    assert scheduler.get_num_new_matched_tokens(first, 0) == (16, False)
    assert scheduler.get_num_new_matched_tokens(second, 0) == (16, False)
    assert not idle_step(scheduler).loads_within_step


def test_another_connector_may_load_instead() -> None:
    request = prompt(18)
    scheduler, manager = scheduler_with(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
    assert scheduler.update_state_after_alloc(request, FakeBlocks((ids(5),)), 0) == 0
    request.num_computed_tokens = 12
    meta = scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 6, ids(5)))
    assert not meta.loads_within_step
    assert set(manager.refs.values()) <= {0, -1}
    assert scheduler.get_stats()["connector"]["loads_within_step"] == 0


class TestTheMeasurement:
    def test_the_first_small_hit_is_loaded_to_be_measured(self) -> None:
        size = 4 * PROBE_BLOCKS
        small, next_one, large = prompt(size + 1), prompt(size + 1, "r2"), prompt(size + 5, "r3")
        scheduler, _ = scheduler_with(large, blocks=0)
        assert scheduler.get_num_new_matched_tokens(large, 0) == (size + 4, True)
        run(scheduler, small, size, ids(PROBE_BLOCKS + 1))
        assert scheduler.get_num_new_matched_tokens(next_one, 0) == (size, True)

    def test_slow_copies_are_measured_again(self) -> None:
        requests = [prompt(18, f"r{number}") for number in range(2 * PROBE_EVERY)]
        scheduler, _ = scheduler_with(requests[0], blocks=0)
        scheduler.loads.step_loads.measure(4, 1.0)
        within_step = []
        for number, request in enumerate(requests):
            if not scheduler.get_num_new_matched_tokens(request, 0)[1]:
                within_step.append(number)
                scheduler.update_state_after_alloc(request, FakeBlocks((ids(5),)), 16)
            idle_step(scheduler)
        assert within_step == [0, PROBE_EVERY]

    def test_a_hit_that_got_no_blocks_leaves_the_measurement_to_the_next_one(self) -> None:
        first, second, third = prompt(18), prompt(18, "r2"), prompt(18, "r3")
        scheduler, _ = scheduler_with(first, blocks=0)
        for _ in range(3):  # the engine has no blocks for it
            assert scheduler.get_num_new_matched_tokens(first, 0) == (16, False)
            assert not idle_step(scheduler).loads_within_step
        run(scheduler, second, 16, ids(5))
        assert scheduler.get_num_new_matched_tokens(third, 0) == (16, True)

    def test_the_fastest_of_the_latest_loads_counts(self) -> None:
        request, probe = prompt(18), prompt(18, "r2")
        scheduler, _ = scheduler_with(request, blocks=4)
        run_another(scheduler)
        loads = scheduler.loads.step_loads
        loads.fits(prompt_state(scheduler), 0, 16)  # takes no probe
        for _ in range(MEASURED - 1):
            loads.measure(1, STEP_SECONDS)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
        loads.measure(1, STEP_SECONDS)
        run(scheduler, probe, 16, ids(5))
        assert scheduler.get_num_new_matched_tokens(request, 0) == (16, True)

    def test_a_load_is_as_slow_as_on_the_slowest_worker(self) -> None:
        report = OffloadingWorkerMetadata({1: 1}, load_seconds={1: 0.5})
        other = OffloadingWorkerMetadata({1: 1, 2: 1}, load_seconds={1: 0.7, 2: 0.1})
        assert report.aggregate(other).load_seconds == {1: 0.7, 2: 0.1}


def prompt_state(scheduler: Scheduler) -> Any:
    """Return the state of a request with a hit."""
    request = prompt(18, "asked before")
    scheduler.get_num_new_matched_tokens(request, 0)
    return scheduler.states[request.request_id]


FULL = KVCacheGroup(("a",), 4)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        pytest.param((FULL, KVCacheGroup(("b",), 4, None, "mamba")), {}, id="states"),
        pytest.param((FULL,), {"hash_block_size": 2}, id="parts of blocks have names"),
        pytest.param((FULL,), {"has_scratch": True}, id="groups without names"),
    ],
)
def test_models_whose_blocks_the_engine_copies_or_fills_early_wait(
    groups: tuple[KVCacheGroup, ...], words: dict[str, Any]
) -> None:
    words = {"hash_block_size": 4, **words}
    spec = FakeSpec(EngineConfig((4,) * len(groups), groups=groups, loads_within_step=True, **words))
    assert not Scheduler(spec).loads.step_loads.is_possible
    spec = FakeSpec(EngineConfig((4,), 4, (FULL,), loads_within_step=True))
    assert Scheduler(spec).loads.step_loads.is_possible


def test_requests_with_an_adapter_wait() -> None:
    request = prompt(18)
    scheduler, _ = scheduler_with(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
    state = scheduler.states["r1"]
    assert scheduler.loads.step_loads.fits(state, 0, 16)
    state.variant = Variant()
    assert not scheduler.loads.step_loads.fits(state, 0, 16)


def test_blocks_of_one_group_that_the_search_of_another_dropped_are_waited_for() -> None:
    request = prompt(18)
    scheduler, manager = scheduler_with(windows=(None, 8))
    for group in range(2):
        manager.hold(request.keys(group))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
    state = scheduler.states["r1"]
    manager.drop(request.key(0))
    assert not scheduler.loads.step_loads.fits(state, 0, 16)


def test_a_hit_that_needs_no_block_is_no_load(caplog: pytest.LogCaptureFixture) -> None:
    """At the border of a chunk, no token is read any more. Engines without a prefix cache ask there."""
    chunks = KVCacheGroup(("b",), 4, 8, "chunked_local_attention")
    scheduler = Scheduler(FakeSpec(EngineConfig((4,), 4, (chunks,), loads_within_step=True)))
    request = prompt(18)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
    assert scheduler.update_state_after_alloc(request, FakeBlocks(([0, 0, 0, 0],)), 16) == 16
    meta = idle_step(scheduler)
    assert not meta.loads_within_step
    assert meta.failed_loads == {"r1": []}, "the workers report the request as received"
    assert scheduler.get_stats()["connector"]["hits_shrunk"] == 0
    assert not caplog.text
    scheduler.update_connector_output(finished(finished_recving={"r1"}))
    assert scheduler.states["r1"].may_load
    assert scheduler.states["r1"].groups[0].cursor == 4, "what is held is not stored again"


def test_a_block_that_is_lost_ends_the_engine_rather_than_be_computed_with() -> None:
    request = prompt(18)
    scheduler, manager = scheduler_with(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
    manager.drop(request.key(2))
    with pytest.raises(TieringError, match="must not run"):
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(5),)), 16)


def test_a_reset_lets_a_load_within_the_step_end() -> None:
    request = prompt(18)
    scheduler, manager = scheduler_with(request)
    job = run(scheduler, request, 16, ids(5)).loads_within_step["r1"].job_id
    scheduler.reset_cache()
    assert idle_step(scheduler).jobs_to_flush == {job}
    scheduler.update_connector_output(finished(job))
    assert not scheduler.has_pending_work()
    assert not manager.lost


def test_a_gating_manager_is_told_of_the_step_that_computes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the step of the load, or the one after a load that the request waits for."""
    noted: list[str] = []
    monkeypatch.setattr(FakeManager, "gates_loads", True)
    monkeypatch.setattr(FakeManager, "note_scheduled", lambda _, ctx: noted.append(ctx.req_id))
    within, waits = prompt(18, "within"), prompt(16, "waits")
    scheduler, _ = scheduler_with(within)
    run(scheduler, within, 16, ids(5))
    assert noted == ["within"]
    meta = start_load(scheduler, waits, ids(4))
    scheduler.update_connector_output(finished(meta.reqs_to_load["waits"].job_id))
    assert noted == ["within"]
    scheduler.update_state_after_alloc(waits, FakeBlocks((ids(4),)), 0)
    assert noted == ["within", "waits"]
