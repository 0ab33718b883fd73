"""The primary tier's memory: one shared, page-aligned, mmap'ed buffer of rows that scheduler and workers map.

A region for one process is anonymous.  A region for several is a file in /dev/shm that every side opens by the same
name with the same arguments, in any order; whoever comes first gives it its size, and the last of the ``sides`` unlinks
it, so that from then on nothing can be left behind.  Each side holds a lock that the kernel drops with the process: a
side that died is not counted, and a file in which nobody is left belongs to a start that was killed half-way; the next
start removes it.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import stat
import struct
import time
import weakref
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tiering.errors import ConfigError, RegionError
from tiering.primary.memory.filelock import is_held_elsewhere, is_linked, locked, try_lock, unlock
from tiering.primary.memory.prefault import prefault as populate
from tiering.primary.memory.room import check_room, format_bytes

logger = logging.getLogger("kv_tiering.region")

PAGE = mmap.PAGESIZE
SHM = Path("/dev/shm")
FILE_PREFIX = "kv-tiering."

# The header is the page after the rows: magic, rows, row stride, sides; then a byte that says that all sides have
# mapped it.
_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"kvregn01"
_COMPLETE_AT = 64
# Bytes far beyond the end that only carry locks: one for whoever reads or changes the header, then one for each side.
_LOCK_AT = 1 << 60
_SLOTS_AT = _LOCK_AT + 1
MAX_SIDES = 1024


def row_stride(row_bytes: int) -> int:
    """``row_bytes`` rounded up to a page."""
    return -(-row_bytes // PAGE) * PAGE


def shared_path(name: str, directory: Path = SHM) -> Path:
    """The file that the region ``name`` has until all sides have mapped it."""
    safe = name if re.fullmatch(r"[A-Za-z0-9_-]{1,128}", name) else hashlib.sha256(name.encode()).hexdigest()[:32]
    return directory / f"{FILE_PREFIX}{safe}"


def sweep(directory: Path = SHM) -> list[Path]:
    """Remove region files in ``directory`` that no process holds (a start was killed half-way); returns their paths."""
    swept = []
    for path in sorted(directory.glob(f"{FILE_PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            logger.debug("%s is left alone: %s", path, error)  # gone already, another user's, or no region at all
            continue
        try:
            if os.fstat(fd).st_uid == os.geteuid() and _unlink_if_unheld(fd, path):
                swept.append(path)
        finally:
            os.close(fd)
    if swept:
        logger.info("removed %d shared region(s) of starts that died: %s", len(swept), ", ".join(map(str, swept)))
    return swept


def _unlink_if_unheld(fd: int, path: Path) -> bool:
    # Under a lock on every byte nobody is in it; who opened it just now finds it unlinked once it has its lock, and
    # starts again.
    if not try_lock(fd, 0, 0):
        return False
    try:
        if linked := is_linked(fd, path):
            path.unlink()
        return linked
    finally:
        unlock(fd, 0, 0)


def _release(fd: int, path: Path | None, owner: int) -> None:
    """Leave the region: nothing stays behind if this side was the last one there.  A forked child only drops its descriptor."""
    if path is not None and owner == os.getpid():
        unlock(fd, 0, 0)
        _unlink_if_unheld(fd, path)
    os.close(fd)


class SharedRegion:
    """``num_rows`` rows of ``row_stride`` bytes (``row_bytes`` rounded up to a page), each starting on a page boundary.

    The memory stays mapped until :meth:`close` was called and every view of it is gone: nobody's view ever becomes
    invalid.
    """

    __slots__ = (
        "__weakref__",
        "_complete",
        "_finalizer",
        "_rows",
        "address",
        "nbytes",
        "num_rows",
        "row_bytes",
        "row_stride",
    )

    def __init__(self, fd: int, num_rows: int, row_bytes: int, path: Path | None = None) -> None:
        """Map ``fd``, which the region owns from then on.  Use :meth:`create` or :meth:`open_shared`."""
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self.row_stride = row_stride(row_bytes)
        self.nbytes = num_rows * self.row_stride
        try:
            mapping = mmap.mmap(fd, self.nbytes + PAGE)
        except (OSError, ValueError) as error:
            raise RegionError(
                f"cannot map {format_bytes(self.nbytes)}: {error}; raise the address space limit (ulimit -v) or lower primary.capacity"
            ) from error
        flat = np.frombuffer(mapping, dtype=np.uint8)
        self._rows: NDArray[np.uint8] | None = flat[: self.nbytes].reshape(num_rows, self.row_stride)
        flag = self.nbytes + _COMPLETE_AT
        self._complete: NDArray[np.uint8] = np.ones(1, np.uint8) if path is None else flat[flag : flag + 1]
        self.address: int = flat.ctypes.data
        self._finalizer = weakref.finalize(self, _release, fd, path, os.getpid())

    @classmethod
    def create(cls, num_rows: int, row_bytes: int, *, prefault: bool = True) -> Self:
        """An anonymous region, for one process.

        Raises :class:`RegionError`, saying which limit to raise, if the memory is not to be had.
        """
        size = _total_bytes(num_rows, row_bytes)
        check_room(size, None)
        fd = os.memfd_create("kv-tiering", os.MFD_CLOEXEC)
        try:
            _resize(fd, size)
            region = cls(fd, num_rows, row_bytes)
        except RegionError:
            os.close(fd)
            raise
        return region._prefaulted(fd, prefault)

    @classmethod
    def open_shared(
        cls,
        name: str,
        num_rows: int,
        row_bytes: int,
        *,
        sides: int,
        directory: Path = SHM,
        prefault: bool = True,
        timeout: float = 60.0,
    ) -> Self:
        """The region ``name`` of ``sides`` processes (or parts of one), each of which calls this once with the same arguments.

        Never waits for another side to come, only (``timeout`` seconds) for one that is changing the header.  Until
        :attr:`is_complete` the others may still be missing.  Raises :class:`ConfigError` if the sides disagree about
        the shape, :class:`RegionError`, saying which limit to raise, if there is no room.
        """
        _total_bytes(num_rows, row_bytes)
        if not 1 <= sides <= MAX_SIDES:
            raise ConfigError(f"{sides} sides cannot share a region; 1 to {MAX_SIDES} can")
        sweep(directory)
        path = shared_path(name, directory)
        deadline = time.monotonic() + timeout
        while True:
            fd = _open_exclusively_ours(path)
            region: Self | None = None
            try:
                with locked(fd, _LOCK_AT, deadline):
                    if is_linked(fd, path):
                        _agree(fd, num_rows, row_stride(row_bytes), sides, path)
                        all_there = _take_slot(fd, sides, path)
                        region = cls(fd, num_rows, row_bytes, path)
                        if all_there:
                            path.unlink()
                            region._complete[0] = 1
                        break
            except BaseException:
                if region is None:
                    _release(fd, path, os.getpid())
                else:
                    region.close()
                raise
            os.close(fd)  # swept, or completed by the others, between opening and locking
        return region._prefaulted(fd, prefault)

    def _prefaulted(self, fd: int, prefault: bool) -> Self:
        if prefault:
            try:
                populate(self.array.reshape(-1), fd)
            except RegionError:
                self.close()
                raise
        return self

    @property
    def is_complete(self) -> bool:
        """Whether all sides have mapped the region: what one of them writes, the others see.  Always true of an anonymous one."""
        return bool(self._complete[0])

    @property
    def array(self) -> NDArray[np.uint8]:
        """The rows: uint8 of shape (num_rows, row_stride).  Raises :class:`RegionError` once closed."""
        if self._rows is None:
            raise RegionError("the region is closed")
        return self._rows

    @property
    def view(self) -> memoryview:
        """The same as a memoryview of format "B"."""
        return self.array.data

    def close(self) -> None:
        """Give the region up.  Its memory goes when the last view of it does.  May be called twice."""
        self._rows = None
        self._complete = self._complete.copy()
        self._finalizer()


def _total_bytes(num_rows: int, row_bytes: int) -> int:
    """Of the file, header included.  Raises :class:`ConfigError` for a shape that holds nothing."""
    if num_rows < 1 or row_bytes < 1:
        raise ConfigError(
            f"a region of {num_rows} rows of {row_bytes} bytes holds nothing; raise primary.capacity above one block"
        )
    return num_rows * row_stride(row_bytes) + PAGE


def _resize(fd: int, size: int) -> None:
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        raise RegionError(
            f"cannot make {format_bytes(size)} of shared memory: {error.strerror}; raise the file size limit (ulimit -f) or lower "
            "primary.capacity"
        ) from error


def _open_exclusively_ours(path: Path) -> int:
    """Create or open ``path``, which must be a plain file of this user that nobody else may read."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RegionError(f"cannot create {path}: {error.strerror}; is it writable for this user?") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise RegionError(f"{path} is there already and not ours alone; remove it")
    return fd


