"""The worker half of the connector: carries out the scheduler half's transfers on one worker, and reports how they ended.

An engine calls, each step: :meth:`~OffloadingConnectorWorker.handle_preemptions` before anything touches the KV cache,
then :meth:`~OffloadingConnectorWorker.start_kv_transfers` and, after the forward pass,
:meth:`~OffloadingConnectorWorker.prepare_store_kv`; then the four methods that report.  Steps without tokens do the
same, so that what was deferred is not left waiting.

A step's stores are queued and start with the next step's transfers, behind what token sampling needs.  Until then, and
until they end, their blocks are fenced: when a step reuses one, the scheduler half names the job in ``jobs_to_flush``.

An engine that writes to the blocks that a step newly allocates before it calls ``handle_preemptions`` (zeroing them,
say) must say so: then a step's stores start with it, and whatever the engine computes afterwards is ordered after them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiering.api.engine import CanonicalKVCaches, OffloadingSpec
from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata, OffloadingWorkerMetadata, ReqId, TransferOrder
from tiering.copy.canonical import canonicalize, canonicalize_cross_layers
from tiering.copy.contract import OffloadingWorker, TransferResult
from tiering.errors import ConfigError
from tiering.offload.reports import CopyReports

logger = logging.getLogger("kv_tiering.worker")


@dataclass(frozen=True, slots=True)
class _Job:
    """A transfer that was ordered and has not been reported.  ``load``: the order, if it is one."""

    req_id: ReqId
    load: TransferOrder | None


class OffloadingConnectorWorker(CopyReports):
    """Transfers of one worker.  Called from the engine's thread; only :meth:`handle_preemptions`, :meth:`drain` and
    :meth:`shutdown` ever wait.

    ``num_blocks``: GPU blocks of the engine.  Without it the number is inferred from the tensors, which cannot tell a
    cache whose attention kernels use smaller blocks than the scheduler's; an engine should say it.  ``writes_early``:
    the engine writes to newly allocated blocks before :meth:`handle_preemptions`.
    """

    def __init__(self, spec: OffloadingSpec, num_blocks: int | None = None, *, writes_early: bool = False) -> None:
        super().__init__()
        self._spec = spec
        self._writes_early = writes_early
        self._num_blocks = num_blocks
        self._worker = OffloadingWorker()
        self._registered = False
        self._jobs: dict[int, _Job] = {}
        self._deferred: list[tuple[ReqId, TransferOrder]] = []
        self._loads_of: Counter[ReqId] = Counter()
        """Loads of each request that have not been reported."""
        self._unstarted: list[TransferResult] = []
        self._received: set[ReqId] = set()
        self._unfilled_with_load: dict[ReqId, list[int]] = {}
        """Blocks that nothing fills, of requests that load the rest of their hit: reported when that load ends."""
        self._report = OffloadingWorkerMetadata()
        self._started: OffloadingConnectorMetadata | None = None
        self._prepared: OffloadingConnectorMetadata | None = None

    # ----------------------------------------------------------------------------------------------------- registration

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's KV cache, layer by layer.  Called once.

        Raises :class:`ConfigError` for a layout that cannot be offloaded, and :class:`tiering.errors.RegionError` if
        the primary tier's memory is not to be had.
        """
        self._register(canonicalize(kv_caches, self._spec.engine.groups, self._num_blocks))

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, backend: Any = None) -> None:
        """Take a KV cache that is one tensor over all layers.  ``backend`` is not needed: shape and strides tell the layout."""
        self._register(canonicalize_cross_layers(kv_cache, self._spec.engine.groups, self._num_blocks))

    def _register(self, kv_caches: CanonicalKVCaches) -> None:
        if self._registered:
            raise ConfigError("the KV cache is registered already")
        for source, destination, handler in self._spec.get_handlers(kv_caches):
            self._worker.register_handler(source, destination, handler)
        self._registered = True

    # ------------------------------------------------------------------------------------------------------------ steps

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        """Before a step touches the KV cache: end the jobs whose blocks it reuses, also those that had not started."""
        if metadata.jobs_to_flush:
            self._submit_deferred()
            self._worker.wait(metadata.jobs_to_flush)

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start the stores that were deferred from the step before, then this step's loads.  The same metadata again does nothing."""
        self._submit_deferred()
        if metadata is self._started:
            return
        self._started = metadata
        for req_id, block_ids in metadata.failed_loads.items():
            if req_id in metadata.reqs_to_load:
                self._unfilled_with_load.setdefault(req_id, []).extend(block_ids)
            else:
                self._unfilled.update(block_ids)
                self._received.add(req_id)
        for req_id, order in metadata.reqs_to_load.items():
            self._loads_of[req_id] += 1
            self._submit(order, _Job(req_id, order))

    def prepare_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Queue this step's stores; they start with the next step, or now if the engine writes early.  The same metadata again does nothing."""
        if metadata is self._prepared:
            return
        self._prepared = metadata
        self._deferred += metadata.reqs_to_store.items()
        if self._writes_early and self._deferred:
            jobs = [order.job_id for _, order in self._deferred]
            self._submit_deferred()
            self._worker.order_before_compute(jobs)

    def drain(self) -> None:
        """End all copies, also those that had not started: the memory of the KV cache is about to be taken away."""
        self._submit_deferred()
        self._worker.wait(self._jobs.keys())

    def _submit_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for req_id, order in deferred:
            self._submit(order, _Job(req_id, None))

    def _submit(self, order: TransferOrder, job: _Job) -> None:
        if order.job_id in self._jobs:
            logger.error("job %d was ordered twice; the second order is ignored", order.job_id)
            if job.load is not None:
                self._loads_of[job.req_id] -= 1
            return
        self._jobs[order.job_id] = job
        if not self._worker.transfer_async(order.job_id, order.spec):
            self._unstarted.append(TransferResult(order.job_id, success=False))

    # ---------------------------------------------------------------------------------------------------------- reports

    def get_finished(self, finished_req_ids: Collection[ReqId]) -> tuple[set[ReqId], set[ReqId]]:
        """(sent, received): no request is ever reported as sent, since the blocks of none are held back (copies are fenced instead).

        Received are those whose load has ended since the last call, whether it filled its blocks or not.  Collects what
        has ended for the other reports of this step.
        """
        unstarted, self._unstarted = self._unstarted, []
        for result in unstarted:
            self._ended(result)
        for result in self._worker.get_finished():
            self._ended(result)
        received, self._received = self._received, set()
        return set(), received

    def _ended(self, result: TransferResult) -> None:
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            logger.error("job %d has ended, but nobody ordered it", result.job_id)
            return
        self._report.finished[result.job_id] = 1
        if result.success:
            self._stats.record_transfer(result.transfer_size, result.transfer_time, result.transfer_type)
        else:
            self._report.failed.add(result.job_id)
            logger.warning(
                "a %s of request %s failed (job %d)", "store" if job.load is None else "load", job.req_id, result.job_id
            )
        if job.load is None:
            return
        if not result.success:
            self._unfilled.update(_gpu_blocks(job.load))
        self._loads_of[job.req_id] -= 1
        if self._loads_of[job.req_id] <= 0:
            del self._loads_of[job.req_id]
            self._unfilled.update(self._unfilled_with_load.pop(job.req_id, ()))
            self._received.add(job.req_id)

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """The jobs that were collected since the last call, for the scheduler half, or None."""
        if self._report.is_empty():
            return None
        report, self._report = self._report, OffloadingWorkerMetadata()
        return report

    def shutdown(self) -> None:
        """Wait for what is running, then release threads, streams and pins.  May be called twice."""
        if self._deferred:
            logger.info("%d queued stores are dropped at shutdown", len(self._deferred))
            self._deferred = []
        self._worker.shutdown()


def _gpu_blocks(order: TransferOrder) -> Sequence[int]:
    """The blocks that a load was to fill."""
    destination = order.spec[1]
    return destination.block_ids.tolist() if isinstance(destination, GPULoadStoreSpec) else []
