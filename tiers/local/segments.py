"""The segment files: open descriptors, reads and writes of runs of slots, and files made ahead of need."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tiering.secondary.files import Files
from tiers.local.layout import PAGE, Geometry, is_segment, used_bytes

logger = logging.getLogger("kv_tiering.local")

MAX_OPEN = 256
"""Segments whose descriptors are kept; the others are opened for each call (a few microseconds)."""

BUFFERS_PER_CALL = min(os.sysconf("SC_IOV_MAX"), 1024)
"""Buffers that one vectored call may have."""

FILL_BYTES = 4 << 20
"""One piece of what is written ahead."""

_DROP_AFTER = 64 << 20
_FRESH = ".new"

_Vectored = Callable[[int, Sequence[memoryview], int], int]


def probe_direct(files: Files, directory: Path, segment: Path | None) -> bool:
    """Whether files in ``directory`` take O_DIRECT with addresses, offsets and lengths that are multiples of a page; by doing it.

    With a ``segment`` that is there already nothing is written, so that a full disk does not matter.  Raises :class:`OSError` if not
    even a plain file can be used there.
    """
    view = memoryview(mmap.mmap(-1, 3 * PAGE))
    if segment is not None:
        return _takes_direct(files, segment, lambda fd: files.preadv(fd, [view[:PAGE], view[PAGE : 2 * PAGE]], PAGE) >= 0)
    header, row, back = view[:PAGE], view[PAGE : 2 * PAGE], view[2 * PAGE :]
    header[:8], row[:8] = b"kvheader", b"kv block"
    path = directory / ("probe" + _FRESH)

    def round_trip(fd: int) -> bool:
        written = files.pwritev(fd, [header, row], PAGE)
        return written == 2 * PAGE and files.preadv(fd, [back], 2 * PAGE) == PAGE and back[:8] == row[:8]

    try:
        files.close(files.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        return _takes_direct(files, path, round_trip)
    finally:
        files.unlink(path)


def _takes_direct(files: Files, path: Path, use: Callable[[int], bool]) -> bool:
    try:
        fd = files.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        return _plain_only(error)
    try:
        return use(fd)
    except OSError as error:
        return _plain_only(error)
    finally:
        files.close(fd)


def _plain_only(error: OSError) -> bool:
    """False if ``error`` is how a file system declines O_DIRECT; any other is raised again."""
    if error.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}:
        return False
    raise error


class Segments:
    """The segment files of one directory and shape.  Reads and writes may come from any thread; they raise :class:`OSError`.

    ``direct``: with O_DIRECT; otherwise through the page cache, which is dropped behind.
    """

    def __init__(self, directory: Path, geometry: Geometry, files: Files, *, direct: bool) -> None:
        self.directory = directory
        self.geometry = geometry
        self.direct = direct
        self._files = files
        self._flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._unsynced: dict[int, int] = {}

    # -------------------------------------------------------------------------------------------------------- descriptors

    @contextlib.contextmanager
    def _descriptor(self, segment: int) -> Iterator[int]:
        fd = self._fds.get(segment)
        if fd is not None:
            yield fd
            return
        path = self.directory / self.geometry.segment_name(segment)
        with self._lock:
            if segment not in self._fds and len(self._fds) < MAX_OPEN:
                self._fds[segment] = self._files.open(path, self._flags)
            fd = self._fds.get(segment)
        if fd is not None:
            yield fd
            return
        fd = self._files.open(path, self._flags)
        try:
            yield fd
        finally:
            self._files.close(fd)

    def close(self) -> None:
        """Close all descriptors; no call is running."""
        while self._fds:
            self._files.close(self._fds.popitem()[1])

    # --------------------------------------------------------------------------------------------------------------- data

    def write(self, segment: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write ``buffers``, whole pages, one after another at ``offset``."""
        with self._descriptor(segment) as fd:
            written = self._move(self._files.pwritev, fd, list(buffers), offset)
            if written < sum(map(len, buffers)):
                raise OSError(errno.EIO, "nothing more could be written")
            if not self.direct:
                self._drop_behind(segment, fd, written)

    def read(self, segment: int, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers``, whole pages, from ``offset`` on; fewer bytes than they have only at the end of the file."""
        with self._descriptor(segment) as fd:
            done = self._move(self._files.preadv, fd, list(buffers), offset)
            if not self.direct:
                self._files.drop_cached(fd, offset, done)
            return done

    def sync(self, segment: int) -> None:
        """Wait until what was written to ``segment`` is on the device."""
        with self._descriptor(segment) as fd:
            self._files.fdatasync(fd)

    def _move(self, call: _Vectored, fd: int, buffers: list[memoryview], offset: int) -> int:
        """Repeat ``call`` until all is moved or nothing moves; bytes moved.  A short call is taken up at the page it stopped in."""
        total = sum(map(len, buffers))
        done = call(fd, buffers, offset)
        if done == total:
            return done
        while 0 < done < total:
            start = done // PAGE * PAGE if self.direct else done
            more = call(fd, _tail(buffers, start), offset + start)
            if start + more <= done:
                break
            done = start + more
        return done

    def _drop_behind(self, segment: int, fd: int, count: int) -> None:
        """Keep written pages from filling the page cache: only clean ones can be dropped, so write them out first."""
        with self._lock:
            unsynced = self._unsynced.get(segment, 0) + count
            self._unsynced[segment] = unsynced if unsynced < _DROP_AFTER else 0
        if unsynced >= _DROP_AFTER:
            self._files.fdatasync(fd)
            self._files.drop_cached(fd, 0, 0)

    # ---------------------------------------------------------------------------------------------------- files on the disk

    def existing(self) -> list[int]:
        """The numbers of the complete segments that are there and that the capacity allows."""
        found: list[int] = []
        for entry in self.directory.iterdir():
            number = self.geometry.segment_number(entry.name)
            if number is not None and number < self.geometry.max_segments and entry.stat().st_size == self.geometry.segment_bytes:
                found.append(number)
        return sorted(found)

    def written_at(self, segment: int) -> float:
        """When ``segment`` was last written (seconds since 1970; 0 if it is not there)."""
        try:
            return (self.directory / self.geometry.segment_name(segment)).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def strangers(self) -> list[Path]:
        """Segments of another shape, or beyond the capacity: to be deleted when room is needed, oldest first."""
        mine = {self.geometry.segment_name(number) for number in self.existing()}
        found = [entry for entry in self.directory.iterdir() if is_segment(entry.name) and entry.name not in mine]
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def make_room(self, capacity: int, needed: int) -> bool:
        """Delete strangers until ``needed`` more bytes keep the directory within ``capacity``; whether they do."""
        excess = used_bytes(self.directory) + needed - capacity
        if excess <= 0:
            return True
        for stranger in self.strangers():
            logger.info("%s: removing %s, which this engine cannot use, to keep the capacity", self.directory, stranger.name)
            excess -= stranger.stat().st_blocks * 512
            self._files.unlink(stranger)
            if excess <= 0:
                return True
        return False

    def remove_leftovers(self) -> None:
        """Delete what an interrupted process left half made."""
        for entry in self.directory.iterdir():
            if entry.name.endswith(_FRESH):
                self._files.unlink(entry)

    def create(self, segment: int, pace: Pace) -> None:
        """Make ``segment``: reserved, and written once as far as ``pace`` says (the first write to an extent is slow).

        The file has its name only when it is whole.  Raises :class:`OSError`, with nothing left behind.
        """
        final = self.directory / self.geometry.segment_name(segment)
        fresh = final.with_name(final.name + _FRESH)
        try:
            fd = self._files.open(fresh, self._flags | os.O_CREAT | os.O_TRUNC)
            try:
                self._files.allocate(fd, self.geometry.segment_bytes)
                self._fill(fd, pace)
                self._files.fdatasync(fd)
                if not self.direct:
                    self._files.drop_cached(fd, 0, 0)
            finally:
                self._files.close(fd)
            self._files.rename(fresh, final)
            self._files.sync_directory(self.directory)
        except OSError:
            self._files.unlink(fresh)
            raise

    def _fill(self, fd: int, pace: Pace) -> None:
        zeros = memoryview(mmap.mmap(-1, min(FILL_BYTES, self.geometry.segment_bytes)))
        offset, end = 0, self.geometry.segment_bytes
        while offset < end and pace.proceed():
            part = zeros[: end - offset]
            self._files.write_all(fd, part, offset)
            offset += len(part)


def _tail(buffers: Sequence[memoryview], skip: int) -> list[memoryview]:
    """``buffers`` without their first ``skip`` bytes."""
    tail: list[memoryview] = []
    for buffer in buffers:
        if skip < len(buffer):
            tail.append(buffer[skip:] if skip else buffer)
        skip = max(0, skip - len(buffer))
    return tail


class Pace:
    """How fast a segment is written ahead: it takes at most ``share`` of the time, and stops when it is needed at once.

    ``pieces``: how many pieces are written at most (None: all).
    """

    def __init__(self, share: float = 0.5, pieces: int | None = None) -> None:
        self._share = share
        self._pieces = pieces
        self._hurry = threading.Event()
        self._began: float | None = None

    def proceed(self) -> bool:
        """Wait for one's turn before the next piece; False: leave the rest unwritten."""
        if self._pieces is not None:
            self._pieces -= 1
            if self._pieces < 0:
                return False
        if self._began is not None and self._share < 1:
            self._hurry.wait((time.monotonic() - self._began) * (1 - self._share) / self._share)
        self._began = time.monotonic()
        return not self._hurry.is_set()

    def hurry(self) -> None:
        """The segment is needed now, written or not."""
        self._hurry.set()
