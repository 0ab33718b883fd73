"""The messages between the two halves of the simple scheduler, one per step in each direction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata, OffloadingWorkerMetadata, TransferOrder

NO_EVENT = -1
"""Number of the load or store event of a step that has none."""

NOT_HELD = -1
"""Entry of ``load_cpu_blocks`` for a block evicted after the match; no copy fills its GPU block."""

ALL_REQUESTS = "of the step"
"""Stands for the id of a request in orders that are for several requests of a step."""


@dataclass(slots=True)
class SimpleCPUOffloadMetadata:
    """The step's loads and stores, from the scheduler to the workers.

    Load events and store events are numbered separately. A load event takes a number for each of its requests.
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
    within_step: tuple[int, list[int], list[int]] | None = None
    """The load that this step computes with; None: there is none.

    Its number, which is one of the numbers of store events, the GPU blocks to fill and the co-indexed CPU blocks.
    """
    load_ends: list[int] = field(default_factory=list)
    """Per request of the load event, the index in ``load_gpu_blocks`` behind its last block."""
    adapter_checks: list[tuple[str, str, set[int]]] = field(default_factory=list)
    """Adapters that the step computes with: key, assumed identity, and GPU blocks loaded for it.

    The identity "" asks the worker for the adapter's.
    """

    def orders(self) -> OffloadingConnectorMetadata:
        """Return the loads and the stores in the form of the tiering mode.

        Each request that waits has a load of its own. The copy job of store event e, or of the load with number e that
        the step needs, has the number 2 e, that of the n-th request of load event e 2 (e + n) + 1.
        """
        orders = OffloadingConnectorMetadata()
        if self.within_step is not None:
            event, gpu, cpu = self.within_step
            within_step = (CPULoadStoreSpec(cpu), GPULoadStoreSpec(gpu, (len(gpu),), (0,)))
            orders.loads_within_step[ALL_REQUESTS] = TransferOrder(2 * event, within_step)
        start = 0
        ends = self.load_ends or [len(self.load_gpu_blocks)]
        for number, (req_id, end) in enumerate(
            zip(self.load_event_to_reqs.get(self.load_event, ()), ends, strict=False)
        ):
            pairs = list(zip(self.load_gpu_blocks[start:end], self.load_cpu_blocks[start:end], strict=True))
            held = [pair for pair in pairs if pair[1] != NOT_HELD]
            if held:
                gpu, cpu = (list(blocks) for blocks in zip(*held, strict=True))
                spec = (CPULoadStoreSpec(cpu), GPULoadStoreSpec(gpu, (len(gpu),), (0,)))
                orders.reqs_to_load[req_id] = TransferOrder(2 * (self.load_event + number) + 1, spec)
            if len(held) < max(1, len(pairs)):
                orders.failed_loads[req_id] = [gpu for gpu, cpu in pairs if cpu == NOT_HELD]
            start = end
        if self.store_event != NO_EVENT:
            source = GPULoadStoreSpec(self.store_gpu_blocks, (len(self.store_gpu_blocks),), (0,))
            orders.reqs_to_store[ALL_REQUESTS] = TransferOrder(
                2 * self.store_event, (source, CPULoadStoreSpec(self.store_cpu_blocks))
            )
        return orders


@dataclass(slots=True)
class SimpleCPUOffloadWorkerMetadata(OffloadingWorkerMetadata):
    """The jobs that workers have ended: store events, and loads within steps."""

    prepared: int = 0
    """Number of workers whose memory has been prepared since their last report."""

    def aggregate(self, other: Self) -> Self:
        self.prepared += other.prepared
        return OffloadingWorkerMetadata.aggregate(self, other)  # super() does not know a class with slots

    def is_empty(self) -> bool:
        return not (self.finished or self.prepared)
