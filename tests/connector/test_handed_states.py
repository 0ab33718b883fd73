"""States that the engine hands over: which are stored, what a hit needs, and which are suspect.

The double of the scheduler's output is written for vLLM 0.32. There, a state is handed over in the step that computes
it: at the end of a chunk, or in the middle of a chunk if the kernel returns that state (an internal checkpoint).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Never

import pytest

from examples.mini_engine.simple import MirroredPool
from tests.connector.fakes import (
    FakeBlocks,
    FakeManager,
    FakeRequest,
    FakeSchedulerOutput,
    FakeSpec,
    finished,
    idle_step,
    ids,
    loaded,
    make_scheduler,
    prompt,
    run_prompt,
)
from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler

Handed = dict[str, list[tuple[int, int, int]]]


@dataclass
class Output(FakeSchedulerOutput):
    """A step's schedule with states, and copies of blocks from one to another."""

    kv_connector_block_state: Any = None
    kv_cache_block_copies: list[tuple[int, int]] = field(default_factory=list)


def output(handed: Handed, copies: list[tuple[int, int]] | None = None) -> Output:
    return Output(
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads=handed), kv_cache_block_copies=copies or []
    )


def hybrid(manager: FakeManager | None = None, **extra: Any) -> tuple[OffloadingConnectorScheduler, FakeManager]:
    """Return a scheduler half for a group with full attention and a group with states, in blocks of 4."""
    groups = (KVCacheGroup(("a",), 4), KVCacheGroup(("s",), 4, None, "mamba"))
    spec = FakeSpec(EngineConfig(block_sizes=(4, 4), hash_block_size=4, groups=groups), extra, manager)
    return OffloadingConnectorScheduler(spec, clock=lambda: 0.0), spec.manager


def compute(
    scheduler: OffloadingConnectorScheduler,
    request: FakeRequest,
    handed: Handed | None = None,
    tokens: int | None = None,
    tables: tuple[list[int], list[int]] | None = None,
    copies: list[tuple[int, int]] | None = None,
) -> OffloadingConnectorMetadata:
    """Schedule a request for the first time, with states that are handed over in the same step."""
    blocks = -(-request.num_tokens // 4)
    attention, states = tables or (ids(blocks), [0] * (blocks - 1) + [99])
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, FakeBlocks((attention, states)), 0)
    count = request.num_tokens if tokens is None else tokens
    step = output(handed or {}, copies).new(request, count, attention, states)
    meta = scheduler.build_connector_meta(step)
    request.num_computed_tokens += count
    return meta


def state_store(meta: OffloadingConnectorMetadata, name: str = "r1") -> tuple[list[int], list[int]]:
    """Return the GPU blocks and the positions of an order for states."""
    source = meta.states_to_store[name].spec[0]
    assert isinstance(source, GPULoadStoreSpec)
    assert list(source.group_sizes) == [0, len(source.block_ids)]
    return source.block_ids.tolist(), list(source.block_indices)


def end_all(scheduler: OffloadingConnectorScheduler, *metas: OffloadingConnectorMetadata) -> None:
    """Report all stores of ``metas`` as done."""
    jobs = [order.job_id for meta in metas for order in [*meta.reqs_to_store.values(), *meta.states_to_store.values()]]
    scheduler.update_connector_output(finished(*jobs))


class TestWhatIsStored:
    def test_a_handed_over_state_is_stored_in_its_step_from_its_block_and_no_table(self) -> None:
        scheduler, manager = hybrid()
        request = prompt(34)
        meta = compute(scheduler, request, {"r1": [(1, 77, 32)]})
        assert state_store(meta) == ([77], [0, 7])
        assert manager.offered == [request.keys(0)[:8], [request.keys(1)[7]]]

    def test_no_block_of_the_table_is_stored_as_a_state(self) -> None:
        scheduler, manager = hybrid()
        request = prompt(32)
        meta = compute(scheduler, request, tables=(ids(8), ids(8, 50)))
        assert meta.states_to_store == {}
        assert manager.offered == [request.keys(0)]

    def test_a_state_from_the_middle_of_a_chunk(self) -> None:
        """An internal checkpoint: the last whole block of a prompt that is computed in one step."""
        scheduler, _ = hybrid()
        meta = compute(scheduler, prompt(34), {"r1": [(1, 60, 16), (1, 77, 32)]})
        assert state_store(meta) == ([60, 77], [0, 3])

    @pytest.mark.parametrize(
        "offer",
        [
            (1, 77, 33),  # a partial tail
            (1, 0, 32),  # the null block
            (1, 77, 0),
            (1, 77, 36),  # beyond the prompt
            (0, 77, 32),  # no group of states
            (2, 77, 32),
        ],
    )
    def test_what_is_not_the_state_of_whole_confirmed_blocks_is_dropped(self, offer: tuple[int, int, int]) -> None:
        scheduler, manager = hybrid()
        assert compute(scheduler, prompt(34), {"r1": [offer]}).states_to_store == {}
        assert len(manager.offered) == 1

    def test_of_two_blocks_for_one_state_neither_is_stored(self) -> None:
        scheduler, _ = hybrid()
        assert compute(scheduler, prompt(34), {"r1": [(1, 77, 32), (1, 78, 32)]}).states_to_store == {}

    def test_a_state_of_tokens_that_are_not_confirmed_is_dropped(self) -> None:
        scheduler, _ = hybrid()
        assert compute(scheduler, prompt(34), {"r1": [(1, 77, 32)]}, tokens=30).states_to_store == {}

    def test_states_of_other_requests_are_dropped(self) -> None:
        scheduler, _ = hybrid()
        waiting = prompt(34, "r2")
        scheduler.on_new_request(waiting)
        meta = compute(scheduler, prompt(34), {"unknown": [(1, 70, 32)], "r2": [(1, 71, 32)]})
        assert meta.states_to_store == {}

    @pytest.mark.parametrize("field_name", ["preempted_req_ids", "finished_req_ids"])
    def test_a_state_of_a_request_that_gives_its_blocks_back_is_dropped(self, field_name: str) -> None:
        scheduler, _ = hybrid()
        request = prompt(34)
        compute(scheduler, request, tokens=16)
        step = output({"r1": [(1, 77, 32)]}).cached(request, 18)
        setattr(step, field_name, {"r1"})
        assert scheduler.build_connector_meta(step).states_to_store == {}

    def test_what_finds_no_room_is_dropped_and_counted_and_not_offered_again(self) -> None:
        scheduler, manager = hybrid()
        request = prompt(34)
        manager.refuse_stores = True
        assert compute(scheduler, request, {"r1": [(1, 77, 32)]}).states_to_store == {}
        assert scheduler.get_stats()["connector"]["stores_refused"] == 2
        manager.refuse_stores = False
        request.append(1)
        meta = scheduler.build_connector_meta(output({}).cached(request, 1))
        assert meta.states_to_store == {}
        assert request.keys(1)[7] not in manager.rows

    def test_a_request_that_may_not_store_stores_no_state(self) -> None:
        scheduler, _ = hybrid()
        request = prompt(34, kv_transfer_params={"kv_tiering": {"store": False}})
        assert compute(scheduler, request, {"r1": [(1, 77, 32)]}).states_to_store == {}

    def test_a_model_without_states_is_not_asked_for_any(self) -> None:
        class Untouched(FakeSchedulerOutput):
            @property
            def kv_connector_block_state(self) -> Never:
                raise AssertionError("a model without states pays for them")

            kv_cache_block_copies = kv_connector_block_state

        scheduler, _ = make_scheduler()
        request = prompt(32)
        run_prompt(scheduler, request, ids(8), tokens=16)
        scheduler.build_connector_meta(Untouched().cached(request, 16))


class TestHits:
    def stored(self, *ends: int) -> OffloadingConnectorScheduler:
        """Return a scheduler half that holds the attention of 32 tokens, and the states at ``ends``."""
        scheduler, manager = hybrid()
        request = prompt(34, "r0")
        manager.hold(request.keys(0)[:8])
        manager.hold(request.keys(1)[end // 4 - 1] for end in ends)
        return scheduler

    @pytest.mark.parametrize(("ends", "hit"), [((), 0), ((32,), 32), ((12,), 12), ((8, 24), 24)])
    def test_a_hit_ends_at_a_state(self, ends: tuple[int, ...], hit: int) -> None:
        assert self.stored(*ends).get_num_new_matched_tokens(prompt(34), 0) == (hit, hit > 0)

    def test_a_state_beyond_the_attention_is_of_no_use(self) -> None:
        scheduler, manager = hybrid()
        request = prompt(34)
        manager.hold([*request.keys(0)[:5], request.keys(1)[7], request.keys(1)[2]])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (12, True)
        assert manager.asked[0] == [request.keys(1)[7]], "states are asked first"

    def test_at_least_one_token_is_left_to_compute(self) -> None:
        assert self.stored(32, 28).get_num_new_matched_tokens(prompt(32), 0) == (28, True)

    def test_the_load_fills_one_block_of_states(self) -> None:
        scheduler = self.stored(32)
        request = prompt(34)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(8), [0] * 7 + [70])), 32)
        _, destination = loaded(idle_step(scheduler))
        assert destination.block_ids.tolist() == [*ids(8), 70]

    def test_a_hit_without_a_block_for_the_state_fails(self) -> None:
        scheduler = self.stored(32)
        request = prompt(34)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(8), [0] * 8)), 32)
        meta = idle_step(scheduler)
        assert meta.reqs_to_load == {}
        assert meta.failed_loads == {"r1": ids(8)}


