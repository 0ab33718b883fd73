"""Keys of a request's blocks, made from its hashes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tiering.api.keys import OffloadKey


def extend_names(names: list[OffloadKey], hashes: Sequence[bytes], factor: int, suffix: bytes) -> int:
    """Bring the keys of a request's blocks up to date with its hashes.

    Only missing keys are built, and keys after a token that was replaced. A streaming session discards the token that
    was sampled last and continues with other tokens.

    Args:
        names: keys of the blocks; changed in place.
        hashes: hashes of the request's full hash-blocks.
        factor: hashes per block; the last of them and ``suffix`` form the key.
        suffix: bytes that identify the KV-cache group.

    Returns:
        The number of leading keys that were correct and have stayed.
    """
    want = len(hashes) // factor
    known = min(len(names), want)
    if known and names[known - 1] != hashes[known * factor - 1] + suffix:
        # A hash covers all tokens before it: keys are correct up to some block, and wrong from that block on.
        known = bisect_left(
            range(known), True, key=lambda index: names[index] != hashes[(index + 1) * factor - 1] + suffix
        )
    del names[known:]
    if want > known:
        names += [block_hash + suffix for block_hash in hashes[(known + 1) * factor - 1 : want * factor : factor]]
    return known
