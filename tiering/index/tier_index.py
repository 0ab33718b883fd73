"""Contract of an index: the knowledge of the blocks on one medium, owned by the scheduler's thread.

An index answers lookups from memory, chooses places, and records how I/O ended. An index does no I/O and takes no lock.
There are two built-in indexes:

- :class:`tiering.index.slots.SlotIndex`, for a medium that only this tier writes: key → slot, free slots,
  eviction.
- :class:`tiering.index.shared.SharedIndex`, for a medium shared with other processes: expiring results of
  probes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from tiering.api.hints import KeptBlocks
from tiering.api.keys import OffloadKey
from tiering.medium.block_store import Place, StoreProbe
from tiering.secondary.contract import PrefixAnswer
from tiering.table.disposal import Table


class StorePlan(NamedTuple):
    """Plan of a store: the blocks to write, by position in the offered keys, and their places.

    Positions in neither list are declined: there is no room, or another job writes the block now (and may fail).
    """

    positions: list[int]
    places: list[Place]
    """Reserved place of each block to write, co-indexed with ``positions``."""
    already_held: Sequence[int] = ()
    """Positions of keys that the medium holds."""
    evicted: Sequence[OffloadKey] = ()
    """Keys that were evicted to make room."""
    decision: Callable[[float], Sequence[bool] | None] | None = None
    """Function that decides which of the blocks to write; None (default): all of them, at once.

    Called with the present time, the function returns None as long as it is undecided, and then True for each block to
    write. The places of the others are given back by :meth:`TierIndex.end_store`.
    """


class Hints(NamedTuple):
    """Hints from the other machines that share a medium."""

    touched: Sequence[OffloadKey]
    """Declined blocks that another machine has declined before: this was their second touch in the fleet."""
    lapsed: Sequence[OffloadKey]
    """Blocks that were left to other machines, which may not have stored them."""


@dataclass(slots=True, eq=False)
class Probe:
    """A probe of a shared medium: the request to find out how many leading keys of a chain it holds."""

    keys: Sequence[OffloadKey]
    place_of: Callable[[OffloadKey], Place]
    """Pure function that returns the place of a key.

    The I/O side calls it, because naming the places of a whole chain takes the scheduler too long.
    """
    offers: bool = False
    """True if :meth:`TierIndex.lacking` caused the probe; default False."""
    expires: float = float("inf")
    """Time in monotonic seconds after which nothing waits for the result; default: none."""
    cautious: bool = False
    """True if the first key is asked for alone, because a miss is likely; default False."""
    held: int = 0
    """Number of leading keys found so far, which the I/O side writes, and a lookup takes at its deadline."""
    undecided_until: float = float("-inf")
    """Time until which lookups of the first key wait for the result; default: none waits."""


class TierIndex(ABC):
    """Index of the blocks on one medium. Times are monotonic seconds."""

    shared: ClassVar[bool] = False
    """True if other processes also write to the medium; default False.

    The content of a shared medium is learnt from probes, and not all of it is announced in this process's events.
    """

    def enter(self, place_prefix: str) -> None:
        """Name all places under ``place_prefix`` from now on (a namespace and epoch).

        Indexes of media with slots need not implement this method.
        """

    def take_probes(self, now: float) -> Sequence[Probe]:
        """Return the probes that were requested since the last call.

        The tier ends each of them with :meth:`end_probe` exactly once.
        """
        return ()

    def end_probe(self, probe: Probe, held: int | None, now: float) -> Sequence[OffloadKey]:
        """Record the result of a probe, and return the keys that the medium lacks and may be offered.

        The result has keys only if ``probe.offers``.

        Args:
            probe: the probe that has ended.
            held: number of leading keys that the medium holds; the next key is absent. None: the probe found out
                nothing.
            now: monotonic seconds.
        """
        return ()

    def lacking(self, keys: Sequence[OffloadKey], now: float) -> Sequence[OffloadKey] | None:
        """Return those of ``keys``, which are in use, that the medium lacks and no job writes now.

        None: not known. A probe may have been requested (:meth:`take_probes`), and its result will answer.
        """
        return ()

    def ask(self, probe: Callable[[Sequence[Place]], StoreProbe], places: Sequence[Place]) -> StoreProbe:
        """Return which of ``places`` hold a block; the default asks the medium. I/O threads call this method.

        Args:
            probe: looks at the medium.
            places: places of blocks.
        """
        return probe(places)

    def take_hints(self, now: float) -> Hints:
        """Return the hints of other machines since the last call; the default has none.

        Called for shared media only.
        """
        return Hints((), ())

    def declined(self, keys: Sequence[OffloadKey], admitted: Sequence[int]) -> None:
        """Record that admission has declined all of ``keys`` but those at the positions ``admitted``."""

    @property
    def coordinated(self) -> bool:
        """True while other machines that share the medium give hints; default False."""
        return False

    def close(self, timeout: float) -> bool:
        """End the threads of the index within ``timeout`` seconds, and return True if none runs."""
        return True

    @abstractmethod
    def lookup_prefix(self, keys: Sequence[OffloadKey], now: float) -> PrefixAnswer:
        """Return the number of leading keys that are held and readable, and True if the next is undecided.

        A key is undecided while a probe of it is under way.
        """

    @property
    def places_ready(self) -> float:
        """Number of places that stores can take now; infinity (default) unless the medium is preparing more.

        Blocks beyond it would be declined, and should wait.
        """
        return math.inf

    @abstractmethod
    def plan_store(self, keys: Sequence[OffloadKey], now: float) -> StorePlan:
        """Reserve places for those of ``keys`` that are not held.

        Until :meth:`end_store`, lookups do not find these keys, and their places are not reused.
        """

    @abstractmethod
    def end_store(
        self, keys: Sequence[OffloadKey], places: Sequence[Place], stored: Sequence[bool], now: float
    ) -> None:
        """End the writes of a plan: stored blocks are held, and the other places are free.

        Args:
            keys: keys of the plan.
            places: places of the plan, co-indexed with ``keys``.
            stored: True for each block that was written.
            now: monotonic seconds.
        """

    @abstractmethod
    def begin_load(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return the place of each key, None for a key that is not held.

        A slot is not reused until :meth:`end_load`.
        """

    @abstractmethod
    def end_load(
        self, keys: Sequence[OffloadKey], places: Sequence[Place], lost: Sequence[bool], now: float
    ) -> list[OffloadKey]:
        """End the reads of a load, and return the keys that left the index.

        Args:
            keys: keys that were read.
            places: places from :meth:`begin_load`, co-indexed with ``keys``.
            lost: True for each block that was absent or corrupt; the index drops these.
            now: monotonic seconds.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], used: bool = True) -> None:
        """Make ``keys``, a prefix in its order, recent; unknown keys are ignored.

        Args:
            keys: the blocks.
            used: True (default) to count a use.
        """

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Let ``keys`` be evicted before all others, the last one first, until they are used again.

        The default does nothing: on a medium without an order of eviction, blocks expire.
        """

    def keep(self, kept: KeptBlocks, clock: Callable[[], float]) -> None:
        """Evict other blocks before those of ``kept`` for a time.

        The default does nothing, as that of :meth:`release`.

        Args:
            kept: the blocks, and the bounds.
            clock: monotonic clock in seconds, the same in all calls.
        """

    @property
    def late_lookups(self) -> int:
        """Number of lookups that were answered with no because their probe took too long."""
        return 0

    def refuse(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Leave the corrupt blocks of ``keys`` alone for a while: lookups miss them, and stores decline them.

        The default does nothing: on a medium with slots, a corrupt block is lost, and its slot is reused.
        """

    def pardon(self, key: OffloadKey) -> None:
        """End :meth:`refuse` for ``key``: the corrupt block is not on the medium any more."""

    def retire(self, places: Sequence[Place]) -> list[OffloadKey]:
        """Take places with a device error out of use, and return the keys that left the index.

        The blocks at these places are lost. The default does nothing: places that are names need not be retired.
        """
        return []

    @property
    def retired_for_errors(self) -> int:
        """Number of places that :meth:`retire` has taken out of use."""
        return 0

    def sample(self, count: int) -> list[tuple[OffloadKey, Place]]:
        """Return up to ``count`` arbitrary blocks that are held, as (key, place)."""
        return []

    def borrow(self, count: int) -> list[Place]:
        """Return up to ``count`` slots that hold nothing, for a trial of writes.

        The index does not hand them out again before :meth:`give_back`.
        """
        return []

    def give_back(self) -> None:
        """End a trial of writes and take all borrowed slots back."""

    @abstractmethod
    def clear(self) -> Sequence[Table]:
        """Forget every block (a reset), and return the dictionaries of the keys that were held.

        The caller may change them. The cost must not depend on the number of blocks.

        Places that are being read or written stay reserved until their I/O ends. Then they are free, not held.
        """

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Number of blocks held, as far as known."""
