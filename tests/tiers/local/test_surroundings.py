"""Warnings about a directory: each once, for as long as its reason lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiering.medium.files import Files
from tiers.local.layout import SegmentGeometry
from tiers.local.store import LocalStore


class Disk(Files):
    """A file system of ``size`` bytes."""

    size = 100

    def size_of_disk(self, path: Path) -> int:
        return self.size


def test_each_condition_is_told_when_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    tmp_path.chmod(0o700)
    store = LocalStore(tmp_path, SegmentGeometry(8192, 4, 1), 200, files=disk)

    def told(*, read_only: bool = False) -> list[str]:
        caplog.clear()
        store._warn(read_only=read_only)
        return [record.getMessage().removeprefix(f"{tmp_path}")[:25] for record in caplog.records]

    small, fixed, open_to_all = ": the capacity of 200 byte", ": the file system is read-", " may be written by other "
    assert told() == [small[:25]]
    assert told() == []
    assert told(read_only=True) == [fixed[:25]]
    assert told(read_only=True) == []
    disk.size = 300
    tmp_path.chmod(0o770)
    assert told() == [open_to_all[:25]]
    disk.size = 100
    assert told(read_only=True) == [small[:25], fixed[:25]]
