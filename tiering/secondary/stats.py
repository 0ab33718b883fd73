"""What a tier counts: one flat record of numbers, cheap to update on the scheduler's thread, plain when it leaves the process."""

from __future__ import annotations

import dataclasses
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
"""Upper bounds in seconds of the job latency histogram; one more bucket counts what is slower."""

GAUGES = frozenset(
    (
        "promotions_active",
        "cascades_active",
        "blocks",
        "occupancy_bytes",
        "capacity_bytes",
        "slots_retired",
        "recovering",
        "breaker_state",
        "available",
        "writable",
    )
)
"""The fields of :class:`TierStats` that tell how things are; all others count what has happened since the start."""


@dataclass(slots=True)
class TierStats:
    """Counters since the start (``*_total`` in Prometheus) and gauges of one tier.  Bytes, seconds and blocks.

    ``device_errors`` counts blocks that could not be moved because the device reported an error at their place;
    ``slots_retired`` is how many places are out of use for that reason.  ``recovering``: 1 while it is not known yet
    what all of the medium holds. ``breaker_state``: 0 closed, 1 half open, 2 open; the worse of those of reads and
    writes.  ``available``: 1 while the tier serves what it holds.  ``writable``: 1 while it takes stores, too.
    """

    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    written_seconds: float = 0.0
    queries: int = 0
    hits: int = 0
    misses: int = 0
    promotions: int = 0
    promotions_failed: int = 0
    promotions_active: int = 0
    cascades: int = 0
    cascades_failed: int = 0
    cascades_active: int = 0
    stores_declined: int = 0
    stores_dropped: int = 0
    loads_overdue: int = 0
    evictions: int = 0
    corrupt_blocks: int = 0
    device_errors: int = 0
    blocks_lost: int = 0
    retries: int = 0
    requests: int = 0
    blocks: int = 0
    occupancy_bytes: int = 0
    capacity_bytes: int = 0
    slots_retired: int = 0
    recovering: int = 0
    breaker_state: int = 0
    breaker_opened: int = 0
    available: int = 1
    writable: int = 1
    job_latency: list[int] = field(default_factory=lambda: [0] * (len(JOB_LATENCY_BUCKETS) + 1))
    job_latency_sum: float = 0.0

    def observe_job(self, seconds: float) -> None:
        """Count one finished job that took ``seconds``."""
        self.job_latency[bisect_left(JOB_LATENCY_BUCKETS, seconds)] += 1
        self.job_latency_sum += seconds

    def as_dict(self) -> dict[str, int | float | list[int]]:
        """A plain copy, to cross processes."""
        return dataclasses.asdict(self)
