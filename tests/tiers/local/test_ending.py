"""The end of a local tier in the middle of any activity, and the state that the next tier finds."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.tiers.local.rig import SLOT_BYTES, LocalRig, opened
from tiering.medium.files import Files
from tiering.testing.keys import key_of
from tiers.local import checkpoints
from tiers.local import feed as feed_module
from tiers.local import recovery as recovery_module
from tiers.local import tier as tier_module
from tiers.local.checkpoint import CHECKPOINT_NAME, WrittenMarks, read_checkpoint
from tiers.local.layout import SegmentGeometry
from tiers.local.segments import Segments

K = [key_of(number) for number in range(64)]


def test_a_checkpoint_of_many_slices_is_written_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SLICE_SLOTS", 1)
    rig = LocalRig(tmp_path).open()
    rig.store(K[:10])
    assert rig.tier.shutdown(rig.context.clock() + 4)
    checkpoint = read_checkpoint(tmp_path, rig.tier.store.geometry)
    assert not isinstance(checkpoint, str)
    assert len(checkpoint) == 10


def test_an_end_in_the_middle_of_recovery_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:30])
    (tmp_path / CHECKPOINT_NAME).unlink()
    monkeypatch.setattr(tier_module, "OPEN_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(feed_module, "MERGE_SECONDS", 0.0)
    monkeypatch.setattr(feed_module, "MERGE_BLOCKS", 1)
    monkeypatch.setattr(recovery_module, "BATCH_BLOCKS", 4)
    rig = LocalRig(tmp_path)
    assert rig.tier.open(rig.context.clock() + 20)
    rig.wait(lambda: rig.tier.index.blocks > 0)
    assert rig.tier.recovering
    assert rig.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")] == []
    with opened(tmp_path) as again:
        assert again.load(K[:30]) == K[:30]


def test_marks_that_memory_is_too_short_for_leave_no_descriptor(tmp_path: Path) -> None:
    class Short(Files):
        opened = left = 0

        def open(self, path: Path, flags: int) -> int:
            self.opened += 1
            return super().open(path, flags)

        def read_all(self, path: Path, limit: int) -> memoryview:
            self.left -= 1
            if not self.left:
                raise MemoryError
            return super().read_all(path, limit)

    files = Short()
    segments = Segments(tmp_path, SegmentGeometry(SLOT_BYTES, 16, 2), files)
    marks = WrittenMarks(segments, durable=False)
    generation = marks.begin()
    marks.close()
    files.opened, files.left = 0, 2
    with pytest.raises(MemoryError):
        WrittenMarks(segments, durable=False).resume(generation)
    assert files.opened == 0


def test_marks_that_are_lost_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    geometry = SegmentGeometry(SLOT_BYTES, 16, 2)
    marks = WrittenMarks(Segments(tmp_path, geometry, Files()), durable=False)
    generation = marks.begin()
    marks.close()
    (path,) = tmp_path.glob("written-*")
    path.unlink()
    marks = WrittenMarks(Segments(tmp_path, geometry, Files()), durable=False)
    assert marks.resume(generation) is None
    assert marks.begin() > generation
    marks.close()
