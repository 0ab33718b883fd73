"""Reports of a worker half to the engine about the copies that have ended."""

from __future__ import annotations

from tiering.offload.stats import OffloadingConnectorStats


class CopyReports:
    """Reports that the worker halves of both modes have in common; subclasses record the results."""

    def __init__(self) -> None:
        self._unfilled: set[int] = set()
        """GPU blocks that loads did not fill and that were not reported yet."""
        self._stats = OffloadingConnectorStats()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the GPU blocks that loads did not fill, since the last call.

        These are exactly the blocks that the engine must compute itself.
        """
        unfilled, self._unfilled = self._unfilled, set()
        return unfilled

    def get_kv_connector_stats(self) -> OffloadingConnectorStats | None:
        """Return the transfers since the last call; None if there were none."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats
