"""Keys of numbered blocks, for tests."""

from __future__ import annotations

from xxhash import xxh3_128_digest

from tiering.api.keys import OffloadKey, get_offload_block_hash, make_offload_key


def key_of(number: int, group: int = 0) -> OffloadKey:
    """Return the key of block ``number``.

    The first half of the hash is spread evenly, as the hashes of engines are; the second half is the number.

    Args:
        number: number of the block, from 0 to 2**128 - 1.
        group: index of the KV-cache group; default 0.
    """
    name = number.to_bytes(16, "big")
    return make_offload_key(xxh3_128_digest(name) + name, group)


def keys_of(*numbers: int, group: int = 0) -> list[OffloadKey]:
    """Return the keys of the blocks ``numbers``, in this order; see :func:`key_of`."""
    return [key_of(number, group) for number in numbers]


def number_of(key: OffloadKey) -> int:
    """Return the number of the block of ``key``, which :func:`key_of` made."""
    return int.from_bytes(get_offload_block_hash(key)[16:], "big")
