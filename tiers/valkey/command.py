"""Administration of a pool for the command line: probes, contents, verification, removal and epochs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from tiering.admin.namespaces import DOCUMENTS, known_namespaces
from tiering.admin.records import Finding, KnownNamespace, Severity, StoredBlock
from tiering.admin.tier_admin import TierAdmin
from tiering.api.namespace import Namespace
from tiering.api.units import format_bytes
from tiering.epochs.documents import LEASES
from tiering.epochs.driver import SURE_SECONDS, begin_common
from tiering.errors import StoreError
from tiering.index.places import parse_place
from tiering.secondary.options import TierOptions
from tiers.valkey.store import ValkeyStore
from tiers.valkey.valkey_options import MAX_VALUE_BYTES, ValkeyOptions

_BATCH = 1000
_WATCH_PAUSE = 1.0
"""Seconds between two looks for new epochs that the server may have lost."""


class ValkeyAdmin(TierAdmin):
    """Administration of a pool. Engines may use the pool meanwhile.

    Raises:
        ConfigError: the package ``valkey`` is missing.
    """

    options: ValkeyOptions

    def __init__(self, options: TierOptions, replica: str | None = None) -> None:
        super().__init__(options, replica)
        self._store = ValkeyStore(self.options)

    @property
    def place(self) -> str:
        return self.options.location

    def open(self) -> None:
        self._store.open()

    def close(self) -> None:
        self._store.close()

    # ----------------------------------------------------------------------------------------------------------- probes

    def check(self, block_bytes: int) -> Iterator[Finding]:
        try:
            began = time.monotonic()
            self._store.open()
            took = 1e3 * (time.monotonic() - began)
            yield Finding(Severity.OK, "server", f"{self.options.address} answers in {took:.1f} ms")
        except StoreError as error:
            yield Finding(
                Severity.ERROR, "server", str(error), "look at url, the network, and the environment's password"
            )
            return
        try:
            yield from self._probe_server(block_bytes)
        finally:
            self._store.close()

    def _probe_server(self, block_bytes: int) -> Iterator[Finding]:
        if not self.options.address.tls and self.options.address.host not in {"localhost", "127.0.0.1", "::1"}:
            yield Finding(Severity.INFO, "encryption", "blocks cross the network unencrypted", "use valkeys://")
        if block_bytes + 128 > MAX_VALUE_BYTES:
            yield Finding(
                Severity.ERROR,
                "block size",
                f"{format_bytes(block_bytes)} exceed the {format_bytes(MAX_VALUE_BYTES)} of a value",
                "lower block_size",
            )
        try:
            facts = dict(
                line.split(":", 1)
                for line in self._store.client.call("INFO").decode(errors="replace").splitlines()
                if ":" in line
            )
        except StoreError as error:
            yield Finding(Severity.INFO, "settings", f"cannot be read: {error}", "allow the user the command INFO")
            return
        if facts.get("role", "master") != "master":
            yield Finding(Severity.ERROR, "role", "the server is a replica, which takes no writes", "name the primary")
        if facts.get("cluster_enabled", "0") != "0":
            yield Finding(
                Severity.ERROR, "role", "the server is a node of a cluster", "name a server without cluster mode"
            )
        yield from _memory_findings(facts)

    @contextlib.contextmanager
    def scratch(self, capacity: int) -> Iterator[TierOptions | None]:
        options = self.options.model_copy(update={"prefix": f"{self.options.prefix}/scratch-{secrets.token_hex(4)}"})
        try:
            yield options
        finally:
            for name in list(self._store.scan(f"{options.prefix}/")):
                self._store.client.call("UNLINK", name)
            self._store.close()

    # --------------------------------------------------------------------------------------------------------- contents

    async def namespaces(self) -> list[KnownNamespace]:
        return await asyncio.to_thread(self._namespaces)

    def _namespaces(self) -> list[KnownNamespace]:
        # The server drops a lease that is not renewed: all that are there are fresh.
        leases = self._store.list_documents(LEASES)
        names = [name for name in self._store.list_documents("") if name.startswith(DOCUMENTS)]
        found = {name: self._store.read_document(name) for name in names}
        return known_namespaces({name: data for name, data in found.items() if data is not None}, list(leases))

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

    def expected_key(self, block: StoredBlock) -> bytes | None:
        named = parse_place(block.place)
        return None if named is None else named.key

    # ---------------------------------------------------------------------------------------------------------- changes

    async def remove(self, blocks: Sequence[StoredBlock]) -> None:
        await asyncio.to_thread(self._store.delete, [block.place for block in blocks])

    async def begin_epoch(self, namespace: str, invalidation: bytes) -> str:
        await asyncio.to_thread(self._begin_epoch, namespace, invalidation)
        return "engines that run follow within a minute, and empty their CPU tiers and disks"

    def _begin_epoch(self, namespace: str, invalidation: bytes) -> None:
        begin_common(self._store, Namespace.named(namespace), invalidation)

    @property
    def watch_seconds(self) -> float:
        # An engine that has not looked for longer takes lost documents for those of a new epoch.
        return SURE_SECONDS

    async def watch_epochs(self, namespaces: Sequence[str], invalidation: bytes) -> None:
        end = time.monotonic() + self.watch_seconds
        while True:
            error: StoreError | None = None
            try:
                for namespace in namespaces:
                    await asyncio.to_thread(self._begin_epoch, namespace, invalidation)
            except StoreError as failure:
                error = failure
            if time.monotonic() >= end:
                break
            await asyncio.sleep(_WATCH_PAUSE)
        if error is not None:
            raise error


def _memory_findings(facts: dict[str, str]) -> Iterator[Finding]:
    """Yield findings about the server's memory and its eviction, from its answer to INFO."""
    most, used, policy = (
        int(facts.get("maxmemory", 0)),
        int(facts.get("used_memory", 0)),
        facts.get("maxmemory_policy", ""),
    )
    if not most:
        yield Finding(
            Severity.WARNING,
            "memory",
            "the server has no maxmemory: the pool grows until the machine is out of memory",
            "set maxmemory, and maxmemory-policy volatile-lru",
        )
    elif policy == "noeviction":
        yield Finding(
            Severity.WARNING,
            "memory",
            f"{format_bytes(used)} of {format_bytes(most)} used, and the server evicts nothing: a full pool takes no "
            "blocks until old ones expire",
            "set maxmemory-policy volatile-lru",
        )
    elif policy.startswith("allkeys"):
        yield Finding(
            Severity.WARNING,
            "memory",
            f"{format_bytes(used)} of {format_bytes(most)} used; {policy} may evict the documents that name the epoch, "
            "and engines that start then share no older block",
            "set maxmemory-policy volatile-lru",
        )
    else:
        yield Finding(Severity.OK, "memory", f"{format_bytes(used)} of {format_bytes(most)} used, eviction {policy}")
