"""The scheduler half of the connector: looks up hits, orders loads and stores, and completes both.

Engines call the methods in this order. In each step, for each waiting request:
:meth:`~OffloadingConnectorScheduler.get_num_new_matched_tokens` and, if the request's blocks could be allocated,
:meth:`~OffloadingConnectorScheduler.update_state_after_alloc`. Then
:meth:`~OffloadingConnectorScheduler.build_connector_meta` once, also in steps without tokens. Afterwards
:meth:`~OffloadingConnectorScheduler.request_finished` for requests that end, and
:meth:`~OffloadingConnectorScheduler.update_connector_output` with the workers' reports.

Three rules keep KV correct:

- Every GPU block that a job reads or writes is fenced until all workers have reported the job
  (:class:`tiering.connector.jobs.BlockFences`).
- The step's metadata lists the jobs that still use blocks which the step newly allocates. The workers end these jobs
  before the step touches the KV cache.
- A store does not become readable if a load of any connector failed to fill its blocks or blocks before them. The same
  holds for blocks from before a reset (:mod:`tiering.offload.suspects`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from tiering.api.engine import OffloadingSpec
from tiering.api.manager import MEDIUM_CPU
from tiering.api.masking import shown_name
from tiering.api.request import OffloadPolicy, ReqContext
from tiering.api.request_policy import NEITHER, NEITHER_PARAMS
from tiering.connector.completions import Completions
from tiering.connector.counters import SchedulerCounters, counts_seconds, report
from tiering.connector.groups import build_groups, interleave
from tiering.connector.hits import HitSearch
from tiering.connector.jobs import NO_JOBS, BlockFences, JobTable
from tiering.connector.loads import LoadPlanner
from tiering.connector.metadata import NOTHING_TO_DO, OffloadingConnectorMetadata, ReqId, TransferOrder
from tiering.connector.requests import FencedTables, Match, RequestState
from tiering.connector.shared_loads import SharedLoads, sharer_wait
from tiering.connector.stores import StorePlanner
from tiering.errors import ConfigError
from tiering.offload.event_types import EngineEvents, KVCacheEvent, OffloadingKVEventsConfig
from tiering.offload.events import OffloadingEventsTracker
from tiering.offload.protocols import AllocatedBlocks, ConnectorOutput, EngineRequest, SchedulerOutput
from tiering.offload.requests import NEVER, GroupState, policy_of
from tiering.offload.suspects import EngineBlockPool
from tiering.replay.recorder import TraceRecorder
from tiering.runtime.ratelimit import LimitedWarning

logger = logging.getLogger("kv_tiering.connector")

NO_TOKENS: tuple[int, bool] = (0, False)
"""Answer to a match: no tokens can be loaded."""
ASK_AGAIN: tuple[None, bool] = (None, False)
"""Answer to a match: not known yet, the engine asks again at a later step."""


class OffloadingConnectorScheduler:
    """Scheduler half of the connector for one engine; drives the manager of ``spec``.

    All calls come from the scheduler's thread. ``spec.extra_config`` may contain ``sharer_wait`` (a duration, 0 for
    none; default: 1 second) and ``self_describing_kv_events`` (default: False).

    Args:
        spec: configuration of the tiers and of the engine.
        enable_kv_cache_events: True if the engine publishes KV events; default: False.
        engine_events: form of the engine's own KV events; default: hashes are published unchanged.
        clock: returns monotonic seconds.

    Raises:
        ConfigError: a KV-cache group cannot be offloaded; raised before the manager is built.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        *,
        enable_kv_cache_events: bool = False,
        engine_events: EngineEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = build_groups(spec)
        """KV-cache groups as they are offloaded."""
        longest_wait = sharer_wait(spec)
        config = OffloadingKVEventsConfig(
            enable_kv_cache_events, bool(spec.extra_config.get("self_describing_kv_events", False))
        )
        self._publishes_events = config.enable_kv_cache_events
        self._describes_events = config.enable_kv_cache_events and config.self_describing_kv_events
        self._spec = spec
        self.events = OffloadingEventsTracker(config, engine_events)
        """Tracker of KV events."""
        self.manager = spec.get_manager()
        """Manager of the tiers."""
        self._search = HitSearch(self.groups, self.manager)
        self._jobs = JobTable(spec.engine.world_size)
        self.fences = BlockFences()
        """Fences on the GPU blocks that jobs use."""
        self._pool: EngineBlockPool | None = None
        self.loads = LoadPlanner(self.groups, self.manager, self._search, self._jobs, self.fences, clock)
        """Planner of loads."""
        self._stores = StorePlanner(self.groups, self.manager, self._jobs, self.fences, self.events, clock)
        self.states: dict[ReqId, RequestState] = {}
        """Requests that have not ended, by id."""
        self._storing: set[ReqId] = set()
        """Ids of the requests that may have blocks to store soon, or may not be stored at present.

        A request enters the set with :meth:`~tiering.connector.requests.RequestState.look_again`. It leaves the set
        when it has nothing to store for as long as it runs, as most requests that decode.
        """
        self._tables = FencedTables(self.groups, self.states)
        self._counters = SchedulerCounters()
        self._sharers = SharedLoads(self.loads, self._search, longest_wait, self._counters, clock)
        self._missed_blocks = 0
        """Blocks that the first match of a request probed and that the primary tier did not hold."""
        self._completions = Completions(
            self.manager,
            self._jobs,
            self.fences,
            self.loads,
            self.events,
            self.states,
            self._tables,
            self._counters,
            clock,
        )
        recording, size = spec.recording, self.loads.measure.offloaded_block_size
        self._recorder = None if recording is None else TraceRecorder(recording, size)
        self._step = 0
        self._new_epochs = self.manager.new_epochs
        self._untaken_events: list[KVCacheEvent] = []
        self._warn_policy = LimitedWarning(logger, clock)
        self._is_shut_down = False

    # --------------------------------------------------------------------------------------------------------- requests

    def bind_gpu_block_pool(self, gpu_block_pool: EngineBlockPool) -> None:
        """Set the engine's own block pool, which shows after a reset the blocks that the engine's cache holds.

        Without a pool, all GPU blocks are suspects after a reset until they are filled again.
        """
        self._pool = gpu_block_pool

    @counts_seconds
    def on_new_request(self, request: EngineRequest) -> None:
        """Register a request; later calls for the same request change nothing."""
        if request.request_id not in self.states:
            self._admit(request)

    @counts_seconds
    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded for a request, and True if they are loaded asynchronously.

        Repeated calls change no state, but the result may change as blocks come and go. The result may cover the full
        prompt: the engine then recomputes the last token by itself.

        Args:
            request: the waiting request.
            num_computed_tokens: leading tokens that the engine's own prefix cache holds.

        Returns:
            The number of tokens beyond ``num_computed_tokens``, and True if that number is not 0. (None, False) if the
                result is not known yet: call again at a later step.
        """
        state = self.states.get(request.request_id) or self._admit(request)
        question = (num_computed_tokens, request.num_tokens)
        if question == state.open_question and self.manager.still_pending(state.ctx):
            return ASK_AGAIN
        state.open_question = state.match = None
        if state.has_blocks or state.scheduled:
            self._tables.start_over(state)
        state.found_tokens = state.filled_tokens = num_computed_tokens
        state.extend_keys(self.groups)
        if not state.touched:
            state.touched = True
            self._counters.queried_tokens += max(0, request.num_tokens - num_computed_tokens)
            if state.may_load:
                measure = self.loads.measure
                known = len(state.keys[measure.group_idx])
                state.asked_blocks = max(0, known - num_computed_tokens // measure.offloaded_block_size)
                self._counters.queried_blocks += state.asked_blocks
            if any(state.keys):
                self.manager.touch(interleave(state.keys), state.ctx)
        if not state.may_load or self._completions.orphans:
            return NO_TOKENS
        limit = request.num_tokens - self._search.tokens_to_leave
        if state.policy.max_load_tokens is not None:
            limit = min(limit, state.policy.max_load_tokens)
        hit = self._search.longest(state.keys, num_computed_tokens, limit, state.ctx)
        if self._describes_events and hit.tokens > num_computed_tokens:
            self._record_lookup(state, num_computed_tokens, hit.tokens)
        if hit.pending:
            state.open_question = question
            return ASK_AGAIN
        if hit.tokens <= num_computed_tokens:
            return NO_TOKENS
        if self._sharers.holds_up(state, num_computed_tokens, hit.tokens):
            return ASK_AGAIN
        state.match = Match(num_computed_tokens, hit.tokens)
        return hit.tokens - num_computed_tokens, True

    @counts_seconds
    def update_state_after_alloc(
        self, request: EngineRequest, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Record the blocks that were allocated to a request, and queue a load into them.

        Engines call this method twice for an asynchronous load: with the number of tokens, and with 0 when the request
        is scheduled.

        Args:
            request: the request.
            blocks: all GPU blocks of the request.
            num_external_tokens: tokens to load; 0: none.
        """
        state = self.states.get(request.request_id) or self._admit(request)
        self._tables.allocated(state, blocks.get_block_ids())
        if num_external_tokens > 0:
            state.filled_tokens += num_external_tokens
            keys = self.loads.plan(state, num_external_tokens)
            state.sources = self.manager.count_sources(keys, state.ctx)
            self._counters.loads += 1
            self._counters.hit_tokens += num_external_tokens
            hits = min(state.asked_blocks, len(keys) - sum(state.sources.values()))
            self._counters.hit_blocks += hits
            state.asked_blocks -= hits
            state.match = None
        self._count_misses(state)

    def get_hit_sources(self, request: EngineRequest, num_external_tokens: int) -> dict[str, int]:
        """Return the number of tokens of the last planned load by the medium that they come from.

        The medium "CPU" counts tokens that the primary tier held. Tokens that were promoted for this request count for
        the medium of their secondary tier. Media without tokens are left out.

        Args:
            request: the request whose load was planned last.
            num_external_tokens: tokens of that load.
        """
        state = self.states.get(request.request_id)
        left, sources = num_external_tokens, dict[str, int]()
        if state is not None:
            size = self.loads.measure.offloaded_block_size
            for medium, blocks in state.sources.items():
                sources[medium] = tokens = min(left, blocks * size)
                left -= tokens
        sources[MEDIUM_CPU] = left
        return {medium: tokens for medium, tokens in sources.items() if tokens}

    @counts_seconds
    def request_finished(self, request: EngineRequest, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Record that a request has ended; return (False, None): its blocks can be freed at once.

        Freeing is never delayed, and no request is ever reported as sent. A fence outlives its request, so a step that
        reuses a fenced block waits for the copy. A load in flight is still reported as received.

        Args:
            request: the request that has ended, for any reason.
            block_ids: GPU blocks of the request; not used.
        """
        return self._finish(request.request_id)

    @counts_seconds
    def request_finished_all_groups(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Record that a request has ended, as :meth:`request_finished`, for several KV-cache groups."""
        return self._finish(request.request_id)

    # ------------------------------------------------------------------------------------------------------------ steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Return the step's loads and stores, and the jobs that must end before the step.

        The call also ends the manager's step. ``request.num_computed_tokens`` has not advanced yet: after the step the
        value is larger by the scheduled tokens.

        Args:
            scheduler_output: the schedule of the step.
        """
        began = perf_counter()
        self._step += 1
        taken = self._tables.take(scheduler_output)
        flush = self.fences.conflicts(taken) if taken else NO_JOBS
        if self._completions.orphans:
            flush |= self._completions.orphans
        # The blocks of the loads are fenced before any store is planned.
        ordered = self.loads.take() if self.loads.has_orders else None
        stores: dict[ReqId, TransferOrder] = {}
        if self._stores.last:
            stores, withdrawn = self._stores.take_last(flush, self.states)
            for job in withdrawn:
                self._completions.ended(job)
            flush = flush.difference(job.job_id for job in withdrawn)
        if self._storing:
            self._plan_stores(scheduler_output.num_scheduled_tokens, stores)
        if stores or flush:
            self._counters.stores += len(stores)
            self._counters.jobs_flushed += len(flush)
        self.manager.on_schedule_end()
        if self.manager.new_epochs != self._new_epochs:
            self._new_epochs = self.manager.new_epochs
            self._forget_held()
        metadata = NOTHING_TO_DO
        if ordered is not None:
            loads, failed_loads = ordered
            metadata = OffloadingConnectorMetadata(loads, stores, flush, failed_loads)
        elif stores or flush:
            metadata = OffloadingConnectorMetadata(reqs_to_store=stores, jobs_to_flush=flush)
        self._counters.scheduler_seconds += perf_counter() - began
        return metadata

    def _plan_stores(self, scheduled: Mapping[ReqId, int], stores: dict[ReqId, TransferOrder]) -> None:
        """Add the orders for the blocks that the step completes to ``stores``.

        Args:
            scheduled: number of tokens that the step computes, by request.
            stores: orders by request.
        """
        states, storing, may_store = self.states, self._storing, not self._completions.orphans
        for req_id, tokens in scheduled.items():
            if req_id not in storing or (state := states.get(req_id)) is None:
                continue
            if state.invalid_from is not None and not self._tables.has_gone_back(state, tokens):
                continue
            if may_store and state.request.num_computed_tokens + tokens >= state.next_store_at:
                order = self._stores.plan(state, tokens, self._step)
                if order is not None:
                    stores[req_id] = order
            if state.next_store_at == NEVER and state.invalid_from is None:
                storing.discard(req_id)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Process the workers' reports; engines may skip the call if there are none.

        Workers report a store in its step or later, and the blocks that the step's loads did not fill likewise.
        Unfilled blocks are processed before any store becomes readable.

        Args:
            connector_output: reports of one step, merged over the workers.
        """
        output = connector_output
        if output.kv_connector_worker_meta is not None or output.invalid_block_ids or output.finished_recving:
            self._process(output)

    @counts_seconds
    def _process(self, output: ConnectorOutput) -> None:
        self._completions.process(output)

    # ------------------------------------------------------------------------------------------------------------- rest

    def take_events(self) -> list[KVCacheEvent]:
        """Return the KV events since the last call, in an order that a consumer can apply."""
        return self._take_events() if self._publishes_events else []

    @counts_seconds
    def _take_events(self) -> list[KVCacheEvent]:
        untaken, self._untaken_events = self._untaken_events, []
        return untaken + self.events.take_events(self.manager.take_events())

    def has_pending_work(self) -> bool:
        """Return True while jobs are in flight.

        The engine must then keep stepping, also without requests. Otherwise the ends of the jobs are never collected.
        """
        return bool(self._jobs) or self.manager.has_pending_work()

    def reset_cache(self) -> bool:
        """Forget all held blocks, so that no block stored before is served again.

        Running requests continue, but the KV that they have now is from before the reset. None of their blocks are
        stored until the requests are preempted. Blocks that requests find in the engine's own cache, and blocks
        computed on top of them, are not stored either, unless that cache was emptied too.

        Copies in flight end before the next step. Until all of them have ended, no block is loaded or stored. The
        manager therefore cannot mistake the end of an old copy for the end of a new copy of the same block.

        Returns:
            True if every tier guarantees that no block stored before is served again.
        """
        complete = self.manager.reset_cache()
        self._forget_held()
        return complete

    def copied_blocks(self) -> set[int]:
        """Return the GPU blocks that copies hold references on: none, because copies are fenced."""
        return set()

    def give_up_blocks(self, req_ids: Iterable[ReqId]) -> None:
        """Let the engine take back all GPU blocks, also those that loads are filling.

        The fences remain: a step that reuses such a block waits for the copy.

        Args:
            req_ids: requests that were being loaded; they load no more unless they are preempted.
        """
        for req_id in req_ids:
            if (state := self.states.get(req_id)) is not None:
                state.may_load = False

    def get_stats(self) -> Mapping[str, Any]:
        """Return the manager's statistics and the connector's counters.

        ``tiers`` includes the primary tier. ``connector`` contains the fields of
        :class:`tiering.connector.counters.SchedulerCounters`.
        """
        counters = self._counters
        counters.hits_shrunk, counters.stores_refused = self.loads.shrunk_hits, self._stores.refused_offers
        counters.snapshots_dropped = self.events.snapshots_dropped
        if self._recorder is not None:
            counters.requests_recorded, counters.records_dropped = self._recorder.written, self._recorder.dropped
        counters.jobs_active, counters.requests_active = len(self._jobs), len(self.states)
        return report(self.manager.get_stats(), counters, self._missed_blocks)

    def shutdown(self) -> None:
        """Shut the manager down, and write the requests that are to be recorded.

        Repeated calls are harmless. Engines may also never call this method: no durable state depends on it.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        recorder, recording, start = self._recorder, self._spec.recording, time.monotonic()
        if recorder is not None:
            recorder.stop()
        try:
            self.manager.shutdown()
        finally:
            if recorder is not None and recording is not None:
                recorder.join(max(0.0, start + recording.shutdown_deadline - time.monotonic()))

    # -------------------------------------------------------------------------------------------------------- internals

    def _forget_held(self) -> None:
        """Forget all held blocks, which the manager has just dropped; see :meth:`reset_cache`."""
        self._completions.abandon_all()
        self._tables.reset(self._pool)
        self.loads.forget_keys()
        # The manager's events until now need the snapshots, which the reset of the tracker drops.
        self._untaken_events += self.events.take_events(self.manager.take_events())
        self.events.reset()

    def _admit(self, request: EngineRequest) -> RequestState:
        """Register a request with the manager; a request with invalid parameters neither loads nor stores."""
        params = getattr(request, "kv_transfer_params", None)
        try:
            policy = policy_of(request)
        except ConfigError as error:
            self._warn_policy("request %s neither loads nor stores KV: %s", shown_name(request.request_id), error)
            policy, params = NEITHER, NEITHER_PARAMS
        ctx = ReqContext(request.request_id, params)
        answer = self.manager.on_new_request(ctx)
        state = RequestState(
            request=request,
            ctx=ctx,
            policy=policy,
            request_level=answer.policy is OffloadPolicy.REQUEST_LEVEL,
            storing=self._storing,
            prompt_only=self._spec.offload_prompt_only,
            groups=[GroupState() for _ in self.groups],
            may_load=policy.load,
            arrived=0.0 if self._recorder is None else self._recorder.now(),
        )
        self.states[request.request_id] = state
        return state

    def _count_misses(self, state: RequestState) -> None:
        """Count the blocks that a request has asked for and the primary tier did not have for its load."""
        self._missed_blocks += state.asked_blocks
        state.asked_blocks = 0

    def _record_lookup(self, state: RequestState, computed: int, end: int) -> None:
        """Record the blocks before token ``end`` for later KV events, while their request is alive."""
        for group, keys in zip(self.groups, state.keys, strict=True):
            size = group.offloaded_block_size
            self.events.record_lookup(state.request, group, keys, computed // size, min(end // size, len(keys)))

    def _finish(self, req_id: ReqId) -> tuple[bool, None]:
        state = self.states.pop(req_id, None)
        if state is not None:
            self._storing.discard(req_id)
            self._tables.given_up(state)
            self._count_misses(state)
            if not self._completions.orphans and state.scheduled and state.invalid_from is None and state.policy.store:
                self._stores.plan_last(state)
            if state.stale_blocks:
                self._completions.refresh_stored(state)
            if self._recorder is not None and state.scheduled:
                request, keys = state.request, state.keys[self.loads.measure.group_idx]
                tokens = request.num_prompt_tokens
                self._recorder.record(state.arrived, tokens, request.num_tokens - tokens, keys)
            self.events.request_finished(req_id)
            self.manager.on_request_finished(state.ctx)
        return False, None
