"""One process owns a directory: an advisory lock that dies with its owner, and that names it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import weakref
from pathlib import Path

from tiering.errors import PermanentStoreError
from tiering.secondary.files import FILE_MODE, store_error
from tiers.local.layout import REPLICA_PREFIX

LOCK_NAME = "lock"

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
_guard = threading.Lock()
"""Guards additions to ``_held``: tiers open on threads of their own."""


class DirectoryLock:
    """The exclusive right to write in a directory, held until :meth:`release` or the death of the process.

    A child made by fork does not keep it.  A reader that only looks needs no lock.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._fd = -1
        self._real = Path()
        """The locked directory's path without symbolic links, while the lock is held."""

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
            in_use = error.errno in {errno.EWOULDBLOCK, errno.EACCES}
            text = self._describe_conflict(fd) if in_use else ""
            os.close(fd)
            if in_use:
                raise PermanentStoreError(text) from error
            raise store_error(error, f"cannot lock {self._path}") from error
        self._fd = fd
        try:
            self._enter(self._path.parent.resolve())
        except BaseException:
            self.release()
            raise
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

    def _enter(self, real: Path) -> None:
        """Count among this process's locks.  Raises :class:`PermanentStoreError` if one of two directories contains the other."""
        with _guard:
            for other in list(_held):
                outer, inner = sorted((real, other._real), key=lambda path: len(path.parts))
                below = inner.relative_to(outer).parts if inner.is_relative_to(outer) else ()
                if below and not below[0].startswith(REPLICA_PREFIX):
                    raise PermanentStoreError(
                        f"{self._path.parent} is {real}; of {outer} and {inner}, which two tiers of this process use, one contains "
                        "the other; give each tier a path of its own, and mind symbolic links"
                    )
            self._real = real
            _held.add(self)

    def _describe_conflict(self, fd: int) -> str:
        """What to say about a lock file, open as ``fd``, that somebody else has locked."""
        directory = self._path.parent
        for other in list(_held):
            if other._fd >= 0 and os.path.sameopenfile(other._fd, fd):
                return (
                    f"{directory} is in use by {describe_owner(directory)}: another tier of this process has opened it as "
                    f"{other._path.parent}; give each tier a path (or each engine a data-parallel replica) of its own, and mind "
                    "symbolic links"
                )
        return (
            f"{directory} is in use by {describe_owner(directory)}; "
            "stop that process, or give this engine a path (or a data-parallel replica) of its own"
        )

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
    global _guard  # noqa: PLW0603 - a thread of the parent may hold it
    _guard = threading.Lock()
    for lock in list(_held):
        lock._forget()


os.register_at_fork(after_in_child=_after_fork)
