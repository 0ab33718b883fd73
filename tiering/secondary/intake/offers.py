"""What a tier is offered again: blocks that are in use in the primary tier and that it lacks.

A tier misses what was stored while it was out, before it was there, or beyond its budget.  The blocks that matter of
these are used again; then the tier asks for them, at a bounded rate, and for each of them rarely: what it declined, or
failed to store, it would most likely decline again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from tiering.api.keys import OffloadKey
from tiering.secondary.intake.admission import Admission
from tiering.secondary.intake.store_budget import StoreBudget

OFFERS_PER_SECOND = 256.0
"""Blocks that one tier is offered again per second, in the long run."""

OFFERS_AT_ONCE = 1024
"""Blocks that it is offered again at most after a quiet time."""

OFFER_AGAIN_AFTER = 60.0
"""Seconds for which a block that was offered again is not offered once more."""

HELD_FOR = 600.0
"""Seconds for which a tier that holds a block is taken to hold it, without looking."""

MAX_REMEMBERED = 1 << 16
"""Blocks of which is remembered that they were offered; the oldest is forgotten."""


class Offers:
    """Chooses what one tier is offered again.  Times are monotonic seconds."""

    def __init__(self, admission: Admission, budget: StoreBudget) -> None:
        self._admission = admission
        self._budget = budget
        self._allowance = float(OFFERS_AT_ONCE)
        self._allowance_at = 0.0
        self._offered: dict[OffloadKey, float] = {}
        self._waiting: dict[OffloadKey, None] = {}

    def add(self, lacking: Sequence[OffloadKey], now: float) -> float:
        """The tier lacks these blocks, a prefix in its order, which are in use: its head is the most worth.

        Returns the seconds until it is worth to look for them again.
        """
        if not lacking:
            return HELD_FOR
        earned = (now - self._allowance_at) * OFFERS_PER_SECOND
        self._allowance = min(OFFERS_AT_ONCE, self._allowance + earned)
        self._allowance_at = now
        offered = self._offered
        fresh = [key for key in self._admission.may_be_offered(lacking) if offered.get(key, 0.0) <= now]
        chosen = fresh[: int(self._allowance)]
        self._allowance -= len(chosen)
        for key in chosen:
            offered.pop(key, None)
            offered[key] = now + OFFER_AGAIN_AFTER
        for key in list(islice(offered, max(0, len(offered) - MAX_REMEMBERED))):
            del offered[key]
        self._waiting.update(dict.fromkeys(chosen))
        return OFFER_AGAIN_AFTER if len(chosen) == len(fresh) else 0.0

    def take(self) -> list[OffloadKey]:
        """What is to be offered now, the oldest first: as much as leaves half of the tier's budget to what is newly stored."""
        if not self._waiting:
            return []
        taken = list(self._waiting)
        taken = taken[: self._budget.spare(taken)]
        for key in taken:
            del self._waiting[key]
        return taken

    def clear(self) -> None:
        """Forget which blocks (a reset); the rate is kept."""
        self._offered.clear()
        self._waiting.clear()
