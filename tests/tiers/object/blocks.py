"""Blocks for the tests of the object store."""

from __future__ import annotations

import numpy as np

from tiering.medium.block_store import BlockIO

HEADER_BYTES = 128


def block(place: str, payload_bytes: int = 4096, *, seed: int = 0) -> BlockIO:
    """Return a block of random bytes, header included; a store does not check the header."""
    rng = np.random.default_rng(seed)
    return BlockIO(
        b"k" * 36,
        place,
        memoryview(bytearray(rng.bytes(HEADER_BYTES))),
        memoryview(bytearray(rng.bytes(payload_bytes))),
    )


def empty(place: str, payload_bytes: int = 4096) -> BlockIO:
    """Return empty buffers for a get."""
    return BlockIO(b"k" * 36, place, memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(payload_bytes)))


def content(moved: BlockIO) -> bytes:
    """Return header and payload as they lie on the medium."""
    return bytes(moved.header) + bytes(moved.payload)
