"""The class that vLLM's own tiering loads: a secondary tier that is a whole stack of this project.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KVTieringTier", "module_path": "tiering.engines.vllm_tier",
          "config": "stack.yaml"}]}}'

The stack's ``primary`` is memory of this project's own, through which all blocks pass
(:mod:`tiering.engines.vllm_tier.manager_thread`).
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import vllm
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering import base as tiers

from tiering.config.inline import read_tier
from tiering.config.registry import tier_definition
from tiering.config.stack import open_manager
from tiering.config.stack_file import StackConfig
from tiering.engines.mailbox import started
from tiering.engines.vllm.logging import share_logging
from tiering.engines.vllm.lookup import StartupError
from tiering.engines.vllm.new_weights import WeightWatch
from tiering.engines.vllm.stages import core_of
from tiering.engines.vllm_tier.identity import Identified, identify, unidentified
from tiering.engines.vllm_tier.interface import (
    configurations,
    context_of,
    event_for,
    facts,
    groups_of,
    job_of,
    made,
)
from tiering.engines.vllm_tier.manager_thread import Answers, ManagerThread
from tiering.engines.vllm_tier.metrics import TierCounters, definitions
from tiering.errors import ConfigError
from tiering.runtime.forks import inert_in_children
from tiering.secondary.contract import JobResult

logger = logging.getLogger("kv_tiering.vllm")
share_logging(logging.getLogger("vllm"))

_HIT, _MISS, _RETRY = base.LookupResult.HIT, base.LookupResult.MISS, base.LookupResult.RETRY
_NEW = object()
_NOTHING: Answers = {}


class _ForkedTier:
    """The tier in a forked child, without threads: every lookup misses, and every job fails."""

    _results: deque[JobResult]

    def lookup(self, key: Any, req_context: Any) -> Any:
        return _MISS

    def _fail(self, job_metadata: Any) -> None:
        self._results.append(JobResult(job_metadata.job_id, False, (), 0, 0.0))

    def _do_nothing(self, *_: Any) -> None: ...

    def on_new_request(self, req_context: Any) -> Any:
        return base.RequestOffloadingContext()

    submit_store = submit_load = _fail
    touch = on_request_finished = on_schedule_end = drain_jobs = shutdown = _do_nothing


class KVTieringTier(tiers.SecondaryTierManager):  # type: ignore[misc]
    """A stack of tiers behind vLLM's CPU tier.

    Args:
        offloading_spec: vLLM's summary of its configuration.
        primary_kv_view: rows of vLLM's CPU tier.
        tier_type: name of the tier in vLLM's dictionary.
        backpressure_detector: vLLM's detector of slow stores; default: none.
        words: the other words of vLLM's dictionary: ``config`` or the words of a stack, and ``locality``.

    Raises:
        TieringError: the dictionary is invalid, or there is too little memory. Raised at the start.
    """

    medium = base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **words: Any,
    ) -> None:
        further = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(
            offloading_spec=offloading_spec, primary_kv_view=primary_kv_view, tier_type=tier_type, **further
        )
        stack = read_tier(words)
        rows = np.asarray(primary_kv_view).view(np.uint8)
        config = offloading_spec.config
        found = _identified(offloading_spec, rows.shape[1], sys._getframe(1))
        publishes = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        persistent = any(tier_definition(tier.type).persistent for tier in stack.secondary)
        self._identification = found.identification if persistent else None
        self._answers: dict[str, Answers] = {}
        self._asked: dict[str, list[Any]] = {}
        self._undecided: set[str] = set()
        """Requests with undecided lookups in the present step."""
        self._refused: deque[JobResult] = deque()
        self._keeps_blocks = stack.keep_secondary
        self._reset_in: set[str] = set()
        """Requests that were open at a reset, whose blocks vLLM stores again.

        Their KV may be older than the weights.
        """
        if self._identification is not None:
            self._identification.start()
        try:
            manager = open_manager(
                stack,
                [rows.shape[1]] * groups_of(config),
                found.model,
                replica=found.replica,
                enable_events=publishes,
                identify=found if persistent else None,
            )
            further = {"prefix_groups": found.prefix_groups, "reads_events": publishes}
            self._thread = started(ManagerThread, stack, manager, rows=rows, **further)
        except BaseException:
            self._stop_identification()
            raise
        if persistent and found.reason:
            logger.warning("%s; no tier that outlives the process is used", found.reason)
        _watch_weights(sys._getframe(1))
        self._results = self._thread.results
        self._counters = TierCounters()
        self._set_place(stack, words.get("locality"))
        inert_in_children(self, _ForkedTier)

    def _set_place(self, stack: StackConfig, locality: str | None) -> None:
        """Set locality and source of this tier's hits; tiers of several kinds have no common one."""
        remote = {tier_definition(tier.type).distance == "network" for tier in stack.secondary}
        if locality is not None:
            self.locality = base.Locality(locality)
        elif len(remote) == 1:
            self.locality = base.Locality.REMOTE if remote == {True} else base.Locality.LOCAL
        sources = getattr(tiers, "CacheHitSource", None)
        if sources is not None and remote != {False}:
            self.cache_hit_source = sources.EXTERNAL_UNSPECIFIED  # vLLM has no source for object stores

    def on_new_request(self, req_context: Any) -> Any:
        self._answers[req_context.req_id] = self._thread.begin(context_of(req_context))
        return base.RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> Any:
        answers = self._answers.get(req_context.req_id, _NOTHING)
        found = answers.get(key, _NEW)
        if found is True:
            return _HIT
        if found is False or answers is _NOTHING or self._thread.failed:
            return _MISS
        if found is _NEW:
            answers[key] = None
            self._asked.setdefault(req_context.req_id, []).append(key)
        self._undecided.add(req_context.req_id)
        return _RETRY

    def on_schedule_end(self, context: Any) -> None:
        if self._asked:
            asked, self._asked = self._asked, {}
            for req_id, keys in asked.items():
                self._thread.look_up(req_id, keys)
        if self._undecided:
            undecided, self._undecided = self._undecided, set()
            self._thread.end_step(undecided)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        self._thread.touch(tuple(keys), context_of(req_context))

    def on_request_finished(self, req_context: Any) -> None:
        self._asked.pop(req_context.req_id, None)
        self._reset_in.discard(req_context.req_id)
        if self._answers.pop(req_context.req_id, None) is not None:
            self._thread.finish(context_of(req_context))

    def submit_store(self, job_metadata: Any) -> None:
        if job_metadata.req_context.req_id in self._reset_in:
            self._refuse(job_metadata)
        else:
            self._submit(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        answers = self._answers.get(job_metadata.req_context.req_id, _NOTHING)
        for key in job_metadata.keys:  # a later lookup of the same block begins anew
            answers.pop(key, None)
        self._submit(job_metadata)

    def _submit(self, job_metadata: Any) -> None:
        if self._thread.failed:
            self._refuse(job_metadata)
        else:
            self._thread.submit(job_of(job_metadata))

    def _refuse(self, job_metadata: Any) -> None:
        self._refused.append(JobResult(job_metadata.job_id, False, (), 0, 0.0))

    def get_finished_jobs(self) -> Iterable[Any]:
        return [made(tiers.JobResult, **result._asdict()) for result in _taken(self._refused, self._results)]

    def drain_jobs(self) -> None:
        """Leave the epoch, because vLLM resets its cache, and return when vLLM's rows are untouched.

        No job waits for a medium, so this takes milliseconds whatever the media do. Requests that are open now store
        nothing any more, because their KV may be older than the weights.
        """
        self._thread.drain()
        if not self._keeps_blocks:
            self._reset_in.update(self._answers)
        self._asked.clear()
        for answers in self._answers.values():
            answers.clear()

    def shutdown(self) -> None:
        """Store what is queued within the stack's ``shutdown_deadline``, and release the memory."""
        self._stop_identification()
        self._thread.stop()

    def _stop_identification(self) -> None:
        if self._identification is not None:
            self._identification.stop()

    def take_events(self) -> Iterable[Any]:
        return [
            event_for(base.OffloadingEvent, base.Medium, base.Locality, event) for event in _taken(self._thread.events)
        ]

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Check the dictionary of a tier before the engine starts, and return the definitions of its metrics.

        Raises:
            StartupError: the dictionary is invalid.
        """
        try:
            read_tier(extra_config)
        except ConfigError as error:
            raise StartupError(str(error)) from None
        return definitions(base)

    def get_stats(self) -> Any:
        return self._counters.take(self._thread.stats)


def _taken(*queues: deque[Any]) -> Iterator[Any]:
    """Yield and remove what is in queues that another thread fills."""
    for queue in queues:
        for _ in range(len(queue)):
            yield queue.popleft()


def _watch_weights(caller: FrameType | None) -> None:
    """Reset vLLM's connector, its CPU tier and this one, once new weights were written.

    vLLM stores again what it finds in its own cache, also for requests that begin after the weights, so that the
    connector is reset once more when that cache has been emptied.
    """
    core = core_of(caller)

    def reset() -> None:  # later: the core has no scheduler yet
        core.scheduler.connector.reset_cache()

    WeightWatch(core, reset, twice=True)


def _identified(spec: Any, row_bytes: int, caller: FrameType | None) -> Identified:
    """Return the identity of the model whose rows vLLM keeps."""
    from tiering.engines.vllm.model import geometry_of, model_identity

    config = spec.config
    described = facts(config, row_bytes)
    vllm_config, kv_cache_config = configurations(spec, caller)
    if vllm_config is None or kv_cache_config is None:
        reason = "vLLM's configuration is not found, so the model's weights are not known"
        return unidentified(str(config.engine_id), described, reason)
    if int(getattr(config.parallel, "pp_size", 1)) > 1:
        reason = "with pipeline parallelism, vLLM's scheduler sees the layers of the first stage only"
        return unidentified(str(config.engine_id), described, reason)
    try:
        geometry = geometry_of(vllm_config, kv_cache_config)
        model = model_identity(vllm_config, kv_cache_config, geometry)
    except ConfigError as error:
        return unidentified(str(config.engine_id), described, str(error))
    rows = "; ".join([f"rows of vLLM {vllm.__version__}", *described])
    return identify(vllm_config, kv_cache_config, geometry, model, rows)
