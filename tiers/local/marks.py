"""Marks of the segments written since a checkpoint, on disk before the first write into each segment.

A *generation* begins just before the index is copied for a checkpoint, which names the generation. The file
``written-<generation>`` has a header and one byte per segment. The byte is not zero if the segment was written or about
to be written.

At a restart, all headers in marked segments are read again. For the other segments the checkpoint is still correct.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import threading
from collections.abc import Container
from pathlib import Path

from tiering.tier import Files
from tiers.local.segments import SegmentGeometry

_HEADER = struct.Struct("<8sQQII")
_MAGIC = b"KVTMARK1"
_PREFIX = "written-"
_NAME = re.compile(rf"{_PREFIX}(0|[1-9][0-9]{{0,17}})")
_MOST_BYTES = 16 << 20


class _Generation:
    __slots__ = ("fd", "lock", "marked")

    def __init__(self, fd: int, marked: set[int]) -> None:
        self.fd = fd
        self.marked = marked
        self.lock = threading.Lock()


class WrittenMarks:
    """The marks of one directory. Any thread may call :meth:`mark`. Methods raise :class:`OSError`.

    Args:
        directory: the tier's directory.
        geometry: the shape of the segments.
        files: file operations to use.
        durable: marks survive a loss of power, not only the death of the process.
    """

    def __init__(self, directory: Path, geometry: SegmentGeometry, files: Files, *, durable: bool) -> None:
        self._directory = directory
        self._geometry = geometry
        self._files = files
        self._durable = durable
        self._current: _Generation | None = None
        self.generation = 0
        """Number of the current generation."""
        self.marked: Container[int] = range(geometry.max_segments)
        """Segments that need no :meth:`mark` before a write.

        Those are the ones that are marked in the current generation; all segments before the first generation.
        """

    def mark(self, segment: int) -> None:
        """Mark ``segment`` before a write into it. Callers may leave out the call for :attr:`marked` segments."""
        current = self._current
        if current is None:
            return
        with current.lock:
            if segment not in current.marked:
                self._files.write_all(current.fd, memoryview(b"\1"), _HEADER.size + segment)
                if self._durable:
                    self._files.fdatasync(current.fd)
                current.marked.add(segment)

    def begin(self) -> int:
        """Begin a new generation with nothing marked, and return its number.

        Older generations stay until :meth:`drop_before`.
        """
        number = max([self.generation, *self._numbers()]) + 1
        geometry = self._geometry
        header = _HEADER.pack(_MAGIC, number, geometry.slot_bytes, geometry.slots_per_segment, geometry.max_segments)
        path = self._path(number)
        self._files.replace(path, [header, bytes(geometry.max_segments)], durable=self._durable)
        self._use(number, self._files.open(path, os.O_RDWR), set())
        return number

    def resume(self, generation: int) -> set[int] | None:
        """Return the segments written since ``generation`` began, or None if they are unknown.

        Marking continues in the newest generation.
        """
        # The next generation must be later than this one, even if the file of this one is lost.
        self.generation = max(self.generation, generation)
        later = [number for number in self._numbers() if number >= generation]
        if generation not in later:
            return None
        marked: set[int] = set()
        for number in later:
            found = self._read(number)
            if found is None:
                return None
            marked |= found
        newest = max(later)
        try:
            fd = self._files.open(self._path(newest), os.O_RDWR)
        except OSError as error:
            if error.errno == errno.EEXIST:
                # The file is not this tier's alone. The next checkpoint begins another one.
                return None
            if error.errno != errno.EROFS:
                raise
            return marked
        self._use(newest, fd, self._read(newest) or set())
        return marked

    def drop_before(self, generation: int) -> None:
        """Delete older generations, because the checkpoint of ``generation`` is complete."""
        for number in self._numbers():
            if number < generation:
                self._files.unlink(self._path(number))

    def close(self) -> None:
        """Stop marking. No write may be running."""
        current, self._current = self._current, None
        if current is not None:
            self._files.close(current.fd)

    def _use(self, number: int, fd: int, marked: set[int]) -> None:
        # A write that uses the generation before this one was planned before the copy of the index. The checkpoint
        # names the slot of that write itself, so the write needs no mark.
        before, self._current = self._current, _Generation(fd, marked)
        self.marked = marked
        self.generation = number
        if before is not None:
            with before.lock:
                before.marked.update(range(self._geometry.max_segments))
                self._files.close(before.fd)

    def _path(self, number: int) -> Path:
        return self._directory / f"{_PREFIX}{number}"

    def _numbers(self) -> list[int]:
        with os.scandir(self._directory) as entries:
            return [int(match[1]) for entry in entries if (match := _NAME.fullmatch(entry.name)) is not None]

    def _read(self, number: int) -> set[int] | None:
        """Return the marks of generation ``number``; None if the file is not valid."""
        geometry = self._geometry
        try:
            data = self._files.read_all(self._path(number), _MOST_BYTES)
        except OSError:
            return None
        if len(data) < _HEADER.size:
            return None
        magic, written, slot_bytes, slots, segments = _HEADER.unpack_from(data)
        if (magic, written, slot_bytes, slots) != (_MAGIC, number, geometry.slot_bytes, geometry.slots_per_segment):
            return None
        if len(data) < _HEADER.size + segments:
            return None
        return {segment for segment, byte in enumerate(data[_HEADER.size :]) if byte}
