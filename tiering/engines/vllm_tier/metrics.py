"""The counters and gauges of the stack behind vLLM's own tiering, in vLLM's form.

They have the names of the connector's metrics (:mod:`tiering.connector.metrics`), so that dashboards and alerts fit
both. Histograms are left out, because vLLM takes single observations only.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tiering.api.metric import Metric, MetricKind
from tiering.connector.metrics import MANAGER, METRICS, TIERS
from tiering.connector.stats import Increments

_EXPORTED = tuple(
    metric for metric in METRICS if metric.record in {TIERS, MANAGER} and metric.kind is not MetricKind.HISTOGRAM
)


def definitions(base: Any) -> dict[str, Any]:
    """Return the definition of each metric.

    Args:
        base: vLLM's module with the classes of definitions.
    """
    kinds = {MetricKind.COUNTER: base.OffloadingCounterMetadata, MetricKind.GAUGE: base.OffloadingGaugeMetadata}
    return {
        metric.name: kinds[metric.kind](documentation=metric.meaning, labelnames=metric.labels) for metric in _EXPORTED
    }


class TierCounters:
    """The growth of the counters since the last report."""

    def __init__(self) -> None:
        self._seen: Mapping[str, Any] = {}
        self._tiers, self._manager = Increments(), Increments()

    def take(self, stats: Mapping[str, Any]) -> Any:
        """Return vLLM's form of the growth since the last call; None without newer statistics.

        Args:
            stats: statistics of the manager, a new mapping for each reading.
        """
        if stats is self._seen or not stats:
            return None
        self._seen = stats
        grown = {TIERS: self._tiers.take(stats[TIERS]), MANAGER: self._manager.take({"": stats[MANAGER]})}
        module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
        report = module.OffloadingConnectorStats()
        for metric in _EXPORTED:
            for name, fields in grown[metric.record].items():
                _add(report, metric, (name,) if metric.labels else (), fields.get(metric.field))
        return report


def _add(report: Any, metric: Metric, labels: tuple[str, ...], value: Any) -> None:
    if metric.kind is MetricKind.GAUGE and value is not None:
        report.set_gauge(metric.name, value, labels)
    elif value:
        report.increase_counter(metric.name, value, labels)
