"""Resets that leave the engine's own cache as it is: blocks found in this cache are not stored."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest

from tests.connector.fakes import (
    FakeRequest,
    FakeSchedulerOutput,
    finished,
    go_on,
    ids,
    make_scheduler,
    prompt,
    run_prompt,
    stored,
)
from tiering.connector.scheduler import OffloadingConnectorScheduler


def pool(*, cached: Collection[int] = (), used: Collection[int] = (), blocks: int = 64) -> SimpleNamespace:
    """Return an engine's pool; ``cached`` blocks have names, ``used`` blocks have users, block 0 is null."""
    return SimpleNamespace(
        blocks=[
            SimpleNamespace(
                block_id=number,
                is_null=number == 0,
                ref_cnt=int(number in {0, *used}),
                block_hash=b"name" if number in cached else None,
            )
            for number in range(blocks)
        ]
    )


def reset_with(engine_pool: SimpleNamespace | None) -> OffloadingConnectorScheduler:
    scheduler, _ = make_scheduler(offload_prompt_only=False)
    if engine_pool is not None:
        scheduler.bind_gpu_block_pool(engine_pool)
    assert scheduler.reset_cache()
    return scheduler


@pytest.mark.parametrize(
    "engine_pool", [pool(cached=ids(4)), pool(used=ids(4)), None], ids=["cached", "in use", "no access"]
)
class TestWhatIsFound:
    def test_is_not_stored_nor_what_is_computed_on_top_of_it(self, engine_pool: SimpleNamespace | None) -> None:
        scheduler = reset_with(engine_pool)
        request = prompt(40)
        assert not run_prompt(scheduler, request, ids(10), computed=16).reqs_to_store
        request.append(*range(4))
        assert not go_on(scheduler, request, 4, ids(1, 11)).reqs_to_store

    def test_nor_what_others_find_of_that(self, engine_pool: SimpleNamespace | None) -> None:
        scheduler = reset_with(engine_pool)
        request = prompt(40)
        run_prompt(scheduler, request, [*ids(4), *ids(6, 21)], computed=16)
        scheduler.request_finished(request, [])
        for found in (20, 40):
            other = prompt(60, f"found {found}")
            table = [*ids(4), *ids(6, 21)][: found // 4] + ids(15, 31)
            assert not run_prompt(scheduler, other, table[:15], computed=found).reqs_to_store

    def test_is_not_stored_when_another_one_was_preempted_and_finds_it_again(
        self, engine_pool: SimpleNamespace | None
    ) -> None:
        scheduler = reset_with(engine_pool)
        request = prompt(40)
        jobs = [order.job_id for order in run_prompt(scheduler, request, ids(10), computed=16).reqs_to_store.values()]
        scheduler.update_connector_output(finished(*jobs, failed=jobs))
        scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
        assert not run_prompt(scheduler, request, ids(10), computed=16).reqs_to_store

    def test_what_is_computed_since_is_stored(self, engine_pool: SimpleNamespace | None) -> None:
        scheduler = reset_with(engine_pool)
        first = run_prompt(scheduler, prompt(40), ids(10))
        assert stored(first)[0].block_ids.tolist() == ids(10)
        scheduler.update_connector_output(
            finished(first.reqs_to_store["r1"].job_id, failed=[first.reqs_to_store["r1"].job_id])
        )
        again = run_prompt(scheduler, prompt(44, "r2"), [*ids(10), 21], computed=40)
        assert stored(again, "r2")[0].block_ids.tolist() == [*ids(10), 21]


def test_all_that_was_not_cached_is_stored_at_once() -> None:
    """The engine has emptied its cache too, as vLLM does when no request runs."""
    scheduler = reset_with(pool())
    assert run_prompt(scheduler, prompt(40), ids(10), computed=16).reqs_to_store


def test_what_a_running_request_computes_is_not_stored_for_others_either() -> None:
    scheduler, _ = make_scheduler(offload_prompt_only=False)
    running = prompt(32)
    job = run_prompt(scheduler, running, ids(8), tokens=16).reqs_to_store["r1"].job_id
    scheduler.bind_gpu_block_pool(pool(used=ids(8)))
    scheduler.reset_cache()
    scheduler.update_connector_output(finished(job))
    go_on(scheduler, running, 16)
    running.append(*range(4))
    go_on(scheduler, running, 4, [11])
    other = FakeRequest("r2", [*running.all_token_ids, *range(8)])
    assert not run_prompt(scheduler, other, [*ids(8), 11, 12, 13], computed=36).reqs_to_store


def test_a_part_of_an_old_block_that_the_engine_copied_into_a_new_one_is_not_stored() -> None:
    """For hybrid models vLLM reports whole blocks to the connector, and computes behind the copied part."""
    scheduler, _ = make_scheduler(None, 8)
    scheduler.bind_gpu_block_pool(pool(cached=[50]))
    scheduler.reset_cache()
    request = prompt(40)
    tables = ids(10), ids(10, 21)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: tables), 0)
    request.num_computed_tokens = 2
    assert not scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 38, *tables)).reqs_to_store


def test_a_second_reset_starts_over() -> None:
    scheduler = reset_with(pool(cached=ids(4)))
    run_prompt(scheduler, prompt(40), ids(10))
    scheduler.bind_gpu_block_pool(pool(cached=ids(10)))
    scheduler.reset_cache()
    assert not run_prompt(scheduler, prompt(44, "r2"), [*ids(10), 21], computed=40).reqs_to_store


class TestANewCommonEpoch:
    """The manager has emptied itself at the end of a step, and the engine's cache is as it was."""

    def test_makes_suspects_of_what_the_engine_holds(self) -> None:
        scheduler, manager = make_scheduler(offload_prompt_only=False)
        scheduler.bind_gpu_block_pool(pool(cached=ids(4)))
        manager.epoch_begins = True
        scheduler.build_connector_meta(FakeSchedulerOutput())
        request = prompt(40)
        assert not run_prompt(scheduler, request, ids(10), computed=16).reqs_to_store
        scheduler.request_finished(request, [])
        assert run_prompt(scheduler, prompt(40, "r2"), ids(10, 20)).reqs_to_store

    def test_lets_no_copy_in_flight_have_an_effect(self) -> None:
        scheduler, manager = make_scheduler(offload_prompt_only=False)
        manager.epoch_begins = True
        job = run_prompt(scheduler, prompt(32), ids(8)).reqs_to_store["r1"].job_id
        assert job in scheduler.build_connector_meta(FakeSchedulerOutput()).jobs_to_flush
        scheduler.update_connector_output(finished(job))
        assert [success for _, success in manager.completed_stores] == [False]

    def test_is_processed_once(self) -> None:
        scheduler, manager = make_scheduler(offload_prompt_only=False)
        manager.epoch_begins = True
        scheduler.build_connector_meta(FakeSchedulerOutput())
        first = run_prompt(scheduler, prompt(40), ids(10))
        job = first.reqs_to_store["r1"].job_id
        scheduler.update_connector_output(finished(job))
        assert [success for _, success in manager.completed_stores] == [True]
