"""Index of a shared medium with coordination: it learns from other machines, and claims stores.

The directory of a fleet answers probes before the medium does, and its notices name blocks that other machines have
stored. The plan of a store is undecided until coordination has answered which of its blocks this machine shall upload,
for :data:`CLAIM_SECONDS` at most.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

from tiering.tier import Hints, OffloadKey, Place, Probe, SharedIndex, StorePlan, StoreProbe, Table
from tiers.coordination.coordination import ValkeyCoordination
from tiers.coordination.scope import Claim

CLAIM_SECONDS = 0.1
"""Seconds for which a store waits at most for the answer to its claim before it begins without."""

MAX_LEFT = 1 << 14
"""Maximum number of blocks left to other machines that are remembered."""

LAPSE_JITTER = 0.5
"""Largest share of a claim's life by which machines wait longer before they offer a block again."""


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


class CoordinatedIndex(SharedIndex):
    """Index of a shared medium with coordination.

    Args:
        coordination: coordination with the other machines.
        counts_touches: True if the fleet counts touches of the blocks that admission declines.
        settings: arguments of :class:`~tiering.index.shared.SharedIndex`.
    """

    def __init__(self, coordination: ValkeyCoordination, *, counts_touches: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self._coordination = coordination
        self._counts_touches = counts_touches
        self._left = LeftBlocks(coordination.lapse_seconds)
        self._claims: dict[Place, Claim] = {}
        """Claims of the blocks that this machine stores, or may store, by place."""
        self._entered = False

    @property
    def coordinated(self) -> bool:
        return self._coordination.ready

    def enter(self, place_prefix: str) -> None:
        super().enter(place_prefix)
        self._coordination.enter(place_prefix)
        self._entered = True

    def clear(self) -> Sequence[Table]:
        if self._entered:
            self._entered = False
            self._release(list(self._claims))
            self._left.clear()
            self._coordination.leave()
        return super().clear()

    def close(self, timeout: float) -> bool:
        return self._coordination.close(timeout)

    def ask(self, probe: Callable[[Sequence[Place]], StoreProbe], places: Sequence[Place]) -> StoreProbe:
        return self._coordination.ask(probe, places)

    def end_probe(self, probe: Probe, held: int | None, now: float) -> Sequence[OffloadKey]:
        if held != len(probe.keys):
            first = probe.keys[held or 0]
            self._coordination.watch([first], [probe.place_of(first)])
        return super().end_probe(probe, held, now)

    def take_hints(self, now: float) -> Hints:
        stored, touched = self._coordination.take()
        if stored:
            self._learn_present(stored, now + self._present_ttl)
            self._left.stored(stored)
        return Hints(touched, self._left.take_lapsed(now))

    def declined(self, keys: Sequence[OffloadKey], admitted: Sequence[int]) -> None:
        if self._counts_touches:
            taken = set(admitted)
            keys = [key for position, key in enumerate(keys) if position not in taken]
            self._coordination.declined(keys, list(map(self.place_of, keys)))

    def plan_store(self, keys: Sequence[OffloadKey], now: float) -> StorePlan:
        plan = super().plan_store(keys, now)
        if not plan.positions or not self._coordination.ready:
            return plan
        claim = Claim(plan.places)
        self._claims.update(dict.fromkeys(plan.places, claim))
        self._coordination.claim(claim)
        claimed = [keys[position] for position in plan.positions]
        return plan._replace(decision=partial(self._decide, claim, claimed, now + CLAIM_SECONDS))

    def _decide(self, claim: Claim, keys: Sequence[OffloadKey], until: float, now: float) -> Sequence[bool] | None:
        granted = claim.granted
        if granted is None:
            return None if self._coordination.ready and now < until else [True] * len(keys)
        if False in granted:
            others = list(map(not_, granted))
            keys, places = list(compress(keys, others)), list(compress(claim.places, others))
            for place in places:
                self._claims.pop(place, None)
            self._coordination.watch(keys, places)
            self._left.add(keys, now)
        return granted

    def end_store(
        self, keys: Sequence[OffloadKey], places: Sequence[Place], stored: Sequence[bool], now: float
    ) -> None:
        super().end_store(keys, places, stored, now)
        if self.holds_epoch(places):
            self._coordination.stored(list(compress(places, stored)))
            self._release(list(compress(places, map(not_, stored))))
            for place in places:
                self._claims.pop(place, None)

    def _release(self, places: Iterable[Place]) -> None:
        """Release the claims on blocks that are not uploaded after all."""
        dropped: dict[Claim, list[Place]] = {}
        for place in places:
            claim = self._claims.pop(place, None)
            if claim is not None:
                dropped.setdefault(claim, []).append(place)
        for claim, its_places in dropped.items():
            claim.dropped.update(its_places)
            # An answer that comes from here on finds the places dropped.
            if claim.granted is not None:
                granted = set(compress(claim.places, claim.granted))
                self._coordination.released([place for place in its_places if place in granted])
