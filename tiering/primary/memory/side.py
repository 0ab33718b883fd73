"""One side of a region of rows: what one of the processes that map the region does."""

from __future__ import annotations

from typing import NamedTuple

from tiering.primary.memory.prefault import Share


class RegionSide(NamedTuple):
    """One side of a region; see :meth:`~tiering.primary.memory.region.SharedRegion.open_shared`."""

    sides: int = 1
    """Number of processes, or parts of one, that map the region; default 1."""
    mark: bytes | None = None
    """Bytes that this side shows to the others; default: none."""
    share: Share | None = None
    """The pages that this side populates; default: all."""
    in_background: bool = False
    """True to populate a large region beside the start; default False."""


ONLY_SIDE = RegionSide()
"""Side of a region that one process maps alone."""
