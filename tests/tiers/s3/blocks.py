"""Blocks to move in tests."""

from __future__ import annotations

import numpy as np

from tiering.block_store import BlockIO

HEADER_BYTES = 128


def block(place: str, payload_bytes: int = 4096, *, seed: int = 0) -> BlockIO:
    """A block of random bytes, header included (a store does not look at it)."""
    rng = np.random.default_rng(seed)
    return BlockIO(
        b"k" * 36,
        place,
        memoryview(bytearray(rng.bytes(HEADER_BYTES))),
        memoryview(bytearray(rng.bytes(payload_bytes))),
    )


def empty(place: str, payload_bytes: int = 4096) -> BlockIO:
    """Buffers for a block to be read."""
    return BlockIO(b"k" * 36, place, memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(payload_bytes)))


def content(moved: BlockIO) -> bytes:
    """Header and payload as they are on the medium."""
    return bytes(moved.header) + bytes(moved.payload)
