"""Variants of the model that share block hashes, such as two LoRA adapters under one name.

An engine's block hash covers the name of an adapter, not its content. The name of a block of such a request is
therefore a hash of the engine's hash and of the identity of the content. What another content has computed has another
name.

The engine's own cache finds GPU blocks by the engine's hash alone. A block that another variant has filled is a suspect
(:mod:`tiering.connector.suspects`) for the request that finds it: the request may use it, as the engine decides, but
stores nothing from that block on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import overload

MAX_OWN_HASHES = 1 << 18
"""Largest number of names whose hash by the engine is remembered for KV events, about 50 MiB."""


class OwnHashes(dict[bytes, bytes]):
    """The engine's own hashes of named blocks, by name.

    KV events need these hashes, because consumers know blocks by them. Beyond :data:`MAX_OWN_HASHES`, the oldest are
    forgotten: later events of their blocks have the names instead.
    """

    def add(self, names: Iterable[bytes], hashes: Iterable[bytes]) -> None:
        """Remember the hashes of these names."""
        self.update(zip(names, hashes, strict=True))
        while len(self) > MAX_OWN_HASHES:
            del self[next(iter(self))]


class Variant:
    """One content that stands behind a name, until the workers report another content.

    Args:
        own_hashes: remembers the engine's hashes of the blocks that get names; None: no KV events are published.
    """

    __slots__ = ("_own_hashes", "_seed", "identity", "is_void")

    def __init__(self, own_hashes: OwnHashes | None = None) -> None:
        self.identity = ""
        """Identity of the content; "" while it is not known: no block has a name then."""
        self.is_void = False
        """True if the content cannot be known, or the workers may have computed with another one since."""
        self._own_hashes = own_hashes
        self._seed = hashlib.blake2b()

    def identify(self, identity: str) -> None:
        """Set the identity of the content, once."""
        self.identity = identity
        self._seed = hashlib.blake2b(hashlib.sha256(identity.encode()).digest(), digest_size=32)

    def equals(self, owner: Variant | None) -> bool:
        """Return True if a block that the variant ``owner`` has filled holds what this variant computes."""
        if owner is None or owner.is_void or self.is_void:
            return False
        return owner is self or (self.identity != "" and owner.identity == self.identity)

    def names_of(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return the names of blocks, computed when they are read; none while the identity is not known.

        Args:
            hashes: the engine's hashes.
        """
        return _Names(self, hashes) if self.identity else ()

    def mix(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the names of blocks, each as long as the engine's hash."""
        seed, names = self._seed, []
        for block_hash in hashes:
            digest = seed.copy()
            digest.update(block_hash)
            names.append(digest.digest()[: len(block_hash)])
        if self._own_hashes is not None:
            self._own_hashes.add(names, hashes)
        return names


class _Names(Sequence[bytes]):
    """The names of a request's blocks.

    Args:
        variant: the variant that computes the blocks.
        hashes: the engine's hashes of the blocks.
    """

    __slots__ = ("_hashes", "_variant")

    def __init__(self, variant: Variant, hashes: Sequence[bytes]) -> None:
        self._variant = variant
        self._hashes = hashes

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return self._variant.mix(self._hashes[index])
        return self._variant.mix([self._hashes[index]])[0]


class BlockOwners:
    """The variant that has filled each GPU block last; blocks of plain requests are not recorded.

    An entry may be out of date once a plain request has filled the block. No request of a variant finds such a block in
    the engine's cache, because the hashes differ.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Variant] = {}

    def fill(self, blocks: Iterable[Sequence[int]], variant: Variant) -> None:
        """Record blocks that a request fills.

        Args:
            blocks: GPU blocks by KV-cache group.
            variant: the request's variant.
        """
        self._owners.update(dict.fromkeys(chain.from_iterable(blocks), variant))

    def foreign(self, blocks: Iterable[int], variant: Variant) -> list[int]:
        """Return those of ``blocks`` that another variant has filled, without the null block."""
        owners = self._owners
        return [block for block in blocks if block and not variant.equals(owners.get(block))]
