"""Loads that fail: exactly the unfilled blocks are reported, and nothing is stored on top of them."""

from __future__ import annotations

import pytest

from tests.connector.fakes import (
    FakeBlocks,
    FakeManager,
    FakeRequest,
    FakeSchedulerOutput,
    finished,
    idle_step,
    ids,
    loaded,
    make_scheduler,
    prompt,
    start_load,
)
from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.scheduler import OffloadingConnectorScheduler


def allocate_after_loss(
    scheduler: OffloadingConnectorScheduler, manager: FakeManager, request: FakeRequest, lost: int
) -> None:
    """Match a request whose eight blocks are held, and allocate its GPU blocks without block ``lost``."""
    manager.hold(request.keys())
    scheduler.get_num_new_matched_tokens(request, 0)
    manager.drop(request.key(lost))
    scheduler.update_state_after_alloc(request, FakeBlocks((ids(8),)), 32)


class TestShrunkHit:
    """Blocks of the hit have become unreadable between the match and the allocation."""

    def test_the_leading_part_is_loaded_and_the_rest_reported(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(33)
        allocate_after_loss(scheduler, manager, request, 5)
        meta = idle_step(scheduler)
        assert loaded(meta)[1].block_ids.tolist() == ids(5)
        assert meta.failed_loads == {"r1": [6, 7, 8]}

    def test_nothing_is_pinned_when_nothing_is_left(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(33)
        allocate_after_loss(scheduler, manager, request, 0)
        meta = idle_step(scheduler)
        assert not meta.reqs_to_load
        assert meta.failed_loads == {"r1": ids(8)}
        assert set(manager.refs.values()) == {0}

    def test_with_windows_all_of_it_is_reported(self) -> None:
        """A shorter hit would need other window blocks, which the engine has not allocated."""
        scheduler, manager = make_scheduler(None, 8)
        request = prompt(33)
        manager.hold(request.keys(0) + request.keys(1))
        scheduler.get_num_new_matched_tokens(request, 0)
        manager.drop(request.key(7, 0))
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(8), [0] * 6 + [21, 22])), 32)
        meta = idle_step(scheduler)
        assert not meta.reqs_to_load
        assert meta.failed_loads == {"r1": [*ids(8), 21, 22]}

    @pytest.mark.parametrize("block_size", [8, 16])
    def test_a_part_ends_with_a_whole_offloaded_block(self, block_size: int) -> None:
        scheduler, manager = make_scheduler(block_size=block_size)
        request = prompt(65)
        keys = request.keys(factor=block_size // 4)
        manager.hold(keys)
        scheduler.get_num_new_matched_tokens(request, 4)
        manager.drop(keys[2])
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(16),)), 60)
        meta = idle_step(scheduler)
        border = 2 * block_size // 4
        assert loaded(meta)[1].block_ids.tolist() == ids(16)[1:border]
        assert meta.failed_loads == {"r1": ids(16)[border:]}

    def test_the_request_is_offered_no_other_load(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(33)
        allocate_after_loss(scheduler, manager, request, 0)
        idle_step(scheduler)
        manager.hold(request.keys())
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


class TestFailedLoad:
    def fail(
        self, failed_block: int = 4, *, computed: int = 0, world_size: int = 1
    ) -> tuple[OffloadingConnectorScheduler, FakeManager, FakeRequest]:
        scheduler, manager = make_scheduler(world_size=world_size)
        request = prompt(40)
        manager.hold(request.keys()[:8])
        job = start_load(scheduler, request, ids(8), computed=computed).reqs_to_load["r1"].job_id
        scheduler.update_connector_output(
            finished(job, failed=[job], invalid_block_ids={failed_block}, finished_recving={"r1"})
        )
        return scheduler, manager, request

    def test_releases_what_it_held(self) -> None:
        _, manager, _ = self.fail()
        assert set(manager.refs.values()) == {0}

    def test_nothing_is_stored_until_the_engine_has_gone_back(self) -> None:
        scheduler, manager, request = self.fail()
        request.num_computed_tokens = 32
        meta = scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 8, ids(10)))
        assert not meta.reqs_to_store
        assert not manager.offered

    def test_what_is_recomputed_after_the_engine_went_back_is_stored(self) -> None:
        scheduler, manager, request = self.fail()
        manager.drop(*request.keys()[3:8])
        request.num_computed_tokens = 12
        meta = scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 28, ids(10)))
        source = meta.reqs_to_store["r1"].spec[0]
        assert isinstance(source, GPULoadStoreSpec)
        assert source.block_ids.tolist() == ids(10)[3:]

    def test_without_exact_blocks_all_of_it_counts_as_failed(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(40)
        manager.hold(request.keys()[:8])
        job = start_load(scheduler, request, ids(8)).reqs_to_load["r1"].job_id
        scheduler.update_connector_output(finished(job, failed=[job]))
        request.num_computed_tokens = 4
        assert not scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 36, ids(10))).reqs_to_store

    def test_the_request_is_offered_no_other_load(self) -> None:
        scheduler, _, request = self.fail()
        request.num_computed_tokens = 0
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)

    def test_a_preempted_request_may_load_again(self) -> None:
        scheduler, _, request = self.fail()
        scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
        assert scheduler.get_num_new_matched_tokens(request, 0) == (32, True)

    def test_one_failing_worker_of_two_is_enough(self) -> None:
        scheduler, manager = make_scheduler(world_size=2)
        request = prompt(40)
        manager.hold(request.keys()[:8])
        job = start_load(scheduler, request, ids(8)).reqs_to_load["r1"].job_id
        scheduler.update_connector_output(finished(job, failed=[job], invalid_block_ids={4}))
        scheduler.update_connector_output(finished(job, finished_recving={"r1"}))
        request.num_computed_tokens = 32
        assert not scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 8, ids(10))).reqs_to_store
        assert not manager.offered
