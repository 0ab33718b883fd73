"""Prometheus metrics of the connector: transfers of the workers, tiers, manager and scheduler half.

The engine chooses the classes of the metrics, because some engines wrap these classes. The default classes are those of
prometheus_client. Reports carry increments, and each increment is observed once: an engine with several front ends
sends each report to one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tiering.errors import ConfigError
from tiering.offload.stats import CONNECTOR, MANAGER, RECORDS, TIERS, StatsData
from tiering.secondary.stats import JOB_LATENCY_BUCKETS

SIZE_BUCKETS: tuple[float, ...] = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
"""Upper bounds of the histogram of transfer sizes, in bytes."""


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


TIER_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("read_bytes", "kv_tiering_read_bytes", "Bytes that the tier read for promotions"),
    ("read_seconds", "kv_tiering_read_seconds", "Seconds that the tier's reads took, summed over all of them"),
    ("written_bytes", "kv_tiering_written_bytes", "Bytes that were stored in the tier"),
    ("written_seconds", "kv_tiering_written_seconds", "Seconds that the tier's writes took, summed over all of them"),
    ("queries", "kv_tiering_queries", "Blocks for which the tier was probed"),
    ("hits", "kv_tiering_hits", "Probed blocks that the tier held"),
    ("misses", "kv_tiering_misses", "Probed blocks that the tier did not hold"),
    ("promotions", "kv_tiering_promotions", "Blocks promoted from the tier to the primary one"),
    ("promotions_failed", "kv_tiering_promotions_failed", "Blocks whose promotion failed"),
    ("cascades", "kv_tiering_cascades", "Blocks cascaded from the primary tier"),
    ("cascades_failed", "kv_tiering_cascades_failed", "Blocks whose cascade failed"),
    ("stores_declined", "kv_tiering_stores_declined", "Blocks offered that the tier's admission declined"),
    (
        "stores_dropped",
        "kv_tiering_stores_dropped",
        "Blocks dropped because the tier could not keep up or was out of service",
    ),
    ("loads_overdue", "kv_tiering_loads_overdue", "Blocks whose load missed its deadline"),
    ("evictions", "kv_tiering_evictions", "Blocks evicted from the tier"),
    (
        "corrupt_blocks",
        "kv_tiering_corrupt_blocks",
        "Blocks that were corrupt when they were read, and became misses",
    ),
    (
        "device_errors",
        "kv_tiering_device_errors",
        "Blocks not moved because the device reported an error at their place",
    ),
    ("blocks_lost", "kv_tiering_blocks_lost", "Blocks lost because the tier's files were removed, cut or replaced"),
    ("blocks_deleted", "kv_tiering_blocks_deleted", "Corrupt blocks deleted from a shared medium"),
    ("lookups_late", "kv_tiering_lookups_late", "Lookups answered with no because the medium was late"),
    ("retries", "kv_tiering_retries", "Attempts repeated after a temporary error"),
    ("requests", "kv_tiering_requests", "Requests sent to the medium"),
    ("breaker_opened", "kv_tiering_breaker_opened", "Times that the tier's circuit breaker opened"),
)
"""Counters of a tier: field of TierStats, name of the metric, documentation.

