"""A memory pool on a Valkey or Redis server, shared by many engines.

A block is one value, whose name contains the namespace, the epoch and the key. Documents are the fields of one hash:
the server loses all of them or none. Leases and hot keys are values of their own, because they expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from tiering import ConfigError, CorruptBlockError, StoreError
from tiering.tier import (
    HOT,
    HOT_SECONDS,
    LEASES,
    SPEED_SECONDS,
    SPEEDS,
    BlockIO,
    BlockStore,
    BlockTier,
    BlockTierOptions,
    Done,
    Duration,
    FilePath,
    Finding,
    Place,
    RawBlock,
    Severity,
    SharedAdmin,
    SharedIndex,
    SharedOptions,
    StoredBlock,
    StoreProbe,
    StoreTraits,
    TierContext,
    TierDefinition,
    TierOptions,
    TtlOptions,
    format_bytes,
    parse_place,
)
from tiers.valkey.client import ServerAddress, ValkeyClient, known_address

logger = logging.getLogger("kv_tiering.valkey")

LEASE_SECONDS = 86400
"""Seconds after which the server drops a lease that its engine has not renewed."""

_LIFETIMES = {LEASES: LEASE_SECONDS, HOT: round(HOT_SECONDS), SPEEDS: round(SPEED_SECONDS)}
"""Seconds that the documents with each prefix last, which are values of their own."""

_EXPIRING = tuple(_LIFETIMES)

_MOST_BYTES = 1 << 20
"""Bytes of a document that expires which are read at most."""

_SCAN_COUNT = 1000
_BATCH = 1000
"""Blocks that the administration describes together."""
_GLOB = str.maketrans({character: f"\\{character}" for character in "*?[]\\"})

MAX_VALUE_BYTES = 512 << 20
"""Largest value of a server, in bytes (its setting proto-max-bulk-len)."""

_SERVER_EVICTS = "the server evicts; set its maxmemory, and maxmemory-policy volatile-lru"
_NO_SECRETS = (
    "secrets are not written into a stack; use the environment variable VALKEY_PASSWORD, or ?auth_env=NAME in url"
)


class ValkeyOptions(BlockTierOptions, SharedOptions, TtlOptions):
    """The options of the Valkey tier. The password comes from the environment only."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "capacity": "all engines share the server; its maxmemory bounds the pool",
        "high_watermark": _SERVER_EVICTS,
        "low_watermark": _SERVER_EVICTS,
        "eviction": _SERVER_EVICTS,
        "compression": "reading from the pool is faster than zstd; use compression in an object store behind it",
        "password": _NO_SECRETS,
        "username": "the user belongs into url: valkey://user@host",
    }

    type: str = "valkey"
    """The tier's type in a stack file."""
    url: Annotated[str, AfterValidator(known_address)]
    """Address of the server: ``valkey://[user@]host[:port][/database]``, or ``valkeys://`` for TLS.

    ``redis://`` and ``rediss://`` mean the same. The environment variable VALKEY_PASSWORD has the password, or the
    variable that ``?auth_env=NAME`` at the end names.
    """
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")] = "kv-tiering"
    """Beginning of all keys on the server, of letters, digits and ``._:/-``; default "kv-tiering".

    Several stacks can share a server.
    """
    ttl: Duration = Field(default=86400.0, ge=1.0)
    """Age at which the server drops a block; default 1 day."""
    present_ttl: Duration = 60.0
    """Time for which a positive probe result stays valid; default 60."""
    lookup_deadline: Duration = 0.1
    """Seconds that a lookup may stay undecided before the answer is no; default 0.1."""
    load_deadline: Duration | None = 1.0
    """Seconds that a request waits for a load; default 1. Stores have ``deadline``.

    Blocks that arrive later are misses. The blocks in front of them that arrived in time count.
    """
    ca_file: FilePath | None = None
    """PEM file of the authorities that may sign the server's certificate; default: the system's."""
    connect_timeout: Duration = 1.0
    """Seconds within which a connection must be established; default 1."""
    request_timeout: Duration = 5.0
    """Seconds within which the server must answer a command; default 5."""

    @property
    def address(self) -> ServerAddress:
        """The server."""
        return ServerAddress.parse(self.url)

    @property
    def location(self) -> str:
        """Server and prefix, as text for people."""
        return f"{self.address} {self.prefix}"


