"""A request of a trace: its time, its lengths, and the hashes of its blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import GROUP_BYTES, OffloadKey

Hashes = NDArray[np.uint64]
"""Hashes of the blocks of a prompt in their order, 64 bits each."""

KEY_BYTES = 8 + GROUP_BYTES
"""Length of a replayed block's key in bytes."""

_PACKED = np.dtype([("hash", ">u8"), ("group", np.uint8, GROUP_BYTES)])
_KEY = np.dtype((np.void, KEY_BYTES))

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_POSITIONS = np.arange(1, 4097, dtype=np.uint64) * _GOLDEN


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Arrival, lengths and block hashes of one request; a trace has no text and no tokens."""

    time: float
    """Time of arrival in seconds, counted from any origin."""
    input_tokens: int
    output_tokens: int
    hashes: Hashes
    """One hash per block of the prompt. Equal hashes at equal positions mean equal prefixes."""


def mixed(values: Hashes) -> Hashes:
    """Return ``values`` with their bits spread evenly (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    spread: Hashes = values ^ (values >> np.uint64(31))
    return spread


def chained(ids: Iterable[int]) -> Hashes:
    """Return one hash per block that depends on the ids of the block and of all blocks before it.

    Some public traces number the contents of blocks, not the prefixes that end with them. A KV block depends on its
    whole prefix, so equal contents after different prefixes are different blocks.

    Args:
        ids: numbers of the blocks of a prompt, in their order; any integers of at most 64 bits.
    """
    values = np.fromiter(ids, np.uint64)
    positions = _POSITIONS[: len(values)]
    if len(positions) < len(values):
        positions = np.arange(1, len(values) + 1, dtype=np.uint64) * _GOLDEN
    return mixed(np.cumsum(mixed(values + positions), dtype=np.uint64))


def keys_of(hashes: Hashes) -> list[OffloadKey]:
    """Return the keys of blocks of KV-cache group 0."""
    packed = np.zeros(len(hashes), _PACKED)
    packed["hash"] = hashes
    keys: list[OffloadKey] = np.ndarray(len(hashes), _KEY, packed.data).tolist()
    return keys
