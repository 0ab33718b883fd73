"""Framed blocks in aligned memory, for tests that call a store directly.

The blocks are like those that the I/O side hands to a store.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from tiering.errors import CorruptBlockError
from tiering.medium.block_store import BlockIO, BlockStore, Done, Outcome, Place
from tiering.medium.frame import HEADER_BYTES, SEQUENCE, encode_header, verify, verify_raw
from tiering.testing.keys import key_of

FINGERPRINT = bytes(range(16))
"""Fingerprint of the namespace of these blocks."""


def random_bytes(size: int, seed: int) -> NDArray[np.uint8]:
    """Return ``size`` bytes that depend on ``seed`` only."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def aligned(size: int) -> memoryview:
    """Return ``size`` zeroed bytes that start on a page boundary."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def block_to_put(store: BlockStore, place: Place, size: int, *, number: int = 0, version: int = 0) -> BlockIO:
    """Return a block that is ready to be put.

    Args:
        store: the store, which determines the header's size.
        place: the block's place.
        size: bytes of the payload.
        number: determines the key and the content; default: 0.
        version: determines the content, together with ``number``; default: 0.
    """
    payload = aligned(size)
    np.copyto(np.frombuffer(payload, np.uint8), random_bytes(size, number * 1000 + version))
    header = aligned(store.traits.header_bytes)
    encode_header(
        header,
        key=key_of(number),
        fingerprint=FINGERPRINT,
        sequence=SEQUENCE.take(1),
        raw_length=size,
        digest=xxh3_128_digest(payload),
    )
    return BlockIO(key_of(number), place, header, payload)


def block_to_get(store: BlockStore, place: Place, size: int, *, number: int = 0) -> BlockIO:
    """Return buffers for a get of a block, filled with bytes that no block contains.

    Args:
        store: the store, which determines the header's size.
        place: the block's place.
        size: bytes of the payload.
        number: number of the expected block; default: 0.
    """
    header, payload = aligned(store.traits.header_bytes), aligned(size)
    np.frombuffer(header, np.uint8).fill(0xA5)
    np.frombuffer(payload, np.uint8).fill(0x5A)
    return BlockIO(key_of(number), place, header, payload)


def frame_bytes(block: BlockIO) -> bytes:
    """Return the bytes of ``block`` on a medium: header and payload."""
    return bytes(block.header) + bytes(block.payload)


def is_verified(store: BlockStore, block: BlockIO, outcome: Outcome) -> bool:
    """Return True if a get returned ``block`` intact. Absent blocks, errors and damaged bytes are misses.

    Args:
        store: the store.
        block: the block with the buffers of the get.
        outcome: outcome of the get.
    """
    if outcome is not Done.DONE:
        return False
    if store.traits.variable_size and block.filled != len(block.payload):
        return False
    try:
        header = verify(
            block.header[:HEADER_BYTES], key=block.key, fingerprint=FINGERPRINT, raw_length=len(block.payload)
        )
        verify_raw(header, block.payload, block.key)
    except CorruptBlockError:
        return False
    return True
