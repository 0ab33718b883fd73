"""The presence directory of one medium, namespace and epoch, and other shared facts about blocks."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence

from xxhash import xxh3_128_digest

from tiering import TemporaryStoreError
from tiering.tier import Place
from tiers.coordination import scripts
from tiers.coordination.scripts import DIGEST_BYTES
from tiers.valkey.client import ValkeyClient, Word

LEASE_MS = 10_000
"""Milliseconds after which another machine may upload a block whose upload has not ended."""

FILL_MS = 600_000
"""Milliseconds between two fills of a directory from the medium."""

_FORMAT = "kv-tiering:1"
"""Prefix of all keys, with the version of their layout."""

Digests = bytes
"""Digests of several blocks, one after another."""


def digests_of(places: Sequence[Place]) -> Digests:
    """Return the digests of the blocks at ``places``."""
    return b"".join([xxh3_128_digest(str(place).encode()) for place in places])


def cut(digests: Digests) -> Iterator[bytes]:
    """Yield each digest; a remainder is left out."""
    for at in range(0, len(digests) - DIGEST_BYTES + 1, DIGEST_BYTES):
        yield digests[at : at + DIGEST_BYTES]


class Directory:
    """The shared facts about the blocks below one prefix of places. Any thread may call.

    The methods that return commands send nothing. The others block for one round trip, and raise
    :class:`~tiering.errors.StoreError`.

    Args:
        client: connections to the server.
        medium: identifier of the medium, equal on all machines, so that two media never share a directory.
        place_prefix: prefix of the places of a namespace and epoch.
    """

    def __init__(self, client: ValkeyClient, medium: bytes, place_prefix: str) -> None:
        self.place_prefix = place_prefix
        self.medium = medium
        self.name = _name(medium, place_prefix)
        self.owner = secrets.token_bytes(DIGEST_BYTES)
        """Identifier of this process in claims and notices."""
        self._client = client

    @property
    def channel(self) -> str:
        """Channel of the notices about stored blocks."""
        return f"{self.name}:stored"

    def identify(self, medium: bytes) -> None:
        """Use the directory of ``medium`` from now on."""
        self.medium = medium
        self.name = _name(medium, self.place_prefix)

    def add(self, digests: Digests) -> tuple[Word, ...]:
        """Return the command that adds blocks; its reply is the directory's generation."""
        return self._run(scripts.ADD, digests, secrets.token_hex(8), scripts.LIFE_MS)

    def notify(self, digests: Digests) -> tuple[Word, ...]:
        """Return the command that announces stored blocks to the other machines."""
        return ("PUBLISH", self.channel, self.owner + digests)

    def look(self, digests: Digests) -> tuple[Word, ...]:
        """Return the command that looks blocks up; :meth:`answers` reads its reply."""
        return self._run(scripts.LOOK, digests)

    def claim(self, digests: Digests) -> tuple[Word, ...]:
        """Return the command that claims uploads; :meth:`flags` reads its reply."""
        return self._run(scripts.CLAIM, digests, self.owner, LEASE_MS)

    def touch(self, digests: Digests) -> tuple[Word, ...]:
        """Return the command that counts touches; :meth:`flags` reads its reply."""
        return self._run(scripts.TOUCH, digests)

    def release(self, digests: Digests) -> tuple[Word, ...]:
        """Return the command that ends this machine's claims; those of others stay."""
        return self._run(scripts.RELEASE, digests, self.owner)

    def distrust(self) -> tuple[Word, ...]:
        """Return the command that records that the directory lacks blocks."""
        return ("HDEL", self.name, "complete")

    def claim_fill(self) -> tuple[Word, ...]:
        """Return the command that claims the fill of the directory; its reply is None if it is claimed."""
        return ("SET", f"{self.name}:fill", self.owner, "NX", "PX", FILL_MS)

    def _run(self, script: str, *arguments: Word) -> tuple[Word, ...]:
        return ("EVALSHA", _SHAS[script], 1, self.name, *arguments)

    @staticmethod
    def flags(reply: object, count: int) -> list[bool]:
        """Return the flags of a reply.

        Raises:
            TemporaryStoreError: the reply does not have ``count`` flags.
        """
        if not isinstance(reply, bytes) or len(reply) != count:
            raise TemporaryStoreError(f"coordination: the server answered with {str(reply)[:60]!r}, not {count} flags")
        return [flag == ord("1") for flag in reply]

    def answers(self, digests: Digests) -> tuple[bool, list[bool]]:
        """Look blocks up; return True if the directory is complete, and True for each block that it holds."""
        reply = self._client.call(*self.look(digests))
        complete, *held = self.flags(reply, 1 + len(digests) // DIGEST_BYTES)
        return complete, held

    def fill(self, digests: Digests) -> bytes:
        """Add blocks that the medium was found to hold, and return the directory's generation."""
        return bytes(self._client.call(*self.add(digests)))

    def finish(self, generation: bytes) -> bool:
        """Record that the directory has all blocks of the medium; return False if it is another one by now."""
        return bool(self._client.call(*self._run(scripts.COMPLETE, generation)))


def _name(medium: bytes, place_prefix: str) -> str:
    scope = hashlib.sha256(medium + f"\n{place_prefix}".encode()).hexdigest()[:32]
    return f"{_FORMAT}:{{{scope}}}"


_SHAS = {script: hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest() for script in scripts.ALL}

SCRIPTS = {sha: script for script, sha in _SHAS.items()}
"""The scripts, by their names in the server once they are loaded."""


def load_scripts() -> list[tuple[Word, ...]]:
    """Return the commands that load all scripts."""
    return [("SCRIPT", "LOAD", script) for script in scripts.ALL]
