"""New segments, and the room for them in the directory.

Files that the tier cannot use are deleted to keep the capacity. New files are reserved and written ahead of need, in
the background: the first write to an extent is slow, so it is done before the slots are used.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Collection
from pathlib import Path

from tiering import OutOfSpaceError
from tiering.tier import Flag, fresh_name, store_error
from tiers.local.checkpoint import WrittenMarks
from tiers.local.layout import FRESH, entries_of, parse_segment, used_bytes, used_bytes_of_few
from tiers.local.segments import Segments

logger = logging.getLogger("kv_tiering.local")

FILL_BYTES = 4 << 20
"""Bytes of one piece when a new segment is written ahead."""

FIRST_BYTES = 256 << 20
"""Bytes of a new directory that are written before the tier serves."""

FIRST_SEGMENTS = 256
"""Most segments of a new directory that are created before the tier serves."""

COUNTED_AT_ONCE = 10_000
"""Most files of a new directory that are counted before the tier serves."""

UNRESERVED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Errors of file systems that reserve no space (fallocate)."""

_DROPPED_AT_ONCE = 8
"""One of so many segments is dropped at once, at least one."""


class SegmentPace:
    """The speed at which a new segment is written ahead.

    Args:
        share: largest share of the time that writing may take; default: 0.5.
        pieces: pieces written at most; default: all.
    """

    def __init__(self, share: float = 0.5, pieces: int | None = None) -> None:
        self._share = share
        self._pieces = pieces
        self._hurry = Flag()
        self.dropped = False
        """True if the segment is not needed any more."""
        self._began: float | None = None

    @classmethod
    def of_first(cls) -> SegmentPace:
        """Return the pace of the first segments of a directory, for which the tier's opening waits."""
        return cls(share=1.0, pieces=FIRST_BYTES // FILL_BYTES)

    def proceed(self) -> bool:
        """Wait until the next piece may be written. Return False if the rest stays unwritten."""
        if self._pieces is not None:
            self._pieces -= 1
            if self._pieces < 0:
                return False
        if self._began is not None and self._share < 1:
            self._hurry.wait((time.monotonic() - self._began) * (1 - self._share) / self._share)
        self._began = time.monotonic()
        return not self._hurry.is_set()

    def hurry(self) -> None:
        """End the writing ahead, because the segment is needed now."""
        self._hurry.set()

    def drop(self) -> None:
        """End the creation, because the segment is not needed any more.

        A file whose space could not be reserved is not written to its end then.
        """
        self.dropped = True
        self._hurry.set()


class NewSegments:
    """Creates the segments of one directory, and makes room for them there.

    Methods without an error of their own raise :class:`OSError`.

    Args:
        segments: the segments in use; new ones are added to them.
        capacity: bytes of everything in the directory.
        marks: the marks of written segments.
    """

    def __init__(self, segments: Segments, capacity: int, marks: WrittenMarks) -> None:
        self.capacity = capacity
        self.segments = segments
        self.marks = marks
        self._directory, self._geometry, self._files = segments.directory, segments.geometry, segments.files
        self._lock = threading.Lock()
        self._unreserved = False

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

    def add(self, pace: SegmentPace, taken: Collection[int] = (), *, delete: bool = True) -> int | None:
        """Create one more segment and return its number; None if the capacity is used up.

        Args:
            pace: speed and amount of the writes ahead.
            taken: numbers not to use; default: none.
            delete: delete files that this engine cannot use if their room is needed; default: True.

        Raises:
            StoreError: the segment cannot be created.
        """
        try:
            number = self._next_number(taken)
            if number is None or not self.make(self._geometry.segment_bytes, delete=delete):
                return None
            # The checkpoint may name blocks of an earlier segment with this number.
            self.marks.mark(number)
            self._create(number, pace)
        except OSError as error:
            raise store_error(error, self._no_segment("cannot add a segment")) from error
        return number

    def add_first(self, pace: SegmentPace) -> list[int]:
        """Create the first segments of a directory without any, at least one, and return their numbers.

        A small directory gets all of its segments now, as far as they fit beside files that this engine cannot use; the
        others are added when they are needed. Very many other files are counted in the background later, before further
        segments are added.

        Args:
            pace: amount of the writes ahead; ends the creation early once it is dropped.

        Raises:
            OutOfSpaceError: other files leave no room for a segment.
            StoreError: no segment can be created.
        """
        segment_bytes, capacity = self._geometry.segment_bytes, self.capacity
        used = used_bytes_of_few(self._directory, COUNTED_AT_ONCE) or 0
        if not self.delete_strangers(used + segment_bytes - capacity):
            raise OutOfSpaceError(
                f"{self._directory} holds other files, and a first segment of {segment_bytes} bytes "
                f"does not fit into the capacity of {capacity} beside them; remove them, or raise the capacity"
            )
        created: list[int] = []
        counted: int | None = None
        for _ in range(min(self._geometry.max_segments, max(1, FIRST_BYTES // segment_bytes), FIRST_SEGMENTS)):
            if created:
                if counted is None:
                    counted = used_bytes_of_few(self._directory, COUNTED_AT_ONCE)
                else:
                    counted += segment_bytes
                if pace.dropped or counted is None or counted + segment_bytes > capacity:
                    break
            number = self._next_number(())
            if number is None:
                break
            try:
                self._create(number, pace)
            except OSError as error:
                if not created:
                    what = self._no_segment("cannot create a first segment")
                    raise store_error(error, f"{what}; free some, or lower segment_size or the capacity") from error
                logger.warning(
                    "%s: %s; beginning with %d segment(s)", self._directory, error.strerror or error, len(created)
                )
                break
            created.append(number)
        return created

    def _no_segment(self, what: str) -> str:
        """Return a text with what is wanted, and with what the directory and its file system have."""
        found, geometry = os.statvfs(self._directory), self._geometry
        return (
            f"{what} of {geometry.segment_bytes} bytes in {self._directory}, which has "
            f"{len(self.segments.existing())} of {geometry.max_segments}, where {found.f_bavail * found.f_frsize} "
            "bytes are free"
        )

    def _next_number(self, taken: Collection[int]) -> int | None:
        """Return the lowest number for a new segment; None if the capacity allows no more segments.

        Args:
            taken: numbers not to use.
        """
        existing = set(self.segments.existing())
        for number in range(self._geometry.max_segments):
            if number in existing or number in taken:
                continue
            if not (self._directory / self._geometry.segment_name(number)).is_dir():
                return number
        return None

    def _create(self, segment: int, pace: SegmentPace) -> None:
        """Create ``segment``: its space is reserved, and ``pace`` limits how much of it is written once.

        The file gets its name only when it is complete.

        Args:
            segment: number of the new segment.
            pace: speed and amount of the writes.

        Raises:
            OSError: the file cannot be created. Nothing is left behind.
        """
        final = self._directory / self._geometry.segment_name(segment)
        fresh = fresh_name(final)
        try:
            self._files.unlink(fresh)
            fd = self._files.open(fresh, self.segments.flags | os.O_CREAT | os.O_EXCL)
            try:
                self._reserve(fd, pace)
                self._files.fdatasync(fd)
                if not self.segments.direct:
                    self._files.drop_cached(fd, 0, 0)
                created = os.fstat(fd)
            finally:
                self._files.close(fd)
            self.segments.put_in_place(segment, fresh, (created.st_dev, created.st_ino))
            self._files.sync_directory(self._directory)
        except OSError:
            self._files.unlink(fresh)
            raise

    def _reserve(self, fd: int, pace: SegmentPace) -> None:
        """Reserve the new file's space, and write as much of it as ``pace`` allows.

        On file systems that reserve no space, the whole file is written.
        """
        try:
            self._files.allocate(fd, self._geometry.segment_bytes)
        except OSError as error:
            if error.errno not in UNRESERVED:
                raise
            if not self._unreserved:
                self._unreserved = True
                logger.warning(
                    "%s: the file system reserves no space (fallocate); segments are written as a whole first",
                    self._directory,
                )
            self._fill(fd, pace, wholly=True)
        else:
            self._fill(fd, pace)

    def _fill(self, fd: int, pace: SegmentPace, *, wholly: bool = False) -> None:
        zeros = memoryview(mmap.mmap(-1, min(FILL_BYTES, self._geometry.segment_bytes)))
        offset, end = 0, self._geometry.segment_bytes
        while offset < end and (pace.proceed() or wholly):
            if pace.dropped:
                raise OSError(errno.ECANCELED, "the tier is closing")
            part = zeros[: end - offset]
            self._files.write_all(fd, part, offset)
            offset += len(part)
