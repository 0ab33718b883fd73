"""Counters and gauges of a tier, in one flat record that is cheap to update on the scheduler's thread."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from tiering.api.metric import Metric, MetricKind, counter, declared, gauge

JOB_LATENCY_BUCKETS: tuple[float, ...] = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Upper bounds in seconds of the job latency histogram; one more bucket counts slower jobs."""


@dataclass(slots=True)
class TierStats:
    """Counters since the start (``*_total`` in Prometheus) and gauges of one tier.

    Bytes on the medium include headers, and seconds are summed over threads.
    """

    queries: int = counter(
        "blocks", "Blocks for which the tier was probed", "`hits` / `queries` is the tier's hit rate."
    )
    hits: int = counter(
        "blocks",
        "Probed blocks that the tier held",
        "If there are none for long while the tier holds blocks, prompts share no prefix, or the hashes differ.",
    )
    misses: int = counter(
        "blocks",
        "Probed blocks that the tier did not hold",
        "A lookup counts one miss, where its prefix ends. A search for windows or tails counts each block.",
    )
    lookups_late: int = counter(
        "lookups",
        "Lookups answered with no because the medium was late",
        "Hits are lost to latency: look at the endpoint and the network, or raise the tier's lookup deadline.",
        is_trouble=True,
    )
    read_bytes: int = counter(
        "bytes",
        "Bytes that the tier read for promotions",
        "Its rate is the bandwidth in use; compare with `kv-tiering bench`.",
    )
    read_seconds: float = counter(
        "seconds",
        "Seconds that the tier's reads took, summed over all of them",
        "`read_bytes` / `read_seconds` is the bandwidth of one read; if it falls, look at the medium.",
    )
    written_bytes: int = counter(
        "bytes", "Bytes that were stored in the tier", "Its rate wears flash; `admission: second_touch` lowers it."
    )
    written_seconds: float = counter(
        "seconds",
        "Seconds that the tier's writes took, summed over all of them",
        "`written_bytes` / `written_seconds` is the bandwidth of one write; if it falls, look at the medium.",
    )
    promotions: int = counter(
        "blocks", "Blocks promoted from the tier to the primary one", "Each is a block that was not computed again."
    )
    promotions_failed: int = counter(
        "blocks",
        "Blocks that were to be promoted and could not be read",
        "The requests compute them. `loads_overdue`, `corrupt_blocks`, `device_errors` and the log have the reason.",
        is_trouble=True,
    )
    """Blocks of ``loads_too_long`` are not among them."""
    promotions_active: int = gauge(
        "blocks",
        "Blocks being promoted from the tier",
        "If it stays high while `read_bytes` does not grow, the medium hangs.",
    )
    cascades: int = counter(
        "blocks", "Blocks cascaded from the primary tier", "Its rate is the rate of new blocks in the tier."
    )
    cascades_failed: int = counter(
        "blocks",
        "Blocks whose cascade failed",
        "The medium refuses writes: check space, quota and permissions with `kv-tiering check`.",
        is_trouble=True,
    )
    cascades_active: int = gauge(
        "blocks",
        "Blocks being cascaded to the tier",
        "If it stays at its maximum, the tier is slower than the engine stores.",
    )
    retries: int = counter(
        "attempts", "Attempts repeated after a temporary error", "The medium throttles or resets.", is_trouble=True
    )
    job_latency: list[int] = field(
        default_factory=lambda: [0] * (len(JOB_LATENCY_BUCKETS) + 1),
        metadata=declared(
            Metric(
                MetricKind.HISTOGRAM,
                "seconds",
                "Seconds from the submission of a tier's job to its end",
                "If the 99th percentile approaches `load_deadline`, hits become misses: "
                "find out what slows the medium.",
                "kv_tiering_job_latency_seconds",
                JOB_LATENCY_BUCKETS,
            )
        ),
    )
    """Number of finished jobs in each bucket of :data:`JOB_LATENCY_BUCKETS`."""
    job_latency_sum: float = 0.0
    """Seconds of all finished jobs together."""
    stores_declined: int = counter(
        "blocks",
        "Blocks offered that the tier's admission declined",
        "Normal with `admission: second_touch`, and for blocks that are being written already.",
    )
    """Blocks for which the tier had no place are among them."""
    stores_dropped: int = counter(
        "blocks",
        "Blocks dropped because the tier took no stores",
        "`writable` is 0: look at `breaker_state`, and at the log.",
        is_trouble=True,
    )
    stores_left: int = counter(
        "blocks",
        "Blocks that were left to another machine of the fleet, which was storing them",
        "Uploads that `coordination` has saved.",
    )
    stores_evicted: int = counter(
        "blocks",
        "Blocks that waited for the tier and were not stored because their rows were needed",
        "The tier is slower than the engine stores, or in trouble; the blocks are offered again at their next use.",
    )
    evictions: int = counter(
        "blocks",
        "Blocks evicted from the tier",
        "`blocks / rate(evictions)` is the time that a block stays; if that is minutes, enlarge the tier.",
    )
    loads_overdue: int = counter(
        "blocks",
        "Blocks whose load missed its deadline",
        "The medium hangs or is too slow; the requests compute these blocks.",
        is_trouble=True,
    )
    loads_too_long: int = counter(
        "blocks",
        "Blocks not loaded because they would arrive too late",
        "The medium is too slow for prefixes of this length: raise `load_deadline`, or use a faster medium.",
        is_trouble=True,
    )
    loads_gated: int = counter(
        "blocks",
        "Blocks that the tier held and requests computed, because a load would have taken longer",
        "Only with `load_or_compute: auto`. If it grows all the time, the tier is too slow for this engine.",
    )
    loads_cut: int = counter(
        "blocks",
        "Blocks that requests waited for until computing would have taken as long",
        "Only with `load_or_compute: auto`. The tier has become slower, or stalls from time to time.",
    )
    controls: int = counter(
        "requests",
        "Requests that computed what the tier held, so that its worth can be measured",
        "Only with `load_or_compute: auto`. They cost at most 0.5% of the seconds of prefill that the tier saves.",
    )
    gate_closed: int = gauge(
        "flag",
        "1 if the last request that found blocks in the tier computed them, because that is faster",
        "Only with `load_or_compute: auto`. Loads of some blocks every four seconds show when the tier is faster. It "
        "is also 1 while loads make requests slower, as `worth_ttft_seconds` shows.",
        combined="max",
    )
    corrupt_blocks: int = counter(
        "blocks",
        "Blocks that were corrupt when they were read, and became misses",
        "No request got them. Find the cause: run `kv-tiering inspect --verify`, and check disk, memory and network.",
        is_trouble=True,
    )
    blocks_deleted: int = counter(
        "blocks",
        "Corrupt blocks deleted from a shared medium",
        "They were corrupt for every reader; see `corrupt_blocks`.",
    )
    device_errors: int = counter(
        "blocks",
        "Blocks not moved because the device reported an error at their place",
        "The disk fails: plan its replacement.",
        is_trouble=True,
    )
    blocks_lost: int = counter(
        "blocks",
        "Blocks lost because the tier's files were removed, cut or replaced",
        "Somebody or something works in the tier's directory: keep others out.",
        is_trouble=True,
    )
    reopened: int = counter(
        "times",
        "Times the medium was opened again because it is another one, or takes writes again",
        "The disk changes between states: see the kernel's log.",
    )
    blocks: int = gauge("blocks", "Blocks that the tier holds", "If it falls to 0, the tier was reset or left service.")
    occupancy_bytes: int = gauge(
        "bytes",
        "Bytes that the tier's blocks take",
        "At `capacity_bytes` the tier evicts, which is normal; see `evictions`.",
    )
    capacity_bytes: int = gauge(
        "bytes", "Bytes that the tier may take; 0 without a bound", "Changes with the stack only."
    )
    slots_retired: int = gauge(
        "slots", "Places out of use because the device reported an error there", "The disk fails: plan its replacement."
    )
    recovering: int = gauge(
        "flag",
        "1 until the content of the whole medium is known",
        "Some minutes after a start are normal; longer means a slow disk or a lack of threads or open files.",
        combined="max",
    )
    load_depth: int = gauge(
        "transfers",
        "Transfers from the medium that may run at once now",
        "With `max_inflight: auto`, the number changes while loads wait, and alternates while two are compared.",
    )
    """0: the tier has no such number."""
    store_depth: int = gauge(
        "transfers",
        "Transfers to the medium that may run at once now",
        "With `max_inflight: auto`, the number changes while stores wait, and alternates while two are compared.",
    )
    """0: the tier has no such number."""
    breaker_state: int = gauge(
        "state",
        "Circuit breaker: 0 closed, 1 half open, 2 open",
        "Open: the medium failed in a row, and is probed from time to time. The log has the last error.",
        combined="max",
    )
    breaker_opened: int = counter(
        "times", "Times that the tier's circuit breaker opened", "Repeated outages of the medium."
    )
    io_restarts: int = counter(
        "times", "Times that the process of `io: process` was started again", "It was killed: see the kernel's log."
    )
    """The same for all tiers of an engine."""
    available: int = gauge(
        "flag",
        "1 if the tier is in service",
        "0: the engine runs without the tier, which takes itself back. The log has the reason. A medium that hangs is "
        "out of service once a store or load has passed its deadline without progress.",
        combined="min",
        default=1,
    )
    writable: int = gauge(
        "flag",
        "1 if the tier is in service and takes stores",
        "0 while `available` is 1: the medium is full or read-only; its blocks are still served.",
        combined="min",
        default=1,
    )
    private_epoch: int = gauge(
        "flag",
        "1 if no other engine can read the blocks that this one stores on a shared medium",
        "After a reset without a revision. Restart the engine, or give `reset_cache` a revision, to share again.",
        combined="max",
    )
    coordinated: int = gauge(
        "flag",
        "1 if the fleet's `coordination` answers",
        "0 with `coordination` in the stack: the server is gone; everything works, with more requests.",
        combined="min",
    )
    requests: int = counter("requests", "Requests sent to the medium", "On object stores, requests cost money.")
    """All attempts, probes and deletions; the kinds below are counted for object stores only."""
    requests_get: int = counter("requests", "Requests that read an object", "On S3 Standard, 0.4 $ per million.")
    requests_head: int = counter(
        "requests",
        "Requests that ask whether an object is there",
        "On S3 Standard, 0.4 $ per million. Longer presence results and `min_prefix_blocks` lower them.",
    )
    requests_put: int = counter("requests", "Requests that write an object", "On S3 Standard, 5 $ per million.")
    requests_delete: int = counter("requests", "Requests that delete objects", "Free on S3 Standard.")
    requests_list: int = counter(
        "requests",
        "Requests that list objects",
        "On S3 Standard, 5 $ per million; engines list nothing while they serve.",
    )
    answers_absent: int = counter(
        "requests", "Requests answered with 404: no such object", "Normal for probes of blocks that nobody has stored."
    )
    answers_conflict: int = counter(
        "requests",
        "Requests answered with 409 or 412: a conflict",
        "Mostly another engine has stored the block already.",
    )
    refused_bytes: int = counter(
        "bytes",
        "Bytes sent to an object store and not taken",
        "Paid for and lost: see `answers_conflict`, and the log for refusals.",
    )

    hot_keys_written: int = counter(
        "documents",
        "Documents written with the keys that the engine uses most",
        "0 with `warm_start` in the stack: the log has the reason.",
    )
    hot_keys_refused: int = counter(
        "documents",
        "Documents with the keys of other engines that were damaged, stale, or of another epoch",
        "Some stale ones are normal where engines come and go; `kv-tiering gc` removes these.",
    )
    descriptions_written: int = counter(
        "documents",
        "Documents written with what KV events say about the tier's blocks",
        "0 with `self_describing_kv_events` and KV events: the log has the reason.",
    )
    descriptions_refused: int = counter(
        "documents",
        "Documents about the tier's blocks that were damaged, or of another epoch or release",
        "Some are normal after a reset. The blocks are announced by their hash only.",
    )

    def observe_job(self, seconds: float) -> None:
        """Count one finished job that took ``seconds``."""
        self.job_latency[bisect_left(JOB_LATENCY_BUCKETS, seconds)] += 1
        self.job_latency_sum += seconds

    def as_dict(self) -> dict[str, int | float | list[int]]:
        """Return a copy of plain values, to be sent to another process."""
        plain: dict[str, int | float | list[int]] = {name: getattr(self, name) for name in self.__slots__}
        plain["job_latency"] = list(self.job_latency)
        return plain
