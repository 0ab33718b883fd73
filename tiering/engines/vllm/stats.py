"""The connector's statistics in vLLM's form.

Import this module after the checks of :mod:`tiering.engines.vllm.connector`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from tiering.api.keys import PRIMARY_TIER
from tiering.connector.metrics import TIERS
from tiering.connector.prometheus import MetricClasses, OffloadPromMetrics, unregister_tier_metrics
from tiering.connector.stats import OffloadingConnectorStats
from tiering.simple.selection import simple_options
from tiering.spec import read_stack


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
