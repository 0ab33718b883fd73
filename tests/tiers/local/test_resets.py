"""Resets of the local tier: old blocks stay gone when documents, disk, threads or power fail."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.device import FaultyDevice, UnsyncedDevice
from tests.thread_limit import ThreadLimit
from tests.tiers.local.rig import LocalRig, opened, segment_files
from tiering.api.keys import OffloadKey
from tiering.medium.files import Files
from tiering.testing.keys import key_of
from tiering.testing.tier_rig import PATIENCE_SECONDS

OLD = [key_of(number) for number in range(40)]
NEW = [key_of(number) for number in range(100, 108)]


def store_all(rig: LocalRig, keys: Sequence[OffloadKey]) -> None:
    for start in range(0, len(keys), 32):
        part = keys[start : start + 32]
        assert rig.store(part) == part


def reset(rig: LocalRig, seconds: float = PATIENCE_SECONDS) -> bool:
    return rig.tier.reset(time.monotonic() + seconds)


def found(path: Path, keys: Sequence[OffloadKey] = OLD, **options: object) -> list[OffloadKey]:
    """Return those of ``keys`` that a later process holds; the process ends as if killed."""
    rig = LocalRig(path, **options).open()  # type: ignore[arg-type]
    try:
        return rig.held(keys)
    finally:
        rig.drop()


def epoch_file(path: Path) -> Path:
    (document,) = (path / "documents").glob("epoch-*")
    return document


# ------------------------------------------------------------------------------------------------------------ documents


def _remove(document: Path) -> None:
    document.unlink()


def _zero(document: Path) -> None:
    document.write_bytes(bytes(document.stat().st_size))


def _zero_16(document: Path) -> None:
    document.write_bytes(bytes(16))


def _cut(document: Path) -> None:
    os.truncate(document, document.stat().st_size - 1)


def _remove_all(document: Path) -> None:
    shutil.rmtree(document.parent)


DAMAGES = [_remove, _zero, _zero_16, _cut, _remove_all]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("was_reset", [True, False])
def test_blocks_whose_epoch_document_is_missing_or_damaged_are_foreign(
    tmp_path: Path, was_reset: bool, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    rig = LocalRig(tmp_path).open()
    store_all(rig, OLD)
    rig.checkpoint()
    if was_reset:
        assert reset(rig)
    rig.drop()
    damage(epoch_file(tmp_path))
    caplog.clear()
    assert found(tmp_path) == []
    assert "missing" in caplog.text or "damaged" in caplog.text


def test_documents_that_are_removed_under_a_tier_do_not_keep_it_from_a_reset(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path).open()
    store_all(rig, OLD)
    shutil.rmtree(tmp_path / "documents")
    assert reset(rig)
    rig.drop()
    assert found(tmp_path) == []
    with opened(tmp_path) as rig:
        store_all(rig, NEW)
    assert found(tmp_path, NEW) == NEW


def test_a_reset_holds_although_a_segment_was_removed(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path).open()
    store_all(rig, OLD)
    segment_files(tmp_path)[0].unlink()
    assert reset(rig)
    rig.drop()
    assert found(tmp_path) == []


# -------------------------------------------------------------------------------------------------- a disk that refuses


class Disk(FaultyDevice):
    """A device that refuses operations in the directory of documents.

    Attributes:
        refused: operation → errno of its failures.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, int] = {}
        self.fail = self._refuse

    def _refuse(self, operation: str, path: Path) -> None:
        if "documents" in str(path) and operation in self.refused:
            raise OSError(self.refused[operation], os.strerror(self.refused[operation]))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if source.name == "documents":
            # The tier creates a new directory in its place, which accepts all operations.
            self.refused = {}


@pytest.mark.parametrize(
    ("refused", "certain"),
    [
        ({"write": errno.ENOSPC}, True),
        ({"open": errno.ENOSPC, "write": errno.ENOSPC}, True),
        ({"unlink": errno.EACCES}, True),
        ({"unlink": errno.EACCES, "open": errno.EACCES}, True),
        ({"unlink": errno.EROFS, "open": errno.EROFS, "rename": errno.EROFS}, False),
    ],
)
def test_a_reset_is_certain_if_the_disk_lets_the_old_epoch_be_made_unreadable_in_any_way(
    tmp_path: Path, refused: dict[str, int], certain: bool
) -> None:
    disk = Disk()
    rig = LocalRig(tmp_path, files=disk).open()
    store_all(rig, OLD)
    rig.checkpoint()
    disk.refused = refused
    assert reset(rig) is certain
    assert rig.held(OLD) == []
    rig.drop()
    assert (found(tmp_path) == []) is certain


