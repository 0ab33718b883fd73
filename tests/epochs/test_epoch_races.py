"""Random interleavings of machines, media and an operator; see :mod:`tests.epochs.epoch_world`."""

from __future__ import annotations

import logging

import pytest

from tests.epochs.epoch_world import walk


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Keep no records: their errors refer to all that a walk has made."""
    caplog.set_level(logging.CRITICAL + 1, "kv_tiering")


def test_no_older_block_is_used_in_short_walks() -> None:
    assert sum(walk(seed, 400) for seed in range(20)) > 500


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_no_older_block_is_used_in_long_walks(seed: int) -> None:
    assert sum(walk(1000 * seed + number, 1500) for number in range(10)) > 500
