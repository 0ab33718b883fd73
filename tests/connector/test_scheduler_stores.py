"""Stores of computed blocks: when the connector offers, orders and completes them."""

from __future__ import annotations

from typing import Never

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
    start_load,
    stored,
)
from tiering.api.request import OffloadPolicy
from tiering.connector.metadata import NOTHING_TO_DO, OffloadingConnectorMetadata
from tiering.connector.requests import RequestState
from tiering.connector.scheduler import OffloadingConnectorScheduler


class Untouched(dict[str, RequestState]):
    """States of requests that must not be looked up."""

    def get(self, key: str, default: object = None) -> Never:
        raise AssertionError(f"the state of {key} was looked up")


class TestWhichBlocks:
    def test_those_that_the_step_completes(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        source, destination = stored(run_prompt(scheduler, request, ids(8), tokens=18))
        assert source.block_ids.tolist() == ids(4)
        assert source.block_indices == (0,)
        assert destination.block_ids.tolist() == [manager.rows[key] for key in request.keys()[:4]]

    def test_each_once(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        run_prompt(scheduler, request, ids(5), tokens=18)
        source, _ = stored(go_on(scheduler, request, 14, [6, 7, 8]))
        assert source.block_ids.tolist() == [5, 6, 7, 8]
        assert source.block_indices == (4,)
        assert manager.offered == [request.keys()[:4], request.keys()[4:]]

    def test_requests_whose_prompts_are_stored_are_not_looked_at_while_they_decode(self) -> None:
        scheduler, _ = make_scheduler()
        request = prompt(32)
        run_prompt(scheduler, request, ids(8))
        request.append(1)
        scheduler.states = Untouched(scheduler.states)
        assert go_on(scheduler, request, 1) is NOTHING_TO_DO

    def test_a_request_that_starts_over_is_looked_at_again(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        meta = run_prompt(scheduler, request, ids(8))
        scheduler.update_connector_output(finished(meta.reqs_to_store["r1"].job_id))
        request.append(1)
        go_on(scheduler, request, 1)
        manager.drop(*request.keys())
        output = FakeSchedulerOutput(preempted_req_ids={"r1"})
        request.num_computed_tokens = 0
        scheduler.build_connector_meta(output)
        source, _ = stored(run_prompt(scheduler, request, ids(8, 11)))
        assert source.block_ids.tolist() == ids(8, 11)

    def test_only_those_that_the_manager_wants(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold([request.key(1), request.key(4)])
        request.num_computed_tokens = 0
        source, destination = stored(run_prompt(scheduler, request, ids(8)))
        assert source.block_ids.tolist() == [1, 3, 4, 6, 7, 8]
        assert destination.block_ids.tolist() == [manager.rows[request.key(index)] for index in (0, 2, 3, 5, 6, 7)]

    def test_none_if_the_manager_holds_them_all(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32, kv_transfer_params={"kv_tiering": {"load": False}})
        manager.hold(request.keys())
        assert run_prompt(scheduler, request, ids(8)) == OffloadingConnectorMetadata()
        assert not scheduler.has_pending_work()

    def test_rows_follow_their_keys_whatever_the_order_of_the_answer(self) -> None:
        scheduler, manager = make_scheduler(None, 64)
        manager.reverse_stores = True
        request = prompt(16)
        manager.hold([request.key(1, 1)])
        meta = run_prompt(scheduler, request, ids(4), ids(4, 21))
        source, destination = stored(meta)
        assert source.block_ids.tolist() == [1, 2, 3, 4, 21, 23, 24]
        assert source.group_sizes == (4, 3)
        wanted = request.keys(0) + [request.key(index, 1) for index in (0, 2, 3)]
        assert destination.block_ids.tolist() == [manager.rows[key] for key in wanted]
        scheduler.update_connector_output(finished(meta.reqs_to_store["r1"].job_id))
        assert set(manager.refs.values()) == {0}

    def test_what_the_gpu_had_already_is_offered_too(self) -> None:
        """A prefix that the tiers have lost would make all later blocks useless."""
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys()[1:4])
        source, _ = stored(run_prompt(scheduler, request, ids(8), computed=16))
        assert source.block_ids.tolist() == [1, 5, 6, 7, 8]

    def test_no_decoded_tokens_by_default(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(10)
        run_prompt(scheduler, request, ids(3))
        for token in range(8):
            request.append(100 + token)
            go_on(scheduler, request, 1)
        assert manager.offered == [request.keys()[:2]]

    def test_decoded_tokens_if_asked_for(self) -> None:
        scheduler, manager = make_scheduler(offload_prompt_only=False)
        request = prompt(10)
        run_prompt(scheduler, request, ids(5))
        for token in range(8):
            request.append(100 + token)
            go_on(scheduler, request, 1)
        assert manager.offered == [request.keys()[:2], [request.key(2)], [request.key(3)]]

    @pytest.mark.parametrize("block_size", [8, 16])
    def test_whole_offloaded_blocks_with_all_their_gpu_blocks(self, block_size: int) -> None:
        scheduler, manager = make_scheduler(block_size=block_size)
        factor = block_size // 4
        request = prompt(64)
        first = run_prompt(scheduler, request, ids(10), tokens=40)
        second = go_on(scheduler, request, 24, ids(6, 11))
        border = 40 // block_size * factor
        assert stored(first)[0].block_ids.tolist() == ids(border)
        assert stored(second)[0].block_ids.tolist() == ids(16 - border, border + 1)
        assert stored(second)[0].block_indices == (border,)
        assert manager.offered == [
            request.keys(factor=factor)[: border // factor],
            request.keys(factor=factor)[border // factor :],
        ]

    def test_a_hash_block_smaller_than_a_gpu_block(self) -> None:
        scheduler, manager = make_scheduler(gpu_block_size=8, hash_block_size=4)
        request = prompt(32)
        source, _ = stored(run_prompt(scheduler, request, ids(4)))
        assert source.block_ids.tolist() == ids(4)
        assert manager.offered == [request.keys(factor=2)]

    def test_policy_of_the_request(self) -> None:
        scheduler, manager = make_scheduler()
        silent = prompt(32, kv_transfer_params={"kv_tiering": {"store": False}})
        limited = prompt(32, "r2", kv_transfer_params={"kv_tiering": {"max_store_tokens": 13}})
        run_prompt(scheduler, silent, ids(8))
        run_prompt(scheduler, limited, ids(8, 11))
        assert manager.offered == [limited.keys()[:3]]

    def test_request_level_offers_all_blocks_also_loaded_ones(self) -> None:
        scheduler, manager = make_scheduler()
        manager.policy = OffloadPolicy.REQUEST_LEVEL
        request = prompt(32)
        manager.hold(request.keys()[:4])
        job = start_load(scheduler, request, ids(4)).reqs_to_load["r1"].job_id
        scheduler.update_connector_output(finished(job))
        scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 16, ids(8)))
        assert manager.offered == [request.keys()]


class TestConfirmedTokensOnly:
    def decoding(self) -> tuple[OffloadingConnectorScheduler, FakeManager, FakeRequest]:
        scheduler, manager = make_scheduler(offload_prompt_only=False)
        request = prompt(10)
        run_prompt(scheduler, request, ids(8))
        manager.offered.clear()
        return scheduler, manager, request

    def test_draft_tokens_may_be_rejected(self) -> None:
        scheduler, manager, request = self.decoding()
        request.append(100)
        scheduler.build_connector_meta(FakeSchedulerOutput().cached(request, 4))
        assert not manager.offered
        request.append(101)
        request.num_computed_tokens = 11
        scheduler.build_connector_meta(FakeSchedulerOutput().cached(request, 4))
        assert manager.offered == [[request.key(2)]]

    def test_placeholders_are_not_known_yet(self) -> None:
        scheduler, manager, request = self.decoding()
        request.append(100, 101)
        request.num_computed_tokens, request.num_output_placeholders = 11, 1
        scheduler.build_connector_meta(FakeSchedulerOutput().cached(request, 1))
        assert not manager.offered

    def test_the_cursor_waits_for_hashes_that_lag(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        hashes, request.block_hashes = request.block_hashes, request.block_hashes[:3]
        run_prompt(scheduler, request, ids(8))
        request.block_hashes = hashes
        request.append(100)
        source, _ = stored(go_on(scheduler, request, 1, [9]))
        assert source.block_ids.tolist() == [4, 5, 6, 7, 8]
        assert manager.offered == [request.keys()[:3], request.keys()[3:8]]


class TestNoRoom:
    def test_is_retried_at_a_later_step(self, caplog: pytest.LogCaptureFixture) -> None:
        scheduler, manager = make_scheduler()
        manager.refuse_stores = True
        request = prompt(16)
        assert not run_prompt(scheduler, request, ids(5)).reqs_to_store
        assert "no room in the primary tier" in caplog.text
        manager.refuse_stores = False
        taken: list[int] = []
        for token in range(8):
            request.append(100 + token)
            meta = go_on(scheduler, request, 1, [6 + token // 4] if token % 4 == 3 else [])
            taken += stored(meta)[0].block_ids.tolist() if meta.reqs_to_store else []
        assert taken == ids(4)

    def test_a_prompt_larger_than_the_room_is_stored_as_far_as_it_fits(self) -> None:
        from tests.connector.fakes import FakeManager

        scheduler, manager = make_scheduler(manager=FakeManager(capacity=5))
        request = prompt(32)
        run_prompt(scheduler, request, ids(9))
        for token in range(30):
            request.append(100 + token)
            go_on(scheduler, request, 1)
        assert set(manager.rows) >= set(request.keys()[:4])

    def test_the_warning_is_rate_limited(self, caplog: pytest.LogCaptureFixture) -> None:
        scheduler, manager = make_scheduler()
        manager.refuse_stores = True
        for index in range(20):
            run_prompt(scheduler, prompt(16, f"r{index}"), ids(4, 1 + 4 * index))
        assert sum("no room" in record.message for record in caplog.records) == 1

    def test_a_request_that_finds_no_room_again_and_again_asks_ever_more_rarely(self) -> None:
        scheduler, manager = make_scheduler()
        manager.refuse_stores = True
        request = prompt(16)
        run_prompt(scheduler, request, ids(60))
        for token in range(64):
            request.append(100 + token)
            go_on(scheduler, request, 1)
        assert 5 <= len(manager.offered) <= 10


class TestWindows:
    def test_all_groups_are_stored_in_one_job(self) -> None:
        scheduler, manager = make_scheduler(None, 8)
        request = prompt(16)
        source, destination = stored(run_prompt(scheduler, request, ids(4), ids(4, 21)))
        assert source.block_ids.tolist() == [1, 2, 3, 4, 21, 22, 23, 24]
        assert source.group_sizes == (4, 4)
        assert destination.block_ids.tolist() == [manager.rows[key] for key in request.keys(0) + request.keys(1)]

    def test_null_blocks_are_left_out(self) -> None:
        scheduler, manager = make_scheduler(None, 8)
        request = prompt(24)
        manager.hold(request.keys(0)[:4] + request.keys(1)[:4])
        job = start_load(scheduler, request, ids(4), [0, 0, 23, 24]).reqs_to_load["r1"].job_id
        scheduler.update_connector_output(finished(job))
        manager.policy = OffloadPolicy.REQUEST_LEVEL
        meta = scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 8, ids(6), [0, 0, 23, 24, 25, 26]))
        assert stored(meta)[0].block_ids.tolist() == [5, 6, 25, 26]

    def test_blocks_that_a_window_has_left_behind_are_not_read_any_more(self) -> None:
        """Another request may own these GPU blocks already."""
        scheduler, manager = make_scheduler(8)
        request = prompt(32)
        manager.refuse_stores = True
        run_prompt(scheduler, request, ids(4), tokens=16)
        manager.refuse_stores = False
        meta = go_on(scheduler, request, 4, [5])
        assert stored(meta)[0].block_ids.tolist() == [3, 4]
        assert manager.offered[-1] == request.keys()[2:4]

    def test_an_offloaded_block_with_a_null_part_is_not_stored(self) -> None:
        scheduler, manager = make_scheduler(8, block_size=8)
        request = prompt(16)
        run_prompt(scheduler, request, [0, 2, 3, 4])
        assert manager.offered == [request.keys(factor=2)[1:]]


class TestJobs:
    def test_blocks_become_readable_when_the_job_is_done_not_when_the_request_ends(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(16)
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        assert set(manager.refs.values()) == {-1}
        scheduler.update_connector_output(finished(job))
        assert set(manager.refs.values()) == {0}
        assert not manager.ended

    def test_done_means_on_all_workers(self) -> None:
        scheduler, manager = make_scheduler(world_size=3)
        job = run_prompt(scheduler, prompt(16), ids(4)).reqs_to_store["r1"].job_id
        scheduler.update_connector_output(finished(job, workers=2))
        assert set(manager.refs.values()) == {-1}
        scheduler.update_connector_output(finished(job))
        assert set(manager.refs.values()) == {0}

    def test_a_failure_on_one_worker_frees_what_was_being_stored(self) -> None:
        scheduler, manager = make_scheduler(world_size=2)
        request = prompt(16)
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        scheduler.update_connector_output(finished(job, failed=[job]))
        assert set(manager.refs.values()) == {-1}
        scheduler.update_connector_output(finished(job))
        assert not manager.rows
        assert manager.completed_stores == [(request.keys(), False)]

    def test_ids_grow(self) -> None:
        scheduler, _ = make_scheduler()
        jobs = [
            run_prompt(scheduler, FakeRequest(f"r{index}", list(range(index, index + 8))), ids(2, 1 + 2 * index))
            .reqs_to_store[f"r{index}"]
            .job_id
            for index in range(4)
        ]
        assert jobs == sorted(set(jobs))

    def test_a_finished_request_frees_its_blocks_at_once_and_its_store_completes_later(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(16)
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        assert scheduler.request_finished_all_groups(request, (ids(4),)) == (False, None)
        assert manager.ended == ["r1"]
        assert scheduler.has_pending_work()
        scheduler.update_connector_output(finished(job))
        assert manager.completed_stores == [(request.keys(), True)]
        assert not scheduler.has_pending_work()

    def test_a_request_that_was_never_seen_ends_quietly(self) -> None:
        scheduler, manager = make_scheduler()
        assert scheduler.request_finished(prompt(16), []) == (False, None)
        assert not manager.ended


class TestPreemption:
    def test_all_blocks_are_offered_again_from_their_new_places(self) -> None:
        scheduler, _manager = make_scheduler()
        request = prompt(16)
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        scheduler.update_connector_output(finished(job, failed=[job]))
        idle = scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
        assert not idle.reqs_to_store
        request.num_computed_tokens = 0
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(4, 11),)), 0)
        meta = scheduler.build_connector_meta(FakeSchedulerOutput().cached(request, 16, ids(4, 11), resumed=True))
        assert stored(meta)[0].block_ids.tolist() == ids(4, 11)

    def test_and_resumption_in_one_step_keep_the_new_blocks(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(20)
        run_prompt(scheduler, request, ids(5))
        request.num_computed_tokens = 0
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(5, 11),)), 0)
        output = FakeSchedulerOutput(preempted_req_ids={"r1"}).cached(request, 20, ids(5, 11), resumed=True)
        manager.drop(*[key for key in manager.rows if manager.refs[key] == 0])
        scheduler.build_connector_meta(output)
        assert scheduler.states["r1"].groups[0].block_ids == ids(5, 11)


class TestReset:
    def test_forgets_everything_and_ends_copies_before_the_next_step(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(16)
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        assert scheduler.reset_cache()
        assert idle_step(scheduler).jobs_to_flush == {job}
        assert not manager.rows
        scheduler.update_connector_output(finished(job))
        assert manager.completed_stores == [(request.keys(), False)]
        assert not idle_step(scheduler).jobs_to_flush

    def test_nothing_computed_before_it_is_stored_after_it(self) -> None:
        scheduler, _manager = make_scheduler()
        request = prompt(32)
        job = run_prompt(scheduler, request, ids(4), tokens=16).reqs_to_store["r1"].job_id
        scheduler.reset_cache()
        scheduler.update_connector_output(finished(job))
        assert not go_on(scheduler, request, 16, ids(4, 5)).reqs_to_store

    def test_a_request_that_starts_over_after_it_is_stored(self) -> None:
        scheduler, _manager = make_scheduler()
        request = prompt(32)
        job = run_prompt(scheduler, request, ids(4), tokens=16).reqs_to_store["r1"].job_id
        scheduler.reset_cache()
        scheduler.update_connector_output(finished(job))
        scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
        assert stored(run_prompt(scheduler, request, ids(8)))[0].block_ids.tolist() == ids(8)

    def test_while_old_copies_run_nothing_is_loaded_or_stored(self) -> None:
        """The end of an old copy must not be mistaken for the end of a new copy of the same block."""
        scheduler, manager = make_scheduler()
        request, other = prompt(16), prompt(16, "r2")
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        scheduler.reset_cache()
        manager.hold(other.keys())
        assert scheduler.get_num_new_matched_tokens(other, 0) == (0, False)
        manager.drop(*other.keys())
        assert not run_prompt(scheduler, other, ids(5, 11)).reqs_to_store
        scheduler.update_connector_output(finished(job))
        other.append(1)
        assert stored(go_on(scheduler, other, 1), "r2")[0].block_ids.tolist() == ids(4, 11)


class TestSteps:
    def test_each_ends_the_managers_step_once(self) -> None:
        scheduler, manager = make_scheduler()
        run_prompt(scheduler, prompt(16), ids(4))
        idle_step(scheduler)
        idle_step(scheduler)
        assert manager.steps == 3

    def test_pending_work_of_the_manager_counts(self) -> None:
        scheduler, manager = make_scheduler()
        assert not scheduler.has_pending_work()
        manager.has_pending_work = lambda: True  # type: ignore[method-assign]
        assert scheduler.has_pending_work()

    def test_statistics_are_plain_and_include_the_managers(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys()[:4])
        start_load(scheduler, request, ids(4))
        stats = scheduler.get_stats()
        assert stats["tiers"] == {"cpu": {"blocks": 4, "queries": 8, "hits": 4, "misses": 4}}
        assert stats["connector"]["queried_tokens"] == 32
        assert stats["connector"]["hit_tokens"] == 16
        assert stats["connector"]["jobs_active"] == 1

    def test_shutdown_reaches_the_manager_once(self) -> None:
        scheduler, manager = make_scheduler()
        scheduler.shutdown()
        scheduler.shutdown()
        assert manager.shutdowns == 1
