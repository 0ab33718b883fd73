"""The intake of one tier: the bound on blocks that it wants, and a reset."""

from __future__ import annotations

from tiering.block_tier.intake import MAX_WANTED, Intake
from tiering.testing.keys import keys_of


def test_a_reset_forgets_blocks() -> None:
    intake = Intake("second_touch")
    declined, lacking = keys_of(0, 1), keys_of(7, 8)
    assert intake.admission.admit(declined, "r1") == []
    intake.offer(lacking, 0.0)
    intake.clear()
    assert intake.admission.admit(declined, "r2") == []
    assert intake.take() == []
    intake.offer(lacking, 0.0)
    assert intake.take() == lacking


def test_wanted_blocks_are_bounded() -> None:
    intake, keys = Intake("all"), keys_of(*range(MAX_WANTED + 10))
    intake.want(keys[:10])
    intake.want(keys)
    taken = intake.take()
    assert taken[:10] == keys[:10]
    assert len(taken) <= MAX_WANTED
