"""The checkpoint: a local tier's block table at one moment, in one file.

With a checkpoint, a restart need not read a million headers. The index is copied slice by slice while the tier works
(:class:`CheckpointBuilder`). Three kinds of slots are read again at a restart:

- slots in segments written after the generation began, which are marked (:mod:`tiers.local.marks`);
- slots that were being written when they were copied, which the checkpoint lists;
- slots in segments whose files have changed: the checkpoint has the inode of each and the time of its last write.

The file has a header, then these parts. The held blocks come least recently used first, as slots (4 bytes each), key
lengths (2 each) and keys. The slots that were being written, the foreign slots, and the segments (4 bytes each) follow.
The last part is each segment's inode and time (8 bytes each). The header has a version, the shape, the namespace and an
xxh3-128 of everything. A file that is not entirely valid is not used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from tiering.secondary.files import Files
from tiering.secondary.index.slots import SlotsSlice
from tiers.local.segments import Geometry

CHECKPOINT_NAME = "checkpoint"

_MAGIC = b"KVTCKPT1"
_HEADER = struct.Struct("<8sIQIQ16sQQQQQ")
_DIGEST_BYTES = 16
_MOST_PER_SLOT = 1024
"""Upper bound of a checkpoint's bytes per slot; a longer file is refused.

It leaves room for checkpoints that were written with a far larger capacity.
"""
_MOST_BESIDE = 16 << 20
_VERSION = 2

Slots = NDArray[np.int32]
FileState = tuple[int, int]
"""Inode of a file, and time of its last write (nanoseconds since 1970)."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint."""

    geometry: Geometry
    """Shape of the segments."""
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
    keys: memoryview
    """The keys of the held blocks, one after another, in the order of ``slots``."""
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
        ends = np.cumsum(self.lengths, dtype=np.int64)
        keys = self.keys
        for start in range(0, len(self.slots), size):
            batch_ends = ends[start : start + size]
            stops = batch_ends[::-1].tolist()
            starts = (batch_ends - self.lengths[start : start + size])[::-1].tolist()
            yield (
                [bytes(keys[begin:stop]) for begin, stop in zip(starts, stops, strict=True)],
                self.slots[start : start + size][::-1],
            )


@dataclass(slots=True)
class CheckpointBuilder:
    """A copy of the index in progress. Its result is a :class:`Checkpoint`.

    The scheduler's thread adds slices; the I/O side calls :meth:`finish`.
    """

    geometry: Geometry
    fingerprint: bytes
    generation: int
    sequence: int
    position: int = 0
    """First slot that is not copied yet."""
    slices: list[SlotsSlice] = field(default_factory=list)
    """The slices copied so far."""

    def add(self, part: SlotsSlice) -> None:
        """Add the next slice."""
        self.slices.append(part)
        self.position = part.start + len(part.keys)

    def finish(self, modified: dict[int, FileState] | None = None) -> Checkpoint:
        """Return the slices as a checkpoint, and drop them.

        The work is done in pieces, and in numpy where there are millions of items: it runs beside the scheduler, which
        needs the GIL.

        Args:
            modified: state of each segment's file; default: none.
        """
        keys: list[NDArray[np.uint8]] = []
        lengths: list[NDArray[np.uint16]] = []
        slots: list[NDArray[np.int64]] = []
        used: list[NDArray[np.int64]] = []
        written: list[NDArray[np.int64]] = []
        foreign: list[NDArray[np.int64]] = []
        self.slices.reverse()
        while self.slices:
            part = self.slices.pop()
            held = (part.keys != None) & ~part.written  # noqa: E711  # element by element
            names = part.keys[held].tolist()
            if names:
                lengths.append(np.fromiter(map(len, names), np.uint16, len(names)))
                keys.append(np.array(names, f"S{lengths[-1].max()}").view(np.uint8).reshape(len(names), -1))
                slots.append(np.flatnonzero(held) + part.start)
                used.append(part.used[held])
            written.append(np.flatnonzero(part.written) + part.start)
            foreign.append(np.flatnonzero(part.foreign) + part.start)
        all_slots = _join(slots)
        order = np.argsort(np.concatenate(used) if used else np.empty(0, np.int64))
        ordered_lengths = (np.concatenate(lengths) if lengths else np.empty(0, np.uint16))[order]
        matrix = _stack(keys)[order]
        if len(matrix) and ordered_lengths.min() < matrix.shape[1]:
            matrix = matrix[np.arange(matrix.shape[1]) < ordered_lengths[:, None]]
        return Checkpoint(
            self.geometry,
            self.fingerprint,
            self.generation,
            self.sequence,
            all_slots[order],
            ordered_lengths,
            np.ascontiguousarray(matrix).reshape(-1).data,
            _join(written),
            _join(foreign),
            modified or {},
        )


