"""Records of a manager for the explanation of misses."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from tiering.api.keys import OffloadKey


class Refusal(Enum):
    """Reason why a block stays a miss for a request that has waited for it."""

    LATE = "late"
    """Its load took longer than the tier's ``load_deadline``."""
    HUNG = "hung"
    """Nothing has come from the tier for as long as its ``load_deadline``."""
    CUT = "cut"
    """Its load took longer than computing was expected to take."""
    ROOM = "room"
    """It found no row in time."""
    FAILED = "failed"
    """Its tier went out of service."""


class LookupOutcome(NamedTuple):
    """Facts about the lookups of a request, for the explanation of a miss."""

    refused: Refusal | None
    """Reason why the block stays a miss for the request; None: it does not."""
    failed: tuple[str, ...]
    """Names of the tiers that failed to load the block for the request."""
    tiers: tuple[tuple[str, int], ...]
    """Names of the secondary tiers that the request may use, each with the least blocks of a load."""
    gated: tuple[str, ...] = ()
    """Names of the tiers from which loads take longer than computing; default: none."""
    control: str = ""
    """Name of the tier that was not asked for the request, to measure what its loads save; default: none."""
    cut: bool = False
    """True if the windows of other KV-cache groups leave no hit that needs the block."""


class Unstored(NamedTuple):
    """Blocks that were offered to a secondary tier, and the part of them that it took."""

    tier: str
    """Name of the tier."""
    keys: Sequence[OffloadKey]
    """Keys of the blocks."""
    taken: Sequence[OffloadKey]
    """Those of ``keys`` that the tier took; the others were declined or dropped, or their write failed."""

    def refused(self) -> list[OffloadKey]:
        """Return the keys that the tier did not take."""
        taken = frozenset(self.taken)
        return [key for key in self.keys if key not in taken]
