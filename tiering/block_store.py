"""The contract of a medium: a :class:`BlockStore` moves framed blocks to and from places that it is told, and nothing else.

A store keeps no index, takes no decision, and knows nothing of retries, checksums, compression or deadlines: those are
layers (:mod:`tiering.secondary.io.layers`) with this same interface, written once.  It runs on the I/O side, called by
several threads at once.

What MUST hold, and what the conformance suite (:mod:`tiering.testing`) checks on every store:

- A put is atomic: a reader sees the whole block or none of it (or bytes that the frame's checksum refuses); after it
  reported DONE, the block survives the death of the process, for media that outlive it.
- A get fills the given buffers completely, or its outcome is ABSENT or an error.  It never returns short data as DONE.
- Absence is not an error.  Errors are :class:`tiering.errors.TemporaryStoreError` or
  :class:`~tiering.errors.PermanentStoreError`.
- Outcomes are per block; one block's failure says nothing of another's.
- No method holds the interpreter lock while it moves bytes.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from tiering.errors import StoreError

Place: TypeAlias = int | str
"""Where a block is: a slot number on a medium of our own, an object's name on a shared one."""


class Done(enum.Enum):
    """How a block's I/O ended when it did not fail."""

    DONE = "done"
    ABSENT = "absent"


Outcome: TypeAlias = Done | StoreError
"""What became of one block: done, absent, or the error (not raised: outcomes are per block)."""


@dataclass(slots=True)
class BlockIO:
    """One framed block on its way.

    ``header``: ``store.header_bytes`` long, the frame's header followed by zeros; ``payload``: what follows it.  Both
    are writable, contiguous memoryviews of format "B", aligned to ``store.alignment`` bytes; for a put they are only
    read.  ``payload`` may be a primary row itself.  For a get, ``payload`` has the length to be filled; for stores with
    ``variable_size``, at least the stored length, and ``filled`` is set to the payload bytes that were there.
    ``deadline``: monotonic seconds, no attempt starts after it.
    """

    key: bytes
    place: Place
    header: memoryview
    payload: memoryview
    deadline: float = float("inf")
    filled: int = -1


@dataclass(frozen=True, slots=True)
class StoreProbe:
    """What :meth:`BlockStore.probe` found: ``held[i]`` for each name asked for; None where it could not be learnt."""

    held: tuple[bool | None, ...]


class BlockStore(ABC):
    """A medium.  Subclasses implement :meth:`put_one` and :meth:`get_one`; media that can do better override the batch forms."""

    medium: ClassVar[str]
    """The medium's name in metrics: "DISK", "OBJECT", "MEMORY", or a word of its own."""

    header_bytes: int = 128
    """Bytes reserved for the header of a frame, at least 128; media with aligned I/O round up."""

    alignment: int = 1
    """Alignment in bytes of the memory and length of every buffer given to the store."""

    variable_size: ClassVar[bool] = False
    """Whether blocks of any length can be put (compression needs that)."""

    # ---------------------------------------------------------------------------------------------------- life cycle

    def open(self) -> None:
        """Make the medium ready.  Called on the I/O side, again after failures.  Raises :class:`StoreError`."""

    def close(self) -> None:
        """Release the medium; no call is running.  May be called twice, and without :meth:`open`."""

    # ---------------------------------------------------------------------------------------------------------- data

    @abstractmethod
    def put_one(self, block: BlockIO) -> None:
        """Write one block, replacing what was at its place.  Raises :class:`StoreError`."""

    @abstractmethod
    def get_one(self, block: BlockIO) -> Done:
        """Fill one block's buffers: DONE, or ABSENT if nothing is there.  Raises :class:`StoreError`."""

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        """Write several blocks; outcomes are co-indexed.  Does not raise :class:`StoreError`."""
        outcomes: list[Outcome] = []
        for block in blocks:
            try:
                self.put_one(block)
                outcomes.append(Done.DONE)
            except StoreError as error:
                outcomes.append(error)
        return outcomes

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        """Fill several blocks' buffers; outcomes are co-indexed.  Does not raise :class:`StoreError`."""
        outcomes: list[Outcome] = []
        for block in blocks:
            try:
                outcomes.append(self.get_one(block))
            except StoreError as error:
                outcomes.append(error)
        return outcomes

    def delete(self, places: Sequence[Place]) -> None:
        """Remove blocks (those that are not there are ignored).  Raises :class:`StoreError`.  Slot media have nothing to do."""

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        """Whether blocks are there, without reading them.  Only called for shared media.  Does not raise :class:`StoreError`."""
        return StoreProbe(tuple(None for _ in places))

    # --------------------------------------------------------------------------------------------- small documents

    def read_document(self, name: str) -> bytes | None:
        """A small document kept beside the blocks (namespace parameters, the reset epoch); None if there is none.

        ``name`` is made of [a-z0-9.-].  Raises :class:`StoreError`.
        """
        return None

    def write_document(self, name: str, data: bytes) -> None:
        """Replace a document atomically and durably.  Raises :class:`StoreError`."""

    def list_documents(self, prefix: str) -> Iterable[str]:
        """The names of the documents whose names start with ``prefix``, in any order.  Raises :class:`StoreError`.

        Only asked for when something is to be explained.  A store that cannot list them names none.
        """
        return ()

    def create_document(self, name: str, data: bytes) -> bytes | None:
        """Write a document unless there is one, and return what can be read of it afterwards.  Raises :class:`StoreError`.

        On a medium that several engines share, all that call this at the same time should be returned the same content.
        """
        if self.read_document(name) is None:
            self.write_document(name, data)
        return self.read_document(name)

    def remove_document(self, name: str) -> None:
        """Make a document's content unreadable, durably, also on a medium that is full.  Raises :class:`StoreError`.

        Afterwards :meth:`read_document` returns None or something that passes no checksum.
        """
        self.write_document(name, b"")

    def reclaim(self, place_prefix: str) -> int:
        """Delete the blocks whose names start with ``place_prefix``; how many.  Raises :class:`StoreError`.

        For garbage collection of epochs that nobody uses any more.  An engine never calls this.
        """
        return 0
