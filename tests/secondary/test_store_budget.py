"""The limit on the bytes of stores that wait or run in one tier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.secondary.intake import Intake, StoreBudget
from tiering.testing.keys import key_of


def keys(*groups: int) -> list[bytes]:
    return [key_of(number, group) for number, group in enumerate(groups)]


@pytest.mark.parametrize("group_bytes", [(100,), (100, 30)])
def test_a_block_has_the_bytes_of_its_group(group_bytes: tuple[int, ...]) -> None:
    groups = [number % len(group_bytes) for number in range(5)]
    budget = StoreBudget(group_bytes, 1000)
    assert budget.sizes(keys(*groups)) == [group_bytes[group] for group in groups]
    assert budget.sizes([]) == []


def test_a_prefix_fits_up_to_the_bound_exactly() -> None:
    budget = StoreBudget((100,), 300)
    assert budget.fitting(keys(0, 0, 0, 0)) == 3
    budget.used = 100
    assert budget.fitting(keys(0, 0, 0, 0)) == 2
    budget.used = 101
    assert budget.fitting(keys(0, 0)) == 1
    budget.used = 201
    assert budget.fitting(keys(0, 0)) == 0


def test_the_first_block_that_does_not_fit_ends_the_prefix_though_a_later_one_is_smaller() -> None:
    budget = StoreBudget((100, 10), 115)
    assert budget.fitting(keys(0, 1, 0, 1)) == 2


def test_one_block_fits_into_an_idle_tier_however_small_the_bound_is() -> None:
    budget = StoreBudget((100,), 1)
    assert budget.fitting(keys(0, 0)) == 1
    assert budget.spare(keys(0, 0)) == 1
    budget.used = 1
    assert budget.fitting(keys(0, 0)) == 0
    assert budget.spare(keys(0)) == 0


def test_no_block_fits_if_there_is_none() -> None:
    assert StoreBudget((100,), 1).fitting([]) == 0
    assert StoreBudget((100,), 1).spare([]) == 0


def test_offers_leave_the_second_half_to_new_blocks() -> None:
    budget = StoreBudget((100,), 800)
    assert (budget.spare(keys(*[0] * 9)), budget.fitting(keys(*[0] * 9))) == (4, 8)
    budget.used = 300
    assert (budget.spare(keys(*[0] * 9)), budget.fitting(keys(*[0] * 9))) == (1, 5)
    budget.used = 400
    assert (budget.spare(keys(0)), budget.fitting(keys(0))) == (0, 1)


@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.integers(1, 2000),
    st.integers(0, 2000),
)
def test_the_longest_prefix_within_the_bound_is_chosen(groups: list[int], limit: int, used: int) -> None:
    budget = StoreBudget((100, 30, 7), limit)
    budget.used = used
    blocks = keys(*groups)
    sizes = budget.sizes(blocks)
    fitting = budget.fitting(blocks)
    if used or not blocks or sizes[0] <= limit:
        assert sum(sizes[:fitting]) <= max(limit - used, 0)
        assert fitting == len(blocks) or sum(sizes[: fitting + 1]) > limit - used
    else:
        assert fitting == 1
    assert budget.spare(blocks) <= max(fitting, 1)


def test_a_reset_forgets_blocks_and_keeps_the_bytes_of_stores_that_run() -> None:
    intake = Intake.build("second_touch", (100,), 1000)
    declined, lacking = keys(0, 0), [key_of(7), key_of(8)]
    intake.budget.used = 200
    assert intake.admission.admit(declined, "r1") == []
    intake.offers.add(lacking, 0.0)
    intake.clear()
    assert intake.admission.admit(declined, "r2") == []
    assert intake.offers.take() == []
    assert intake.budget.used == 200
    intake.offers.add(lacking, 0.0)
    assert intake.offers.take() == lacking
