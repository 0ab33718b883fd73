"""The path of a service's socket, which is private and belongs to one service at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiering.errors import ConfigError

LOCK_ATTEMPTS, LOCK_SECONDS = 100, 0.05
"""Attempts to lock the socket's directory, and the time between two."""

_BACKLOG = 64


def bind_socket(path: Path) -> socket.socket:
    """Return a socket that listens at ``path``, for this user alone.

    Raises:
        ConfigError: another service listens there, or the directory is not private.
    """
    directory = path.parent
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid not in (os.geteuid(), 0) or (found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX):
        raise ConfigError(f"{directory}: others may replace the socket there; use a directory of this user's own")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with _alone(directory):
            _remove_left(path)
            umask = os.umask(0o177)
            try:
                listener.bind(os.fspath(path))
            finally:
                os.umask(umask)
            listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_left(path: Path) -> None:
    """Remove the socket of a service that has ended.

    Raises:
        ConfigError: a service listens there, or it is no socket.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trial:
            trial.settimeout(1.0)
            trial.connect(os.fspath(path))
        raise ConfigError(f"{path}: another service listens there; give this one a socket of its own")
    except (FileNotFoundError, ConnectionRefusedError):
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"{path}: is there and is no socket; remove it") from None
            path.unlink()
    except TimeoutError:
        raise ConfigError(f"{path}: another service listens there and does not answer; end it") from None


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory: of two services that start there, one sees the other's socket.

    Raises:
        ConfigError: another process holds the lock, or the file system has none.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for attempt in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if attempt == LOCK_ATTEMPTS - 1:
                    text = f"{directory}: another process keeps it locked ({error.strerror}); end that process"
                    raise ConfigError(f"{text}, or give the socket a directory of its own") from error
                time.sleep(LOCK_SECONDS)
        yield
    finally:
        os.close(handle)
