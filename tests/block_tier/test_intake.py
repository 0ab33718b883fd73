"""The intake of one tier: what a reset forgets."""

from __future__ import annotations

from tiering.block_tier.intake import Intake
from tiering.testing.keys import key_of


def keys(*groups: int) -> list[bytes]:
    return [key_of(number, group) for number, group in enumerate(groups)]


def test_a_reset_forgets_blocks() -> None:
    intake = Intake.build("second_touch")
    declined, lacking = keys(0, 0), [key_of(7), key_of(8)]
    assert intake.admission.admit(declined, "r1") == []
    intake.offers.add(lacking, 0.0)
    intake.clear()
    assert intake.admission.admit(declined, "r2") == []
    assert intake.offers.take() == []
    intake.offers.add(lacking, 0.0)
    assert intake.offers.take() == lacking
