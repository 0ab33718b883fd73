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
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from tiering.tier import Files, SlotIndex
from tiers.local.segments import SegmentGeometry

CHECKPOINT_NAME = "checkpoint"

PIECE_BLOCKS = 1 << 15
"""Blocks that are written together. Their keys take a few megabytes."""

_MAGIC = b"KVTCKPT1"
_HEADER = struct.Struct("<8sIQIQ16sQQQQQ")
_DIGEST_BYTES = 16
_MOST_PER_SLOT = 1024
"""Upper bound of a checkpoint's bytes per slot; a longer file is refused.

It leaves room for checkpoints that were written with a far larger capacity.
"""
_MOST_BESIDE = 16 << 20
_VERSION = 2
_SLOT_BITS = 29

Slots = NDArray[np.int32]
FileState = tuple[int, int]
"""Inode of a file, and time of its last write (nanoseconds since 1970)."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint."""

    geometry: SegmentGeometry
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


class CheckpointBuilder:
    """A copy of the index in progress.

    For each slot, the copy has a reference to the key, and 8 bytes for the order.

    The scheduler's thread copies slices. The I/O side then calls :func:`write_checkpoint`, which writes piece by piece:
    it runs beside the scheduler, which needs the GIL, and its memory does not grow with the file.

    Args:
        geometry: shape of the segments.
        fingerprint: fingerprint of the namespace and epoch.
        generation: generation of marks that has begun.
        sequence: sequence number of the checkpoint.
    """

    def __init__(self, geometry: SegmentGeometry, fingerprint: bytes, generation: int, sequence: int) -> None:
        self.geometry = geometry
        self.fingerprint = fingerprint
        self.generation = generation
        self.sequence = sequence
        self.position = 0
        """First slot that is not copied yet."""
        self._starts: list[int] = []
        self._keys: deque[NDArray[np.object_]] = deque()
        """Key of each slot, by slices."""
        self._order: NDArray[np.int64] = np.empty(geometry.num_slots, np.int64)
        """Last use and slot of each held block in one number."""
        self._held = 0
        self._written: list[NDArray[np.int64]] = []
        self._foreign: list[NDArray[np.int64]] = []

    def copy(self, index: SlotIndex, slots: int) -> bool:
        """Copy the records of the next ``slots`` slots of ``index``, and return True once all are copied."""
        part = index.slice(self.position, min(self.position + slots, self.geometry.num_slots))
        held = np.flatnonzero(part.held)
        # Uses beyond 2 ** 34 share a number with their neighbours, and the order is less exact.
        first, self._held = self._held, self._held + len(held)
        self._order[first : self._held] = (part.used[held] >> part.coarse << _SLOT_BITS) + (held + part.start)
        self._starts.append(part.start)
        self._keys.append(part.keys)
        self._written.append(np.flatnonzero(part.written) + part.start)
        self._foreign.append(np.flatnonzero(part.foreign) + part.start)
        self.position = part.start + len(part.keys)
        return self.position == self.geometry.num_slots

    def finish(self) -> tuple[NDArray[np.int64], Slots, Slots]:
        """Return the held slots, the least recently used first, those being written, and the foreign."""
        order = self._order[: self._held]
        order.sort()
        order &= (1 << _SLOT_BITS) - 1
        return order, _join(self._written), _join(self._foreign)

    def keys_of(self, slots: NDArray[np.int64]) -> list[bytes]:
        """Return the keys of held ``slots``."""
        by_slot = np.argsort(slots)
        sorted_slots = slots[by_slot]
        bounds = [*np.searchsorted(sorted_slots, self._starts).tolist(), len(slots)]
        found = np.empty(len(slots), object)
        for keys, start, first, last in zip(self._keys, self._starts, bounds, bounds[1:], strict=False):
            if first < last:
                found[by_slot[first:last]] = keys[sorted_slots[first:last] - start]
        names: list[bytes] = found.tolist()
        return names

    def release(self) -> None:
        """Drop the copy, a slice at a time."""
        while self._keys:
            self._keys.popleft()
            time.sleep(0)


def _join(parts: list[NDArray[np.int64]]) -> Slots:
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)


def write_checkpoint(
    directory: Path, builder: CheckpointBuilder, files: Files, modified: dict[int, FileState] | None = None
) -> int:
    """Replace the checkpoint in ``directory`` by the copy in ``builder``, atomically and durably.

    Args:
        directory: the directory.
        builder: the copy, which is empty afterwards.
        files: file operations.
        modified: state of each segment's file; default: none.

    Returns:
        The number of blocks in the checkpoint.

    Raises:
        OSError: the file cannot be written.
    """
    geometry, modified = builder.geometry, modified or {}
    slots, written, foreign = builder.finish()
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        geometry.slot_bytes,
        geometry.slots_per_segment,
        builder.generation,
        builder.fingerprint,
        builder.sequence,
        len(slots),
        len(written),
        len(foreign),
        len(modified),
    )
    numbers = np.fromiter(modified.keys(), np.int32, len(modified))
    states = np.array(list(modified.values()), np.uint64).reshape(-1)
    digest = xxh3_128(header)

    def content() -> Iterator[bytes | memoryview]:
        for start in range(0, len(slots), PIECE_BLOCKS):
            yield slots[start : start + PIECE_BLOCKS].astype(np.int32).data
        # The keys are looked up twice, because all lengths come first.
        for start in range(0, len(slots), PIECE_BLOCKS):
            names = builder.keys_of(slots[start : start + PIECE_BLOCKS])
            yield np.fromiter(map(len, names), np.uint16, len(names)).data
        for start in range(0, len(slots), PIECE_BLOCKS):
            yield b"".join(builder.keys_of(slots[start : start + PIECE_BLOCKS]))
        for rest in (written, foreign, numbers, states):
            if len(rest):
                yield rest.data

    def parts() -> Iterator[bytes | memoryview]:
        yield header + bytes(_DIGEST_BYTES)
        for part in content():
            digest.update(part)
            yield part

    try:
        files.replace(directory / CHECKPOINT_NAME, parts(), start=lambda: header + digest.digest())
    finally:
        builder.release()
    return len(slots)


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
