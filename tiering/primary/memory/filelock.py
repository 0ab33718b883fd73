"""Locks on bytes of a file that the kernel releases with the open descriptor, also after SIGKILL.

These are Linux open file description locks. Unlike POSIX record locks, they exclude two descriptors of one process
from each other; unlike flock, they cover single bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiering.errors import RegionError

_FLOCK = struct.Struct("@hhqqi4x")
"""The C ``struct flock`` of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""

_POLL_SECONDS = 0.002


def try_lock(fd: int, start: int, length: int) -> bool:
    """Lock bytes without waiting; return False if another descriptor holds one of them.

    Args:
        fd: the file.
        start: first byte.
        length: number of bytes; 0: all bytes from ``start`` on, also beyond the end.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, start: int, length: int) -> None:
    """Release the locks of this descriptor.

    Args:
        fd: the file.
        start: first byte.
        length: number of bytes; 0: all bytes from ``start`` on.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))


def is_held_elsewhere(fd: int, at: int) -> bool:
    """Return True if another descriptor holds the byte ``at``."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


@contextmanager
def locked(fd: int, at: int, deadline: float) -> Iterator[None]:
    """Hold the lock on one byte for the duration of the ``with`` block.

    Args:
        fd: the file.
        at: the byte.
        deadline: time limit for the lock, in seconds of the monotonic clock.

    Raises:
        RegionError: another descriptor holds the byte beyond the deadline.
    """
    while not try_lock(fd, at, 1):
        if time.monotonic() > deadline:
            raise RegionError(
                "another process holds the lock on the shared region's header and does not let go; "
                "end the engine start that hangs"
            )
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        unlock(fd, at, 1)


def is_linked(fd: int, path: Path) -> bool:
    """Return True if ``path`` still names the file behind ``fd``."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False
