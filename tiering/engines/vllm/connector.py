"""The connector for vLLM: a thin subclass of vLLM's base class over the engine-neutral halves.

    --kv-transfer-config '{"kv_connector": "TieringConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "tiering.engines.vllm", "kv_connector_extra_config": {"config": "stack.yaml"}}'

vLLM builds one connector in each worker and one in the scheduler. They may live in different processes of one host:
the CPU tier's rows are shared memory named after vLLM's engine id. The name is unlinked as soon as all sides have
mapped the memory. With ``mode: simple`` in the stack, the halves are those of :mod:`tiering.simple`. Each worker then
has its own CPU memory, and the scheduler half uses vLLM's block pool.

This module imports vLLM, 0.29 to 0.33, and with it the two sides of the connector and its statistics. The import raises
:class:`~tiering.engines.vllm.lookup.StartupError` if the installed vLLM has another connector interface. The import
also registers the class with vLLM by name, because ``MultiConnector`` looks up its parts by name in every process.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import vllm

from tiering.advisor.advisor import small_tier
from tiering.config.registry import tier_definition
from tiering.connector.metadata import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from tiering.connector.prometheus import OffloadPromMetrics
from tiering.connector.reports import TierReports
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.stats import OffloadingConnectorStats
from tiering.connector.worker import OffloadingConnectorWorker
from tiering.engines.vllm.adapter_loads import AdapterLoads
from tiering.engines.vllm.built import model_of, worker_mark
from tiering.engines.vllm.events import engine_events
from tiering.engines.vllm.geometry import Geometry, cache_bytes, loads_may_come_first, simple_cache, zeroes_early
from tiering.engines.vllm.heads import check_copies
from tiering.engines.vllm.identification import Identification, note_files
from tiering.engines.vllm.interface import check_methods, check_names, check_version
from tiering.engines.vllm.kept_groups import kept_groups
from tiering.engines.vllm.loads import LoadLedger
from tiering.engines.vllm.logging import share_logging
from tiering.engines.vllm.lookup import CONNECTOR, LookupCheck
from tiering.engines.vllm.lora import AdapterGuard, AdapterNames, AdapterVariants
from tiering.engines.vllm.model import geometry_of, kind_of, model_identity
from tiering.engines.vllm.new_weights import WeightWatch
from tiering.engines.vllm.refusals import check_one_stage, check_stages, check_supported, lost_states
from tiering.engines.vllm.resets import LoadWaits
from tiering.engines.vllm.stages import core_of, stages_of_engine, stages_of_worker
from tiering.errors import ConfigError, RegionError
from tiering.simple.metadata import SimpleCPUOffloadMetadata
from tiering.simple.scheduler import SimpleCPUOffloadScheduler
from tiering.simple.selection import simple_options
from tiering.simple.worker import SimpleCPUOffloadWorker
from tiering.spec import TieringOffloadingSpec, read_stack

logger = logging.getLogger("kv_tiering.vllm")
share_logging(logging.getLogger("vllm"))

check_version(vllm.__version__)
check_names(vllm.__version__)

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.sched import output as scheduler_output  # noqa: E402

from tiering.engines.vllm.scheduler_side import (  # noqa: E402
    ASYNC_LOOKUP_PATIENCE,
    LOOKUP_PATIENCE,
    SchedulerSide,
)
from tiering.engines.vllm.stats import TieringConnectorStats, prom_metrics  # noqa: E402
from tiering.engines.vllm.worker_side import TransferResults, WorkerSide  # noqa: E402

KVConnectorMetadata.register(OffloadingConnectorMetadata)
KVConnectorMetadata.register(SimpleCPUOffloadMetadata)
KVConnectorWorkerMetadata.register(OffloadingWorkerMetadata)


_built: weakref.WeakValueDictionary[tuple[str, str], TieringConnector] = weakref.WeakValueDictionary()
"""The connectors of this process by engine id and role.

