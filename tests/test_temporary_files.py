"""A run of tests leaves no temporary files and no processes, not even if SIGTERM ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from scripts.temporary import temporary_files_in
from tiering.testing.clock import until

ROOT = Path(__file__).resolve().parent.parent

TESTS = """
import multiprocessing.util, subprocess, sys, tempfile, threading
from pathlib import Path
import pytest

@pytest.fixture
def server():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()

def test_it(server):
    multiprocessing.util.get_temp_dir()
    with tempfile.NamedTemporaryFile(suffix=".yaml", delete=False) as file:
        Path({started!r}).write_text(f"{{server.pid}} {{file.name}}\\n")
    threading.Event().wait({seconds})
"""


def test_temporary_files_lie_in_the_directory_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in (os.environ["TMPDIR"], tempfile.gettempdir()):
        assert Path(name).is_relative_to(tmp_path_factory.getbasetemp())


def test_the_temporary_directory_is_that_of_before_afterwards(tmp_path: Path) -> None:
    before = os.environ["TMPDIR"], tempfile.gettempdir()
    directory = tmp_path / "of the run"
    directory.mkdir()
    with temporary_files_in(directory):
        assert Path(tempfile.mkdtemp()).parent == directory
    assert (os.environ["TMPDIR"], tempfile.gettempdir()) == before
    assert not directory.exists()


@pytest.mark.parametrize("interrupted", [False, True], ids=["to the end", "SIGTERM"])
def test_a_run_leaves_nothing(tmp_path: Path, interrupted: bool) -> None:
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    temporary.mkdir()
    tests = tmp_path / "test_it.py"
    tests.write_text(TESTS.format(started=str(started), seconds=None if interrupted else 0))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tests)]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    told = tmp_path / "told"
    with (
        told.open("w") as errors,
        subprocess.Popen([*command, f"--rootdir={tmp_path}"], cwd=ROOT, env=environment, stderr=errors) as run,
    ):
        assert until(lambda: started.exists() and started.read_text().endswith("\n"), timeout=60)
        if interrupted:
            run.send_signal(signal.SIGTERM)
        assert run.wait(60) == (pytest.ExitCode.INTERRUPTED if interrupted else pytest.ExitCode.OK)
    assert told.read_text() == ""
    server, file = started.read_text().split()
    assert not Path(f"/proc/{server}").exists()
    assert Path(file).is_relative_to(temporary)
    left = [path for path in temporary.rglob("*") if path.is_file() or path.name.startswith("pymp-")]
    assert left == []
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("pytest-of-")] == []
