"""A store in a dictionary for tests, and damage to a store's files."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tiering.errors import PermanentStoreError
from tiering.medium.block_store import BlockIO, BlockStore, Done, Outcome, Place, StoreProbe, StoreTraits


class DictStore(BlockStore):
    """A store whose frames are in a dictionary, which tests may read and change.

    It raises :class:`PermanentStoreError` if buffers break the contract of stores.

    Args:
        header_bytes: bytes of a header; default: 128.
        alignment: required alignment of buffers, in bytes; default: 1.
        variable_size: True for a store that takes blocks of any length, as object stores do; default: False.
    """

    def __init__(self, *, header_bytes: int = 128, alignment: int = 1, variable_size: bool = False) -> None:
        self._traits = StoreTraits("MEMORY", header_bytes, alignment, variable_size, batches=True)
        self.frames: dict[Place, bytearray] = {}
        """Header and payload of each block, by place."""
        self.documents: dict[str, bytes] = {}
        self.calls: list[tuple[str, tuple[Place, ...]]] = []
        """("put" or "get", places) of each batch, in order."""
        self._lock = threading.Lock()

    @property
    def traits(self) -> StoreTraits:
        return self._traits

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        self._note("put", blocks)
        return super().put(blocks)

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        self._note("get", blocks)
        return super().get(blocks)

    def put_one(self, block: BlockIO) -> None:
        self._check(block)
        self.frames[block.place] = bytearray(block.header) + block.payload

    def get_one(self, block: BlockIO) -> Done:
        self._check(block)
        frame = self.frames.get(block.place)
        if frame is None:
            return Done.ABSENT
        size = len(frame) - self.traits.header_bytes
        if size < 0 or (size != len(block.payload) and not self.traits.variable_size) or size > len(block.payload):
            raise PermanentStoreError(f"{size} bytes at {block.place!r} do not fit {len(block.payload)}")
        _copy(block.header, frame[: self.traits.header_bytes])
        _copy(block.payload[:size], frame[self.traits.header_bytes :])
        if self.traits.variable_size:
            block.filled = size
        return Done.DONE

    def delete(self, places: Sequence[Place]) -> None:
        for place in places:
            self.frames.pop(place, None)

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        return StoreProbe(tuple(place in self.frames for place in places))

    def read_document(self, name: str) -> bytes | None:
        return self.documents.get(name)

    def write_document(self, name: str, data: bytes) -> None:
        self.documents[name] = bytes(data)

    def list_documents(self, prefix: str) -> Iterable[str]:
        return [name for name in self.documents if name.startswith(prefix)]

    def _note(self, operation: str, blocks: Sequence[BlockIO]) -> None:
        with self._lock:
            self.calls.append((operation, tuple(block.place for block in blocks)))

    def _check(self, block: BlockIO) -> None:
        if len(block.header) != self.traits.header_bytes:
            raise PermanentStoreError(
                f"a header buffer of {len(block.header)} bytes; the store asks for {self.traits.header_bytes}"
            )
        for view in (block.header, block.payload):
            address = np.frombuffer(view, np.uint8).ctypes.data
            if (address | len(view)) % self.traits.alignment:
                raise PermanentStoreError(
                    f"a buffer of {len(view)} bytes at {address:#x}, not aligned to {self.traits.alignment}"
                )


def flip_bit(path: Path, bit: int) -> None:
    """Flip bit number ``bit`` of a file, in place."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << (bit % 8))]))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Write ``data`` into a file at ``offset``, in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _copy(into: memoryview, data: bytes | bytearray) -> None:
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
