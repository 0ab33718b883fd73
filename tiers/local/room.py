"""Room in a tier's directory: files that the tier cannot use are deleted to keep the capacity."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

from tiers.local.layout import FRESH, entries_of, used_bytes
from tiers.local.segments import Segments, is_segment

logger = logging.getLogger("kv_tiering.local")


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
        self._segments = segments
        self._lock = threading.Lock()

    def strangers(self) -> list[Path]:
        """Return the files with names of segments that are not in use, oldest first.

        They are deleted when room is needed.
        """
        mine = {self._geometry.segment_name(number) for number in self._segments.existing()}
        found: list[tuple[float, Path]] = []
        for entry in entries_of(self._directory):
            if is_segment(entry.name) and entry.name not in mine and not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
        return [path for _, path in sorted(found)]

    def make(self, needed: int) -> bool:
        """Delete strangers until ``needed`` more bytes fit into the capacity. Return True if they fit.

        One caller at a time: files that one caller deletes must not be counted by another.
        """
        with self._lock:
            return self.delete_strangers(used_bytes(self._directory) + needed - self.capacity)

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
                "%s: removing %s, which this engine cannot use, to keep the capacity", self._directory, stranger.name
            )
            self._files.unlink(stranger)
            excess -= size
            if excess <= 0:
                return True
        return False

    def give_up_one(self) -> bool:
        """Free the space of one segment: the oldest that is not in use, or else the oldest of several in use.

        A segment in use is emptied, because open descriptors would keep a deleted file's space. The next inspection
        reports the segment as damaged. Return False if there is no segment to give up.
        """
        for stranger in self.strangers():
            if self._files.status(stranger).st_blocks:
                logger.warning("%s is full: removing %s, which is not in use", self._directory, stranger.name)
                self._files.unlink(stranger)
                return True
        modified = self._segments.modified()
        if len(modified) < 2:
            return False
        oldest = min(modified, key=lambda number: (modified[number][1], number))
        path = self._directory / self._geometry.segment_name(oldest)
        logger.warning("%s is full: truncating %s; its blocks are lost", self._directory, path.name)
        fd = self._files.open(path, os.O_RDWR)
        try:
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
