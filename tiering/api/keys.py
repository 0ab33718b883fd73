"""The names of blocks: the engine's block hash and the KV-cache group, as plain bytes."""

from __future__ import annotations

PRIMARY_TIER = "cpu"
"""The primary tier's name where tiers are told by name; no secondary tier may have it."""

OffloadKey = bytes
"""A block's name: the block hash followed by the KV-cache group index as four big-endian unsigned bytes.

Bytes, not tuples: a table of a million keys must not be a million objects for the garbage collector.
"""

GROUP_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Name the block of group ``group_idx`` whose (last) block hash is ``block_hash``."""
    return block_hash + group_idx.to_bytes(GROUP_BYTES, "big")


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """The block hash that ``key`` was made of."""
    return key[:-GROUP_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """The KV-cache group index that ``key`` was made of."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")
