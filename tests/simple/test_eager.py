"""Blocks of running requests are stored again after the CPU pool has evicted them."""

from __future__ import annotations

from collections.abc import Container
from types import SimpleNamespace

from examples.mini_engine.simple import MirroredPool
from tiering.api.engine import KVCacheGroup
from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.request import ReqContext
from tiering.api.request_policy import RequestPolicy
from tiering.connector.groups import offload_groups
from tiering.connector.hit_ends import HitEnds
from tiering.simple.block_pool import CPUBlockPool
from tiering.simple.eager import EagerStores
from tiering.simple.state import SimpleGroupState, SimpleRequestState

BLOCK = 4


def key(name: str) -> OffloadKey:
    return make_offload_key(name.encode(), 0)


def running(names: str, pool: MirroredPool) -> SimpleRequestState:
    """Return a request that has computed one block for each letter of ``names``."""
    group = SimpleGroupState([key(name) for name in names], [block.block_id for block in pool.take(len(names))])
    request = SimpleNamespace(request_id=names, num_computed_tokens=BLOCK * len(names))
    return SimpleRequestState(request, RequestPolicy(), [group], ReqContext(names), rewinding=lambda state: None)


def stores(kind: str = "full_attention", suspects: Container[int] = ()) -> tuple[EagerStores, MirroredPool]:
    groups = offload_groups([KVCacheGroup(("layer",), BLOCK, kind=kind)], BLOCK)
    return EagerStores(CPUBlockPool(20), groups, HitEnds(groups), suspects), MirroredPool(20)


def lost(*states: SimpleRequestState) -> list[set[int]]:
    return [state.groups[0].lost for state in states]


def test_each_request_that_has_a_forgotten_block_is_told_which_of_its_own_it_is() -> None:
    eager, pool = stores()
    first, second, other = (running(names, pool) for names in ("abcd", "abxy", "pq"))
    for state in (first, second, other):
        eager.offers(state, pool, 20)
    eager.evicted([key("b"), key("d"), key("y"), key("nobody's")])
    assert lost(first, second, other) == [{1, 3}, {1, 3}, set()]


def test_blocks_that_were_not_offered_yet_are_not_missed() -> None:
    eager, pool = stores()
    state = running("abcd", pool)
    eager.offers(state, pool, 2)
    eager.evicted([key("b"), key("c")])
    assert lost(state) == [{1}]


def test_a_block_counts_as_running_until_the_last_request_that_has_it_ends() -> None:
    eager, pool = stores()
    states = [running(names, pool) for names in ("abc", "abd", "abe")]
    for state in states:
        eager.offers(state, pool, 20)
    eager.forget(states[0])
    eager.forget(states[1])
    eager.evicted([key("a"), key("c")])
    assert lost(*states) == [set(), set(), {0}]
    eager.forget(states[2])
    eager.evicted([key("a")])
    assert lost(*states) == [set(), set(), set()]
    assert eager.idle


def test_an_evicted_block_whose_last_token_was_replaced_is_not_stored_before_it_is_computed_again() -> None:
    """A streaming session discards the last sampled token and appends tokens that are not computed yet."""
    eager, pool = stores()
    state = running("abcd", pool)
    eager.offers(state, pool, 20)
    eager.evicted([key("d")])
    state.groups[0].keys[3] = key("D")
    state.groups[0].cursor = 3
    assert eager.lost(state, pool) == []
    assert lost(state) == [set()]


def test_the_eviction_of_a_replaced_block_is_not_taken_for_one_of_the_block_in_its_place() -> None:
    eager, pool = stores()
    state = running("abcd", pool)
    eager.offers(state, pool, 20)
    state.groups[0].keys[3] = key("D")
    state.groups[0].cursor = 3
    eager.evicted([key("d"), key("b")])
    assert lost(state) == [{1}]
    eager.forget(state)
    assert eager.idle


def test_a_state_is_stored_from_the_block_that_the_engine_has_named_unless_the_block_is_suspect() -> None:
    """Another request may have filled and named a block of this request's table, because states move."""
    suspects: set[int] = set()
    eager, pool = stores("mamba", suspects)
    state = running("abcd", pool)
    blocks = state.groups[0].block_ids
    for index, name in [(1, "b"), (3, "d")]:
        pool.blocks[blocks[index]].block_hash = key(name)
    suspects.add(blocks[1])
    assert [offer[1] for offer in eager.offers(state, pool, 20)] == [blocks[3]]
