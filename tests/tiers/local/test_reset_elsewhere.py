"""Resets of a local tier whose directory is no longer at its path."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.device import FaultyDevice
from tests.tiers.local.rig import LocalRig, opened
from tiering.medium.files import Files
from tiering.testing.keys import key_of
from tiers.local import tier as local_tier

K = [key_of(number) for number in range(32)]
PROBES: dict[str, Any] = {"breaker": {"probe_after": "10ms", "probe_max": "10ms"}}


@pytest.fixture(autouse=True)
def _inspects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_tier, "INSPECT_SECONDS", 0.0)
    monkeypatch.setattr(local_tier, "INSPECT_AT_ONCE_SECONDS", 0.0)


@pytest.mark.parametrize("part", ["kv", "kv/documents"])
@pytest.mark.parametrize("revision", [None, "A"])
def test_a_reset_in_another_directory_at_the_path_is_not_certain(
    tmp_path: Path, part: str, revision: str | None
) -> None:
    path, moved, kept = tmp_path / "kv", tmp_path / part, tmp_path / "kept"
    rig = LocalRig(path).open()
    assert rig.store(K[:8]) == K[:8]
    rig.checkpoint()
    moved.rename(kept)
    (path / "documents").mkdir(mode=0o700, parents=True)
    done = rig.tier.reset(rig.context.clock() + 20, revision)
    rig.drop()
    shutil.rmtree(moved)
    kept.rename(moved)
    with opened(path) as later:
        served = later.held(K[:8])
    assert not done or served == []
    assert not done


@pytest.mark.parametrize("part", ["kv", "kv/documents"])
@pytest.mark.parametrize("gone", ["removed", "replaced"])
def test_a_tier_whose_directory_went_away_before_a_reset_comes_back(
    tmp_path: Path, part: str, gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, moved = tmp_path / "kv", tmp_path / part
    caplog.set_level(logging.WARNING)
    with opened(path, **PROBES) as rig:
        assert rig.store(K[:8]) == K[:8]
        moved.rename(tmp_path / "kept")
        if gone == "replaced":
            moved.mkdir(mode=0o700)
        done = rig.tier.reset(rig.context.clock() + 20)
        # Missing documents count as removed only in the directory that the tier opened.
        assert done is ((part, gone) == ("kv/documents", "removed"))
        rig.wait(lambda: rig.step().reset_done and rig.store(K[8:16]) == K[8:16])
        assert rig.load(K[8:16]) == K[8:16]
        assert rig.held(K[:8]) == []
    assert "the reset holds" not in caplog.text
    assert caplog.text.count("could not be removed for a reset") <= 1
    with opened(path) as later:
        assert later.held(K[:8]) == []


def test_a_relative_path_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with opened(Path("kv"), **PROBES) as rig:
        assert rig.store(K[:8]) == K[:8]
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert rig.tier.store.inspect().moved is None
        assert rig.tier.reset(rig.context.clock() + 20)
        assert rig.store(K[8:16]) == K[8:16]
    assert not (tmp_path / "elsewhere" / "kv").exists()


class FullDisk(FaultyDevice):
    """A device that refuses new content of documents until some space of a segment has been freed."""

    def __init__(self) -> None:
        super().__init__()
        self.full = True
        self.fail = self._refuse

    def _refuse(self, operation: str, path: Path) -> None:
        if self.full and operation == "write" and "documents" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate(self, fd: int, length: int) -> None:
        self.full = False
        super().truncate(fd, length)


def test_a_tier_that_filled_its_disk_drops_a_segment_for_the_documents_of_another_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as rig:
        assert rig.store(K[:8]) == K[:8]
    with opened(tmp_path, model="model-b", files=FullDisk(), **PROBES) as rig:
        assert rig.store(K[:8]) == K[:8]
        assert rig.load(K[:8]) == K[:8]
    assert caplog.text.count("begins empty, because") == 1


def test_a_full_disk_that_frees_nothing_costs_one_segment_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as rig:
        assert rig.store(K[:8]) == K[:8]
    disk = FullDisk()
    monkeypatch.setattr(disk, "truncate", Files().truncate)
    rig = LocalRig(tmp_path, model="model-b", files=disk, **PROBES)
    assert not rig.tier.open(rig.context.clock() + 20)
    rig.wait(lambda: rig.tier.failed_attempts >= 3)
    disk.full = False
    rig.wait(lambda: rig.tier.get_stats().available)
    rig.close()
    assert caplog.text.count("is full: truncating slots-") == 1
    assert caplog.text.count("begins empty, because") == 1