def _stack(parts: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the rows of ``parts`` in one array, padded to one width."""
    if not parts:
        return np.empty((0, 1), np.uint8)
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])


def _join(parts: list[NDArray[np.int64]]) -> Slots:
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)


def write_checkpoint(directory: Path, checkpoint: Checkpoint, files: Files) -> None:
    """Replace the checkpoint in ``directory`` by ``checkpoint``, atomically and durably.

    Raises:
        OSError: the file cannot be written.
    """
    geometry = checkpoint.geometry
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        geometry.slot_bytes,
        geometry.slots_per_segment,
        checkpoint.generation,
        checkpoint.fingerprint,
        checkpoint.sequence,
        len(checkpoint),
        len(checkpoint.written),
        len(checkpoint.foreign),
        len(checkpoint.modified),
    )
    numbers = np.fromiter(checkpoint.modified.keys(), np.int32, len(checkpoint.modified))
    states = np.array(list(checkpoint.modified.values()), np.uint64).reshape(-1)
    blocks = (checkpoint.slots.data, checkpoint.lengths.data, checkpoint.keys)
    views = (*blocks, checkpoint.written.data, checkpoint.foreign.data, numbers.data, states.data)
    body = [view.cast("B") for view in views if len(view)]
    digest = xxh3_128(header)
    for part in body:
        digest.update(part)
    files.replace(directory / CHECKPOINT_NAME, [header, digest.digest(), *body])


def read_checkpoint(directory: Path, geometry: Geometry, files: Files | None = None) -> Checkpoint | str:
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
    magic, version, slot_bytes, slots, generation, owner, sequence, *counts = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        return "it is of another version"
    body = data[_HEADER.size + _DIGEST_BYTES :]
    digest = xxh3_128(data[: _HEADER.size])
    digest.update(body)
    if digest.digest() != data[_HEADER.size : _HEADER.size + _DIGEST_BYTES]:
        return "its checksum is wrong"
    held, written, foreign, segments = counts
    if (slot_bytes, slots) != (geometry.slot_bytes, geometry.slots_per_segment):
        return "it is of another slot size"
    position = 0

    def take(dtype: type[np.generic], count: int) -> NDArray[np.generic]:
        nonlocal position
        size = count * np.dtype(dtype).itemsize
        part = np.frombuffer(body[position : position + size], dtype)
        position += size
        return part

    held_slots = take(np.int32, held).astype(np.int32)
    lengths = take(np.uint16, held).astype(np.uint16)
    keys = body[position : position + int(lengths.sum(dtype=np.int64))]
    position += len(keys)
    written_slots = take(np.int32, written).astype(np.int32)
    foreign_slots = take(np.int32, foreign).astype(np.int32)
    numbers, states = take(np.int32, segments), take(np.uint64, 2 * segments)
    modified = dict(zip(numbers.tolist(), map(tuple, states.reshape(-1, 2).tolist()), strict=True))
    return Checkpoint(
        geometry, owner, generation, sequence, held_slots, lengths, keys, written_slots, foreign_slots, modified
    )
