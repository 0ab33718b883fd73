"""The checkpoint: a local tier's block table at one moment, and the marks of later writes.

With a checkpoint, a restart need not read a million headers. The index is copied slice by slice while the tier works,
and each slice is written before the next one is copied (:class:`CheckpointWriter`). Three kinds of slots are read again
at a restart:

- slots in segments written after the generation began, which are marked;
- slots that were being written when they were copied, which the checkpoint lists;
- slots in segments whose files have changed: the checkpoint has the inode of each and the time of its last write.

The file has a header, then one piece per slice, in the order of the slots. A piece has the number of held blocks, of
slots that were being written, and of foreign slots (4 bytes each). The held blocks follow: their slots (4 bytes each),
numbers that grow with the last use (8 each), key lengths (2 each) and keys. The other slots of the piece follow (4
bytes each). After the pieces come the segments (4 bytes each), and each segment's inode and time (8 bytes each). The
header has a version, the shape, the namespace, the numbers of blocks, pieces and segments, and an xxh3-128 of
everything: of the rest of the file, then of the header. A file that is not entirely valid is not used.

Version 2 has no pieces: all held blocks come least recently used first, without the numbers, then the slots that were
being written and the foreign ones. Its checksum begins with the header.

Marks are on disk before the first write into each segment. A *generation* begins just before the index is copied for a
checkpoint, which names the generation. The file ``written-<generation>`` has a header and one byte per segment, which
is not zero if the segment was written or about to be written.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import threading
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from tiering.tier import Files, SlotsSlice, fresh_name
from tiers.local.layout import SegmentGeometry
from tiers.local.segments import Segments

CHECKPOINT_NAME = "checkpoint"

_MAGIC = b"KVTCKPT1"
_HEADER = struct.Struct("<8sIQIQ16sQQQQQ")
"""The last four numbers count held blocks, pieces, none and segments; version 2 differs, see above."""
_PIECE = struct.Struct("<III")
_DIGEST_BYTES = 16
_MOST_PER_SLOT = 1024
"""Upper bound of a checkpoint's bytes per slot; a longer file is refused.

It leaves room for checkpoints that were written with a far larger capacity.
"""
_MOST_BESIDE = 16 << 20
_VERSION = 3

_MARKS = struct.Struct("<8sQQII")
_MARKED = b"KVTMARK1"
_WRITTEN = "written-"
_WRITTEN_NAME = re.compile(rf"{_WRITTEN}(0|[1-9][0-9]{{0,17}})")
_MOST_MARKS_BYTES = 16 << 20

Slots = NDArray[np.int32]
FileState = tuple[int, int]
"""Inode of a file, and time of its last write (nanoseconds since 1970)."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint."""

    geometry: SegmentGeometry
    fingerprint: bytes
    """Fingerprint of the namespace and epoch of the held blocks."""
    generation: int
    """Generation of marks. Marks of this generation and later ones name the segments that are out of date."""
    sequence: int
    """Sequence number of the checkpoint.

    Frames written before have lower numbers, later frames higher ones.
    """
    slots: Slots
    """Slots of the held blocks, the least recently used first."""
    lengths: NDArray[np.uint16]
    """Bytes of each held block's key, in the order of ``slots``."""
    places: NDArray[np.int64]
    """Position of each held block's key in ``data``, in the order of ``slots``."""
    data: memoryview
    written: Slots
    """Slots that were being written."""
    foreign: Slots
    """Slots with blocks of other namespaces."""
    modified: dict[int, FileState] = field(default_factory=dict)
    """State of each segment's file."""

    def __len__(self) -> int:
        return len(self.slots)

    def key_batches(self, size: int) -> Iterator[tuple[list[bytes], Slots]]:
        """Yield the held blocks in batches of ``size``.

        The least recently used batch comes first; within a batch, the most recently used block comes first.
        """
        data = self.data
        for start in range(0, len(self.slots), size):
            begins = self.places[start : start + size][::-1]
            stops = (begins + self.lengths[start : start + size][::-1]).tolist()
            yield (
                [bytes(data[begin:stop]) for begin, stop in zip(begins.tolist(), stops, strict=True)],
                self.slots[start : start + size][::-1],
            )


