"""The prober finds the held length of a chain in few questions and fewer rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.index.shared import PROBE_WIDTH, held_prefix
from tiering.index.tier_index import Probe
from tiering.medium.block_store import Place, StoreProbe
from tiering.testing.keys import keys_of, number_of


class Medium:
    """A medium that holds the first ``held`` positions and fails to answer for those in ``silent``."""

    def __init__(self, held: int, silent: frozenset[int] = frozenset()) -> None:
        self.held = held
        self.silent = silent
        self.rounds: list[int] = []

    def ask(self, places: Sequence[Place]) -> StoreProbe:
        assert len(set(places)) == len(places)
        self.rounds.append(len(places))
        numbers = [int(place) for place in places]
        return StoreProbe(tuple(None if number in self.silent else number < self.held for number in numbers))


def chain(length: int) -> Probe:
    return Probe(keys_of(*range(length)), number_of)


@given(
    st.integers(1, 600).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length))), st.integers(1, 12)
)
def test_it_finds_where_the_chain_ends(length_and_held: tuple[int, int], width: int) -> None:
    length, held = length_and_held
    assert held_prefix(Medium(held).ask, chain(length), width) == held


@pytest.mark.parametrize("held", [0, 1, 100, 4000, 8191, 8192])
def test_a_long_chain_takes_few_rounds(held: int) -> None:
    medium = Medium(held)
    assert held_prefix(medium.ask, chain(8192)) == held
    assert len(medium.rounds) <= 2 + math.ceil(math.log(8192, PROBE_WIDTH + 1))
    assert max(medium.rounds) <= PROBE_WIDTH


def test_a_missing_first_block_takes_one_round() -> None:
    medium = Medium(0)
    held_prefix(medium.ask, chain(8192))
    assert len(medium.rounds) == 1


@given(
    st.integers(1, 600).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length))), st.integers(1, 12)
)
def test_a_cautious_probe_asks_for_the_first_block_alone(length_and_held: tuple[int, int], width: int) -> None:
    length, held = length_and_held
    medium = Medium(held)
    assert held_prefix(medium.ask, replace(chain(length), cautious=True), width) == held
    assert medium.rounds[0] == 1
    assert held or len(medium.rounds) == 1
    silent = Medium(held, frozenset({0}))
    assert held_prefix(silent.ask, replace(chain(length), cautious=True), width) is None


def test_a_medium_that_cannot_say_anything_teaches_nothing() -> None:
    assert held_prefix(Medium(50, frozenset(range(100))).ask, chain(100)) is None


@given(st.integers(1, 200), st.integers(0, 200), st.frozensets(st.integers(1, 200), max_size=20))
def test_what_a_medium_cannot_say_counts_as_missing(length: int, held: int, silent: frozenset[int]) -> None:
    answer = held_prefix(Medium(held, silent).ask, chain(length))
    assert answer is not None
    assert answer <= min(held, length)
    assert answer in {length, held} | silent
