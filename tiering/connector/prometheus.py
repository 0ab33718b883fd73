"""Prometheus metrics of the connector: transfers of the workers, tiers, manager and scheduler half.

The engine chooses the classes of the metrics, because some engines wrap these classes. The default classes are those of
prometheus_client. Reports carry increments, and each increment is observed once: an engine with several front ends
sends each report to one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tiering.api.metric import Metric, MetricKind
from tiering.connector.metrics import LABELLED, TIERS, TRANSFERS, metrics_of
from tiering.connector.stats import RECORDS, StatsData
from tiering.errors import ConfigError
from tiering.secondary.tier_stats import JOB_LATENCY_BUCKETS


class MetricClass(Protocol):
    """Counter, Gauge or Histogram of prometheus_client, or an engine's class with the same arguments."""

    def __call__(self, *, name: str, documentation: str, labelnames: Sequence[str], **options: Any) -> Any:
        """Return a metric with the method ``labels(*values)``."""


@dataclass(frozen=True, slots=True)
class MetricClasses:
    """Classes of the metrics."""

    counter: MetricClass
    """Class of counters."""
    gauge: MetricClass
    """Class of gauges."""
    histogram: MetricClass
    """Class of histograms."""

    @classmethod
    def default(cls, registry: Any = None) -> MetricClasses:
        """Return the classes of prometheus_client.

        Args:
            registry: registry of the metrics; default: prometheus_client's own.

        Raises:
            ConfigError: prometheus_client is not installed.
        """
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError as error:
            raise ConfigError(
                "metrics need prometheus_client; install kv-tiering with its extra metrics "
                "(in a clone: pip install '.[metrics]')"
            ) from error
        target = REGISTRY if registry is None else registry

        def registered(metric: Any) -> MetricClass:
            def make(*, name: str, documentation: str, labelnames: Sequence[str], **options: Any) -> Any:
                return metric(name, documentation, labelnames, registry=target, **options)

            return make

        return cls(registered(Counter), registered(Gauge), registered(Histogram))


def unregister_tier_metrics(registry: Any = None) -> None:
    """Remove the tiers' metrics of an earlier engine of this process from a registry.

    A second engine in the same process registers the same names again, which prometheus_client refuses.

    Args:
        registry: registry of the metrics; default: prometheus_client's own.
    """
    from prometheus_client import REGISTRY

    target = REGISTRY if registry is None else registry
    for collector in list(target._collector_to_names):
        if str(getattr(collector, "_name", "")).startswith("kv_tiering_"):
            target.unregister(collector)


def representative_seconds(counts: Sequence[int], total: float) -> list[float]:
    """Return one latency per bucket, such that all jobs together took ``total`` seconds.

    Prometheus' histograms take single observations, but the reports carry only counts per bucket and a sum. Each
    latency lies in its bucket, at the same fraction t of the bucket's width. The equation for the sum determines t.

    Args:
        counts: number of jobs per bucket of ``JOB_LATENCY_BUCKETS``; the last bucket has no upper bound.
        total: sum of all latencies in seconds.
    """
    lower = (0.0, *JOB_LATENCY_BUCKETS)
    widths = [upper - low for low, upper in zip(lower, JOB_LATENCY_BUCKETS, strict=False)]
    slow, last = counts[-1], JOB_LATENCY_BUCKETS[-1]
    floor = sum(count * low for count, low in zip(counts, lower, strict=True))
    room = sum(count * width for count, width in zip(counts, widths, strict=False))
    fraction = 0.5 if slow else (total - floor) / room if room else 1.0
    fraction = min(1.0, max(1e-6, fraction))
    values = [low + fraction * width for low, width in zip(lower, widths, strict=False)]
    fast_total = sum(count * value for count, value in zip(counts, values, strict=False))
    return [*values, max(last * 1.001, (total - fast_total) / slow) if slow else last * 1.001]


