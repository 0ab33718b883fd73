"""Contract of a medium: a :class:`BlockStore` moves framed blocks to and from given places.

A store has no index and takes no decisions. Retries, deadlines of attempts and circuit breakers are layers with the
same interface (:mod:`tiering.medium.layers`), written once for all stores. Checksums and compression belong to
the frames that a store moves (:mod:`tiering.medium.codec`). A store runs on the I/O side, and several threads
call it at once.

Every store must keep these guarantees, which the conformance suite (:mod:`tiering.testing`) tests:

- A put is atomic: a reader sees the whole block or none of it, or bytes that the frame's checksum refuses.
- After a put reported DONE, the block survives the death of the process, for media that outlive the process.
- A get fills the given buffers completely, or its outcome is ABSENT or an error. A get never returns short data as
  DONE.
- Absence is not an error. Errors are :class:`tiering.errors.TemporaryStoreError` or
  :class:`~tiering.errors.PermanentStoreError`.
- Each block has its own outcome: the failure of one block does not affect the outcomes of others.
- No method holds the interpreter lock while it moves bytes.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiering.api.transfer import Done, Outcome, Place
from tiering.errors import PermanentStoreError, StoreError

__all__ = [
    "BatchStore",
    "BlockIO",
    "BlockStore",
    "Done",
    "Outcome",
    "Place",
    "RawBlock",
    "Settlement",
    "StoreProbe",
    "StoreTraits",
]


@dataclass(slots=True)
class BlockIO:
    """One framed block on its way to or from a store.

    ``header`` and ``payload`` are writable, contiguous memoryviews of format "B", aligned to the ``alignment`` in the
    store's traits. A put only reads them.
    """

    key: bytes
    """Key of the block."""
    place: Place
    """Place of the block on the medium."""
    header: memoryview
    """Header of the frame, followed by zeros; ``traits.header_bytes`` long."""
    payload: memoryview
    """Bytes after the header, possibly a primary row itself.

    For a get, the length of ``payload`` is the number of bytes to fill. For stores with ``variable_size`` in their
    traits, ``payload`` is at least as long as the stored payload.
    """
    deadline: float = float("inf")
    """Monotonic time after which no attempt starts, the same for all blocks of a call; default: none."""
    filled: int = -1
    """Payload bytes read by a get; set by stores with ``variable_size`` only, otherwise -1 (default)."""


@dataclass(frozen=True, slots=True)
class StoreProbe:
    """Result of :meth:`BlockStore.probe`."""

    held: tuple[bool | None, ...]
    """For each place: True if a block is there, False if not, None if the store could not find out."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """Fixed properties of a store, which never change while the process runs.

    Raises:
        ValueError: a number is too small, or the alignment is not a power of two.
    """

    medium: str
    """Name of the medium in metrics: "DISK", "OBJECT", "MEMORY", or another word."""
    header_bytes: int = 128
    """Bytes reserved for the header of a frame, at least 128 (default); media with aligned I/O round up."""
    alignment: int = 1
    """Alignment in bytes of the memory and length of every buffer, a power of two; default 1."""
    variable_size: bool = False
    """True if the store accepts blocks of any length, as compression needs; default False."""
    batches: bool = False
    """True if ``put`` and ``get`` move several blocks at once; False (default): one block after the other.

    A store with batches receives units of up to 8 MiB, other stores units of up to 1 MiB.
    """
    forgets: bool = False
    """True if all documents of the medium may vanish at once; default False.

    A server that keeps them in memory does so at a restart.
    """

    def __post_init__(self) -> None:
        if self.header_bytes < 128:
            raise ValueError(f"traits of {self.medium}: header_bytes is {self.header_bytes}; a header needs 128 bytes")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"traits of {self.medium}: alignment is {self.alignment}; it must be a power of two")


@dataclass(frozen=True, slots=True)
class RawBlock:
    """One version of a block on a shared medium, as :meth:`BlockStore.read_again` received it."""

    content: bytes
    """Header and payload; empty if the object is longer than any block."""
    size: int
    """Length of the object in bytes."""
    version: str
    """Text that identifies this version of the object for the medium; empty: the medium has none."""
    proven: bool = False
    """True if a digest that the medium keeps proves that it holds these very bytes; default False."""


class Settlement(enum.Enum):
    """End of a block that a load refused as corrupt; the first three need no decision of the store."""

    GONE = "it is not there any more"
    SOUND = "a second read is sound: suspect the memory of this machine, or a proxy; the block is left there"
    UNSTABLE = "two more reads differ: suspect a proxy, or the memory of this machine; the block is left there"
    DELETED = "it is corrupt on the medium and was deleted"
    REPLACED = (
        "it is corrupt on the medium, but was replaced meanwhile or cannot be deleted by version; it is left there"
    )
    RENEWED = (
        "it reads corrupt here and stays: no other machine has confirmed that, or enough was deleted this hour; this "
        "process uses a second name for the block"
    )
    LEFT = "it reads corrupt here and stays: no other machine has confirmed that, or enough was deleted this hour"


class BlockStore(ABC):
    """A medium for framed blocks.

    Subclasses declare :attr:`traits`, and implement :meth:`put_one` and :meth:`get_one`. Media with faster batch
    operations subclass :class:`BatchStore` instead.
    """

    @property
    @abstractmethod
    def traits(self) -> StoreTraits:
        """Fixed properties of the store; most stores declare them as a class attribute."""

    def open(self) -> None:
        """Make the medium ready.

        Called on the I/O side, and again after failures. The store of a medium that one tier owns is also closed and
        opened again, if its documents could not be used or if another medium has taken its place.

        Raises:
            StoreError: the medium cannot be used.
        """

    def close(self) -> None:
        """Release the medium.

        No other call is running. May be called twice, and without :meth:`open`.
        """

    @abstractmethod
    def put_one(self, block: BlockIO) -> None:
        """Write one block, replacing the previous content of its place.

        Raises:
            StoreError: the block could not be written.
        """

    @abstractmethod
    def get_one(self, block: BlockIO) -> Done:
        """Fill one block's buffers; return DONE, or ABSENT if there is no block at the place.

        Raises:
            StoreError: the block could not be read.
        """

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        """Write several blocks and return co-indexed outcomes; does not raise :class:`StoreError`."""
        outcomes: list[Outcome] = []
        for block in blocks:
            try:
                self.put_one(block)
                outcomes.append(Done.DONE)
            except StoreError as error:
                outcomes.append(error)
        return outcomes

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        """Fill several blocks' buffers and return co-indexed outcomes; does not raise :class:`StoreError`."""
        outcomes: list[Outcome] = []
        for block in blocks:
            try:
                outcomes.append(self.get_one(block))
            except StoreError as error:
                outcomes.append(error)
        return outcomes

    def delete(self, places: Sequence[Place]) -> None:
        """Delete blocks, ignoring absent ones.

        Media with slots need not implement this method.

        Raises:
            StoreError: a block could not be deleted.
        """

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        """Return which blocks are on the medium, without reading them; does not raise :class:`StoreError`.

        Called for shared media only.
        """
        return StoreProbe(tuple(None for _ in places))

    def read_again(self, place: Place, limit: int) -> RawBlock | None:
        """Read a block that was refused as corrupt once more, over a connection of its own.

        The answer does not share memory, a connection or a cache with earlier reads. Called for shared media only.

        Args:
            place: place of the block.
            limit: longest content to return, in bytes.

        Returns:
            The block; None if there is none.

        Raises:
            StoreError: the block could not be read, or (the default) the medium cannot read this way.
        """
        raise PermanentStoreError("this medium cannot read a block again over a new connection")

    def delete_version(self, place: Place, version: str) -> bool:
        """Delete a block if it is still the given version, and return True if it was deleted.

        The default deletes nothing.

        Args:
            place: place of the block.
            version: the version from :meth:`read_again`.

        Raises:
            StoreError: the block could not be deleted.
        """
        return False

    def settle(self, place: Place, found: RawBlock) -> Settlement:
        """Decide about a block that two equal reads of this machine found corrupt.

        A shared block is not deleted on one machine's word. The default deletes it if the medium's digest proves the
        damage, and leaves it otherwise.

        Args:
            place: place of the block.
            found: the block as :meth:`read_again` returned it.

        Raises:
            StoreError: the decision could not be made or carried out; the block is left there.
        """
        if not found.proven or not found.version:
            return Settlement.LEFT
        return Settlement.DELETED if self.delete_version(place, found.version) else Settlement.REPLACED

    def read_document(self, name: str) -> bytes | None:
        """Return a small document stored beside the blocks; None if there is no such document.

        Documents hold, for example, the namespace's parameters and the reset epoch.

        Args:
            name: name of the document, made of [a-z0-9.-].

        Raises:
            StoreError: the document could not be read.
        """
        return None

    def write_document(self, name: str, data: bytes) -> None:
        """Replace a document atomically and durably.

        Raises:
            StoreError: the document could not be written.
        """

    def list_documents(self, prefix: str) -> Iterable[str]:
        """Return the names of the documents whose names start with ``prefix``, in any order.

        Called to explain a problem to the user, and on a shared medium about every 30 seconds, to find epoch documents
        after one that was lost. A store that cannot list documents returns none.

        Raises:
            StoreError: the documents could not be listed.
        """
        return ()

    def documents_beside(self, prefix: str) -> Mapping[str, Callable[[], bytes | None]]:
        """Return functions that read the documents of other parts of the medium, by name.

        The default has no other parts. Called to explain a problem to the user, as :meth:`list_documents` is.

        Args:
            prefix: beginning of the names.

        Raises:
            StoreError: the documents could not be listed.
        """
        return {}

    def create_document(self, name: str, data: bytes) -> bytes | None:
        """Write a document unless it exists, and return its content afterwards; None if it cannot be read.

        On a medium that several engines share, all concurrent callers should receive the same content.

        Raises:
            StoreError: the document could not be read or written.
        """
        if self.read_document(name) is None:
            self.write_document(name, data)
        return self.read_document(name)

    def prove_damage(self, name: str, content: bytes) -> None:
        """Return if the medium itself holds ``content``, which the checksum of a document refuses.

        Others may read the document as it was written if the damage was done on the way. The default trusts the way.

        Raises:
            StoreError: it is not proved that the document on the medium is damaged.
        """

    def remove_document(self, name: str) -> None:
        """Make a document's content unreadable, durably, also on a full medium.

        Afterwards :meth:`read_document` returns None or bytes that pass no checksum.

        Raises:
            StoreError: the document could not be removed.
        """
        self.write_document(name, b"")


class BatchStore(BlockStore):
    """A medium that moves several blocks at once.

    Subclasses implement :meth:`put` and :meth:`get`, and set ``batches`` in their :attr:`traits`.
    """

    @abstractmethod
    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        """Write several blocks and return co-indexed outcomes; does not raise :class:`StoreError`."""

    @abstractmethod
    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        """Fill several blocks' buffers and return co-indexed outcomes; does not raise :class:`StoreError`."""

    def put_one(self, block: BlockIO) -> None:
        (outcome,) = self.put((block,))
        if isinstance(outcome, StoreError):
            raise outcome

    def get_one(self, block: BlockIO) -> Done:
        (outcome,) = self.get((block,))
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome
