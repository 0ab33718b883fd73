"""The blocks that may need no late store, because a tier behind an exclusive CPU tier has them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat

from tiering.api.keys import OffloadKey
from tiering.manager.requests import Request
from tiering.manager.tier_state import TierState
from tiering.table.disposal import DISPOSAL

NEVER, ALWAYS = math.inf, -math.inf


class LateCopies:
    """Notes on blocks in the engine's cache: the credit from which each is copied when it leaves.

    A block that a tier has taken and that was used once is never copied. One that came from that tier for its last use
    is copied from half of the credit on, because its next use is probably as far away. All others are always copied,
    those that the CPU tier itself has served among them. The knowledge is a hint, which may be forgotten at any time
    and then costs further copies.

    Args:
        states: the secondary tiers.
    """

    def __init__(self, states: Sequence[TierState]) -> None:
        self.most = 0
        """Largest number of blocks; 0: none are noted."""
        self.enough = 0.0
        """Credit from which blocks are copied that came from a tier."""
        self.spares = True
        """True if a block that a tier has taken needs no row before its second use."""
        self.leaving: dict[OffloadKey, Sequence[OffloadKey]] = {}
        """Blocks that leave the engine's cache together, by the first one that is copied."""
        self._states = states
        self._least: dict[OffloadKey, float] = {}

    def __bool__(self) -> bool:
        return bool(self._least)

    def __len__(self) -> int:
        return len(self._least)

    def fed(self, keys: Iterable[OffloadKey]) -> None:
        """Note blocks that a tier has taken since they were computed."""
        self._note(dict.fromkeys(keys, NEVER))

    def loaded(self, keys: Sequence[OffloadKey], request: Request | None) -> None:
        """Note blocks that a request has loaded into the engine's cache."""
        least = dict.fromkeys(keys, ALWAYS)
        if request is not None and request.brought:
            serving = [state.rank for state in self._states if state.in_service and state.serves_all]
            least.update((key, self.enough) for key in keys if request.brought.get(key) in serving)
        self._note(least)

    def _note(self, least: dict[OffloadKey, float]) -> None:
        """Add to the notes, and drop all if the engine has dropped many blocks without a word."""
        self._least.update(least)
        if len(self._least) > self.most:
            self.clear()

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Drop the notes on blocks that have left the engine's cache."""
        if self._least:
            deque(map(self._least.pop, keys, repeat(None)), maxlen=0)

    def chosen(self, keys: Sequence[OffloadKey], credit: float = ALWAYS) -> Sequence[OffloadKey]:
        """Return those of ``keys`` that are copied with this credit; by default, those that are always."""
        least = self._least
        if least.keys().isdisjoint(keys):
            return keys
        return [key for key in keys if least.get(key, ALWAYS) <= credit]

    def count(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of ``keys`` are noted."""
        return sum(map(self._least.__contains__, keys)) if self._least else 0

    def clear(self) -> None:
        """Drop all notes, because a tier may not have the blocks any more."""
        self.leaving.clear()
        if self._least:
            DISPOSAL.add((self._least,))
            self._least = {}
