"""Administration of a bucket for the command line: contents, verification, collection and epochs.

Listing runs over many folders of the bucket at the same time. Nothing here writes a lifecycle rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import obstore

from tiering import StoreError
from tiering.tier import (
    Collected,
    EpochState,
    Finding,
    Limits,
    SharedAdmin,
    StoredBlock,
    TierOptions,
    parse_place,
)
from tiers.coordination.probes import probe_coordination
from tiers.object.bucket_options import BLOCKS, SUSPECTS, BucketOptions, without_ttl
from tiers.object.clouds import make_cloud
from tiers.object.collection_lease import CollectionLease
from tiers.object.identity import probe_identity
from tiers.object.permissions import probe_bucket
from tiers.object.store import ObjectStore
from tiers.object.suspects import NOTE_SECONDS, ended
from tiers.valkey.client import ServerAddress

if TYPE_CHECKING:
    from obstore import ObjectMeta

LISTINGS = 16
"""Folders that are listed at the same time."""

_FOLDERS_DEEP = 3
"""Levels of folders above a block: the namespace, its epoch, and two digits of the key."""

_CHUNK = 1000
_CHUNKS_AHEAD = 4


class ObjectAdmin(SharedAdmin):
    """Administration of a bucket."""

    options: BucketOptions
    _store: ObjectStore

    def __init__(self, options: BucketOptions) -> None:
        cloud = make_cloud(options)
        super().__init__(options, ObjectStore(without_ttl(options), cloud))
        self._translated = cloud.dialect.translated
        self._blocks = f"{self.options.prefix}{BLOCKS}"
        self._lease = CollectionLease(self._store, self.place)

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
        with self._translated(f"list {self.options.prefix}"):
            for objects in obstore.list(client, self.options.prefix.rstrip("/"), chunk_size=_CHUNK):
                self._store.delete_objects([item["path"] for item in objects])

    def document_ages(self) -> Mapping[str, float]:
        now = self.clock()
        ages = {name: now - written for name, written in self._store.document_times().items()}
        self.suspects = sum(name.startswith(SUSPECTS) and age < NOTE_SECONDS for name, age in ages.items())
        return ages

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

    def _block(self, item: ObjectMeta) -> StoredBlock | None:
        """Return the block of an object, or None for an object that is not ours, which no command touches."""
        place = item["path"].removeprefix(self._blocks)
        named = parse_place(place)
        if named is None:
            return None
        return StoredBlock(item["last_modified"].timestamp(), place, item["size"], named.namespace, named.fingerprint)

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
        with self._translated(f"list {folder}"):
            found = await obstore.list_with_delimiter_async(self._store.requests.client, folder.rstrip("/"))
        return [folder] if found["objects"] else [f"{name}/" for name in found["common_prefixes"]]

    async def _list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """Yield the objects below ``prefix`` behind the place ``after``, up to 1,000 at a time."""
        offset = f"{self._blocks}{after}" if after else None
        with self._translated(f"list {prefix}"):
            async for items in obstore.list(
                self._store.requests.client, prefix.rstrip("/"), offset=offset, chunk_size=_CHUNK
            ):
                # Some services ignore the offset of a listing.
                found = items if offset is None else [item for item in items if item["path"] > offset]
                if found:
                    yield found

    async def _get(self, name: str) -> memoryview | None:
        with self._translated(f"get {name}"), contextlib.suppress(FileNotFoundError):
            found = await obstore.get_async(self._store.requests.client, name)
            return memoryview(await found.bytes_async()).cast("B")
        return None

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
        """Remove the notes, settlements, hot keys and speeds that count no more."""
        self._store.remove_documents(ended(self._store.document_times(), self.clock()))
