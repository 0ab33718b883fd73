"""With ``durability: fsync``, every stored block survives the loss of all writes that were not synced."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.device import UnsyncedDevice
from tests.tiers.local.rig import LocalRig
from tiering.api.keys import OffloadKey
from tiering.testing.keys import key_of


def _life(path: Path, seed: int, durability: str, known: list[OffloadKey], first: int) -> tuple[list[OffloadKey], int]:
    """Live one life of a tier: open, store with checkpoints in between, and lose power.

    Returns:
        ``known`` and the keys reported as stored in this life, and the number of writes that the device dropped.
    """
    rng = random.Random(seed)
    device = UnsyncedDevice(seed)
    rig = LocalRig(path, files=device, durability=durability, capacity="4MiB", max_inflight=4).open()
    reported = list(known)
    for number in range(first, first + 40, 4):
        if rng.random() < 0.3:
            rig.tier.checkpoints.request()
        reported += rig.store([key_of(number + offset) for offset in range(4)])
    jobs = [rig.submit_store([key_of(first + 1000 + n)], first_row=100 + n) for n in range(4)]
    assert jobs
    rig.drop()
    device.lose_power()
    return reported, device.dropped


@pytest.mark.parametrize("seed", range(12))
def test_nothing_reported_is_lost_with_the_power(tmp_path: Path, seed: int) -> None:
    reported: list[OffloadKey] = []
    for life in range(3):
        reported, _ = _life(tmp_path, seed * 10 + life, "fsync", reported, life * 40)
        rig = LocalRig(tmp_path, capacity="4MiB").open()
        try:
            assert rig.held(reported) == reported, f"seed {seed}, life {life}"
            for start in range(0, len(reported), 32):
                keys = reported[start : start + 32]
                assert rig.load(keys) == keys, f"seed {seed}, life {life}"
        finally:
            rig.drop()


def test_the_device_does_drop_what_was_not_synced(tmp_path: Path) -> None:
    """Negative control: without fsync a loss of power loses blocks, but never returns wrong ones."""
    reported, dropped = _life(tmp_path, 1, "none", [], 0)
    assert dropped > 0
    rig = LocalRig(tmp_path, capacity="4MiB").open()
    try:
        arrived = [key for start in range(0, 40, 4) for key in rig.load(reported[start : start + 4])]
        assert len(arrived) < len(reported)
    finally:
        rig.close()
