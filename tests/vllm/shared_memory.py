"""The tiers' files in /dev/shm, where several runs of tests have engines at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tiering.testing.clock import until

SHM = Path("/dev/shm")
GRACE_SECONDS = 20.0
"""Seconds after which a file counts as left behind."""


def ours() -> set[int]:
    """Return the ids of this process and of all its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def users(file: Path) -> Iterator[int]:
    """Yield the ids of the processes that have a file open or mapped."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(file) in (process / "maps").read_text() or any(
                str(fd.readlink()) == str(file) for fd in (process / "fd").iterdir()
            ):
                yield int(process.name)
        except OSError:  # the process has ended, or has another user
            continue


def files() -> list[str]:
    """Return the names of the tiers' files, without those that only other test runs use."""
    mine = ours()
    used = {file: set(users(file)) for file in SHM.glob("kv-tiering.*")}
    return [file.name for file, pids in used.items() if not pids or pids & mine]


def is_clean() -> bool:
    """Return True if no file is there, or once it has disappeared within the time of grace."""
    return until(lambda: not files(), GRACE_SECONDS)
