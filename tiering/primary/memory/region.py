"""The memory of the primary tier: a page-aligned buffer of rows that scheduler and workers map.

A region for one process is anonymous. A region for several processes is a file in /dev/shm. Every side opens the file
under the same name with the same arguments, in any order. The first side gives the file its size; the last of the
``sides`` unlinks it, so that nothing can be left behind from then on. Each side holds a lock that the kernel releases
when the process ends, so dead sides do not count. A file without any live side belongs to a start that was killed
half-way; the next start removes it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import mmap
import os
import re
import stat
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tiering.api.units import format_bytes
from tiering.errors import ConfigError, RegionError
from tiering.primary.memory.filelock import is_held_elsewhere, is_linked, locked, try_lock, unlock
from tiering.primary.memory.prefault import Share, prefault
from tiering.primary.memory.preparation import FAILED, PREPARED, Preparation
from tiering.primary.memory.room import check_room

logger = logging.getLogger("kv_tiering.region")

PAGE = mmap.PAGESIZE
"""Size of a page in bytes."""
SHM = Path("/dev/shm")
"""Directory of region files."""
_UNNAMED = Path("/proc/kv-tiering")  # no file can have this name
FILE_PREFIX = "kv-tiering."
"""Prefix of the names of region files."""

# The header is the page after the rows: magic, rows, row stride, sides; then a byte that is 1 once all sides have
# mapped the region, and a byte that is 1 if a side cannot pin the rows; then the first two different marks; then a byte
# per side, its state of preparation.
_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"kvregn01"
_COMPLETE_AT = 64
_PAGEABLE_AT = 65
_MARKS_AT = 128
_STATES_AT = 256
# Bytes far beyond the end of the file that only carry locks: one guards the header, then there is one for each side.
_LOCK_AT = 1 << 60
_SLOTS_AT = _LOCK_AT + 1
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x2, 0x4
_PUNCH_HOLE = 0x3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)  # posix_fallocate has no flags
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
MAX_SIDES = 1024
"""Largest number of sides that can share a region."""
MARK_BYTES = 16
"""Length of a mark in bytes."""
PREPARED_AT_ONCE = 1 << 30
"""Largest region in bytes whose preparation a start waits for; it takes a fraction of a second."""


def is_large(nbytes: int) -> bool:
    """Return True if a start does not wait for the preparation of a region of ``nbytes``."""
    return nbytes > PREPARED_AT_ONCE


def row_stride(row_bytes: int) -> int:
    """Return ``row_bytes`` rounded up to whole pages."""
    return -(-row_bytes // PAGE) * PAGE


def shared_path(name: str, directory: Path = SHM) -> Path:
    """Return the path of the file that backs a region until all sides have mapped it.

    Args:
        name: name of the region.
        directory: directory of the file; default /dev/shm.
    """
    safe = name if re.fullmatch(r"[A-Za-z0-9_-]{1,128}", name) else hashlib.sha256(name.encode()).hexdigest()[:32]
    return directory / f"{FILE_PREFIX}{safe}"


def make_sealed(name: str, size: int) -> int:
    """Return a descriptor of ``size`` bytes of memory that keep their size.

    Another process that maps them would die of a page that is cut off.

    Raises:
        RegionError: the memory cannot be made.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _resize(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def sweep(directory: Path = SHM) -> list[Path]:
    """Remove region files in ``directory`` that no process holds, and return their paths.

    Such files stay behind if a start is killed half-way.
    """
    swept = []
    for path in sorted(directory.glob(f"{FILE_PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            logger.debug("%s is left alone: %s", path, error)  # already gone, another user's file, or not a region
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
    # A lock on every byte proves that no side is in the region. A side that has just opened the file finds it unlinked
    # once it gets the header's lock, and starts again.
    if not try_lock(fd, 0, 0):
        return False
    try:
        if linked := is_linked(fd, path):
            path.unlink()
        return linked
    finally:
        unlock(fd, 0, 0)


def _release(fd: int, path: Path | None, owner: int) -> None:
    """Leave the region, and remove its file if no side is left. A forked child only closes its descriptor."""
    if path is not None and owner == os.getpid():
        unlock(fd, 0, 0)
        _unlink_if_unheld(fd, path)
    os.close(fd)


class SharedRegion:
    """A buffer of rows that start on page boundaries.

    The memory stays mapped until :meth:`close` was called and every view of it is gone, so views never become invalid.
    """

    __slots__ = (
        "__weakref__",
        "_complete",
        "_finalizer",
        "_marks",
        "_owner",
        "_private",
        "_rows",
        "_states",
        "address",
        "fd",
        "in_background",
        "nbytes",
        "num_rows",
        "pageable",
        "preparation",
        "row_bytes",
        "row_stride",
    )

    def __init__(
        self, fd: int, num_rows: int, row_bytes: int, path: Path | None = None, sides: int = 1, side: int = 0
    ) -> None:
        """Map ``fd``, which the region owns from then on. Use :meth:`create` or :meth:`open_shared` instead."""
        self.num_rows = num_rows
        """Number of rows."""
        self.row_bytes = row_bytes
        """Usable size of a row in bytes."""
        self.row_stride = row_stride(row_bytes)
        """Distance between rows in bytes: ``row_bytes`` rounded up to whole pages."""
        self.nbytes = num_rows * self.row_stride
        """Size of all rows in bytes."""
        try:
            mapping = mmap.mmap(fd, self.nbytes + PAGE)
        except (OSError, ValueError) as error:
            raise RegionError(
                f"cannot map {format_bytes(self.nbytes)}: {error}; "
                "raise the address space limit (ulimit -v) or lower primary.capacity"
            ) from error
        flat = np.frombuffer(mapping, dtype=np.uint8)
        self._rows: NDArray[np.uint8] | None = flat[: self.nbytes].reshape(num_rows, self.row_stride)
        flag = self.nbytes + _COMPLETE_AT
        self._complete: NDArray[np.uint8] = np.ones(1, np.uint8) if path is None else flat[flag : flag + 1]
        flag = self.nbytes + _PAGEABLE_AT
        self.pageable: NDArray[np.uint8] = flat[flag : flag + 1]
        """One byte, shared by all sides: any of them sets it to 1 if it cannot pin the rows."""
        self._marks: NDArray[np.uint8] = flat[self.nbytes + _MARKS_AT :][: 2 * MARK_BYTES].reshape(2, MARK_BYTES)
        self._states: NDArray[np.uint8] = flat[self.nbytes + _STATES_AT :][:sides]
        self.preparation = Preparation(self._states[side : side + 1])
        """The preparation of this side's rows."""
        self.in_background = False
        """True if the rows are prepared beside the engine's start."""
        self.address: int = flat.ctypes.data
        """Address of the first row in this process."""
        self.fd = fd
        """Descriptor of the memory, valid until :meth:`close`."""
        self._owner = os.getpid()
        self._private = path is None
        self._finalizer = weakref.finalize(self, _release, fd, path, self._owner)

    @classmethod
    def create(cls, num_rows: int, row_bytes: int, *, share: Share | None = None, in_background: bool = False) -> Self:
        """Create an anonymous region for one process.

        Args:
            num_rows: number of rows.
            row_bytes: size of a row in bytes; rounded up to whole pages.
            share: the pages to populate; default: all.
            in_background: as in :meth:`open_shared`.

        Raises:
            ConfigError: the region would be empty.
            RegionError: there is not enough memory; the message names the limit to raise.
        """
        size = _total_bytes(num_rows, row_bytes)
        check_room(size, None)
        fd = make_sealed("kv-tiering", size)
        try:
            region = cls(fd, num_rows, row_bytes)
        except RegionError:
            os.close(fd)
            raise
        return region.prepared(share, in_background)

    @classmethod
    def open_shared(
        cls,
        name: str,
        num_rows: int,
        row_bytes: int,
        *,
        sides: int,
        mark: bytes | None = None,
        directory: Path = SHM,
        share: Share | None = None,
        in_background: bool = False,
        timeout: float = 60.0,
    ) -> Self:
        """Open or create the region ``name``. Each side calls this method once, with the same arguments.

        The call does not wait for other sides to arrive; until :attr:`is_complete`, some may be missing.

        Args:
            name: name of the region.
            num_rows: number of rows.
            row_bytes: size of a row in bytes; rounded up to whole pages.
            sides: number of processes, or parts of one, that map the region.
            mark: :data:`MARK_BYTES` bytes, not all zero, that this side shows to the others; default: none. One side at
                least of several has none.
            directory: directory of the region's file; default /dev/shm.
            share: the pages to populate, for a side that uses only some; default: all. One side must populate all.
            in_background: True to return at once if the region is larger than :data:`PREPARED_AT_ONCE`; the pages of
                this side are then populated by a thread until :attr:`is_prepared`. Default: False.
            timeout: time limit for another side to finish its change of the header, in seconds; default 60.

        Raises:
            ConfigError: the sides disagree about the shape.
            RegionError: there is not enough room; the message names the limit to raise.
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
                        region = cls._joined(fd, num_rows, row_bytes, path, sides, mark)
                        break
            except BaseException:
                if region is None:
                    _release(fd, path, os.getpid())
                else:
                    region.close()
                raise
            os.close(fd)  # another side swept or completed the region between opening and locking
        return region.prepared(share, in_background)

    @classmethod
    def join(cls, fd: int, num_rows: int, row_bytes: int, *, sides: int, mark: bytes | None = None) -> Self:
        """Join the region in ``fd``, which the region owns from then on.

        Args:
            fd: memory of the rows and one more page, an open description of its own; the caller's if this raises.
            num_rows: number of rows.
            row_bytes: size of a row in bytes; rounded up to whole pages.
            sides: number of processes, or parts of one, that map the region.
            mark: as in :meth:`open_shared`.

        Raises:
            ConfigError: the sides disagree about the shape.
            RegionError: as many sides have joined already, or the memory cannot be mapped.
        """
        with locked(fd, _LOCK_AT, time.monotonic() + 60.0):
            return cls._joined(fd, num_rows, row_bytes, _UNNAMED, sides, mark)

    @classmethod
    def _joined(cls, fd: int, num_rows: int, row_bytes: int, path: Path, sides: int, mark: bytes | None) -> Self:
        """Become a side of the region; the caller holds the header's lock."""
        _agree(fd, num_rows, row_stride(row_bytes), sides, path)
        side, all_there = _take_slot(fd, sides, path, marked=mark is not None)
        region = cls(fd, num_rows, row_bytes, path, sides, side)
        if mark is not None and mark not in region.marks and len(region.marks) < 2:
            region._marks[len(region.marks)] = np.frombuffer(mark, np.uint8)
        if all_there:
            if is_linked(fd, path):
                path.unlink()
            region._complete[0] = 1
        return region

    def prepared(self, share: Share | None, in_background: bool) -> Self:
        """Populate the pages of this side, or begin to; return the region.

        Args:
            share: as in :meth:`open_shared`.
            in_background: as in :meth:`open_shared`.

        Raises:
            RegionError: there is not enough memory, or no thread can be started; the region is closed.
        """

        def populate(is_over: Callable[[], bool]) -> None:
            prefault(self.array.reshape(-1), self.fd, share=share, is_over=is_over)

        self.in_background = in_background and is_large(self.nbytes)
        if self.in_background:
            self.preparation.begin(populate)
            return self
        try:
            self.preparation.run(populate)
        except RegionError:
            self.close()
            raise
        return self

    @property
    def is_prepared(self) -> bool:
        """True if all sides have mapped the region and may use every row."""
        return bool(self._complete[0] and (self._states == PREPARED).all())

    @property
    def is_unusable(self) -> bool:
        """True if a side could not prepare its rows, so that no row is ever used."""
        return bool((self._states == FAILED).any())

    @property
    def is_complete(self) -> bool:
        """True if all sides have mapped the region and see each other's writes.

        Always True for an anonymous region.
        """
        return bool(self._complete[0])

    @property
    def marks(self) -> list[bytes]:
        """The different marks of the sides that have mapped the region; the first two, if there are more."""
        return [mark.tobytes() for mark in self._marks if mark.any()]

    @property
    def array(self) -> NDArray[np.uint8]:
        """The rows: uint8 of shape (num_rows, row_stride).

        Raises:
            RegionError: the region is closed.
        """
        if self._rows is None:
            raise RegionError("the region is closed")
        return self._rows

    @property
    def view(self) -> memoryview:
        """The rows as a memoryview of format "B"."""
        return self.array.data

    def close(self) -> None:
        """Release the region, whose views stay valid. May be called twice.

        The memory of a region for one process is freed at once, even if views of closed components survive.
        """
        self.preparation.close()
        if self._rows is not None and self._private and self._finalizer.alive and self._owner == os.getpid():
            _punch(self.fd, self.nbytes)
        self._rows = None
        self._complete, self.pageable, self._marks = self._complete.copy(), self.pageable.copy(), self._marks.copy()
        self._states = self._states.copy()
        self._finalizer()


def _punch(fd: int, nbytes: int) -> None:
    """Free the memory of the first ``nbytes`` bytes, which read as zeros from then on."""
    if _libc.fallocate(fd, _PUNCH_HOLE, 0, nbytes):
        logger.debug("the rows are freed with their last view: %s", os.strerror(ctypes.get_errno()))


def _total_bytes(num_rows: int, row_bytes: int) -> int:
    """Return the size of the region's file in bytes, header included.

    Raises:
        ConfigError: the region would be empty.
    """
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
            f"cannot make {format_bytes(size)} of shared memory: {error.strerror}; "
            "raise the file size limit (ulimit -f) or lower primary.capacity"
        ) from error


def _open_exclusively_ours(path: Path) -> int:
    """Create or open ``path`` as a regular file that belongs to this user and that no other user may read.

    Raises:
        RegionError: the file cannot be created, or is not private to this user.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RegionError(
            f"cannot create {path}: {error.strerror}; make the directory writable for this user"
        ) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise RegionError(f"{path} exists and is not private to this user; remove the file")
    return fd


def _agree(fd: int, num_rows: int, stride: int, sides: int, path: Path) -> None:
    """Write the header, or check that the existing one describes the same region.

    The caller holds the header's lock.

    Raises:
        ConfigError: another side opened the region with another shape.
    """
    size = num_rows * stride + PAGE
    wanted = _HEADER.pack(_MAGIC, num_rows, stride, sides)
    if os.fstat(fd).st_size == size and os.pread(fd, len(_MAGIC), size - PAGE) == bytes(len(_MAGIC)):
        os.pwrite(fd, wanted, size - PAGE)  # the first side died after it set the size and before it wrote the header
    elif os.fstat(fd).st_size == 0:
        check_room(size, path.parent)
        _resize(fd, size)
        os.pwrite(fd, wanted, size - PAGE)
    elif os.fstat(fd).st_size != size or os.pread(fd, _HEADER.size, size - PAGE) != wanted:
        raise ConfigError(
            f"{path}: another side has opened this region with {os.fstat(fd).st_size} bytes, "
            f"this one wants {num_rows} rows of {stride} for {sides} sides; "
            "scheduler and workers must be given the same configuration"
        )


def _take_slot(fd: int, sides: int, path: Path, *, marked: bool) -> tuple[int, bool]:
    """Lock a slot for as long as ``fd`` is open; return its number, and True if all sides hold one.

    The caller holds the header's lock. The first slot is for a side without a mark: the sides with marks of two engines
    with one name, which start at the same time, would otherwise count as all sides of one.
    """
    slots = range(_SLOTS_AT, _SLOTS_AT + sides)
    mine = next((slot for slot in slots[marked and sides > 1 :] if try_lock(fd, slot, 1)), None)
    if mine is None:
        raise RegionError(f"{path}: {sides} sides have mapped it already; do two engines share one engine id?")
    return mine - _SLOTS_AT, all(slot == mine or is_held_elsewhere(fd, slot) for slot in slots)
