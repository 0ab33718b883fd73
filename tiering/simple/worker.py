"""The worker half of the simple scheduler: one worker's CPU memory, and the copies between it and the KV cache.

Driven like :class:`tiering.connector.worker.OffloadingConnectorWorker`.  A block is copied whole, over all tensors,
whatever its group; the memory is the worker's alone.  A step's loads start with it; its stores start behind the forward
pass, so that they never delay a token.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from tiering.api.engine import CanonicalKVCaches, EngineConfig
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.copy.canonical import canonicalize
from tiering.copy.contract import OffloadingWorker, TransferResult
from tiering.copy.handlers import HandlerEntry, make_handlers
from tiering.copy.layout import RowLayout
from tiering.errors import ConfigError
from tiering.offload.reports import CopyReports
from tiering.primary.memory.region import SharedRegion
from tiering.simple.cache_config import KVCacheConfig, check_engine, derive_cpu_config
from tiering.simple.metadata import NOT_HELD, SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata, failed

logger = logging.getLogger("kv_tiering.simple")


@dataclass(slots=True)
class _Load:
    """A load event: whose it is, the GPU blocks that the copy fills, and those that nothing fills."""

    req_ids: list[str]
    gpu_blocks: list[int]
    unfilled: list[int] = field(default_factory=list)


class SimpleCPUOffloadWorker(CopyReports):
    """Copies of one worker.  Called from the engine's thread; only :meth:`handle_preemptions`, :meth:`drain` and
    :meth:`shutdown` ever wait.

    The arguments are those of the scheduler half: both derive the same number of CPU blocks from them.
    """

    def __init__(self, engine_config: EngineConfig, kv_cache_config: KVCacheConfig, cpu_capacity_bytes: int) -> None:
        super().__init__()
        check_engine(engine_config, kv_cache_config)
        self._gpu_config = kv_cache_config
        self._cpu_config = derive_cpu_config(kv_cache_config, cpu_capacity_bytes)
        self._region: SharedRegion | None = None
        self._worker = OffloadingWorker()
        self._loads: dict[int, _Load] = {}
        self._stores: set[int] = set()
        self._over: list[TransferResult] = []
        """Events that needed no copy, or whose copy could not be started."""
        self._report = SimpleCPUOffloadWorkerMetadata()
        self._started = -1
        self._prepared = -1

    # ----------------------------------------------------------------------------------------------------- registration

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's KV cache, layer by layer, and the CPU memory for it.  Called once.

        Raises :class:`ConfigError` for a layout that cannot be offloaded or is not what the configuration says, and
        :class:`tiering.errors.RegionError` if the memory is not to be had.
        """
        if self._region is not None:
            raise ConfigError("the KV cache is registered already")
        gpu, num_blocks = self._gpu_config, self._cpu_config.num_blocks
        layers = chain.from_iterable(group.layer_names for group in gpu.kv_cache_groups)
        block = replace(gpu.kv_cache_groups[0], layer_names=tuple(layers))
        whole = canonicalize(kv_caches, [block], gpu.num_blocks)
        layout = RowLayout.of(whole)
        if layout.row_bytes > gpu.block_bytes:
            raise ConfigError(
                f"the KV caches have blocks of {layout.row_bytes} bytes, the engine's configuration says {gpu.block_bytes}"
            )
        # One row over everything, cut into blocks: rows of their own would each be rounded up to a page.
        self._region = SharedRegion.create(1, num_blocks * layout.row_bytes)
        rows = self._region.array.reshape(-1)[: num_blocks * layout.row_bytes].reshape(num_blocks, layout.row_bytes)
        for source, destination, handler in self.make_handlers(whole, rows.data, layout):
            self._worker.register_handler(source, destination, handler)

    def make_handlers(
        self, kv_caches: CanonicalKVCaches, rows: memoryview, layout: RowLayout
    ) -> Iterator[HandlerEntry]:
        """The copies between ``kv_caches`` and the CPU blocks."""
        yield from make_handlers(kv_caches, rows, layout)

    # ------------------------------------------------------------------------------------------------------------ steps

    def handle_preemptions(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Before a step touches the KV cache: after a preemption, end the stores that run, so that their blocks come back."""
        if metadata.need_flush:
            self._worker.wait({2 * event for event in self._stores})

    def start_kv_transfers(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Start this step's loads.  The same metadata again does nothing."""
        event = metadata.load_event
        if event <= self._started:
            return
        self._started = event
        pairs = list(zip(metadata.load_gpu_blocks, metadata.load_cpu_blocks, strict=True))
        held = [(gpu, cpu) for gpu, cpu in pairs if cpu != NOT_HELD]
        load = _Load(metadata.load_event_to_reqs.get(event, []), [gpu for gpu, _ in held])
        load.unfilled = [gpu for gpu, cpu in pairs if cpu == NOT_HELD]
        self._loads[event] = load
        if not held:
            self._over.append(TransferResult(2 * event + 1, success=True))
            return
        gpu_spec = GPULoadStoreSpec(load.gpu_blocks, (len(held),), (0,))
        self._submit(2 * event + 1, (CPULoadStoreSpec([cpu for _, cpu in held]), gpu_spec))

    def prepare_store_kv(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Behind the forward pass: start this step's stores.  The same metadata again does nothing."""
        event = metadata.store_event
        if event <= self._prepared:
            return
        self._prepared = event
        self._stores.add(event)
        blocks = metadata.store_gpu_blocks
        self._submit(
            2 * event, (GPULoadStoreSpec(blocks, (len(blocks),), (0,)), CPULoadStoreSpec(metadata.store_cpu_blocks))
        )

    def drain(self) -> None:
        """End all copies: the memory of the KV cache is about to be taken away."""
        self._worker.wait({2 * event for event in self._stores} | {2 * event + 1 for event in self._loads})

    def _submit(
        self, job_id: int, spec: tuple[GPULoadStoreSpec | CPULoadStoreSpec, GPULoadStoreSpec | CPULoadStoreSpec]
    ) -> None:
        if not self._worker.transfer_async(job_id, spec):
            self._over.append(TransferResult(job_id, success=False))

    # ---------------------------------------------------------------------------------------------------------- reports

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[set[str], set[str]]:
        """(sent, received): none is ever sent; received are those whose load has ended since the last call, filled or not.

        Collects what has ended for the other reports of this step.
        """
        received: set[str] = set()
        over, self._over = self._over, []
        for result in over + self._worker.get_finished():
            event, is_load = divmod(result.job_id, 2)
            if result.success:
                self._stats.record_transfer(result.transfer_size, result.transfer_time, result.transfer_type)
            else:
                logger.warning("a %s failed on this worker (event %d)", "load" if is_load else "store", event)
            if is_load:
                load = self._loads.pop(event)
                received.update(load.req_ids)
                self._unfilled.update(load.unfilled if result.success else load.unfilled + load.gpu_blocks)
            else:
                self._stores.discard(event)
                self._report.completed_store_events[event if result.success else failed(event)] = 1
        return set(), received

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        """The store events that were collected since the last call, for the scheduler half, or None."""
        if not self._report.completed_store_events:
            return None
        report, self._report = self._report, SimpleCPUOffloadWorkerMetadata()
        return report

    def shutdown(self) -> None:
        """Wait for what is running, then release threads, pins and memory.  May be called twice."""
        self._worker.shutdown()
        if self._region is not None:
            self._region.close()