The unit is part of the name; a name without a unit counts blocks.
"""

TIER_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("promotions_active", "kv_tiering_promotions_active", "Blocks being promoted from the tier"),
    ("cascades_active", "kv_tiering_cascades_active", "Blocks being cascaded to the tier"),
    ("blocks", "kv_tiering_blocks", "Blocks that the tier holds"),
    ("occupancy_bytes", "kv_tiering_occupancy_bytes", "Bytes that the tier's blocks take"),
    ("capacity_bytes", "kv_tiering_capacity_bytes", "Bytes that the tier may take"),
    ("slots_retired", "kv_tiering_slots_retired", "Places out of use because the device reported an error there"),
    ("recovering", "kv_tiering_recovering", "1 until the content of the whole medium is known"),
    ("breaker_state", "kv_tiering_breaker_state", "Circuit breaker: 0 closed, 1 half open, 2 open"),
    ("available", "kv_tiering_available", "1 if the tier is in service"),
    ("writable", "kv_tiering_writable", "1 if the tier is in service and takes stores"),
)
"""Gauges of a tier: field of TierStats, name of the metric, documentation."""


MANAGER_COUNTERS: tuple[tuple[str, str, str], ...] = (
    (
        "stores_without_room",
        "kv_tiering_stores_without_room",
        "Stores refused because every row of the CPU tier was in use",
    ),
    (
        "promotions_without_room",
        "kv_tiering_promotions_without_room",
        "Promotions cut short because no row was free for them",
    ),
    ("promotions_overdue", "kv_tiering_promotions_overdue", "Blocks given up because their promotion took too long"),
    ("promotions_dropped", "kv_tiering_promotions_dropped", "Blocks whose promotion was dropped before it began"),
    (
        "promotions_adopted",
        "kv_tiering_promotions_adopted",
        "Blocks that arrived after they had been given up, and were kept",
    ),
    (
        "reservations_expired",
        "kv_tiering_reservations_expired",
        "Promoted blocks that no request loaded before their deadline",
    ),
    ("ignored_completions", "kv_tiering_ignored_completions", "Completions of blocks that a reset had forgotten"),
    ("misreported_jobs", "kv_tiering_misreported_jobs", "Jobs reported by a tier that did not have them"),
    (
        "tiers_out_of_service",
        "kv_tiering_tiers_out_of_service",
        "Tiers taken out of service because they broke their contract",
    ),
    ("resets", "kv_tiering_resets", "Resets of the cache"),
    ("evicted_blocks", "kv_tiering_evicted_blocks", "Blocks evicted from the CPU tier"),
)
"""Counters of the manager: field of ManagerStats, name of the metric, documentation."""

MANAGER_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("jobs_in_flight", "kv_tiering_jobs_in_flight", "Jobs that tiers have not reported yet"),
    ("rows", "kv_tiering_rows", "Rows of the CPU tier"),
    ("rows_free", "kv_tiering_rows_free", "Rows that hold nothing"),
    ("rows_evictable", "kv_tiering_rows_evictable", "Rows that hold a block and can be evicted now"),
    ("rows_reserved", "kv_tiering_rows_reserved", "Rows with promoted blocks that wait for their requests"),
    ("rows_quarantined", "kv_tiering_rows_quarantined", "Rows without a key that a transfer still uses"),
)
"""Gauges of the manager: field of ManagerStats, name of the metric, documentation."""

CONNECTOR_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("loads_failed", "kv_tiering_loads_failed", "Loads from the CPU tier to the GPU that failed"),
    ("stores_failed", "kv_tiering_stores_failed", "Stores from the GPU to the CPU tier that failed"),
    ("stores_refused", "kv_tiering_stores_refused", "Offers of a request's blocks that found no room in the CPU tier"),
    ("hits_shrunk", "kv_tiering_hits_shrunk", "Hits that had lost blocks before they were loaded"),
    (
        "snapshots_dropped",
        "kv_tiering_snapshots_dropped",
        "Blocks whose KV events lost their tokens to the bound on snapshots",
    ),
)
"""Counters of the scheduler half: field of SchedulerCounters, name of the metric, documentation."""


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
    """Counters and gauges of one kind of record."""

    def __init__(
        self,
        classes: MetricClasses,
        labels: Sequence[str],
        counters: Iterable[tuple[str, str, str]],
        gauges: Iterable[tuple[str, str, str]] = (),
    ) -> None:
        self._counters = {
            key: classes.counter(name=name, documentation=text, labelnames=labels) for key, name, text in counters
        }
        self._gauges = {
            key: classes.gauge(name=name, documentation=text, labelnames=labels) for key, name, text in gauges
        }

    def declare(self, labels: tuple[str, ...]) -> None:
        """Create the counters of ``labels`` with the value 0."""
        for counter in self._counters.values():
            counter.labels(*labels)

    def observe(self, labels: tuple[str, ...], fields: Mapping[str, Any]) -> None:
        for key, counter in self._counters.items():
            counter.labels(*labels).inc(fields.get(key, 0))
        for key, gauge in self._gauges.items():
            if key in fields:
                gauge.labels(*labels).set(fields[key])


class _TierSeries(_Series):
    """The metrics of all tiers."""

    def __init__(self, classes: MetricClasses, labelnames: Sequence[str]) -> None:
        labels = [*labelnames, "tier"]
        super().__init__(classes, labels, TIER_COUNTERS, TIER_GAUGES)
        self._latency = classes.histogram(
            name="kv_tiering_job_latency_seconds",
            documentation="Seconds from the submission of a tier's job to its end",
            labelnames=labels,
            buckets=list(JOB_LATENCY_BUCKETS),
        )

    def observe(self, labels: tuple[str, ...], fields: Mapping[str, Any]) -> None:
        super().observe(labels, fields)
        counts: list[int] = fields.get("job_latency", [])
        if any(counts) and len(counts) == len(JOB_LATENCY_BUCKETS) + 1:
            histogram = self._latency.labels(*labels)
            for count, seconds in zip(
                counts, representative_seconds(counts, fields.get("job_latency_sum", 0.0)), strict=True
            ):
                for _ in range(count):
                    histogram.observe(seconds)


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
        labels = [*labelnames, "transfer_type"]
        self._bytes = made_of.counter(
            name="vllm:kv_offload_total_bytes", documentation="Bytes moved by KV offloading", labelnames=labels
        )
        self._seconds = made_of.counter(
            name="vllm:kv_offload_total_time",
            documentation="Seconds that KV offloading's transfers took, summed",
            labelnames=labels,
        )
        self._size = made_of.histogram(
            name="vllm:kv_offload_size",
            documentation="Bytes of one transfer of KV offloading",
            labelnames=labels,
            buckets=list(SIZE_BUCKETS),
        )
        self._tiers = _TierSeries(made_of, self._labelnames)
        self._records = {
            MANAGER: _Series(made_of, self._labelnames, MANAGER_COUNTERS, MANAGER_GAUGES),
            CONNECTOR: _Series(made_of, self._labelnames, CONNECTOR_COUNTERS),
        }
        for engine_idx in self._labelvalues or (0,):
            self._declare(self._engine_labels(engine_idx), tiers, self._records.values() if has_manager else ())

    def _declare(self, engine: tuple[str, ...], tiers: Sequence[str], records: Iterable[_Series]) -> None:
        """Create the counters with the value 0, because an alert on the first increase needs a value before."""
        for tier in tiers:
            self._tiers.declare((*engine, tier))
        for series in records:
            series.declare(engine)

    def observe(self, data: StatsData, engine_idx: int = 0) -> None:
        """Add one report of an engine to the metrics.

        Args:
            data: the report (:attr:`tiering.offload.stats.OffloadingConnectorStats.data`).
            engine_idx: index of the engine; default: 0.
        """
        engine = self._engine_labels(engine_idx)
        for name, reported in data.items():
            if name == TIERS:
                for tier, fields in _mapping(reported).items():
                    self._tiers.observe((*engine, tier), _mapping(fields))
            elif name in RECORDS:
                self._records[name].observe(engine, _mapping(reported))
            elif isinstance(reported, Iterable):
                self._observe_transfers((*engine, name), reported)

    def _observe_transfers(self, labels: tuple[str, ...], operations: Iterable[Mapping[str, Any]]) -> None:
        moved, seconds, size = self._bytes.labels(*labels), self._seconds.labels(*labels), self._size.labels(*labels)
        for operation in operations:
            moved.inc(operation["op_size"])
            seconds.inc(operation["op_time"])
            size.observe(operation["op_size"])

    def _engine_labels(self, engine_idx: int) -> tuple[str, ...]:
        values = self._labelvalues.get(engine_idx, (engine_idx,) * len(self._labelnames))
        return tuple(map(str, values))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