class _Series:
    """The metrics of one record.

    Args:
        classes: classes of the metrics.
        engine_labels: names of the engine's own labels, which precede those of the record.
        record: name of the record.
    """

    def __init__(self, classes: MetricClasses, engine_labels: Sequence[str], record: str) -> None:

        def made(metric: Metric) -> Any:
            options = {"buckets": list(metric.buckets)} if metric.buckets else {}
            labels = [*engine_labels, *metric.labels]
            make: MetricClass = getattr(classes, metric.kind.value)
            return make(name=metric.name, documentation=metric.meaning, labelnames=labels, **options)

        self._counters, self._gauges, self._histograms = (
            {metric.field: made(metric) for metric in metrics_of(record, kind)} for kind in MetricKind
        )

    def declare(self, labels: tuple[str, ...]) -> None:
        """Create the counters of ``labels`` with the value 0."""
        for counter in self._counters.values():
            counter.labels(*labels)

    def observe(self, labels: tuple[str, ...], fields: Mapping[str, Any]) -> None:
        """Add one report's fields of the record.

        A field of a histogram is one observation, or a list of counts per bucket beside the sum of all observations.
        """
        for key, counter in self._counters.items():
            counter.labels(*labels).inc(fields.get(key, 0))
        for key, gauge in self._gauges.items():
            if key in fields:
                gauge.labels(*labels).set(fields[key])
        for key, histogram in self._histograms.items():
            if key in fields:
                observed = fields[key]
                if isinstance(observed, list):
                    _observe_counts(histogram, labels, observed, fields.get(f"{key}_sum", 0.0))
                else:
                    histogram.labels(*labels).observe(observed)


def _observe_counts(histogram: Any, labels: tuple[str, ...], counts: Sequence[int], total: float) -> None:
    """Observe the jobs that a report counts by bucket; ignore a report with other buckets."""
    if any(counts) and len(counts) == len(JOB_LATENCY_BUCKETS) + 1:
        series = histogram.labels(*labels)
        for count, seconds in zip(counts, representative_seconds(counts, total), strict=True):
            for _ in range(count):
                series.observe(seconds)


class OffloadPromMetrics:
    """Metrics of the connector; created once per registry.

    Args:
        classes: classes of the metrics; default: those of prometheus_client.
        labelnames: names of the engine's own labels, which precede the labels of the connector; default: ``engine``.
        per_engine_labelvalues: values of these labels by engine index; default: the index itself.
        tiers: names of the configured tiers, whose counters start at 0 for every engine; default: none.
        has_manager: True if the counters of the manager and of the connector start at 0 too; default: False.

    Raises:
        ConfigError: ``classes`` is None and prometheus_client is not installed.
    """

    def __init__(
        self,
        classes: MetricClasses | None = None,
        labelnames: Sequence[str] = ("engine",),
        per_engine_labelvalues: Mapping[int, Sequence[object]] | None = None,
        *,
        tiers: Sequence[str] = (),
        has_manager: bool = False,
    ) -> None:
        made_of = MetricClasses.default() if classes is None else classes
        self._labelnames = tuple(labelnames)
        self._labelvalues = {} if per_engine_labelvalues is None else per_engine_labelvalues
        self._transfers = _Series(made_of, self._labelnames, TRANSFERS)
        self._labelled = {record: _Series(made_of, self._labelnames, record) for record in LABELLED}
        self._records = {record: _Series(made_of, self._labelnames, record) for record in RECORDS}
        for engine_idx in self._labelvalues or (0,):
            self._declare(self._engine_labels(engine_idx), tiers, self._records.values() if has_manager else ())

    def _declare(self, engine: tuple[str, ...], tiers: Sequence[str], records: Iterable[_Series]) -> None:
        """Create the counters with the value 0, because an alert on the first increase needs a value before."""
        for tier in tiers:
            self._labelled[TIERS].declare((*engine, tier))
        for series in records:
            series.declare(engine)

    def observe(self, data: StatsData, engine_idx: int = 0) -> None:
        """Add one report of an engine to the metrics.

        Args:
            data: the report (:attr:`tiering.connector.stats.OffloadingConnectorStats.data`).
            engine_idx: index of the engine; default: 0.
        """
        engine = self._engine_labels(engine_idx)
        for name, reported in data.items():
            if name in LABELLED:
                for values, fields in _mapping(reported).items():
                    labels = (values,) if name == TIERS else tuple(values.split(" ", 1))
                    self._labelled[name].observe((*engine, *labels), _mapping(fields))
            elif name in RECORDS:
                self._records[name].observe(engine, _mapping(reported))
            elif isinstance(reported, Iterable):
                for operation in reported:
                    self._transfers.observe((*engine, name), operation)

    def _engine_labels(self, engine_idx: int) -> tuple[str, ...]:
        values = self._labelvalues.get(engine_idx, (engine_idx,) * len(self._labelnames))
        return tuple(map(str, values))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
