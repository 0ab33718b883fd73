"""Collection of blocks on media whose blocks can be listed and removed one by one.

Blocks pass in a stream: the memory that a collection takes does not depend on their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from tiering.admin.ages import Ages
from tiering.admin.records import Collected, Limits, StoredBlock

BATCH = 1000
"""Blocks that are removed by one call."""

REMOVALS = 4
"""Batches that are removed at the same time."""


class Collectable(Protocol):
    """The part of a tier's administration that a collection needs, as ``TierAdmin`` has it."""

    removed_blocks: int
    """Number of blocks that have been removed."""
    removed_bytes: int
    """Bytes of these blocks."""

    @property
    def clock(self) -> Callable[[], float]: ...

    def blocks(self, after: str = "") -> AsyncIterator[StoredBlock]: ...

    def exclusively(self) -> AbstractAsyncContextManager[None]: ...

    async def used_epochs(self) -> set[str]: ...

    async def remove(self, blocks: Sequence[StoredBlock]) -> None: ...


class _Remover:
    """Counts removed blocks, and removes them in batches while the listing goes on."""

    def __init__(self, admin: Collectable, *, dry_run: bool) -> None:
        self._admin = admin
        self._dry_run = dry_run
        self._batch: list[StoredBlock] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.removed = self.removed_bytes = 0

    async def __aenter__(self) -> _Remover:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                await self._flush()
                while self._tasks:
                    await self._end_one()
        finally:
            # Cancelled tasks would not stop the threads that remove, and the blocks that these remove must count.
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def remove(self, block: StoredBlock) -> None:
        self.removed += 1
        self.removed_bytes += block.nbytes
        if not self._dry_run:
            self._batch.append(block)
            if len(self._batch) == BATCH:
                await self._flush()

    async def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._tasks.add(asyncio.create_task(self._remove(batch)))
            if len(self._tasks) == REMOVALS:
                await self._end_one()

    async def _remove(self, batch: list[StoredBlock]) -> None:
        await self._admin.remove(batch)
        self._admin.removed_blocks += len(batch)
        self._admin.removed_bytes += sum(block.nbytes for block in batch)

    async def _end_one(self) -> None:
        done, self._tasks = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def collect(admin: Collectable, limits: Limits, *, dry_run: bool) -> Collected:
    """Remove the blocks that ``limits`` name, and return how many they were.

    An epoch counts as abandoned if neither an epoch document nor a lease younger than ``limits.grace`` names it. A
    bound on the total takes a second listing, and chooses by the time of writing (:mod:`tiering.admin.ages`).
    Blocks that were written since the first listing stay.

    Args:
        admin: administration of the tier.
        limits: blocks that go.
        dry_run: count only, remove nothing.

    Raises:
        StoreError: the blocks cannot be listed or removed, or another collection runs; blocks removed before the error
            stay removed.
    """
    if dry_run:
        return await _collect(admin, limits, dry_run=True)
    async with admin.exclusively():
        return await _collect(admin, limits, dry_run=False)


async def _collect(admin: Collectable, limits: Limits, *, dry_run: bool) -> Collected:
    now = admin.clock()
    used = await admin.used_epochs() if limits.abandoned else set[str]()
    kept = Ages()
    listed = listed_bytes = 0

    def goes(block: StoredBlock) -> bool:
        age = now - block.modified
        abandoned = limits.abandoned and block.fingerprint != "" and block.fingerprint not in used
        return (abandoned and age > limits.grace) or (limits.older_than is not None and age > limits.older_than)

    async with _Remover(admin, dry_run=dry_run) as remover:
        async for block in admin.blocks():
            listed += 1
            listed_bytes += block.nbytes
            if goes(block):
                await remover.remove(block)
            else:
                kept.add(block.modified, block.nbytes)
    async with _Remover(admin, dry_run=dry_run) as second:
        if limits.max_total is not None and kept.total > limits.max_total:
            cut = kept.cut(limits.max_total)
            async for block in admin.blocks():
                if not goes(block) and cut.takes(block.modified, block.nbytes):
                    await second.remove(block)
    removed, removed_bytes = remover.removed + second.removed, remover.removed_bytes + second.removed_bytes
    return Collected(listed, listed_bytes, removed, removed_bytes)


async def clear(admin: Collectable, namespace: str, *, dry_run: bool) -> Collected:
    """Remove all blocks of a namespace, and return how many they were.

    Raises:
        StoreError: the blocks cannot be listed or removed; blocks removed before the error stay removed.
    """
    listed = listed_bytes = 0
    async with _Remover(admin, dry_run=dry_run) as remover:
        async for block in admin.blocks():
            listed += 1
            listed_bytes += block.nbytes
            if block.namespace == namespace:
                await remover.remove(block)
    return Collected(listed, listed_bytes, remover.removed, remover.removed_bytes)
