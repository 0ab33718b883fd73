"""Contract of a tier's administration, which the command line uses.

A tier's definition names a class of this kind (:attr:`tiering.secondary.definition.TierDefinition.admin`). Every method
has a default, so that a tier overrides only what its medium can do. Methods that move or list blocks are asynchronous,
because the command line keeps many of them running. No method needs an engine or a model.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tiering.errors import TieringError
from tiering.secondary.options import TierOptions


class UnsupportedError(TieringError):
    """An administrative operation that a tier's medium does not have."""


class Severity(enum.StrEnum):
    """Weight of a finding."""

    OK = "ok"
    """The medium is as it should be."""
    INFO = "info"
    """A fact that explains how the tier will work."""
    WARNING = "warning"
    """The tier works, but slower, smaller or at a higher cost than the stack says."""
    ERROR = "error"
    """The tier will not work, or not store."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one probe."""

    severity: Severity
    """Weight of the finding."""
    subject: str
    """The part that was probed, in a few words: "O_DIRECT", "free space"."""
    text: str
    """The observation."""
    remedy: str = ""
    """The next step for the operator; default: none is needed."""


@dataclass(frozen=True, slots=True, order=True)
class StoredBlock:
    """A block on a medium. Sorting puts the oldest first."""

    modified: float
    """Time in seconds since 1970 after which the block was not written any more."""
    place: str
    """Text that identifies the block's place, for the tier's own methods."""
    nbytes: int
    """Bytes of the block on the medium: header and payload."""
    namespace: str = ""
    """Base of the namespace as 32 hex digits; empty (default) if the medium does not name it."""
    fingerprint: str = ""
    """Fingerprint of namespace and epoch as 32 hex digits; empty (default) if the medium does not name it."""


class EpochState(enum.StrEnum):
    """Relation of an epoch to the engines."""

    CURRENT = "current"
    """Engines that start now serve the epoch's blocks."""
    LEASED = "leased"
    """A running engine uses the epoch, and renews its lease."""
    ABANDONED = "abandoned"
    """No engine that starts now serves the epoch's blocks, and no lease is fresh."""


@dataclass(frozen=True, slots=True)
class KnownNamespace:
    """A namespace according to the documents on a medium."""

    name: str
    """Base of the namespace as 32 hex digits."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Readable parameters; empty (default) if their document is missing."""
    epochs: Mapping[str, EpochState] = field(default_factory=dict)
    """State of each epoch that a document or lease names, by fingerprint in hexadecimal."""
    holders: Mapping[str, str] = field(default_factory=dict)
    """Process that wrote the lease of each leased epoch last, by fingerprint in hexadecimal."""

    @property
    def label(self) -> str:
        """The model's name or the beginning of its weights' digest, and the data type, for people."""
        model = self.parameters.get("model")
        if not isinstance(model, Mapping):
            return "unknown model"
        return f"{model.get('name') or str(model.get('weights', '?'))[:12]}, {model.get('dtype', '?')}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Blocks that a collection removes. The limits add up; without any, nothing is removed."""

    abandoned: bool = False
    """True to remove the blocks of abandoned epochs that are older than ``grace``; default False."""
    older_than: float | None = None
    """Age in seconds above which a block is removed; None (default): no limit."""
    max_total: int | None = None
    """Bytes that may remain on the medium; None (default): no limit.

    The oldest blocks go. Of blocks that were written within about an hour, the tails of prefixes go before the heads.
    """
    grace: float = 86400.0
    """Age in seconds below which blocks and leases of abandoned epochs are kept; default: a day."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Result of a collection. A dry run counts the blocks that a real run would remove."""

    blocks: int = 0
    """Blocks that were listed."""
    nbytes: int = 0
    """Bytes of the listed blocks."""
    removed_blocks: int = 0
    """Blocks that were removed."""
    removed_bytes: int = 0
    """Bytes of the removed blocks."""


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
        from tiering.secondary.admin.collection import collect

        return await collect(self, limits, dry_run=dry_run)

    async def clear(self, namespace: str, *, dry_run: bool) -> Collected:
        """Remove all blocks of a namespace. The default lists all blocks and removes those of the namespace.

        Args:
            namespace: base of the namespace as 32 hex digits.
            dry_run: count only, remove nothing.
        """
        from tiering.secondary.admin.collection import clear

        return await clear(self, namespace, dry_run=dry_run)

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
