"""States inside of blocks: what is stored under a border of hash-blocks, and which hits end there.

Blocks have 16 tokens and hash-blocks 4. The last border in a prompt of 30 tokens is at 28, 12 tokens into its second
block.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.fakes import (
    FakeBlocks,
    FakeManager,
    FakeRequest,
    FakeSpec,
    finished,
    idle_step,
    loaded,
    prompt,
)
from tests.connector.test_handed_states import Handed, Output, output
from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.transfer import GPULoadStoreSpec, as_rows
from tiering.connector.groups import offload_groups, tail_unit
from tiering.connector.hits import MAX_WINDOW_PROBES
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler

FULL = KVCacheGroup(("a",), 16)
STATE = KVCacheGroup(("s",), 16, None, "mamba")
TAIL = 28 // 4 - 1
"""Index of the hash at the last border."""


def hybrid(*groups: KVCacheGroup, **words: Any) -> tuple[OffloadingConnectorScheduler, FakeManager]:
    groups, describes = groups or (FULL, STATE), bool(words.pop("describes", False))
    engine = EngineConfig((16,) * len(groups), 4, groups, **words)
    spec = FakeSpec(engine, {"self_describing_kv_events": describes})
    return OffloadingConnectorScheduler(spec, enable_kv_cache_events=describes, clock=lambda: 0.0), spec.manager


def start(
    scheduler: OffloadingConnectorScheduler, request: FakeRequest, tokens: int, *tables: list[int]
) -> OffloadingConnectorMetadata:
    """Schedule a request for the first time, up to ``tokens``."""
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, FakeBlocks(tables), 0)
    meta = scheduler.build_connector_meta(output({}).new(request, tokens, *tables))
    request.num_computed_tokens = tokens
    return meta


def hand_over(
    scheduler: OffloadingConnectorScheduler, request: FakeRequest, handed: list[tuple[int, int, int]], tokens: int = 2
) -> OffloadingConnectorMetadata:
    """Compute on, in a step that hands states over."""
    offers: Handed = {request.request_id: handed}
    step: Output = output(offers).cached(request, tokens)  # type: ignore[assignment]
    return scheduler.build_connector_meta(step)


def stored(meta: OffloadingConnectorMetadata) -> tuple[list[int], list[int], list[int]]:
    source = meta.states_to_store["r1"].spec[0]
    assert isinstance(source, GPULoadStoreSpec)
    return source.block_ids.tolist(), list(source.group_sizes), list(source.block_indices)


def test_a_tail_is_the_state_and_the_attention_block_at_its_place() -> None:
    scheduler, manager = hybrid()
    request = prompt(30)
    start(scheduler, request, 28, [11, 12], [0, 21])
    meta = hand_over(scheduler, request, [(1, 99, 28)])
    assert stored(meta) == ([12, 99], [1, 1], [1, 1])
    assert manager.offered[-1] == [request.key(TAIL, 0), request.key(TAIL, 1)]
    assert not set(manager.offered[-1]) & set(request.keys(0, factor=4) + request.keys(1, factor=4))
    assert scheduler.fences.conflicts([12]) == scheduler.fences.conflicts([99]) == {meta.states_to_store["r1"].job_id}


def test_a_tail_and_a_whole_state_are_stored_together() -> None:
    scheduler, manager = hybrid()
    request = prompt(30)
    start(scheduler, request, 14, [11, 12], [0, 21])
    meta = hand_over(scheduler, request, [(1, 98, 16), (1, 99, 28)], tokens=16)
    assert stored(meta) == ([12, 98, 99], [1, 2], [1, 0])
    assert manager.offered[-1] == [request.key(TAIL, 0), request.key(3, 1), request.key(TAIL, 1)]


@pytest.mark.parametrize(
    "handed",
    [
        [(1, 99, 26)],  # no border of hash-blocks
        [(1, 0, 28)],
        [(1, 98, 28), (1, 99, 28)],  # two blocks for one state
        [(0, 12, 28)],
        [(1, 99, 36)],  # beyond the prompt
    ],
)
def test_what_is_no_tail_is_dropped(handed: list[tuple[int, int, int]]) -> None:
    scheduler, _ = hybrid()
    request = prompt(30)
    start(scheduler, request, 28, [11, 12], [0, 21])
    assert hand_over(scheduler, request, handed).states_to_store == {}


def test_a_tail_of_tokens_that_are_not_confirmed_is_dropped() -> None:
    scheduler, _ = hybrid()
    request = prompt(30)
    start(scheduler, request, 20, [11, 12], [0, 21])
    assert hand_over(scheduler, request, [(1, 99, 28)], tokens=7).states_to_store == {}
    assert hand_over(scheduler, request, [(1, 99, 28)], tokens=8).states_to_store != {}


@pytest.mark.parametrize("table", [[11], [11, 0]])
def test_a_tail_without_its_attention_block_is_dropped(table: list[int]) -> None:
    scheduler, _ = hybrid()
    request = prompt(30)
    start(scheduler, request, 28, table, [0, 21])
    assert hand_over(scheduler, request, [(1, 99, 28)]).states_to_store == {}


def test_the_states_of_all_groups_belong_to_a_tail() -> None:
    scheduler, manager = hybrid(STATE, FULL, STATE)
    request = prompt(30)
    start(scheduler, request, 28, [0, 21], [11, 12], [0, 31])
    assert hand_over(scheduler, request, [(0, 98, 28)]).states_to_store == {}
    assert stored(hand_over(scheduler, request, [(0, 98, 28), (2, 99, 28)])) == ([98, 12, 99], [1, 1, 1], [1, 1, 1])
    assert manager.offered[-1] == [request.key(TAIL, group) for group in range(3)]


def test_a_tail_of_a_request_from_before_a_reset_is_dropped() -> None:
    scheduler, _ = hybrid()
    request = prompt(30)
    meta = start(scheduler, request, 28, [11, 12], [0, 21])
    scheduler.update_connector_output(finished(*(order.job_id for order in meta.reqs_to_store.values())))
    scheduler.reset_cache()
    assert hand_over(scheduler, request, [(1, 99, 28)]).states_to_store == {}


def test_an_attention_block_that_a_load_still_writes_is_not_stored() -> None:
    scheduler, _ = hybrid()
    request = prompt(30)
    start(scheduler, request, 28, [11, 12], [0, 21])
    scheduler.fences.fence(77, as_rows([12]), writes=True)
    assert hand_over(scheduler, request, [(1, 99, 28)]).states_to_store == {}


class TestAtTheEndOfARequest:
    """vLLM hands the tail over with the end of a request whose last step has ended there."""

    def ended(
        self, handed: list[tuple[int, int, int]], policy: Any = None, **words: Any
    ) -> tuple[OffloadingConnectorScheduler, FakeManager, FakeRequest]:
        scheduler, manager = hybrid(**words)
        request = prompt(30, kv_transfer_params=policy)
        start(scheduler, request, 28, [11, 12], [0, 21])
        scheduler.store_last_tail(request, handed)
        scheduler.request_finished(request, ([11, 12], [0, 21]))
        return scheduler, manager, request

    def test_it_goes_out_with_the_next_step(self) -> None:
        scheduler, manager, request = self.ended([(1, 21, 28)])
        assert manager.ended == ["r1"]
        assert scheduler.has_pending_work()
        meta = idle_step(scheduler)
        order = meta.reqs_to_store["r1"]
        source = order.spec[0]
        assert isinstance(source, GPULoadStoreSpec)
        assert (source.block_ids.tolist(), list(source.block_indices)) == ([12, 21], [1, 1])
        scheduler.update_connector_output(finished(order.job_id))
        tail = [request.key(TAIL, group) for group in range(2)]
        assert manager.completed_stores[-1] == (tail, True)
        assert not scheduler.fences.conflicts([12, 21])

    @pytest.mark.parametrize("block", [12, 21])
    def test_blocks_that_the_next_step_takes_are_not_read(self, block: int) -> None:
        scheduler, manager, request = self.ended([(1, 21, 28)])
        other = FakeRequest("r2", [7] * 8, kv_transfer_params={"kv_tiering": {"store": False}})
        meta = start(scheduler, other, 8, [block], [31])
        assert (meta.reqs_to_store, manager.completed_stores[-1][1]) == ({}, False)
        assert request.key(TAIL, 1) not in manager.rows

    def test_blocks_that_a_later_step_takes_are_copied_first(self) -> None:
        scheduler, _, _ = self.ended([(1, 21, 28)])
        job = idle_step(scheduler).reqs_to_store["r1"].job_id
        other = FakeRequest("r2", [7] * 8, kv_transfer_params={"kv_tiering": {"store": False}})
        assert start(scheduler, other, 8, [12], [31]).jobs_to_flush == {job}

    def test_a_reset_in_between_withdraws_it(self) -> None:
        scheduler, manager, request = self.ended([(1, 21, 28)])
        scheduler.reset_cache()
        assert idle_step(scheduler).reqs_to_store == {}
        assert request.key(TAIL, 1) not in manager.rows

    @pytest.mark.parametrize("handed", [[(1, 21, 26)], [(1, 0, 28)], [(1, 21, 36)], [(0, 12, 28)]])
    def test_what_is_no_tail_is_dropped(self, handed: list[tuple[int, int, int]]) -> None:
        assert idle_step(self.ended(handed)[0]).reqs_to_store == {}

    def test_a_request_that_may_not_store_stores_none(self) -> None:
        scheduler, _, _ = self.ended([(1, 21, 28)], {"kv_tiering": {"store": False}})
        assert idle_step(scheduler).reqs_to_store == {}

    def test_a_tail_that_a_load_did_not_fill_is_dropped(self) -> None:
        scheduler, _ = hybrid()
        request = prompt(30)
        start(scheduler, request, 28, [11, 12], [0, 21])
        scheduler.states["r1"].load_failed(16)
        scheduler.store_last_tail(request, [(1, 21, 28)])
        assert scheduler._stores.last == {}

    def test_blocks_that_wait_for_room_go_out_in_its_place(self) -> None:
        scheduler, manager = hybrid()
        request = prompt(30)
        manager.refuse_stores = True
        start(scheduler, request, 28, [11, 12], [0, 21])
        manager.refuse_stores = False
        scheduler.store_last_tail(request, [(1, 21, 28)])
        scheduler.request_finished(request, ([11, 12], [0, 21]))
        order = idle_step(scheduler).reqs_to_store["r1"]
        source = order.spec[0]
        assert isinstance(source, GPULoadStoreSpec)
        assert source.block_ids.tolist() == [11]
        scheduler.update_connector_output(finished(order.job_id))
        assert not scheduler.has_pending_work()

    def test_an_unknown_request_and_a_model_without_states_store_none(self) -> None:
        for groups in ((FULL, STATE), (FULL,)):
            scheduler, _ = hybrid(*groups)
            scheduler.store_last_tail(prompt(30), [(1, 21, 28)])
            assert not scheduler.has_pending_work()


def test_events_do_not_take_a_tail_for_a_whole_block() -> None:
    """The attention block is known by the hash of its border only: it does not have all of its tokens."""
    scheduler, manager = hybrid(describes=True)
    request = prompt(40)
    start(scheduler, request, 28, [11, 12, 13], [0, 21])
    hand_over(scheduler, request, [(1, 99, 28)])
    manager.events = [OffloadingEvent([request.key(TAIL, 0)], "CPU", "LOCAL", PRIMARY_TIER, removed=False)]
    (event,) = scheduler.take_events()
    assert (list(event.block_hashes), list(event.token_ids)) == ([request.block_hashes[TAIL]], [])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ((FULL,), {}),
        ((FULL, KVCacheGroup(("w",), 16, 20, "sliding_window"), STATE), {}),
        ((KVCacheGroup(("a",), 32), STATE), {}),
        ((KVCacheGroup(("a",), 16, is_eagle=True), STATE), {}),
        ((FULL, STATE), {"has_scratch": True}),
        ((FULL, STATE), {"context_parallel_size": 2}),
        ((KVCacheGroup(("a",), 4), KVCacheGroup(("s",), 4, None, "mamba")), {}),
    ],
)
def test_other_models_have_no_tails(groups: tuple[KVCacheGroup, ...], words: dict[str, Any]) -> None:
    engine = EngineConfig(tuple(group.gpu_block_size for group in groups), 4, groups, **words)
    assert tail_unit(offload_groups(groups, 4), engine) == 0
    control = EngineConfig((16, 16), 4, (FULL, STATE))
    assert tail_unit(offload_groups(control.groups, 4), control) == 4


class TestHits:
    def held(self, *ends: int, request: FakeRequest | None = None) -> tuple[OffloadingConnectorScheduler, FakeManager]:
        """Return a scheduler half that holds whole attention blocks, and the tails and states at ``ends``."""
        scheduler, manager = hybrid()
        request = request or prompt(64, "r0")
        manager.hold(request.keys(0, factor=4))
        for end in ends:
            manager.hold([request.key(end // 4 - 1, 1)])
            if end % 16:
                manager.hold([request.key(end // 4 - 1, 0)])
        return scheduler, manager

    @pytest.mark.parametrize(
        ("ends", "tokens", "hit"),
        [
            ((28,), 30, 28),  # vLLM on GPUs keeps no state at the block before
            ((12,), 30, 12),
            ((16, 28), 30, 28),
            ((16, 28), 28, 16),  # one token is left to compute
            ((16, 20, 24), 30, 24),
            ((16, 28), 60, 28),
            ((16, 32, 28), 60, 32),
            ((16, 32, 60), 64, 60),
            ((16, 32, 60), 60, 32),
        ],
    )
    def test_end_at_a_tail_behind_the_last_whole_state(self, ends: tuple[int, ...], tokens: int, hit: int) -> None:
        assert self.held(*ends)[0].get_num_new_matched_tokens(prompt(tokens), 0) == (hit, hit > 0)

    def test_begin_behind_what_the_engine_holds(self) -> None:
        assert self.held(28)[0].get_num_new_matched_tokens(prompt(30), 16) == (12, True)
        assert self.held(28)[0].get_num_new_matched_tokens(prompt(30), 20) == (0, False)
        assert self.held(60)[0].get_num_new_matched_tokens(prompt(64), 16) == (44, True)

    def test_need_all_attention_blocks_before_the_tail(self) -> None:
        scheduler, manager = self.held(16, 60)
        manager.drop(prompt(64).key(11, 0))
        assert scheduler.get_num_new_matched_tokens(prompt(64), 0) == (16, True)

    @pytest.mark.parametrize("group", [0, 1])
    def test_need_every_group(self, group: int) -> None:
        scheduler, manager = self.held(16, 28)
        manager.drop(prompt(30).key(TAIL, group))
        assert scheduler.get_num_new_matched_tokens(prompt(30), 0) == (16, True)

    def test_wait_for_a_tail_that_is_being_written(self) -> None:
        scheduler, manager = self.held(16, 28)
        manager.refs[prompt(30).key(TAIL, 1)] = -1
        assert scheduler.get_num_new_matched_tokens(prompt(30), 0) == (None, False)

    def test_keep_to_the_limit_of_the_request(self) -> None:
        limited = prompt(30, kv_transfer_params={"max_load_tokens": 27})
        assert self.held(16, 24, 28)[0].get_num_new_matched_tokens(limited, 0) == (24, True)

    def test_look_at_all_ends_in_one_call(self) -> None:
        scheduler, manager = self.held(16)
        assert scheduler.get_num_new_matched_tokens(prompt(62), 0) == (16, True)
        first, whole, second, tails = manager.looked_at
        assert (first, second) == ([prompt(62).key(3, 0)], [prompt(62).key(7, 0)]), "without attention, none helps"
        assert whole == [prompt(62).key(end // 4 - 1, 1) for end in (32, 16)], "the states that may be held, beside 48"
        assert tails == [prompt(62).key(end // 4 - 1, 1) for end in (60, 56, 52, 44, 40, 36, 28, 24, 20)]
        assert not [keys for keys in manager.asked if len(keys) == 2], "no state is held, so no tail is probed"

    def test_cost_a_prompt_without_attention_the_looks_into_its_first_block(self) -> None:
        scheduler, manager = hybrid()
        assert scheduler.get_num_new_matched_tokens(prompt(62), 0) == (0, False)
        head, other_head, tails = manager.looked_at
        assert head == other_head == [prompt(62).key(3, 0)]
        assert tails == [prompt(62).key(end // 4 - 1, 1) for end in (12, 8, 4)]
        assert manager.asked == []

    def test_wait_once_for_all_states_of_a_slow_tier(self) -> None:
        scheduler, manager = self.held(16)
        states = [prompt(62).key(end // 4 - 1, 1) for end in (48, 32, 16)]
        manager.undecided = set(states)
        assert scheduler.get_num_new_matched_tokens(prompt(62), 0) == (None, False)
        manager.undecided = set(states[1:])
        manager.looked_at.clear()
        assert scheduler.get_num_new_matched_tokens(prompt(62), 0) == (None, False)
        assert manager.looked_at == [[prompt(62).key(3, 0)], states[1:]]
        manager.undecided = set()
        assert scheduler.get_num_new_matched_tokens(prompt(62), 0) == (16, True)

    def test_probe_the_last_ends_and_those_behind_the_hit_of_a_long_prompt(self) -> None:
        """Between them, no tail is found."""
        tokens, probes = 1000, MAX_WINDOW_PROBES // 2
        request = prompt(tokens, "r0")
        for end, hit in ((28, 28), (tokens - 4 * probes + 4, tokens - 4 * probes + 4), (tokens // 2 + 4, 16)):
            scheduler, _ = self.held(16, end, request=request)
            assert scheduler.get_num_new_matched_tokens(prompt(tokens), 0) == (hit, True)

    def test_load_the_tail_in_place_of_the_whole_block(self) -> None:
        scheduler, manager = self.held(16, 28)
        request = prompt(60)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (28, True)
        scheduler.update_state_after_alloc(request, FakeBlocks(([31, 32], [0, 41])), 28)
        source, destination = loaded(idle_step(scheduler))
        keys: list[OffloadKey] = [request.key(3, 0), request.key(TAIL, 0), request.key(TAIL, 1)]
        assert source.block_ids.tolist() == [manager.rows[key] for key in keys]
        assert destination.block_ids.tolist() == [31, 32, 41]
        assert manager.touched[-1] == keys[1:]
        assert scheduler.states["r1"].groups[0].cursor == 1, "the second block is stored when it is whole"

    @pytest.mark.parametrize("tables", [([31], [0, 41]), ([31, 32], [0, 0]), ([31, 32], [41])])
    def test_without_a_block_for_the_tail_nothing_is_loaded(self, tables: tuple[list[int], list[int]]) -> None:
        scheduler, _ = self.held(16, 28)
        request = prompt(30)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (28, True)
        scheduler.update_state_after_alloc(request, FakeBlocks(tables), 28)
        assert idle_step(scheduler).reqs_to_load == {}

    def test_are_shared_by_what_precedes_them_only(self) -> None:
        """A prompt that parts from the stored one before the end of the tail has another hash there."""
        scheduler, _ = self.held(16, 28)
        other = FakeRequest("r1", [*range(26), 7, 7, 7, 7])
        assert scheduler.get_num_new_matched_tokens(other, 0) == (16, True)

    def test_of_a_request_with_a_variant_are_none(self) -> None:
        scheduler, _ = self.held(16, 28)
        request = prompt(30)
        scheduler.on_new_request(request)
        state = scheduler.states["r1"]
        state.variant = SimpleNamespace(names_of=list, identity=b"x")  # type: ignore[assignment]
        assert scheduler._search.tails is not None
        assert scheduler._search.tails.keys(state, 28) == []