def _agree(fd: int, num_rows: int, stride: int, sides: int, path: Path) -> None:
    """Write the header, or check that the one who did meant the same region.  The header's lock is held."""
    size = num_rows * stride + PAGE
    wanted = _HEADER.pack(_MAGIC, num_rows, stride, sides)
    if os.fstat(fd).st_size == size and os.pread(fd, len(_MAGIC), size - PAGE) == bytes(len(_MAGIC)):
        os.pwrite(fd, wanted, size - PAGE)  # its first side died between size and header
    elif os.fstat(fd).st_size == 0:
        check_room(size, path.parent)
        _resize(fd, size)
        os.pwrite(fd, wanted, size - PAGE)
    elif os.fstat(fd).st_size != size or os.pread(fd, _HEADER.size, size - PAGE) != wanted:
        raise ConfigError(
            f"{path}: another side has opened this region with {os.fstat(fd).st_size} bytes, this one wants {num_rows} rows of {stride} "
            f"for {sides} sides; scheduler and workers must be given the same configuration"
        )


def _take_slot(fd: int, sides: int, path: Path) -> bool:
    """Count as one of ``sides`` for as long as ``fd`` lives; True if all are there now.  The header's lock is held."""
    slots = range(_SLOTS_AT, _SLOTS_AT + sides)
    mine = next((slot for slot in slots if try_lock(fd, slot, 1)), None)
    if mine is None:
        raise RegionError(f"{path}: {sides} sides have mapped it already; do two engines share one engine id?")
    return all(slot == mine or is_held_elsewhere(fd, slot) for slot in slots)