def test_a_reset_that_was_not_certain_is_when_the_disk_lets_it_be(tmp_path: Path) -> None:
    disk = Disk()
    rig = LocalRig(tmp_path, files=disk, breaker={"probe_after": "1ms", "probe_max": "1ms"}).open()
    store_all(rig, OLD)
    disk.refused = dict.fromkeys(("unlink", "open", "rename"), errno.EROFS)
    assert not reset(rig)
    assert rig.store(NEW) == []
    disk.refused = {}
    rig.wait(lambda: rig.step().reset_done)
    store_all(rig, NEW)
    assert rig.held(OLD) == []
    rig.drop()
    assert found(tmp_path) == []


def test_a_reset_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    disk, go_on = FaultyDevice(), threading.Event()
    rig = LocalRig(tmp_path, files=disk).open()
    store_all(rig, OLD)

    def hang(operation: str, path: Path) -> None:
        if "documents" in str(path):
            go_on.wait()

    disk.fail = hang
    assert reset(rig, 0.02) is False
    assert not go_on.is_set()
    assert rig.held(OLD) == []
    go_on.set()
    rig.wait(lambda: rig.step().reset_done)
    store_all(rig, NEW)
    rig.drop()
    assert found(tmp_path) == []


# ----------------------------------------------------------------------------------------------------------- no threads


def test_a_reset_for_which_no_thread_can_be_started_is_done_by_those_that_are_there(
    tmp_path: Path, thread_limit: ThreadLimit
) -> None:
    rig = LocalRig(tmp_path).open()
    store_all(rig, OLD)
    thread_limit.reach()
    assert reset(rig)
    thread_limit.leave()
    rig.drop()
    assert found(tmp_path) == []


# ------------------------------------------------------------------------------------------------------ kills and power


class Killed(Files):
    """The files of a process that is killed before operation number ``last``; later changes fail."""

    def __init__(self) -> None:
        self.last: float = float("inf")
        self.done = 0

    def _count(self) -> None:
        if self.done >= self.last:
            raise OSError(errno.EIO, "the process is dead")
        self.done += 1

    def open(self, path: Path, flags: int) -> int:
        self._count()
        return super().open(path, flags)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._count()
        return super().pwritev(fd, buffers, offset)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)


def test_a_kill_at_any_point_of_a_reset_leaves_all_or_nothing_and_what_was_certain_is(tmp_path: Path) -> None:
    outcomes: list[tuple[bool, int]] = []
    for last in range(40):
        path = tmp_path / str(last)
        files = Killed()
        rig = LocalRig(path, files=files, checkpoint_interval="1h").open()
        store_all(rig, OLD)
        rig.checkpoint()
        files.done, files.last = 0, last
        certain = reset(rig)
        rig.drop()
        left = len(found(path))
        outcomes.append((certain, left))
        assert left in {0, len(OLD)}, f"killed before operation {last}"
        assert not (certain and left), f"killed before operation {last}"
        shutil.rmtree(path)
        if certain and files.done < last:
            break
    assert outcomes[0] == (False, len(OLD)), "nothing was done yet"
    assert all(left == 0 for _, left in outcomes[1:]), "the first operation is the one that counts"
    assert outcomes[-1] == (True, 0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("durability", ["none", "fsync"])
def test_a_reset_that_was_certain_survives_a_loss_of_power(tmp_path: Path, seed: int, durability: str) -> None:
    device = UnsyncedDevice(seed)
    rig = LocalRig(tmp_path, files=device, durability=durability).open()
    store_all(rig, OLD)
    if seed % 2:
        rig.checkpoint()
    assert reset(rig)
    store_all(rig, NEW)
    rig.tier.checkpoints.request()
    rig.drop()
    device.lose_power()
    assert found(tmp_path, [*OLD, *NEW]) == []


def test_two_resets_in_a_row_and_a_kill(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path).open()
    store_all(rig, OLD)
    assert reset(rig)
    store_all(rig, NEW)
    assert reset(rig)
    assert rig.held(NEW) == []
    rig.drop()
    assert found(tmp_path, [*OLD, *NEW]) == []


def test_a_revision_finds_its_blocks_after_a_restart_and_no_other_does(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path).open()
    store_all(rig, OLD)
    assert rig.tier.reset(time.monotonic() + PATIENCE_SECONDS, "step-7")
    store_all(rig, NEW)
    rig.drop()
    assert found(tmp_path, [*OLD, *NEW], revision="step-7") == NEW
    assert found(tmp_path, [*OLD, *NEW]) == []
    assert found(tmp_path, [*OLD, *NEW], revision="step-7") == [], "another life has begun an epoch since"
