"""The names of blocks follow the engine's hashes, even after the engine has replaced tokens."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from tests.connector.fakes import chain_hashes
from tiering.api.engine import KVCacheGroup
from tiering.api.keys import make_offload_key
from tiering.api.request import ReqContext
from tiering.api.request_policy import RequestPolicy
from tiering.connector.groups import offload_groups
from tiering.connector.tracked import GroupState, TrackedRequest, extend_keys


@given(
    factor=st.integers(1, 3),
    changes=st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 3), max_size=12)), max_size=8),
)
def test_after_any_change_of_the_tokens(factor: int, changes: list[tuple[int, list[int]]]) -> None:
    tokens: list[int] = []
    names: list[bytes] = []
    for kept, added in changes:
        before = list(names)
        tokens = [*tokens[:kept], *added]
        hashes = chain_hashes(tokens, 2)
        known = extend_keys(names, hashes, factor, b"0000")
        assert names == [name + b"0000" for name in hashes[factor - 1 :: factor]]
        assert names[:known] == before[:known]
        assert known == len(before) or names[known : known + 1] != before[known : known + 1]


def test_a_request_names_a_block_anew_and_offers_it_again() -> None:
    hashes = chain_hashes(range(16), 4)
    request = SimpleNamespace(request_id="r1", block_hashes=hashes)
    groups = offload_groups([KVCacheGroup(("layer",), 4)], 4)
    state = TrackedRequest(request, RequestPolicy(), [GroupState()], ReqContext("r1"))
    state.extend_keys(groups)
    state.groups[0].cursor = 4
    hashes[3:] = chain_hashes([*range(15), 99, *range(4)], 4)[3:]
    state.extend_keys(groups)
    assert state.groups[0].keys == [make_offload_key(name, 0) for name in hashes]
    assert state.groups[0].cursor == 3
