"""The messages between the two halves of the simple scheduler, one per step in each direction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

NO_EVENT = -1
"""Number of the load or store event of a step that has none."""

NOT_HELD = -1
"""Entry of ``load_cpu_blocks`` for a block evicted after the match; no copy fills its GPU block."""


@dataclass(slots=True)
class SimpleCPUOffloadMetadata:
    """The step's loads and stores, from the scheduler to the workers.

    Load events and store events are numbered separately.
    """

    load_event: int = NO_EVENT
    """Number of the step's load event."""
    load_gpu_blocks: list[int] = field(default_factory=list)
    """GPU blocks to fill."""
    load_cpu_blocks: list[int] = field(default_factory=list)
    """CPU blocks to read, co-indexed with ``load_gpu_blocks``."""
    load_event_to_reqs: dict[int, list[str]] = field(default_factory=dict)
    """Per load event, the ids of the requests whose blocks are loaded, in the order of their blocks."""
    store_event: int = NO_EVENT
    """Number of the step's store event."""
    store_gpu_blocks: list[int] = field(default_factory=list)
    """GPU blocks to read."""
    store_cpu_blocks: list[int] = field(default_factory=list)
    """CPU blocks to write, co-indexed with ``store_gpu_blocks``."""
    need_flush: bool = False
    """True if a request was preempted: running stores must end before this step."""
    need_drain: bool = False
    """True if all copies must end before this step, because the engine has taken their GPU blocks back."""
    load_ends: list[int] = field(default_factory=list)
    """Per request of the load event, the index in ``load_gpu_blocks`` behind its last block."""
    adapter_checks: list[tuple[str, str, set[int]]] = field(default_factory=list)
    """Adapters that the step computes with: key, assumed identity, and GPU blocks loaded for it.

    The identity "" asks the worker for the adapter's.
    """

    def blocks_by_request(self) -> dict[str, set[int]]:
        """Return the GPU blocks that this step's load fills, by request id."""
        starts = [0, *self.load_ends]
        requests = self.load_event_to_reqs.get(self.load_event, [])
        blocks: dict[str, set[int]] = {}
        for req_id, start, end in zip(requests, starts, self.load_ends, strict=False):
            blocks.setdefault(req_id, set()).update(self.load_gpu_blocks[start:end])
        return blocks


@dataclass(slots=True)
class SimpleCPUOffloadWorkerMetadata:
    """The store events that have ended, from the workers to the scheduler."""

    completed_store_events: dict[int, int] = field(default_factory=dict)
    """Store event → number of workers that have completed it.

    A worker whose part of event e failed reports ``failed(e)``, a negative number, instead. The event has then ended
    for that worker, and its blocks never become visible.
    """
    adapters: dict[str, str] = field(default_factory=dict)
    """Identity of each adapter that was loaded or asked for, by key; "": not known, or not equal."""

    def aggregate(self, other: Self) -> Self:
        """Add another worker's report to this one, and return this one."""
        for event, workers in other.completed_store_events.items():
            self.completed_store_events[event] = self.completed_store_events.get(event, 0) + workers
        for name, identity in other.adapters.items():
            self.adapters[name] = identity if self.adapters.get(name, identity) == identity else ""
        return self


def store_job(event: int) -> int:
    """Return the number of the copy job of a store event; copy jobs of loads have odd numbers."""
    return 2 * event


def load_job(event: int) -> int:
    """Return the number of the copy job of a load event."""
    return 2 * event + 1


def failed(event: int) -> int:
    """Return the number that reports the failure of ``event``; called with that number, return the event."""
    return ~event
