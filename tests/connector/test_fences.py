"""Block fences: a copy ends before the step that reuses one of its blocks."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.connector.fakes import (
    FakeBlocks,
    FakeSchedulerOutput,
    finished,
    go_on,
    ids,
    make_scheduler,
    prompt,
    run_prompt,
    start_load,
)
from tiering.api.transfer import as_rows
from tiering.connector.jobs import BlockFences


class TestTable:
    def test_a_fenced_block_conflicts_until_its_job_has_ended(self) -> None:
        fences = BlockFences()
        fences.fence(7, as_rows([3, 4]), writes=False)
        assert fences.conflicts([4, 5]) == {7}
        fences.release(7)
        assert not fences.conflicts([4, 5])

    def test_all_jobs_that_use_a_block_are_named(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([3]), writes=False)
        fences.fence(2, as_rows([3, 9]), writes=False)
        fences.fence(3, as_rows([9]), writes=False)
        assert fences.conflicts([3]) == {1, 2}
        fences.release(2)
        assert fences.conflicts([3, 9]) == {1, 3}

    def test_only_loads_write(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([3]), writes=False)
        fences.fence(2, as_rows([4]), writes=True)
        assert not fences.is_written([3])
        assert fences.is_written([3, 4])

    def test_block_ids_of_any_size(self) -> None:
        fences = BlockFences()
        assert not fences.conflicts([5_000_000])
        fences.fence(1, as_rows([1_000_000]), writes=False)
        assert fences.conflicts([1_000_000]) == {1}
        assert not fences.conflicts([5_000_000])

    def test_the_end_of_an_unknown_job_opens_no_fence(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([3]), writes=True)
        fences.release(99)
        assert fences.conflicts([3]) == {1}
        assert fences.is_written([3])

    def test_a_job_without_blocks_conflicts_with_nothing(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([]), writes=True)
        assert not fences.conflicts([0, 1])
        fences.release(1)
        fences.release(1)
        assert not len(fences)

    @given(st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(1, 12)), st.sets(st.integers(1, 12)))))
    def test_agrees_with_a_table_of_sets(self, steps: list[tuple[int, set[int], set[int]]]) -> None:
        fences = BlockFences()
        model: dict[int, set[int]] = {}
        for job, blocks, asked in steps:
            if job in model:
                fences.release(job)
                del model[job]
            else:
                fences.fence(job, np.array(sorted(blocks), np.int64), writes=bool(job % 2))
                model[job] = blocks
            assert fences.conflicts(sorted(asked)) == {name for name, held in model.items() if held & asked}
            assert fences.is_written(sorted(asked)) == any(held & asked for name, held in model.items() if name % 2)


class TestBorders:
    def test_a_write_ends_with_its_job(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([3, 4]), writes=True)
        fences.fence(2, as_rows([4]), writes=True)
        fences.release(1)
        assert not fences.is_written([3])
        assert fences.is_written([4])
        fences.release(2)
        assert not fences.is_written([3, 4])

    def test_the_end_of_a_read_ends_no_write(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([3]), writes=True)
        fences.fence(2, as_rows([3]), writes=False)
        fences.release(2)
        assert fences.is_written([3])
        assert fences.written([3]) == {3}

    def test_written_names_the_blocks_of_loads_only(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([3, 5]), writes=True)
        fences.fence(2, as_rows([4]), writes=False)
        assert fences.written({3, 4, 6, 5_000_000}) == {3}
        assert fences.written(()) == set()

    @pytest.mark.parametrize("block", [0, 1022, 1023, 1024, 1025, 2047, 2048, 4096, 4097])
    def test_every_block_id_up_to_the_largest_one_is_known(self, block: int) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([block]), writes=True)
        for asked in range(max(0, block - 2), block + 3):
            assert fences.conflicts([asked]) == ({1} if asked == block else set())
            assert fences.is_written([asked]) is (asked == block)
            assert fences.written([asked]) == ({block} if asked == block else set())

    def test_fences_survive_the_growth_of_the_table(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([3, 1000]), writes=True)
        fences.fence(2, as_rows([1500]), writes=False)
        fences.fence(3, as_rows([9000]), writes=True)
        assert fences.conflicts([3, 1500, 9000]) == {1, 2, 3}
        assert fences.written([3, 1000, 1500, 9000]) == {3, 1000, 9000}
        for job in (1, 2, 3):
            fences.release(job)
        assert not fences.conflicts([3, 1000, 1500, 9000])
        assert not fences.is_written([3, 1000, 1500, 9000])

    def test_blocks_of_names_the_blocks_of_a_job_until_it_has_ended(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([3, 9]), writes=False)
        assert fences.blocks_of(1) == [3, 9]
        assert fences.blocks_of(2) == []
        fences.release(1)
        assert fences.blocks_of(1) == []

    def test_the_number_of_fenced_jobs(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([3]), writes=False)
        fences.fence(2, as_rows([3]), writes=True)
        assert len(fences) == 2
        fences.release(1)
        assert len(fences) == 1

    def test_asked_for_no_block_nothing_conflicts(self) -> None:
        fences = BlockFences()
        fences.fence(1, as_rows([3]), writes=True)
        assert fences.conflicts([]) == set()
        assert not fences.is_written([])

    def test_further_fences_of_known_blocks_take_no_memory(self) -> None:
        fences = BlockFences()
        fences.fence(0, as_rows([3, 1000]), writes=True)
        tracemalloc.start()
        try:
            for job in range(1, 12):
                fences.fence(job, as_rows([3, 1000]), writes=True)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 16


class TestFlush:
    """The jobs that the step's metadata orders the workers to finish first."""

    def test_a_store_whose_blocks_a_new_request_gets(self) -> None:
        scheduler, _ = make_scheduler()
        request, other = prompt(16), prompt(8, "r2")
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        scheduler.request_finished(request, ids(4))
        assert run_prompt(scheduler, other, [9, 4]).jobs_to_flush == {job}

    def test_a_store_whose_blocks_a_running_request_gets(self) -> None:
        scheduler, _ = make_scheduler()
        request, other = prompt(16), prompt(8, "r2")
        run_prompt(scheduler, other, [10, 11])
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        scheduler.request_finished(request, ids(4))
        other.append(1)
        assert go_on(scheduler, other, 1, [3]).jobs_to_flush == {job}

    def test_a_store_whose_blocks_a_resumed_request_gets(self) -> None:
        scheduler, _ = make_scheduler()
        request = prompt(16)
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
        request.num_computed_tokens = 0
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, FakeBlocks(([2, 11, 12, 13],)), 0)
        output = FakeSchedulerOutput().cached(request, 16, [2, 11, 12, 13], resumed=True)
        assert scheduler.build_connector_meta(output).jobs_to_flush == {job}

    def test_a_store_that_reads_what_a_load_is_about_to_write(self) -> None:
        scheduler, manager = make_scheduler()
        request, other = prompt(16), prompt(17, "r2", kv_transfer_params=None)
        other.all_token_ids = [token + 500 for token in other.all_token_ids]
        other.update_hashes()
        manager.hold(other.keys())
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        scheduler.request_finished(request, ids(4))
        assert start_load(scheduler, other, [4, 3, 2, 1]).jobs_to_flush == {job}

    def test_a_load_of_an_aborted_request_whose_blocks_are_reused(self) -> None:
        scheduler, manager = make_scheduler()
        request, other = prompt(17), prompt(8, "r2", kv_transfer_params={"kv_tiering": {"load": False}})
        manager.hold(request.keys())
        job = start_load(scheduler, request, ids(4)).reqs_to_load["r1"].job_id
        scheduler.request_finished(request, ids(4))
        assert run_prompt(scheduler, other, [4, 5]).jobs_to_flush == {job}

    def test_a_load_does_not_wait_for_itself(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(17)
        manager.hold(request.keys())
        assert not start_load(scheduler, request, ids(4)).jobs_to_flush

    def test_a_window_that_slides_on_hands_blocks_to_others(self) -> None:
        scheduler, _ = make_scheduler(8)
        request, other = prompt(32), prompt(8, "r2", kv_transfer_params={"kv_tiering": {"load": False}})
        job = run_prompt(scheduler, request, ids(4), tokens=16).reqs_to_store["r1"].job_id
        output = FakeSchedulerOutput().cached(request, 4, [5]).new(other, 8, [1, 2])
        assert scheduler.build_connector_meta(output).jobs_to_flush == {job}

    def test_sharing_a_block_without_writing_it_waits_for_nothing(self) -> None:
        scheduler, _ = make_scheduler()
        request, other = prompt(16), prompt(24, "r2", kv_transfer_params={"kv_tiering": {"load": False}})
        run_prompt(scheduler, request, ids(4))
        assert not run_prompt(scheduler, other, [1, 2, 3, 4, 5, 6], computed=16).jobs_to_flush

    def test_a_store_that_has_ended_is_not_waited_for(self) -> None:
        scheduler, _ = make_scheduler()
        request, other = prompt(16), prompt(8, "r2")
        job = run_prompt(scheduler, request, ids(4)).reqs_to_store["r1"].job_id
        scheduler.request_finished(request, ids(4))
        scheduler.update_connector_output(finished(job))
        assert not run_prompt(scheduler, other, [3, 4]).jobs_to_flush

    def test_a_block_that_a_load_still_writes_is_not_stored(self) -> None:
        scheduler, manager = make_scheduler()
        request, other = prompt(17), prompt(16, "r2", kv_transfer_params={"kv_tiering": {"load": False}})
        manager.hold(request.keys())
        start_load(scheduler, request, ids(4))
        manager.offered.clear()
        assert not run_prompt(scheduler, other, ids(4)).reqs_to_store
        assert not manager.offered
