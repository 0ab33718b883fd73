"""Real file systems for tests: small images, mounted in a mount namespace of a process of its own.

Run as root: ``unshare -m python -m tests.tiers.local.mounts SCENARIO DIRECTORY``; the command prints "passed". See
``test_file_systems.py``.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from tests.tiers.local.rig import LocalRig, opened, segment_files
from tiering.testing.keys import key_of
from tiers.local import tier as local_tier

K = [key_of(number) for number in range(512)]
PROBES = {"breaker": {"probe_after": "10ms", "probe_max": "10ms"}}


class Disk:
    """A file system of type ``kind`` in an image file; :meth:`mount` mounts it at ``at``."""

    def __init__(self, directory: Path, name: str, kind: str, mebibytes: int = 16) -> None:
        self.at = directory / "disk"
        self.at.mkdir(exist_ok=True)
        self._image = directory / f"{name}.img"
        self._image.touch()
        os.truncate(self._image, mebibytes << 20)
        _run(f"mkfs.{kind}", "-q", "-F", str(self._image))

    def mount(self) -> Path:
        """Mount the file system and return a directory in it."""
        _run("mount", "-o", "loop", str(self._image), str(self.at))
        return self.at / "kv"

    def unmount(self) -> None:
        """Detach the file system at once, like a pulled disk; files that are open keep working."""
        _run("umount", "-l", str(self.at))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _store_all(rig: LocalRig, keys: list[bytes]) -> list[bytes]:
    return [key for start in range(0, len(keys), 16) for key in rig.store(keys[start : start + 16])]


def kind(directory: Path, name: str) -> None:
    """A tier works, restarts, and opens in the root of a file system, beside its ``lost+found``."""
    disk = Disk(directory, "one", name)
    disk.mount()
    with opened(disk.at) as rig:
        assert _store_all(rig, K[:40]) == K[:40]
        assert rig.load(K[:40]) == K[:40]
        size = rig.tier.store.geometry.segment_bytes
        assert all(path.stat().st_blocks * 512 >= size for path in segment_files(disk.at))
    with opened(disk.at) as rig:
        assert rig.load(K[:40]) == K[:40]
    disk.unmount()


def replaced(directory: Path) -> None:
    """A tier uses another disk at the mount point, and writes nothing there without a disk."""
    one, other = Disk(directory, "one", "ext4"), Disk(directory, "other", "ext4")
    path = one.mount()
    with opened(path, **PROBES) as rig:
        assert rig.store(K[:8]) == K[:8]
        one.unmount()
        rig.store(K[8:16])
        rig.wait(lambda: not rig.tier.get_stats().available)
        assert rig.lookup(K[:8]) == 0
        assert not path.exists()
        other.mount()
        rig.wait(lambda: rig.store(K[16:24]) == K[16:24])
        assert rig.load(K[:8]) == []
        other.unmount()
        rig.store(K[24:32])
        rig.wait(lambda: not rig.tier.get_stats().available)
        one.mount()
        rig.wait(lambda: rig.store(K[32:40]) == K[32:40] and not rig.tier.recovering)
        assert rig.load(K[:8]) == K[:8]
    one.unmount()


def read_only(directory: Path) -> None:
    """A tier serves a disk that is mounted read-only, and writes again once the disk is writable."""
    disk = Disk(directory, "one", "ext4")
    path = disk.mount()
    with opened(path) as rig:
        assert rig.store(K[:8]) == K[:8]
    _run("mount", "-o", "remount,ro", str(disk.at))
    with opened(path, **PROBES) as rig:
        assert rig.load(K[:8]) == K[:8]
        assert rig.store(K[8:16]) == []
        assert rig.load(K[:8]) == K[:8]
        _run("mount", "-o", "remount,rw", str(disk.at))
        rig.wait(lambda: rig.store(K[16:24]) == K[16:24] and not rig.tier.recovering)
        assert rig.load(K[:8]) == K[:8]
    disk.unmount()


def full(directory: Path) -> None:
    """A tier on a nearly full disk becomes smaller, and loses no block that it holds."""
    disk = Disk(directory, "one", "ext4")
    path = disk.mount()
    room = os.statvfs(disk.at)
    (disk.at / "others").write_bytes(bytes(room.f_bavail * room.f_frsize - (3 << 20)))
    with opened(path, capacity="8MiB", segment_size="512KiB") as rig:
        assert _store_all(rig, K[:16]) == K[:16]
        _store_all(rig, K[16:400])
        blocks = rig.tier.index.blocks
        assert 0 < blocks <= rig.tier.index.slots < rig.tier.store.geometry.num_slots
        rig.wait(lambda: _store_all(rig, K[400:]) == K[400:])
        assert rig.tier.index.blocks >= blocks
    with opened(path, capacity="8MiB", segment_size="512KiB") as rig:
        assert rig.tier.index.blocks >= blocks
    disk.unmount()


def main(scenario: str, directory: Path) -> None:
    """Run the scenario that the command line names."""
    logging.basicConfig(level=logging.INFO)
    local_tier.INSPECT_SECONDS = local_tier.INSPECT_AT_ONCE_SECONDS = 0.0
    scenarios = {"replaced": replaced, "read-only": read_only, "full": full}
    if scenario in scenarios:
        scenarios[scenario](directory)
    else:
        kind(directory, scenario)
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
