"""The path of a UNIX socket, which is private and belongs to one process at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from tiering.errors import ConfigError

LOCK_ATTEMPTS, LOCK_SECONDS = 100, 0.05
"""Attempts to lock the socket's directory, and the time between two."""

_BACKLOG = 64


def bind_socket(
    path: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET, *, others: int = stat.S_IWOTH, mode: int = 0o600
) -> socket.socket:
    """Return a socket that listens at ``path``, and does not block.

    Args:
        path: the socket; its directory is made if it is missing.
        kind: kind of the socket; default: sequenced packets.
        others: permissions on the directory that only its owner may have; 0: any directory of anybody will do, and is
            not locked, because others may hold its lock for as long as they like. Default: others must not write there.
        mode: permissions on the socket; default: this user alone may connect.

    Raises:
        ConfigError: another process listens there, or the directory is not private.
    """
    directory = path.parent
    directory.mkdir(mode=0o750 & ~others, parents=True, exist_ok=True)
    found = directory.stat()
    is_open = found.st_uid not in (os.geteuid(), 0) or (found.st_mode & others and not found.st_mode & stat.S_ISVTX)
    if others and is_open:
        raise ConfigError(f"{directory}: others may replace the socket there; use a directory of this user's own")
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with _alone(directory) if others else nullcontext():
            _remove_left(path, kind)
            os.fchmod(listener.fileno(), 0o600)  # the file that bind makes gets this mode
            listener.bind(os.fspath(path))
            if mode != 0o600:
                path.chmod(mode)
            listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def is_listening(path: Path, kind: socket.SocketKind) -> bool:
    """Return True if a process listens at ``path``.

    Raises:
        OSError: that is not known.
    """
    with socket.socket(socket.AF_UNIX, kind) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except (BlockingIOError, TimeoutError):  # more clients wait than the socket's queue has room for
            pass
    return True


def _remove_left(path: Path, kind: socket.SocketKind) -> None:
    """Remove the socket of a process that has ended.

    Raises:
        ConfigError: a process listens there, or it is no socket.
    """
    if is_listening(path, kind):
        raise ConfigError(f"{path}: another process listens there; give this one a socket of its own")
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path}: is there and is no socket; remove it, or choose another path")
        path.unlink()


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory: of two processes that start there, one sees the other's socket.

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
