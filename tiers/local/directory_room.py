"""Room in a tier's directory: files that the tier cannot use are deleted to keep the capacity."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from pathlib import Path

from tiering.tier import fresh_name
from tiers.local.layout import FRESH, entries_of, parse_segment, used_bytes
from tiers.local.segments import Segments

logger = logging.getLogger("kv_tiering.local")

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
        self._directory = segments.directory
        self._geometry = segments.geometry
        self._files = segments.files
        self.segments = segments
        self._lock = threading.Lock()

    def strangers(self) -> list[Path]:
        """Return the files with names of segments that are not in use, such as those of another block size.

        The oldest comes first. They are deleted when room is needed.
        """
        mine = {self._geometry.segment_name(number) for number in self.segments.existing()}
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
        used = len(self.segments.existing()) * self._geometry.segment_bytes
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

    def regain(self) -> bool:
        """Return True if the disk takes writes again; if not, drop an eighth of the segments, at least one."""
        size = min(self._geometry.slot_bytes, self.capacity - used_bytes(self._directory))
        if size > 0 and self._takes(size):
            return True
        for _ in range(max(1, len(self.segments.existing()) // _DROPPED_AT_ONCE)):
            if not self.drop_one():
                break
        return False

    def _takes(self, size: int) -> bool:
        """Write ``size`` bytes, and return True if the disk has taken them: quotas show nowhere else."""
        trial = self._directory / "trial"
        try:
            self._files.replace(trial, [memoryview(mmap.mmap(-1, size))])
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            return False
        finally:
            self._files.unlink(fresh_name(trial))
            self._files.unlink(trial)
        return True

    def drop_one(self) -> bool:
        """Free the space of one segment: the oldest that is not in use, or else the oldest of several in use.

        A segment in use is emptied, because open descriptors would keep a deleted file's space. The next inspection
        reports the segment as damaged. Return False if no segment can be dropped.
        """
        for stranger in self.strangers():
            if self._files.status(stranger).st_blocks:
                logger.warning("%s is full: removing %s, which is not in use", self._directory, stranger.name)
                self._files.unlink(stranger)
                return True
        dropped = self.segments.dropped
        modified = {number: state[1] for number, state in self.segments.modified().items() if number not in dropped}
        if len(modified) < 2:
            return False
        oldest = min(modified, key=lambda number: (modified[number], number))
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
