"""Stores that wait until coordination has answered which of their blocks this machine shall upload."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from tiering.api.keys import OffloadKey
from tiering.block_tier.coordination import CLAIM_SECONDS, Claim, Coordination
from tiering.medium.block_store import Place
from tiering.secondary.contract import TransferJob

MAX_LEFT = 1 << 14
"""Maximum number of blocks left to other machines that are remembered."""

LAPSE_JITTER = 0.5
"""Largest share of a claim's life by which machines wait longer before they offer a block again."""


@dataclass(slots=True)
class _Waiting:
    store: TransferJob
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
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, store: TransferJob) -> bool:
        """Claim the blocks of ``store``, and return True if the store has to wait for the answer."""
        if not self._coordination.ready:
            return False
        claim = Claim(store.places)
        self._coordination.claim(claim)
        self._waiting[store.job_id] = _Waiting(store, claim, self._clock() + CLAIM_SECONDS)
        return True

    def take_decided(self) -> list[tuple[TransferJob, Sequence[bool] | None]]:
        """Return the stores that need not wait any longer, each with the answer to its claim.

        Without an answer in time, the answer is None: the store goes ahead.
        """
        decided: list[tuple[TransferJob, Sequence[bool] | None]] = []
        while self._waiting:
            first = next(iter(self._waiting.values()))
            granted = first.claim.granted
            if granted is None and self._coordination.ready and self._clock() < first.until:
                break
            store = first.store
            del self._waiting[store.job_id]
            decided.append((store, granted))
        return decided

    def take_all(self) -> list[TransferJob]:
        """Return all stores, because the tier leaves its epoch or shuts down; their claims are released."""
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            self._release(one.claim, one.store.places)
        return [one.store for one in waiting.values()]

    def _release(self, claim: Claim, places: Sequence[Place]) -> None:
        claim.dropped.update(places)
        # An answer that comes from here on finds the places dropped.
        if claim.granted is not None:
            granted = set(compress(claim.places, claim.granted))
            self._coordination.released([place for place in places if place in granted])


class LeftBlocks:
    """Blocks that were left to other machines, until these have stored them or their claims have lapsed.

    A machine may die before it has stored the blocks that it has claimed. Each block is looked at once more, at a time
    that differs between machines.

    Args:
        lapse: seconds after which a claim has lapsed.
        jitter: returns a number from 0 to 1.
    """

    def __init__(self, lapse: float, jitter: Callable[[], float] = random.random) -> None:
        self._lapse = lapse
        self._jitter = jitter
        self._batches: deque[tuple[float, Sequence[OffloadKey]]] = deque()
        self._left: dict[OffloadKey, None] = {}

    def add(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Remember blocks of a prefix, in its order; beyond :data:`MAX_LEFT` they are dropped."""
        if len(self._left) + len(keys) <= MAX_LEFT:
            self._left.update(dict.fromkeys(keys))
            self._batches.append((now + self._lapse * (1 + LAPSE_JITTER * self._jitter()), keys))

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Drop blocks that another machine has stored."""
        for key in keys:
            self._left.pop(key, None)

    def take_lapsed(self, now: float) -> list[OffloadKey]:
        """Return the blocks of one store whose claims have lapsed at ``now`` and that no machine has stored."""
        while self._batches and self._batches[0][0] <= now:
            keys = [key for key in self._batches.popleft()[1] if key in self._left]
            self.stored(keys)
            if keys:
                return keys
        return []

    def clear(self) -> None:
        """Drop all blocks, because the tier leaves its epoch."""
        self._batches.clear()
        self._left.clear()
