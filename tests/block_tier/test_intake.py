"""The intake of one tier: sizes of blocks, and what a reset forgets."""

from __future__ import annotations

import pytest

from tiering.block_tier.intake import BlockSizes, Intake
from tiering.testing.keys import key_of


def keys(*groups: int) -> list[bytes]:
    return [key_of(number, group) for number, group in enumerate(groups)]


@pytest.mark.parametrize("group_bytes", [(100,), (100, 30)])
def test_a_block_has_the_bytes_of_its_group(group_bytes: tuple[int, ...]) -> None:
    groups = [number % len(group_bytes) for number in range(5)]
    sizes = BlockSizes(group_bytes)
    assert sizes.of(keys(*groups)) == [group_bytes[group] for group in groups]
    assert sizes.of([]) == []


def test_a_reset_forgets_blocks() -> None:
    intake = Intake.build("second_touch", (100,))
    declined, lacking = keys(0, 0), [key_of(7), key_of(8)]
    assert intake.admission.admit(declined, "r1") == []
    intake.offers.add(lacking, 0.0)
    intake.clear()
    assert intake.admission.admit(declined, "r2") == []
    assert intake.offers.take() == []
    intake.offers.add(lacking, 0.0)
    assert intake.offers.take() == lacking
