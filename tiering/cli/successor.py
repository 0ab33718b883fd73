"""The exchange of a service for another process under running engines."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tiering.errors import ConfigError
from tiering.machine.link import peer_credentials, peer_pidfd

_log = logging.getLogger("kv_tiering.machine")


class Successor:
    """Starts a process with the same command line when it is asked to, which takes the place of this one."""

    def __init__(self) -> None:
        self._asked = False
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self) -> None:
        """Let the next :meth:`step` start the process; a signal's handler may call."""
        self._asked = True

    def step(self) -> None:
        """Start the process if that was asked for, and none runs."""
        if self._asked and self.pid is None:
            words = [sys.executable, *sys.orig_argv[1:]]
            words += [] if "--replace" in words else ["--replace"]
            # The watchdog of systemd names the process that it started.
            environment = {name: value for name, value in os.environ.items() if name != "WATCHDOG_PID"}
            try:
                self._child = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL)
            except (OSError, MemoryError) as error:
                _log.error("no other process can be started, and this one goes on: %s", error)
        self._asked = False

    @property
    def pid(self) -> int | None:
        """Number of the process that takes the place of this one; None: there is none."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None


def end_predecessor(path: Path) -> None:
    """End the service that listens at ``path``, if there is one, and return once its process is dead.

    A service whose process cannot be signalled from here, as in another container, must be ended by somebody else.

    Raises:
        ConfigError: the predecessor belongs to another user, or the kernel cannot report its death.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as peer:
        try:
            peer.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        pid, uid = peer_credentials(peer)
        if uid != os.geteuid():
            raise ConfigError(f"{path}: the service there belongs to the user {uid}, and is not replaced")
        pidfd = peer_pidfd(peer)
    try:
        if pidfd < 0:
            pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    except OSError as error:
        if pidfd < 0:
            raise ConfigError(
                f"{path}: its process cannot be seen ({error}); end it, and start this one then"
            ) from error
        _log.warning("the service at %s must be ended by somebody else: %s", path, error.strerror)
    else:
        _log.info("the service at %s, process %d, is to end before this one takes its place", path, pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os.close(pidfd)
