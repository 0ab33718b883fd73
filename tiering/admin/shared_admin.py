"""Administration of a medium that engines share, over its block store and its documents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tiering.admin.namespaces import known_namespaces, namespace_of
from tiering.admin.records import Collected, KnownNamespace, StoredBlock
from tiering.admin.tier_admin import TierAdmin
from tiering.api.namespace import Namespace
from tiering.epochs.documents import LEASES
from tiering.epochs.driver import SURE_SECONDS, begin_common
from tiering.epochs.hot_keys import HOT, hot_namespace
from tiering.errors import StoreError
from tiering.index.shared import parse_place
from tiering.medium.block_store import BlockStore
from tiering.secondary.options import TierOptions

_WATCH_PAUSE = 1.0
"""Seconds between two looks for new epochs that the medium may have lost."""


class SharedAdmin(TierAdmin):
    """Administration of a shared medium. Engines may use the medium meanwhile.

    Places are those of a :class:`~tiering.index.shared.SharedIndex`. A subclass adds the probes, the scratch place and
    the listing of blocks; it overrides :meth:`namespaces` if leases that are not renewed stay on the medium.

    Args:
        options: options of the tier, whose ``location`` names the medium.
        store: block store of the medium, not open.
    """

    def __init__(self, options: TierOptions, store: BlockStore) -> None:
        super().__init__(options)
        self._store = store

    @property
    def place(self) -> str:
        return str(self.options.location)

    def open(self) -> None:
        self._store.open()

    def close(self) -> None:
        self._store.close()

    async def namespaces(self) -> list[KnownNamespace]:
        return await asyncio.to_thread(self._namespaces)

    def _namespaces(self) -> list[KnownNamespace]:
        listed = list(self._store.list_documents(""))
        self.hot_keys = sum(hot_namespace(name) is not None for name in listed)
        names = [name for name in listed if namespace_of(name) is not None]
        found = {name: self._store.read_document(name) for name in names}
        documents = {name: data for name, data in found.items() if data is not None}
        return known_namespaces(documents, [name for name in names if name.startswith(LEASES)])

    async def clear(self, namespace: str, *, dry_run: bool) -> Collected:
        cleared = await super().clear(namespace, dry_run=dry_run)
        if not dry_run:
            await asyncio.to_thread(self._clear_hot_keys, namespace)
        return cleared

    def _clear_hot_keys(self, namespace: str) -> None:
        for name in self._store.list_documents(HOT):
            if hot_namespace(name) == namespace:
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
