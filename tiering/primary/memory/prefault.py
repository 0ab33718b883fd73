"""The prefaulting of a mapping: every page gets its memory at the start, in parallel.

No step or later write pays for page faults, and none dies because memory has run out.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiering.api.units import format_bytes
from tiering.errors import RegionError

logger = logging.getLogger("kv_tiering.region")

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_CHUNK = 128 << 20
_CALL = 8 << 20
"""Most bytes of one call. The process can map no other memory during a call."""
_PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the rows that one side prepares, and where."""

    row_stride: int
    """Distance between rows in bytes."""
    start: int
    """First byte of each row that this side uses."""
    stop: int
    """The byte after the last one that this side uses of each row."""
    turn: int = 0
    """This side's number among sides that use the same bytes; each side begins at another place."""
    turns: int = 1
    """Number of sides that use the same bytes."""
    cpus: frozenset[int] = frozenset()
    """CPUs near which the memory should lie; empty for any."""

    def runs(self, nbytes: int) -> list[tuple[int, int]]:
        """Return byte ranges of whole rows; one thread prepares one range at a time.

        Args:
            nbytes: size of all rows.
        """
        used = self.stop - self.start
        step = max(1, _CHUNK // used) * self.row_stride
        runs = [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]
        first = len(runs) * self.turn // self.turns
        return runs[first:] + runs[:first]

    def ranges(self, run: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Yield the page-aligned byte ranges of one run that this side uses."""
        start = self.start // mmap.PAGESIZE * mmap.PAGESIZE
        stop = min(-(-self.stop // mmap.PAGESIZE) * mmap.PAGESIZE, self.row_stride)
        if stop - start == self.row_stride:
            yield run
        else:
            for row in range(*run, self.row_stride):
                yield row + start, row + stop


# ctypes releases the GIL during the call; Python's own mmap.madvise does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, nbytes: int, advice: int) -> int:
    """Return 0, or the error number."""
    while _libc.madvise(address, nbytes, advice):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number
    return 0


def _no_room(nbytes: int, error: OSError) -> RegionError:
    return RegionError(
        f"there is no memory for {format_bytes(nbytes)} of shared memory ({error.strerror}): "
        "another program took it since the start; "
        "give the container more shared memory (docker: --shm-size) and memory, or lower primary.capacity"
    )


def _reserve_and_touch(rows: NDArray[np.uint8], fd: int, start: int, stop: int) -> None:
    """Reserve and touch pages without changing a byte, on kernels before 5.14.

    The reservation ensures that no page fault fails later for lack of room.
    """
    os.posix_fallocate(fd, start, stop - start)
    int(rows[start : stop : mmap.PAGESIZE].max())


def prefault(
    flat: NDArray[np.uint8], fd: int, *, share: Share | None = None, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Populate ``flat`` without changing its content; return when all pages are present.

    Args:
        flat: the mapping of the file ``fd`` from its start.
        fd: the file.
        share: the part to populate; default: all of it.
        is_over: returns True once the pages are not needed any more; the call then returns early. Default: never.

    Raises:
        RegionError: there is not enough memory, or no thread can be started.
    """
    address, nbytes = flat.ctypes.data, flat.nbytes
    # Huge pages are optional: the kernel refuses them where shared memory may not use them.
    refused = advise(address, nbytes, _MADV_HUGEPAGE)
    logger.debug("huge pages for the shared region: %s", os.strerror(refused) if refused else "asked for")

    share = share or Share(_CHUNK, 0, _CHUNK)

    def populate(start: int, stop: int) -> int:
        for begin in range(start, stop, _CALL):
            end = min(begin + _CALL, stop)
            if is_over():
                break
            number = advise(address + begin, end - begin, _MADV_POPULATE_WRITE)
            try:
                if number == errno.EINVAL:
                    _reserve_and_touch(flat, fd, begin, end)
                elif number:
                    raise OSError(number, os.strerror(number))
            except OSError as error:
                raise _no_room(nbytes, error) from error
        return stop - start

    runs = deque(share.runs(nbytes))
    done: list[int] = []
    failures: list[BaseException] = []

    def work() -> None:
        _move_near(share.cpus)
        while not (failures or is_over()):
            try:
                run = runs.popleft()
            except IndexError:
                return
            try:
                done.append(sum(populate(*part) for part in share.ranges(run)))
            except BaseException as error:
                failures.append(error)

    started = reported = time.monotonic()
    running = _start_threads(work, min(16, os.cpu_count() or 1, len(runs)))
    for thread in running:
        while thread.is_alive():
            thread.join(_PROGRESS_SECONDS)
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                logger.info(
                    "preparing the primary tier's memory: %s of %s", format_bytes(sum(done)), format_bytes(nbytes)
                )
    if failures:
        raise failures[0]
    logger.debug(
        "prefaulted %s in %.2f s with %d threads", format_bytes(sum(done)), time.monotonic() - started, len(running)
    )


def _move_near(cpus: frozenset[int]) -> None:
    """Run the calling thread on ``cpus`` alone: the kernel takes new pages from the memory near them."""
    if usable := cpus & os.sched_getaffinity(0):
        try:
            os.sched_setaffinity(0, usable)
        except OSError as error:
            logger.debug("the primary tier's memory is prepared on any CPU, not near the GPU: %s", error)


def _start_threads(work: Callable[[], None], count: int) -> list[threading.Thread]:
    """Start up to ``count`` threads that run ``work``; fewer if the process may not have as many.

    Raises:
        RegionError: no thread can be started.
    """
    running: list[threading.Thread] = []
    for number in range(count):
        thread = threading.Thread(target=work, name=f"kv-tiering-prefault-{number}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if running:
                logger.warning(
                    "preparing the primary tier's memory with %d of %d threads: %s", len(running), count, error
                )
                break
            raise RegionError(
                f"no thread can be started to prepare the primary tier's memory ({error}); "
                "raise the limit on processes (ulimit -u, docker: --pids-limit) or on memory (ulimit -v)"
            ) from error
        running.append(thread)
    return running
