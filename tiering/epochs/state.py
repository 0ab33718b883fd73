"""States and actions of a walk to an epoch (:mod:`tiering.epochs.machine`), all frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from tiering.api.namespace import Namespace
from tiering.epochs.documents import EpochDocument


@dataclass(frozen=True)
class CommonEpoch:
    """The documents of a namespace's common epoch, as one process found them."""

    documents: tuple[EpochDocument | None, ...] = ()
    """The documents in order; None for one that is damaged, or missing before others. Default: none."""
    loss: int = 0
    """Number of the last loss that may include documents which no process remembers; 0 (default): none.

    Blocks of this machine may then be older than an invalidation that no process remembers.
    """

    @property
    def unexplained(self) -> bool:
        """True if documents were lost, perhaps with some that this process did not know."""
        return self.loss > 0

    @property
    def epoch(self) -> bytes | None:
        """The epoch; None if there is no document, or if the last one is damaged."""
        last = self.documents[-1] if self.documents else None
        return None if last is None else last.epoch

    @property
    def count(self) -> int:
        """Number of documents: the first number without a document."""
        return len(self.documents)

    @cached_property
    def history(self) -> frozenset[bytes]:
        """All epochs, the present one included."""
        return frozenset(document.epoch for document in self.documents if document is not None)

    @cached_property
    def invalidations(self) -> tuple[bytes, ...]:
        """The invalidations that all blocks of the epoch are younger than, in the order of their documents.

        Earlier releases named none: the epoch of such a document stands for its invalidation, unless it is the first.
        """
        found: dict[bytes, None] = {}
        for number, document in enumerate(self.documents):
            if document is None:
                continue
            named = document.invalidations
            found.update(dict.fromkeys(named if named or not number else (document.epoch,)))
        return tuple(found)

    @cached_property
    def _covered(self) -> frozenset[bytes]:
        """The invalidations that the last document vouches for.

        A document names all of the documents before it. If it does not, it is older than one of them: the medium lost
        the older ones, and a new epoch began in the place of one before all were written again.
        """
        covered: set[bytes] = set()
        for number, document in enumerate(self.documents):
            if document is not None and document.invalidations:
                covered = set(document.invalidations)
            elif document is not None and number:
                covered.add(document.epoch)
        return frozenset(covered)

    def covers(self, invalidations: Iterable[bytes] = ()) -> bool:
        """Return True if all blocks of the epoch are younger than ``invalidations`` and those of the medium."""
        return self._covered.issuperset((*self.invalidations, *invalidations))

    def continues(self, known: CommonEpoch) -> bool:
        """Return True if all documents of ``known`` are still there; a damaged one says nothing."""
        return self.count >= known.count and all(
            found == before or before is None for found, before in zip(self.documents, known.documents, strict=False)
        )


@dataclass(frozen=True, slots=True)
class Target:
    """The epoch that a reset begins, and the processes that it is for."""

    namespace: Namespace
    revision: str | None = None
    """Revision that names the weights from now on; None (default): no revision."""
    private: bool = False
    """True if the epoch is for this process alone, because its weights may have changed; default False."""


@dataclass(frozen=True, slots=True)
class Entered:
    """An epoch that was entered.

    An attempt to open a medium returns the whole value and leaves no part of it elsewhere, because a later attempt, or
    a reset, may overtake it.
    """

    namespace: Namespace
    common: CommonEpoch | None = None
    """The medium's common epoch, if ``namespace`` is in it; None (default): it is in another epoch."""


class Goal(Enum):
    """The end of a walk: the first two on a shared medium, the others on one that only one tier writes."""

    BEGIN = auto()  # a common epoch that has certain invalidations
    LOOK = auto()  # one that has all invalidations of the stack, after a comparison with the one known before
    OWN = auto()  # the epoch of the blocks on the medium, or a new one
    RESET = auto()  # a new epoch, whatever the medium holds


class Do(Enum):
    """The action that a walk waits for, and the result by which it ends."""

    READ = auto()  # read a document: itself, its bytes if it is damaged or of others, None if there is none
    CONFIRM = auto()  # the same, of a document that was read or created before
    LIST = auto()  # list the documents: the highest number, or -1
    PROVE = auto()  # prove that the medium has damaged bytes, too
    JUDGE = auto()  # compare with the process's knowledge: Judged
    RESTORE = auto()  # create a document that was lost, unless its place is taken: the one in its place, as for READ
    BEGIN = auto()  # the same, with one of a new epoch
    REMOVE = auto()  # remove the document of a medium of its own: the error, or None
    WRITE = auto()  # write one of a new epoch there: the error, or None
    DONE = auto()  # the walk has ended, with its ``documents``


class EpochVerdict(Enum):
    """Reaction of a tier in a common epoch to the one that its medium has."""

    STAY = auto()
    FOLLOW = auto()  # once the manager drops all older blocks
    REOPEN = auto()  # out of service until the medium has an epoch with all known invalidations
    ENTER = auto()  # at once, because no other block of the machine can be older


class Action(NamedTuple):
    """A request to the medium, or to the process."""

    do: Do
    number: int = 0
    document: EpochDocument | bytes | None = None
    """The lost document, or the damaged bytes."""
    marks: tuple[bytes, ...] = ()
    """The invalidations of a new epoch."""
    lacking: bool = False
    """True if the new epoch replaces an intact one, which lacks an invalidation."""


class Judged(NamedTuple):
    """Knowledge of the process, once the documents have been read."""

    sure: bool
    """True if lost documents include none that is unknown here."""
    marks: tuple[bytes, ...]
    """The invalidations that the stack knows."""


@dataclass(frozen=True)
class WalkOrder:
    """The task of a walk."""

    goal: Goal
    known: CommonEpoch | None = None
    """The epoch that was found before; default: none. If its end is the same, only newer ones are read."""
    marks: tuple[bytes, ...] = ()
    """Invalidations that the epoch must have, for ``BEGIN``; default: none."""
    mark: bytes = b""
    """A new invalidation, for the case that one may be lost with its document; for ``LOOK``."""
    proof: bool = True
    """True (default) if a document counts as damaged only if the medium proves the damage."""
    opening: bool = False
    """True if the tier opens: the last document must be valid, or a new epoch begins; default False."""
    used: bool = False
    """True if a process has used the namespace on this medium before; default False."""
    writes: bool = True
    """False for a tier that stores nothing, which begins no epoch; default True."""


@dataclass(frozen=True)
class Walk:
    """State of a walk."""

    order: WalkOrder
    do: Do = Do.READ
    """The action whose result the walk waits for."""
    number: int = 0
    """Number of the document that the action concerns."""
    documents: tuple[EpochDocument | None, ...] = ()
    """The documents that were read; None for one that is damaged, or missing before others."""
    listed: int | None = None
    """Highest number of a listed document; None: not listed yet, -1: none is listed."""
    subject: CommonEpoch = CommonEpoch()
    """The documents that are being confirmed."""
    attempts: int = 0
    """Number of documents of new epochs that the walk tried to create."""
    marks: tuple[bytes, ...] = ()
    """Invalidations that the epoch must have."""
    judged: bool = False
    lost: bool = False
    """True if documents that were known have gone, or have others in their place."""
    sure: bool = True
    """True if the lost documents include none unknown here; for a reset: the old one was removed."""
