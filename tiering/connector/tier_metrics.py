"""The rows of the table of metrics that each tier has."""

from __future__ import annotations

from functools import partial

from tiering.advisor.advisor import FIELDS
from tiering.connector.metric import Metric, MetricKind
from tiering.connector.stats import TIERS
from tiering.secondary.tier_stats import JOB_LATENCY_BUCKETS

_counter = partial(Metric, TIERS, MetricKind.COUNTER)
_gauge = partial(Metric, TIERS, MetricKind.GAUGE)

_MOVED = (
    _counter(
        "read_bytes",
        "bytes",
        "Bytes that the tier read for promotions",
        "Its rate is the bandwidth in use; compare with `kv-tiering bench`.",
    ),
    _counter(
        "read_seconds",
        "seconds",
        "Seconds that the tier's reads took, summed over all of them",
        "`read_bytes` / `read_seconds` is the bandwidth of one read; if it falls, look at the medium.",
    ),
    _counter(
        "written_bytes",
        "bytes",
        "Bytes that were stored in the tier",
        "Its rate wears flash; `admission: second_touch` lowers it.",
    ),
    _counter(
        "written_seconds",
        "seconds",
        "Seconds that the tier's writes took, summed over all of them",
        "`written_bytes` / `written_seconds` is the bandwidth of one write; if it falls, look at the medium.",
    ),
    _counter(
        "promotions",
        "blocks",
        "Blocks promoted from the tier to the primary one",
        "Each is a block that was not computed again.",
    ),
    _counter(
        "promotions_failed",
        "blocks",
        "Blocks that were to be promoted and could not be read",
        "The requests compute them. `loads_overdue`, `corrupt_blocks`, `device_errors` and the log have the reason.",
    ),
    _gauge(
        "promotions_active",
        "blocks",
        "Blocks being promoted from the tier",
        "If it stays high while `read_bytes` does not grow, the medium hangs.",
    ),
    _counter(
        "cascades", "blocks", "Blocks cascaded from the primary tier", "Its rate is the rate of new blocks in the tier."
    ),
    _counter(
        "cascades_failed",
        "blocks",
        "Blocks whose cascade failed",
        "The medium refuses writes: check space, quota and permissions with `kv-tiering check`.",
    ),
    _gauge(
        "cascades_active",
        "blocks",
        "Blocks being cascaded to the tier",
        "If it stays at its maximum, the tier is slower than the engine stores.",
    ),
    _counter("retries", "attempts", "Attempts repeated after a temporary error", "The medium throttles or resets."),
    Metric(
        TIERS,
        MetricKind.HISTOGRAM,
        "job_latency",
        "seconds",
        "Seconds from the submission of a tier's job to its end",
        "If the 99th percentile approaches `load_deadline`, hits become misses: find out what slows the medium.",
        name="kv_tiering_job_latency_seconds",
        buckets=JOB_LATENCY_BUCKETS,
    ),
)

_LOOKUPS = (
    _counter("queries", "blocks", "Blocks for which the tier was probed", "`hits` / `queries` is the tier's hit rate."),
    _counter(
        "hits",
        "blocks",
        "Probed blocks that the tier held",
        "If there are none for long while the tier holds blocks, prompts share no prefix, or the hashes differ.",
    ),
    _counter(
        "misses",
        "blocks",
        "Probed blocks that the tier did not hold",
        "A lookup counts one miss, where its prefix ends.",
    ),
    _counter(
        "lookups_late",
        "lookups",
        "Lookups answered with no because the medium was late",
        "Hits are lost to latency: look at the endpoint and the network, or raise the tier's lookup deadline.",
    ),
)

_NOT_STORED = (
    _counter(
        "stores_declined",
        "blocks",
        "Blocks offered that the tier's admission declined",
        "Normal with `admission: second_touch`, and for blocks that are being written already.",
    ),
    _counter(
        "stores_dropped",
        "blocks",
        "Blocks dropped because the tier took no stores",
        "`writable` is 0: look at `breaker_state`, and at the log.",
    ),
    _counter(
        "stores_left",
        "blocks",
        "Blocks that were left to another machine of the fleet, which was storing them",
        "Uploads that `coordination` has saved.",
    ),
    _counter(
        "stores_evicted",
        "blocks",
        "Blocks that waited for the tier and were not stored because their rows were needed",
        "The tier is slower than the engine stores, or in trouble; the blocks are offered again at their next use.",
    ),
    _counter(
        "evictions",
        "blocks",
        "Blocks evicted from the tier",
        "`blocks / rate(evictions)` is the time that a block stays; if that is minutes, enlarge the tier.",
    ),
)

