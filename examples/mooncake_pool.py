"""A Mooncake pool on loopback for demonstrations and tests: a master, and owners that give memory.

The programs come with Mooncake's Python package. Do not use them like this in production: all listen on 127.0.0.1 only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

START_TIMEOUT = 30.0
"""Longest time until a process answers, in seconds."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _program(name: str) -> str:
    found = find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("there is no Mooncake; pip install mooncake-transfer-engine-non-cuda")
    program = Path(next(iter(found.submodule_search_locations))) / name
    if not os.access(program, os.X_OK):
        program.chmod(0o755)
    return str(program)


class Process:
    """One program of a pool, which can be killed, paused and started again.

    Args:
        command: program and words.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self.process = self._start()
        """The process; another one after :meth:`start_again`."""

    def _start(self) -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        return subprocess.Popen(self._command, cwd="/", stdin=null, stdout=null, stderr=null)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """Kill the process, and start the same program with the same words."""
        self.kill()
        self.process = self._start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process for as long as the context lasts: connections stay open, and nothing answers."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()`` is true.

        Raises:
            RuntimeError: the process has ended, or is not ready in time.
        """
        give_up = time.monotonic() + START_TIMEOUT
        while not ready():
            if self.process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise RuntimeError(f"{self._command[0]} did not start")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)


class Master(Process):
    """Mooncake's master, which knows where each block is."""

    def __init__(self) -> None:
        self.port = _free_port()
        """Port for clients."""
        self._metrics_port = _free_port()
        words = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self._metrics_port,
            "client_ttl": 2,
        }
        super().__init__([_program("mooncake_master"), *(f"--{word}={value}" for word, value in words.items())])
        self.wait_until(self._answers)

    @property
    def address(self) -> str:
        """Address of the master for clients."""
        return f"127.0.0.1:{self.port}"

    def start_again(self) -> None:
        super().start_again()
        self.wait_until(self._answers)

    def segments(self) -> list[str]:
        """Return the names of the memory segments that machines give to the pool."""
        url = f"http://127.0.0.1:{self._metrics_port}/get_all_segments"
        try:
            with urllib.request.urlopen(url, timeout=2.0) as answer:
                return str(answer.read().decode()).split()
        except OSError:
            return []

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False


class Owner(Process):
    """A process that gives memory to a pool.

    Args:
        master: the pool's master.
        size: memory to give, for example "64 MB".
    """

    def __init__(self, master: Master, size: str = "64 MB") -> None:
        before = len(master.segments())
        words = {
            "host": "127.0.0.1",
            "port": _free_port(),
            "master_server_address": master.address,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": size,
        }
        super().__init__([_program("mooncake_client"), *(f"--{word}={value}" for word, value in words.items())])
        self.wait_until(lambda: len(master.segments()) > before)


@contextlib.contextmanager
def serving(size: str = "64 MB") -> Iterator[tuple[Master, Owner]]:
    """Run a pool with one owner for as long as the context lasts."""
    master = Master()
    try:
        owner = Owner(master, size)
        try:
            yield master, owner
        finally:
            owner.kill()
    finally:
        master.kill()
