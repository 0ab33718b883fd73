"""The table of the connector's metrics: one row per metric, from which metrics and documents are made."""

from __future__ import annotations

from functools import partial

from tiering.connector.metric import TRANSFERS, Metric, MetricKind
from tiering.connector.stats import CONNECTOR, MANAGER
from tiering.connector.tier_metrics import TIER_METRICS

SIZE_BUCKETS: tuple[float, ...] = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
"""Upper bounds of the histogram of transfer sizes, in bytes."""

_of_manager = partial(Metric, MANAGER, MetricKind.COUNTER)
_manager_gauge = partial(Metric, MANAGER, MetricKind.GAUGE)
_of_connector = partial(Metric, CONNECTOR, MetricKind.COUNTER)
_connector_gauge = partial(Metric, CONNECTOR, MetricKind.GAUGE)

_TRANSFERS = (
    Metric(
        TRANSFERS,
        MetricKind.COUNTER,
        "op_size",
        "bytes",
        "Bytes moved by KV offloading",
        "Its rate is the bandwidth between the GPU and the CPU tier.",
        "vllm:kv_offload_total_bytes",
    ),
    Metric(
        TRANSFERS,
        MetricKind.COUNTER,
        "op_time",
        "seconds",
        "Seconds that KV offloading's transfers took, summed",
        "Bytes / seconds far below the bus: rows are not pinned, see the log of the start.",
        "vllm:kv_offload_total_time",
    ),
    Metric(
        TRANSFERS,
        MetricKind.HISTOGRAM,
        "op_size",
        "bytes",
        "Bytes of one transfer of KV offloading",
        "Transfers below 1 MB are slow per byte: raise `block_size`.",
        "vllm:kv_offload_size",
        SIZE_BUCKETS,
    ),
)

_MANAGER = (
    _of_manager(
        "stores_without_room",
        "stores",
        "Stores refused because rows were in use, or half of all rows waited for the fastest tier",
        "Normal in bursts. If it goes on, raise `primary.capacity`, or see `queued_evicted`.",
    ),
    _of_manager(
        "promotions_without_room",
        "promotions",
        "Promotions cut short because no row was free for them",
        "Hits of slower tiers are lost: raise `primary.capacity` or `promotion_share`.",
    ),
    _of_manager(
        "promotions_waited",
        "promotions",
        "Promotions that waited because no row was free for them at once",
        "Hits come later than they could: raise `primary.capacity` if the time to the first token matters.",
    ),
    _of_manager(
        "queued_evicted",
        "blocks",
        "Blocks that left the queue of a tier unstored because their rows were needed",
        "Stores come faster than the tier writes, or it is in trouble: see `stores_evicted` of the tiers.",
    ),
    _of_manager(
        "queued_reset",
        "blocks",
        "Blocks that left the queue of a tier unstored because of a reset or a new common epoch",
        "Normal after resets.",
    ),
    _of_manager(
        "queued_retired",
        "blocks",
        "Blocks that left the queue of a tier unstored because the tier went out of service",
        "See `tiers_out_of_service`, and the log.",
    ),
    _of_manager(
        "promotions_overdue",
        "blocks",
        "Blocks given up because their promotion took too long",
        "See `loads_overdue` of the tiers: a medium is too slow for `load_deadline`.",
    ),
    _of_manager(
        "promotions_dropped",
        "blocks",
        "Blocks whose promotion was dropped before it began",
        "Normal after resets and for requests that ended early.",
    ),
    _of_manager(
        "promotions_adopted",
        "blocks",
        "Blocks that arrived after they had been given up, and were kept",
        "A slightly larger `load_deadline` would turn them into hits.",
    ),
    _of_manager(
        "reservations_expired",
        "blocks",
        "Promoted blocks that no request loaded before their deadline",
        "Requests wait longer than `reservation_deadline` for their turn: the engine is overloaded.",
    ),
    _of_manager(
        "ignored_completions",
        "blocks",
        "Completions of blocks that a reset had forgotten",
        "Normal after a reset only.",
    ),
    _of_manager(
        "misreported_jobs",
        "jobs",
        "Jobs reported by a tier that did not have them",
        "A defect of a tier: see the log, and report it to the tier's author.",
    ),
    _of_manager(
        "tiers_out_of_service",
        "tiers",
        "Tiers taken out of service because they broke their contract",
        "The tier stays away until a restart. Keep the log, and report the defect.",
    ),
    _of_manager("resets", "resets", "Resets of the cache", "Each empties the tiers; they come from the engine's API."),
    _of_manager(
        "new_epochs",
        "epochs",
        "New common epochs for which all tiers were emptied",
        "Somebody ran `kv-tiering epoch new`, or an epoch document was lost.",
    ),
    _of_manager(
        "evicted_blocks", "blocks", "Blocks evicted from the CPU tier", "The same as evictions of the tier cpu."
    ),
    _manager_gauge(
        "jobs_in_flight",
        "jobs",
        "Jobs that tiers have not reported yet",
        "If it grows without end, a medium hangs.",
    ),
    _manager_gauge(
        "blocks_queued",
        "blocks",
        "Readable blocks that wait until a tier takes them",
        "If it stays high, stores come faster than a tier writes: see `queued_evicted` for the losses.",
    ),
    _manager_gauge("rows", "rows", "Rows of the CPU tier", "Changes with `primary.capacity` only."),
    _manager_gauge("rows_free", "rows", "Rows that hold nothing", "0 is normal once the CPU tier is full."),
    _manager_gauge(
        "rows_evictable",
        "rows",
        "Rows that hold a block and can be evicted now",
        "Near 0 while `rows_free` is 0: stores find no room; raise `primary.capacity`.",
    ),
    _manager_gauge(
        "rows_reserved",
        "rows",
        "Rows with promoted blocks that wait for their requests",
        "At `promotion_share` of rows, promotions are cut short.",
    ),
    _manager_gauge(
        "rows_quarantined",
        "rows",
        "Rows without a key that a transfer still uses",
        "If it stays up, a medium or a copy hangs and keeps memory.",
    ),
)

