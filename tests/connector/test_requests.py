"""Tracked requests: keys follow the hashes, cursors the keys, and lost blocks are offered again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.connector.fakes import FakeRequest, prompt
from tiering.api.engine import KVCacheGroup
from tiering.api.request import ReqContext
from tiering.api.request_policy import NEITHER, RequestPolicy
from tiering.connector.groups import offload_groups
from tiering.connector.tracked import NEVER, GroupState, TrackedRequest, extend_keys, policy_of

CTX = ReqContext("r1")
LAYOUTS = tuple(
    replace(group, group_idx=index, engine_idx=index)
    for index, factor in enumerate((1, 2))
    for group in offload_groups([KVCacheGroup(("layer",), 4)], 4, factor)
)


def tracked(request: FakeRequest, policy: RequestPolicy | None = None) -> TrackedRequest[GroupState]:
    return TrackedRequest(request, policy or RequestPolicy(), [GroupState() for _ in LAYOUTS], CTX)


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=8))
def test_keys_equal_those_of_the_present_hashes_whatever_came_before(factor: int, turns: list[tuple[int, int]]) -> None:
    request, keys = prompt(0), list[bytes]()
    for number, (length, drop) in enumerate(turns):
        del request.all_token_ids[max(0, request.num_tokens - drop) :]
        request.append(*range(1000 * number, 1000 * number + length))
        wanted = request.keys(0, factor)
        before = list(keys)
        kept = extend_keys(keys, request.block_hashes, factor, (0).to_bytes(4, "big"))
        assert keys == wanted
        common = [index for index, pair in enumerate(zip(before, wanted, strict=False)) if pair[0] != pair[1]]
        assert kept == (common[0] if common else min(len(before), len(wanted)))


def test_a_replaced_token_takes_the_cursor_back_to_its_block() -> None:
    request = prompt(16)
    state = tracked(request)
    state.extend_keys(LAYOUTS)
    assert [len(keys) for keys in state.keys] == [4, 2]
    state.groups[0].cursor, state.groups[1].cursor = 4, 2
    request.all_token_ids[9] = 500
    request.update_hashes()
    state.extend_keys(LAYOUTS)
    assert [group.cursor for group in state.groups] == [2, 1]
    assert state.keys == [request.keys(0), request.keys(1, 2)]


def test_blocks_are_looked_for_at_once_unless_the_request_stores_nothing() -> None:
    assert tracked(prompt(8)).next_store_at == 0
    assert tracked(prompt(8), NEITHER).next_store_at == NEVER


def test_a_request_that_goes_back_offers_all_its_blocks_again() -> None:
    state = tracked(prompt(16))
    state.groups[0].cursor = state.groups[1].cursor = 2
    state.next_store_at = 400
    state.rewind()
    assert [group.cursor for group in state.groups] == [0, 0]
    assert state.next_store_at == 0


def test_the_first_of_several_holes_counts() -> None:
    state = tracked(prompt(16))
    state.next_store_at = 400
    state.distrust(8)
    assert (state.invalid_from, state.next_store_at) == (8, 0)
    state.distrust(12)
    assert state.invalid_from == 8
    state.distrust(4)
    assert state.invalid_from == 4


def test_a_restart_forgets_blocks_and_all_that_depends_on_them() -> None:
    state = tracked(prompt(16))
    state.extend_keys(LAYOUTS)
    state.set_blocks([[1, 2], [3]])
    state.append_blocks([[4], [5]])
    tables = state.tables
    assert tables == [[1, 2, 4], [3, 5]]
    assert state.has_blocks
    state.found_tokens = state.filled_tokens = 8
    state.scheduled, state.next_store_at, state.groups[0].cursor = True, 400, 2
    state.distrust(4)
    state.restart()
    assert tables == [[1, 2, 4], [3, 5]]
    assert not state.has_blocks
    assert (state.found_tokens, state.filled_tokens, state.scheduled, state.invalid_from) == (None, 0, False, None)
    assert (state.next_store_at, state.groups[0].cursor) == (0, 0)
    assert len(state.keys[0]) == 4


@pytest.mark.parametrize("skip", [True, False])
def test_nothing_is_loaded_for_a_request_whose_prompt_must_be_computed(skip: bool) -> None:
    request = prompt(8, kv_transfer_params={"kv_tiering": {"max_store_tokens": 4}})
    request.skip_reading_prefix_cache = skip  # type: ignore[attr-defined]
    policy = policy_of(request)
    assert (policy.load, policy.store, policy.max_store_tokens) == (not skip, True, 4)
