"""Admission to a tier, and the bounds of its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Literal

import pytest

from tiering.block_tier import intake
from tiering.block_tier.intake import Admission, GhostFilter
from tiering.testing.keys import keys_of

K = keys_of(*range(16))


@pytest.mark.parametrize(("word", "taken"), [("all", [0, 1, 2]), ("none", [])])
def test_all_and_none(word: str, taken: list[int]) -> None:
    admission = Admission(word)  # type: ignore[arg-type]
    assert admission.admit(K[:3], "r") == taken
    assert list(admission.touch(K[:3], "other")) == []


def test_the_first_store_is_declined_and_the_second_taken_once() -> None:
    admission = Admission("second_touch")
    assert admission.admit(K[:4], "r1") == []
    assert admission.admit(K[2:6], "r2") == [0, 1]
    assert admission.admit(K[2:6], "r3") == [2, 3]


def test_touches_by_the_request_that_brought_a_block_do_not_count() -> None:
    admission = Admission("second_touch")
    admission.admit(K[:2], "r1")
    assert list(admission.touch(K[:4], "r1")) == []
    assert list(admission.touch(K[1:4], "r2")) == [K[1]]


def test_a_wanted_block_is_taken_when_it_is_offered_again() -> None:
    admission = Admission("second_touch")
    admission.admit(K[:2], "r1")
    assert admission.admit(admission.touch(K[:2], "r2"), "r1") == [0, 1]
    assert list(admission.touch(K[:2], "r3")) == []


def test_a_request_that_comes_back_under_the_same_name_counts() -> None:
    admission = Admission("second_touch")
    admission.admit(K[:1], "r1")
    admission.on_request_finished("r1")
    assert list(admission.touch(K[:1], "r1")) == K[:1]


def test_what_is_remembered_of_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block admitted after its request's end is still offered, although no second end follows."""
    monkeypatch.setattr(intake, "MAX_OWN_REQUESTS", 2)
    admission = Admission("second_touch")
    for number, req_id in enumerate(("r1", "r2", "r3", "")):
        admission.admit([K[number]], req_id)
    wanted = [key for number in range(4) for key in admission.touch([K[number]], f"r{number + 1}")]
    assert wanted == [K[0], K[3]]


def test_clear_forgets_everything() -> None:
    admission = Admission("second_touch")
    admission.admit(K[:2], "r1")
    admission.clear()
    assert list(admission.touch(K[:2], "r2")) == []
    assert admission.admit(K[:2], "r2") == []


def test_the_ghost_filter_forgets_only_what_shares_a_slot() -> None:
    ghost = GhostFilter(slots=4)
    one, same_slot, other = (GhostFilter.hashes(K[:1]) * 0 + value for value in (1, 5, 2))
    ghost.add(one)
    ghost.add(other)
    ghost.add(same_slot)
    assert [bool(ghost.contains(value)[0]) for value in (one, same_slot, other)] == [False, True, True]
    ghost.drop(one)
    assert ghost.contains(same_slot)[0]
    ghost.drop(same_slot)
    assert not ghost.contains(same_slot)[0]


def test_hashes_are_never_the_mark_of_an_empty_slot() -> None:
    ghost = GhostFilter(slots=4)
    assert not ghost.contains(GhostFilter.hashes([b""])).any()


# ---------------------------------------------------------------------------------------------------------------- fills


def test_a_block_from_a_slower_tier_is_stored_when_it_is_promoted_again() -> None:
    policy = Admission("all", "second_touch")
    assert policy.admit(K[:4], "a") == [0, 1, 2, 3], "a store is no fill"
    assert policy.admit(K[4:8], "a", fill=True) == []
    assert policy.admit(K[4:6], "b", fill=True) == [0, 1]


def test_a_block_from_a_slower_tier_is_wanted_when_another_request_uses_it() -> None:
    policy = Admission("all", "second_touch")
    policy.admit(K[:4], "a", fill=True)
    assert policy.touch(K[:4], "a") == []
    assert policy.touch(K[:2], "b") == K[:2]
    assert policy.admit(K[:2], "", fill=False) == [0, 1]


def test_a_declined_fill_is_not_offered_again_until_it_is_used_or_stored() -> None:
    policy = Admission("all", "second_touch")
    policy.admit(K[:2], "a", fill=True)
    assert policy.may_be_offered(K[:4]) == K[2:4]
    policy.admit(K[:1], "b")
    assert policy.may_be_offered(K[:4]) == [K[0], *K[2:4]]
    policy.clear()
    assert policy.may_be_offered(K[:4]) == K[:4]


@pytest.mark.parametrize(("word", "fill"), [("second_touch", "all"), ("none", "all"), ("none", "second_touch")])
def test_fills_are_never_admitted_more_generously_than_stores(
    word: Literal["second_touch", "none"], fill: Literal["all", "second_touch"]
) -> None:
    assert Admission(word, fill).admit(K[:4], "a", fill=True) == []


def test_fills_that_are_not_wanted_stay_out_however_often_they_are_used() -> None:
    policy = Admission("all", "none")
    for name in "ab":
        assert policy.admit(K[:4], name, fill=True) == []
        assert list(policy.touch(K[:4], "c")) == []
    assert policy.may_be_offered(K[:5]) == [K[4]]
    assert policy.admit(K[:4], "d") == [0, 1, 2, 3], "a store is no fill"


def test_fills_stay_out_of_a_tier_that_stores_at_the_second_touch() -> None:
    policy = Admission("second_touch", "none")
    assert policy.admit(K[:6], "a") == []
    for name in "bc":
        assert policy.admit(K[:4], name, fill=True) == []
        assert list(policy.touch(K[:4], "d")) == []
    assert list(policy.touch_again(K[:2])) == []
    assert policy.may_be_offered(K[:7]) == [K[6]]


def test_a_tier_without_fills_counts_the_touches_of_its_own_stores() -> None:
    policy = Admission("second_touch", "none")
    policy.admit(K[:4], "a")
    policy.admit(K[2:4], "b", fill=True)
    assert list(policy.touch(K[:1], "a")) == []
    assert policy.touch(K[:4], "b") == K[:2]
    assert policy.admit(K[:2], "") == [0, 1]
    assert policy.admit(K[2:4], "e") == [0, 1], "the second store of a block that also came from a slower tier"
    policy.admit(K[4:5], "a")
    policy.clear()
    assert policy.may_be_offered(K[:5]) == K[:5]


def test_all_fills_are_stored_on_demand() -> None:
    assert Admission("all", "all").admit(K[:4], "a", fill=True) == [0, 1, 2, 3]


def test_the_ghost_filter_behaves_the_same_in_every_process() -> None:
    program = (
        "from tiering.block_tier.intake import GhostFilter\n"
        "print(GhostFilter.hashes([number.to_bytes(36, 'big') for number in range(100)]).tolist())"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(set(told[0].split(","))) == 100
