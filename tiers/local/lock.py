"""One process owns a directory: advisory locks that die with their owner, and a file that names it."""

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

from tiering.errors import InUseError, PermanentStoreError
from tiering.secondary.files import open_plain, store_error
from tiers.local.layout import REPLICA_PREFIX

LOCK_NAME = "lock"
_OWNER_BYTES = 4096

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
_guard = threading.Lock()
"""Guards additions to ``_held``: tiers open on threads of their own."""


class DirectoryLock:
    """The exclusive right to write in a directory, held until :meth:`release` or the death of the process.

    The directory itself is locked, and the file ``lock`` in it, which names the owner: without that file the directory
    is still owned, and in a directory that was moved away or replaced nothing is.  A child made by fork does not keep
    the locks.  A reader that only looks needs none.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / LOCK_NAME
        self._directory_fd = -1
        self._fd = -1
        self._real = Path()
        """The locked directory's path without symbolic links, while the lock is held."""
        self.read_only = False
        """The file system takes no writes; the lock is held all the same."""

    def acquire(self) -> None:
        """Take the lock; nothing to do if it is held.

        Raises :class:`tiering.errors.InUseError` saying who holds it and what to do, or another :class:`StoreError`.
        """
        if self._fd >= 0:
            return
        try:
            self._directory_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._lock_directory()
            self._lock_file()
            self._enter(self._directory.resolve())
        except OSError as error:
            in_use = _is_held_elsewhere(error)
            text = self._describe_conflict() if in_use else ""
            self.release()
            if in_use:
                raise InUseError(text) from error
            raise store_error(error, f"cannot lock {self._path}") from error
        except BaseException:
            self.release()
            raise

    def _lock_directory(self) -> None:
        try:
            fcntl.flock(self._directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Network file systems lock only files that are open for writing; there the file alone has to do.
            if error.errno not in {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP}:
                raise

    def _lock_file(self) -> None:
        """Lock the file, as it is in the directory at the end of the call, and write this process's name there."""
        while True:
            fd = self._open_file()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_linked(fd, self._path):
                    os.close(fd)
                    continue
            except OSError:
                os.close(fd)
                raise
            break
        before, self._fd = self._fd, fd
        if before >= 0:
            os.close(before)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        # On a full or read-only disk the lock holds all the same; it just cannot say whose it is.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(owner).encode(), 0)

    def _open_file(self) -> int:
        try:
            fd = open_plain(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            fd = open_plain(self._path, os.O_RDONLY)
            self.read_only = True
        else:
            self.read_only = False
        return fd

    def lost(self) -> str | None:
        """Why the lock does not protect the directory any more; None if it does.  A removed lock file is made again.

        Raises :class:`OSError` if the directory cannot be looked at.
        """
        if self._fd < 0:
            return "is not locked"
        try:
            if not self._directory.exists():
                return "was removed, or its disk is not mounted"
            if not _is_linked(self._directory_fd, self._directory):
                return "is another directory than the one that was opened (was a disk replaced, or the directory made again?)"
            if _is_linked(self._fd, self._path):
                return None
            self._lock_file()
        except FileNotFoundError:
            return "was removed in this moment"
        except OSError as error:
            if _is_held_elsewhere(error):
                return f"lost its lock file, and is in use by {describe_owner(self._directory)} now"
            raise
        return None

    def release(self) -> None:
        """Give the lock back; nothing to do if it is not held."""
        fds = (self._fd, self._directory_fd)
        self._fd = self._directory_fd = -1
        _held.discard(self)
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _enter(self, real: Path) -> None:
        """Count among this process's locks.  Raises :class:`PermanentStoreError` if one of two directories contains the other."""
        with _guard:
            for other in list(_held):
                outer, inner = sorted((real, other._real), key=lambda path: len(path.parts))
                below = inner.relative_to(outer).parts if inner.is_relative_to(outer) else ()
                if below and not below[0].startswith(REPLICA_PREFIX):
                    raise PermanentStoreError(
                        f"{self._directory} is {real}; of {outer} and {inner}, which two tiers of this process use, one contains "
                        "the other; give each tier a path of its own, and mind symbolic links"
                    )
            self._real = real
            _held.add(self)

    def _describe_conflict(self) -> str:
        """What to say about a directory that somebody else has locked."""
        directory = self._directory
        for other in list(_held):
            if other._directory_fd >= 0 and os.path.sameopenfile(other._directory_fd, self._directory_fd):
                return (
                    f"{directory} is in use by {describe_owner(directory)}: another tier of this process has opened it as "
                    f"{other._directory}; give each tier a path (or each engine a data-parallel replica) of its own, and mind "
                    "symbolic links"
                )
        return (
            f"{directory} is in use by {describe_owner(directory)}; "
            "stop that process, or give this engine a path (or a data-parallel replica) of its own"
        )

    def _forget(self) -> None:
        """In a child made by fork: the parent's lock must end with the parent."""
        self.release()


def _is_held_elsewhere(error: OSError) -> bool:
    """True if ``error`` is the answer to a lock that somebody else holds; an error in opening a file names the file."""
    return error.errno in {errno.EWOULDBLOCK, errno.EACCES} and error.filename is None


def _is_linked(fd: int, path: Path) -> bool:
    """True if ``path`` leads to the open ``fd``."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def describe_owner(directory: Path) -> str:
    """Who wrote the lock file last, for people."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        fd = open_plain(directory / LOCK_NAME, os.O_RDONLY)
        try:
            owner = json.loads(os.pread(fd, _OWNER_BYTES, 0))
        finally:
            os.close(fd)
        return f"process {owner['pid']} on {owner['host']} (since {owner['started']})"
    return "another process"


def _after_fork() -> None:
    global _guard  # noqa: PLW0603 - a thread of the parent may hold it
    _guard = threading.Lock()
    for lock in list(_held):
        lock._forget()


os.register_at_fork(after_in_child=_after_fork)