_LOST = (
    _counter(
        "loads_overdue",
        "blocks",
        "Blocks whose load missed its deadline",
        "The medium hangs or is too slow; the requests compute these blocks.",
    ),
    _counter(
        "loads_too_long",
        "blocks",
        "Blocks not loaded because they would arrive too late",
        "The medium is too slow for prefixes of this length: raise `load_deadline`, or use a faster medium.",
    ),
    _counter(
        "corrupt_blocks",
        "blocks",
        "Blocks that were corrupt when they were read, and became misses",
        "No request got them. Find the cause: run `kv-tiering inspect --verify`, and check disk, memory and network.",
    ),
    _counter(
        "blocks_deleted",
        "blocks",
        "Corrupt blocks deleted from a shared medium",
        "They were corrupt for every reader; see `corrupt_blocks`.",
    ),
    _counter(
        "device_errors",
        "blocks",
        "Blocks not moved because the device reported an error at their place",
        "The disk fails: plan its replacement.",
    ),
    _counter(
        "blocks_lost",
        "blocks",
        "Blocks lost because the tier's files were removed, cut or replaced",
        "Somebody or something works in the tier's directory: keep others out.",
    ),
    _counter(
        "reopened",
        "times",
        "Times the medium was opened again because it is another one, or takes writes again",
        "The disk changes between states: see the kernel's log.",
    ),
)

_REQUESTS = (
    _counter("requests", "requests", "Requests sent to the medium", "On object stores, requests cost money."),
    _counter("requests_get", "requests", "Requests that read an object", "On S3 Standard, 0.4 $ per million."),
    _counter(
        "requests_head",
        "requests",
        "Requests that ask whether an object is there",
        "On S3 Standard, 0.4 $ per million. Longer presence results and `min_prefix_blocks` lower them.",
    ),
    _counter("requests_put", "requests", "Requests that write an object", "On S3 Standard, 5 $ per million."),
    _counter("requests_delete", "requests", "Requests that delete objects", "Free on S3 Standard."),
    _counter(
        "requests_list",
        "requests",
        "Requests that list objects",
        "On S3 Standard, 5 $ per million; engines list nothing while they serve.",
    ),
    _counter(
        "answers_absent",
        "requests",
        "Requests answered with 404: no such object",
        "Normal for probes of blocks that nobody has stored.",
    ),
    _counter(
        "answers_conflict",
        "requests",
        "Requests answered with 409 or 412: a conflict",
        "Mostly another engine has stored the block already.",
    ),
    _counter(
        "refused_bytes",
        "bytes",
        "Bytes sent to an object store and not taken",
        "Paid for and lost: see `answers_conflict`, and the log for refusals.",
    ),
)

_HELD = (
    _gauge("blocks", "blocks", "Blocks that the tier holds", "If it falls to 0, the tier was reset or left service."),
    _gauge(
        "occupancy_bytes",
        "bytes",
        "Bytes that the tier's blocks take",
        "At `capacity_bytes` the tier evicts, which is normal; see `evictions`.",
    ),
    _gauge(
        "capacity_bytes", "bytes", "Bytes that the tier may take; 0 without a bound", "Changes with the stack only."
    ),
    _gauge(
        "slots_retired",
        "slots",
        "Places out of use because the device reported an error there",
        "The disk fails: plan its replacement.",
    ),
)

_STATES = (
    _gauge(
        "recovering",
        "flag",
        "1 until the content of the whole medium is known",
        "Some minutes after a start are normal; longer means a slow disk or a lack of threads or open files.",
    ),
    _gauge(
        "load_depth",
        "transfers",
        "Transfers from the medium that may run at once now",
        "With `max_inflight: auto`, the number changes while loads wait, and alternates while two are compared.",
    ),
    _gauge(
        "store_depth",
        "transfers",
        "Transfers to the medium that may run at once now",
        "With `max_inflight: auto`, the number changes while stores wait, and alternates while two are compared.",
    ),
    _gauge(
        "breaker_state",
        "state",
        "Circuit breaker: 0 closed, 1 half open, 2 open",
        "Open: the medium failed in a row, and is probed from time to time. The log has the last error.",
    ),
    _counter(
        "breaker_opened", "times", "Times that the tier's circuit breaker opened", "Repeated outages of the medium."
    ),
    _gauge(
        "available",
        "flag",
        "1 if the tier is in service",
        "0: the engine runs without the tier, which takes itself back. The log has the reason. A medium that hangs is "
        "out of service once a store or load has passed its deadline without progress.",
    ),
    _gauge(
        "writable",
        "flag",
        "1 if the tier is in service and takes stores",
        "0 while `available` is 1: the medium is full or read-only; its blocks are still served.",
    ),
    _gauge(
        "private_epoch",
        "flag",
        "1 if no other engine can read the blocks that this one stores on a shared medium",
        "After a reset without a revision. Restart the engine, or give `reset_cache` a revision, to share again.",
    ),
    _gauge(
        "coordinated",
        "flag",
        "1 if the fleet's `coordination` answers",
        "0 with `coordination` in the stack: the server is gone; everything works, with more requests.",
    ),
)

_ESTIMATES = tuple(
    _gauge(
        name,
        "ratio",
        f"Estimated hit rate of the tier and all faster ones with {factor:g} times the tier's capacity",
        "Compare with that of the present capacity: the difference is what another size would bring.",
    )
    for factor, name in FIELDS.items()
)

TIER_METRICS: tuple[Metric, ...] = (
    *_LOOKUPS,
    *_MOVED,
    *_NOT_STORED,
    *_LOST,
    *_HELD,
    *_STATES,
    *_ESTIMATES,
    *_REQUESTS,
)
"""Metrics of each tier. A counter without another unit in its name counts blocks."""
