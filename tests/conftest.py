"""Fixtures for every test: nothing is left behind, runs are repeatable, and tests end.

After each test, threads, child processes and files in /dev/shm must be those from before the test. Wider fixtures may
own some (a server, say): objects that exist when the test's own fixtures are set up do not count. Temporary files are
in pytest's directory, and SIGTERM interrupts a run like Ctrl-C, so that fixtures end their servers.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from scripts.temporary import clean_up_on_sigterm, temporary_files_in
from tests.fake_s3 import FakeS3, fake_s3
from tests.thread_limit import ThreadLimit
from tiering.api import masking

T = TypeVar("T")


class Server(Protocol):
    """A server of objects whose credentials a test uses."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables with the credentials."""


GRACE_SECONDS = 20.0
"""Seconds that stopped threads, processes and files may take to disappear."""

SLOW_TIMEOUT = 1200
"""Time limit of a test marked slow, in seconds; pyproject.toml sets the limit of the others."""

_SHM = Path("/dev/shm")
_PREFIX = "kv"
_FOREIGN_THREADS = ("process_request_thread", "pytest_timeout", "execnet")
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")

# Before torch is imported: its threads would spin while they wait, and so take the cores from other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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


def pytest_configure() -> None:
    if threading.current_thread() is threading.main_thread():
        clean_up_on_sigterm()


@pytest.fixture(autouse=True, scope="session")
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with temporary_files_in(tmp_path_factory.mktemp("tmp")):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))


def _threads() -> set[threading.Thread]:
    # Python keeps a dummy for each thread of the low-level interface that has logged a line, also after its end.
    found = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
    return {thread for thread in found if not any(word in thread.name for word in _FOREIGN_THREADS)}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    except OSError:
        return b""


def _children() -> set[int]:
    """Return the ids of child processes, including those that have ended and were not waited for."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.update(map(int, (task / "children").read_text().split()))
        except OSError:
            continue
    return {pid for pid in pids if not any(helper in _command(pid) for helper in _HELPERS)}


def _processes() -> set[BaseProcess]:
    """Return the child processes of multiprocessing.

    Only this process waits for the children of a fork server, perhaps for ever at its end.
    """
    return set(multiprocessing.active_children())


def _shm_files() -> set[str]:
    return {file.name for file in _SHM.glob(f"{_PREFIX}*")}


def _in_use_elsewhere(name: str) -> bool:
    """Return True if a process other than this one and its children holds the file.

    Tests may run side by side on one machine.
    """
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
    """Return the objects that are new and remain after a grace period."""
    end = time.monotonic() + GRACE_SECONDS
    pause = threading.Event()
    while (left := now() - before) and time.monotonic() < end:
        pause.wait(0.02)
    return left


@pytest.fixture(autouse=True)
def _forgets_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the secrets of one test's stack from being masked in the logs of the next test."""
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


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], None]:
    """Make boto3's chain yield a server's credentials and ignore this machine's."""

    def set_environment(server: Server) -> None:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)

    return set_environment


@pytest.fixture
def fake(use: Callable[[Server], None]) -> Iterator[FakeS3]:
    """An S3 server that fails on command; the environment has its credentials and no other settings of S3."""
    with fake_s3() as running:
        use(running)
        yield running


@pytest.fixture
def bucket(fake: FakeS3) -> FakeS3:
    """The bucket of the server that fails on command, for tests in which tiers share it."""
    return fake
