"""The engine's connection to a stack of tiers: its identity, and the two halves of the connector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.mini_engine.worker import Worker, layer_name
from tiering.api.engine import CanonicalKVCaches, EngineConfig, KVCacheGroup
from tiering.api.keys import PRIMARY_TIER
from tiering.api.namespace import KVLayout, ModelIdentity
from tiering.api.transfer import CPULoadStoreSpec, LoadStoreSpec, TransferSpec
from tiering.connector.prometheus import OffloadPromMetrics
from tiering.connector.reports import TierReports
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.stats import OffloadingConnectorStats
from tiering.connector.worker import OffloadingConnectorWorker
from tiering.copy.contract import OffloadingHandler, TransferResult
from tiering.spec import TieringOffloadingSpec

ReplaceLoads = Callable[[OffloadingHandler], OffloadingHandler]


@dataclass(slots=True)
class Tiers:
    """A connected stack. ``block_bytes``: of an offloaded block, per KV-cache group."""

    scheduler_half: OffloadingConnectorScheduler
    worker_half: OffloadingConnectorWorker
    block_bytes: tuple[int, ...]
    bytes_moved: dict[str, int] = field(default_factory=dict)
    """Bytes that the copies moved, under ``gpu_to_cpu`` and ``cpu_to_gpu``."""
    metrics: OffloadPromMetrics | None = None
    """Metrics that every step's statistics are added to; None: none are kept."""
    reports: TierReports[OffloadingConnectorStats] = field(
        default_factory=lambda: TierReports(OffloadingConnectorStats)
    )
    """The scheduler half's reports for the metrics."""

    def collect(self, stats: Any) -> None:
        """Add up the connector's statistics of a step, and report the tiers' counters from time to time."""
        if self.metrics is not None and self.reports.is_due(self.scheduler_half.has_pending_work()):
            self._observe(self.reports.take(self.scheduler_half.get_stats()))
        if stats is None:
            return
        self._observe(stats)
        for name, value in stats.reduce().items():
            if name.endswith("_total_bytes"):
                kind = name.removesuffix("_total_bytes")
                self.bytes_moved[kind] = self.bytes_moved.get(kind, 0) + int(value)

    def _observe(self, stats: OffloadingConnectorStats | None) -> None:
        if self.metrics is not None and stats is not None:
            self.metrics.observe(stats.data)

    def secondary_stats(self) -> dict[str, dict[str, Any]]:
        """Return counters and gauges of each secondary tier by name."""
        tiers: dict[str, dict[str, Any]] = self.scheduler_half.get_stats()["tiers"]
        return {name: fields for name, fields in tiers.items() if name != PRIMARY_TIER}

    def shutdown(self) -> None:
        """Stop the copies, then the tiers."""
        self.worker_half.shutdown()
        self.scheduler_half.shutdown()


def connect(
    worker: Worker,
    stack: str | Path | Mapping[str, Any],
    *,
    offload: Mapping[str, Any],
    prefix_caching: bool,
    max_batch_tokens: int,
    loads_within_step: bool = False,
    replace_loads: ReplaceLoads | None = None,
) -> Tiers:
    """Open ``stack`` for the engine of ``worker``.

    Raises:
        ConfigError: the stack is invalid.
    """
    config, cache = worker.model.config, worker.cache
    groups = tuple(
        KVCacheGroup(
            layer_names=tuple(map(layer_name, layers)),
            gpu_block_size=cache.block_size,
            sliding_window=config.window_of(layers[0]),
            kind="full_attention" if config.window_of(layers[0]) is None else "sliding_window",
        )
        for layers in config.groups
    )
    engine = EngineConfig(
        block_sizes=(cache.block_size,) * len(groups),
        hash_block_size=cache.block_size,
        groups=groups,
        enable_prefix_caching=prefix_caching,
        max_batch_tokens=max_batch_tokens,
        loads_within_step=loads_within_step,
    )
    factor = int(offload.get("block_size", cache.block_size)) // cache.block_size
    block_bytes = tuple(len(layers) * cache.page_bytes * factor for layers in config.groups)
    model = describe(worker, groups, factor, block_bytes)
    spec = _Spec(engine, {**offload, "config": stack}, model, replace_loads)
    worker_half = OffloadingConnectorWorker(spec)
    worker_half.register_kv_caches(worker.kv_caches())
    return Tiers(OffloadingConnectorScheduler(spec), worker_half, block_bytes)


def describe(
    worker: Worker, groups: tuple[KVCacheGroup, ...], factor: int, block_bytes: tuple[int, ...]
) -> ModelIdentity:
    """Return the identity of the engine's KV: all parameters that change a block's bytes or their meaning."""
    config, cache = worker.model.config, worker.cache
    heads = f"{config.kv_heads} KV heads of {config.head_dim}"
    layout = KVLayout(
        kv_dtype="float32",
        layer_names=tuple(name for group in groups for name in group.layer_names),
        groups=tuple(
            f"{group.kind}, window {group.sliding_window}, {len(group.layer_names)} layers, {heads}" for group in groups
        ),
        gpu_block_size=(cache.block_size,) * len(groups),
        block_size_factor=factor,
        group_bytes=block_bytes,
        memory_order="(2, blocks, tokens, heads, dim)" if cache.kv_first else "(blocks, 2, tokens, heads, dim)",
        parallel_sizes=(("tensor", 1),),
        hash_algorithm="sha256",
        hash_seed="mini-engine",
        hash_block_size=cache.block_size,
    )
    return ModelIdentity(name="mini-engine", weights=worker.model.digest(), dtype="float32", layout=layout)


class _Spec(TieringOffloadingSpec):
    """The spec of the stack; ``replace_loads`` replaces the load handler, for negative controls."""

    def __init__(
        self, engine: EngineConfig, extra: Mapping[str, Any], model: ModelIdentity, replace_loads: ReplaceLoads | None
    ) -> None:
        super().__init__(engine, extra, model=model)
        self._replace_loads = replace_loads

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        for source, destination, handler in super().get_handlers(kv_caches):
            if self._replace_loads is not None and issubclass(source, CPULoadStoreSpec):
                handler = self._replace_loads(handler)
            yield source, destination, handler


class CopyNothing(OffloadingHandler):
    """A load handler that reports success and copies no bytes, so that a check of the outputs must fail."""

    def __init__(self) -> None:
        self._claimed: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self._claimed.append(TransferResult(job_id, True, 0, 0.0, ("cpu", "gpu")))
        return True

    def get_finished(self) -> list[TransferResult]:
        claimed, self._claimed = self._claimed, []
        return claimed

    def wait(self, job_ids: Collection[int]) -> None:
        return None


def copy_nothing(handler: OffloadingHandler) -> OffloadingHandler:
    """Replace a load handler by :class:`CopyNothing`."""
    handler.shutdown()
    return CopyNothing()
