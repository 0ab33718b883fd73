"""The speeds of an engine and of a tier's loads, which the tier keeps for engines that start later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

LoadOrCompute = Literal["auto", "always", "never"]
"""Rule by which requests load the blocks of a tier or compute them."""


class Speeds(NamedTuple):
    """The speeds of an engine and of the loads from one tier, as measured."""

    compute: float
    """Seconds of computing a block of the first KV-cache group that grows with the prompt."""
    load_fixed: float
    """Seconds of a load that do not depend on its blocks."""
    load_per_block: float
    """Seconds of each block of a load; 0: not measured."""


class TierSpeeds:
    """Part of a tier that keeps speeds, for engines on the same hardware that start later.

    Both methods return at once. What they return is a hint, which the manager does not trust. The defaults keep none.
    """

    def publish(self, speeds: Speeds) -> None:
        """Begin to replace what engines have published, if the tier can do so now."""

    def gather(self) -> Sequence[Speeds] | None:
        """Return what an engine of this namespace has published last, if any; None if it is not known yet."""
        return ()
