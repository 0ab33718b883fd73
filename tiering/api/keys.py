"""The keys of blocks: the engine's block hash and the KV-cache group index, as plain bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

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


def prompt_keys(tokens: Sequence[int], block_size: int, *, salt: bytes = b"", group_idx: int = 0) -> list[OffloadKey]:
    """Return the keys of a prompt's whole blocks; each key stands for the prefix that ends with its block.

    Args:
        tokens: ids of the prompt's tokens, 0 to 2^32 - 1.
        block_size: tokens per block, at least 1. The tokens behind the last whole block have no key.
        salt: separates prompts that must not share blocks, e.g. those of another tenant, adapter or image.
        group_idx: index of the KV-cache group.

    Raises:
        ValueError: ``block_size`` or a token is out of its range.

    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    try:
        ids = np.array(tokens, "<u4")
    except OverflowError as error:
        raise ValueError("a token id is outside 0 to 2^32 - 1") from error
    digest, keys = hashlib.sha256(b"kv-tiering prompt\0" + block_size.to_bytes(8, "big") + salt).digest(), []
    for end in range(block_size, len(ids) + 1, block_size):
        digest = hashlib.sha256(digest + ids[end - block_size : end].tobytes()).digest()
        keys.append(make_offload_key(digest, group_idx))
    return keys
