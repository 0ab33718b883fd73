"""The table of all metrics, from their declarations at the fields of the statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tiering.advisor.advisor import ESTIMATES
from tiering.api.metric import Metric, MetricKind, counter, declared, declared_metrics
from tiering.connector.counters import SchedulerCounters
from tiering.machine.counts import EngineCounts, ServiceCounts
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.worth import WORTH
from tiering.secondary.tier_stats import TierStats

TRANSFERS = "transfers"
"""Record of the workers' transfers between the GPU and the CPU tier."""

TIERS = "tiers"
"""Record of the counters of the tiers."""

MANAGER = "manager"
"""Record of the counters of the manager."""

CONNECTOR = "connector"
"""Record of the counters of the connector's scheduler half."""

MISSES = "misses"
"""Record of the computed prompt tokens by cause and tier."""

CACHED = "cached"
"""Record of the cached prompt tokens by tenant and tier."""

SERVICE = "service"
"""Record of the counts of a machine's service."""

ENGINES = "engines"
"""Record of the counts of the engines at the tiers of a machine's service."""

LABELLED = (TIERS, MISSES, CACHED)
"""Records with fields per value of their labels; a space separates the values of two labels."""

SIZE_BUCKETS: tuple[float, ...] = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
"""Upper bounds of the histogram of transfer sizes, in bytes."""


@dataclass(frozen=True, slots=True)
class OffloadingOperationMetrics:
    """Measurements of one transfer."""

    op_size: int = field(
        metadata=declared(
            Metric(
                MetricKind.COUNTER,
                "bytes",
                "Bytes moved by KV offloading",
                "Its rate is the bandwidth between the GPU and the CPU tier.",
                "vllm:kv_offload_total_bytes",
            ),
            Metric(
                MetricKind.HISTOGRAM,
                "bytes",
                "Bytes of one transfer of KV offloading",
                "Transfers below 1 MB are slow per byte: raise `block_size`.",
                "vllm:kv_offload_size",
                SIZE_BUCKETS,
            ),
        )
    )
    op_time: float = field(
        metadata=declared(
            Metric(
                MetricKind.COUNTER,
                "seconds",
                "Seconds that KV offloading's transfers took, summed",
                "Bytes / seconds far below the bus: rows are not pinned, see the log of the start.",
                "vllm:kv_offload_total_time",
            )
        )
    )


@dataclass(slots=True)
class MissCounters:
    """Counters of one cause of misses, and of one tier if the cause names one."""

    missed_tokens: int = counter(
        "tokens",
        "Prompt tokens that were computed, by cause and tier; only with `explain` in the stack",
        "The largest cause is the one to change: see the [guide](guides/why-a-miss.md).",
    )


@dataclass(slots=True)
class CachedCounters:
    """Counters of the cached tokens of one tenant in one tier."""

    cached_tokens: int = counter(
        "tokens",
        "Prompt tokens that were found in a cache, by tenant and tier; only with `report_cached` in the stack",
        "For billing. A tenant is the keyed hash of a cache salt; the tier `engine` is the engine's own cache.",
    )
    cached_tokens_arrived: int = counter(
        "tokens",
        "Those of the cached tokens whose load did not fail",
        "The engine has computed the others: `loads_failed` and `hits_shrunk` count their loads.",
    )


def _table() -> Iterator[Metric]:
    for record, labels, metrics in (
        (TRANSFERS, ("transfer_type",), declared_metrics(OffloadingOperationMetrics)),
        (TIERS, ("tier",), (*declared_metrics(TierStats), *ESTIMATES, *WORTH)),
        (MANAGER, (), declared_metrics(ManagerStats)),
        (MISSES, ("cause", "tier"), declared_metrics(MissCounters)),
        (CACHED, ("tenant", "tier"), declared_metrics(CachedCounters)),
        (CONNECTOR, (), declared_metrics(SchedulerCounters)),
        (SERVICE, (), declared_metrics(ServiceCounts)),
        (ENGINES, ("namespace", "tier", "engine"), declared_metrics(EngineCounts)),
    ):
        yield from (replace(metric, record=record, labels=labels) for metric in metrics)


METRICS: tuple[Metric, ...] = tuple(_table())
"""All metrics."""

GAUGES = frozenset(metric.field for metric in METRICS if metric.kind is MetricKind.GAUGE)
"""Fields of gauges; all other fields are counters since the start."""


def metrics_of(record: str, kind: MetricKind) -> tuple[Metric, ...]:
    """Return the metrics of one record and kind, in the order of the table."""
    return tuple(metric for metric in METRICS if metric.record == record and metric.kind is kind)
