"""One process owns a directory: an advisory lock that dies with its owner, and that names it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

from tiering.errors import PermanentStoreError
from tiering.secondary.files import FILE_MODE, store_error

LOCK_NAME = "lock"

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """The exclusive right to write in a directory, held until :meth:`release` or the death of the process.

    A child made by fork does not keep it.  A reader that only looks needs no lock.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock; nothing to do if it is held.  Raises :class:`PermanentStoreError` saying who holds it and what to do."""
        if self._fd >= 0:
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise store_error(error, f"cannot open {self._path}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                raise PermanentStoreError(
                    f"{self._path.parent} is in use by {describe_owner(self._path.parent)}; "
                    "stop that process, or give this engine a path (or a data-parallel replica) of its own"
                ) from error
            raise store_error(error, f"cannot lock {self._path}") from error
        self._fd = fd
        _held.add(self)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        # On a full disk the lock holds all the same; it just cannot say whose it is.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(owner).encode(), 0)

    def release(self) -> None:
        """Give the lock back; nothing to do if it is not held."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _held.discard(self)
            os.close(fd)

    def _forget(self) -> None:
        """In a child made by fork: the parent's lock must end with the parent."""
        self.release()


def describe_owner(directory: Path) -> str:
    """Who wrote the lock file last, for people."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads((directory / LOCK_NAME).read_text())
        return f"process {owner['pid']} on {owner['host']} (since {owner['started']})"
    return "another process"


def _after_fork() -> None:
    for lock in list(_held):
        lock._forget()


os.register_at_fork(after_in_child=_after_fork)
