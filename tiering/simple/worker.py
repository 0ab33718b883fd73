"""The worker half of the simple mode: one worker's CPU memory and its copies from and to the GPU.

The engine calls it like :class:`tiering.connector.worker.OffloadingConnectorWorker`. Each block is copied whole, over
all tensors, whatever its group. No other worker shares the memory. The loads of a step start with the step. Its stores
start after the forward pass, so that they never delay a token.
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
from tiering.offload.stats import CopyReports
from tiering.primary.memory.region import SharedRegion
from tiering.simple.cache_config import KVCacheConfig, check_engine, derive_cpu_config
from tiering.simple.metadata import (
    NOT_HELD,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
    failed,
    load_job,
    store_job,
)

logger = logging.getLogger("kv_tiering.simple")


@dataclass(slots=True)
class _Load:
    """A load event that has not been reported."""

    req_ids: list[str]
    """Requests whose blocks are loaded."""
    gpu_blocks: list[int]
    """GPU blocks that the copy fills."""
    unfilled: list[int] = field(default_factory=list)
    """GPU blocks that no copy fills, because their CPU blocks were evicted after the match."""


class SimpleCPUOffloadWorker(CopyReports):
    """The copies of one worker.

    All calls come from the engine's thread. Only :meth:`handle_preemptions`, :meth:`drain` and :meth:`shutdown` wait.
    """

    def __init__(self, engine_config: EngineConfig, kv_cache_config: KVCacheConfig, cpu_capacity_bytes: int) -> None:
        """Create the worker half; :meth:`register_kv_caches` allocates its memory.

        Both halves get the same arguments and derive the same number of CPU blocks from them.

        Args:
            engine_config: the engine's configuration.
            kv_cache_config: geometry of the worker's KV cache.
            cpu_capacity_bytes: bytes of CPU memory of this worker.

        Raises:
            ConfigError: the simple mode cannot serve this engine.
        """
        super().__init__()
        check_engine(engine_config, kv_cache_config)
        self._gpu_config = kv_cache_config
        self._cpu_config = derive_cpu_config(kv_cache_config, cpu_capacity_bytes)
        self._region: SharedRegion | None = None
        self.copies = OffloadingWorker()
        """Copy handlers of both directions."""
        self._loads: dict[int, _Load] = {}
        self._stores: set[int] = set()
        self._over: list[TransferResult] = []
        """Results of events that needed no copy, or whose copy could not be started."""
        self._report = SimpleCPUOffloadWorkerMetadata()
        self._started = -1
        self._prepared = -1

    # ----------------------------------------------------------------------------------------------------- registration

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the engine's KV cache and allocate the CPU memory; called once.

        Args:
            kv_caches: KV-cache tensor of each layer, by layer name.

        Raises:
            ConfigError: the layout cannot be offloaded or differs from the configuration.
            RegionError: the memory cannot be allocated.
        """
        if self._region is not None:
            raise ConfigError("the KV cache is registered already; register it once per worker")
        gpu, num_blocks = self._gpu_config, self._cpu_config.num_blocks
        layers = chain.from_iterable(group.layer_names for group in gpu.kv_cache_groups)
        block = replace(gpu.kv_cache_groups[0], layer_names=tuple(layers))
        whole = canonicalize(kv_caches, [block], gpu.num_blocks)
        layout = RowLayout.of(whole)
        if layout.row_bytes > gpu.block_bytes:
            raise ConfigError(
                f"the KV caches have blocks of {layout.row_bytes} bytes, the engine's configuration says "
                f"{gpu.block_bytes}; pass the configuration of these caches"
            )
        # One row is cut into all blocks. One row per block would be rounded up to a page.
        self._region = SharedRegion.create(1, num_blocks * layout.row_bytes)
        rows = self._region.array.reshape(-1)[: num_blocks * layout.row_bytes].reshape(num_blocks, layout.row_bytes)
        for source, destination, handler in self.make_handlers(whole, rows.data, layout):
            self.copies.register_handler(source, destination, handler)

    def make_handlers(
        self, kv_caches: CanonicalKVCaches, rows: memoryview, layout: RowLayout
    ) -> Iterator[HandlerEntry]:
        """Yield the copy handlers between the KV cache and the CPU blocks.

        Args:
            kv_caches: the KV cache in canonical form.
            rows: memory of the CPU blocks.
            layout: layout of a block within its row.
        """
        yield from make_handlers(kv_caches, rows, layout)

    # ------------------------------------------------------------------------------------------------------------ steps

    def handle_preemptions(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Wait for running stores after a preemption, so that their blocks come back before the step begins.

        Wait for all copies if the engine has taken their blocks back.
        """
        if metadata.need_drain:
            self.drain()
        elif metadata.need_flush:
            self.copies.wait(set(map(store_job, self._stores)))

    def start_kv_transfers(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Start this step's loads. A second call with the same metadata does nothing."""
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
            self._over.append(TransferResult(load_job(event), success=True))
            return
        gpu_spec = GPULoadStoreSpec(load.gpu_blocks, (len(held),), (0,))
        self._submit(load_job(event), (CPULoadStoreSpec([cpu for _, cpu in held]), gpu_spec))

    def prepare_store_kv(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Start this step's stores, after the forward pass. A second call with the same metadata does nothing."""
        event = metadata.store_event
        if event <= self._prepared:
            return
        self._prepared = event
        self._stores.add(event)
        blocks = metadata.store_gpu_blocks
        self._submit(
            store_job(event),
            (GPULoadStoreSpec(blocks, (len(blocks),), (0,)), CPULoadStoreSpec(metadata.store_cpu_blocks)),
        )

    def drain(self) -> None:
        """Wait for all copies, before the engine frees the memory of the KV cache."""
        self.copies.wait({*map(store_job, self._stores), *map(load_job, self._loads)})

    def _submit(
        self, job_id: int, spec: tuple[GPULoadStoreSpec | CPULoadStoreSpec, GPULoadStoreSpec | CPULoadStoreSpec]
    ) -> None:
        if not self.copies.transfer_async(job_id, spec):
            self._over.append(TransferResult(job_id, success=False))

    # ---------------------------------------------------------------------------------------------------------- reports

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[set[str], set[str]]:
        """Collect the copies that have ended, also for the other reports of this step.

        Returns:
            An empty set, and the ids of the requests whose load has ended since the last call, filled or not.
        """
        received: set[str] = set()
        over, self._over = self._over, []
        for result in over + self.copies.get_finished():
            event, is_load = divmod(result.job_id, 2)
            if result.success:
                self._stats.record_transfer(result.transfer_size, result.transfer_time, result.transfer_type)
            else:
                logger.warning("copy job %d failed on this worker: a %s", result.job_id, "load" if is_load else "store")
            if is_load:
                load = self._loads.pop(event)
                received.update(load.req_ids)
                self._unfilled.update(load.unfilled if result.success else load.unfilled + load.gpu_blocks)
            else:
                self._stores.discard(event)
                self._report.completed_store_events[event if result.success else failed(event)] = 1
        return set(), received

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        """Return the store events since the last call, for the scheduler half; None if there are none."""
        if not self._report.completed_store_events:
            return None
        report, self._report = self._report, SimpleCPUOffloadWorkerMetadata()
        return report

    def shutdown(self) -> None:
        """Wait for running copies, then release threads, pins and memory. A second call does nothing."""
        self.copies.shutdown()
        if self._region is not None:
            self._region.close()
