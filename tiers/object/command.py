"""Administration of a bucket for the command line: contents, verification, collection and epochs.

Listing runs over many folders of the bucket at the same time. Nothing here writes a lifecycle rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

import obstore

from tiering import StoreError
from tiering.tier import (
    HOT,
    HOT_SECONDS,
    LEASES,
    Collected,
    EpochState,
    Finding,
    KnownNamespace,
    Limits,
    SharedAdmin,
    StoredBlock,
    TierOptions,
    known_namespaces,
    namespace_of,
)
from tiers.coordination.probes import probe_coordination
from tiers.object.bucket_options import BLOCKS, DOCUMENTS, SUSPECTS, BucketOptions, without_ttl
from tiers.object.clouds import make_cloud
from tiers.object.collection_lease import CollectionLease
from tiers.object.faults import STORE_FAILURES
from tiers.object.identity import probe_identity
from tiers.object.permissions import probe_bucket
from tiers.object.store import ObjectStore
from tiers.object.suspects import NOTE_SECONDS, ended
from tiers.valkey.client import ServerAddress

if TYPE_CHECKING:
    from obstore import ObjectMeta

LEASE_SECONDS = 86400.0
"""Age in seconds up to which a lease counts as fresh. Engines renew leases every hour."""

LISTINGS = 16
"""Folders that are listed at the same time."""

_FOLDERS_DEEP = 3
"""Levels of folders above a block: the namespace, its epoch, and two digits of the key."""

_CHUNK = 1000
_CHUNKS_AHEAD = 4
_PLACE = re.compile(r"([0-9a-f]{32})/([0-9a-f]{32})/(?:[0-9a-f]{2}/)?([0-9a-f]+)(?:\.[1-9])?")


class ObjectAdmin(SharedAdmin):
    """Administration of a bucket."""

    options: BucketOptions
    _store: ObjectStore

    def __init__(self, options: BucketOptions) -> None:
        cloud = make_cloud(options)
        super().__init__(options, ObjectStore(without_ttl(options), cloud))
        self._translate = cloud.dialect.translate
        self._blocks = f"{self.options.prefix}{BLOCKS}"
        self._documents = f"{self.options.prefix}{DOCUMENTS}"
        self._lease_seconds = LEASE_SECONDS
        self._lease = CollectionLease(self._store, self.place)

    # ----------------------------------------------------------------------------------------------------------- probes

    def check(self, block_bytes: int) -> Iterator[Finding]:
        yield from probe_bucket(self.options, block_bytes)
        if self.options.coordination is not None:
            medium, prefixes = b"", list[str]()
            with contextlib.suppress(StoreError), self:  # The probe of the bucket has found the same error.
                found, medium = probe_identity(self._store)
                yield found
                if medium:
                    prefixes = asyncio.run(self._place_prefixes())
            address = ServerAddress.parse(self.options.coordination)
            yield from probe_coordination(address, self.options.coordination_ca_file, medium, prefixes)

    async def _place_prefixes(self) -> list[str]:
        """Return the prefix of the places of each epoch that engines may be in."""
        return [
            f"{namespace.name}/{fingerprint}/"
            for namespace in await self.namespaces()
            for fingerprint, state in namespace.epochs.items()
            if state is not EpochState.ABANDONED
        ]

    @contextlib.contextmanager
    def scratch(self, capacity: int) -> Iterator[TierOptions | None]:
        prefix = f"{self.options.prefix}scratch-{secrets.token_hex(4)}/"
        # Blocks that vanish at once are no news for the fleet.
        options = without_ttl(self.options).with_prefix(prefix).model_copy(update={"coordination": None})
        try:
            yield options
        finally:
            with ObjectAdmin(options) as admin:
                admin._remove_all()

    def _remove_all(self) -> None:
        client = self._store.requests.client
        try:
            for objects in obstore.list(client, self.options.prefix.rstrip("/"), chunk_size=_CHUNK):
                self._store.delete_objects([item["path"] for item in objects])
        except STORE_FAILURES as error:
            raise self._translate(error, f"list {self.options.prefix}") from error

    # --------------------------------------------------------------------------------------------------------- contents

    async def namespaces(self) -> list[KnownNamespace]:
        now = self.clock()
        names: list[str] = []
        fresh: list[str] = []
        self.suspects = self.hot_keys = 0
        async for items in self._list(self._documents):
            for item in items:
                name = item["path"].removeprefix(self._documents)
                age = now - item["last_modified"].timestamp()
                if name.startswith(LEASES):
                    fresh += [name] if age < self._lease_seconds else []
                elif namespace_of(name) is not None:
                    names.append(name)
                elif name.startswith(HOT):
                    self.hot_keys += age < HOT_SECONDS
                else:
                    self.suspects += name.startswith(SUSPECTS) and age < NOTE_SECONDS
        limit = asyncio.Semaphore(LISTINGS)

        async def fetch(name: str) -> tuple[str, bytes] | None:
            async with limit:
                data = await self._get(f"{self._documents}{name}")
            return None if data is None else (name, bytes(data))

        found = await asyncio.gather(*map(fetch, [*names, *fresh]))
        return known_namespaces(dict(item for item in found if item is not None), fresh)

    async def blocks(self, after: str = "") -> AsyncIterator[StoredBlock]:
        folders = [folder for folder in await self._folders() if f"{folder}~" > after]
        queues: list[asyncio.Queue[list[StoredBlock] | BaseException | None]] = [
            asyncio.Queue(_CHUNKS_AHEAD) for _ in folders
        ]
        # A listing counts until its last block has been taken: so few blocks are held, however many folders are small.
        begun = asyncio.Semaphore(LISTINGS)

        async def produce(position: int) -> None:
            queue = queues[position]
            await begun.acquire()
            try:
                async for items in self._list(f"{self._blocks}{folders[position]}", after):
                    await queue.put([block for item in items if (block := self._block(item)) is not None])
                await queue.put(None)
            except StoreError as error:
                await queue.put(error)

        producers = [asyncio.create_task(produce(position)) for position in range(len(folders))]
        try:
            for queue in queues:
                while (batch := await queue.get()) is not None:
                    if isinstance(batch, BaseException):
                        raise batch
                    for block in batch:
                        yield block
                begun.release()
        finally:
            for producer in producers:
                producer.cancel()
            await asyncio.gather(*producers, return_exceptions=True)

    async def read(self, block: StoredBlock) -> memoryview | None:
        return await self._get(f"{self._blocks}{block.place}")

    def expected_key(self, block: StoredBlock) -> bytes | None:
        match = _PLACE.fullmatch(block.place)
        try:
            return None if match is None else bytes.fromhex(match[3])
        except ValueError:
            return None

    def _block(self, item: ObjectMeta) -> StoredBlock | None:
        """Return the block of an object, or None for an object that is not ours, which no command touches."""
        place = item["path"].removeprefix(self._blocks)
        match = _PLACE.fullmatch(place)
        if match is None:
            return None
        return StoredBlock(item["last_modified"].timestamp(), place, item["size"], match[1], match[2])

    async def _folders(self) -> list[str]:
        """Return the folders that hold blocks, below the prefix of all blocks, in order.

        Each epoch's blocks are spread over up to 256 folders, which are listed at the same time.
        """
        folders = [self._blocks]
        limit = asyncio.Semaphore(LISTINGS)

        async def below(folder: str) -> list[str]:
            async with limit:
                return await self._subfolders(folder)

        for _ in range(_FOLDERS_DEEP):
            folders = list(itertools.chain.from_iterable(await asyncio.gather(*map(below, folders))))
        return sorted(folder.removeprefix(self._blocks) for folder in folders)

    async def _subfolders(self, folder: str) -> list[str]:
        """Return the folders in a folder, or the folder itself if it holds objects too."""
        try:
            found = await obstore.list_with_delimiter_async(self._store.requests.client, folder.rstrip("/"))
        except STORE_FAILURES as error:
            raise self._translate(error, f"list {folder}") from error
        return [folder] if found["objects"] else [f"{name}/" for name in found["common_prefixes"]]

    async def _list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """Yield the objects below ``prefix`` behind the place ``after``, up to 1,000 at a time."""
        offset = f"{self._blocks}{after}" if after else None
        try:
            async for items in obstore.list(
                self._store.requests.client, prefix.rstrip("/"), offset=offset, chunk_size=_CHUNK
            ):
                # Some services ignore the offset of a listing.
                found = items if offset is None else [item for item in items if item["path"] > offset]
                if found:
                    yield found
        except STORE_FAILURES as error:
            raise self._translate(error, f"list {prefix}") from error

    async def _get(self, name: str) -> memoryview | None:
        try:
            found = await obstore.get_async(self._store.requests.client, name)
            return memoryview(await found.bytes_async()).cast("B")
        except FileNotFoundError:
            return None
        except STORE_FAILURES as error:
            raise self._translate(error, f"get {name}") from error

    # ---------------------------------------------------------------------------------------------------------- changes

    async def remove(self, blocks: Sequence[StoredBlock]) -> None:
        self._lease.check()
        await asyncio.to_thread(self._store.delete_objects, [f"{self._blocks}{block.place}" for block in blocks])

    @contextlib.asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        async with self._lease.held():
            yield

    async def collect(self, limits: Limits, *, dry_run: bool) -> Collected:
        """Remove the blocks that ``limits`` name, and those older than the tier's ``ttl``.

        The rules of some clouds, which would remove them, cannot be read.
        """
        self._lease_seconds = limits.grace
        ttl = self.options.ttl
        if ttl is not None:
            limits = dataclasses.replace(limits, older_than=min(limits.older_than or ttl, ttl))
        collected = await super().collect(limits, dry_run=dry_run)
        if not dry_run:
            await asyncio.to_thread(self._expire_documents)
        return collected

    def _expire_documents(self) -> None:
        """Remove the notes and settlements about corrupt objects, and the hot keys, that count no more."""
        self._store.remove_documents(ended(self._store.document_times(), self.clock()))
