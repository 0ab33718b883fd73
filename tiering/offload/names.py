"""The names of a request's blocks, which grow with its hashes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tiering.api.keys import OffloadKey


def extend_names(names: list[OffloadKey], hashes: Sequence[bytes], factor: int, suffix: bytes) -> int:
    """Bring ``names`` up to date with a request's ``hashes``; returns how many of them were right and have stayed.

    ``factor``: hashes in a block, which is named by the last of them and ``suffix``.  Nothing is built twice, but names
    behind a token that was replaced: a streaming session discards the token that was sampled last and goes on with
    others.
    """
    want = len(hashes) // factor
    known = min(len(names), want)
    if known and names[known - 1] != hashes[known * factor - 1] + suffix:
        # A hash covers all tokens before it: names are right up to some block, and wrong from there on.
        known = bisect_left(
            range(known), True, key=lambda index: names[index] != hashes[(index + 1) * factor - 1] + suffix
        )
    del names[known:]
    if want > known:
        names += [block_hash + suffix for block_hash in hashes[(known + 1) * factor - 1 : want * factor : factor]]
    return known
