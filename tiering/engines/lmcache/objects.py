"""LMCache's objects as blocks, and the record of those that this process has stored.

An object has any size; it is cut into blocks of the largest size, and one block for the rest. Nothing here imports
LMCache; its objects are read by attribute.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.manager import OffloadingEvent

_LEAST_BYTES = 4096
"""Size in bytes of the smallest blocks."""

_SIZES = 8
"""Largest number of sizes of blocks."""

_LAYOUTS = 256
"""Number of layouts that are kept; a server has a few."""

_encode = json.JSONEncoder(sort_keys=True).encode

MOST_BLOCKS = 1 << 18
"""Largest number of blocks whose objects are recorded, in about 100 MB."""


def block_sizes(largest: int) -> list[int]:
    """Return the sizes of blocks, one per KV-cache group: the largest one, its half, and so on."""
    return [size for number in range(_SIZES) if (size := largest >> number) >= _LEAST_BYTES or not number]


@dataclass(frozen=True, slots=True)
class Layout:
    """The bytes and the meaning of an object: objects of other layouts have other keys."""

    nbytes: int
    text: str
    """Shapes and dtypes of the object's tensors."""


def layout_of(shapes: Iterable[Any] | None, dtypes: Iterable[Any] | None) -> Layout | None:
    """Return the layout of an object; None if it has no shapes.

    Args:
        shapes: shapes of the object's tensors.
        dtypes: dtypes of the tensors.
    """
    return _layout_of(tuple([tuple(shape) for shape in shapes or ()]), tuple(dtypes or ()))


@lru_cache(_LAYOUTS)
def _layout_of(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> Layout | None:
    pairs = [([int(n) for n in shape], dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    if not pairs:
        return None
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)
    return Layout(nbytes, json.dumps([[shape, str(dtype)] for shape, dtype in pairs]))


@dataclass(frozen=True, slots=True)
class Part:
    """A block of an object."""

    key: OffloadKey
    start: int
    """Position of the block's first byte in the object."""
    nbytes: int


def parts_of(key: Any, layout: Layout, sizes: Sequence[int]) -> list[Part]:
    """Return the blocks of an object.

    Args:
        key: LMCache's key; all of its fields count: model, rank, group, salt, hash.
        layout: the object's layout.
        sizes: the sizes of blocks.
    """
    fields = {name: getattr(key, name) for name in _names_of(key.__class__)}
    plain = {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}
    base = hashlib.sha256(_encode([plain, layout.nbytes, layout.text]).encode()).digest()
    parts = []
    for number, start in enumerate(range(0, layout.nbytes, sizes[0])):
        nbytes = min(sizes[0], layout.nbytes - start)
        group = max(index for index, size in enumerate(sizes) if size >= nbytes)
        name = hashlib.sha256(base + number.to_bytes(4, "big")).digest()
        parts.append(Part(make_offload_key(name, group), start, nbytes))
    return parts


@lru_cache
def _names_of(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of the fields of a kind of key."""
    return tuple([field.name for field in dataclasses.fields(kind)])


@dataclass(frozen=True, slots=True)
class Buffer:
    """An object of a task, and its bytes in LMCache's memory."""

    position: int
    """Position in the task."""
    key: Any
    layout: Layout
    content: NDArray[np.uint8]
    parts: Sequence[Part]

    def pieces(self) -> list[NDArray[np.uint8]]:
        """Return the bytes of each block."""
        return [self.content[part.start : part.start + part.nbytes] for part in self.parts]


def buffer_of(position: int, key: Any, memory: Any, sizes: Sequence[int]) -> Buffer | None:
    """Return the bytes of one of LMCache's memory objects; None unless they are those of its layout.

    Args:
        position: position in the task.
        key: LMCache's key.
        memory: LMCache's memory object.
        sizes: the sizes of blocks.

    Raises:
        NotImplementedError: the object is not in CPU memory.
    """
    meta = memory.metadata
    layout = layout_of(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])
    content = np.frombuffer(memory.byte_array, np.uint8)
    if layout is None or not len(content) or len(content) != layout.nbytes:
        return None
    return Buffer(position, key, layout, content, parts_of(key, layout, sizes))


@dataclass(slots=True)
class _Object:
    """An object that this process has stored."""

    layout: Layout
    parts: Sequence[OffloadKey]
    is_deleted: bool = False


class Ledger:
    """The objects that this process has stored, until one of their blocks is in no tier any more.

    Of more than the largest number of blocks, the oldest objects are dropped: they are neither hidden nor reported.
    Any thread may call all methods.

    Args:
        most: largest number of blocks; default :data:`MOST_BLOCKS`.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._objects: dict[Any, _Object] = {}
        self._owners: dict[OffloadKey, Any] = {}
        self._tiers: dict[OffloadKey, int] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def layout(self, key: Any) -> Layout | None:
        """Return the layout in which an object was stored last; None if it is not known."""
        found = self._objects.get(key)
        return None if found is None else found.layout

    def is_deleted(self, key: Any) -> bool:
        """Return True if LMCache has deleted an object, and has not stored it again."""
        found = self._objects.get(key)
        return found is not None and found.is_deleted

    def add(self, key: Any, layout: Layout, parts: Sequence[OffloadKey]) -> tuple[bool, int]:
        """Note an object that was stored; return True if it is new, and the bytes of the one that it replaces."""
        with self._lock:
            before = self._objects.get(key)
            if before is not None and before.layout == layout and not before.is_deleted:
                return False, 0
            if before is not None:
                self._drop(key)
            self._objects[key] = _Object(layout, parts)
            self._owners.update(dict.fromkeys(parts, key))
            while len(self._owners) > self._most and len(self._objects) > 1:
                self._drop(next(iter(self._objects)))
            return True, 0 if before is None or before.is_deleted else before.layout.nbytes

    def delete(self, keys: Iterable[Any]) -> list[tuple[Any, int]]:
        """Hide objects, and return those that were not hidden before, with their sizes in bytes."""
        with self._lock:
            found = [(key, each) for key in keys if (each := self._objects.get(key)) and not each.is_deleted]
            for _, each in found:
                each.is_deleted = True
            return [(key, each.layout.nbytes) for key, each in found]

    def note(self, events: Iterable[OffloadingEvent]) -> list[tuple[Any, int]]:
        """Follow the blocks in the tiers; return objects that no tier holds whole any more, and their sizes."""
        gone: list[tuple[Any, int]] = []
        with self._lock:
            while len(self._tiers) > 2 * self._most:
                del self._tiers[next(iter(self._tiers))]
            for event in events:
                for key in event.keys:
                    tiers = self._tiers.get(key, 0) + (-1 if event.removed else 1)
                    if tiers > 0:
                        self._tiers[key] = tiers
                        continue
                    self._tiers.pop(key, None)
                    if (owner := self._owners.get(key)) is not None:
                        found = self._drop(owner)
                        if not found.is_deleted:
                            gone.append((owner, found.layout.nbytes))
        return gone

    def _drop(self, key: Any) -> _Object:
        found = self._objects.pop(key)
        for part in found.parts:
            self._owners.pop(part, None)
        return found
