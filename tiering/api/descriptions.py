"""Descriptions of the blocks of a tier, which the tier keeps for KV events after a restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

_T = TypeVar("_T")


class Description(NamedTuple):
    """One document to write, with descriptions of blocks."""

    slot: int
    """Number of the document that is replaced, below :attr:`TierDescriptions.slots`."""
    number: int
    """Number of this content; a later one has a larger number."""
    content: Callable[[], bytes]
    """Function that an I/O thread calls for the content."""


class Described(NamedTuple, Generic[_T]):
    """One document that was read, with descriptions of blocks."""

    slot: int
    """Number of the document."""
    number: int
    """Number of its content."""
    content: _T
    """The content, as the reader's function has returned it."""


class TierDescriptions:
    """Part of a tier of one engine that keeps descriptions of its blocks, for KV events after a restart.

    Both methods return at once. What they return is a hint, which the caller does not trust. The defaults keep none.
    """

    tier: str = ""
    """Name of the tier."""
    slots: int = 2
    """Number of documents that the tier keeps, 2 at least."""

    @property
    def writing(self) -> bool:
        """True while documents are being written."""
        return False

    def write(self, documents: Sequence[Description]) -> bool:
        """Begin to replace documents, and return True; False: not now."""
        return False

    def gather(self, read: Callable[[bytes], _T]) -> Sequence[Described[_T]] | None:
        """Return what the last engine of this epoch has written; None if it is not known yet.

        Args:
            read: function that an I/O thread calls for each content; a ValueError leaves the document out.
        """
        return ()
