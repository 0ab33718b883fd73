"""The contract of an index: what is known of one medium, owned by the scheduler's thread.

It answers lookups from memory, chooses places, and is told how I/O ended.  It does no I/O and takes no lock.  The two
built-in ones: :class:`tiering.secondary.index.slots.SlotIndex` for media of our own (key → slot, free slots, eviction)
and :class:`tiering.secondary.index.shared.SharedIndex` for media shared with others (what was learnt, and for how
long).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from tiering.api.keys import OffloadKey
from tiering.block_store import Place
from tiering.secondary.contract import PrefixAnswer


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Which of the offered blocks to write, by position in the offered sequence, and where; and what made room for them.

    ``already_held``: positions of keys that the medium holds.  Positions in neither are declined: no room, or their
    write is under way (for another job, which may fail).
    """

    positions: list[int]
    places: list[Place]
    already_held: list[int] = field(default_factory=list)
    evicted: list[OffloadKey] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to a shared medium: how much of the chain ``keys`` is there?

    ``place_of`` names a key's place; it is pure, and called on the I/O side (naming a whole chain costs the scheduler
    too much). ``offers``: it was raised by :meth:`TierIndex.lacking`.
    """

    keys: Sequence[OffloadKey]
    place_of: Callable[[OffloadKey], Place]
    offers: bool = False


class TierIndex(ABC):
    """What is known of one medium.  Times are monotonic seconds."""

    shared: ClassVar[bool] = False
    """Whether others write to the medium too: what it holds is learnt by asking, and is not all ours to announce."""

    def enter(self, place_prefix: str) -> None:
        """Places are named under ``place_prefix`` from now on (a namespace and epoch).  Media with slots have nothing to do."""

    def take_probes(self, now: float) -> Sequence[Probe]:
        """The questions that were raised since the last call.  Each is answered by :meth:`end_probe`, once."""
        return ()

    def end_probe(self, probe: Probe, held: int | None, now: float) -> Sequence[OffloadKey]:
        """The leading ``held`` keys of ``probe`` are there and the one after them is not; None: nothing could be learnt.

        Returns what the medium lacks and may be offered, if ``probe.offers``.
        """
        return ()

    def lacking(self, keys: Sequence[OffloadKey], now: float) -> Sequence[OffloadKey] | None:
        """Those of ``keys``, which are in use, that the medium lacks and nobody writes to it now, as far as is known.

        None: not known; a question may have been raised (:meth:`take_probes`), whose answer tells.
        """
        return ()

    @abstractmethod
    def lookup_prefix(self, keys: Sequence[OffloadKey], now: float) -> PrefixAnswer:
        """How many leading keys are held and readable, and whether the one after is undecided (a probe of it is under way)."""

    @abstractmethod
    def plan_store(self, keys: Sequence[OffloadKey], now: float) -> StorePlan:
        """Reserve places for those of ``keys`` that are not held.  Until :meth:`end_store` they are neither answered for nor reused."""

    @abstractmethod
    def end_store(
        self, keys: Sequence[OffloadKey], places: Sequence[Place], stored: Sequence[bool], now: float
    ) -> None:
        """The writes of a plan have ended (``places`` as planned): what was stored is held, the other places are free."""

    @abstractmethod
    def begin_load(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Where to read ``keys``; None if not held.  A slot is not reused until :meth:`end_load`."""

    @abstractmethod
    def end_load(
        self, keys: Sequence[OffloadKey], places: Sequence[Place], lost: Sequence[bool], now: float
    ) -> list[OffloadKey]:
        """The reads have ended.  ``lost``: absent or corrupt, to be dropped.  Returns the keys that left the index."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """``keys``, a prefix in its order, were used; unknown ones are ignored."""

    def retire(self, places: Sequence[Place]) -> list[OffloadKey]:
        """The device reported an error at ``places``: what they hold is lost, and they are not handed out any more.

        Returns the keys that left the index.  A place that is a name is as good as any other: there is nothing to do.
        """
        return []

    @property
    def retired_for_errors(self) -> int:
        """Places that :meth:`retire` has taken out of use."""
        return 0

    def sample(self, count: int) -> list[tuple[OffloadKey, Place]]:
        """Up to ``count`` blocks that are held, whichever they are: (key, place) of each."""
        return []

    def borrow(self, count: int) -> list[Place]:
        """Up to ``count`` slots that hold nothing, for a trial of writes; not handed out again before :meth:`give_back`."""
        return []

    def give_back(self, good: Sequence[Place]) -> None:
        """The trial is over: borrowed slots are what they were, and those in ``good``, which could be written, are free."""

    @abstractmethod
    def clear(self) -> list[OffloadKey]:
        """Forget every block (a reset).  What is being read or written stays reserved until its end, and is then free, not held.

        Returns the keys that were held.
        """

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Blocks held, as far as known."""
