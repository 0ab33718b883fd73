"""Contract of a tier's administration, which the command line uses.

A tier's definition names a class of this kind (:attr:`tiering.block_tier.definition.TierDefinition.admin`). Every
method has a default, so that a tier overrides only what its medium can do. Methods that move or list blocks are
asynchronous, because the command line keeps many of them running. No method needs an engine or a model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Self

from tiering.admin import collection
from tiering.admin.records import Collected, EpochState, Finding, KnownNamespace, Limits, StoredBlock, UnsupportedError
from tiering.secondary.options import TierOptions


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
        """Options of the tier."""
        self.replica = replica
        """Name of the data-parallel replica, or None."""
        self.unreadable = 0
        """Number of places that the last listing skipped because their header is damaged or cannot be read."""
        self.suspects = 0
        """Number of objects that the last listing of namespaces found noted as corrupt by a machine."""
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

    # ----------------------------------------------------------------------------------------------------------- probes

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

    # --------------------------------------------------------------------------------------------------------- contents

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

    # ---------------------------------------------------------------------------------------------------------- changes

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

        The default lists all blocks and removes those that go.

        Args:
            limits: blocks that go.
            dry_run: count only, remove nothing.
        """
        return await collection.collect(self, limits, dry_run=dry_run)

    async def clear(self, namespace: str, *, dry_run: bool) -> Collected:
        """Remove all blocks of a namespace. The default lists all blocks and removes those of the namespace.

        Args:
            namespace: base of the namespace as 32 hex digits.
            dry_run: count only, remove nothing.
        """
        return await collection.clear(self, namespace, dry_run=dry_run)

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
