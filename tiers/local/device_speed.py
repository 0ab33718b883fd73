"""The bandwidth of a bare disk, measured by fio if it is installed, else by threads."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

from tiering.medium.files import Files, store_error

FIO_SECONDS = 60.0
"""Seconds that fio may take beyond its measurement."""


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
        fio = shutil.which("fio")
        if fio is not None:
            return _by_fio(fio, path, size, depth, load=load, seconds=seconds, direct=direct)
        return _by_threads(path, size, blocks, depth, load=load, seconds=seconds, direct=direct)
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


def _by_fio(fio: str, path: Path, size: int, depth: int, *, load: bool, seconds: float, direct: bool) -> float | None:
    words = [
        fio,
        "--name=device",
        f"--filename={path}",
        f"--rw={'randread' if load else 'randwrite'}",
        f"--bs={size}",
        f"--iodepth={depth}",
        "--ioengine=libaio",
        f"--direct={int(direct)}",
        "--time_based",
        f"--runtime={max(1, round(seconds))}",
        "--output-format=json",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds + FIO_SECONDS, check=False)
    try:
        job = json.loads(done.stdout)["jobs"][0]["read" if load else "write"]
        return float(job["bw_bytes"])
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def _by_threads(
    path: Path, size: int, blocks: int, depth: int, *, load: bool, seconds: float, direct: bool
) -> float | None:
    files = Files()
    fd = files.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
    end = time.monotonic() + seconds
    moved = [0] * depth
    errors: list[OSError] = []

    def work(number: int) -> None:
        buffer = memoryview(mmap.mmap(-1, size))
        block = number
        try:
            while time.monotonic() < end:
                block = (block * 7919 + depth) % blocks
                move = files.preadv if load else files.pwritev
                moved[number] += move(fd, [buffer], block * size)
        except OSError as error:
            errors.append(error)

    try:
        began = time.monotonic()
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.monotonic() - began
    finally:
        files.close(fd)
    if errors:
        raise errors[0]
    return sum(moved) / elapsed if elapsed else None
