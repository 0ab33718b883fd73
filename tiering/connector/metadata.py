"""What crosses between the two halves of the connector, once per step each way.  Plain, picklable by the engine, ours to read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Self

from tiering.api.transfer import TransferSpec

ReqId = str


class TransferOrder(NamedTuple):
    """A job for the worker: its id and its (source, destination)."""

    job_id: int
    spec: TransferSpec


@dataclass(slots=True)
class OffloadingConnectorMetadata:
    """Scheduler → worker, once per step.

    ``jobs_to_flush``: running or deferred jobs that must end before this step touches the KV cache, because it reuses
    their blocks. ``failed_loads``: for a request whose hit has shrunk since it was matched, the GPU blocks that nothing
    will fill.  The worker reports them among its load errors and the request as received: together with the end of the
    request's load if ``reqs_to_load`` has one (what is left of the hit), else in this step's report.
    """

    reqs_to_load: dict[ReqId, TransferOrder] = field(default_factory=dict)
    reqs_to_store: dict[ReqId, TransferOrder] = field(default_factory=dict)
    jobs_to_flush: frozenset[int] = frozenset()
    failed_loads: dict[ReqId, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class OffloadingWorkerMetadata:
    """Worker → scheduler, once per step: how many workers have finished each job, and which jobs failed on any of them."""

    finished: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def aggregate(self, other: Self) -> Self:
        """Add another worker's report; returns itself."""
        for job_id, workers in other.finished.items():
            self.finished[job_id] = self.finished.get(job_id, 0) + workers
        self.failed |= other.failed
        return self

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.finished


BlockIdsByGroup = tuple[list[int], ...]
"""GPU block ids of one request, per KV-cache group."""
