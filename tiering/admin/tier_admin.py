"""Contract of a tier's administration, which the command line uses.

A tier's definition names a class of this kind (:attr:`tiering.block_tier.definition.TierDefinition.admin`). Every
method has a default, so that a tier overrides only what its medium can do. Methods that move or list blocks are
asynchronous, because the command line keeps many of them running. No method needs an engine or a model.

Blocks pass through a collection in a stream: the memory that it takes does not depend on their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from tiering.admin.ages import Ages
from tiering.admin.records import (
    Adopted,
    Collected,
    EpochState,
    Finding,
    KnownNamespace,
    Limits,
    StoredBlock,
    UnsupportedError,
)
from tiering.secondary.options import TierOptions

BATCH = 1000
"""Blocks that are removed by one call."""

REMOVALS = 4
"""Batches that are removed at the same time."""


class TierAdmin:
    """Administration of one tier.

    Use it as a context manager: :meth:`open` and :meth:`close` surround all methods but :meth:`check` and
    :meth:`scratch`, which open what they need themselves.

    Args:
        options: options of the tier.
        replica: name of the data-parallel replica; None (default): none.
    """

    header_bytes: int = 128
    """Bytes from the start of a stored block to its payload; default 128."""

    def __init__(self, options: TierOptions, replica: str | None = None) -> None:
        self.options: Any = options
        self.replica = replica
        self.unreadable = 0
        """Number of places that the last listing skipped because their header is damaged or cannot be read."""
        self.suspects = 0
        """Number of objects that the last listing of namespaces found noted as corrupt by a machine."""
        self.hot_keys = 0
        """Number of engines whose published keys the last listing of namespaces found, for warm starts."""
        self.descriptions = 0
        """Number of documents that describe blocks for KV events, in the last listing of namespaces."""
        self.removed_blocks = 0
        """Number of blocks that this object has removed for certain, also before an operation failed."""
        self.removed_bytes = 0
        """Bytes of these blocks."""
        self.clock: Callable[[], float] = time.time
        """Function that returns seconds since 1970, compared with the medium's own times."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def replicas(self) -> Sequence[str]:
        """Return the names of the replicas, or of the namespaces of a service, that have places of their own."""
        return ()

    @property
    def name(self) -> str:
        """Name of the tier."""
        return str(self.options.tier_name)

    @property
    def place(self) -> str:
        """The medium's place, for people."""
        return self.name

    def open(self) -> None:
        """Make the medium readable.

        Raises:
            StoreError: the medium cannot be read.
        """

    def close(self) -> None:
        """Release the medium. May be called twice."""

    def owner(self) -> str | None:
        """Return the process that owns the medium at present, for people; None if there is none.

        An owned medium is only read.
        """
        return None

    def conflict(self, other: TierAdmin) -> str:
        """Return why an engine cannot use this medium beside that of ``other``; empty (default) if it can.

        Args:
            other: administration of another tier of the same stack.
        """
        return ""

    def check(self, block_bytes: int) -> Iterator[Finding]:
        """Yield what probes of the medium found. A medium in use is only read.

        Args:
            block_bytes: bytes of the largest block.
        """
        yield from ()

    @contextlib.contextmanager
    def scratch(self, capacity: int) -> Iterator[TierOptions | None]:
        """Provide options of a like tier at a scratch place on the medium, removed afterwards.

        The default provides None: the medium has no such place, and no block is moved through it.

        Args:
            capacity: bytes that the place must hold.

        Raises:
            StoreError: the place cannot be made.
        """
        yield None

    def device_limit(self, block_bytes: int, depth: int, *, load: bool, nbytes: int, seconds: float) -> float | None:
        """Return bytes per second of the bare device with the same access; None (default) if there is none.

        Args:
            block_bytes: bytes of a block.
            depth: blocks in flight at the same time.
            load: True for loads, False for stores.
            nbytes: bytes that the access spreads over.
            seconds: time that the measurement may take.

        Raises:
            StoreError: the device cannot be used.
        """
        return None

    async def namespaces(self) -> list[KnownNamespace]:
        """Return the namespaces that the medium's documents name.

        Raises:
            StoreError: the documents cannot be listed.
        """
        return []

    async def used_epochs(self) -> set[str]:
        """Return the fingerprints of all epochs that engines use or may use, in hexadecimal.

        Raises:
            StoreError: the documents cannot be listed.
        """
        return {
            fingerprint
            for namespace in await self.namespaces()
            for fingerprint, state in namespace.epochs.items()
            if state is not EpochState.ABANDONED
        }

    def blocks(self, after: str = "") -> AsyncIterator[StoredBlock]:
        """Yield all blocks, in an order that does not change between calls.

        Args:
            after: place of the last block to skip; default: none is skipped.

        Raises:
            UnsupportedError: the medium cannot list its blocks.
            StoreError: the blocks cannot be listed.
        """
        raise UnsupportedError(f"the tier {self.name} cannot list its blocks")

    async def read(self, block: StoredBlock) -> memoryview | None:
        """Return the stored bytes of a block, header first; None if it is not there any more.

        Raises:
            StoreError: the block cannot be read.
        """
        raise UnsupportedError(f"the tier {self.name} cannot read single blocks")

    def expected_key(self, block: StoredBlock) -> bytes | None:
        """Return the key that the block at this place must have; None (default) if the place does not fix it."""
        return None

    async def remove(self, blocks: Sequence[StoredBlock]) -> None:
        """Remove blocks, absent ones included.

        Raises:
            UnsupportedError: the medium cannot remove single blocks.
            StoreError: a block cannot be removed.
        """
        raise UnsupportedError(f"the tier {self.name} cannot remove single blocks")

    @contextlib.asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        """Keep other collections off the medium while the context lasts. The default keeps none off.

        Raises:
            StoreError: another collection runs, or it cannot be found out.
        """
        yield

    async def collect(self, limits: Limits, *, dry_run: bool) -> Collected:
        """Remove the blocks that ``limits`` name. Blocks that were removed before an error stay removed.

        The default lists all blocks and removes those that go. An epoch counts as abandoned if neither an epoch
        document nor a lease younger than ``limits.grace`` names it. A bound on the total takes a second listing, and
        chooses by the time of writing (:mod:`tiering.admin.ages`). Blocks that were written since the first listing
        stay.

        Args:
            limits: blocks that go.
            dry_run: count only, remove nothing.

        Raises:
            StoreError: the blocks cannot be listed or removed, or another collection runs.
        """
        async with contextlib.nullcontext() if dry_run else self.exclusively():
            now, kept = self.clock(), Ages()
            used = await self.used_epochs() if limits.abandoned else set[str]()

            def goes(block: StoredBlock) -> bool:
                age = now - block.modified
                abandoned = limits.abandoned and block.fingerprint != "" and block.fingerprint not in used
                return (abandoned and age > limits.grace) or (limits.older_than is not None and age > limits.older_than)

            first = await self._remove_where(goes, kept, dry_run=dry_run)
            if limits.max_total is None or kept.total <= limits.max_total:
                return first
            cut = kept.cut(limits.max_total)
            second = await self._remove_where(
                lambda block: not goes(block) and cut.takes(block.modified, block.nbytes), Ages(), dry_run=dry_run
            )
            return replace(
                first,
                removed_blocks=first.removed_blocks + second.removed_blocks,
                removed_bytes=first.removed_bytes + second.removed_bytes,
            )

    async def clear(self, namespace: str, *, dry_run: bool) -> Collected:
        """Remove all blocks of a namespace. The default lists all blocks and removes those of the namespace.

        Args:
            namespace: base of the namespace as 32 hex digits.
            dry_run: count only, remove nothing.

        Raises:
            StoreError: the blocks cannot be listed or removed; blocks removed before the error stay removed.
        """
        return await self._remove_where(lambda block: block.namespace == namespace, Ages(), dry_run=dry_run)

    def adopt(self, roots: Sequence[str], *, dry_run: bool) -> Iterator[Adopted]:
        """Yield what becomes of places that engines had before a machine's service took the tier over.

        Args:
            roots: paths of the places.
            dry_run: change nothing.

        Raises:
            UnsupportedError: the medium has no such places.
            StoreError: a place cannot be read or changed.
        """
        raise UnsupportedError(f"the tier {self.name} has no directory of each engine's own")

    async def _remove_where(self, goes: Callable[[StoredBlock], bool], kept: Ages, *, dry_run: bool) -> Collected:
        """List all blocks, remove those for which ``goes`` returns True, and add the others to ``kept``."""
        listed = listed_bytes = 0
        async with _Remover(self, dry_run=dry_run) as remover:
            async for block in self.blocks():
                listed += 1
                listed_bytes += block.nbytes
                if goes(block):
                    await remover.remove(block)
                else:
                    kept.add(block.modified, block.nbytes)
        return Collected(listed, listed_bytes, remover.removed, remover.removed_bytes)

    async def begin_epoch(self, namespace: str, invalidation: bytes) -> str | None:
        """Begin a new common epoch of a namespace, and return a sentence about when engines follow.

        Nothing happens if the medium has the invalidation already. The result is None if the namespace has no epoch
        on the medium that could end: no engine serves its blocks.

        Args:
            namespace: base of the namespace as 32 hex digits.
            invalidation: identifier of the invalidation, 16 bytes, the same on all media of a stack.

        Raises:
            UnsupportedError: the medium has no common epochs.
            StoreError: the epoch cannot be written.
        """
        raise UnsupportedError(f"the tier {self.name} keeps no epochs")

    @property
    def watch_seconds(self) -> float:
        """Seconds for which :meth:`watch_epochs` watches over new epochs; 0 (default): not at all.

        A medium that may lose all documents at once needs this until every running engine has noticed.
        """
        return 0.0

    async def watch_epochs(self, namespaces: Sequence[str], invalidation: bytes) -> None:
        """Begin epochs again that the medium loses within :attr:`watch_seconds` after :meth:`begin_epoch`.

        The default returns at once.

        Args:
            namespaces: the namespaces whose epochs this object has begun.
            invalidation: identifier of the invalidation.

        Raises:
            StoreError: the medium does not answer at the end.
        """


class _Remover:
    """Counts removed blocks, and removes them in batches while the listing goes on."""

    def __init__(self, admin: TierAdmin, *, dry_run: bool) -> None:
        self._admin = admin
        self._dry_run = dry_run
        self._batch: list[StoredBlock] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.removed = self.removed_bytes = 0

    async def __aenter__(self) -> Self:
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
