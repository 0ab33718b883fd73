"""Loads of a request: the hit that the connector offers, and the load after the allocation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.connector.fakes import (
    FakeBlocks,
    FakeConnectorOutput,
    FakeRequest,
    FakeSchedulerOutput,
    finished,
    go_on,
    idle_step,
    ids,
    loaded,
    make_scheduler,
    prompt,
    run_prompt,
    start_load,
)
from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.testing.clock import FakeClock


class TestSources:
    def test_of_a_load_tell_the_media_that_blocks_were_brought_from_and_leave_the_rest_to_the_cpu(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys())
        manager.sources = {**dict.fromkeys(request.keys()[2:4], "DISK"), request.keys()[7]: "OBJECT"}
        tokens, _ = scheduler.get_num_new_matched_tokens(request, 0)
        assert tokens == 32
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(8),)), 32)
        assert scheduler.get_hit_sources(request, 32) == {"DISK": 8, "OBJECT": 4, "CPU": 20}

    def test_make_the_primary_tiers_hits_those_that_no_other_tier_brought(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys()[:6])
        manager.sources = dict.fromkeys(request.keys()[2:4], "DISK")
        for _ in range(3):  # the engine asks in each step until it has room
            scheduler.get_num_new_matched_tokens(request, 4)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(6),)), 20)
        told = scheduler.get_stats()["tiers"]["cpu"]
        assert (told["queries"], told["hits"]) == (7, 3)

    def test_count_a_request_that_loads_again_once(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys())
        for _ in range(2):
            scheduler.get_num_new_matched_tokens(request, 0)
            scheduler.update_state_after_alloc(request, FakeBlocks((ids(8),)), 32)
            meta = idle_step(scheduler)
            scheduler.update_connector_output(finished(meta.reqs_to_load["r1"].job_id))
        told = scheduler.get_stats()["tiers"]["cpu"]
        assert (told["queries"], told["hits"]) == (8, 8)

    def test_never_tell_of_more_tokens_than_are_loaded(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys())
        manager.sources = dict.fromkeys(request.keys(), "DISK")
        assert scheduler.get_num_new_matched_tokens(request, 26) == (6, True)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(8),)), 6)
        assert scheduler.get_hit_sources(request, 6) == {"DISK": 6}


def stored_blocks(meta: OffloadingConnectorMetadata) -> list[int]:
    """Return the GPU blocks that the step stores for "r1"."""
    source = meta.reqs_to_store["r1"].spec[0]
    assert isinstance(source, GPULoadStoreSpec)
    return [int(block) for block in source.block_ids]


class TestMatch:
    def test_counts_the_held_tokens_beyond_the_computed_ones(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys()[:5])
        assert scheduler.get_num_new_matched_tokens(request, 8) == (12, True)

    def test_offers_the_whole_prompt_when_all_of_it_is_held(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys())
        assert scheduler.get_num_new_matched_tokens(request, 0) == (32, True)

    def test_ignores_blocks_behind_a_hole(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys()[:2] + request.keys()[3:])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (8, True)

    def test_answers_no_tokens_when_nothing_is_held(self) -> None:
        scheduler, _ = make_scheduler()
        assert scheduler.get_num_new_matched_tokens(prompt(32), 0) == (0, False)

    def test_answers_no_tokens_for_a_prompt_without_a_full_block(self) -> None:
        scheduler, _ = make_scheduler()
        assert scheduler.get_num_new_matched_tokens(prompt(3), 0) == (0, False)

    def test_asks_to_come_back_while_the_answer_may_change(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys()[:4])
        manager.undecided = {request.key(4)}
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        manager.undecided.clear()
        assert scheduler.get_num_new_matched_tokens(request, 0) == (16, True)

    def test_does_not_search_again_while_the_manager_says_that_nothing_has_changed(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.undecided = set(request.keys())
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        manager.unchanged = True
        searches = len(manager.asked)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        assert len(manager.asked) == searches
        assert scheduler.get_num_new_matched_tokens(request, 4) == (None, False), "the engine has found a block"
        assert len(manager.asked) == searches + 1
        manager.undecided.clear()
        manager.unchanged = False
        assert scheduler.get_num_new_matched_tokens(request, 4) == (0, False)
        manager.unchanged = True
        manager.hold(request.keys()[:4])
        assert scheduler.get_num_new_matched_tokens(request, 4) == (12, True), "only pending answers are kept"

    def test_waits_until_all_pending_answers_are_known_if_the_engine_lets_it(self) -> None:
        scheduler, manager = make_scheduler()
        first, second = prompt(32), FakeRequest("r2", list(range(100, 132)))
        manager.undecided = {first.key(0), second.key(0)}
        for request in (first, second):
            assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        looks: list[bool] = []

        def wait_until(answered: Callable[[], bool], seconds: float) -> None:
            assert seconds == 7.0
            for request in (first, second):
                looks.append(answered())
                manager.undecided.discard(request.key(0))
            looks.append(answered())

        manager.wait_until = wait_until  # type: ignore[method-assign]
        steps = manager.steps
        scheduler.await_answers(7.0)
        assert looks == [False, False, True]
        assert manager.steps == steps + 3, "what the answers begin goes on"
        assert scheduler.get_num_new_matched_tokens(first, 0) == (0, False)

    def test_forgets_blocks_of_an_epoch_that_ends_while_it_waits(self) -> None:
        scheduler, manager = make_scheduler()
        request = FakeRequest("r2", list(range(100, 132)))
        manager.undecided = {request.key(0)}
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)

        def wait_until(answered: Callable[[], bool], seconds: float) -> None:
            manager.epoch_begins = True
            answered()

        manager.wait_until = wait_until  # type: ignore[method-assign]
        scheduler.await_answers(7.0)
        meta = run_prompt(scheduler, prompt(32), ids(8))
        scheduler.update_connector_output(finished(meta.reqs_to_store["r1"].job_id))
        assert [success for _, success in manager.completed_stores] == [True], "stores of the new epoch count"

    def test_waits_for_no_answer_while_copies_run(self) -> None:
        scheduler, manager = make_scheduler()
        request, held = FakeRequest("r2", list(range(100, 132))), prompt(32)
        manager.hold(held.keys())
        start_load(scheduler, held, ids(8))
        manager.undecided = {request.key(0)}
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        manager.wait_until = lambda answered, seconds: pytest.fail("it waits")  # type: ignore[method-assign]
        scheduler.await_answers(7.0)

    @pytest.mark.parametrize(
        ("block_size", "computed", "answer"),
        [
            (8, 4, (20, True)),
            (8, 8, (16, True)),
            (8, 20, (0, False)),
            (16, 4, (0, False)),
            (16, 0, (16, True)),
        ],
    )
    def test_begins_at_the_offloaded_block_of_the_first_uncomputed_token(
        self, block_size: int, computed: int, answer: tuple[int, bool]
    ) -> None:
        scheduler, manager = make_scheduler(block_size=block_size)
        request = prompt(40)
        manager.hold(request.keys(factor=block_size // 4)[: 24 // block_size])
        assert scheduler.get_num_new_matched_tokens(request, computed) == answer
        assert manager.asked[0] == request.keys(factor=block_size // 4)[computed // block_size :]

    def test_less_than_one_offloaded_block_is_not_worth_a_load(self) -> None:
        scheduler, manager = make_scheduler(block_size=8)
        request = prompt(16)
        manager.hold(request.keys(factor=2)[:1])
        assert scheduler.get_num_new_matched_tokens(request, 4) == (0, False)


class TestRepeatedQuestions:
    def test_the_blocks_are_touched_once_from_the_head_of_the_prefix(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        for _ in range(5):
            scheduler.get_num_new_matched_tokens(request, 0)
        assert manager.touched == [request.keys()]

    def test_the_manager_hears_of_the_request_once(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        scheduler.on_new_request(request)
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        assert manager.live == {"r1"}

    def test_no_key_is_built_twice(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.get_num_new_matched_tokens(request, 0)
        first, second = manager.asked
        assert all(one is other for one, other in zip(first, second, strict=True))

    def test_a_repeated_hit_pins_and_queues_nothing(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys())
        for _ in range(3):
            scheduler.get_num_new_matched_tokens(request, 0)
        assert set(manager.refs.values()) == {0}
        assert idle_step(scheduler) == OffloadingConnectorMetadata()

    def test_a_block_that_has_gone_meanwhile_shortens_the_hit(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys())
        scheduler.get_num_new_matched_tokens(request, 0)
        manager.drop(request.key(3))
        assert scheduler.get_num_new_matched_tokens(request, 0) == (12, True)

    def test_hashes_that_appear_later_are_asked_for(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys())
        late, request.block_hashes = request.block_hashes, request.block_hashes[:3]
        assert scheduler.get_num_new_matched_tokens(request, 0) == (12, True)
        request.block_hashes = late
        assert scheduler.get_num_new_matched_tokens(request, 0) == (32, True)


class TestWindows:
    """A group with a window of 8 tokens: two blocks of 4 before the end of the hit."""

    def test_only_the_last_window_of_a_window_group_is_needed(self) -> None:
        scheduler, manager = make_scheduler(None, 8)
        request = prompt(33)
        manager.hold(request.keys(0) + request.keys(1)[6:])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (32, True)
        assert manager.asked[-1] == request.keys(1)[6:]

    def test_a_missing_window_block_moves_the_end_to_its_left(self) -> None:
        scheduler, manager = make_scheduler(None, 8)
        request = prompt(33)
        manager.hold(request.keys(0) + request.keys(1)[:6] + request.keys(1)[7:])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (24, True)

    def test_a_hit_shorter_than_the_window_needs_all_its_blocks(self) -> None:
        scheduler, manager = make_scheduler(None, 64)
        request = prompt(33)
        manager.hold(request.keys(0) + request.keys(1)[1:])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)

    def test_every_group_must_hold_its_part(self) -> None:
        scheduler, manager = make_scheduler(None, 8, None)
        request = prompt(33)
        manager.hold(request.keys(0) + request.keys(1) + request.keys(2)[:5])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (20, True)

    def test_blocks_that_are_computed_already_are_not_asked_for(self) -> None:
        scheduler, manager = make_scheduler(None, 16)
        request = prompt(33)
        manager.hold(request.keys(0) + request.keys(1))
        assert scheduler.get_num_new_matched_tokens(request, 24) == (8, True)
        assert manager.asked[-1] == request.keys(1)[6:]

    def test_models_with_windows_only(self) -> None:
        scheduler, manager = make_scheduler(8)
        request = prompt(33)
        manager.hold(request.keys(0)[6:])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (32, True)

    def test_an_undecided_window_block_is_waited_for(self) -> None:
        scheduler, manager = make_scheduler(None, 8)
        request = prompt(33)
        manager.hold(request.keys(0) + request.keys(1)[6:7])
        manager.undecided = {request.key(7, 1)}
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)

    def test_the_search_to_the_left_takes_few_probes(self) -> None:
        scheduler, manager = make_scheduler(None, 8)
        request = prompt(4000)
        manager.hold(request.keys(0) + request.keys(1)[:2])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
        assert len(manager.asked) < 100

    def test_only_the_last_window_is_loaded(self) -> None:
        scheduler, manager = make_scheduler(None, 8)
        request = prompt(33)
        manager.hold(request.keys(0) + request.keys(1))
        source, destination = loaded(start_load(scheduler, request, ids(8), [0] * 6 + [21, 22]))
        assert destination.block_ids.tolist() == [*ids(8), 21, 22]
        assert destination.group_sizes == (8, 2)
        assert destination.block_indices == (0, 6)
        assert source.block_ids.tolist() == [manager.rows[key] for key in request.keys(0) + request.keys(1)[6:]]

    def test_a_window_larger_by_one_than_whole_blocks_leaves_a_token_to_compute(self) -> None:
        """The recomputed last token attends to one token further left than a hit of the whole prompt does."""
        scheduler, manager = make_scheduler(None, 5)
        request = prompt(32)
        manager.hold(request.keys(0) + request.keys(1))
        assert scheduler.get_num_new_matched_tokens(request, 0) == (28, True)


class TestPolicies:
    def test_a_request_that_may_not_load_is_offered_nothing(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32, kv_transfer_params={"kv_tiering": {"load": False}})
        manager.hold(request.keys())
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)

    def test_a_request_whose_whole_prompt_must_be_computed_is_offered_nothing(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        request.skip_reading_prefix_cache = True  # type: ignore[attr-defined]
        manager.hold(request.keys())
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)

    def test_max_load_tokens_limits_the_hit_to_whole_blocks(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32, kv_transfer_params={"kv_tiering": {"max_load_tokens": 18}})
        manager.hold(request.keys())
        assert scheduler.get_num_new_matched_tokens(request, 0) == (16, True)

    def test_a_wrong_policy_neither_loads_nor_stores_and_the_engine_goes_on(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32, kv_transfer_params={"kv_tiering": {"lod": False}})
        manager.hold(request.keys()[:4])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert not run_prompt(scheduler, request, ids(8)).reqs_to_store
        assert "kv_tiering.lod" in caplog.text


class TestLoad:
    def test_goes_from_the_rows_to_the_blocks_after_the_computed_ones(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(33)
        manager.hold(request.keys()[:6])
        source, destination = loaded(start_load(scheduler, request, ids(6), computed=8))
        assert source.block_ids.tolist() == [manager.rows[key] for key in request.keys()[2:6]]
        assert destination.block_ids.tolist() == [3, 4, 5, 6]
        assert destination.group_sizes == (4,)
        assert destination.block_indices == (2,)

    @pytest.mark.parametrize(("block_size", "computed"), [(8, 4), (8, 12), (16, 4), (16, 8), (16, 12), (16, 20)])
    def test_an_unaligned_start_skips_the_leading_part_of_the_first_block(self, block_size: int, computed: int) -> None:
        scheduler, manager = make_scheduler(block_size=block_size)
        request = prompt(65)
        keys = request.keys(factor=block_size // 4)
        manager.hold(keys)
        source, destination = loaded(start_load(scheduler, request, ids(16), computed=computed))
        assert destination.block_ids.tolist() == ids(16)[computed // 4 :]
        assert destination.block_indices == (computed // 4,)
        assert source.block_ids.tolist() == [manager.rows[key] for key in keys[computed // block_size :]]

    def test_the_second_call_for_the_same_load_queues_nothing(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(33)
        manager.hold(request.keys())
        meta = start_load(scheduler, request, ids(8))
        scheduler.update_connector_output(finished(meta.reqs_to_load["r1"].job_id))
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(9),)), 0)
        assert not idle_step(scheduler).reqs_to_load

    def test_its_blocks_stay_pinned_until_all_workers_have_finished(self) -> None:
        scheduler, manager = make_scheduler(world_size=2)
        request = prompt(33)
        manager.hold(request.keys())
        job = start_load(scheduler, request, ids(8)).reqs_to_load["r1"].job_id
        scheduler.update_connector_output(finished(job))
        assert set(manager.refs.values()) == {1}
        assert scheduler.has_pending_work()
        scheduler.update_connector_output(finished(job))
        assert set(manager.refs.values()) == {0}
        assert not scheduler.has_pending_work()

    def test_what_was_loaded_is_not_offered_for_storing(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(32)
        manager.hold(request.keys()[:4])
        job = start_load(scheduler, request, ids(4)).reqs_to_load["r1"].job_id
        scheduler.update_connector_output(finished(job))
        scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 16, ids(8)))
        assert manager.offered == [request.keys()[4:]]

    def test_an_engine_without_worker_metadata_ends_it_by_request(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(33)
        manager.hold(request.keys())
        start_load(scheduler, request, ids(8))
        scheduler.update_connector_output(FakeConnectorOutput(finished_recving={"r1"}, kv_connector_worker_meta=None))
        assert set(manager.refs.values()) == {0}
        assert not scheduler.has_pending_work()

    def test_a_request_received_without_a_load_does_not_end_that_of_another_of_its_name(self) -> None:
        """An aborted request's load may still run when a new request of the same id no longer finds its hit."""
        scheduler, manager = make_scheduler()
        request, later = prompt(33), prompt(33)
        manager.hold(request.keys())
        start_load(scheduler, request, ids(8))
        scheduler.request_finished(request, ids(8))
        scheduler.update_connector_output(finished())
        scheduler.on_new_request(later)
        scheduler.update_connector_output(FakeConnectorOutput(finished_recving={"r1"}, kv_connector_worker_meta=None))
        assert set(manager.refs.values()) == {1}
        assert scheduler.has_pending_work()

    def test_an_aborted_request_keeps_the_pins_until_the_copy_has_ended(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(33)
        manager.hold(request.keys())
        job = start_load(scheduler, request, ids(8)).reqs_to_load["r1"].job_id
        assert scheduler.request_finished(request, ids(8)) == (False, None)
        assert set(manager.refs.values()) == {1}
        assert manager.ended == ["r1"]
        scheduler.update_connector_output(finished(job, finished_recving={"r1"}))
        assert set(manager.refs.values()) == {0}

    def test_reports_of_unknown_jobs_are_ignored(self) -> None:
        scheduler, _ = make_scheduler()
        scheduler.update_connector_output(finished(7, 8, failed=[8]))
        assert not scheduler.has_pending_work()


class TestSharers:
    def start(self, clock: FakeClock, **extra: object):  # type: ignore[no-untyped-def]
        scheduler, manager = make_scheduler(clock=clock, **extra)
        first, second = prompt(33), prompt(37, "r2")
        manager.hold(first.keys())
        meta = start_load(scheduler, first, ids(8))
        return scheduler, second, meta.reqs_to_load["r1"].job_id

    def test_blocks_being_loaded_for_another_request_are_waited_for(self) -> None:
        scheduler, second, job = self.start(FakeClock())
        assert scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
        scheduler.update_connector_output(finished(job))
        assert scheduler.get_num_new_matched_tokens(second, 0) == (32, True)

    def test_the_wait_is_bounded(self) -> None:
        clock = FakeClock()
        scheduler, second, _ = self.start(clock, sharer_wait="500ms")
        assert scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
        clock.advance(0.49)
        assert scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
        clock.advance(0.02)
        assert scheduler.get_num_new_matched_tokens(second, 0) == (32, True)

    def test_sharers_do_not_queue_up_one_behind_another(self) -> None:
        clock = FakeClock()
        scheduler, second, _ = self.start(clock)
        third = prompt(41, "r3")
        scheduler.get_num_new_matched_tokens(second, 0)
        scheduler.get_num_new_matched_tokens(third, 0)
        clock.advance(2.0)
        start_load(scheduler, second, ids(8, 20))
        assert scheduler.get_num_new_matched_tokens(third, 0) == (32, True)

    def test_blocks_behind_those_being_loaded_are_not_waited_for(self) -> None:
        scheduler, manager = make_scheduler()
        first, second = prompt(17), prompt(33, "r2")
        manager.hold(second.keys())
        start_load(scheduler, first, ids(4))
        assert scheduler.get_num_new_matched_tokens(second, 16) == (16, True)

    def test_without_prefix_caching_nobody_waits(self) -> None:
        scheduler, second, _ = self.start(FakeClock(), prefix_caching=False)
        assert scheduler.get_num_new_matched_tokens(second, 0) == (32, True)

    def test_the_wait_can_be_turned_off(self) -> None:
        scheduler, second, _ = self.start(FakeClock(), sharer_wait=0)
        assert scheduler.get_num_new_matched_tokens(second, 0) == (32, True)

    def test_the_end_of_one_of_two_loads_of_the_same_blocks_is_not_the_end_of_the_other(self) -> None:
        clock = FakeClock()
        scheduler, second, first_job = self.start(clock)
        scheduler.get_num_new_matched_tokens(second, 0)
        clock.advance(2.0)
        start_load(scheduler, second, ids(8, 20))
        scheduler.update_connector_output(finished(first_job))
        assert scheduler.get_num_new_matched_tokens(prompt(41, "r3"), 0) == (None, False)


def test_a_request_goes_on_after_its_load() -> None:
    scheduler, manager = make_scheduler()
    request = prompt(40)
    manager.hold(request.keys()[:4])
    job = start_load(scheduler, request, ids(4)).reqs_to_load["r1"].job_id
    scheduler.update_connector_output(finished(job, finished_recving={"r1"}))
    first = scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 12, ids(7)))
    request.num_computed_tokens += 12
    second = go_on(scheduler, request, 12, [8, 9, 10])
    assert [stored_blocks(meta) for meta in (first, second)] == [[5, 6, 7], [8, 9, 10]]
