"""The scheduler side of the connector: the methods that vLLM's scheduler calls.

Import this module after the checks of :mod:`tiering.engines.vllm.connector`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tiering.connector.half import ASK_AGAIN, NO_TOKENS
from tiering.connector.metadata import NOTHING_TO_DO, OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.engines.vllm.events import EventConverter
from tiering.engines.vllm.kept_groups import KeptGroups
from tiering.engines.vllm.lora import AdapterGuard
from tiering.engines.vllm.resets import LoadWaits
from tiering.errors import ConfigError
from tiering.simple.metadata import SimpleCPUOffloadMetadata
from tiering.simple.scheduler import SimpleCPUOffloadScheduler

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before 0.32 does not distinguish hits by source
    CacheHitSource = None

_HIT_SOURCES = {"CPU": "HOST", "MEMORY": "HOST", "DISK": "DISK"}
"""Medium → name of vLLM's hit source. vLLM has no source for object stores."""

LOOKUP_PATIENCE = 5e-3
"""Most seconds for which a step without work rests while lookups are pending and no copy runs.

Each further step takes the engine half a millisecond or more, and a caller that steps in a loop keeps the interpreter
from the threads of the tiers. Whoever sends a request meanwhile waits as long.
"""

ASYNC_LOOKUP_PATIENCE = 1e-3
"""The same with asynchronous scheduling, where the output of an earlier step may wait for this one."""

_vllm_event = EventConverter(kv_events)


class SchedulerSide(KVConnectorBase_V1):  # type: ignore[misc]
    """The methods of the connector that vLLM's scheduler calls."""

    scheduler_half: OffloadingConnectorScheduler | SimpleCPUOffloadScheduler | None = None
    """The scheduler half, for the mode of the stack; None in a worker's connector."""
    _adapters: AdapterGuard
    _waits: LoadWaits
    _kept: KeptGroups | None = None
    """The groups that are offloaded; None: all."""
    _lookup_patience: float
    """Most seconds for which a step without work rests; 0: steps do not rest."""

    def _no_scheduler(self) -> NoReturn:
        """Refuse a call of the other side, which has no :attr:`scheduler_half`.

        Every step makes these calls. A property that returned the half would cost each of them another call.
        """
        raise ConfigError("a method of vLLM's scheduler was called on a worker's connector")

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        (self.scheduler_half or self._no_scheduler()).bind_gpu_block_pool(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._waits.bind(kv_cache_manager, self.scheduler_half or self._no_scheduler())

    def on_new_request(self, request: Any) -> None:
        (self.scheduler_half or self._no_scheduler()).on_new_request(self._adapters.admit(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        half = self.scheduler_half or self._no_scheduler()
        if not (may_load := self._adapters.may_load(request.request_id)):
            return ASK_AGAIN if may_load is None else NO_TOKENS
        answer = half.get_num_new_matched_tokens(request, num_computed_tokens)
        if answer[0] is None and self._lookup_patience:
            return half.await_answer(request, num_computed_tokens, self._lookup_patience)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        half = self.scheduler_half or self._no_scheduler()
        if self._kept is not None:
            blocks = self._kept.blocks(blocks)
        awaited = half.update_state_after_alloc(request, blocks, num_external_tokens)
        self._waits.allocated(request, awaited)

    def build_connector_meta(self, scheduler_output: Any) -> OffloadingConnectorMetadata | SimpleCPUOffloadMetadata:
        half = self.scheduler_half or self._no_scheduler()
        step = scheduler_output if self._kept is None else self._kept.step(scheduler_output)
        metadata = half.build_connector_meta(step)
        if metadata is NOTHING_TO_DO and self._lookup_patience and not scheduler_output.total_num_scheduled_tokens:
            half.await_answers(self._lookup_patience)
        return self._adapters.with_checks(metadata, scheduler_output.num_scheduled_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.finished_recving:
            self._waits.received(connector_output.finished_recving)
        report = connector_output.kv_connector_worker_meta
        if report is not None and report.adapters:
            self._adapters.report(report.adapters)
        (self.scheduler_half or self._no_scheduler()).update_connector_output(connector_output)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return the number of loaded tokens per vLLM hit source; vLLM 0.32 and newer call this method."""
        if not isinstance(self.scheduler_half, OffloadingConnectorScheduler):
            return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}
        found: dict[Any, int] = {}
        for medium, tokens in self.scheduler_half.get_hit_sources(request, num_external_tokens).items():
            source = getattr(CacheHitSource, _HIT_SOURCES.get(medium, "EXTERNAL_UNSPECIFIED"))
            found[source] = found.get(source, 0) + tokens
        return found

    def register_finished_partial_tail(
        self, request: Any, block_ids: tuple[list[int], ...], partial_tail_offloads: list[tuple[int, int, int]]
    ) -> bool:
        """Store the tail that a request ends at; its blocks can be freed at once, as for all stores."""
        if isinstance(self.scheduler_half, OffloadingConnectorScheduler):
            tail = partial_tail_offloads if self._kept is None else self._kept.handed(partial_tail_offloads)
            self.scheduler_half.store_last_tail(request, tail)
        return False

    def request_finished(
        self, request: Any, block_ids: list[int] | tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._waits.finished(request.request_id)
        self._adapters.drop(request.request_id)
        return (self.scheduler_half or self._no_scheduler()).request_finished(request, block_ids)

    request_finished_all_groups = request_finished

    def has_pending_push_work(self) -> bool:
        """Return True while copies or jobs of tiers run.

        vLLM must then keep stepping, because the connector sees them end only in steps.
        """
        return (self.scheduler_half or self._no_scheduler()).has_pending_work()

    def take_events(self) -> Iterable[Any]:
        events = (self.scheduler_half or self._no_scheduler()).take_events()
        return [_vllm_event(event) for event in events] if events else ()

    def reset_cache(self) -> bool | None:
        """Drop all blocks and return True: this engine never again serves a block that was stored before.

        vLLM treats False as a failure: a pause that clears caches would end with status 500 and leave the engine
        paused. A tier whose medium has not confirmed the reset yet is no failure; the tier serves no blocks until then,
        and logs that.
        """
        self._adapters.reset()
        (self.scheduler_half or self._no_scheduler()).reset_cache()
        return True
