"""The rows of all engines of a namespace in one address range: a tier finds each by its number.

The range is reserved once. The rows of an engine are mapped into it when the engine connects, and are replaced by
nothing when its last job has ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat

import numpy as np
from numpy.typing import NDArray

from tiering.errors import RegionError

_PROT_NONE, _PROT_RW = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_F_GET_SEALS, _F_SEAL_SHRINK = 1034, 0x2
_OTHERS = 0o077

RESERVED_BYTES = 1 << 42
"""Bytes of address space for the rows of all engines of a namespace; they take no memory."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int = -1) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        raise RegionError(
            f"cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}; raise the address space limit (ulimit -v)"
        )
    return int(found)


def check_rows(fd: int, nbytes: int, *, sealed: bool = False) -> None:
    """Check that ``fd`` is memory of this user with at least ``nbytes`` bytes that no death can take away.

    Args:
        fd: descriptor of the file.
        nbytes: bytes that it must have.
        sealed: True if privacy does not do in place of a seal; default False.

    Raises:
        RegionError: the file is too small, not in memory, not private, or anyone with its name could cut it.
    """
    found, page = os.fstat(fd), os.fstatvfs(fd).f_bsize
    if not stat.S_ISREG(found.st_mode) or found.st_size < nbytes:
        raise RegionError(f"the rows' file has {found.st_size} bytes, not {nbytes}")
    try:
        is_sealed = fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK
    except OSError as error:
        raise RegionError(f"the rows' file is not in memory: {error.strerror}") from error
    # Rows that several processes map cannot be sealed. They have a name in /dev/shm until all have mapped them; from
    # then on, only these processes can reach the file.
    is_private = not (found.st_nlink or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & _OTHERS)
    if not is_sealed and (sealed or not is_private):
        text = "the rows' file is neither sealed nor private to the engine's processes"
        if found.st_uid != os.geteuid():
            text += "; an engine of another user with several processes needs machine.keep_rows"
        raise RegionError(text)
    if page != mmap.PAGESIZE:  # a hole that is punched may have no page any more, and kills who touches it
        raise RegionError(f"the rows' file has pages of {page} bytes")


class RowSpace:
    """Rows of one stride, of any engine.

    Args:
        stride: bytes from one row to the next, a multiple of the page size.
        reserved: bytes of address space to reserve.

    Raises:
        RegionError: the address space cannot be reserved.
    """

    def __init__(self, stride: int, reserved: int = RESERVED_BYTES) -> None:
        self.stride = stride
        """Bytes from one row to the next."""
        self._num_rows = reserved // stride
        self._address = _map(None, self._num_rows * stride, _PROT_NONE, _NOTHING)
        kind = ctypes.c_uint8 * (self._num_rows * stride)
        flat = np.ctypeslib.as_array(kind.from_address(self._address))
        self.array: NDArray[np.uint8] = flat.reshape(self._num_rows, stride)
        """All rows; only those of connected engines may be touched."""
        self._taken: dict[int, int] = {}
        """Number of rows by their first row."""

    def add(self, fd: int, num_rows: int) -> int:
        """Map the first ``num_rows`` rows of ``fd``, and return the number of the first one.

        Raises:
            RegionError: there is no room, or the file is not allowed (:func:`check_rows`).
        """
        check_rows(fd, num_rows * self.stride)
        first = 0
        for start in sorted(self._taken):
            if start - first >= num_rows:
                break
            first = start + self._taken[start]
        if first + num_rows > self._num_rows:
            raise RegionError(f"{num_rows} more rows do not fit into the reserved address space")
        at = self._address + first * self.stride
        _map(at, num_rows * self.stride, _PROT_RW, mmap.MAP_SHARED | _MAP_FIXED, fd)
        self._taken[first] = num_rows
        return first

    def remove(self, first: int) -> None:
        """Unmap the rows from ``first`` on; nothing touches them any more."""
        nbytes = self._taken.pop(first) * self.stride
        _map(self._address + first * self.stride, nbytes, _PROT_NONE, _NOTHING | _MAP_FIXED)

    def close(self) -> None:
        """Give the address space back; nothing has a view of the rows that it still uses."""
        if self._num_rows:
            _libc.munmap(self._address, self._num_rows * self.stride)
        self._num_rows, self._taken = 0, {}
        self.array = np.empty((0, self.stride), np.uint8)
