"""The table of the connector's metrics: one row per metric, from which metrics and documents are made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tiering.advisor.advisor import FIELDS
from tiering.offload.stats import CONNECTOR, MANAGER, TIERS
from tiering.secondary.stats import JOB_LATENCY_BUCKETS

SIZE_BUCKETS: tuple[float, ...] = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
"""Upper bounds of the histogram of transfer sizes, in bytes."""

TRANSFERS = "transfers"
"""Record of the workers' transfers between the GPU and the CPU tier."""

LABELS = {TRANSFERS: ("transfer_type",), TIERS: ("tier",), MANAGER: (), CONNECTOR: ()}
"""Labels of the metrics of each record, beside the labels of the engine."""


class MetricKind(Enum):
    """The kind of a metric, as Prometheus names it."""

    COUNTER = "counter"
    """A number that only grows; Prometheus appends ``_total`` to the name."""
    GAUGE = "gauge"
    """A present value."""
    HISTOGRAM = "histogram"
    """Observations, counted by buckets."""


COUNTER, GAUGE, HISTOGRAM = MetricKind


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    record: str
    """Record of the reports that the metric is made from; :data:`LABELS` has the labels by record."""
    kind: MetricKind
    """Kind of the metric."""
    field: str
    """Field of the record."""
    unit: str
    """Unit: "bytes", "seconds", "flag" (1 or 0), "state" (a number), or the things counted."""
    meaning: str
    """Meaning of the metric in one line, which Prometheus shows as its help."""
    name: str = ""
    """Name of the metric; default: ``kv_tiering_`` and the field."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; empty for other kinds."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", f"kv_tiering_{self.field}")


METRICS: tuple[Metric, ...] = (
    Metric(TRANSFERS, COUNTER, "op_size", "bytes", "Bytes moved by KV offloading", "vllm:kv_offload_total_bytes"),
    Metric(
        TRANSFERS,
        COUNTER,
        "op_time",
        "seconds",
        "Seconds that KV offloading's transfers took, summed",
        "vllm:kv_offload_total_time",
    ),
    Metric(
        TRANSFERS,
        HISTOGRAM,
        "op_size",
        "bytes",
        "Bytes of one transfer of KV offloading",
        "vllm:kv_offload_size",
        SIZE_BUCKETS,
    ),
    Metric(TIERS, COUNTER, "read_bytes", "bytes", "Bytes that the tier read for promotions"),
    Metric(TIERS, COUNTER, "read_seconds", "seconds", "Seconds that the tier's reads took, summed over all of them"),
    Metric(TIERS, COUNTER, "written_bytes", "bytes", "Bytes that were stored in the tier"),
    Metric(
        TIERS, COUNTER, "written_seconds", "seconds", "Seconds that the tier's writes took, summed over all of them"
    ),
    Metric(TIERS, COUNTER, "queries", "blocks", "Blocks for which the tier was probed"),
    Metric(TIERS, COUNTER, "hits", "blocks", "Probed blocks that the tier held"),
    Metric(TIERS, COUNTER, "misses", "blocks", "Probed blocks that the tier did not hold"),
    Metric(TIERS, COUNTER, "promotions", "blocks", "Blocks promoted from the tier to the primary one"),
    Metric(TIERS, COUNTER, "promotions_failed", "blocks", "Blocks whose promotion failed"),
    Metric(TIERS, COUNTER, "cascades", "blocks", "Blocks cascaded from the primary tier"),
    Metric(TIERS, COUNTER, "cascades_failed", "blocks", "Blocks whose cascade failed"),
    Metric(TIERS, COUNTER, "stores_declined", "blocks", "Blocks offered that the tier's admission declined"),
    Metric(
        TIERS,
        COUNTER,
        "stores_dropped",
        "blocks",
        "Blocks dropped because the tier could not keep up or was out of service",
    ),
    Metric(TIERS, COUNTER, "loads_overdue", "blocks", "Blocks whose load missed its deadline"),
    Metric(TIERS, COUNTER, "evictions", "blocks", "Blocks evicted from the tier"),
    Metric(
        TIERS, COUNTER, "corrupt_blocks", "blocks", "Blocks that were corrupt when they were read, and became misses"
    ),
    Metric(
        TIERS,
        COUNTER,
        "device_errors",
        "blocks",
        "Blocks not moved because the device reported an error at their place",
    ),
    Metric(
        TIERS, COUNTER, "blocks_lost", "blocks", "Blocks lost because the tier's files were removed, cut or replaced"
    ),
    Metric(TIERS, COUNTER, "loads_too_long", "blocks", "Blocks not loaded because they would arrive too late"),
    Metric(TIERS, COUNTER, "blocks_deleted", "blocks", "Corrupt blocks deleted from a shared medium"),
    Metric(TIERS, COUNTER, "lookups_late", "lookups", "Lookups answered with no because the medium was late"),
    Metric(TIERS, COUNTER, "retries", "attempts", "Attempts repeated after a temporary error"),
    Metric(TIERS, COUNTER, "requests", "requests", "Requests sent to the medium"),
    Metric(TIERS, COUNTER, "requests_get", "requests", "Requests that read an object"),
    Metric(TIERS, COUNTER, "requests_head", "requests", "Requests that ask whether an object is there"),
    Metric(TIERS, COUNTER, "requests_put", "requests", "Requests that write an object"),
    Metric(TIERS, COUNTER, "requests_delete", "requests", "Requests that delete objects"),
    Metric(TIERS, COUNTER, "requests_list", "requests", "Requests that list objects"),
    Metric(TIERS, COUNTER, "answers_absent", "requests", "Requests answered with 404: no such object"),
    Metric(TIERS, COUNTER, "answers_conflict", "requests", "Requests answered with 409 or 412: a conflict"),
    Metric(TIERS, COUNTER, "refused_bytes", "bytes", "Bytes sent to an object store and not taken"),
    Metric(TIERS, COUNTER, "breaker_opened", "times", "Times that the tier's circuit breaker opened"),
    Metric(TIERS, GAUGE, "promotions_active", "blocks", "Blocks being promoted from the tier"),
    Metric(TIERS, GAUGE, "cascades_active", "blocks", "Blocks being cascaded to the tier"),
    Metric(TIERS, GAUGE, "blocks", "blocks", "Blocks that the tier holds"),
    Metric(TIERS, GAUGE, "occupancy_bytes", "bytes", "Bytes that the tier's blocks take"),
    Metric(TIERS, GAUGE, "capacity_bytes", "bytes", "Bytes that the tier may take"),
    Metric(TIERS, GAUGE, "slots_retired", "slots", "Places out of use because the device reported an error there"),
    Metric(TIERS, GAUGE, "recovering", "flag", "1 until the content of the whole medium is known"),
    Metric(TIERS, GAUGE, "breaker_state", "state", "Circuit breaker: 0 closed, 1 half open, 2 open"),
    Metric(TIERS, GAUGE, "available", "flag", "1 if the tier is in service"),
    Metric(TIERS, GAUGE, "writable", "flag", "1 if the tier is in service and takes stores"),
    *(
        Metric(
            TIERS,
            GAUGE,
            name,
            "ratio",
            f"Estimated hit rate of the tier and all faster ones with {factor:g} times the tier's capacity",
        )
        for factor, name in FIELDS.items()
    ),
    Metric(
        TIERS,
        HISTOGRAM,
        "job_latency",
        "seconds",
        "Seconds from the submission of a tier's job to its end",
        name="kv_tiering_job_latency_seconds",
        buckets=JOB_LATENCY_BUCKETS,
    ),
    Metric(
        MANAGER, COUNTER, "stores_without_room", "stores", "Stores refused because every row of the CPU tier was in use"
    ),
    Metric(
        MANAGER,
        COUNTER,
        "promotions_without_room",
        "promotions",
        "Promotions cut short because no row was free for them",
    ),
    Metric(MANAGER, COUNTER, "promotions_overdue", "blocks", "Blocks given up because their promotion took too long"),
    Metric(MANAGER, COUNTER, "promotions_dropped", "blocks", "Blocks whose promotion was dropped before it began"),
    Metric(
        MANAGER,
        COUNTER,
        "promotions_adopted",
        "blocks",
        "Blocks that arrived after they had been given up, and were kept",
    ),
    Metric(
        MANAGER,
        COUNTER,
        "reservations_expired",
        "blocks",
        "Promoted blocks that no request loaded before their deadline",
    ),
    Metric(MANAGER, COUNTER, "ignored_completions", "blocks", "Completions of blocks that a reset had forgotten"),
    Metric(MANAGER, COUNTER, "misreported_jobs", "jobs", "Jobs reported by a tier that did not have them"),
    Metric(
        MANAGER,
        COUNTER,
        "tiers_out_of_service",
        "tiers",
        "Tiers taken out of service because they broke their contract",
    ),
    Metric(MANAGER, COUNTER, "resets", "resets", "Resets of the cache"),
    Metric(MANAGER, COUNTER, "new_epochs", "epochs", "New common epochs for which all tiers were emptied"),
    Metric(MANAGER, COUNTER, "evicted_blocks", "blocks", "Blocks evicted from the CPU tier"),
    Metric(MANAGER, GAUGE, "jobs_in_flight", "jobs", "Jobs that tiers have not reported yet"),
    Metric(MANAGER, GAUGE, "rows", "rows", "Rows of the CPU tier"),
    Metric(MANAGER, GAUGE, "rows_free", "rows", "Rows that hold nothing"),
    Metric(MANAGER, GAUGE, "rows_evictable", "rows", "Rows that hold a block and can be evicted now"),
    Metric(MANAGER, GAUGE, "rows_reserved", "rows", "Rows with promoted blocks that wait for their requests"),
    Metric(MANAGER, GAUGE, "rows_quarantined", "rows", "Rows without a key that a transfer still uses"),
    Metric(CONNECTOR, COUNTER, "loads_failed", "loads", "Loads from the CPU tier to the GPU that failed"),
    Metric(CONNECTOR, COUNTER, "stores_failed", "stores", "Stores from the GPU to the CPU tier that failed"),
    Metric(
        CONNECTOR,
        COUNTER,
        "stores_refused",
        "offers",
        "Offers of a request's blocks that found no room in the CPU tier",
    ),
    Metric(CONNECTOR, COUNTER, "hits_shrunk", "hits", "Hits that had lost blocks before they were loaded"),
    Metric(
        CONNECTOR,
        COUNTER,
        "snapshots_dropped",
        "blocks",
        "Blocks whose KV events lost their tokens to the bound on snapshots",
    ),
    Metric(CONNECTOR, COUNTER, "records_dropped", "requests", "Finished requests that the recorded trace lacks"),
)
"""All metrics. A counter of a tier without another unit in its name counts blocks."""


def metrics_of(record: str, kind: MetricKind) -> tuple[Metric, ...]:
    """Return the metrics of one record and kind, in the order of the table."""
    return tuple(metric for metric in METRICS if metric.record == record and metric.kind is kind)
