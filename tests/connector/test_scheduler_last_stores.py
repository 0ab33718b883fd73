"""Stores refused while a request ran are offered once more at its end, before its blocks are reused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.connector.fakes import (
    FakeManager,
    FakeRequest,
    FakeSchedulerOutput,
    FakeSpec,
    finished,
    go_on,
    ids,
    make_scheduler,
    prompt,
    run_prompt,
)
from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler


def blocks_of(meta: OffloadingConnectorMetadata, name: str = "r1") -> list[int]:
    source = meta.reqs_to_store[name].spec[0]
    assert isinstance(source, GPULoadStoreSpec)
    return [int(block) for block in source.block_ids]


def idle(scheduler: OffloadingConnectorScheduler) -> OffloadingConnectorMetadata:
    return scheduler.build_connector_meta(FakeSchedulerOutput())


def refused(scheduler: OffloadingConnectorScheduler, manager: FakeManager, tokens: int = 16) -> FakeRequest:
    """Run a request whose stores the manager refuses for lack of room. Its blocks are 1, 2, ..."""
    manager.refuse_stores = True
    request = prompt(tokens)
    run_prompt(scheduler, request, ids(tokens // 4))
    manager.refuse_stores = False
    return request


def test_a_store_that_found_no_room_goes_out_with_the_step_after_the_end() -> None:
    scheduler, manager = make_scheduler()
    request = refused(scheduler, manager)
    scheduler.request_finished(request, ids(4))
    assert manager.ended == ["r1"]
    assert scheduler.has_pending_work()
    meta = idle(scheduler)
    assert blocks_of(meta) == ids(4)
    scheduler.update_connector_output(finished(meta.reqs_to_store["r1"].job_id))
    assert manager.completed_stores == [(request.keys(), True)]
    assert not idle(scheduler).reqs_to_store
    assert not scheduler.has_pending_work()


def test_only_the_offers_at_the_end_are_the_last_ones_so_that_the_manager_may_put_the_others_off() -> None:
    scheduler, manager = make_scheduler()
    request = refused(scheduler, manager)
    assert manager.offered
    assert manager.offered_last == []
    scheduler.request_finished(request, ids(4))
    assert manager.offered_last == [request.keys()]


def test_blocks_that_a_smaller_offer_left_out_go_out_at_the_end() -> None:
    scheduler, manager = make_scheduler()
    request = refused(scheduler, manager)
    first = blocks_of(go_on(scheduler, request, 1))
    assert first == ids(2), "half of what found no room"
    scheduler.request_finished(request, ids(4))
    assert blocks_of(idle(scheduler)) == [3, 4]


def test_it_is_not_tried_for_ever() -> None:
    scheduler, manager = make_scheduler()
    request = refused(scheduler, manager)
    manager.refuse_stores = True
    before = len(manager.offered)
    scheduler.request_finished(request, ids(4))
    assert manager.offered[before:] == [request.keys(), request.keys()[:2]]
    assert not idle(scheduler).reqs_to_store
    assert not scheduler.has_pending_work()


def test_the_first_half_is_stored_where_there_is_room_for_no_more() -> None:
    scheduler, manager = make_scheduler(manager=FakeManager(3))
    request = prompt(16)
    run_prompt(scheduler, request, ids(4))
    scheduler.request_finished(request, ids(4))
    assert blocks_of(idle(scheduler)) == ids(2)
    assert set(manager.rows) == set(request.keys()[:2])


def test_a_request_whose_blocks_all_found_room_is_offered_nothing_more() -> None:
    scheduler, manager = make_scheduler()
    request = prompt(16)
    run_prompt(scheduler, request, ids(4))
    scheduler.request_finished(request, ids(4))
    assert len(manager.offered) == 1


def test_blocks_that_the_next_step_reuses_are_not_read_any_more() -> None:
    """The store order would reach the workers in the same step that overwrites the blocks."""
    scheduler, manager = make_scheduler()
    request = refused(scheduler, manager)
    scheduler.request_finished(request, ids(4))
    other = prompt(8, "other", kv_transfer_params={"kv_tiering": {"store": False}})
    meta = run_prompt(scheduler, other, [4, 9])
    assert not meta.reqs_to_store
    assert not meta.jobs_to_flush
    assert manager.completed_stores == [(request.keys(), False)]
    assert not manager.rows
    assert not scheduler.has_pending_work()


def test_blocks_that_a_later_step_reuses_are_copied_first() -> None:
    scheduler, manager = make_scheduler()
    request = refused(scheduler, manager)
    scheduler.request_finished(request, ids(4))
    job = idle(scheduler).reqs_to_store["r1"].job_id
    other = prompt(8, "other", kv_transfer_params={"kv_tiering": {"store": False}})
    assert run_prompt(scheduler, other, [4, 9]).jobs_to_flush == {job}


def test_a_failed_load_leaves_nothing_to_offer() -> None:
    scheduler, manager = make_scheduler()
    request = refused(scheduler, manager)
    scheduler.states["r1"].load_failed(4)
    scheduler.request_finished(request, ids(4))
    assert not idle(scheduler).reqs_to_store
    assert len(manager.offered) == 1


def test_a_block_that_another_connector_did_not_fill_is_withdrawn() -> None:
    scheduler, manager = make_scheduler()
    request = refused(scheduler, manager)
    scheduler.request_finished(request, ids(4))
    scheduler.update_connector_output(finished(invalid_block_ids={2}))
    assert not idle(scheduler).reqs_to_store
    assert not manager.rows


def test_a_reset_in_between_withdraws_the_order() -> None:
    scheduler, manager = make_scheduler()
    request = refused(scheduler, manager)
    scheduler.request_finished(request, ids(4))
    scheduler.reset_cache()
    meta = idle(scheduler)
    assert not meta.reqs_to_store
    assert not meta.jobs_to_flush
    assert not scheduler.has_pending_work()
    assert not manager.rows


def test_a_new_request_of_the_same_name_has_its_own_order() -> None:
    scheduler, manager = make_scheduler()
    request = refused(scheduler, manager)
    scheduler.request_finished(request, ids(4))
    again = FakeRequest("r1", list(range(100, 108)))
    meta = run_prompt(scheduler, again, [21, 22])
    assert blocks_of(meta) == [21, 22]
    assert manager.completed_stores == [(request.keys(), False)]


@pytest.mark.parametrize("confirmed", [0, 1])
def test_tokens_whose_values_are_not_known_are_left_out(confirmed: int) -> None:
    scheduler, manager = make_scheduler(offload_prompt_only=False)
    request = refused(scheduler, manager, 15)
    request.append(1)
    request.num_computed_tokens = 16
    request.num_output_placeholders = 1 - confirmed
    scheduler.states["r1"].groups[0].block_ids = ids(4)
    scheduler.request_finished(request, ids(4))
    assert blocks_of(idle(scheduler)) == ids(3 + confirmed)


def test_the_volatile_tail_of_a_speculative_head_is_stored_at_the_end() -> None:
    groups = (KVCacheGroup(("a",), 4), KVCacheGroup(("b",), 4, is_eagle=True, volatile_tokens=3))
    spec = FakeSpec(EngineConfig((4, 4), 4, groups))
    scheduler = OffloadingConnectorScheduler(spec)
    request = prompt(16)
    assert blocks_of(run_prompt(scheduler, request, ids(4), ids(4, 21))) == [*ids(4), 21, 22, 23]
    scheduler.request_finished_all_groups(request, (ids(4), ids(4, 21)))
    assert blocks_of(idle(scheduler)) == [24]


class TestStreamingSessions:
    """The engine extends a prompt in place: it discards the last sampled token and appends the next chunk."""

    def grow(self, request: FakeRequest, *tokens: int) -> None:
        kept = request.num_computed_tokens
        del request.all_token_ids[kept:]
        request.append(*tokens)
        request.num_prompt_tokens = request.num_tokens

    def resume(
        self, scheduler: OffloadingConnectorScheduler, request: FakeRequest, *block_ids: list[int]
    ) -> OffloadingConnectorMetadata:
        """Schedule the request as a new one, with all its blocks; the engine does not ask for a hit."""
        count = request.num_tokens - request.num_computed_tokens
        meta = scheduler.build_connector_meta(FakeSchedulerOutput().new(request, count, *block_ids))
        request.num_computed_tokens += count
        return meta

    def test_store_every_chunk(self) -> None:
        scheduler, manager = make_scheduler()
        request = prompt(16)
        assert blocks_of(run_prompt(scheduler, request, ids(4))) == ids(4)
        request.append(1000)
        self.grow(request, *range(500, 516))
        assert blocks_of(self.resume(scheduler, request, ids(8))) == ids(4, 5)
        request.append(1001)
        self.grow(request, *range(600, 608))
        assert blocks_of(self.resume(scheduler, request, ids(10))) == [9, 10]
        assert [key for keys in manager.offered for key in keys] == request.keys()

    def test_store_what_they_generated_when_it_has_become_prompt(self) -> None:
        scheduler, _ = make_scheduler()
        request = prompt(16)
        run_prompt(scheduler, request, ids(4))
        for token in range(5):
            request.append(700 + token)
            assert not go_on(scheduler, request, 1, [5] if not token else []).reqs_to_store
        request.append(705)
        self.grow(request, 500, 501, 502)
        assert blocks_of(self.resume(scheduler, request, ids(6))) == [5, 6]

    def test_keep_to_their_own_limit(self) -> None:
        scheduler, _ = make_scheduler()
        request = prompt(16, kv_transfer_params={"kv_tiering": {"max_store_tokens": 24}})
        run_prompt(scheduler, request, ids(4))
        request.append(1000)
        self.grow(request, *range(500, 516))
        assert blocks_of(self.resume(scheduler, request, ids(8))) == [5, 6]

    @pytest.mark.parametrize("prompt_only", [True, False])
    def test_name_a_block_by_the_token_that_it_holds_and_not_by_the_one_that_was_discarded(
        self, prompt_only: bool
    ) -> None:
        scheduler, manager = make_scheduler(offload_prompt_only=prompt_only)
        request = prompt(15)
        run_prompt(scheduler, request, ids(4))
        request.append(1000)
        go_on(scheduler, request, 0)
        stale = request.keys()[3]
        scheduler.states["r1"].extend_keys(scheduler.groups)
        self.grow(request, *range(500, 509))
        self.resume(scheduler, request, ids(6))
        offered = [key for keys in manager.offered for key in keys]
        assert offered == request.keys()
        assert stale not in offered

    def test_rename_nothing_but_what_has_changed(self) -> None:
        scheduler, _ = make_scheduler()
        rng = np.random.default_rng(0)
        request = prompt(64)
        scheduler.on_new_request(request)
        state = scheduler.states["r1"]
        for _ in range(50):
            state.extend_keys(scheduler.groups)
            assert state.groups[0].keys == request.keys()
            del request.all_token_ids[int(rng.integers(1, request.num_tokens)) :]
            request.append(*rng.integers(0, 1000, int(rng.integers(0, 40))).tolist())
