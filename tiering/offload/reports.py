"""What a worker half tells the engine of the copies that it has collected, each thing once."""

from __future__ import annotations

from tiering.offload.stats import OffloadingConnectorStats


class CopyReports:
    """The reports that both modes' worker halves make in the same way.  Subclasses note what there is to report."""

    def __init__(self) -> None:
        self._unfilled: set[int] = set()
        self._stats = OffloadingConnectorStats()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The GPU blocks that loads did not fill, since the last call: exactly those the engine must compute itself."""
        unfilled, self._unfilled = self._unfilled, set()
        return unfilled

    def get_kv_connector_stats(self) -> OffloadingConnectorStats | None:
        """The transfers that were collected since the last call, or None."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats
