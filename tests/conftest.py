"""What holds for every test: it leaves nothing behind, it is repeatable, and it ends.

After each test there may be no thread, child process or file in /dev/shm that was not there before it.  A fixture of a
wider scope may own some (a server, say): what exists when the test's own fixtures are set up is not the test's.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests.thread_limit import ThreadLimit
from tiering.api import masking

T = TypeVar("T")

GRACE_SECONDS = 3.0
"""How long what a test has just stopped may take to disappear."""

SLOW_TIMEOUT = 1200
"""Seconds for a test marked slow; the others have what pyproject.toml says."""

_SHM = Path("/dev/shm")
_PREFIX = "kv"
_FOREIGN_THREADS = ("process_request_thread", "pytest_timeout", "execnet")
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")

settings.register_profile(
    "default",
    derandomize=True,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=60,
)
settings.register_profile("explore", settings.get_profile("default"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not any(word in thread.name for word in _FOREIGN_THREADS)}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    except OSError:
        return b""


def _children() -> set[int]:
    """Child processes, those that ended and were not waited for included."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.update(map(int, (task / "children").read_text().split()))
        except OSError:
            continue
    return {pid for pid in pids if not any(helper in _command(pid) for helper in _HELPERS)}


def _processes() -> set[BaseProcess]:
    """Those of multiprocessing.  Children of a fork server are nobody else's, and are waited for at the end, perhaps
    for ever."""
    return set(multiprocessing.active_children())


def _shm_files() -> set[str]:
    return {file.name for file in _SHM.glob(f"{_PREFIX}*")}


def _in_use_elsewhere(name: str) -> bool:
    """Whether a process that is not this one or its child holds the file: tests may run side by side on one machine."""
    path = str(_SHM / name)
    mine = {os.getpid()} | _children()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in mine:
            continue
        try:
            if path in (process / "maps").read_text() or any(
                str(fd.readlink()) == path for fd in (process / "fd").iterdir()
            ):
                return True
        except OSError:
            continue
    return False


def _left_after(now: Callable[[], set[T]], before: set[T]) -> set[T]:
    """What is there and was not, once it has had time to go."""
    end = time.monotonic() + GRACE_SECONDS
    pause = threading.Event()
    while (left := now() - before) and time.monotonic() < end:
        pause.wait(0.02)
    return left


@pytest.fixture(autouse=True)
def _forgets_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stack of one test taught as a secret is not masked in the logs of the next."""
    monkeypatch.setattr(masking, "_learnt", masking._Learnt())


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    threads, children, files, processes = _threads(), _children(), _shm_files(), _processes()
    yield
    problems = [f"thread {thread.name!r} still runs" for thread in _left_after(_threads, threads)]
    problems += [
        f"child process {pid} is still there: {_command(pid).decode()!r}" for pid in _left_after(_children, children)
    ]
    problems += [
        f"/dev/shm/{name} was not removed" for name in _left_after(_shm_files, files) if not _in_use_elsewhere(name)
    ]
    for process in _left_after(_processes, processes):
        problems.append(f"process {process.name!r} ({process.pid}) still runs, and was killed")
        process.kill()
        process.join()
    if problems:
        pytest.fail("the test left something behind: " + "; ".join(sorted(problems)), pytrace=False)


@pytest.fixture
def thread_limit(monkeypatch: pytest.MonkeyPatch) -> ThreadLimit:
    """A limit on threads that a test can reach and leave; it is not reached at first."""
    return ThreadLimit(monkeypatch)
