"""Block store on a Valkey or Redis server.

A block is one value, whose name contains the namespace, the epoch and the key. Documents are the fields of one hash:
the server loses all of them or none. Leases are values of their own, because they expire.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tiering.epochs.documents import LEASES
from tiering.errors import CorruptBlockError, StoreError
from tiering.medium.block_store import BlockIO, BlockStore, Done, Place, RawBlock, StoreProbe, StoreTraits
from tiers.valkey.client import ValkeyClient
from tiers.valkey.valkey_options import ValkeyOptions

logger = logging.getLogger("kv_tiering.valkey")

LEASE_SECONDS = 86400
"""Seconds after which the server drops a lease that its engine has not renewed."""

_SCAN_COUNT = 1000
_GLOB = str.maketrans({character: f"\\{character}" for character in "*?[]\\"})


class ValkeyStore(BlockStore):
    """Blocks on one server. Several threads may call at once; each call uses a connection of its own.

    A put does not replace a value: its name contains the namespace and the key, so it holds the same block. A get reads
    into the given buffers, without a copy. Each call makes one attempt; a layer above retries.

    Args:
        options: options of the tier.

    Raises:
        ConfigError: the package ``valkey`` is missing.
    """

    traits = StoreTraits(medium="POOL", variable_size=True, forgets=True)

    def __init__(self, options: ValkeyOptions) -> None:
        self._options = options
        self._blocks = f"{options.prefix}/blocks/"
        self._documents = f"{options.prefix}/documents"
        self._leases = f"{options.prefix}/leases/"
        self.client = self._connect()
        """Connections to the server, made when they are needed."""

    def __repr__(self) -> str:
        return f"ValkeyStore({self._options.location})"

    def _connect(self) -> ValkeyClient:
        options = self._options
        return ValkeyClient(
            options.address,
            connect_timeout=options.connect_timeout,
            timeout=min(options.request_timeout, options.deadline),
            ca_file=options.ca_file,
        )

    # ---------------------------------------------------------------------------------------------------- life cycle

    def open(self) -> None:
        self.client.call("EXISTS", self._documents)

    def close(self) -> None:
        self.client.close()

    # ---------------------------------------------------------------------------------------------------------- data

    def put_one(self, block: BlockIO) -> None:
        name = self.name(block.place)
        if not self.client.call("EXISTS", name):
            milliseconds = round(self._options.ttl * 1000)
            self.client.write(name, (block.header, block.payload), "NX", "PX", milliseconds)

    def get_one(self, block: BlockIO) -> Done:
        shortest, longest = len(block.header), len(block.header) + len(block.payload)
        length = self.client.read_into(self.name(block.place), (block.header, block.payload))
        if length is None:
            return Done.ABSENT
        if not shortest <= length <= longest:
            raise CorruptBlockError(f"{block.place} has {length} bytes, not {shortest} to {longest}")
        block.filled = length - shortest
        return Done.DONE

    def delete(self, places: Sequence[Place]) -> None:
        if places:
            self.client.call("UNLINK", *map(self.name, places))

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        try:
            answers = self.client.call_all([("EXISTS", self.name(place)) for place in places])
        except StoreError as error:
            logger.debug("%s", error)
            answers = [None] * len(places)
        return StoreProbe(tuple(bool(answer) if isinstance(answer, int) else None for answer in answers))

    def read_again(self, place: Place, limit: int) -> RawBlock | None:
        fresh = self._connect()
        try:
            size, content = fresh.peek(self.name(place), limit)
        finally:
            fresh.close()
        if not size:
            return None
        return RawBlock(content if size <= limit else b"", size, _version(size, content, limit), proven=True)

    def delete_version(self, place: Place, version: str) -> bool:
        limit = int(version.split("-")[1])

        def matches(size: int, content: bytes) -> bool:
            return _version(size, content, limit) == version

        return self.client.unlink_if(self.name(place), limit, matches)

    # --------------------------------------------------------------------------------------------- small documents

    def read_document(self, name: str) -> bytes | None:
        if name.startswith(LEASES):
            return _content(self.client.call("GET", self._leases + name))
        return _content(self.client.call("HGET", self._documents, name))

    def write_document(self, name: str, data: bytes) -> None:
        if name.startswith(LEASES):
            self.client.call("SET", self._leases + name, data, "EX", LEASE_SECONDS)
        else:
            self.client.call("HSET", self._documents, name, data)

    def create_document(self, name: str, data: bytes) -> bytes | None:
        if name.startswith(LEASES):
            return super().create_document(name, data)
        self.client.call("HSETNX", self._documents, name, data)
        return _content(self.client.call("HGET", self._documents, name))

    def list_documents(self, prefix: str) -> Iterable[str]:
        names = [name.decode(errors="replace") for name in self.client.call("HKEYS", self._documents)]
        if prefix.startswith(LEASES) or LEASES.startswith(prefix):
            names += [lease.removeprefix(self._leases) for lease in self.scan(self._leases)]
        return [name for name in names if name.startswith(prefix)]

    def remove_document(self, name: str) -> None:
        if name.startswith(LEASES):
            self.client.call("UNLINK", self._leases + name)
        else:
            self.client.call("HDEL", self._documents, name)

    # -------------------------------------------------------------------------------------------------- many at a time

    def reclaim(self, place_prefix: str) -> int:
        batch: list[str] = []
        removed = 0
        for name in self.scan(f"{self._blocks}{place_prefix}"):
            batch.append(name)
            if len(batch) == _SCAN_COUNT:
                removed += self.client.call("UNLINK", *batch)
                batch.clear()
        return removed + (self.client.call("UNLINK", *batch) if batch else 0)

    def places(self, place_prefix: str = "") -> Iterator[str]:
        """Yield the places that start with ``place_prefix``, in no order, some perhaps twice.

        Raises:
            StoreError: the server cannot list its keys.
        """
        for name in self.scan(f"{self._blocks}{place_prefix}"):
            yield name.removeprefix(self._blocks)

    def scan(self, prefix: str) -> Iterator[str]:
        """Yield the server's keys that start with ``prefix``, in no order, some perhaps twice.

        Raises:
            StoreError: the server cannot list its keys.
        """
        cursor: Any = 0
        while True:
            cursor, names = self.client.call(
                "SCAN", cursor, "MATCH", f"{prefix.translate(_GLOB)}*", "COUNT", _SCAN_COUNT
            )
            for name in names:
                yield name.decode(errors="replace")
            if int(cursor) == 0:
                return

    def name(self, place: Place) -> str:
        """Return the key of the block at ``place`` on the server."""
        return f"{self._blocks}{place}"


def _content(reply: Any) -> bytes | None:
    """Return the reply to a request for a document."""
    return reply if isinstance(reply, bytes) else None


def _version(size: int, content: bytes, limit: int) -> str:
    """Return the version of a value of ``size`` bytes, whose first ``limit`` bytes are ``content``."""
    return f"{size}-{limit}-{hashlib.sha256(content).hexdigest()}"
