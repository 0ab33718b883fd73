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
  holds for blocks from before a reset (:mod:`tiering.connector.suspects`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from tiering.api.engine import OffloadingSpec
from tiering.api.hints import NO_HINTS
from tiering.api.keys import OffloadKey
from tiering.api.manager import MEDIUM_CPU, OffloadingEvent
from tiering.api.request import OffloadPolicy, ReqContext
from tiering.api.request_policy import NEITHER, RequestPolicy
from tiering.connector.cached_tokens import Cached, CachedTokens, planned
from tiering.connector.completions import Completions
from tiering.connector.counters import counts_seconds
from tiering.connector.described_runs import DescribedRuns
from tiering.connector.engine_cache import EngineCache
from tiering.connector.event_types import EngineEvents, OffloadingKVEventsConfig
from tiering.connector.groups import build_groups, tail_unit
from tiering.connector.half import ASK_AGAIN, SchedulerHalf
from tiering.connector.handed_states import Handed, HandedStates
from tiering.connector.hints import FollowedHints
from tiering.connector.hits import Hit, HitSearch
from tiering.connector.jobs import NO_JOBS, BlockFences, JobTable
from tiering.connector.loads import LoadPlanner
from tiering.connector.lookup_waits import LookupWaits
from tiering.connector.metadata import NOTHING_TO_DO, OffloadingConnectorMetadata, ReqId, TransferOrder
from tiering.connector.metrics import CACHED, MISSES
from tiering.connector.misses import Misses
from tiering.connector.prefill import PrefillSpeed
from tiering.connector.protocols import ConnectorOutput, EngineRequest, SchedulerOutput
from tiering.connector.requests import FencedTables, RequestState
from tiering.connector.stores import StorePlanner
from tiering.connector.suspects import EngineBlockPool
from tiering.connector.tracked import NEVER, GroupState
from tiering.connector.variants import Variant
from tiering.replay.recorder import TraceRecorder

logger = logging.getLogger("kv_tiering.connector")


class OffloadingConnectorScheduler(SchedulerHalf[RequestState]):
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
        groups, engine = build_groups(spec), spec.engine
        self._spec = spec
        self.manager = spec.get_manager()
        """Manager of the tiers."""
        search = HitSearch(groups, self.manager, has_scratch=engine.has_scratch, tail_unit=tail_unit(groups, engine))
        tables = FencedTables(groups, {})
        describes = bool(spec.extra_config.get("self_describing_kv_events", False))
        config = OffloadingKVEventsConfig(enable_kv_cache_events, describes)
        super().__init__(self.manager, tables, search, config, engine_events, logger, clock)
        kept = self.manager.descriptions
        if self._describes_events and kept is not None:
            self.events.described_runs = DescribedRuns(kept, self.events.restore, clock)
        self._fenced = tables
        self._jobs = JobTable(spec.engine.world_size)
        self.fences = BlockFences()
        """Fences on the GPU blocks that jobs use."""
        self._pool: EngineBlockPool | None = None
        self.loads = LoadPlanner(groups, self.manager, search, self._jobs, self.fences, spec, clock)
        """Planner of loads."""
        self._stores = StorePlanner(groups, search.ends, self.manager, self._jobs, self.fences, self.events, clock)
        states, tails = any(group.is_state for group in groups), search.tails
        self._handed = HandedStates(groups, self.manager, self.fences, self._stores, tails) if states else None
        self._storing: set[ReqId] = set()
        """Ids of the requests that may have blocks to store soon, or may not be stored at present.

        A request enters the set with :meth:`~tiering.connector.requests.RequestState.look_again`. It leaves the set
        when it has nothing to store for as long as it runs, as most requests that decode.
        """
        self._completions = Completions(
            self.manager, self._jobs, self.fences, self.loads, self.events, self.states, tables, self._counters, clock
        )
        recording, size = spec.recording, self.measure.offloaded_block_size
        self._recorder = None if recording is None else TraceRecorder(recording, size)
        self._engine_cache: EngineCache | None = None
        self._shows_cache = False
        """True once the manager was asked to hold blocks exclusively, or cannot be."""
        self._hints = FollowedHints(spec, self.manager, self._counters, clock) if spec.hints.actions else None
        self._stores.sessions = None if self._hints is None else self._hints.sessions
        self._misses, publishes = None, self._publishes_events
        if (explaining := spec.explaining) is not None:
            self._misses = Misses(explaining, groups, self.manager, search, clock, publishes=publishes)
        self._prefill = PrefillSpeed(groups, self.manager, clock) if self.manager.gates_loads else None
        self._cached = None if spec.tenant_key is None else CachedTokens(spec.tenant_key)
        self._waits = LookupWaits(self, self.manager, search, self._jobs, self._end_managers_step, clock)
        self._is_preparing = not spec.rows_are_prepared
        """True until the memory of the rows is prepared; requests are computed meanwhile."""
        self._step, self._new_epochs = 0, self.manager.new_epochs
        self._is_shut_down = False

    def bind_gpu_block_pool(self, gpu_block_pool: EngineBlockPool) -> None:
        """Set the engine's own block pool, which shows the blocks that the engine's cache holds.

        Without a pool, all GPU blocks are suspects after a reset until they are filled again. An exclusive CPU tier
        needs a pool with a prefix cache and a free queue; otherwise the tier is inclusive.
        """
        self._pool, self._shows_cache, pool = gpu_block_pool, True, gpu_block_pool
        engine, queue = self._spec.engine, getattr(pool, "free_block_queue", None)
        if not (engine.enable_prefix_caching and hasattr(queue, "fake_free_list_head")):
            self.manager.hold_exclusively(None)
            return
        cache = EngineCache(pool, self.groups, engine.max_batch_tokens, self.manager, self.events, self._counters)
        if self.manager.hold_exclusively(cache.holds, len(pool.blocks) // self._spec.block_size_factor):
            cache.feeds_tiers = self.manager.stores_computed
            self._engine_cache = self._stores.engine_cache = self._fenced.engine_cache = cache
            self._completions.stores = self._stores

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
            size = self.measure.offloaded_block_size
            for medium, blocks in state.sources.items():
                sources[medium] = tokens = min(left, blocks * size)
                left -= tokens
        sources[MEDIUM_CPU] = left
        return {medium: tokens for medium, tokens in sources.items() if tokens}

    def variant_changed(self, variant: Variant) -> None:
        """Follow a variant that was identified, or that is void.

        Requests of a void variant neither load nor store any more. No store in flight becomes readable, because the
        workers may have computed its blocks with other content; the requests that still run offer their blocks again.
        """
        for state in self.states.values():
            if state.variant is variant:
                if variant.is_void:
                    state.policy, state.may_load = NEITHER, False
                state.look_again()
        if variant.is_void:
            self._completions.fail_stores()

    def on_new_request(self, request: EngineRequest) -> None:
        """Register a request; begin its prefetches, and its promotions if the stack has them early."""
        super().on_new_request(request)
        self._waits.arrived(self.states[request.request_id], self._pool)
        if self._spec.promotes_waiting or self._spec.hints.prefetch:
            self._begin_early(self.states[request.request_id])

    @counts_seconds
    def _begin_early(self, state: RequestState) -> None:
        # An adapter's blocks have no names before its files are known.
        if state.touched or state.variant is not None or not state.may_load or self._is_paused():
            return
        own = list[list[OffloadKey]]()
        if self._spec.promotes_waiting or None in state.hints.prefetched:
            state.extend_keys(self.groups)
            limit = state.request.num_tokens - self._search.tokens_to_leave
            if state.policy.max_load_tokens is not None:
                limit = min(limit, state.policy.max_load_tokens)
            full = [group for group in self.groups if group.is_full]
            own = [state.keys[group.group_idx][: limit // group.offloaded_block_size] for group in full]
        if self._hints is not None:
            self._hints.prefetch(state, own)
        if self._spec.promotes_waiting:
            for keys in filter(None, own):
                self.manager.promote_early(keys, state.ctx)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Return the step's loads and stores, and the jobs that must end before the step.

        The call also ends the manager's step. ``request.num_computed_tokens`` has not advanced yet: after the step the
        value is larger by the scheduled tokens.

        Args:
            scheduler_output: the schedule of the step.
        """
        began = perf_counter()
        self._step += 1
        self._waits.end_schedule()
        taken = self._fenced.take(scheduler_output)
        flush = self.fences.conflicts(taken) if taken else NO_JOBS
        cache, walks = self._engine_cache, False
        if cache is not None:
            walks = cache.begin_step(self._step, taken, getattr(scheduler_output, "new_block_ids_to_zero", None) or ())
        if self._completions.orphans:
            flush |= self._completions.orphans
        # The blocks of the loads are fenced before any store is planned.
        ordered = self.loads.take() if self.loads.has_orders else None
        stores: dict[ReqId, TransferOrder] = {}
        if self._stores.last:
            stores, withdrawn = self._stores.take_last(flush, self.states)
            self._completions.end_stores(withdrawn)
            flush = flush.difference(job.job_id for job in withdrawn)
        if self._storing:
            self._plan_stores(scheduler_output.num_scheduled_tokens, stores)
        if cache is not None and (walks or cache.feeds_tiers) and not self._is_paused():
            self._stores.plan_late(cache, stores, walks=walks)
        states = dict[ReqId, TransferOrder]()
        if self._handed is not None and not self._is_paused():
            states = self._handed.plan(scheduler_output, self.states)
        if stores or flush or states:
            self._counters.stores += len(stores) + len(states)
            self._counters.jobs_flushed += len(flush)
        self._end_managers_step()
        if self._misses is not None:
            self._misses.end_step(scheduler_output.scheduled_new_reqs)
        if self._prefill is not None:
            self._prefill.built(scheduler_output)
        metadata = NOTHING_TO_DO
        if ordered is not None or stores or flush or states:
            loads, failed_loads, within_step = ordered or ({}, {}, {})
            metadata = OffloadingConnectorMetadata(loads, within_step, stores, states, flush, failed_loads)
        self._counters.scheduler_seconds += perf_counter() - began
        return metadata

    def _end_managers_step(self) -> None:
        self.manager.on_schedule_end()
        if self.manager.new_epochs != self._new_epochs:
            self._new_epochs = self.manager.new_epochs
            self._forget_held()

    def _plan_stores(self, scheduled: Mapping[ReqId, int], stores: dict[ReqId, TransferOrder]) -> None:
        """Add the orders for the blocks that the step completes to ``stores``.

        Args:
            scheduled: number of tokens that the step computes, by request.
            stores: orders by request.
        """
        states, storing, may_store = self.states, self._storing, not self._is_paused()
        for req_id, tokens in scheduled.items():
            if req_id not in storing or (state := states.get(req_id)) is None:
                continue
            if state.invalid_from is not None and not self._tables.confirm_recomputed(state, tokens):
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
        if self._prefill is not None:
            self._prefill.ended()
        if output.kv_connector_worker_meta is not None or output.invalid_block_ids or output.finished_recving:
            self._process(output)

    @counts_seconds
    def _process(self, output: ConnectorOutput) -> None:
        self._completions.process(output)

    def await_answer(self, request: EngineRequest, computed: int, seconds: float) -> tuple[int | None, bool]:
        return self._waits.within_step(request, computed, seconds)

    def await_answers(self, seconds: float) -> None:
        self._waits.at_end(seconds)

    def has_pending_work(self) -> bool:
        """Return True while jobs are in flight.

        The engine must then keep stepping, also without requests. Otherwise the ends of the jobs are never collected.
        """
        described = self.events.described_runs
        if described is not None and described.steps_idle:
            return True
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

    def get_stats(self) -> Mapping[str, Any]:
        counters = self._counters
        counters.hits_shrunk, counters.stores_refused = self.loads.shrunk_hits, self._stores.refused_offers
        if self._recorder is not None:
            counters.requests_recorded, counters.records_dropped = self._recorder.written, self._recorder.dropped
        counters.sharer_waits, counters.jobs_active = self.loads.sharer_waits, len(self._jobs)
        counters.session_blocks = 0 if self._hints is None else self._hints.sessions.blocks
        stats = dict(super().get_stats())
        if self._misses is not None:
            stats[MISSES] = self._misses.totals()
        if self._cached is not None:
            stats[CACHED] = self._cached.totals()
        return stats

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
        if self._misses is not None:
            self._misses.shut_down()
        if self.events.described_runs is not None:
            self.events.described_runs.write()
        try:
            self.manager.shutdown()
        finally:
            if recorder is not None and recording is not None:
                recorder.join(max(0.0, start + recording.shutdown_deadline - time.monotonic()))

    def _forget_held(self) -> None:
        """Forget all held blocks, which the manager has just dropped; see :meth:`reset_cache`."""
        self._completions.abandon_all()
        if self._engine_cache is not None:
            self._engine_cache.clear()
        self._tables.reset(self._pool)
        self.loads.forget_keys()
        if self._hints is not None:
            self._hints.sessions.clear()
        # The manager's events until now need the snapshots, which the reset of the tracker drops.
        self._untaken_events += self.events.take_events(self._held_events())
        self.events.reset()
        if self._misses is not None:
            self._misses.reset()

    def _new_state(self, request: EngineRequest, policy: RequestPolicy, ctx: ReqContext) -> RequestState:
        if not self._shows_cache:
            self._shows_cache = True
            self.manager.hold_exclusively(None)
        wants_all = self.manager.on_new_request(ctx).policy is OffloadPolicy.REQUEST_LEVEL
        if self._prefill is not None:
            self._prefill.follow(request, ctx, policy)
        return RequestState(
            request,
            policy,
            [GroupState() for _ in self.groups],
            ctx,
            may_load=policy.load,
            request_level=wants_all,
            storing=self._storing,
            prompt_only=self._spec.offload_prompt_only,
            hints=NO_HINTS if self._hints is None else self._hints.of(request),
            arrived=0.0 if self._recorder is None else self._recorder.now(),
        )

    def _held_events(self) -> Iterable[OffloadingEvent]:
        return super()._held_events() if self._misses is None else self._misses.take_events()

    def _allocated(self, state: RequestState, awaited: int) -> None:
        if not awaited and self._prefill is not None:
            self.manager.note_scheduled(state.ctx)
        if self._misses is not None and not state.is_explained:
            self._misses.note(state, self._is_paused(), self._is_preparing)
        if self._cached is not None and state.cached is None:
            state.cached = Cached(planned(state.found_tokens or 0, 0, {}), state.generation)

    def _parameters(self, state: RequestState) -> dict[str, Any] | None:
        if self._cached is None or state.cached is None:
            return None
        return {"kv_tiering": self._cached.count(state.cached, getattr(state.request, "cache_salt", None))}

    def _used(self, keys: Sequence[OffloadKey], state: RequestState) -> None:
        if self._hints is not None:
            self._hints.sessions.used(keys, state.hints.session)

    def _is_paused(self) -> bool:
        return bool(self._completions.orphans) or (self._is_preparing and self._prepares())

    def _prepares(self) -> bool:
        """Return True while the rows are being prepared."""
        self._is_preparing = not self._spec.rows_are_prepared
        if not self._is_preparing:
            logger.info("the CPU tier has joined: its memory is prepared")
        return self._is_preparing

    def _offer(self, state: RequestState, computed: int, hit: Hit) -> tuple[int | None, bool]:
        if hit.tokens > computed and self._describes_events:
            for group, keys in zip(self.groups, state.keys, strict=True):
                size, end = group.offloaded_block_size, hit.tokens
                self.events.record_lookup(state.request, group, keys, computed // size, min(end // size, len(keys)))
        if hit.pending:
            state.open_question = (computed, state.request.num_tokens)
            return ASK_AGAIN
        if hit.tokens > computed and self.loads.holds_up(state, computed, hit.tokens):
            return ASK_AGAIN
        return self._answer(state, computed, hit, self.loads.step_loads)

    def _load(self, state: RequestState, external_tokens: int) -> int:
        is_first = self._cached is not None and state.cached is None
        if is_first:
            state.cached = Cached(planned(state.found_tokens or 0, external_tokens, {}), state.generation)
        keys = self.loads.plan(state, external_tokens)
        state.sources = self.manager.count_sources(keys, state.ctx)
        if is_first and state.cached is not None and state.sources:
            size = self.measure.offloaded_block_size
            promoted = {name: blocks * size for name, blocks in self.manager.count_tiers(keys, state.ctx).items()}
            state.cached.tiers = planned(state.found_tokens or 0, external_tokens, promoted)
        return len(keys) - sum(state.sources.values())

    @counts_seconds
    def store_last_tail(self, request: EngineRequest, handed: Sequence[Handed]) -> None:
        """Store the tail that a request ends at, before :meth:`request_finished`."""
        state = self.states.get(request.request_id)
        if self._handed is not None and state is not None and self._stores_last(state):
            self._handed.plan_last(state, handed)

    def _stores_last(self, state: RequestState) -> bool:
        return not self._is_paused() and state.scheduled and state.invalid_from is None and state.policy.store

    def _ended(self, state: RequestState) -> None:
        self._storing.discard(state.ctx.req_id)
        if self._stores_last(state):
            self._stores.plan_last(state)
        if state.stale_blocks:
            self._completions.refresh_stored(state)
        if self._recorder is not None and state.scheduled:
            request, keys = state.request, state.keys[self.measure.group_idx]
            tokens = request.num_prompt_tokens
            self._recorder.record(state.arrived, tokens, request.num_tokens - tokens, keys)
        if self._misses is not None:
            self._misses.ended(state)
        if self._prefill is not None:
            self._prefill.finished(state.ctx.req_id)
        if self._hints is None or state.hints is NO_HINTS:
            self.manager.on_request_finished(state.ctx)
            return
        if (released := self._hints.released(state)) and self._engine_cache is not None:
            self._engine_cache.release(released)
        self.manager.on_request_finished(state.ctx, released, self._hints.kept(state))
