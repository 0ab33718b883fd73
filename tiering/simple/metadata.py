"""What crosses between the two halves of the simple scheduler, once per step each way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

NO_EVENT = -1

NOT_HELD = -1
"""In ``load_cpu_blocks``: the block has gone since it was matched; nothing fills the GPU block beside it."""


@dataclass(slots=True)
class SimpleCPUOffloadMetadata:
    """Scheduler → worker.  Events are numbered, loads and stores apart; ``NO_EVENT`` where a step has none.

    ``load_gpu_blocks`` and ``load_cpu_blocks`` are co-indexed, and so are those of the store.  ``load_event_to_reqs``:
    whose load the event is, in the order of their blocks; ``load_ends``, co-indexed with that list: where in
    ``load_gpu_blocks`` each one's blocks end. ``need_flush``: a request was preempted; the stores that run are to end
    before this step.
    """

    load_event: int = NO_EVENT
    load_gpu_blocks: list[int] = field(default_factory=list)
    load_cpu_blocks: list[int] = field(default_factory=list)
    load_event_to_reqs: dict[int, list[str]] = field(default_factory=dict)
    store_event: int = NO_EVENT
    store_gpu_blocks: list[int] = field(default_factory=list)
    store_cpu_blocks: list[int] = field(default_factory=list)
    need_flush: bool = False
    load_ends: list[int] = field(default_factory=list)

    def blocks_by_request(self) -> dict[str, set[int]]:
        """The GPU blocks that this step's load is to fill, by request."""
        starts = [0, *self.load_ends]
        requests = self.load_event_to_reqs.get(self.load_event, [])
        blocks: dict[str, set[int]] = {}
        for req_id, start, end in zip(requests, starts, self.load_ends, strict=False):
            blocks.setdefault(req_id, set()).update(self.load_gpu_blocks[start:end])
        return blocks


@dataclass(slots=True)
class SimpleCPUOffloadWorkerMetadata:
    """Worker → scheduler: store event → how many workers have completed it.

    A worker whose part of event e failed reports ``failed(e)``, a negative number, in its place: the event is then over
    for that worker, and its blocks never become visible.
    """

    completed_store_events: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: Self) -> Self:
        """Add another worker's report; returns itself."""
        for event, workers in other.completed_store_events.items():
            self.completed_store_events[event] = self.completed_store_events.get(event, 0) + workers
        return self


def failed(event: int) -> int:
    """The name under which the failure of ``event`` is reported (and back)."""
    return ~event
