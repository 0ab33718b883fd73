"""The worker half of the simple mode: one worker's CPU memory and its copies from and to the GPU.

The engine calls it like :class:`tiering.connector.worker.OffloadingConnectorWorker`. Each block is copied whole, over
all tensors, whatever its group. No other worker shares the memory. The loads of a step start with the step. Its stores
start after the forward pass, so that they never delay a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

from tiering.api.engine import CanonicalKVCaches, EngineConfig
from tiering.connector.metadata import OffloadingWorkerMetadata
from tiering.connector.worker import WorkerHalf
from tiering.copy.canonical import LayerCache, canonicalize
from tiering.copy.handlers import HandlerEntry, make_handlers
from tiering.copy.layout import RowLayout
from tiering.errors import ConfigError
from tiering.primary.memory.region import SharedRegion, is_large
from tiering.simple.cache_config import KVCacheConfig, check_engine, derive_cpu_config
from tiering.simple.metadata import NO_EVENT, SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata


class SimpleCPUOffloadWorker(WorkerHalf):
    """The copies of one worker.

    All calls come from the engine's thread. Only :meth:`handle_preemptions`, :meth:`drain` and :meth:`shutdown` wait.
    """

    _reports_loads = False

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
        self._joins_later = is_large(self._cpu_config.total_bytes)
        """True until large memory is prepared and the worker has reported that; False for small memory."""
        self._started: SimpleCPUOffloadMetadata | None = None
        self._prepared = NO_EVENT

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache]) -> None:
        """Register the engine's KV cache and allocate the CPU memory; called once.

        Large memory is prepared beside the engine's start, and is not used before.

        Args:
            kv_caches: KV-cache tensor of each layer, or the tensors of its state, by layer name.

        Raises:
            ConfigError: the layout cannot be offloaded or differs from the configuration.
            RegionError: the memory cannot be allocated.
        """
        self._register(self._allocate(kv_caches))

    def _allocate(self, kv_caches: Mapping[str, LayerCache]) -> Iterator[HandlerEntry]:
        """Allocate the CPU memory, and yield the copy handlers."""
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
        self._region = SharedRegion.create(1, num_blocks * layout.row_bytes, in_background=self._joins_later)
        rows = self._region.array.reshape(-1)[: num_blocks * layout.row_bytes].reshape(num_blocks, layout.row_bytes)
        yield from self.make_handlers(whole, rows.data, layout)

    def make_handlers(
        self, kv_caches: CanonicalKVCaches, rows: memoryview, layout: RowLayout
    ) -> Iterator[HandlerEntry]:
        """Yield the copy handlers between the KV cache and the CPU blocks.

        Args:
            kv_caches: the KV cache in canonical form.
            rows: memory of the CPU blocks.
            layout: layout of a block within its row.
        """
        region = self._region
        preparation = region.preparation if region is not None and region.in_background else None
        yield from make_handlers(kv_caches, rows, layout, preparation=preparation)

    def handle_preemptions(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Wait for running stores after a preemption, so that their blocks come back before the step begins.

        Wait for all copies if the engine has taken their blocks back.
        """
        if metadata.need_drain:
            self.drain()
        elif metadata.need_flush:
            self.copies.wait({job_id for job_id, job in self._jobs.items() if job.load is None})

    def start_kv_transfers(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Start this step's loads; those that the step needs are in front of all later work of the engine.

        A second call with the same metadata does nothing.
        """
        if metadata is not self._started and (metadata.load_event != NO_EVENT or metadata.within_step is not None):
            self._started = metadata
            self._start_loads(metadata.orders())

    def prepare_store_kv(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Start this step's stores, after the forward pass. A second call with the same metadata does nothing."""
        if metadata.store_event > self._prepared:
            self._prepared = metadata.store_event
            self._store(metadata.orders().reqs_to_store)
            self._submit_deferred()

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        """Return what has ended since the last call, for the scheduler half; None if nothing has."""
        joins = self._joins_later and self._region is not None and self._region.is_prepared
        if self._report.is_empty() and not joins:
            return None
        if joins:
            self._joins_later = False
        report, self._report = self._report, OffloadingWorkerMetadata()
        events = {job_id // 2: workers for job_id, workers in report.finished.items()}
        failed = {job_id // 2 for job_id in report.failed}
        seconds = {job_id // 2: taken for job_id, taken in report.load_seconds.items()}
        return SimpleCPUOffloadWorkerMetadata(events, failed, load_seconds=seconds, prepared=int(joins))

    def shutdown(self) -> None:
        """Wait for running copies, then release threads, pins and memory. A second call does nothing."""
        super().shutdown()
        if self._region is not None:
            self._region.close()
