"""The connector's statistics in vLLM's form.

Import this module after the checks of :mod:`tiering.engines.vllm.connector`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from tiering.api.keys import PRIMARY_TIER
from tiering.offload.prometheus import MetricClasses, OffloadPromMetrics, unregister_tier_metrics
from tiering.offload.stats import RECORDS, TIERS, Increments, OffloadingConnectorStats
from tiering.simple.selection import simple_options
from tiering.spec import read_stack

STATS_INTERVAL = 0.5
"""Time between two reports of the tiers' counters while requests run, in seconds."""


class TieringConnectorStats(OffloadingConnectorStats, KVConnectorStats):  # type: ignore[misc]
    """The connector's statistics in vLLM's class for statistics."""

    def to_dict(self) -> dict[str, Any]:
        """Return the data that vLLM sends to the front end."""
        return self.data

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's log line: the transfers, and the most important counters of each tier."""
        totals = super().reduce()
        for tier, fields in self.data.get(TIERS, {}).items():
            totals.update({f"{tier}_{word}": fields.get(word, 0) for word in ("hits", "blocks", "corrupt_blocks")})
        return totals


class TierReports:
    """The reports of the tiers' counters: what was added since the report before."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._tiers, self._records = Increments(), Increments()

    def is_due(self, busy: bool) -> bool:
        """Return True every :data:`STATS_INTERVAL` seconds, and whenever the engine is idle.

        Args:
            busy: True while requests or jobs run.
        """
        now = time.monotonic()
        if busy and now < self._next_at:
            return False
        self._next_at = now + STATS_INTERVAL
        return True

    def take(self, current: Mapping[str, Any]) -> TieringConnectorStats | None:
        """Return what was added since the last call; None if nothing was.

        Args:
            current: statistics of the scheduler half since the start.
        """
        stats = TieringConnectorStats()
        stats.record_tiers(self._tiers.take(current.get("tiers", {})))
        for name, fields in self._records.take({name: current[name] for name in RECORDS if name in current}).items():
            stats.record(name, fields)
        return None if stats.is_empty() else stats


def prom_metrics(
    vllm_config: Any,
    metric_types: Mapping[type, Any],
    labelnames: Sequence[str],
    per_engine_labelvalues: Mapping[int, Sequence[object]],
) -> OffloadPromMetrics:
    """Return the connector's metrics for the front end.

    The counters of all configured tiers exist from the start.
    """
    unregister_tier_metrics()  # as vLLM does with its own metrics
    by_name = {kind.__name__: metric for kind, metric in metric_types.items()}
    classes = MetricClasses(
        counter=by_name["Counter"],
        gauge=functools.partial(by_name["Gauge"], multiprocess_mode="mostrecent"),
        histogram=by_name["Histogram"],
    )
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    is_simple = simple_options(extra) is not None
    tiers = () if is_simple else tuple(tier.tier_name for tier in read_stack(extra).secondary)
    return OffloadPromMetrics(
        classes, labelnames, per_engine_labelvalues, tiers=(PRIMARY_TIER, *tiers), has_manager=not is_simple
    )
