"""Counters and gauges of a tier, in one flat record that is cheap to update on the scheduler's thread."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

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

GAUGES = frozenset(
    (
        "promotions_active",
        "cascades_active",
        "blocks",
        "occupancy_bytes",
        "capacity_bytes",
        "slots_retired",
        "recovering",
        "load_depth",
        "store_depth",
        "breaker_state",
        "available",
        "writable",
        "private_epoch",
        "coordinated",
    )
)
"""Fields of :class:`TierStats` that are gauges; all others are counters since the start."""


@dataclass(slots=True)
class TierStats:
    """Counters since the start (``*_total`` in Prometheus) and gauges of one tier."""

    read_bytes: int = 0
    """Bytes read from the medium, headers included."""
    read_seconds: float = 0.0
    """Seconds spent in reads, summed over threads."""
    written_bytes: int = 0
    """Bytes written to the medium, headers included."""
    written_seconds: float = 0.0
    """Seconds spent in writes, summed over threads."""
    queries: int = 0
    """Hits and misses together."""
    hits: int = 0
    """Keys that lookups found."""
    misses: int = 0
    """Lookups that ended at a key that is not held."""
    lookups_late: int = 0
    """Lookups that were answered with no because the medium did not answer in time."""
    promotions: int = 0
    """Blocks loaded into the primary tier."""
    promotions_failed: int = 0
    """Blocks whose load failed; those of ``loads_too_long`` are not among them."""
    promotions_active: int = 0
    """Blocks that are being loaded."""
    cascades: int = 0
    """Blocks stored."""
    cascades_failed: int = 0
    """Blocks whose store failed."""
    cascades_active: int = 0
    """Blocks that are being stored."""
    stores_declined: int = 0
    """Blocks that were not stored: declined by admission or without a place, or their write was under way."""
    stores_dropped: int = 0
    """Blocks that were not stored because the tier took no stores."""
    stores_left: int = 0
    """Blocks that were not stored because another machine of the fleet was storing them."""
    stores_evicted: int = 0
    """Blocks that waited for the tier's credit and were not stored because their primary rows were needed."""
    loads_overdue: int = 0
    """Blocks whose load did not end, or did not begin, before its deadline."""
    loads_too_long: int = 0
    """Blocks whose load was not started because they would have arrived after the deadline."""
    evictions: int = 0
    """Blocks evicted to make room."""
    corrupt_blocks: int = 0
    """Blocks that were refused when they were read because they differed from the stored ones."""
    blocks_deleted: int = 0
    """Corrupt blocks that were deleted from a shared medium."""
    device_errors: int = 0
    """Blocks that could not be moved because the device reported an error at their place."""
    blocks_lost: int = 0
    """Blocks that the medium lost."""
    reopened: int = 0
    """Times the medium was opened again, because it is another one or takes writes again."""
    retries: int = 0
    """Blocks that were sent to the medium again after a temporary error."""
    requests: int = 0
    """Blocks requested of the medium: all attempts, probes and deletions."""
    requests_get: int = 0
    """Requests to an object store that read an object."""
    requests_head: int = 0
    """Requests to an object store that ask whether an object is there."""
    requests_put: int = 0
    """Requests to an object store that write an object."""
    requests_delete: int = 0
    """Requests to an object store that delete objects."""
    requests_list: int = 0
    """Requests to an object store that list objects."""
    answers_absent: int = 0
    """Requests that the object store answered with 404, because there is no such object."""
    answers_conflict: int = 0
    """Requests that the object store answered with 409 or 412, mostly because the object is there already."""
    refused_bytes: int = 0
    """Bytes that were sent to the object store and not taken."""
    blocks: int = 0
    """Blocks held."""
    occupancy_bytes: int = 0
    """Bytes of the blocks held, headers included."""
    capacity_bytes: int = 0
    """Capacity of the tier in bytes; 0: not set."""
    slots_retired: int = 0
    """Places out of use because the device reported an error there."""
    recovering: int = 0
    """1 while recovery has not yet read all of the medium, else 0."""
    load_depth: int = 0
    """Number of transfers that loads may run at once now; 0: the tier has no such number."""
    store_depth: int = 0
    """Number of transfers that stores may run at once now; 0: the tier has no such number."""
    breaker_state: int = 0
    """State of the worse of the two breakers: 0 closed, 1 half open, 2 open."""
    breaker_opened: int = 0
    """Number of times that a breaker opened from closed."""
    available: int = 1
    """1 while the tier serves its blocks, else 0."""
    writable: int = 1
    """1 while the tier serves its blocks and takes stores, else 0."""
    private_epoch: int = 0
    """1 while no other process can read the blocks that this one stores on a shared medium, else 0."""
    coordinated: int = 0
    """1 while the coordination of the fleet answers, else 0."""
    job_latency: list[int] = field(default_factory=lambda: [0] * (len(JOB_LATENCY_BUCKETS) + 1))
    """Number of finished jobs in each bucket of :data:`JOB_LATENCY_BUCKETS`."""
    job_latency_sum: float = 0.0
    """Seconds of all finished jobs together."""

    def observe_job(self, seconds: float) -> None:
        """Count one finished job that took ``seconds``."""
        self.job_latency[bisect_left(JOB_LATENCY_BUCKETS, seconds)] += 1
        self.job_latency_sum += seconds

    def as_dict(self) -> dict[str, int | float | list[int]]:
        """Return a copy of plain values, to be sent to another process."""
        plain: dict[str, int | float | list[int]] = {name: getattr(self, name) for name in self.__slots__}
        plain["job_latency"] = list(self.job_latency)
        return plain