class CheckpointWriter:
    """A checkpoint in progress. The I/O side adds the slices, one at a time.

    A writer holds no open file and no memory, so that one that is not finished needs no end.

    Args:
        segments: the segments whose slots are copied.
        fingerprint: fingerprint of the namespace and epoch.
        generation: generation of marks that has begun.
        sequence: sequence number of the checkpoint.
    """

    def __init__(self, segments: Segments, fingerprint: bytes, generation: int, sequence: int) -> None:
        self.generation = generation
        self._path = segments.directory / CHECKPOINT_NAME
        self._geometry, self._files = segments.geometry, segments.files
        self._fingerprint = fingerprint
        self._sequence = sequence
        self._blocks = self._pieces = 0
        self._digest = xxh3_128()
        self._end = _HEADER.size + _DIGEST_BYTES

    def add(self, part: SlotsSlice) -> None:
        """Write the next slice.

        Raises:
            OSError: the file cannot be written.
        """
        held, written, foreign = (np.flatnonzero(mask) for mask in (part.held, part.written, part.foreign))
        keys: list[bytes] = part.keys[held].tolist()
        piece = [
            _PIECE.pack(len(held), len(written), len(foreign)),
            _numbers(held, part.start),
            part.used[held].tobytes(),
            np.fromiter(map(len, keys), np.uint16, len(keys)).tobytes(),
            *keys,
            _numbers(written, part.start),
            _numbers(foreign, part.start),
        ]
        if not self._pieces:
            self._files.unlink(fresh_name(self._path))
        self._append(b"".join(piece), os.O_CREAT | os.O_EXCL if not self._pieces else 0)
        self._pieces += 1
        self._blocks += len(held)

    def finish(self, modified: Mapping[int, FileState]) -> int:
        """Replace the checkpoint in the directory by the slices, at least one, atomically and durably.

        Args:
            modified: state of each segment's file.

        Returns:
            The number of blocks in the checkpoint.

        Raises:
            OSError: the file cannot be written.
        """
        numbers = np.fromiter(modified.keys(), np.int32, len(modified))
        self._append(numbers.tobytes() + np.array(list(modified.values()), np.uint64).tobytes())
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self._geometry.slot_bytes,
            self._geometry.slots_per_segment,
            self.generation,
            self._fingerprint,
            self._sequence,
            self._blocks,
            self._pieces,
            0,
            len(modified),
        )
        self._digest.update(header)
        self._files.complete(self._path, header + self._digest.digest())
        return self._blocks

    def _append(self, data: bytes, flags: int = 0) -> None:
        fd = self._files.open(fresh_name(self._path), os.O_WRONLY | flags)
        try:
            self._files.write_all(fd, memoryview(data), self._end)
        finally:
            self._files.close(fd)
        self._digest.update(data)
        self._end += len(data)


def _numbers(positions: NDArray[np.int64], start: int) -> bytes:
    return (positions + start).astype(np.int32).tobytes()


def read_checkpoint(directory: Path, geometry: SegmentGeometry, files: Files | None = None) -> Checkpoint | str:
    """Return the checkpoint in ``directory``, or the reason why it cannot be used.

    Never raises, whatever the file contains. The checkpoint may belong to any namespace.
    """
    try:
        limit = _MOST_BESIDE + _MOST_PER_SLOT * geometry.num_slots
        data = (files or Files()).read_all(directory / CHECKPOINT_NAME, limit)
    except FileNotFoundError:
        return "there is none"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    if len(data) < _HEADER.size + _DIGEST_BYTES:
        return "it is truncated"
    magic, version, slot_bytes, slots, *_ = _HEADER.unpack_from(data)
    if magic != _MAGIC or version not in (2, _VERSION):
        return "it is of another version"
    header, body = data[: _HEADER.size], data[_HEADER.size + _DIGEST_BYTES :]
    digest = xxh3_128()
    for part in (header, body) if version == 2 else (body, header):
        digest.update(part)
    if digest.digest() != data[_HEADER.size : _HEADER.size + _DIGEST_BYTES]:
        return "its checksum is wrong"
    if (slot_bytes, slots) != (geometry.slot_bytes, geometry.slots_per_segment):
        return "it is of another slot size"
    try:
        return _parse(geometry, version, data)
    except (ValueError, OverflowError, struct.error):
        return "its parts do not fit together"


