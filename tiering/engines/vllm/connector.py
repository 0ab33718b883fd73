"""The connector for vLLM: a thin subclass of vLLM's base class over the engine-neutral halves.

    --kv-transfer-config '{"kv_connector": "TieringConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "tiering.engines.vllm", "kv_connector_extra_config": {"config": "stack.yaml"}}'

vLLM builds one connector in each worker and one in the scheduler. They may live in different processes of one host:
the CPU tier's rows are shared memory named after vLLM's engine id. The name is unlinked as soon as all sides have
mapped the memory. With ``mode: simple`` in the stack, the halves are those of :mod:`tiering.simple`. Each worker then
has its own CPU memory, and the scheduler half uses vLLM's block pool.

This is the only module that imports vLLM, 0.29 to 0.33. The import raises
:class:`~tiering.engines.vllm.lookup.StartupError` if the installed vLLM has another connector interface. The import
also registers the class with vLLM by name, because ``MultiConnector`` looks up its parts by name in every process.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import vllm

from tiering.api.keys import PRIMARY_TIER
from tiering.api.namespace import ModelIdentity
from tiering.config.registry import tier_definition
from tiering.connector.metadata import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.worker import OffloadingConnectorWorker
from tiering.engines.vllm.events import EventConverter, engine_events
from tiering.engines.vllm.geometry import (
    Geometry,
    check_supported,
    layout_of,
    read_geometry,
    simple_cache,
    zeroes_early,
)
from tiering.engines.vllm.identity import hash_seed, overrides
from tiering.engines.vllm.interface import check_methods, check_names, check_version
from tiering.engines.vllm.loads import LoadLedger, ordered_loads
from tiering.engines.vllm.logging import share_logging
from tiering.engines.vllm.lookup import CONNECTOR, LookupCheck
from tiering.engines.vllm.lora import AdapterGuard
from tiering.engines.vllm.weights import draft_identity, weights_identity
from tiering.errors import ConfigError, RegionError
from tiering.offload.prometheus import MetricClasses, OffloadPromMetrics, unregister_tier_metrics
from tiering.offload.stats import RECORDS, TIERS, Increments, OffloadingConnectorStats
from tiering.simple.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from tiering.simple.scheduler import SimpleCPUOffloadScheduler
from tiering.simple.selection import simple_options
from tiering.simple.worker import SimpleCPUOffloadWorker
from tiering.spec import TieringOffloadingSpec, read_stack

logger = logging.getLogger("kv_tiering.vllm")
share_logging(logging.getLogger("vllm"))

check_version(vllm.__version__)
check_names(vllm.__version__)

from vllm.distributed import kv_events  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind  # noqa: E402

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before 0.32 does not distinguish hits by source
    CacheHitSource = None

TransferResults = getattr(vllm_base, "KVConnectorTransferResults", None)
"""vLLM's class for reports of requests with failed loads; None before vLLM 0.30."""

_HIT_SOURCES = {"CPU": "HOST", "MEMORY": "HOST", "DISK": "DISK"}
"""Medium → name of vLLM's hit source. vLLM has no source for object stores."""

_vllm_event = EventConverter(kv_events)

STATS_INTERVAL = 0.5
"""Time between two reports of the tiers' counters while requests run, in seconds."""

KVConnectorMetadata.register(OffloadingConnectorMetadata)
KVConnectorMetadata.register(SimpleCPUOffloadMetadata)
KVConnectorWorkerMetadata.register(OffloadingWorkerMetadata)
KVConnectorWorkerMetadata.register(SimpleCPUOffloadWorkerMetadata)


_built: weakref.WeakValueDictionary[tuple[str, str], TieringConnector] = weakref.WeakValueDictionary()
"""The connectors of this process by engine id and role.

Two connectors of one engine and role would take each other's shared memory.
"""


class TieringConnectorStats(OffloadingConnectorStats, KVConnectorStats):  # type: ignore[misc]
    """The connector's statistics in vLLM's class for statistics."""

    def to_dict(self) -> dict[str, Any]:
        """Return the data that vLLM sends to the front end."""
        return self.data

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's log line: the transfers, and the most important counters of each tier."""
        totals = super().reduce()
        for tier, fields in self.data.get(TIERS, {}).items():
            totals.update({f"{tier}_{word}": fields.get(word, 0) for word in ("hits", "blocks", "corrupt_blocks")})
        return totals


class TieringConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The vLLM connector that stores KV in a stack of tiers and loads it back to the GPU.

    Raises:
        TieringError: the connector cannot work: the stack is invalid, the model or deployment is unsupported, or there
            is too little shared memory. Raised at the start.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._claim = (str(vllm_config.kv_transfer_config.engine_id), str(role))
        if _built.setdefault(self._claim, self) is not self:
            raise ConfigError(
                f"the engine {self._claim[0]} has a {CONNECTOR} in this process already; "
                "if MultiConnector names it twice, write all tiers into one stack"
            )
        check_supported(vllm_config, kv_cache_config, _kind_of, TransferResults is not None)
        _, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        geometry = read_geometry(vllm_config, kv_cache_config, _kind_of, int(hash_block_size))
        self._several_groups = len(geometry.engine.groups) > 1
        self._ledger = LoadLedger()
        self.worker_half: OffloadingConnectorWorker | SimpleCPUOffloadWorker | None = None
        """The worker half, for the mode of the stack; None in the scheduler's connector."""
        self.scheduler_half: OffloadingConnectorScheduler | SimpleCPUOffloadScheduler | None = None
        """The scheduler half, for the mode of the stack; None in a worker's connector."""
        self._adapters = AdapterGuard()
        self._next_stats_at = 0.0
        self._tier_increments, self._increments = Increments(), Increments()
        self._open_requests: set[str] = set()
        self._spec: TieringOffloadingSpec | None = None
        is_worker = role == KVConnectorRole.WORKER
        if self._start_simple(vllm_config, kv_cache_config, geometry, is_worker):
            return
        self._spec = _build_spec(vllm_config, kv_cache_config, geometry)
        if is_worker:
            self.worker_half = OffloadingConnectorWorker(
                self._spec, int(kv_cache_config.num_blocks), writes_early=zeroes_early(vllm_config, kv_cache_config)
            )
        else:
            self._start_scheduler(vllm_config, self._spec)

    def _start_simple(self, vllm_config: Any, kv_cache_config: Any, geometry: Geometry, is_worker: bool) -> bool:
        """Build the half for mode simple and return True, if the stack selects that mode."""
        chosen = simple_options(vllm_config.kv_transfer_config.kv_connector_extra_config, geometry.engine.world_size)
        if chosen is None:
            return False
        engine, cache = simple_cache(vllm_config, kv_cache_config, geometry)
        if is_worker:
            self.worker_half = SimpleCPUOffloadWorker(engine, cache, chosen.cpu_capacity_bytes)
        else:
            half = SimpleCPUOffloadScheduler(
                engine,
                cache,
                chosen.cpu_capacity_bytes,
                chosen.lazy_offload,
                enable_kv_cache_events=_publishes_events(vllm_config),
                engine_events=engine_events(kv_cache_utils, vllm_config),
                self_describing_kv_events=chosen.self_describing_kv_events,
            )
            self.scheduler_half = half
            logger.info(
                "simple scheduler, %s: %d CPU blocks of %d bytes per worker",
                "lazy" if chosen.lazy_offload else "eager",
                half.cpu_config.num_blocks,
                half.cpu_config.block_bytes,
            )
        return True

    def _start_scheduler(self, vllm_config: Any, spec: TieringOffloadingSpec) -> None:
        persistent = {tier.tier_name for tier in spec.stack.secondary if tier_definition(tier.type).persistent}
        self._adapters = AdapterGuard(
            tier.tier_name for tier in spec.stack.secondary if tier.tier_name not in persistent
        )
        if persistent:
            weights = weights_identity(vllm_config.model_config, vllm_config.load_config)
            draft = draft_identity(vllm_config)
            known = spec.model.overrides if draft is None else {**spec.model.overrides, "draft": draft}
            spec.model = dataclasses.replace(spec.model, weights=weights, overrides=known)
        if getattr(vllm_config, "lora_config", None) is not None and persistent:
            logger.info(
                "requests with LoRA adapters use the CPU tier only: a hash covers an adapter's name, not its content"
            )
        try:
            self.scheduler_half = OffloadingConnectorScheduler(
                spec,
                enable_kv_cache_events=_publishes_events(vllm_config),
                engine_events=engine_events(kv_cache_utils, vllm_config),
            )
            if not spec.rows_are_shared:
                raise RegionError(
                    f"not all {spec.engine.world_size} worker(s) share the CPU tier's memory with the scheduler: "
                    "all of them must be on this host, with one /dev/shm"
                )
        except BaseException:
            self.shutdown()
            raise

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost store is only a later miss."""
        return False

    # ------------------------------------------------------------------------------------------------------ worker side

    @property
    def _worker(self) -> OffloadingConnectorWorker | SimpleCPUOffloadWorker:
        if self.worker_half is None:
            raise ConfigError("a method of vLLM's workers was called on the scheduler's connector")
        return self.worker_half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any = None) -> None:
        if not isinstance(self._worker, OffloadingConnectorWorker):
            raise ConfigError(
                "mode simple cannot offload a KV cache that is one tensor over all layers; use mode tiering"
            )
        self._worker.register_cross_layers_kv_cache(kv_cache, attn_backend)

    def unregister_kv_caches(self) -> None:
        """End all copies before the engine sleeps; vLLM 0.33 and newer call this method.

        The caches return at the same addresses, so nothing else needs to change.
        """
        self._worker.drain()

    def handle_preemptions(self, kv_connector_metadata: Any, *args: Any, **kwargs: Any) -> None:
        self._worker.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        self._ledger.started(*ordered_loads(metadata))
        self._worker.start_kv_transfers(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no request is scheduled before its whole load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: whole blocks are stored, from the next step on."""

    def wait_for_save(self) -> None:
        """Queue the step's stores without waiting. The blocks are fenced until the stores end."""
        self._worker.prepare_store_kv(self._get_connector_metadata())

    def clear_connector_metadata(self) -> None:
        """End the step, and queue its stores if vLLM has not called :meth:`wait_for_save`.

        vLLM before 0.31 skips that call in steps without tokens.
        """
        if self.worker_half is not None and self.has_connector_metadata():
            self.worker_half.prepare_store_kv(self._get_connector_metadata())
        super().clear_connector_metadata()

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[set[str], set[str]]:
        sent, received = self._worker.get_finished(finished_req_ids)
        self._ledger.ended(received)
        return sent, received

    def get_transfer_results(self, finished_req_ids: Collection[str]) -> Any:
        """Return the requests whose load has ended.

        With several KV-cache groups, the result also names the requests whose load failed.
        """
        sent, received = self._worker.get_finished(finished_req_ids)
        failed = set()
        if self._several_groups:
            failed = self._ledger.failed(received, self._worker.get_block_ids_with_load_errors())
        self._ledger.ended(received)
        if TransferResults is None:
            raise ConfigError("this vLLM has no KVConnectorTransferResults; it should call get_finished")
        return TransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed loads did not fill.

        With several KV-cache groups the set is empty, because vLLM takes reports of requests instead.
        """
        return set() if self._several_groups else self._worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | SimpleCPUOffloadWorkerMetadata | None:
        return None if self.worker_half is None else self.worker_half.build_connector_worker_meta()

    # --------------------------------------------------------------------------------------------------- scheduler side

    @property
    def _scheduler(self) -> OffloadingConnectorScheduler | SimpleCPUOffloadScheduler:
        if self.scheduler_half is None:
            raise ConfigError("a method of vLLM's scheduler was called on a worker's connector")
        return self.scheduler_half

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._open_requests.add(request.request_id)
        self._scheduler.on_new_request(self._adapters.admit(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> OffloadingConnectorMetadata | SimpleCPUOffloadMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update_connector_output(connector_output)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return the number of loaded tokens per vLLM hit source; vLLM 0.32 and newer call this method."""
        if not isinstance(self.scheduler_half, OffloadingConnectorScheduler):
            return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}
        found: dict[Any, int] = {}
        for medium, tokens in self.scheduler_half.get_hit_sources(request, num_external_tokens).items():
            source = getattr(CacheHitSource, _HIT_SOURCES.get(medium, "EXTERNAL_UNSPECIFIED"))
            found[source] = found.get(source, 0) + tokens
        return found

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._open_requests.discard(request.request_id)
        return self._scheduler.request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._open_requests.discard(request.request_id)
        return self._scheduler.request_finished_all_groups(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Return True while copies or jobs of tiers run.

        vLLM must then keep stepping, because the connector sees them end only in steps.
        """
        return self._scheduler.has_pending_work()

    def take_events(self) -> Iterable[Any]:
        return list(map(_vllm_event, self._scheduler.take_events()))

    def reset_cache(self) -> bool | None:
        """Drop all blocks and return True: this engine never again serves a block that was stored before.

        vLLM treats False as a failure: a pause that clears caches would end with status 500 and leave the engine
        paused. A tier whose medium has not confirmed the reset yet is no failure; the tier serves no blocks until then,
        and logs that.
        """
        self._adapters.reset()
        self._scheduler.reset_cache()
        return True

    # ------------------------------------------------------------------------------------------------------- both sides

    def get_kv_connector_stats(self) -> TieringConnectorStats | None:
        """Return new statistics, or None.

        A worker returns its transfers. The scheduler returns the tiers' counters every :data:`STATS_INTERVAL` seconds
        and whenever it becomes idle.
        """
        if self.worker_half is not None:
            transfers = self.worker_half.get_kv_connector_stats()
            return None if transfers is None else TieringConnectorStats(transfers.data)
        now = time.monotonic()
        if now < self._next_stats_at and (self._open_requests or self._scheduler.has_pending_work()):
            return None
        self._next_stats_at = now + STATS_INTERVAL
        stats = TieringConnectorStats()
        current = self._scheduler.get_stats()
        stats.record_tiers(self._tier_increments.take(current.get("tiers", {})))
        for name, fields in self._increments.take({name: current[name] for name in RECORDS if name in current}).items():
            stats.record(name, fields)
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Wait for copies, drain the tiers, and release the memory. May be called twice."""
        if self.worker_half is not None:
            self.worker_half.shutdown()
        if self.scheduler_half is not None:
            self.scheduler_half.shutdown()
        if self._spec is not None:
            self._spec.close()
        if _built.get(self._claim) is self:
            del _built[self._claim]

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TieringConnectorStats:
        """Return statistics that start with ``data``. Later additions do not change ``data``."""
        return TieringConnectorStats().aggregate(OffloadingConnectorStats(data))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> OffloadPromMetrics:
        """Return the connector's metrics for the front end's ``/metrics``.

        The counters of all configured tiers exist from the start.
        """
        unregister_tier_metrics()  # as vLLM does with its own metrics
        by_name = {kind.__name__: metric for kind, metric in metric_types.items()}
        classes = MetricClasses(
            counter=by_name["Counter"],
            gauge=functools.partial(by_name["Gauge"], multiprocess_mode="mostrecent"),
            histogram=by_name["Histogram"],
        )
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        is_simple = simple_options(extra) is not None
        tiers = () if is_simple else tuple(tier.tier_name for tier in read_stack(extra).secondary)
        return OffloadPromMetrics(
            classes, labelnames, per_engine_labelvalues, tiers=(PRIMARY_TIER, *tiers), has_manager=not is_simple
        )


def _build_spec(vllm_config: Any, kv_cache_config: Any, geometry: Geometry) -> TieringOffloadingSpec:
    """Return the spec.

    Until the scheduler's side has identified the weights, the model's identity is unique to this engine.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = hash_seed(algorithm, os.environ.get("PYTHONHASHSEED"), kv_cache_utils.DEFAULT_NONE_HASH_SEED)
    model_config = vllm_config.model_config
    model = ModelIdentity(
        name=str(model_config.model),
        weights=f"engine {geometry.engine.engine_id}",
        dtype=str(model_config.dtype).removeprefix("torch."),
        layout=layout_of(geometry, vllm_config, _memory_order(vllm_config, kv_cache_config), seed),
        overrides=overrides(vllm_config, ".".join(vllm.__version__.split(".")[:2])),
        volatile_scales=bool(getattr(vllm_config.cache_config, "calculate_kv_scales", False)),
    )
    return TieringOffloadingSpec(
        geometry.engine,
        vllm_config.kv_transfer_config.kv_connector_extra_config,
        model=model,
        group_bytes=geometry.group_bytes,
        rank=geometry.rank,
        replicated=geometry.replicated,
        replica=geometry.replica,
        enable_events=_publishes_events(vllm_config),
    )


def _kind_of(spec: Any) -> str:
    return str(get_kv_cache_spec_kind(spec).value)


def _memory_order(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the order of dimensions in a page, and the settings that affect the packing of K and V."""
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(
        vllm_config.cache_config, "kv_cache_layout", None
    )
    attention = getattr(vllm_config, "attention_config", None)
    backend = getattr(attention, "backend", None) or os.environ.get("VLLM_ATTENTION_BACKEND")
    device = (
        current_platform.get_device_name() if not current_platform.is_cpu() else torch.backends.cpu.get_cpu_capability()
    )
    per_kind = getattr(attention, "backend_per_kind", None) or {}
    return (
        f"{layout}, {current_platform.device_type} {device}, attention {backend} {sorted(map(str, per_kind.items()))}"
    )


def _publishes_events(vllm_config: Any) -> bool:
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


check_methods(vllm.__version__, TieringConnector, KVConnectorBase_V1)
if CONNECTOR not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(CONNECTOR, __name__, CONNECTOR)

_connector_class = globals().pop(CONNECTOR)
_lookups = LookupCheck()


def __getattr__(name: str) -> Any:
    """Return ``TieringConnector`` after a check of the configuration that is looked up.

    See :mod:`tiering.engines.vllm.lookup`.
    """
    if name != CONNECTOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _lookups.check(sys._getframe(1))
    return _connector_class