class TestWhatIsNotTrusted:
    def test_a_state_of_a_request_from_before_a_reset_is_not_stored(self) -> None:
        scheduler, _ = hybrid()
        request = prompt(34)
        end_all(scheduler, compute(scheduler, request, tokens=16))
        scheduler.reset_cache()
        meta = scheduler.build_connector_meta(output({"r1": [(1, 77, 32)]}).cached(request, 18))
        assert meta.states_to_store == {}

    @pytest.mark.parametrize(("state", "stores"), [(77, False), (98, True)])
    def test_nothing_is_stored_that_was_computed_from_a_state_from_before_a_reset(
        self, state: int, stores: bool
    ) -> None:
        """The attention blocks were computed again since; the state was found in the engine's own cache."""
        scheduler, _ = hybrid()
        blocks = [
            SimpleNamespace(block_id=block, is_null=block == 0, ref_cnt=0, block_hash=b"x" if block == 77 else None)
            for block in range(100)
        ]
        scheduler.bind_gpu_block_pool(SimpleNamespace(blocks=blocks))
        scheduler.reset_cache()
        request = prompt(34)
        scheduler.get_num_new_matched_tokens(request, 16)
        tables = (ids(9), [0, 0, 0, state, 0, 0, 0, 90, 91])
        scheduler.update_state_after_alloc(request, FakeBlocks(tables), 0)
        request.num_computed_tokens = 16
        meta = scheduler.build_connector_meta(output({"r1": [(1, 90, 32)]}).new(request, 18, *tables))
        assert bool(meta.states_to_store) == bool(meta.reqs_to_store) == stores
        assert (90 in scheduler._tables.suspects, 5 in scheduler._tables.suspects) == (not stores, not stores)

    def test_blocks_that_the_engine_copies_to_are_flushed_and_as_trusted_as_their_source(self) -> None:
        scheduler, _ = hybrid()
        meta = compute(scheduler, prompt(34), {"r1": [(1, 77, 32)]})
        scheduler._tables.suspects.filled([[60]], 0)
        other = FakeRequest("r2", list(range(100, 134)))
        later = compute(scheduler, other, tables=(ids(9, 20), [0] * 8 + [95]), copies=[(60, 77), (61, 78)])
        assert later.jobs_to_flush == {meta.states_to_store["r1"].job_id}
        assert 77 in scheduler._tables.suspects
        assert 78 not in scheduler._tables.suspects

    def test_all_that_is_computed_on_a_part_of_a_suspect_block_is_suspect(self) -> None:
        """The engine copies a part of a cached block; the request goes on in the copy and in further blocks."""
        scheduler, _ = hybrid()
        scheduler._tables.suspects.filled([[60, 70]], 0)
        request = prompt(34)
        scheduler.get_num_new_matched_tokens(request, 4)
        tables = (ids(9), [0, 91, *[0] * 5, 97, 98])
        scheduler.update_state_after_alloc(request, FakeBlocks(tables), 0)
        request.num_computed_tokens = 6
        step = output({"r1": [(1, 97, 32)]}, [(60, 2), (70, 91)]).new(request, 28, *tables)
        meta = scheduler.build_connector_meta(step)
        assert (meta.reqs_to_store, meta.states_to_store) == ({}, {})
        suspects = scheduler._tables.suspects
        assert [block in suspects for block in [1, *ids(9)[1:], 91, 97, 98]] == [False] + [True] * 11

    def test_after_another_connectors_failed_load_all_is_suspect_and_every_store_fails(self) -> None:
        scheduler, manager = hybrid()
        request = prompt(34)
        meta = compute(scheduler, request, {"r1": [(1, 77, 32)]})
        scheduler.update_connector_output(finished(invalid_block_ids={55}))
        end_all(scheduler, meta)
        assert [success for _, success in manager.completed_stores] == [False, False]
        request.append(*range(4))
        again = scheduler.build_connector_meta(output({"r1": [(1, 78, 36)]}).cached(request, 4))
        assert (again.reqs_to_store, again.states_to_store) == ({}, {})


def test_beside_an_exclusive_cpu_tier_states_are_stored_as_they_are_computed() -> None:
    manager = FakeManager()
    manager.exclusive = True
    scheduler, _ = hybrid(manager)
    scheduler.bind_gpu_block_pool(pool := MirroredPool(100))
    pool.take(99)
    request = prompt(34)
    meta = compute(scheduler, request, {"r1": [(1, 77, 32)]})
    assert state_store(meta) == ([77], [0, 7])
    assert not meta.reqs_to_store
    assert manager.offered == [[request.keys(1)[7]]]
    cache = scheduler._engine_cache
    assert cache is not None
    assert list(cache.blocks_of) == request.keys(0)[:8], "no state is noted"
