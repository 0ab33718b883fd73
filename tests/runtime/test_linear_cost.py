"""The moving estimate of a fixed part and a part per unit."""

from __future__ import annotations

import pytest

from tiering.runtime.linear_cost import LinearCost


def test_both_parts_are_found() -> None:
    cost = LinearCost(10.0)
    for number, units in enumerate((8, 64, 16, 256, 32)):
        cost.observe(units, 0.02 + 0.003 * units, float(number))
    assert cost.fixed == pytest.approx(0.02)
    assert cost.per_unit == pytest.approx(0.003)


def test_equal_numbers_of_units_have_no_fixed_part() -> None:
    cost = LinearCost(10.0)
    assert cost.per_unit is None
    cost.observe(10, 0.5, 0.0)
    cost.observe(10, 0.5, 1.0)
    assert cost.fixed == 0.0
    assert cost.per_unit == pytest.approx(0.05)
    assert cost.per_unit_beside(0.4) == pytest.approx(0.01)
    assert cost.per_unit_beside(9.0) == 0.0


@pytest.mark.parametrize(("keeps", "fixed"), [(True, 0.08), (False, 0.0)])
def test_the_quotient_of_both_parts_may_stay_while_numbers_of_units_are_equal(keeps: bool, fixed: float) -> None:
    cost = LinearCost(2.0, keeps_quotient=keeps)
    cost.observe(10, 0.14, 0.0)
    cost.observe(100, 1.04, 1.0)
    assert cost.fixed == pytest.approx(0.04)
    for number in range(40):
        cost.observe(20, 0.48, 10.0 + number)
    assert cost.fixed == pytest.approx(fixed, rel=0.2)
    assert cost.fixed + 20 * (cost.per_unit or 0.0) == pytest.approx(0.48)


def test_after_a_restart_later_observations_count_alone() -> None:
    cost = LinearCost(2.0, keeps_quotient=True)
    cost.observe(10, 0.14, 0.0)
    cost.observe(100, 1.04, 0.1)
    cost.restart()
    cost.observe(10, 0.28, 0.1)
    assert [cost.fixed, cost.per_unit] == pytest.approx([0.08, 0.02])


def test_a_duration_without_the_fixed_part_counts_for_the_units() -> None:
    cost = LinearCost(10.0)
    cost.observe(10, 0.2, 0.0)
    cost.observe(100, 1.0, 1.0, fixed=False)
    assert cost.per_unit == pytest.approx(0.01)
    assert cost.fixed == pytest.approx(0.1)


def test_neither_part_is_negative() -> None:
    cost = LinearCost(10.0)
    cost.observe(10, 1.0, 0.0)
    cost.observe(100, 0.5, 1.0)
    assert cost.per_unit == 0.0
    assert cost.fixed > 0.0
    cost = LinearCost(10.0)
    cost.observe(10, 0.1, 0.0)
    cost.observe(100, 5.0, 1.0)
    assert cost.fixed == 0.0
    assert cost.per_unit is not None
    assert cost.per_unit > 0.0


def test_old_observations_fade() -> None:
    cost = LinearCost(2.0)
    for number in range(20):
        cost.observe(32, 32.0, 0.1 * number)
    cost.observe(32, 0.32, 32.0)
    assert cost.per_unit == pytest.approx(0.01, rel=0.05)
