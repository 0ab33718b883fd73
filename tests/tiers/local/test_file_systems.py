"""The local tier on real file systems, where the machine allows tests to mount some."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]


def _can_mount() -> bool:
    if shutil.which("unshare") is None or shutil.which("mkfs.ext4") is None:
        return False
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt && test -e /dev/loop-control"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _can_mount(), reason="mounting file systems needs root, and loop devices")


_SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("ext3", "ext4")]


@pytest.mark.parametrize("scenario", ["ext2", *_SLOW, "replaced", "read-only", "full"])
def test_a_real_file_system(tmp_path: Path, scenario: str) -> None:
    command = ["unshare", "-m", sys.executable, "-m", "tests.tiers.local.mounts", scenario, str(tmp_path)]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.endswith("passed\n"), ended.stdout + ended.stderr
