"""The ownership of a directory: locks that end with their process, and a file that names the owner."""

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

from tiering import InUseError, PermanentStoreError
from tiering.tier import Files, store_error
from tiers.local.layout import REPLICA_PREFIX

LOCK_NAME = "lock"
_OWNER_BYTES = 4096
_FILES = Files()

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
_guard = threading.Lock()
"""Guards additions to ``_held``, because tiers open on threads of their own."""


class DirectoryLock:
    """The exclusive right to write in a directory, held until :meth:`release` or the death of the process.

    Two things are locked: the directory itself, and the file ``lock`` in it, which names the owner. If the file
    disappears, the directory is still owned. If the directory is moved away or replaced, the new directory at its path
    is not owned. A child made by fork does not keep the locks. Processes that only read need no lock.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / LOCK_NAME
        self._directory_fd = -1
        self._fd = -1
        self._real = Path()
        """Path of the locked directory without symbolic links, while the lock is held."""
        self.read_only = False
        """True if the file system takes no writes; the lock is held all the same."""

    def acquire(self) -> None:
        """Take the lock; nothing to do if it is held already.

        Raises:
            InUseError: another process or tier holds the lock. The message names the owner and a remedy.
            StoreError: the directory cannot be locked for another reason.
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
            # Network file systems lock only files that are open for writing; the lock on the file alone must do there.
            if error.errno not in {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP}:
                raise

    def _lock_file(self) -> None:
        """Lock the file ``lock`` and name this process in it as the owner.

        The locked file is the one that is in the directory at the end of the call.
        """
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
        if not self.read_only:
            self.read_only = not _name_owner(fd)

    def takes_writes(self) -> bool:
        """Return True if the lock file can be written now.

        Writing is the only test: access() and opening succeed on a file system in an error state, which refuses writes.
        """
        try:
            fd = _FILES.open(self._path, os.O_RDWR)
        except OSError:
            return False
        try:
            return _name_owner(fd)
        finally:
            os.close(fd)

    def _open_file(self) -> int:
        try:
            fd = _FILES.open(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            fd = _FILES.open(self._path, os.O_RDONLY)
            self.read_only = True
        else:
            self.read_only = False
        return fd

    def broken(self) -> str | None:
        """Return the reason why the lock does not protect the directory any more; None if it does.

        A removed lock file is made again.

        Raises:
            OSError: the directory cannot be inspected.
        """
        if (moved := self.moved()) is not None:
            return moved
        try:
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

    def moved(self) -> str | None:
        """Return the reason why the path does not lead to the locked directory; None if it does.

        Raises:
            OSError: the directory cannot be inspected.
        """
        if self._fd < 0:
            return "is not locked"
        if not self._directory.exists():
            return "was removed, or its disk is not mounted"
        if not _is_linked(self._directory_fd, self._directory):
            return "is not the directory that was opened (was a disk replaced, or the directory made again?)"
        return None

    def release(self) -> None:
        """Release the lock; nothing to do if it is not held."""
        fds = (self._fd, self._directory_fd)
        self._fd = self._directory_fd = -1
        _held.discard(self)
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _enter(self, real: Path) -> None:
        """Add this lock to the process's locks.

        Raises:
            PermanentStoreError: one of two directories of this process's tiers contains the other.
        """
        with _guard:
            for other in list(_held):
                if contains(real, other._real):
                    raise PermanentStoreError(
                        f"{self._directory} is {real}; two tiers of this process use {real} and {other._real}, and one "
                        "contains the other; give each tier a path of its own, and mind symbolic links"
                    )
            self._real = real
            _held.add(self)

    def _describe_conflict(self) -> str:
        """Return the message about a directory that another tier or process has locked."""
        directory = self._directory
        for other in list(_held):
            if other._directory_fd >= 0 and os.path.sameopenfile(other._directory_fd, self._directory_fd):
                return (
                    f"{directory} is in use by {describe_owner(directory)}: another tier of this process opened it "
                    f"as {other._directory}, or has been shut down while its I/O hangs; give each "
                    "tier a path (or each engine a data-parallel replica) of its own, and mind symbolic links"
                )
        return (
            f"{directory} is in use by {describe_owner(directory)}; "
            "stop that process, or give this engine a path (or a data-parallel replica) of its own"
        )


def _name_owner(fd: int) -> bool:
    """Write this process into a lock file as the owner; return False if the file system takes no writes."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(owner).encode(), 0)
    except OSError as error:
        # On a full disk the lock holds all the same; the file just does not name the owner.
        return error.errno != errno.EROFS
    return True


def _is_held_elsewhere(error: OSError) -> bool:
    """Return True if ``error`` means that another process or tier holds the lock.

    An error in opening a file names the file; a refused lock does not.
    """
    return error.errno in {errno.EWOULDBLOCK, errno.EACCES} and error.filename is None


def contains(one: Path, two: Path) -> bool:
    """Return True if one of two directories is below the other, and is not a replica's subdirectory there."""
    outer, inner = sorted((one, two), key=lambda path: len(path.parts))
    below = inner.relative_to(outer).parts if inner.is_relative_to(outer) else ()
    return bool(below) and not below[0].startswith(REPLICA_PREFIX)


def _is_linked(fd: int, path: Path) -> bool:
    """Return True if ``path`` leads to the open file ``fd``."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def describe_owner(directory: Path) -> str:
    """Return the process that wrote the lock file last, as text for people."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        fd = _FILES.open(directory / LOCK_NAME, os.O_RDONLY)
        try:
            owner = json.loads(os.pread(fd, _OWNER_BYTES, 0))
        finally:
            os.close(fd)
        return f"process {owner['pid']} on {owner['host']} (since {owner['started']})"
    return "another process"


def owner_of(directory: Path) -> str | None:
    """Return the process that owns ``directory``, as text for people; None if none does.

    The locks are tried for a moment, without waiting. An engine that opens the directory in this very moment is
    refused, and takes the directory half a second later.

    Raises:
        OSError: the directory cannot be opened.
    """
    # The directory may be a link, as for an engine; the lock may not.
    for path, kind in ((directory, os.O_DIRECTORY), (directory / LOCK_NAME, os.O_NOFOLLOW | os.O_NONBLOCK)):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | kind)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if _is_held_elsewhere(error):
                return describe_owner(directory)
        finally:
            os.close(fd)
    return None


def _after_fork() -> None:
    global _guard  # noqa: PLW0603 - a thread of the parent may hold it
    _guard = threading.Lock()
    for lock in list(_held):
        lock.release()  # the parent's lock must end with the parent


os.register_at_fork(after_in_child=_after_fork)
