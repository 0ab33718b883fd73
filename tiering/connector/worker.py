"""The worker half of the connector: carries out transfers on one worker and reports how they ended.

In each step an engine calls :meth:`~OffloadingConnectorWorker.handle_preemptions` before the step touches the KV cache.
Then the engine calls :meth:`~OffloadingConnectorWorker.start_kv_transfers` and, after the forward pass,
:meth:`~OffloadingConnectorWorker.prepare_store_kv`. The four methods that report follow. Steps without tokens make the
same calls, so that deferred stores start.

The stores of a step are queued. They start with the next step, before its forward pass and behind all work of their own
step. They therefore neither delay the tokens of their step nor wait for those of the next one. Their blocks are fenced
until the stores end. If a step reuses such a block, the scheduler half names the job in ``jobs_to_flush``. All stores
of a step are one submission to the device, and all loads another, but for those that the step itself needs.

From a KV cache in host memory, small stores are made at once, behind the forward pass of their step, and are reported
with it. They take about a millisecond of the step together, which is less than what the threads of queued ones take
from later steps.

An engine that writes to newly allocated blocks before it calls ``handle_preemptions`` (to zero them, for example) must
set ``writes_early``. The stores of a step then start within the step, and all later computation is ordered after them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiering.api.engine import OffloadingSpec
from tiering.api.masking import shown_name
from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata, OffloadingWorkerMetadata, ReqId, TransferOrder
from tiering.connector.stats import OffloadingConnectorStats
from tiering.copy.canonical import LayerCache, canonicalize, canonicalize_cross_layers
from tiering.copy.contract import OffloadingWorker, TransferError, TransferResult
from tiering.copy.handlers import HandlerEntry
from tiering.errors import ConfigError

logger = logging.getLogger("kv_tiering.worker")

POLL_PAUSE = 1e-4
"""Seconds between two looks at the copies while :meth:`WorkerHalf.get_finished` waits for a load."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A transfer that was ordered and has not been reported."""

    req_id: ReqId
    """Id of the request."""
    load: TransferOrder | None
    """The order of a load; None for a store."""
    is_within_step: bool = False
    """True for a load that the step which orders it needs."""


class WorkerHalf:
    """The copies of one worker, and the reports about them, in both modes.

    The engine's thread calls all methods. Only :meth:`drain`, :meth:`shutdown` and ``handle_preemptions`` of the
    subclasses wait.
    """

    _reports_loads = True
    """True if all loads are reported by their job ids; False: only those within the step."""

    def __init__(self) -> None:
        self.copies = OffloadingWorker()
        """Copy handlers of both directions."""
        self._registered = False
        self._jobs: dict[int, _Job] = {}
        self._deferred: list[tuple[ReqId, TransferOrder]] = []
        self._loads_of: Counter[ReqId] = Counter()
        """Number of loads of each request that have not been reported."""
        self._unstarted: list[TransferResult] = []
        self._received: set[ReqId] = set()
        self._unfilled: set[int] = set()
        """GPU blocks that loads did not fill and that were not reported yet."""
        self._unfilled_with_load: dict[ReqId, list[int]] = {}
        """Blocks that no load fills, of requests that load the rest of their hit.

        They are reported when that load ends.
        """
        self._report = OffloadingWorkerMetadata()
        self._stats = OffloadingConnectorStats()

    def _register(self, handlers: Iterable[HandlerEntry]) -> None:
        """Register the copy handlers of the engine's KV cache, once.

        Raises:
            ConfigError: a KV cache is registered already.
        """
        if self._registered:
            raise ConfigError("the KV cache is registered already; register it once per worker")
        for source, destination, handler in handlers:
            self.copies.register_handler(source, destination, handler)
        self._registered = True

    def drain(self) -> None:
        """End all copies, deferred ones included, before the memory of the KV cache is taken away."""
        self._submit_deferred()
        self.copies.wait(self._jobs.keys())

    def _start_loads(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start the loads of a step, those first that the step needs.

        Raises:
            TransferError: the step cannot get a load that it needs. No such step may run: its requests would be
                computed with whatever their blocks hold.
        """
        if metadata.loads_within_step:
            orders = metadata.loads_within_step
            self._jobs |= {order.job_id: _Job(req_id, order, is_within_step=True) for req_id, order in orders.items()}
            self.copies.transfer_first([(order.job_id, order.spec) for order in orders.values()])
        for req_id, block_ids in metadata.failed_loads.items():
            if req_id in metadata.reqs_to_load:
                self._unfilled_with_load.setdefault(req_id, []).extend(block_ids)
            else:
                self._unfilled.update(block_ids)
                self._received.add(req_id)
        if metadata.reqs_to_load:
            self._loads_of.update(metadata.reqs_to_load.keys())
            self._submit([(order, _Job(req_id, order)) for req_id, order in metadata.reqs_to_load.items()])

    def _store(self, orders: Mapping[ReqId, TransferOrder]) -> None:
        """Make small stores now, if the KV cache is in host memory, and queue the others.

        The model has run, and with it all that writes to the blocks of these orders.
        """
        new = [(order.job_id, order.spec) for order in orders.values() if order.job_id not in self._jobs]
        left = self.copies.transfer_at_once(new)
        for req_id, order in orders.items():
            if order.job_id in left or order.job_id in self._jobs:
                self._deferred.append((req_id, order))
            else:
                self._jobs[order.job_id] = _Job(req_id, None)

    def _submit_deferred(self) -> None:
        if not self._deferred:
            return
        deferred, self._deferred = self._deferred, []
        self._submit([(order, _Job(req_id, None)) for req_id, order in deferred])

    def _submit(self, orders: list[tuple[TransferOrder, _Job]]) -> None:
        """Start the transfers of several jobs together."""
        transfers = []
        for order, job in orders:
            if order.job_id in self._jobs:
                logger.error("copy job %d was ordered twice; the worker ignores the second order", order.job_id)
                if job.load is not None:
                    self._loads_of[job.req_id] -= 1
                continue
            self._jobs[order.job_id] = job
            transfers.append((order.job_id, order.spec))
        for job_id in self.copies.transfer_all_async(transfers):
            self._unstarted.append(TransferResult(job_id, success=False))

    def get_finished(self, finished_req_ids: Collection[ReqId], patience: float = 0.0) -> tuple[set[ReqId], set[ReqId]]:
        """Return the requests that have finished sending (always none) and those that have finished receiving.

        No request is reported as sent, because no blocks are held back: copies are fenced instead. A request is
        received when all its loads have ended since the last call, failed loads included. The call also collects ended
        transfers for the other reports of this step.

        Args:
            finished_req_ids: requests that have ended; not used.
            patience: seconds to wait if loads are in flight and no request is received; default: 0. The wait lets the
                threads of the copies have the interpreter, and ends with the first request.
        """
        if self._jobs:  # in most steps of small requests, no copy is in flight
            self._collect()
            if patience and self._loads_of and not self._received:
                deadline = time.monotonic() + patience
                while not self._received and time.monotonic() < deadline:
                    time.sleep(POLL_PAUSE)
                    self._collect()
        received, self._received = self._received, set()
        return set(), received

    def _collect(self) -> None:
        """Process the copies that have ended since the last call."""
        unstarted, self._unstarted = self._unstarted, []
        for result in unstarted:
            self._ended(result)
        for result in self.copies.get_finished():
            self._ended(result)

    def _ended(self, result: TransferResult) -> None:
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            logger.error(
                "copy job %d has ended, but the scheduler half did not order it; the worker ignores the job",
                result.job_id,
            )
            return
        if job.load is None or job.is_within_step or self._reports_loads:
            self._report.finished[result.job_id] = 1
            if not result.success:
                self._report.failed.add(result.job_id)
            elif job.load is not None and result.transfer_time:
                self._report.load_seconds[result.job_id] = result.transfer_time
        if result.success:
            self._stats.record_transfer(result.transfer_size, result.transfer_time, result.transfer_type)
        else:
            logger.warning(
                "copy job %d failed on this worker: a %s of request %s",
                result.job_id,
                "store" if job.load is None else "load",
                shown_name(job.req_id),
            )
        if job.is_within_step and not result.success:
            raise TransferError(f"copy job {result.job_id} failed, and the step has computed without what it loads")
        if job.load is None or job.is_within_step:
            return
        if not result.success:
            self._unfilled.update(_gpu_blocks(job.load))
        self._loads_of[job.req_id] -= 1
        if self._loads_of[job.req_id] <= 0:
            del self._loads_of[job.req_id]
            self._unfilled.update(self._unfilled_with_load.pop(job.req_id, ()))
            self._received.add(job.req_id)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the GPU blocks that loads did not fill, since the last call.

        These are exactly the blocks that the engine must compute itself.
        """
        unfilled, self._unfilled = self._unfilled, set()
        return unfilled

    def get_kv_connector_stats(self) -> OffloadingConnectorStats | None:
        """Return the transfers since the last call; None if there were none."""
        if not self._stats.data:
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def shutdown(self) -> None:
        """Wait for running copies, then release threads, streams and pins; repeated calls are harmless."""
        if self._deferred:
            logger.info("the worker dropped %d queued stores at shutdown", len(self._deferred))
            self._deferred = []
        self.copies.shutdown()


class OffloadingConnectorWorker(WorkerHalf):
    """Transfers of one worker.

    The engine's thread calls all methods. Only :meth:`handle_preemptions`, :meth:`drain` and :meth:`shutdown` wait.

    Args:
        spec: configuration of the tiers and of the engine.
        num_blocks: number of GPU blocks of the engine; default: inferred from the tensors. The inferred number is wrong
            if the attention kernels use smaller blocks than the scheduler, so engines should pass the number.
        writes_early: True if the engine writes to newly allocated blocks before :meth:`handle_preemptions`; default:
            False.
    """

    def __init__(self, spec: OffloadingSpec, num_blocks: int | None = None, *, writes_early: bool = False) -> None:
        super().__init__()
        self._spec = spec
        self._writes_early = writes_early
        self._num_blocks = num_blocks
        self._started: OffloadingConnectorMetadata | None = None
        self._prepared: OffloadingConnectorMetadata | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache]) -> None:
        """Register the engine's KV cache, once.

        Args:
            kv_caches: KV-cache tensor of each layer, or the tensors of its state, by layer name.

        Raises:
            ConfigError: the layout cannot be offloaded, or a KV cache is registered already.
            RegionError: the memory of the primary tier is not available.
        """
        groups = self._spec.engine.groups
        caches = canonicalize(kv_caches, groups, self._num_blocks, self._spec.heads)
        self._register(self._spec.get_handlers(caches))

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, backend: Any = None) -> None:
        """Register a KV cache that is one tensor over all layers.

        Args:
            kv_cache: the tensor.
            backend: attention backend; not used, because shape and strides determine the layout.

        Raises:
            ConfigError: as :meth:`register_kv_caches`, and for rows that hold the heads of all ranks in order.
        """
        if self._spec.heads is not None:
            raise ConfigError("layout: canonical needs a KV-cache tensor for each layer; set layout: plain")
        groups = self._spec.engine.groups
        self._register(self._spec.get_handlers(canonicalize_cross_layers(kv_cache, groups, self._num_blocks)))

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start the stores of the previous step, and end the jobs whose blocks this step reuses.

        An engine calls this method before the step touches the KV cache.
        """
        self._submit_deferred()
        if metadata.jobs_to_flush:
            self.copies.wait(metadata.jobs_to_flush)

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start this step's loads; those that the step needs are in front of all later work of the engine.

        Stores of the previous step start before them, if the engine did not call :meth:`handle_preemptions`. A second
        call with the same metadata starts no loads.
        """
        self._submit_deferred()
        if metadata is self._started:
            return
        self._started = metadata
        self._start_loads(metadata)

    def prepare_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Queue this step's stores, which start with the next step or, if the engine writes early, now.

        A second call with the same metadata does nothing.
        """
        if metadata is self._prepared:
            return
        self._prepared = metadata
        if metadata.reqs_to_store:
            self._store(metadata.reqs_to_store)
        if metadata.states_to_store:
            self._deferred += metadata.states_to_store.items()
        if self._writes_early and self._deferred:
            jobs = [order.job_id for _, order in self._deferred]
            self._submit_deferred()
            self.copies.order_before_compute(jobs)

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Return the report on jobs that ended since the last call; None if there are none."""
        if self._report.is_empty():
            return None
        report, self._report = self._report, OffloadingWorkerMetadata()
        return report


def _gpu_blocks(order: TransferOrder) -> Sequence[int]:
    """Return the GPU blocks that a load was to fill."""
    destination = order.spec[1]
    return destination.block_ids.tolist() if isinstance(destination, GPULoadStoreSpec) else []
