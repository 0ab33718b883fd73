"""The scheduler half of the simple mode: it matches prefixes and orders loads and stores.

References keep the KV correct; the simple mode needs no fences. Every copy holds a reference on its GPU blocks and on
its CPU blocks from the moment it is ordered until all workers have reported it. Neither pool hands out a block with
references, so no block is reused while a copy reads or writes it, whether its request still runs or not. Only copies
hold references, so both pools are complete again when the copies have ended.

Blocks that a load of any connector did not fill never become visible, nor do blocks computed on top of them. The same
holds for blocks from before a reset (:mod:`tiering.connector.suspects`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from tiering.api.engine import EngineConfig
from tiering.api.keys import PRIMARY_TIER
from tiering.api.request import ReqContext
from tiering.api.request_policy import RequestPolicy
from tiering.connector.block_tables import BlockTables
from tiering.connector.counters import counts_seconds
from tiering.connector.event_types import EngineEvents, OffloadingKVEventsConfig
from tiering.connector.free_queue import blocks_of_two_steps
from tiering.connector.half import SchedulerHalf
from tiering.connector.hits import Hit, HitSearch
from tiering.connector.jobs import WorkerJobs
from tiering.connector.protocols import ConnectorOutput, EngineRequest, SchedulerOutput
from tiering.connector.step_loads import StepLoads
from tiering.connector.tracked import NEVER, Match
from tiering.errors import TieringError
from tiering.primary.memory.region import is_large
from tiering.runtime.ratelimit import LimitedWarning
from tiering.simple.block_pool import CPUBlockPool
from tiering.simple.cache_config import KVCacheConfig, check_engine, check_options, derive_cpu_config
from tiering.simple.eager import EagerStores
from tiering.simple.lazy import HandedOutTables, LazyStores
from tiering.simple.metadata import NOT_HELD, SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from tiering.simple.protocols import GPUBlockPool
from tiering.simple.state import Blocks, Load, Offer, SimpleGroupState, SimpleRequestState, StepCopy

logger = logging.getLogger("kv_tiering.simple")


class SimpleCPUOffloadScheduler(SchedulerHalf[SimpleRequestState]):
    """The scheduler half of a CPU pool that mirrors the GPU's blocks."""

    def __init__(
        self,
        engine_config: EngineConfig,
        kv_cache_config: KVCacheConfig,
        cpu_capacity_bytes: int,
        lazy_offload: bool = False,
        *,
        enable_kv_cache_events: bool = False,
        engine_events: EngineEvents | None = None,
        self_describing_kv_events: bool = False,
    ) -> None:
        """Create the scheduler half; nothing is stored before :meth:`bind_gpu_block_pool`.

        Args:
            engine_config: the engine's configuration.
            kv_cache_config: geometry of one worker's KV cache.
            cpu_capacity_bytes: bytes of CPU memory of one worker.
            lazy_offload: store blocks when they are about to be evicted from the GPU, instead of all blocks when they
                are computed. This mode needs the engine's prefix caching. Default: False.
            enable_kv_cache_events: collect events for :meth:`take_events`; default: False.
            engine_events: makes events in the engine's own form; default: None.
            self_describing_kv_events: add tokens, parent and adapter to the events of full-attention groups. This
                option needs the eager mode. Default: False.

        Raises:
            ConfigError: the simple mode cannot serve this engine, or the options contradict one another.
        """
        groups = check_engine(engine_config, kv_cache_config)
        check_options(engine_config, kv_cache_config, lazy_offload, self_describing_kv_events)
        self.cpu_config = derive_cpu_config(kv_cache_config, cpu_capacity_bytes)
        """Geometry of one worker's CPU pool."""
        self.lazy_offload = lazy_offload
        world_size = engine_config.world_size
        self.cpu_block_pool = CPUBlockPool(
            self.cpu_config.num_blocks, enable_kv_cache_events, self.cpu_config.block_bytes * world_size
        )
        self.lazy = LazyStores(self.cpu_block_pool, blocks_of_two_steps(groups, engine_config.max_batch_tokens))
        """Stores of blocks that the engine will evict soon."""
        super().__init__(
            self.cpu_block_pool,
            HandedOutTables(groups, {}, self.lazy) if lazy_offload else BlockTables(groups, {}),
            HitSearch(groups, self.cpu_block_pool, NEVER, has_scratch=engine_config.has_scratch),
            OffloadingKVEventsConfig(enable_kv_cache_events, self_describing_kv_events),
            engine_events,
            logger,
        )
        self.eager = EagerStores(self.cpu_block_pool, groups, self._search.ends, self._tables.suspects)
        """Stores of blocks as soon as they are computed."""
        self._gpu: GPUBlockPool | None = None
        self._unprepared = world_size if is_large(self.cpu_config.total_bytes) else 0
        """Number of workers that have not reported that their memory is prepared."""
        self._loads: dict[str, list[Load]] = {}
        self._stores = WorkerJobs[StepCopy](world_size)
        self._within_step = WorkerJobs[StepCopy](world_size)
        """Loads that steps compute with; they and the stores share their numbers."""
        self._needed: StepCopy | None = None
        """The one of them that the present step needs, not given to the workers yet."""
        self.step_loads = StepLoads(groups, self.cpu_block_pool, self._search, engine_config)
        """The choice of the loads that run within the step."""
        self.ordered: list[Blocks] = []
        """Stores of finished requests, not given to the workers yet; they hold their references already."""
        self._next_load = 0
        self._need_drain = False
        self._warn = LimitedWarning(logger, time.monotonic)

    def bind_gpu_block_pool(self, gpu_block_pool: GPUBlockPool) -> None:
        """Set the engine's own block pool; no block is stored or loaded before this call."""
        self._gpu = gpu_block_pool

    def _new_state(self, request: EngineRequest, policy: RequestPolicy, ctx: ReqContext) -> SimpleRequestState:
        groups = [SimpleGroupState() for _ in self.groups]
        return SimpleRequestState(request, policy, groups, ctx, may_load=policy.load, rewinding=self.eager.forget)

    def _is_paused(self) -> bool:
        return self._usable_pool() is None

    def _usable_pool(self) -> GPUBlockPool | None:
        """Return the engine's block pool once blocks may be copied; None before."""
        return None if self._unprepared > 0 else self._gpu

    def _offer(self, state: SimpleRequestState, computed: int, hit: Hit) -> tuple[int | None, bool]:
        return self._answer(state, computed, hit, self.step_loads)

    def _load(self, state: SimpleRequestState, external_tokens: int) -> int:
        """Order the load of the request's last hit.

        A block that was evicted from the CPU pool after the match is ordered as :data:`NOT_HELD`; the worker reports
        its GPU block as not filled.

        Raises:
            TieringError: a load within the step has lost blocks since the match, which the step computes with. Nothing
                comes between the two calls that could take blocks away.
        """
        if self._gpu is None:
            return 0
        computed, _, is_within_step = state.match or Match(0, 0)
        null, cached, hits = self._gpu.null_block.block_id, self.cpu_block_pool.cached, 0
        pairs: list[tuple[int, int]] = []
        for state_of, group in zip(state.groups, self.groups, strict=True):
            first, end = computed // group.gpu_block_size, -(-(computed + external_tokens) // group.gpu_block_size)
            names = chain(state_of.keys[first:end], [b""] * (end - len(state_of.keys)))
            part = [
                (block, cached.get(key, NOT_HELD))
                for block, key in zip(state_of.block_ids[first:end], names, strict=False)
                if block != null
            ]
            pairs += part
            hits = len(part) if group is self.measure else hits
        load = Load(state=state, gpu_blocks=[gpu for gpu, _ in pairs], cpu_blocks=[cpu for _, cpu in pairs])
        if is_within_step and (not pairs or NOT_HELD in load.cpu_blocks):
            raise TieringError(
                f"{len(load.held)} of {len(pairs)} blocks that a step needs are held; the step must not run"
            )
        self._gpu.touch([self._gpu.blocks[block] for block in load.gpu_blocks])
        self.cpu_block_pool.hold(load.held)
        if is_within_step:
            if self._needed is None:
                self._needed = StepCopy(self._stores.new_id(), self._stores.world_size, [], [])
                self._within_step.add(self._needed)
            self._needed.referenced += load.gpu_blocks
            self._needed.cpu_blocks += load.cpu_blocks
            self.step_loads.add(len(pairs))
            return hits
        self._loads.setdefault(state.ctx.req_id, []).append(load)
        state.loading += 1
        self._counters.hits_shrunk += NOT_HELD in load.cpu_blocks
        return hits

    def _ended(self, state: SimpleRequestState) -> None:
        """Order the blocks that are computed and not stored yet, e.g. the last full block.

        Nothing is ordered while a load of the request has not ended. A load that was not given to the workers yet is
        dropped.
        """
        self._drop_unissued(state.ctx.req_id)
        is_whole = state.scheduled and not state.loading and state.invalid_from is None and state.policy.store
        if is_whole and not self.lazy_offload and (gpu := self._usable_pool()) is not None:
            state.look_again()
            self.ordered += self._take_request(state, gpu, is_last=True)
            self.eager.leave_over(state)
        self.eager.forget(state)

    @counts_seconds
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SimpleCPUOffloadMetadata:
        """Return the step's loads and stores. The engine calls this method once per step, also without tokens."""
        self._tables.follow(scheduler_output)
        meta = SimpleCPUOffloadMetadata(
            need_flush=bool(scheduler_output.preempted_req_ids), need_drain=self._need_drain
        )
        self._need_drain = False
        if self._needed is not None:
            meta.within_step = self._needed.job_id, self._needed.referenced, self._needed.cpu_blocks
            self._needed = None
            self.step_loads.end_step()
        for load in chain.from_iterable(self._loads.values()):
            if not load.issued:
                load.issued = True
                meta.load_event = self._next_load
                meta.load_gpu_blocks += load.gpu_blocks
                meta.load_cpu_blocks += load.cpu_blocks
                meta.load_event_to_reqs.setdefault(self._next_load, []).append(load.state.ctx.req_id)
                meta.load_ends.append(len(meta.load_gpu_blocks))
        self._next_load += len(meta.load_ends)
        gpu_blocks, cpu_blocks = self.prepare_store_specs(scheduler_output)
        if gpu_blocks:
            store = StepCopy(self._stores.new_id(), self._stores.world_size, gpu_blocks, cpu_blocks)
            meta.store_event, meta.store_gpu_blocks, meta.store_cpu_blocks = store.job_id, gpu_blocks, cpu_blocks
            self._stores.add(store)
            self._counters.stores += 1
        return meta

    def prepare_store_specs(self, scheduler_output: SchedulerOutput) -> tuple[list[int], list[int]]:
        """Choose the blocks that this step stores.

        Returns:
            The GPU blocks and the co-indexed CPU blocks. Both hold their references, and the CPU blocks have their
            names.
        """
        ordered, self.ordered = self.ordered, []
        gpu, room = self._usable_pool(), self.cpu_block_pool.num_free_blocks
        storable = [
            state
            for req_id, tokens in scheduler_output.num_scheduled_tokens.items()
            if (state := self.states.get(req_id)) is not None
            and (state.invalid_from is None or self._tables.confirm_recomputed(state, tokens))
        ]
        if gpu is not None and self.lazy_offload:
            ordered += self._take(self.lazy.offers(gpu, room, self._tables.suspects), gpu)
        elif gpu is not None:
            ordered += self._take(self.eager.left_over(gpu, room), gpu)
            for state in storable:
                if state.policy.store and not state.loading:
                    ordered += self._take_request(state, gpu)
        return [block for blocks, _ in ordered for block in blocks], [
            block for _, blocks in ordered for block in blocks
        ]

    @counts_seconds
    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Process the workers' reports. The engine may leave out the call if there is no report.

        A store is reported with its step or later. Blocks that the step's loads did not fill come in the same report,
        and are processed first.
        """
        invalid = set(connector_output.invalid_block_ids or ())
        if invalid:
            loads = list(chain.from_iterable(self._loads.values()))
            self._distrust(invalid.difference(chain.from_iterable(load.gpu_blocks for load in loads)))
            self._counters.loads_failed += sum(load.has_failed(invalid) for load in loads)
        for req_id in connector_output.finished_recving or ():
            self._load_ended(req_id)
        report: SimpleCPUOffloadWorkerMetadata | None = connector_output.kv_connector_worker_meta
        if report is not None:
            self._unprepared -= report.prepared
            if report.prepared and self._unprepared <= 0:
                logger.info("the CPU tier has joined: its memory is prepared")
            for load in self._within_step.take_done(report):
                if seconds := report.load_seconds.get(load.job_id):
                    self.step_loads.measure(len(load.cpu_blocks), seconds)
                self._release(load.referenced, load.cpu_blocks)
            self._counters.stores_failed += len(self._stores.newly_failed(report))
            for store in self._stores.take_done(report):
                self._store_ended(store)

    def has_pending_work(self) -> bool:
        """Return True while copies are in flight: the engine must keep stepping, or they are never collected."""
        return bool(self._stores or self.ordered or self._loads or self._within_step)

    def reset_cache(self) -> bool:
        """Drop all blocks, also those that running copies are storing, and return True.

        Running requests go on, but no block of them is stored until they have given their blocks back. Blocks that the
        engine's own cache still holds, and blocks computed on top of them, are not stored either.
        """
        self.events.store_failed(self.cpu_block_pool.pending)
        self.cpu_block_pool.reset()
        self.lazy.reset()
        self.eager.reset()
        self._tables.reset(self._gpu)
        return True

    def copied_blocks(self) -> set[int]:
        ordered = chain.from_iterable(blocks for blocks, _ in self.ordered)
        return set(chain(ordered, *(copy.referenced for copy in self._copies())))

    def give_up_blocks(self, req_ids: Iterable[str]) -> None:
        """Give back the references of all copies on GPU blocks, before the copies have ended.

        All copies end before the next step. What is being stored never becomes visible, because an engine that zeroes
        new blocks does so before.

        Args:
            req_ids: requests that were being loaded; they load no more.
        """
        super().give_up_blocks(req_ids)
        self._need_drain = True
        for gpu_blocks, cpu_blocks in self.ordered:
            self._discard(gpu_blocks, cpu_blocks)
            self._release(gpu_blocks, cpu_blocks)
        self.ordered = []
        for store in self._stores:
            self._discard(store.referenced, store.cpu_blocks)
        for copy in self._copies():
            self._release(copy.referenced, ())
            copy.referenced = []

    def get_stats(self) -> Mapping[str, Any]:
        self._counters.jobs_active = len(self._stores) + len(self._within_step) + sum(map(len, self._loads.values()))
        stats = super().get_stats()
        stats["tiers"][PRIMARY_TIER]["stores_dropped"] = self.eager.dropped
        stats["tiers"][PRIMARY_TIER]["available"] = int(self._unprepared <= 0)
        return stats

    def shutdown(self) -> None:
        """Do nothing: the workers own the memory."""

    def _copies(self) -> Iterable[Load | StepCopy]:
        """Return all copies that have not ended and that the workers may have received."""
        return chain(chain.from_iterable(self._loads.values()), self._stores, self._within_step)

    def _take_request(self, state: SimpleRequestState, gpu: GPUBlockPool, is_last: bool = False) -> list[Blocks]:
        ordered: list[Blocks] = []
        if state.storable_tokens() >= state.next_store_at:
            state.extend_keys(self.groups)
            ordered += self._take(self.eager.offers(state, gpu, self.cpu_block_pool.num_free_blocks, is_last), gpu)
        if any(group.lost for group in state.groups):
            ordered += self._take(self.eager.lost(state, gpu), gpu)
        return ordered

    def _take(self, offers: Sequence[Offer], gpu: GPUBlockPool) -> list[Blocks]:
        """Allocate CPU blocks for ``offers``, and take the references on both sides."""
        if not offers:
            return []
        if self._describes_events:
            for _, run in groupby(offers, key=lambda offer: (id(offer[2]), offer[3])):
                keys, _, requests, groups, places = zip(*run, strict=True)
                self.events.record_stores(requests[0], self.groups[groups[0]], places, keys)
        gpu_blocks = [offer[1] for offer in offers]
        cpu_blocks = self.cpu_block_pool.get_new_blocks([offer[0] for offer in offers])
        all_blocks = gpu.blocks
        gpu.touch([all_blocks[block] for block in gpu_blocks])
        evicted = self.cpu_block_pool.take_evicted()
        if evicted and not self.lazy_offload:
            self.eager.evicted(evicted)
        return [(gpu_blocks, cpu_blocks)]

    def _store_ended(self, store: StepCopy) -> None:
        if store.failed:
            self._warn(
                "copy job %d failed: a store of %d blocks, which the CPU pool does not hold",
                2 * store.job_id,
                len(store.cpu_blocks),
            )
            self._discard(store.referenced, store.cpu_blocks)
        else:
            self.cpu_block_pool.publish(store.cpu_blocks)
        self._release(store.referenced, store.cpu_blocks)

    def _discard(self, gpu_blocks: Iterable[int], cpu_blocks: Sequence[int]) -> None:
        """Let blocks that were being stored never become visible."""
        self.events.store_failed(self.cpu_block_pool.discard(cpu_blocks))
        self.lazy.failed(gpu_blocks)

    def _distrust(self, unfilled: set[int]) -> None:
        """Drop stores of blocks that other connectors did not fill, and of blocks computed on top of them."""
        if not unfilled:
            return
        wrong = self._tables.distrust(unfilled)
        stores = [*self.ordered, *((store.referenced, store.cpu_blocks) for store in self._stores)]
        if wrong is None:
            dropped = [cpu for _, cpu_blocks in stores for cpu in cpu_blocks]
            wrong = {gpu for gpu_blocks, _ in stores for gpu in gpu_blocks}
        else:
            dropped = [cpu for blocks in stores for gpu, cpu in zip(*blocks, strict=False) if gpu in wrong]
        self.events.store_failed(self.cpu_block_pool.discard(dropped))
        self.lazy.failed(wrong)
        self._warn(
            "%d GPU blocks hold no KV, or that of another adapter; %d blocks that were being stored are dropped",
            len(unfilled),
            len(dropped),
        )

    def _load_ended(self, req_id: str) -> None:
        loads = self._loads.get(req_id)
        if not loads or not loads[0].issued:
            return
        load = loads.pop(0)
        if not loads:
            del self._loads[req_id]
        self._release(load.referenced, load.held)
        load.state.loading -= 1

    def _drop_unissued(self, req_id: str) -> None:
        loads = self._loads.get(req_id, [])
        for load in [load for load in loads if not load.issued]:
            loads.remove(load)
            self._release(load.referenced, load.held)
        if not loads:
            self._loads.pop(req_id, None)

    def _release(self, gpu_blocks: Iterable[int], cpu_blocks: Sequence[int]) -> None:
        """Give back the references of a copy. The tail of a prefix goes first, because its head is worth more."""
        self.cpu_block_pool.free_blocks(reversed(cpu_blocks))
        if self._gpu is not None:
            blocks = self._gpu.blocks
            self._gpu.free_blocks([blocks[block] for block in reversed(list(gpu_blocks))])
