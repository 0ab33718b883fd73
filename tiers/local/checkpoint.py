"""The checkpoint: the table of a local tier as of a moment, in one file, so that a restart need not read a million headers.

The index is copied slice by slice while the tier works (:class:`CheckpointBuilder`); what changes meanwhile is covered,
because every segment written after the generation began is marked (:mod:`tiers.local.marks`) and read again at a
restart.  Slots that were being written at the moment of their copy are listed, and read again too.  So are segments
that are not the files that they were: the checkpoint has the inode of each, and the time at which it was last written.

The file: a header; the held blocks, least recently used first, as slots (4 bytes each), key lengths (2 each) and keys;
the slots that were being written; the foreign slots; the segments (4 bytes each), with inode and time (8 each).  Its
header has a version, the shape, the namespace and an xxh3-128 of everything.  A file that is not entirely right is not
used.
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
from tiers.local.layout import Geometry

CHECKPOINT_NAME = "checkpoint"

_MAGIC = b"KVTCKPT1"
_HEADER = struct.Struct("<8sIQIQ16sQQQQQ")
_DIGEST_BYTES = 16
_MOST_PER_SLOT = 1024
"""More bytes than a slot costs in a checkpoint, also one that was written with a far larger capacity; a longer file is refused."""
_MOST_BESIDE = 16 << 20
_VERSION = 2

Slots = NDArray[np.int32]
FileState = tuple[int, int]
"""Inode of a file, and when it was last written (nanoseconds since 1970)."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint.

    ``generation``: marks from there on say what is out of date.  ``sequence``: frames written before have lower
    numbers, frames written after higher ones.  ``slots[i]`` holds the block whose key is the i-th piece of ``keys``,
    ``lengths[i]`` bytes long; the least recently used comes first.  ``written``: slots that were being written;
    ``foreign``: slots with blocks of other namespaces. ``modified``: the segments, each with its inode and when it was
    last written (nanoseconds since 1970).
    """

    geometry: Geometry
    fingerprint: bytes
    generation: int
    sequence: int
    slots: Slots
    lengths: NDArray[np.uint16]
    keys: memoryview
    written: Slots
    foreign: Slots
    modified: dict[int, FileState] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slots)

    def key_batches(self, size: int) -> Iterator[tuple[list[bytes], Slots]]:
        """The held blocks in batches of ``size``, the least recently used batch first, each with its most recent block first."""
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
    """Collects slices on the scheduler's thread; :meth:`finish`, on the I/O side, makes them a checkpoint."""

    geometry: Geometry
    fingerprint: bytes
    generation: int
    sequence: int
    position: int = 0
    """The first slot that is not copied yet."""
    slices: list[SlotsSlice] = field(default_factory=list)

    def add(self, part: SlotsSlice) -> None:
        """The next slice."""
        self.slices.append(part)
        self.position = part.start + len(part.keys)

    def finish(self, modified: dict[int, FileState] | None = None) -> Checkpoint:
        """Sort and pack.  The slices are given up.  ``modified``: see :class:`Checkpoint`.

        In pieces, and in numpy where there are millions of items: this runs beside the scheduler, which needs the
        interpreter.
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
    """The rows of ``parts`` one below the other, padded to one width."""
    if not parts:
        return np.empty((0, 1), np.uint8)
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])


def _join(parts: list[NDArray[np.int64]]) -> Slots:
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)


def write_checkpoint(directory: Path, checkpoint: Checkpoint, files: Files) -> None:
    """Put ``checkpoint`` in the place of the one before, atomically and durably.  Raises :class:`OSError`."""
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
    """The checkpoint in ``directory``, of whatever namespace, or why it cannot be used.  Never raises, whatever the file holds."""
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