class ValkeyStore(BlockStore):
    """Blocks on one server. Several threads may call at once; each call uses a connection of its own.

    A put does not replace a value: its name contains the namespace and the key, so it holds the same block. A get reads
    into the given buffers, without a copy. Each call makes one attempt; a layer above retries.

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

    def open(self) -> None:
        self.client.call("EXISTS", self._documents)

    def close(self) -> None:
        self.client.close()

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
            name = self.name(place)
            size, content = fresh.replies([("STRLEN", name), ("GETRANGE", name, 0, limit - 1)])
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

    def read_document(self, name: str) -> bytes | None:
        if name.startswith(_EXPIRING):
            # A hash would keep the documents of all engines that there ever were.
            return _content(self.client.call("GETRANGE", self._leases + name, 0, _MOST_BYTES)) or None
        return _content(self.client.call("HGET", self._documents, name))

    def write_document(self, name: str, data: bytes) -> None:
        if name.startswith(_EXPIRING):
            seconds = next(seconds for prefix, seconds in _LIFETIMES.items() if name.startswith(prefix))
            self.client.call("SET", self._leases + name, data, "EX", seconds)
        else:
            self.client.call("HSET", self._documents, name, data)

    def create_document(self, name: str, data: bytes) -> bytes | None:
        if name.startswith(_EXPIRING):
            return super().create_document(name, data)
        self.client.call("HSETNX", self._documents, name, data)
        return _content(self.client.call("HGET", self._documents, name))

    def list_documents(self, prefix: str) -> Iterable[str]:
        names = [name.decode(errors="replace") for name in self.client.call("HKEYS", self._documents)]
        if any(prefix.startswith(kind) or kind.startswith(prefix) for kind in _EXPIRING):
            names += [lease.removeprefix(self._leases) for lease in self.scan(self._leases)]
        return [name for name in names if name.startswith(prefix)]

    def remove_document(self, name: str) -> None:
        if name.startswith(_EXPIRING):
            self.client.call("UNLINK", self._leases + name)
        else:
            self.client.call("HDEL", self._documents, name)

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


class ValkeyAdmin(SharedAdmin):
    """Administration of a pool.

    The server drops a lease that is not renewed, so all leases that are there are fresh.

    Raises:
        ConfigError: the package ``valkey`` is missing.
    """

    options: ValkeyOptions
    _store: ValkeyStore

    def __init__(self, options: ValkeyOptions) -> None:
        super().__init__(options, ValkeyStore(options))

    def check(self, block_bytes: int) -> Iterator[Finding]:
        began = time.monotonic()
        try:
            self.open()
        except StoreError as error:
            remedy = "look at url, the network, and the environment's password"
            yield Finding(Severity.ERROR, "server", str(error), remedy)
            return
        took = 1e3 * (time.monotonic() - began)
        yield Finding(Severity.OK, "server", f"{self.options.address} answers in {took:.1f} ms")
        with contextlib.closing(self):
            yield from self._probe_server(block_bytes)

    def _probe_server(self, block_bytes: int) -> Iterator[Finding]:
        if not self.options.address.tls and self.options.address.host not in {"localhost", "127.0.0.1", "::1"}:
            yield Finding(Severity.INFO, "encryption", "blocks cross the network unencrypted", "use valkeys://")
        if block_bytes + self._store.traits.header_bytes > MAX_VALUE_BYTES:
            text = f"{format_bytes(block_bytes)} exceed the {format_bytes(MAX_VALUE_BYTES)} of a value"
            yield Finding(Severity.ERROR, "block size", text, "lower block_size")
        try:
            facts = self._store.client.info()
        except StoreError as error:
            yield Finding(Severity.INFO, "settings", f"cannot be read: {error}", "allow the user the command INFO")
            return
        if facts.get("role", "master") != "master":
            yield Finding(Severity.ERROR, "role", "the server is a replica, which takes no writes", "name the primary")
        if facts.get("cluster_enabled", "0") != "0":
            text = "the server is a node of a cluster"
            yield Finding(Severity.ERROR, "role", text, "name a server without cluster mode")
        yield _memory_finding(facts)

    @contextlib.contextmanager
    def scratch(self, capacity: int) -> Iterator[TierOptions | None]:
        options = self.options.model_copy(update={"prefix": f"{self.options.prefix}/scratch-{secrets.token_hex(4)}"})
        try:
            yield options
        finally:
            for name in list(self._store.scan(f"{options.prefix}/")):
                self._store.client.call("UNLINK", name)
            self.close()

    async def blocks(self, after: str = "") -> AsyncIterator[StoredBlock]:
        places = sorted({place for place in await asyncio.to_thread(list, self._store.places()) if place > after})
        for start in range(0, len(places), _BATCH):
            for block in await asyncio.to_thread(self._describe, places[start : start + _BATCH]):
                yield block

    def _describe(self, places: Sequence[str]) -> list[StoredBlock]:
        names = [self._store.name(place) for place in places]
        sizes = self._store.client.call_all([("STRLEN", name) for name in names])
        left = self._store.client.call_all([("PTTL", name) for name in names])
        blocks: list[StoredBlock] = []
        for place, size, milliseconds in zip(places, sizes, left, strict=True):
            if not isinstance(size, int) or not isinstance(milliseconds, int) or milliseconds == -2:
                continue  # the block is gone, or is no block
            age = self.options.ttl - milliseconds / 1000 if milliseconds >= 0 else 0.0
            named = parse_place(place)
            namespace, fingerprint = ("", "") if named is None else (named.namespace, named.fingerprint)
            blocks.append(StoredBlock(self.clock() - max(age, 0.0), place, size, namespace, fingerprint))
        return blocks

    async def read(self, block: StoredBlock) -> memoryview | None:
        found = await asyncio.to_thread(self._store.client.call, "GET", self._store.name(block.place))
        return None if found is None else memoryview(found)


def _memory_finding(facts: dict[str, str]) -> Finding:
    """Return the finding about the server's memory and its eviction, from its facts."""
    most, policy = int(facts.get("maxmemory", 0)), facts.get("maxmemory_policy", "")
    used = f"{format_bytes(int(facts.get('used_memory', 0)))} of {format_bytes(most)} used"
    remedy = "set maxmemory-policy volatile-lru"
    if not most:
        text = "the server has no maxmemory: the pool grows until the machine is out of memory"
        remedy = "set maxmemory, and maxmemory-policy volatile-lru"
    elif policy == "noeviction":
        text = f"{used}, and the server evicts nothing: a full pool takes no blocks until old ones expire"
    elif policy.startswith("allkeys"):
        text = (
            f"{used}; {policy} may evict the documents that name the epoch, and engines that start then share no older "
            "block"
        )
    else:
        return Finding(Severity.OK, "memory", f"{used}, eviction {policy}")
    return Finding(Severity.WARNING, "memory", text, remedy)


def build(options: ValkeyOptions, context: TierContext) -> BlockTier:
    """Return a Valkey tier that is not open yet.

    Raises:
        ConfigError: the package ``valkey`` is missing, or a block is too large for a value of the server.
    """
    store = ValkeyStore(options)
    largest = max(context.group_bytes)
    if largest + store.traits.header_bytes > MAX_VALUE_BYTES:
        raise ConfigError(
            f"tier {context.name}: blocks of {format_bytes(largest)} exceed the {format_bytes(MAX_VALUE_BYTES)} of a "
            "server's value; lower block_size"
        )
    return BlockTier(context, options, store, SharedIndex.of(options))


VALKEY_TIER = TierDefinition(
    ValkeyOptions,
    build,
    persistent=True,
    location=lambda options: options.location,
    distance="network",
    admin=lambda options, replica: ValkeyAdmin(options),
)
