"""A tier that grows: stores wait for new slots, and evict nothing while capacity is unused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import FaultyDevice
from tests.tiers.local.rig import BLOCK_BYTES, LocalRig, opened, segment_files
from tiering.medium.files import Files
from tiering.testing.keys import key_of
from tiers.local import new_segments
from tiers.local import tier as tier_module
from tiers.local.checkpoint import CHECKPOINT_NAME
from tiers.local.layout import PAGE

K = [key_of(number) for number in range(64)]
SLOTS = 4
"""Number of slots of a segment."""


class SlowDisk(FaultyDevice):
    """A disk that reserves the space of all but the first segments only after ``ready`` is set."""

    def __init__(self, quick: int = 1) -> None:
        super().__init__()
        self.ready = threading.Event()
        self.fail = self._wait
        self._quick = quick

    def _wait(self, operation: str, path: Path) -> None:
        if operation != "allocate":
            return
        self._quick -= 1
        if self._quick < 0:
            self.ready.wait(20)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    """A slow disk for a tier that begins to serve with one segment; the fixture's end releases the disk."""
    monkeypatch.setattr(new_segments, "FIRST_BYTES", 0)
    device = SlowDisk()
    yield device
    device.ready.set()


def slow_rig(path: Path, disk: SlowDisk) -> LocalRig:
    """Return a tier with one segment; the second segment is being prepared."""
    return LocalRig(path, files=disk, segment_size=SLOTS * (BLOCK_BYTES + PAGE)).open()


def test_there_is_no_credit_before_more_slots_are_prepared(tmp_path: Path, disk: SlowDisk) -> None:
    rig = slow_rig(tmp_path, disk)
    assert rig.store(K[:SLOTS]) == K[:SLOTS]
    for _ in range(20):
        rig.wait(lambda: True)
        assert rig.tier.credit(1000, 1.0) == 0
    disk.ready.set()
    assert rig.store(K[SLOTS:40]) == K[SLOTS:40]
    assert rig.held(K[:40]) == K[:40]
    stats = rig.tier.get_stats()
    assert (stats.evictions, stats.stores_declined) == (0, 0)
    assert set(rig.reports().values()) == {1}
    assert rig.close()


def test_the_tail_of_a_store_beyond_the_credit_is_declined(tmp_path: Path, disk: SlowDisk) -> None:
    rig = slow_rig(tmp_path, disk)
    assert rig.store(K[:2]) == K[:2]
    assert rig.stored(rig.submit_store(K[2:10])) == K[2:SLOTS]
    stats = rig.tier.get_stats()
    assert (stats.evictions, stats.stores_dropped, stats.stores_declined) == (0, 0, 6)
    assert rig.load(K[:SLOTS]) == K[:SLOTS]
    disk.ready.set()
    assert rig.close()


