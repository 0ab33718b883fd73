"""Headers that cannot be read during recovery: a bad spot of the device, or a temporary failure."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from pathlib import Path

import pytest

from tests.device import FaultyDevice
from tests.tiers.local.rig import LocalRig, opened
from tiering.errors import TemporaryStoreError
from tiering.testing.keys import key_of
from tiers.local import recovery as recovery_module
from tiers.local import tier as tier_module
from tiers.local.checkpoint import CHECKPOINT_NAME
from tiers.local.recovery import RecoveredBatch, Remembered, recover
from tiers.local.segments import Segments

K = [key_of(number) for number in range(30)]


def scan_fails_with(number: int) -> FaultyDevice:
    """Return a device on which every read of a scan fails."""

    def fail(operation: str, path: Path) -> None:
        if operation == "read" and threading.current_thread().name.startswith("kv-scan"):
            raise OSError(number, os.strerror(number))

    device = FaultyDevice()
    device.fail = fail
    return device


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a directory with blocks in several segments, without a checkpoint."""
    with opened(tmp_path) as rig:
        assert rig.store(K) == K
        assert len(rig.tier.store.segments.existing()) > 1
    (tmp_path / CHECKPOINT_NAME).unlink()
    return tmp_path


def test_slots_that_the_device_cannot_read_are_free_and_said_to_be_so_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kv_tiering.local")
    rig = LocalRig(path, files=scan_fails_with(errno.EIO)).open()
    assert rig.held(K) == []
    assert rig.store(K[:3]) == K[:3]
    assert rig.close()
    assert len([record for record in caplog.records if "cannot be read" in record.getMessage()]) == 1


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_trouble_that_passes_costs_no_block_and_no_restart(
    path: Path, number: int, checkpoint: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many open files at the start: the tier reads the headers as soon as it can."""
    if checkpoint:
        rig = LocalRig(path).open()
        rig.checkpoint()
        rig.store([*K[:1], key_of(1000)])
        rig.drop()
    device = scan_fails_with(number)
    rig = LocalRig(path, files=device, breaker={"probe_after": "10ms", "probe_max": "10ms"})
    assert rig.tier.open(rig.context.clock() + 20)
    numbers = itertools.count(1)
    rig.wait(lambda: next(numbers) > 100)
    assert (rig.tier.get_stats().recovering, rig.tier.get_stats().available) == (1, 1)
    assert rig.held(K) == []
    device.fail = lambda operation, path: None
    rig.wait(lambda: not rig.tier.get_stats().recovering)
    assert rig.load(K) == K
    assert caplog.text.count("recovery is interrupted") == 1
    geometry = rig.tier.store.geometry
    assert rig.tier.index.slots == geometry.slots_per_segment * len(rig.tier.store.segments.existing())
    assert rig.close()
    with opened(path) as again:
        assert again.load(K) == K


def test_a_recovery_that_is_interrupted_again_and_again_tells_of_each_slot_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """New blocks in slots that the recovery has found free keep their keys."""
    caplog.set_level(logging.INFO, "kv_tiering.local")
    monkeypatch.setattr(recovery_module, "_GROUP_SLOTS", 1)
    monkeypatch.setattr(tier_module, "OPEN_WAIT_SECONDS", 0.0)
    reads = itertools.count(1)

    def fail(operation: str, path: Path) -> None:
        if operation == "read" and threading.current_thread().name.startswith("kv-scan") and next(reads) % 30 == 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    device = FaultyDevice()
    rig = LocalRig(path, files=device, breaker={"probe_after": "1ms", "probe_max": "1ms"})
    device.fail = fail
    assert rig.tier.open(rig.context.clock() + 20)
    fresh = [key_of(number) for number in range(500, 520)]
    for key in fresh:
        # While recovery fails, a store without a free slot evicts the block before it.
        rig.wait(lambda: rig.tier.index.free)
        assert rig.store([key]) == [key]
    rig.wait(lambda: not rig.tier.recovering or rig.tier.get_stats().blocks >= len(K) + len(fresh))
    device.fail = lambda operation, path: None
    rig.wait(lambda: not rig.tier.recovering)
    assert rig.load(K) == K
    assert rig.load(fresh) == fresh
    geometry = rig.tier.store.geometry
    assert rig.tier.index.slots == geometry.slots_per_segment * len(rig.tier.store.segments.existing())
    assert rig.tier.index.free + rig.tier.index.blocks == rig.tier.index.slots
    assert next(reads) > 90, "several interruptions"
    for line in ("recovery is interrupted", "reading all headers", "recovery is complete after"):
        assert caplog.text.count(line) == 1
    assert rig.close()


def test_a_recovery_that_fails_again_brings_nothing_else_and_goes_on_where_it_was(path: Path) -> None:
    """Anything in between would count as progress, and the waits between two attempts would not grow."""
    failing = False

    def fail(operation: str, path: Path) -> None:
        if failing and operation == "read":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with opened(path) as rig:
        geometry, namespace = rig.tier.store.geometry, rig.tier.namespace
        assert namespace is not None
        fingerprint = namespace.fingerprint
    (path / CHECKPOINT_NAME).unlink()
    device = FaultyDevice()
    device.fail = fail
    segments = Segments(path, geometry, device)
    numbers = tuple(segments.adopt())
    recovery = recover(segments, Remembered(numbers), fingerprint, threading.Event())
    failing = True
    assert [type(next(recovery)) for _ in range(3)] == [TemporaryStoreError] * 3
    failing = False
    batches = list(recovery)
    segments.close()
    found = [batch for batch in batches if isinstance(batch, RecoveredBatch)]
    assert len(found) == len(batches)
    assert sorted(key for batch in found for key in batch.keys) == sorted(K)
    slots = [slot for batch in found for slots in (batch.slots, batch.free) for slot in slots.tolist()]
    assert sorted(slots) == list(range(geometry.slots_per_segment * len(numbers)))
    assert [batch.last for batch in found] == [False] * (len(found) - 1) + [True]
