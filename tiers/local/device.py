"""Abilities of a bare disk, by trial: its bandwidth, and if its file system takes O_DIRECT."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tiering.tier import Files, store_error
from tiers.local.layout import FRESH, PAGE


def device_speed(
    directory: Path, block_bytes: int, depth: int, *, load: bool, nbytes: int, seconds: float, direct: bool
) -> float | None:
    """Return bytes per second of the disk below ``directory``; None if they cannot be measured.

    Blocks are read or written at random places of a file that was written before.

    Args:
        directory: an empty directory on the disk.
        block_bytes: bytes of one access, rounded up to whole pages.
        depth: accesses at the same time.
        load: True for reads, False for writes.
        nbytes: bytes of the file.
        seconds: time after which the measurement ends.
        direct: use O_DIRECT.

    Raises:
        StoreError: the file cannot be written or read.
    """
    size = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    blocks = max(depth, nbytes // size)
    path = directory / "device"
    try:
        _write(path, size, blocks)
        return _measured(path, size, blocks, depth, load=load, seconds=seconds, direct=direct)
    except OSError as error:
        raise store_error(error, f"cannot measure the disk in {directory}") from error
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, size: int, blocks: int) -> None:
    files = Files()
    buffer = memoryview(mmap.mmap(-1, size))
    buffer[:] = os.urandom(size)
    fd = files.open(path, os.O_RDWR | os.O_CREAT)
    try:
        for block in range(blocks):
            files.write_all(fd, buffer, block * size)
        files.fdatasync(fd)
        files.drop_cached(fd, 0, 0)
    finally:
        files.close(fd)


def _measured(
    path: Path, size: int, blocks: int, depth: int, *, load: bool, seconds: float, direct: bool
) -> float | None:
    files = Files()
    fd = files.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
    began = time.monotonic()

    def work(number: int) -> int:
        buffer, block, moved = memoryview(mmap.mmap(-1, size)), number, 0
        move = files.preadv if load else files.pwritev
        while time.monotonic() < began + seconds:
            block = (block * 7919 + depth) % blocks
            moved += move(fd, [buffer], block * size)
        return moved

    try:
        with ThreadPoolExecutor(depth) as threads:
            moved = sum(threads.map(work, range(depth)))
        elapsed = time.monotonic() - began
    finally:
        files.close(fd)
    return moved / elapsed if elapsed else None


def probe_direct(files: Files, directory: Path, segment: Path | None, *, read_only: bool = False) -> bool:
    """Return True if files in ``directory`` take O_DIRECT with page-aligned transfers.

    Addresses, offsets and lengths are multiples of a page.

    Args:
        files: file operations to use.
        directory: directory for a short-lived file to try with.
        segment: an existing file to try with instead (None: no such file). Nothing is written then, so a full disk does
            not matter.
        read_only: True if the file system takes no writes; default: False.

    Raises:
        OSError: not even a plain file can be used in ``directory``.
    """
    view = memoryview(mmap.mmap(-1, 3 * PAGE))
    if segment is not None:
        flags = os.O_RDONLY if read_only else os.O_RDWR
        return _takes_direct(
            files, segment, flags, lambda fd: files.preadv(fd, [view[:PAGE], view[PAGE : 2 * PAGE]], PAGE) >= 0
        )
    header, row, back = view[:PAGE], view[PAGE : 2 * PAGE], view[2 * PAGE :]
    header[:8], row[:8] = b"kvheader", b"kv block"
    path = directory / ("probe" + FRESH)

    def round_trip(fd: int) -> bool:
        written = files.pwritev(fd, [header, row], PAGE)
        return written == 2 * PAGE and files.preadv(fd, [back], 2 * PAGE) == PAGE and back[:8] == row[:8]

    try:
        files.unlink(path)
        files.close(files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        return _takes_direct(files, path, os.O_RDWR, round_trip)
    finally:
        files.unlink(path)


def _takes_direct(files: Files, path: Path, flags: int, use: Callable[[int], bool]) -> bool:
    """Return what ``use`` returns for a descriptor with O_DIRECT; False if O_DIRECT is declined."""
    try:
        fd = files.open(path, flags | os.O_DIRECT)
        try:
            return use(fd)
        finally:
            files.close(fd)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}:
            return False
        raise
