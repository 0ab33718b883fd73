"""The tokens of past requests, whatever their keys are: their adapters, and where prompts part.

A block is known by an 8-byte hash of all tokens up to its end and of the cache salt, which a secret of the process
keys. The hash leaves out the adapter, which a block's key covers. A new block replaces the one at its place.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiering.explain.past_blocks import Hashes

MAX_TOKENS = 1 << 20
"""Largest number of tokens that are kept to compare prompts, of 4 bytes each.

Each prompt counts as :data:`PROMPT_TOKENS` more.
"""

PROMPT_TOKENS = 120
"""Tokens that take as much memory as the objects of one prompt."""

_PIECE = 2048
"""Tokens that are hashed before other threads may run; that takes about 0.1 ms."""

_ADAPTER_BITS = 12
_NUMBERS = 1 << (32 - _ADAPTER_BITS)
_ADAPTER = (1 << _ADAPTER_BITS) - 1
_NO_HASHES: Hashes = np.empty(0, np.uint64)


class Prompt(NamedTuple):
    """The tokens of a request, with what else its keys cover."""

    tokens: Sequence[int] = ()
    """The tokens; empty if they do not determine the keys, as with images, or are not examined."""
    salt: str = ""
    """Cache salt."""
    adapter: str = ""
    """Name and content of the adapter; empty without one."""
    waiting: int = 0
    """Tokens that count in the explainer's queue; the engine may append more to them meanwhile."""


NO_PROMPT = Prompt()
"""A prompt that is not examined."""


class Digest(NamedTuple):
    """The tokens of a prompt, and the hashes of its blocks."""

    tokens: NDArray[np.int32]
    """The tokens."""
    hashes: Hashes
    """Hash of each whole block."""
    adapter: int
    """Number of the adapter."""
    salt: int
    """Hash of the salt."""


class PastPrompts:
    """The blocks of past requests by their tokens. One thread calls all methods.

    Args:
        blocks: largest number of blocks, of 12 bytes each.
        block_tokens: tokens of one block.
        pause: lets other threads run.
    """

    def __init__(self, blocks: int, block_tokens: int, pause: Callable[[], object]) -> None:
        self._block_tokens = block_tokens
        self._pause = pause
        self._hashes: Hashes = np.zeros(max(1, blocks), np.uint64)
        self._owners = np.zeros(len(self._hashes), np.uint32)
        """Number of the latest request that had the block, and of its adapter in the lowest bits."""
        self._secret = secrets.token_bytes(32)
        self._factors = np.frombuffer(secrets.token_bytes(24), np.uint64) | np.uint64(1)
        self._adapters: dict[str, int] = {}
        self._number = 0
        self._kept: dict[int, Digest] = {}
        self._kept_tokens = 0

    def clear(self) -> None:
        """Drop all blocks, tokens and adapters."""
        self._hashes.fill(0)
        self._adapters.clear()
        self._kept.clear()
        self._kept_tokens = 0

    def digest(self, prompt: Prompt) -> Digest | None:
        """Return the digest of a prompt; None if it has no whole block, or one adapter too many."""
        size, count = self._block_tokens, len(prompt.tokens)
        adapter = self._adapters.setdefault(prompt.adapter, len(self._adapters))
        if count < size or adapter > _ADAPTER:
            if adapter > _ADAPTER:
                del self._adapters[prompt.adapter]
            return None
        secret = blake2b(prompt.salt.encode(errors="surrogatepass"), key=self._secret, digest_size=8).digest()
        salt = np.frombuffer(secret, np.uint64)
        total, parts, hashes = salt, list[NDArray[np.int32]](), list[Hashes]()
        step = size * max(1, _PIECE // size)
        for at in range(0, count, step):
            self._pause()
            part = np.array(prompt.tokens[at : at + step], np.int64)
            # The position is mixed in, so that the sum depends on the order of the tokens.
            mixed = (part.astype(np.uint64) ^ salt) + np.arange(at, at + len(part), dtype=np.uint64) * self._factors[0]
            mixed *= self._factors[1]
            mixed ^= mixed >> np.uint64(29)
            mixed *= self._factors[2]
            mixed ^= mixed >> np.uint64(32)
            sums = np.cumsum(mixed) + total
            total = sums[-1:]
            parts.append(part.astype(np.int32))
            hashes.append(sums[size - 1 :: size])
        found = np.concatenate(hashes)
        found[found == 0] = 1
        return Digest(np.concatenate(parts), found, adapter, int(salt[0]))

    def add(self, digest: Digest) -> None:
        """Record that a request with these tokens has computed or loaded all its blocks."""
        places = digest.hashes % np.uint64(len(self._hashes))
        self._number = (self._number + 1) % _NUMBERS
        self._hashes[places] = digest.hashes
        self._owners[places] = np.uint32(self._number << _ADAPTER_BITS | digest.adapter)
        self._drop(self._number)
        tokens = digest.tokens[:MAX_TOKENS].copy()  # a view would keep all of them
        self._kept[self._number] = digest._replace(tokens=tokens, hashes=_NO_HASHES)
        self._kept_tokens += len(tokens) + PROMPT_TOKENS
        while self._kept_tokens > MAX_TOKENS and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _drop(self, number: int) -> None:
        """Drop the tokens of a request, if they are kept."""
        if dropped := self._kept.pop(number, None):
            self._kept_tokens -= len(dropped.tokens) + PROMPT_TOKENS

    def adapters(self, digest: Digest, first: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return for each block from ``first`` on whether this adapter, and whether another one, had it last."""
        known, owners = self._find(digest.hashes[first:])
        own = (owners & np.uint32(_ADAPTER)) == np.uint32(digest.adapter)
        return known & own, known & ~own

    def parting(self, digest: Digest, block: int) -> int | None:
        """Return the first token of ``block`` in which the latest request that had all before it differs.

        Args:
            digest: a prompt.
            block: index of the first block that no past request had.

        Returns:
            The position of the token; None if there is no such request, or its tokens are not kept any more.
        """
        size = self._block_tokens
        known, owners = self._find(digest.hashes[max(block - 1, 0) : block])
        if not known.any() or int(owners[0]) & _ADAPTER != digest.adapter:
            return None
        start, end, kept = block * size, (block + 1) * size, self._kept.get(int(owners[0]) >> _ADAPTER_BITS)
        if kept is None or kept.salt != digest.salt:
            return None
        theirs, ours = kept.tokens, digest.tokens
        if not np.array_equal(theirs[:start], ours[:start]):
            return None  # the number has been used again
        both = min(len(theirs), len(ours), end) - start
        differs = np.flatnonzero(theirs[start : start + both] != ours[start : start + both])
        token = start + (int(differs[0]) if len(differs) else both)
        return token if token < end else None

    def _find(self, hashes: Hashes) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
        places = hashes % np.uint64(len(self._hashes))
        return self._hashes[places] == hashes, self._owners[places]