Two connectors of one engine and role would take each other's shared memory.
"""


class TieringConnector(WorkerSide, SchedulerSide, SupportsHMA):  # type: ignore[misc]
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
        is_worker = role == KVConnectorRole.WORKER
        parallel = vllm_config.parallel_config
        check_stages(vllm_config)
        # Before all that may fail on some workers only: the others would wait for them.
        self.stages = (
            stages_of_worker(kv_cache_config, parallel, get_pp_group)
            if is_worker
            else stages_of_engine(kv_cache_config, parallel, sys._getframe(1), _stages_here, self._claim[0])
        )
        """vLLM's KV-cache configuration of each pipeline stage."""
        check_supported(vllm_config, kv_cache_config, kind_of, TransferResults is not None, _hands_over_states())
        geometry = geometry_of(vllm_config, kv_cache_config, stages=self.stages)
        self._kept = kept_groups(kv_cache_config, kind_of)
        self._several_groups = len(kv_cache_config.kv_cache_groups) > 1
        self._may_rest = parallel.pipeline_parallel_size == getattr(parallel, "data_parallel_size", 1) == 1
        is_async = bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))
        self._lookup_patience = self._may_rest * (ASYNC_LOOKUP_PATIENCE if is_async else LOOKUP_PATIENCE)
        self._loads_first = loads_may_come_first(vllm_config, kv_cache_config)
        self._ledger = LoadLedger()
        self._adapters = AdapterGuard()
        self._reports = TierReports(TieringConnectorStats)
        self._identification: Identification | None = None
        self._waits = LoadWaits()
        self._spec: TieringOffloadingSpec | None = None
        self._identifies_adapters = self._can_identify_adapters(getattr(vllm_config, "lora_config", None))
        if is_worker and self._identifies_adapters:
            self._watch_adapters(vllm_config.lora_config, geometry)
        if not is_worker:
            WeightWatch(core_of(sys._getframe(1)), self.reset_cache)
        is_simple = self._start_simple(vllm_config, kv_cache_config, geometry, is_worker)
        if not is_worker and (warning := lost_states(geometry.engine, stores_tails=not is_simple)) is not None:
            logger.warning("%s", warning)
        if is_simple:
            return
        if read_stack(vllm_config.kv_transfer_config.kv_connector_extra_config).layout == "canonical":
            geometry = geometry_of(vllm_config, kv_cache_config, canonical=True, stages=self.stages)
            if is_worker and geometry.heads and geometry.copies > 1 and not vllm_config.model_config.use_mla:
                check_copies(model_of(sys._getframe(1)), geometry.heads.shards)
        self._spec = _build_spec(vllm_config, kv_cache_config, geometry)
        if is_worker:
            self._spec.mark = worker_mark(self._spec.model, vllm_config.model_config.hf_config, sys._getframe(1))
            self.worker_half = OffloadingConnectorWorker(
                self._spec, int(kv_cache_config.num_blocks), writes_early=zeroes_early(vllm_config, kv_cache_config)
            )
        else:
            self._start_scheduler(vllm_config, self._spec)
            stack = self._spec.stack
            own = cache_bytes(kv_cache_config, geometry)
            advice = small_tier(
                stack.primary.capacity,
                own,
                leads_on=bool(stack.secondary),
                exclusive=stack.primary.inclusion == "exclusive",
            )
            if stack.advisor and advice is not None:
                logger.warning("%s", advice)

    def _can_identify_adapters(self, lora_config: Any) -> bool:
        """Return True if requests with LoRA adapters may use tiers; log the reason if they may not."""
        if lora_config is None:
            return False
        if self._several_groups:
            # A step cannot take back blocks of such a model after it has computed with another adapter.
            logger.warning("requests with LoRA adapters use no tier: the model has several groups of KV caches")
            return False
        if getattr(lora_config, "enable_tower_connector_lora", False):
            logger.warning(
                "requests with LoRA adapters use no tier: with enable_tower_connector_lora, vLLM caches what an "
                "adapter makes of an image under the adapter's name, also after it was replaced"
            )
            return False
        return True

    def _watch_adapters(self, lora_config: Any, geometry: Geometry) -> None:
        """Observe which adapters this worker loads, or log why requests with adapters use no tier."""
        try:
            managers = importlib.import_module("vllm.lora.worker_manager")
            kinds = [managers.WorkerLoRAManager, managers.LRUCacheWorkerLoRAManager]
        except (ImportError, AttributeError) as error:
            logger.warning("the loading of LoRA adapters cannot be observed: their requests use no tier (%s)", error)
            return
        self._adapter_loads = AdapterLoads(lora_config, geometry.engine.engine_id, reads=geometry.rank == 0)
        self._adapter_loads.observe(kinds)

    def _start_simple(self, vllm_config: Any, kv_cache_config: Any, geometry: Geometry, is_worker: bool) -> bool:
        """Build the half for mode simple and return True, if the stack selects that mode."""
        chosen = simple_options(vllm_config.kv_transfer_config.kv_connector_extra_config, geometry.engine.world_size)
        if chosen is None:
            return False
        check_one_stage(vllm_config.parallel_config)
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
            if self._identifies_adapters:
                self._adapters = AdapterNames()
            logger.info(
                "simple scheduler, %s: %d CPU blocks of %d bytes per worker",
                "lazy" if chosen.lazy_offload else "eager",
                half.cpu_config.num_blocks,
                half.cpu_config.block_bytes,
            )
        return True

    def _start_scheduler(self, vllm_config: Any, spec: TieringOffloadingSpec) -> None:
        persistent = any(tier_definition(tier.type).persistent for tier in spec.stack.secondary)
        try:
            marks = spec.worker_marks()
            if not spec.rows_are_shared:
                raise RegionError(
                    f"not all {spec.engine.world_size} worker(s) share the CPU tier's memory with the scheduler: "
                    "all of them must be on this host, with one /dev/shm; with machine.keep_rows, start the engine "
                    "again if the service has ended meanwhile"
                )
            if persistent:
                self._identification = spec.identify = Identification(spec.model, vllm_config, marks)
                self._identification.start()
            self.scheduler_half = OffloadingConnectorScheduler(
                spec,
                enable_kv_cache_events=_publishes_events(vllm_config),
                engine_events=engine_events(kv_cache_utils, vllm_config),
            )
            if self._identifies_adapters:
                self._adapters = AdapterVariants(self.scheduler_half)
        except BaseException:
            self.shutdown()
            raise

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost store is only a later miss."""
        return False

    def get_kv_connector_stats(self) -> TieringConnectorStats | None:
        """Return new statistics, or None.

        A worker returns its transfers. The scheduler returns the tiers' counters at the times of
        :class:`~tiering.connector.reports.TierReports`.
        """
        if self.worker_half is not None:
            transfers = self.worker_half.get_kv_connector_stats()
            return None if transfers is None else TieringConnectorStats(transfers.data)
        half = self.scheduler_half or self._no_scheduler()
        if half.states and time.monotonic() < self._reports.next_at:
            return None
        busy = bool(half.states) or half.has_pending_work()
        return self._reports.take(half.get_stats()) if self._reports.is_due(busy) else None

    def shutdown(self) -> None:
        """Wait for copies, drain the tiers, and release the memory. May be called twice."""
        if self._identification is not None:
            self._identification.stop()
        if self.worker_half is not None:
            self.worker_half.shutdown()
        if self.scheduler_half is not None:
            self.scheduler_half.shutdown()
        if self._adapter_loads is not None:
            self._adapter_loads.close()
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
        return prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _stages_here(worker: Any, engine_id: str) -> tuple[Any, ...]:
    """Return the configurations of all pipeline stages, in the process of vLLM's ``worker``."""
    return _built[engine_id, str(KVConnectorRole.WORKER)].stages


def _build_spec(vllm_config: Any, kv_cache_config: Any, geometry: Geometry) -> TieringOffloadingSpec:
    """Return the spec.

    Until the scheduler's side has identified the weights, the model's identity is unique to this engine.
    """
    return TieringOffloadingSpec(
        geometry.engine,
        vllm_config.kv_transfer_config.kv_connector_extra_config,
        model=model_identity(vllm_config, kv_cache_config, geometry),
        group_bytes=geometry.group_bytes,
        rank=geometry.rank,
        copies=geometry.copies,
        stage_bytes=geometry.stage_bytes,
        heads=geometry.heads,
        replica=geometry.replica,
        enable_events=_publishes_events(vllm_config),
    )


def _hands_over_states() -> bool:
    """Return True if this vLLM names the blocks that have the states which its prefix cache keeps."""
    described = getattr(scheduler_output, "KVConnectorBlockState", None)
    return "boundary_state_offloads" in getattr(described, "__annotations__", {})


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
    note_files(sys._getframe(1))
    return _connector_class
