"""Stores that wait until coordination has answered which of their blocks this machine shall upload."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiering.api.keys import OffloadKey
from tiering.block_store import Place
from tiering.secondary.contract import TransferJob
from tiering.secondary.coordination import CLAIM_SECONDS, Claim, Coordination


@dataclass(frozen=True, slots=True)
class PlannedStore:
    """A store whose places are reserved; all sequences but ``held`` are co-indexed."""

    job: TransferJob
    """The job as the manager submitted it."""
    held: list[OffloadKey]
    """Keys that need no I/O, because the medium holds them already."""
    keys: Sequence[OffloadKey]
    """Keys to store."""
    rows: list[int]
    """Primary row of each block."""
    places: list[Place]
    """Reserved place of each block."""
    sizes: list[int]
    """Raw bytes of each block."""

    def split(self, granted: Sequence[bool]) -> tuple[PlannedStore, PlannedStore]:
        """Return the part of this store that is granted, and the part that is not."""
        return self._part(granted), self._part([not grant for grant in granted])

    def _part(self, chosen: Sequence[bool]) -> PlannedStore:
        at = [position for position, choice in enumerate(chosen) if choice]
        return PlannedStore(
            self.job,
            self.held,
            [self.keys[position] for position in at],
            [self.rows[position] for position in at],
            [self.places[position] for position in at],
            [self.sizes[position] for position in at],
        )


@dataclass(frozen=True, slots=True)
class _Waiting:
    store: PlannedStore
    claim: Claim
    until: float


class StoreClaims:
    """Stores whose claims are not answered yet, in their order; owned by the scheduler's thread.

    Args:
        coordination: coordination of the medium.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, coordination: Coordination, clock: Callable[[], float]) -> None:
        self._coordination = coordination
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, store: PlannedStore) -> bool:
        """Claim the blocks of ``store``, and return True if the store has to wait for the answer."""
        if not self._coordination.ready:
            return False
        claim = Claim(store.places)
        self._coordination.claim(claim)
        self._waiting.append(_Waiting(store, claim, self._clock() + CLAIM_SECONDS))
        return True

    def take_decided(self) -> list[tuple[PlannedStore, Sequence[bool] | None]]:
        """Return the stores that need not wait any longer, each with the answer to its claim.

        Without an answer in time, the answer is None: the store goes ahead.
        """
        decided: list[tuple[PlannedStore, Sequence[bool] | None]] = []
        while self._waiting:
            first = self._waiting[0]
            granted = first.claim.granted
            if granted is None and self._coordination.ready and self._clock() < first.until:
                break
            self._waiting.popleft()
            decided.append((first.store, granted))
        return decided

    def take_all(self) -> list[PlannedStore]:
        """Return all stores, because the tier leaves its epoch or shuts down."""
        stores = [waiting.store for waiting in self._waiting]
        self._waiting.clear()
        return stores
