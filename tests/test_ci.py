"""The background of continuous integration is part of its result, and ends with it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Stands in for make: it fails at the target FAILS, and where STAYS is set, its child and grandchild stay at test-vllm.
MAKE = """\
#!/bin/bash
for target in "$@"; do
  echo "made $target"
  if [ "$target" = test-vllm ] && [ -n "$STAYS" ]; then bash -c 'sleep 60 & echo $$ $! > pids; wait'; fi
  if [ "$target" = lint ] && [ -n "$STAYS" ]; then until [ -s pids ]; do :; done; fi
  if [ "$target" = "$FAILS" ]; then echo "failed $target"; exit 2; fi
done
"""


def room(megabytes: int) -> str:
    """Return a program in place of df, by which the file system has this much room."""
    return f"#!/bin/sh\nprintf 'Avail\\n{megabytes}\\n'\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with the script, and programs that stand in for those that it runs."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "bin").mkdir()
    programs = {"make": MAKE, "id": "#!/bin/sh\necho 1000\n", "npm": "", "python3": "#!/bin/sh\n", "df": room(20_000)}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(tree: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script to its end.

    Args:
        tree: what the fixture has made.
        variables: for the stand-in of make.
    """
    environment = os.environ | {"PATH": f"{tree / 'bin'}:{os.environ['PATH']}", "FAILS": "", "STAYS": ""} | variables
    command = [str(tree / ".ci/run")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_background_is_part_of_the_output_and_of_the_success(tree: Path) -> None:
    done = run(tree)
    assert done.returncode == 0, done.stderr
    assert "=== done" in done.stdout
    assert "made test-lmcache" in done.stdout


@pytest.mark.parametrize("target", ["test-vllm", "test-lmcache", "setup", "test-here"])
def test_a_failure_anywhere_is_one_of_the_run_and_is_shown(tree: Path, target: str) -> None:
    done = run(tree, FAILS=target)
    assert done.returncode == 2
    assert f"failed {target}" in done.stdout
    assert "=== done" not in done.stdout


def test_a_disk_that_is_too_small_is_named_before_anything_runs(tree: Path) -> None:
    (tree / "bin" / "df").write_text(room(9_000))
    done = run(tree)
    assert done.returncode == 1
    assert "9000 MB are free" in done.stderr
    assert "made" not in done.stdout


def ended(pid: int, seconds: float) -> bool:
    """Wait for the end of a process, and return False if it runs on after ``seconds``."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], seconds)[0])  # a zombie has ended, too
    finally:
        os.close(process)


def test_a_failure_beside_the_background_ends_all_of_its_processes(tree: Path) -> None:
    done = run(tree, FAILS="lint", STAYS="yes")
    assert done.returncode == 2
    # kill(1) does not wait for what it ends.
    left = [pid for pid in map(int, (tree / "pids").read_text().split()) if not ended(pid, 10)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
