"""The messages between the scheduler half and the worker half, one per step in each direction.

All types are plain, and the engine pickles them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Self

from tiering.api.transfer import TransferSpec

ReqId = str
"""Id of a request."""


class TransferOrder(NamedTuple):
    """A copy that the scheduler half orders from the worker half."""

    job_id: int
    """Id of the job."""
    spec: TransferSpec
    """Source and destination of the copy."""


@dataclass(slots=True)
class OffloadingConnectorMetadata:
    """Message from the scheduler half to the worker half, once per step."""

    reqs_to_load: dict[ReqId, TransferOrder] = field(default_factory=dict)
    """Load order of each request that loads beside this step, and waits for its load."""
    loads_within_step: dict[ReqId, TransferOrder] = field(default_factory=dict)
    """Load order of each request that this step computes with what it loads."""
    reqs_to_store: dict[ReqId, TransferOrder] = field(default_factory=dict)
    """Store order of each request that stores in this step."""
    states_to_store: dict[ReqId, TransferOrder] = field(default_factory=dict)
    """Store order of each request whose states the engine hands over in this step."""
    jobs_to_flush: frozenset[int] = frozenset()
    """Running or deferred jobs that must end before this step touches the KV cache.

    The step reuses their blocks.
    """
    failed_loads: dict[ReqId, list[int]] = field(default_factory=dict)
    """GPU blocks that no load fills, of each request whose hit has shrunk since the match.

    The worker half reports the blocks as load errors and the request as received. If ``reqs_to_load`` has a load of the
    rest of the hit, the report comes with the end of that load, else in this step.
    """
    adapter_checks: list[tuple[str, str, set[int]]] = field(default_factory=list)
    """Adapters that the step computes with: key, assumed identity, and GPU blocks loaded for it.

    The identity "" asks the worker for the adapter's.
    """
    adapters_to_read: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Files of adapters whose requests wait until the worker has read them, by key of the adapter."""


NOTHING_TO_DO = OffloadingConnectorMetadata()
"""Message of a step without orders, as of most steps that only decode; it must not be changed."""


@dataclass(slots=True)
class OffloadingWorkerMetadata:
    """Message from the worker half to the scheduler half, once per step."""

    finished: dict[int, int] = field(default_factory=dict)
    """Number of workers that have finished each job, by job id; failed jobs are included."""
    failed: set[int] = field(default_factory=set)
    """Ids of the jobs that failed on any worker."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Identity of each adapter that was loaded or asked for, by key; "": not known, or not equal."""
    load_seconds: dict[int, float] = field(default_factory=dict)
    """Seconds that loads took on the slowest worker, by job id, as far as they are known."""

    def aggregate(self, other: Self) -> Self:
        """Add another worker's report to this one, and return this one."""
        for job_id, workers in other.finished.items():
            self.finished[job_id] = self.finished.get(job_id, 0) + workers
        self.failed.update(other.failed)
        for name, identity in other.adapters.items():
            self.adapters[name] = identity if self.adapters.get(name, identity) == identity else ""
        for job_id, seconds in other.load_seconds.items():
            self.load_seconds[job_id] = max(seconds, self.load_seconds.get(job_id, 0.0))
        return self

    def is_empty(self) -> bool:
        """Return True if there is nothing to report."""
        return not self.finished
