"""The socket of a service on which engines connect."""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tiering.errors import ConfigError
from tiering.machine.peers import NO_ROOM
from tiering.runtime.door import bind_socket
from tiering.runtime.ratelimit import RateLimit

_log = logging.getLogger("kv_tiering.machine")

_NO_ROOM_SECONDS = 0.5
"""Seconds after which connections are taken again, once there was no room for one."""

LOOK_SECONDS = 5.0
"""Seconds between two looks whether the path is still there."""


class Listener:
    """Takes connections for a service, whose thread calls all methods.

    Args:
        path: path of the socket.
        found: socket that listens already; None: a new one at the path.
        mode: permissions on a new socket.
        selector: the service's selector, which calls what it is given for a descriptor.
        take: function that is called with each new connection, which does not block.
        refusals: limit of the log's lines about connections that are not taken.
        clock: function that returns monotonic seconds.

    Raises:
        ConfigError: another service listens there, or the directory is not private.
    """

    def __init__(
        self,
        path: Path,
        found: socket.socket | None,
        mode: int,
        selector: selectors.BaseSelector,
        take: Callable[[socket.socket], object],
        refusals: RateLimit,
        clock: Callable[[], float],
    ) -> None:
        self._path = path
        self._socket = found or bind_socket(path, mode=mode)
        self._inode = 0 if found else path.lstat().st_ino
        self._mode = mode
        self._look_due = clock() + LOOK_SECONDS if self._inode else math.inf
        self._selector = selector
        self._take = take
        self._refusals = refusals
        self._clock = clock
        self._again = math.inf
        """Time from which connections are taken again after one for which there was no room."""
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def step(self) -> None:
        """Take connections again, if it is time, and make the path again if somebody has removed it."""
        now = self._clock()
        if now >= self._again:
            self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
            self._again = math.inf
        if now >= self._look_due:
            self._look_due = now + LOOK_SECONDS
            if not os.path.lexists(self._path):
                self._renew()

    def _renew(self) -> None:
        """Listen at the path with another socket; those whose connection waits at the present one try again."""
        try:
            renewed = bind_socket(self._path, mode=self._mode)
        except (OSError, ConfigError) as error:
            if number := self._refusals.admit():
                _log.error("%s was removed, and no engine can connect (looked %d times): %s", self._path, number, error)
            return
        with suppress(KeyError):
            self._selector.unregister(self._socket)
        self._socket.close()
        self._socket, self._inode, self._again = renewed, self._path.lstat().st_ino, math.inf
        self._selector.register(renewed, selectors.EVENT_READ, self._accept)
        _log.warning("%s was removed by somebody, and is there again", self._path)

    def close(self) -> None:
        """Take no more connections, and remove the path, unless another service has it by now."""
        with suppress(FileNotFoundError):
            if self._inode and self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        self._socket.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in NO_ROOM:  # the connection still waits, and would wake the thread at once
                self._selector.unregister(self._socket)
                self._again = self._clock() + _NO_ROOM_SECONDS
                if number := self._refusals.admit():
                    _log.warning("%d connection(s) wait or were refused; the last: %s", number, error.strerror)
            else:
                _log.debug("a connection ended before it was taken: %s", error)
            return
        connection.setblocking(False)
        self._take(connection)
