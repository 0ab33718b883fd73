"""Room in a tier's directory: files that the tier cannot use are deleted to keep the capacity."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from tiers.local.layout import FRESH, PAGE, entries_of, parse_segment, used_bytes
from tiers.local.segments import Segments

logger = logging.getLogger("kv_tiering.local")

LEAST_RESERVE = 4 << 20
"""Fewest bytes that stay free on a disk that has refused writes; a segment, if that is smaller."""

UNRESERVED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Errors of file systems that reserve no space (fallocate)."""

_DROPPED_AT_ONCE = 8
"""One of so many segments is dropped at once, at least one."""


class Room:
    """The room for segments in one directory.

    Methods raise :class:`OSError`.

    Args:
        segments: the segments in use.
        capacity: bytes of everything in the directory.
    """

    def __init__(self, segments: Segments, capacity: int) -> None:
        self.capacity = capacity
        """Bytes of everything in the directory."""
        self.reserve = 0
        """Bytes that a new segment leaves free; 0 until the disk has refused writes to slots.

        Where every write takes new space (copy on write), segments must not take the last of it.
        """
        self._directory = segments.directory
        self._geometry = segments.geometry
        self._files = segments.files
        self._segments = segments
        self._lock = threading.Lock()

    def strangers(self) -> list[Path]:
        """Return the files with names of segments that are not in use, such as those of another block size.

        The oldest comes first. They are deleted when room is needed.
        """
        mine = {self._geometry.segment_name(number) for number in self._segments.existing()}
        found: list[tuple[float, Path]] = []
        for entry in entries_of(self._directory):
            if parse_segment(entry.name) and entry.name not in mine and not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
        return [path for _, path in sorted(found)]

    def make(self, needed: int, *, delete: bool = True) -> bool:
        """Delete strangers until ``needed`` more bytes fit into the capacity. Return True if they fit.

        One caller at a time: files that one caller deletes must not be counted by another.

        Args:
            needed: bytes.
            delete: False leaves strangers alone; default: True.
        """
        with self._lock:
            excess = used_bytes(self._directory) + needed - self.capacity
            return self.delete_strangers(excess) if delete else excess <= 0

    def trim(self) -> None:
        """Delete strangers until the segments alone are within the capacity.

        Other files are not counted, because there may be very many.
        """
        used = len(self._segments.existing()) * self._geometry.segment_bytes
        used += sum(self._files.status(stranger).st_blocks * 512 for stranger in self.strangers())
        self.delete_strangers(used - self.capacity)

    def delete_strangers(self, excess: int) -> bool:
        """Delete strangers of at least ``excess`` bytes. Return False if there are too few."""
        if excess <= 0:
            return True
        for stranger in self.strangers():
            try:
                size = self._files.status(stranger).st_blocks * 512
            except FileNotFoundError:
                continue
            logger.info(
                "%s: removing %s, which this engine cannot use, because its room is needed",
                self._directory,
                stranger.name,
            )
            self._files.unlink(stranger)
            excess -= size
            if excess <= 0:
                return True
        return False

    def regain(self, worst: Sequence[int], *, relapsed: bool) -> bool:
        """Drop segments until the disk takes writes again, a part of them at most; return True if it does.

        Args:
            worst: segments that go first.
            relapsed: the disk has refused writes again since it took some.
        """
        segment_bytes = self._geometry.segment_bytes
        self.reserve = self.reserve or min(segment_bytes, max(LEAST_RESERVE, 4 * self._geometry.slot_bytes))
        # A full directory has room for a small trial only, which shows a disk that takes nothing.
        room = self.capacity - used_bytes(self._directory)
        size = self.reserve if relapsed else min(self.reserve, room)
        if size >= PAGE and self._has_space(size):
            return True
        for _ in range(max(1, len(self._segments.existing()) // _DROPPED_AT_ONCE)):
            if not self.drop_one(worst):
                return False
            if self._has_space(self.reserve):
                # If writes are refused again, the reserve was too small.
                self.reserve = min(segment_bytes, 2 * self.reserve)
                return True
        return False

    def _has_space(self, size: int) -> bool:
        """Return True if the capacity and the disk have space for ``size`` more bytes."""
        if used_bytes(self._directory) + size > self.capacity:
            return False
        try:
            self.try_space(size)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            return False
        return True

    def try_space(self, size: int) -> None:
        """Raise :class:`OSError` unless the disk has space for ``size`` more bytes.

        Trying is the only test: quotas do not show in the free space of a file system.
        """
        path = self._directory / f"trial{FRESH}"
        self._files.unlink(path)
        fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._files.allocate(fd, size)
        except OSError as error:
            if error.errno not in UNRESERVED:
                raise
            zeros = memoryview(mmap.mmap(-1, min(size, LEAST_RESERVE)))
            for offset in range(0, size, len(zeros)):
                self._files.write_all(fd, zeros[: size - offset], offset)
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)
            self._files.unlink(path)

    def drop_one(self, worst: Sequence[int] = ()) -> bool:
        """Free the space of one segment: the oldest that is not in use, or else the oldest of several in use.

        A segment in use is emptied, because open descriptors would keep a deleted file's space. The next inspection
        reports the segment as damaged. Return False if no segment can be dropped.

        Args:
            worst: segments in use that go first; default: none.
        """
        for stranger in self.strangers():
            if self._files.status(stranger).st_blocks:
                logger.warning("%s is full: removing %s, which is not in use", self._directory, stranger.name)
                self._files.unlink(stranger)
                return True
        dropped = self._segments.dropped
        modified = {number: state[1] for number, state in self._segments.modified().items() if number not in dropped}
        if len(modified) < 2:
            return False
        oldest = next(
            filter(modified.__contains__, worst), min(modified, key=lambda number: (modified[number], number))
        )
        path = self._directory / self._geometry.segment_name(oldest)
        logger.warning("%s is full: truncating %s; its blocks are lost", self._directory, path.name)
        fd = self._files.open(path, os.O_RDWR)
        try:
            dropped.add(oldest)
            self._files.truncate(fd, 0)
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)
        return True

    def remove_leftovers(self) -> None:
        """Delete the incomplete files of an interrupted process."""
        for entry in entries_of(self._directory):
            if entry.name.endswith(FRESH) and not entry.is_dir(follow_symlinks=False):
                self._files.unlink(Path(entry.path))
