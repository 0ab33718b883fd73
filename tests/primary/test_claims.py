"""Claims: a completion ends its own request's oldest claims, in whole batches or in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.api.keys import OffloadKey
from tiering.primary.claims import Claims
from tiering.testing.keys import keys_of

A, B, C = keys_of(*range(3))


def released(claims: Claims, req_id: str, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], list[int]]:
    """The keys and rows that a release returns, as lists."""
    known, rows = claims.release(req_id, keys)
    assert rows.dtype == np.int64
    return list(known), rows.tolist()


def claim(claims: Claims, req_id: str, keys: Sequence[OffloadKey], *rows: int) -> None:
    claims.add(req_id, keys, np.array(rows, np.int64))


def test_a_release_returns_the_rows_of_the_claim() -> None:
    claims = Claims()
    claim(claims, "r", [A, B], 5, 3)
    assert "r" in claims
    assert released(claims, "r", [A, B]) == ([A, B], [5, 3])
    assert "r" not in claims
    assert released(claims, "r", [A, B]) == ([], [])


def test_a_claim_ends_by_its_own_request_only() -> None:
    claims = Claims()
    claim(claims, "first", [A], 1)
    claim(claims, "second", [A], 2)
    assert released(claims, "third", [A]) == ([], [])
    assert released(claims, "second", [A]) == ([A], [2])
    assert ("first" in claims, "second" in claims) == (True, False)
    assert released(claims, "first", [A]) == ([A], [1])


def test_the_oldest_of_several_claims_on_a_key_ends_first() -> None:
    claims = Claims()
    for row in (1, 2, 3):
        claim(claims, "r", [A], row)
    assert [released(claims, "r", [A])[1] for _ in range(4)] == [[1], [2], [3], []]


def test_a_batch_may_be_released_in_parts_and_in_any_order() -> None:
    claims = Claims()
    claim(claims, "r", [A, B, C], 0, 1, 2)
    assert released(claims, "r", [C]) == ([C], [2])
    assert released(claims, "r", [B, A]) == ([B, A], [1, 0])
    assert "r" not in claims


def test_a_release_may_span_batches() -> None:
    claims = Claims()
    claim(claims, "r", [A, B], 0, 1)
    claim(claims, "r", [B, C], 7, 8)
    assert released(claims, "r", [A, B, C]) == ([A, B, C], [0, 1, 8])
    assert released(claims, "r", [B]) == ([B], [7])
    assert "r" not in claims


def test_a_batch_that_follows_a_part_keeps_its_place() -> None:
    claims = Claims()
    claim(claims, "r", [A, B], 0, 1)
    assert released(claims, "r", [B]) == ([B], [1])
    claim(claims, "r", [A], 4)
    assert released(claims, "r", [A]) == ([A], [0])
    assert released(claims, "r", [A]) == ([A], [4])


def test_unknown_and_repeated_keys_are_left_out() -> None:
    claims = Claims()
    claim(claims, "r", [A], 0)
    claim(claims, "r", [A], 1)
    assert released(claims, "r", [B]) == ([], [])
    assert released(claims, "r", [A, B, A]) == ([A], [0])
    assert released(claims, "r", (A,)) == ([A], [1])


def test_the_callers_list_may_change_after_the_claim() -> None:
    claims, keys = Claims(), [A, B]
    claim(claims, "r", keys, 0, 1)
    keys.clear()
    assert released(claims, "r", [A, B]) == ([A, B], [0, 1])


@pytest.mark.parametrize("keys", [[A, B], (A, B)])
def test_any_sequence_may_name_a_whole_batch(keys: Sequence[OffloadKey]) -> None:
    claims = Claims()
    claim(claims, "r", keys, 0, 1)
    assert released(claims, "r", keys) == ([A, B], [0, 1])


KEYS = keys_of(*range(4))
requests = st.sampled_from(["first", "second"])
batches = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), requests, batches),
        st.tuples(st.just("release"), requests, st.lists(st.sampled_from(KEYS), max_size=6)),
        st.tuples(st.just("release the oldest batch"), requests, st.just([])),
    ),
    max_size=30,
)


@given(steps=steps)
def test_any_history_ends_the_claims_of_each_key_in_their_order(steps: list[tuple[str, str, list[OffloadKey]]]) -> None:
    claims, row = Claims(), 0
    model: dict[tuple[str, OffloadKey], deque[int]] = {}
    order: dict[str, deque[list[OffloadKey]]] = {"first": deque(), "second": deque()}
    for name, req_id, keys in steps:
        if name == "claim":
            rows = range(row, row + len(keys))
            row += len(keys)
            claim(claims, req_id, keys, *rows)
            order[req_id].append(keys)
            for key, its_row in zip(keys, rows, strict=True):
                model.setdefault((req_id, key), deque()).append(its_row)
        else:
            chosen = keys if name == "release" or not order[req_id] else order[req_id].popleft()
            known = [key for key in dict.fromkeys(chosen) if model.get((req_id, key))]
            expected = [model[req_id, key].popleft() for key in known]
            assert released(claims, req_id, chosen) == (known, expected)
        for each in order:
            assert (each in claims) is any(rows for (owner, _), rows in model.items() if owner == each)
