"""Late stores: blocks are stored when they are about to leave the engine's own cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from examples.mini_engine.simple import MirroredPool, PoolBlock
from tests.connector.fakes import (
    FakeBlocks,
    FakeManager,
    FakeRequest,
    FakeSchedulerOutput,
    finished,
    idle_step,
    make_scheduler,
    make_spec,
    run_prompt,
    start_load,
)
from tests.integration.test_quiet_step import calls
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import LOCAL, MEDIUM_CPU, MEDIUM_STORAGE, OffloadingEvent
from tiering.api.request import LATE_STORE
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.suspects import STEPS_IN_FLIGHT
from tiering.connector.variants import Variant

BLOCK = 4
TARGET = 2
"""Blocks that the walk looks at: two steps use them up."""


class Bench:
    """A connector beside an engine's pool of GPU blocks; ``step`` is the most that a step computes."""

    def __init__(
        self,
        *,
        exclusive: bool = True,
        feeds_tiers: bool = False,
        rows: int = 100,
        blocks: int = 16,
        step: int = 1,
        **options: Any,
    ) -> None:
        self.manager = FakeManager(rows)
        self.manager.exclusive, self.manager.feeds_tiers = exclusive, feeds_tiers
        events = {"self_describing_kv_events": True}
        spec = make_spec(manager=self.manager, max_batch_tokens=step * BLOCK, **events, **options)
        self.scheduler = OffloadingConnectorScheduler(spec, clock=lambda: 0.0, enable_kv_cache_events=True)
        self.pool = MirroredPool(blocks + 1)
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.blocks: dict[str, list[PoolBlock]] = {}
        self.late: list[int] = []
        """GPU blocks of all late stores so far."""

    @property
    def notes(self) -> set[OffloadKey]:
        cache = self.scheduler._engine_cache
        assert cache is not None
        return set(cache.blocks_of)

    def take(self, request: FakeRequest, computed: int = 0) -> list[int]:
        """Give a request the blocks that it needs; the first ones are those that the engine's cache holds."""
        found = [self.pool.cached[0, name] for name in request.block_hashes[: computed // BLOCK]]
        self.pool.touch(found)
        new = self.pool.take(-(-request.num_tokens // BLOCK) - len(found))
        self.blocks[request.request_id] = found + new
        return [block.block_id for block in found + new]

    def name(self, request: FakeRequest, blocks: int = 100) -> None:
        for block, block_hash in list(zip(self.blocks[request.request_id], request.block_hashes, strict=False))[
            :blocks
        ]:
            self.pool.name(block, (0, block_hash))

    def run(self, request: FakeRequest, computed: int = 0, blocks: int = 100) -> OffloadingConnectorMetadata:
        """Compute a whole prompt, whose first blocks the engine's cache then holds."""
        ids = self.take(request, computed)
        self.name(request, blocks)
        return self._keep(run_prompt(self.scheduler, request, ids, computed=computed))

    def end(self, request: FakeRequest) -> None:
        self.scheduler.request_finished(request, [])
        self.pool.free_blocks(reversed(self.blocks.pop(request.request_id)))

    def _keep(self, meta: OffloadingConnectorMetadata) -> OffloadingConnectorMetadata:
        if LATE_STORE.req_id in meta.reqs_to_store:
            self.late += meta.reqs_to_store[LATE_STORE.req_id].spec[0].block_ids.tolist()  # type: ignore[attr-defined]
        return meta

    def use_up(self, count: int) -> None:
        """Let another request of the engine use up blocks, which is not followed further."""
        blocks = self.pool.take(count)
        other = FakeRequest(
            f"other {id(blocks)}", [9] * BLOCK * count, kv_transfer_params={"kv_tiering": {"store": False}}
        )
        self._keep(run_prompt(self.scheduler, other, [block.block_id for block in blocks]))

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self._keep(idle_step(self.scheduler))

    def event(self, keys: list[OffloadKey], *, removed: bool = False, tier: str = PRIMARY_TIER) -> list[Any]:
        """Return what consumers receive when blocks come to a tier or leave it."""
        medium = MEDIUM_CPU if tier == PRIMARY_TIER else MEDIUM_STORAGE
        self.manager.events.append(OffloadingEvent(keys, medium, LOCAL, tier, removed))
        return self.scheduler.take_events()

    def count(self, name: str) -> int:
        return int(self.scheduler.get_stats()["connector"][name])


def prompt(blocks: int, name: str = "r1", first: int = 0, **params: Any) -> FakeRequest:
    tokens = [first, *range(1, blocks * BLOCK)]
    return FakeRequest(name, tokens, kv_transfer_params={"kv_tiering": params} if params else None)


def test_a_block_is_stored_when_it_nears_the_head_of_the_free_queue_and_not_before() -> None:
    bench, request = Bench(), prompt(4)
    assert not bench.run(request).reqs_to_store
    bench.end(request)
    assert bench.notes == set(request.keys())
    bench.steps(3)
    assert bench.late == []
    bench.use_up(12)  # the four blocks of the request are all that is left
    ids = [block.block_id for block in bench.pool.free]
    bench.steps(5)
    assert bench.late == ids[:TARGET][::-1]
    assert [block.block_id for block in bench.pool.free] == ids, "the walk takes no block"
    assert not bench.manager.offered
    assert bench.notes == set(request.keys()[:2]), "the head of the prompt is used up last"


def test_the_blocks_of_small_steps_are_stored_together_and_two_steps_before_they_are_used_up() -> None:
    bench, request = Bench(blocks=32), prompt(8)
    bench.run(request)
    bench.end(request)
    bench.use_up(24)  # the eight blocks of the request are all that is left
    stored, ids = [], [block.block_id for block in bench.pool.free]
    for used in range(8):
        bench.steps(2)
        assert set(ids[used : used + TARGET]) <= set(bench.late)
        stored.append(len(bench.late))
        bench.use_up(1)
    assert stored == [4, 4, 6, 6, 8, 8, 8, 8]
    assert bench.count("exclusive_losses") == 0


def test_the_walk_starts_over_when_its_last_block_was_used_and_is_elsewhere_in_the_queue() -> None:
    bench, first, other = Bench(blocks=32), prompt(8), prompt(8, "r2", first=7)
    for request in (first, other):
        bench.run(request)
    for request in (first, other):
        bench.end(request)
    bench.use_up(16)
    bench.steps(2)
    assert len(bench.late) == 4, "the walk has stopped in the first prompt"
    last = list(bench.pool.free)[3]
    assert bench.scheduler._engine_cache is not None
    bench.pool.touch([last])  # a request gets the block, and ends before a step is built
    bench.scheduler._engine_cache.left_queue(([last.block_id],))
    bench.pool.free_blocks([last])
    for _ in range(12):
        bench.steps(2)
        bench.use_up(1)
    assert bench.count("exclusive_losses") == 0


def test_in_a_small_pool_too_the_blocks_of_small_steps_are_stored_together() -> None:
    """Two steps use up a quarter of the pool here, more than the walk's part of a large one."""
    bench, request = Bench(blocks=255, step=32, rows=300), prompt(192)
    bench.run(request, blocks=192)
    bench.end(request)
    bench.use_up(63)  # the blocks of the request are all that is left
    ids = [block.block_id for block in bench.pool.free]
    stores, late = 0, -1
    for used in range(0, 96, 2):
        bench.steps(2)
        assert set(ids[used : used + 64]) <= set(bench.late)
        stores, late = stores + (len(bench.late) > late), len(bench.late)
        bench.use_up(2)
    assert stores <= 12, "the blocks of four steps or so are one store; before, each of the 48 stored its own"
    assert bench.count("exclusive_losses") == 0


def test_blocks_of_a_session_that_is_over_are_not_stored_late_until_they_are_used_again() -> None:
    bench = Bench()
    request = prompt(4, hints=[{"action_type": "release", "payload": {"session_id": "s"}}], session_id="s")
    bench.run(request)
    bench.end(request)
    assert bench.notes == set()
    bench.use_up(12)
    bench.steps(3)
    bench.use_up(2)
    assert (bench.late, bench.count("exclusive_losses")) == ([], 0)
    again = prompt(2, "r2")
    bench.run(again, computed=2 * BLOCK)
    assert bench.notes == set(again.keys())


def test_only_where_sessions_are_followed_the_manager_is_asked_whose_blocks_are_new() -> None:
    bench, asked = Bench(blocks=32), list[list[OffloadKey]]()

    def lacked(keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        asked.append(list(keys))
        return keys

    bench.manager.lacked = lacked  # type: ignore[method-assign]
    bench.run(prompt(2))
    assert asked == []
    mine = prompt(3, "r2", session_id="s")
    bench.run(mine)
    bench.run(others := FakeRequest("r3", [7] * BLOCK))
    assert asked == [list(mine.keys())[2:], list(others.keys())]


def test_a_block_with_a_row_is_copied_no_second_time() -> None:
    bench, request = Bench(), prompt(4)
    bench.manager.hold(request.keys()[3:])
    bench.run(request)
    bench.end(request)
    bench.use_up(12)
    assert len(bench.late) == 1
    assert bench.manager.leaving == [[request.keys()[2], request.keys()[3]]]


def test_computed_blocks_with_a_row_are_first_victims_once_their_step_was_processed() -> None:
    bench, request = Bench(), prompt(2)
    bench.run(request)
    bench.use_up(1)
    bench.steps(STEPS_IN_FLIGHT - 1)
    assert bench.manager.engine_held == []
    bench.steps()
    assert bench.manager.engine_held == [], "the walk rests"
    bench.use_up(1)
    assert bench.manager.engine_held == [request.keys()]


def test_a_block_that_is_used_up_before_the_walk_has_met_it_is_a_counted_loss() -> None:
    bench, request = Bench(), prompt(4)
    bench.manager.hold(request.keys()[:1])
    bench.run(request)
    bench.end(request)
    bench.use_up(12 + 4)
    assert bench.manager.dropped == [request.keys()[::-1]]
    assert bench.count("exclusive_losses") == 3
    assert bench.notes == set()


def test_what_the_engine_has_dropped_from_its_cache_is_lost_and_not_stored() -> None:
    bench, request = Bench(), prompt(4)
    bench.run(request)
    bench.end(request)
    bench.pool.reset()
    bench.use_up(12)
    assert bench.late == []
    assert bench.count("exclusive_losses") == TARGET
    bench.use_up(4)
    assert bench.count("exclusive_losses") == 4


def test_blocks_that_are_computed_again_leave_from_their_new_places() -> None:
    bench, first, second = Bench(), prompt(4), prompt(4, "r2")
    bench.run(first)
    bench.end(first)
    bench.pool.reset()
    bench.run(second)
    places = [block.block_id for block in bench.blocks["r2"]]
    bench.end(second)
    bench.use_up(12)  # the places of the first request, which the cache has dropped, among them
    bench.use_up(2)
    assert sorted(bench.late) == places
    assert bench.count("exclusive_losses") == 0


def test_a_hit_in_the_engines_cache_takes_its_blocks_off_the_walk_and_notes_them_again() -> None:
    bench, request = Bench(), prompt(4)
    bench.run(request)
    bench.end(request)
    bench.use_up(12)
    assert len(bench.late) == TARGET
    again = prompt(4, "r2")
    bench.run(again, computed=12)
    assert bench.notes == set(request.keys())
    bench.end(again)
    bench.steps(3)
    assert len(bench.late) == TARGET, "their rows are there"
    assert len(bench.manager.leaving) == 2


@pytest.mark.parametrize(
    ("params", "noted"), [({"store": False}, 0), ({"max_store_tokens": 9}, 2), ({"max_store_tokens": 3}, 0), ({}, 4)]
)
def test_what_a_request_must_not_store_is_not_stored_late(params: dict[str, Any], noted: int) -> None:
    bench, request = Bench(), prompt(4, **params)
    bench.run(request)
    bench.end(request)
    bench.use_up(12)
    bench.use_up(2)
    stored = {key for keys in bench.manager.leaving for key in keys}
    assert stored <= set(request.keys()[:noted])
    assert len(bench.notes | stored) == noted


def test_a_request_that_may_store_notes_what_one_that_must_not_has_computed() -> None:
    bench, first, second = Bench(), prompt(4, store=False), prompt(4, "r2")
    bench.run(first)
    bench.end(first)
    assert bench.notes == set()
    bench.run(second, computed=12)
    assert bench.notes == set(second.keys())


def test_generated_tokens_are_noted_only_if_they_are_stored() -> None:
    for prompt_only, noted in ((True, 2), (False, 3)):
        bench, request = Bench(offload_prompt_only=prompt_only), prompt(3)
        request.num_prompt_tokens = 2 * BLOCK
        bench.run(request)
        assert len(bench.notes) == noted


def test_a_block_of_several_gpu_blocks_is_stored_whole_when_its_first_one_leaves() -> None:
    bench, request = Bench(block_size=2 * BLOCK), prompt(4)
    bench.run(request)
    ids = [block.block_id for block in bench.blocks["r1"]]
    bench.end(request)
    bench.use_up(12)
    assert bench.late == ids[2:]
    bench.use_up(1)
    assert bench.late == ids[2:] + ids[:2]


def test_a_block_of_several_gpu_blocks_is_lost_if_one_of_them_is_not_cached() -> None:
    bench, request = Bench(block_size=2 * BLOCK), prompt(4)
    bench.run(request, blocks=2)
    bench.end(request)
    bench.use_up(12)
    bench.steps(2)
    assert bench.count("exclusive_losses") == 1
    assert bench.manager.leaving == []


@pytest.mark.parametrize("end", ["taken", "zeroed", "unfilled"])
@pytest.mark.parametrize("released", [None, 0, 1], ids=["both noted", "first released", "second released"])
def test_blocks_that_share_a_gpu_block_all_end_with_it(end: str, released: int | None) -> None:
    """The other GPU block of each is still cached, and a copy would have what the shared one holds next."""
    bench = Bench(block_size=2 * BLOCK)
    first, second = prompt(2, "r1"), FakeRequest("r2", [*range(BLOCK), *[9] * BLOCK])
    bench.run(first)
    bench.run(second, computed=BLOCK)
    shared = bench.blocks["r2"][0].block_id
    assert shared == bench.blocks["r1"][0].block_id
    cache = bench.scheduler._engine_cache
    assert cache is not None
    keys = [request.keys()[1] for request in (first, second)]
    assert bench.notes == set(keys)
    if released is not None:
        cache.release([keys[released]])
        assert bench.notes == {keys[1 - released]}
    if end == "unfilled":
        bench.scheduler.update_connector_output(finished(invalid_block_ids={shared}))
    else:
        cache.begin_step(9, [shared] if end == "taken" else [], [shared] if end == "zeroed" else [])
    assert bench.notes == set()
    assert not any(cache._sharing.values())


def test_the_late_store_of_one_of_two_blocks_that_share_a_gpu_block_leaves_the_other_noted() -> None:
    bench = Bench(block_size=2 * BLOCK)
    first, second = prompt(2, "r1"), FakeRequest("r2", [*range(BLOCK), *[9] * BLOCK])
    bench.run(first)
    bench.run(second, computed=BLOCK)
    shared = bench.blocks["r2"][0].block_id
    bench.end(first)
    bench.use_up(13)
    bench.steps(2)
    assert bench.notes == {second.keys()[1]}
    cache = bench.scheduler._engine_cache
    assert cache is not None
    cache.begin_step(9, [shared], [])
    assert bench.notes == set()


def load(bench: Bench, request: FakeRequest) -> int:
    """Order the load of a whole prompt, and return the job."""
    bench.manager.hold(request.keys())
    meta = start_load(bench.scheduler, request, bench.take(request))
    return meta.reqs_to_load[request.request_id].job_id


def test_loaded_rows_are_first_victims_when_all_ranks_have_loaded() -> None:
    bench, request = Bench(world_size=2), prompt(2)
    job = load(bench, request)
    bench.scheduler.update_connector_output(finished(job))
    assert bench.manager.engine_held == []
    bench.scheduler.update_connector_output(finished(job))
    assert bench.manager.engine_held == [request.keys()]
    assert bench.notes == set(request.keys())


@pytest.mark.parametrize("end", ["failed", "aborted", "preempted", "reset"])
def test_a_load_without_success_changes_nothing(end: str) -> None:
    bench, request = Bench(), prompt(2)
    job = load(bench, request)
    if end == "aborted":
        bench.end(request)
    if end == "preempted":
        request.num_computed_tokens = 0
        bench.scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
    if end == "reset":
        bench.scheduler.reset_cache()
    bench.scheduler.update_connector_output(finished(job, failed=[job] if end == "failed" else ()))
    assert bench.manager.engine_held == []
    assert bench.notes == set()


def test_a_load_behind_a_suspect_is_not_noted() -> None:
    bench, first, request = Bench(), prompt(1), prompt(3, "r2")
    bench.run(first)
    bench.scheduler.reset_cache()  # the block in the engine's cache is a suspect
    ids = bench.take(request, computed=BLOCK)
    bench.manager.hold(request.keys())
    meta = start_load(bench.scheduler, request, ids, computed=BLOCK)
    bench.scheduler.update_connector_output(finished(meta.reqs_to_load["r2"].job_id))
    assert bench.notes == set()


def test_only_what_the_engines_cache_still_holds_may_be_evicted_first() -> None:
    bench, request = Bench(), prompt(3)
    bench.run(request)
    (holds,) = bench.manager.shown
    assert holds is not None
    assert list(holds([*request.keys(), *prompt(1, "r2", 9).keys()])) == [True, True, True, False]
    bench.pool._forget(bench.blocks["r1"][1])
    assert list(holds(request.keys())) == [True, False, True]


def test_a_request_that_must_not_store_changes_no_rank_when_it_loads() -> None:
    bench, request = Bench(), prompt(2, store=False)
    bench.scheduler.update_connector_output(finished(load(bench, request)))
    assert bench.manager.engine_held == []
    assert bench.notes == set()


def test_after_a_reset_of_the_tiers_nothing_from_before_is_stored() -> None:
    bench, request = Bench(), prompt(4)
    bench.run(request)
    bench.end(request)
    bench.scheduler.reset_cache()
    assert bench.notes == set()
    again = prompt(4, "r2")
    bench.run(again, computed=12)
    assert bench.notes == set(), "the found blocks are suspects, and so is what is computed on top of them"


def test_blocks_that_another_connector_did_not_fill_are_not_stored() -> None:
    bench, request = Bench(), prompt(4)
    bench.run(request)
    third = bench.blocks["r1"][2].block_id
    bench.scheduler.update_connector_output(finished(invalid_block_ids={third}))
    assert bench.notes == set(request.keys()[:2])


def test_blocks_of_a_request_that_has_ended_are_not_stored_if_they_prove_unfilled() -> None:
    bench, request = Bench(), prompt(4)
    bench.run(request)
    third = bench.blocks["r1"][2].block_id
    bench.end(request)
    bench.scheduler.update_connector_output(finished(invalid_block_ids={third}))
    assert bench.notes == set(request.keys()[:2])


def test_a_late_store_of_a_block_that_proves_unfilled_does_not_become_readable() -> None:
    bench, request = Bench(), prompt(4)
    bench.run(request)
    last = bench.blocks["r1"][3].block_id
    bench.end(request)
    bench.use_up(12)
    assert bench.count("late_stores") == TARGET
    job = next(iter(bench.scheduler._jobs)).job_id
    bench.scheduler.update_connector_output(finished(invalid_block_ids={last}))
    bench.scheduler.update_connector_output(finished(job))
    assert not bench.manager.rows
    assert bench.count("exclusive_losses") == TARGET


def test_a_step_that_reuses_a_block_waits_for_its_late_store() -> None:
    bench, request = Bench(), prompt(4)
    bench.run(request)
    bench.end(request)
    bench.use_up(12)
    job = next(iter(bench.scheduler._jobs)).job_id
    blocks = bench.pool.take(1)
    other = FakeRequest("new", [7] * BLOCK)
    assert run_prompt(bench.scheduler, other, [blocks[0].block_id]).jobs_to_flush == {job}
    assert bench.count("jobs_flushed") == 1


def test_without_room_the_walk_stands_still_and_tries_fewer_blocks_until_there_is_room() -> None:
    bench, request = Bench(rows=1), prompt(4)
    bench.run(request)
    bench.end(request)
    bench.use_up(12)
    bench.steps(1)
    assert len(bench.late) == 1
    assert [len(keys) for keys in bench.manager.leaving] == [2, 1]
    assert len(bench.notes) == 3
    bench.manager.free += range(1, 100)
    bench.steps()
    bench.use_up(2)
    assert [len(keys) for keys in bench.manager.leaving] == [2, 1, 1, 2], "with room again, as many as before"


def test_blocks_of_adapters_are_stored_as_they_are_computed() -> None:
    bench, request = Bench(), prompt(4)
    variant = Variant()
    variant.identify("adapter")
    request.variant = variant  # type: ignore[attr-defined]
    assert bench.run(request).reqs_to_store
    assert bench.notes == set()


def test_other_tiers_are_fed_as_blocks_are_computed_and_once() -> None:
    bench, request = Bench(feeds_tiers=True), prompt(4)
    meta = bench.run(request)
    bench.scheduler.update_connector_output(finished(meta.reqs_to_store["r1"].job_id))
    last = bench.blocks["r1"][3].block_id
    bench.end(request)
    bench.manager.drop(*request.keys()[1:])  # evicted first, because the engine holds them
    again = prompt(4, "r2")
    meta = bench.run(again, computed=12)
    assert not meta.reqs_to_store
    assert bench.manager.offered == [request.keys()]
    bench.end(again)
    bench.use_up(11)
    assert bench.late == [last], "the row of the block that leaves first has gone"


def test_events_of_late_stores_name_tokens_and_parents() -> None:
    bench, request = Bench(), prompt(4)
    bench.run(request)
    bench.end(request)
    assert bench.scheduler.take_events() == []
    bench.use_up(12)
    job = next(iter(bench.scheduler._jobs))
    bench.scheduler.update_connector_output(finished(job.job_id))
    stored = {event.block_hashes[0]: event for event in bench.event(job.keys)}
    tail = stored[request.block_hashes[3]]
    assert tail.token_ids == request.all_token_ids[-BLOCK:]
    assert tail.parent_block_hash == request.block_hashes[2]
    (removed,) = bench.event(job.keys, removed=True)
    assert set(removed.block_hashes) == set(stored)
    assert len(bench.scheduler.events) == 2, "the two blocks that the engine still holds"
    bench.use_up(2)
    bench.pool.reset()
    bench.use_up(2)
    assert len(bench.scheduler.events) == TARGET, "those of the second late store"


def test_events_describe_the_new_blocks_behind_those_that_the_engine_has_found() -> None:
    bench, first, longer = Bench(), prompt(2), prompt(4, "r2")
    bench.run(first)
    bench.run(longer, computed=2 * BLOCK)
    bench.end(first)
    bench.end(longer)
    bench.use_up(12)
    job = next(iter(bench.scheduler._jobs))
    bench.scheduler.update_connector_output(finished(job.job_id))
    assert {event.block_hashes[0]: event.token_ids for event in bench.event(job.keys)} == {
        longer.block_hashes[number]: longer.all_token_ids[number * BLOCK : (number + 1) * BLOCK] for number in (2, 3)
    }


@pytest.mark.parametrize("loss", ["used up", "reset of the engine's cache", "reset of the tiers", "failed copy"])
def test_a_block_that_is_lost_leaves_no_snapshot(loss: str) -> None:
    bench, request = Bench(), prompt(2)
    bench.run(request)
    bench.end(request)
    assert len(bench.scheduler.events) == 2
    if loss == "used up":
        bench.use_up(16)
    elif loss == "reset of the engine's cache":
        bench.pool.reset()
        bench.use_up(14)
    elif loss == "reset of the tiers":
        bench.scheduler.reset_cache()
    else:
        bench.use_up(14)
        job = next(iter(bench.scheduler._jobs)).job_id
        bench.scheduler.update_connector_output(finished(job, failed=[job]))
    assert bench.scheduler.take_events() == []
    assert len(bench.scheduler.events) == 0
    assert bench.count("exclusive_losses") == (0 if loss == "reset of the tiers" else 2)


def test_a_block_with_a_row_keeps_its_snapshot_until_the_row_has_gone() -> None:
    bench, request = Bench(), prompt(2)
    bench.run(request)
    bench.manager.hold(request.keys())
    assert all(event.token_ids for event in bench.event(request.keys(), tier="disk"))
    assert all(event.token_ids for event in bench.event(request.keys()))
    bench.end(request)
    bench.use_up(14)
    assert bench.late == []
    bench.event(request.keys(), removed=True)
    assert len(bench.scheduler.events) == 2
    bench.event(request.keys(), removed=True, tier="disk")
    assert len(bench.scheduler.events) == 0


def test_a_block_that_is_noted_again_and_leaves_with_a_row_keeps_no_snapshot_of_its_own() -> None:
    bench, request, again = Bench(), prompt(2), prompt(2, "r2")
    bench.run(request)
    bench.manager.hold(request.keys())
    bench.event(request.keys())
    bench.end(request)
    bench.use_up(14)
    assert bench.notes == set()
    bench.run(again, computed=2 * BLOCK)
    bench.end(again)
    bench.steps(3)
    assert (bench.notes, bench.late) == (set(), [])
    bench.event(request.keys(), removed=True)
    assert len(bench.scheduler.events) == 0


def test_a_block_that_a_tier_wants_and_only_the_engine_holds_is_copied_and_stays_noted() -> None:
    bench, request = Bench(feeds_tiers=True), prompt(4)
    bench.run(request)
    bench.manager.reset_cache()  # all rows have gone
    strange = prompt(1, "other", first=9).keys()
    bench.manager.wanted = [request.keys()[2], *strange]
    meta = idle_step(bench.scheduler)
    (order,) = meta.reqs_to_store.values()
    assert order.spec[0].block_ids.tolist() == [bench.blocks["r1"][2].block_id]  # type: ignore[attr-defined]
    assert bench.notes == set(request.keys())
    bench.scheduler.update_connector_output(finished(order.job_id))
    assert bench.manager.completed_stores[-1] == ([request.keys()[2]], True)
    bench.event([request.keys()[2]])
    bench.event([request.keys()[2]], removed=True)
    assert request.keys()[2] in bench.scheduler.events.snapshots, "the engine still holds it"
    assert bench.count("late_stores") == 0


def test_a_block_that_a_tier_wants_is_not_copied_without_room() -> None:
    bench, request = Bench(feeds_tiers=True), prompt(4)
    bench.run(request)
    bench.manager.reset_cache()
    bench.manager.wanted, bench.manager.free = request.keys(), []
    assert not idle_step(bench.scheduler).reqs_to_store
    assert bench.notes == set(request.keys())


@pytest.mark.parametrize("case", ["inclusive", "no prefix caching", "another pool", "no pool"])
def test_without_a_cache_to_look_at_the_tier_is_inclusive(case: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = FakeManager()
    manager.exclusive = case != "inclusive"
    scheduler, _ = make_scheduler(manager=manager, prefix_caching=case != "no prefix caching")
    if case == "another pool":
        scheduler.bind_gpu_block_pool(object())  # type: ignore[arg-type]
    elif case != "no pool":
        scheduler.bind_gpu_block_pool(MirroredPool(17))
    with caplog.at_level(logging.DEBUG):
        for name in ("r1", "r2"):
            request = prompt(4, name, first=len(name) + ord(name[-1]))
            assert run_prompt(scheduler, request, [1, 2, 3, 4]).reqs_to_store
    assert [holds is None for holds in manager.shown] == [case != "inclusive"]
    assert manager.engine_held == manager.leaving == manager.dropped == []


def test_a_quiet_step_costs_an_inclusive_tier_nothing_and_an_exclusive_one_a_few_calls() -> None:
    seen = []
    for exclusive in (False, True):
        bench, request = Bench(exclusive=exclusive), prompt(4)
        bench.run(request)
        bench.steps(STEPS_IN_FLIGHT + 2)
        seen.append(calls(lambda bench=bench: idle_step(bench.scheduler)))  # type: ignore[misc]
    inclusive, with_walk = seen
    assert not [name for name in inclusive if "EngineCache" in name or "late" in name]
    assert with_walk["EngineCache.begin_step"] == 1
    assert with_walk["EngineCache.plan"] == 0, "the walk rests"
    assert with_walk.total() <= inclusive.total() + 4


def test_a_preempted_requests_blocks_are_ordinary_free_blocks() -> None:
    bench, request = Bench(), prompt(4)
    bench.run(request)
    bench.pool.free_blocks(reversed(bench.blocks.pop("r1")))
    bench.scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"r1"}))
    assert bench.notes == set(request.keys())
    bench.use_up(12)
    assert bench.count("late_stores") == TARGET


def test_blocks_that_the_engine_zeroes_are_not_stored() -> None:
    bench, request = Bench(), prompt(4)
    bench.run(request)
    output = FakeSchedulerOutput()
    output.new_block_ids_to_zero = [bench.blocks["r1"][1].block_id]  # type: ignore[attr-defined]
    bench.scheduler.build_connector_meta(output)
    assert request.keys()[1] not in bench.notes


def test_allocations_that_the_engine_repeats_change_nothing() -> None:
    bench, request = Bench(), prompt(4)
    ids = bench.take(request)
    bench.scheduler.get_num_new_matched_tokens(request, 0)
    bench.scheduler.update_state_after_alloc(request, FakeBlocks((ids,)), 0)
    assert bench.notes == set()