def _parse(geometry: SegmentGeometry, version: int, data: memoryview) -> Checkpoint:
    """Return the checkpoint in a file whose checksum is right.

    Raises:
        ValueError, OverflowError, struct.error: the parts are not as many or as long as the numbers say.
    """
    *_, generation, owner, sequence, held, second, third, segments = _HEADER.unpack_from(data)
    position = _HEADER.size + _DIGEST_BYTES

    def take(dtype: type[np.generic], count: int) -> NDArray[Any]:
        nonlocal position
        part = np.frombuffer(data, dtype, count, position) if count else np.empty(0, dtype)
        position += part.nbytes
        return part

    pieces: list[list[NDArray[Any]]] = []
    for _ in range(second if version > 2 else 1):
        counts = (held, second, third)
        if version > 2:
            counts = _PIECE.unpack_from(data, position)
            position += _PIECE.size
        slots = take(np.int32, counts[0])
        used = take(np.int64, counts[0]) if version > 2 else np.arange(held)
        lengths = take(np.uint16, counts[0])
        ends = position + np.cumsum(lengths, dtype=np.int64)
        position = int(ends[-1]) if len(ends) else position
        pieces.append([slots, used, lengths, ends - lengths, take(np.int32, counts[1]), take(np.int32, counts[2])])
    slots, used, lengths, places, written, foreign = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    numbers, states = take(np.int32, segments), take(np.uint64, 2 * segments)
    if len(slots) != held or position != len(data):
        raise ValueError
    order = np.argsort(used)
    return Checkpoint(
        geometry,
        owner,
        generation,
        sequence,
        slots[order],
        lengths[order],
        places[order],
        data,
        written,
        foreign,
        dict(zip(numbers.tolist(), map(tuple, states.reshape(-1, 2).tolist()), strict=True)),
    )


class _Generation:
    __slots__ = ("fd", "lock", "marked")

    def __init__(self, fd: int, marked: set[int]) -> None:
        self.fd = fd
        self.marked = marked
        self.lock = threading.Lock()


class WrittenMarks:
    """The marks of one directory. Any thread may call :meth:`mark`. Methods raise :class:`OSError`.

    Args:
        segments: the segments to mark.
        durable: marks survive a loss of power, not only the death of the process.
    """

    def __init__(self, segments: Segments, *, durable: bool) -> None:
        self._directory, self._geometry, self._files = segments.directory, segments.geometry, segments.files
        self._durable = durable
        self._current: _Generation | None = None
        self.generation = 0
        self.marked: Container[int] = range(segments.geometry.max_segments)
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
                self._files.write_all(current.fd, memoryview(b"\1"), _MARKS.size + segment)
                if self._durable:
                    self._files.fdatasync(current.fd)
                current.marked.add(segment)

    def begin(self) -> int:
        """Begin a new generation with nothing marked, and return its number.

        Older generations stay until :meth:`drop_before`.
        """
        number = max([self.generation, *self._numbers()]) + 1
        geometry = self._geometry
        header = _MARKS.pack(_MARKED, number, geometry.slot_bytes, geometry.slots_per_segment, geometry.max_segments)
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
        known = self._read(newest) or set()
        try:
            fd = self._files.open(self._path(newest), os.O_RDWR)
        except OSError as error:
            if error.errno == errno.EEXIST:
                # The file is not this tier's alone. The next checkpoint begins another one.
                return None
            if error.errno != errno.EROFS:
                raise
            return marked
        self._use(newest, fd, known)
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
        return self._directory / f"{_WRITTEN}{number}"

    def _numbers(self) -> list[int]:
        with os.scandir(self._directory) as entries:
            return [int(match[1]) for entry in entries if (match := _WRITTEN_NAME.fullmatch(entry.name)) is not None]

    def _read(self, number: int) -> set[int] | None:
        """Return the marks of generation ``number``; None if the file is not valid."""
        geometry = self._geometry
        try:
            data = self._files.read_all(self._path(number), _MOST_MARKS_BYTES)
        except OSError:
            return None
        if len(data) < _MARKS.size:
            return None
        magic, written, slot_bytes, slots, segments = _MARKS.unpack_from(data)
        if (magic, written, slot_bytes, slots) != (
            _MARKED,
            number,
            geometry.slot_bytes,
            geometry.slots_per_segment,
        ):
            return None
        if len(data) < _MARKS.size + segments:
            return None
        return {segment for segment, byte in enumerate(data[_MARKS.size :]) if byte}
