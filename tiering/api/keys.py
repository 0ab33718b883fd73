"""The keys of blocks: the engine's block hash and the KV-cache group index, as plain bytes."""

from __future__ import annotations

PRIMARY_TIER = "cpu"
"""Name of the primary tier in events, statistics and messages. No secondary tier may have this name."""

OffloadKey = bytes
"""The key of a block: its block hash, then the KV-cache group index as four big-endian unsigned bytes.

Keys are bytes, not tuples: the garbage collector would have to track a million tuples in a table of a million keys.
"""

GROUP_BYTES = 4
"""Length of the group index in a key, in bytes."""


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Return the key of a block.

    Args:
        block_hash: hash of the block; of the last GPU block if the offloaded block spans several.
        group_idx: index of the KV-cache group.
    """
    return block_hash + group_idx.to_bytes(GROUP_BYTES, "big")


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Return the block hash in ``key``."""
    return key[:-GROUP_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the KV-cache group index in ``key``."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")