_CONNECTOR = (
    _of_connector(
        "queried_tokens",
        "tokens",
        "Tokens beyond the engine's own cache for which the tiers were asked",
        "`hit_tokens` / `queried_tokens` is the share of prefill that the tiers save.",
    ),
    _of_connector(
        "hit_tokens",
        "tokens",
        "Tokens for which loads to the GPU were ordered",
        "If the share of `queried_tokens` falls, see the hit rates of the tiers.",
    ),
    _of_connector(
        "loads", "loads", "Loads from the CPU tier to the GPU that were ordered", "One per hit of a request."
    ),
    _of_connector(
        "loads_failed",
        "loads",
        "Loads from the CPU tier to the GPU that failed",
        "The requests compute their tokens. See the log of the workers.",
    ),
    _of_connector(
        "stores", "stores", "Stores from the GPU to the CPU tier that were ordered", "One per request and step."
    ),
    _of_connector(
        "stores_failed", "stores", "Stores from the GPU to the CPU tier that failed", "See the log of the workers."
    ),
    _of_connector(
        "stores_refused",
        "offers",
        "Offers of a request's blocks that the CPU tier did not take",
        "See `stores_without_room`; the blocks are offered again at later steps.",
    ),
    _of_connector(
        "hits_shrunk",
        "hits",
        "Hits that had lost blocks before they were loaded",
        "Blocks are evicted within a step: raise `primary.capacity`.",
    ),
    _of_connector(
        "jobs_flushed",
        "jobs",
        "Copies that a step waited for because it reused their GPU blocks",
        "Steps are delayed by stores: give the GPU more blocks, or look for copies without pinned rows.",
    ),
    _of_connector(
        "sharer_waits",
        "requests",
        "Requests that waited for a load of another request",
        "Many requests with one prefix arrive together; bounded by `sharer_wait`.",
    ),
    _of_connector(
        "scheduler_seconds",
        "seconds",
        "Seconds that the connector took on the scheduler's thread",
        "Its rate is the share of the scheduler's time; above 5%, report the workload.",
    ),
    _of_connector(
        "snapshots_dropped",
        "blocks",
        "Blocks whose KV events lost their tokens to the bound on snapshots",
        "Routers know these blocks by their hash only.",
    ),
    _of_connector(
        "requests_recorded",
        "requests",
        "Finished requests that were written to the trace",
        "0 with `record_trace` in the stack: see the log.",
    ),
    _of_connector(
        "records_dropped",
        "requests",
        "Finished requests that the recorded trace lacks",
        "The trace's disk is full or too slow; the trace has gaps.",
    ),
    _connector_gauge("jobs_active", "jobs", "Copies that have not ended on all workers", "See `jobs_flushed`."),
    _connector_gauge(
        "requests_active",
        "requests",
        "Requests that have not ended",
        "The load of the engine, waiting requests included.",
    ),
)

METRICS: tuple[Metric, ...] = (*_TRANSFERS, *TIER_METRICS, *_MANAGER, *_CONNECTOR)
"""All metrics."""


def metrics_of(record: str, kind: MetricKind) -> tuple[Metric, ...]:
    """Return the metrics of one record and kind, in the order of the table."""
    return tuple(metric for metric in METRICS if metric.record == record and metric.kind is kind)
