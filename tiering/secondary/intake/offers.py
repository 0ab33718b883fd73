"""Offers to a tier of blocks that are in use in the primary tier and that the tier lacks.

A tier misses blocks that were stored while it was out of service, before it existed, or beyond its budget. The blocks
among these that matter are used again, and then the tier asks for them. The tier asks at a bounded rate, and rarely for
the same block. A block that was declined, or failed to be stored, would most likely be declined again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from tiering.api.keys import OffloadKey
from tiering.secondary.intake.admission import Admission
from tiering.secondary.intake.store_budget import StoreBudget

OFFERS_PER_SECOND = 256.0
"""Number of blocks that one tier is offered again per second, in the long run."""

OFFERS_AT_ONCE = 1024
"""Maximum number of blocks that one tier is offered again at once, after a quiet time."""

OFFER_AGAIN_AFTER = 60.0
"""Seconds until a block that was offered again may be offered once more."""

HELD_FOR = 600.0
"""Seconds for which a tier that holds a block is assumed to hold it."""

MAX_REMEMBERED = 1 << 16
"""Maximum number of offered blocks that are remembered; the oldest is forgotten."""


class Offers:
    """Chooses the blocks to offer to one tier again. Times are monotonic seconds.

    Args:
        admission: admission policy of the tier.
        budget: store budget of the tier.
    """

    def __init__(self, admission: Admission, budget: StoreBudget) -> None:
        self._admission = admission
        self._budget = budget
        self._allowance = float(OFFERS_AT_ONCE)
        self._allowance_at = 0.0
        self._offered: dict[OffloadKey, float] = {}
        self._waiting: dict[OffloadKey, None] = {}

    def add(self, lacking: Sequence[OffloadKey], now: float) -> float:
        """Choose blocks to offer again, and return the seconds until another look at them is worthwhile.

        Args:
            lacking: keys in use that the tier lacks, a prefix in its order; the head is worth the most.
            now: monotonic seconds.
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
        """Return the blocks to offer now, the oldest first.

        Offers leave half of the tier's budget to newly stored blocks.
        """
        if not self._waiting:
            return []
        taken = list(self._waiting)
        taken = taken[: self._budget.spare(taken)]
        for key in taken:
            del self._waiting[key]
        return taken

    def clear(self) -> None:
        """Forget the blocks (a reset), but keep the rate."""
        self._offered.clear()
        self._waiting.clear()
