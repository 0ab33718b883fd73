"""Administration of a medium that engines share, over its block store and its documents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from tiering.admin.namespaces import known_namespaces, namespace_of
from tiering.admin.records import Collected, KnownNamespace, StoredBlock
from tiering.admin.tier_admin import TierAdmin
from tiering.api.namespace import Namespace
from tiering.epochs.documents import LEASES, hint_namespace
from tiering.epochs.driver import SURE_SECONDS, begin_common
from tiering.epochs.hot_keys import HOT, HOT_SECONDS
from tiering.epochs.speeds import SPEEDS
from tiering.errors import StoreError, TemporaryStoreError
from tiering.index.shared import parse_place
from tiering.medium.block_store import BlockStore
from tiering.secondary.options import TierOptions

LEASE_SECONDS = 86400.0
"""Age in seconds up to which a lease counts as fresh. Engines renew leases every hour."""

READS = 16
"""Documents that are read at the same time."""

_WATCH_PAUSE = 1.0
"""Seconds between two looks for new epochs that the medium may have lost."""


class SharedAdmin(TierAdmin):
    """Administration of a shared medium. Engines may use the medium meanwhile.

    Places are those of a :class:`~tiering.index.shared.SharedIndex`. A subclass adds the probes, the scratch place and
    the listing of blocks; it overrides :meth:`document_ages` if documents that count no more stay on the medium.

    Args:
        options: options of the tier, whose ``location`` names the medium.
        store: block store of the medium, not open.
    """

    def __init__(self, options: TierOptions, store: BlockStore) -> None:
        super().__init__(options)
        self._store = store
        self._lease_seconds = LEASE_SECONDS

    @property
    def place(self) -> str:
        return str(self.options.location)

    def open(self) -> None:
        self._store.open()

    def close(self) -> None:
        self._store.close()

    def document_ages(self) -> Mapping[str, float]:
        """Return the age of each document in seconds, by name.

        The default is 0 for each, for a medium that itself drops documents that count no more.

        Raises:
            StoreError: the documents cannot be listed.
        """
        return dict.fromkeys(self._store.list_documents(""), 0.0)

    async def namespaces(self) -> list[KnownNamespace]:
        ages = await asyncio.to_thread(self.document_ages)
        published = [name for name, age in ages.items() if name.startswith(HOT) and age < HOT_SECONDS]
        self.hot_keys = sum(hint_namespace(name) is not None for name in published)
        fresh = [name for name, age in ages.items() if name.startswith(LEASES) and age < self._lease_seconds]
        names = [name for name in ages if namespace_of(name) is not None and not name.startswith(LEASES)]
        limit = asyncio.Semaphore(READS)

        async def read(name: str) -> tuple[str, bytes | None]:
            async with limit:
                return name, await asyncio.to_thread(self._store.read_document, name)

        found = await asyncio.gather(*map(read, [*names, *fresh]))
        if unread := {name for name, data in found if data is None and name not in fresh}:
            # Without its epoch document an epoch would count as abandoned. One removed meanwhile is not listed again.
            ages = await asyncio.to_thread(self.document_ages)
            if listed := sorted(unread.intersection(ages)):
                raise TemporaryStoreError(
                    f"{listed[0]} is listed and cannot be read, so the epochs in use are not known; nothing is removed"
                )
        return known_namespaces({name: data for name, data in found if data is not None}, fresh)

    async def clear(self, namespace: str, *, dry_run: bool) -> Collected:
        cleared = await super().clear(namespace, dry_run=dry_run)
        if not dry_run:
            await asyncio.to_thread(self._clear_hints, namespace)
        return cleared

    def _clear_hints(self, namespace: str) -> None:
        for prefix in (HOT, SPEEDS):
            for name in self._store.list_documents(prefix):
                if hint_namespace(name) == namespace:
                    self._store.remove_document(name)

    def expected_key(self, block: StoredBlock) -> bytes | None:
        named = parse_place(block.place)
        return None if named is None else named.key

    async def remove(self, blocks: Sequence[StoredBlock]) -> None:
        await asyncio.to_thread(self._store.delete, [block.place for block in blocks])

    async def begin_epoch(self, namespace: str, invalidation: bytes) -> str:
        # The name alone decides: a namespace whose parameters are damaged has blocks that engines serve, too.
        await asyncio.to_thread(begin_common, self._store, Namespace.named(namespace), invalidation)
        return "engines that run follow within a minute, and empty their CPU tiers and disks"

    @property
    def watch_seconds(self) -> float:
        # An engine that has not looked for longer takes lost documents for those of a new epoch.
        return SURE_SECONDS if self._store.traits.forgets else 0.0

    async def watch_epochs(self, namespaces: Sequence[str], invalidation: bytes) -> None:
        end = time.monotonic() + self.watch_seconds
        while True:
            error: StoreError | None = None
            try:
                for namespace in namespaces:
                    await self.begin_epoch(namespace, invalidation)
            except StoreError as failure:
                error = failure
            if time.monotonic() >= end:
                break
            await asyncio.sleep(_WATCH_PAUSE)
        if error is not None:
            raise error
