"""The bandwidth of a bare disk."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tiering.tier import Files, store_error


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