def test_nothing_that_was_stored_before_a_kill_is_evicted_for_stores_after_it(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = slow_rig(tmp_path, disk)
    assert rig.store(K[:SLOTS]) == K[:SLOTS]
    disk.ready.set()
    rig.drop()
    again = SlowDisk(quick=0)
    survivor = slow_rig(tmp_path, again)
    before = survivor.held(K[:SLOTS])
    assert before == K[:SLOTS]
    for start in range(SLOTS, 40, 6):
        survivor.stored(survivor.submit_store(K[start : start + 6]))
    assert survivor.held(K[:SLOTS]) == before
    assert survivor.tier.get_stats().evictions == 0
    again.ready.set()
    assert survivor.store(K[40:46]) == K[40:46]
    assert survivor.held(K[:SLOTS]) == before
    assert survivor.close()


def test_a_disk_without_space_for_more_makes_room_by_eviction(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = slow_rig(tmp_path, disk)
    rig.store(K[:SLOTS])
    rig.wait(lambda: rig.tier.credit(1000, 0.0) == 0)
    disk.fail = lambda operation, path: None
    monkeypatch.setattr(disk, "sync_directory", refuse)
    disk.ready.set()
    assert rig.store(K[SLOTS : 2 * SLOTS]) == K[SLOTS : 2 * SLOTS]
    assert rig.held(K[: 2 * SLOTS]) == K[SLOTS : 2 * SLOTS]
    assert rig.tier.get_stats().evictions == SLOTS
    monkeypatch.undo()
    assert rig.close()


def refuse(path: Path) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_tier_evicts_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as rig:
        keys = [key_of(number) for number in range(2 * rig.tier.store.geometry.num_slots)]
        for start in range(0, len(keys), 32):
            rig.store(keys[start : start + 32])
        assert rig.tier.get_stats().evictions > 0
        assert rig.held(keys[-32:]) == keys[-32:]


def test_a_drain_waits_for_slots_that_the_credit_lacked(tmp_path: Path, disk: SlowDisk) -> None:
    rig = slow_rig(tmp_path, disk)
    rig.store(K[:SLOTS])
    begun = rig.context.clock()
    assert rig.tier.drain(begun + 20), "no block needs a slot"
    assert rig.context.clock() < begun + 20
    assert rig.tier.credit(1000, 0.0) == 0
    rig.tier.drain(rig.context.clock() + 0.01)
    assert rig.tier.credit(1000, 0.0) == 0
    disk.ready.set()
    assert rig.tier.drain(rig.context.clock() + 20)
    assert rig.tier.credit(1000, 0.0) == SLOTS
    assert rig.close()


class SlowScan(Files):
    """File operations whose reads of headers wait for ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        if threading.current_thread().name.startswith("kv-scan"):
            self.go.wait(20)
        return super().preadv(fd, buffers, offset)


def test_nothing_fresh_is_evicted_while_recovery_has_not_read_the_other_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_segments, "FIRST_BYTES", 0)
    monkeypatch.setattr(tier_module, "OPEN_WAIT_SECONDS", 0.0)
    segment = SLOTS * (BLOCK_BYTES + PAGE)
    with opened(tmp_path, segment_size=segment) as rig:
        rig.store(K[:2])
        rig.wait(lambda: rig.tier.index.slots == 2 * SLOTS)
    (tmp_path / CHECKPOINT_NAME).unlink()
    files = SlowScan()
    rig = LocalRig(tmp_path, files=files, segment_size=segment, capacity=5 * segment + segment // 2)
    try:
        super(LocalRig, rig).open()
        rig.wait(lambda: rig.tier.index.free == SLOTS)
        fresh = K[10 : 10 + 2 * SLOTS]
        for start in (0, SLOTS):
            assert rig.store(fresh[start : start + SLOTS]) == fresh[start : start + SLOTS]
        for _ in range(50):
            rig.wait(lambda: True)
        assert rig.tier.credit(1000, 0.0) == 0
        assert rig.held(fresh) == fresh
        files.go.set()
        assert rig.store(K[20 : 20 + SLOTS]) == K[20 : 20 + SLOTS]
        # The slots that the store waited for may come before the segment with the older blocks was read.
        rig.wait(lambda: not rig.tier.recovering)
        assert rig.held([*K[:2], *fresh]) == [*K[:2], *fresh]
        assert rig.tier.get_stats().evictions == 0
        rest = K[30 : 30 + 4 * SLOTS]
        assert rig.store(rest) == rest, "a recovered tier makes room by eviction"
        assert rig.tier.get_stats().evictions > 0
    finally:
        files.go.set()
        rig.close()


def test_a_restart_with_free_slots_adds_no_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery has returned no slot yet when the tier first looks for free ones."""
    monkeypatch.setattr(new_segments, "FIRST_BYTES", 0)
    size = SLOTS * (BLOCK_BYTES + PAGE)
    with opened(tmp_path, segment_size=size) as rig:
        assert rig.store(K[:2]) == K[:2]
        rig.wait(lambda: rig.tier.index.free >= SLOTS)
    before = segment_files(tmp_path)
    assert len(before) == 2
    for _ in range(3):
        with opened(tmp_path, segment_size=size) as rig:
            assert rig.held(K[:2]) == K[:2]
    assert segment_files(tmp_path) == before


def test_the_last_checkpoint_has_a_segment_that_was_added_after_the_last_store(
    tmp_path: Path, disk: SlowDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the next start reads the segment's headers, and warns."""
    rig = slow_rig(tmp_path, disk)
    assert rig.store(K[:SLOTS]) == K[:SLOTS]
    rig.checkpoint()
    disk.ready.set()
    rig.wait(lambda: rig.tier.index.slots == 2 * SLOTS)
    assert rig.close()
    again = slow_rig(tmp_path, SlowDisk(quick=2))
    assert again.held(K[:SLOTS]) == K[:SLOTS]
    assert again.close()
    assert "not the files in the checkpoint" not in caplog.text
