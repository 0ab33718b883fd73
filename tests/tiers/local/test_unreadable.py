"""Headers that cannot be read while a directory is recovered: a bad spot of the device, or trouble that passes."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from tests.tiers.local.rig import LocalRig, opened
from tiering.testing.device import FaultyDevice
from tiering.testing.frames import key_of
from tiers.local.checkpoint import CHECKPOINT_NAME

K = [key_of(number) for number in range(30)]


def scan_fails_with(number: int) -> FaultyDevice:
    """A device on which every read of a scan fails."""

    def fail(operation: str, path: Path) -> None:
        if operation == "read" and threading.current_thread().name.startswith("kv-scan"):
            raise OSError(number, os.strerror(number))

    device = FaultyDevice()
    device.fail = fail
    return device


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory with blocks in several segments, and no checkpoint."""
    with opened(tmp_path) as rig:
        assert rig.store(K) == K
        assert len(rig.tier.store.segments.existing()) > 1
    (tmp_path / CHECKPOINT_NAME).unlink()
    return tmp_path


def test_slots_that_the_device_cannot_read_are_free_and_said_to_be_so_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kv_tiering.local")
    rig = LocalRig(path, files=scan_fails_with(errno.EIO)).open()
    assert rig.held(K) == []
    assert rig.store(K[:3]) == K[:3]
    assert rig.close()
    assert len([record for record in caplog.records if "cannot be read" in record.getMessage()]) == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_trouble_that_passes_costs_no_block(path: Path, number: int) -> None:
    rig = LocalRig(path, files=scan_fails_with(number)).open()
    assert rig.held(K) == []
    assert rig.close()
    with opened(path) as again:
        assert again.load(K) == K
