"""The scheduler half of the simple mode: it matches prefixes and orders loads and stores.

References keep the KV correct; the simple mode needs no fences. Every copy holds a reference on its GPU blocks and on
its CPU blocks from the moment it is ordered until all workers have reported it. Neither pool hands out a block with
references, so no block is reused while a copy reads or writes it, whether its request still runs or not. Only copies
hold references, so both pools are complete again when the copies have ended.

Blocks that a load of any connector did not fill never become visible, nor do blocks computed on top of them. The same
holds for blocks from before a reset (:mod:`tiering.offload.suspects`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from tiering.api.engine import EngineConfig
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.masking import shown_name
from tiering.api.request_policy import NEITHER
from tiering.errors import ConfigError
from tiering.offload.event_types import EngineEvents, KVCacheEvent, OffloadingKVEventsConfig
from tiering.offload.events import OffloadingEventsTracker
from tiering.offload.protocols import AllocatedBlocks, ConnectorOutput, EngineRequest, SchedulerOutput
from tiering.offload.requests import BlockIds, policy_of
from tiering.runtime.ratelimit import LimitedWarning
from tiering.simple.block_pool import CPUBlockPool
from tiering.simple.cache_config import KVCacheConfig, check_engine, check_options, derive_cpu_config
from tiering.simple.copies import Blocks, Load, Store
from tiering.simple.eager import EagerStores
from tiering.simple.hits import HitSearch, needs_of
from tiering.simple.lazy import LazyStores, Offer, lazy_target
from tiering.simple.metadata import (
    NOT_HELD,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
    failed,
    store_job,
)
from tiering.simple.protocols import GPUBlockPool
from tiering.simple.requests import GroupState, RequestState
from tiering.simple.stats import SimpleCounters, tier_fields
from tiering.simple.tables import WatchedTables

logger = logging.getLogger("kv_tiering.simple")

NO_TOKENS: tuple[int, bool] = (0, False)
"""The answer for a request without a hit."""


class SimpleCPUOffloadScheduler:
    """The scheduler half of a CPU pool that mirrors the GPU's blocks.

    All calls come from the scheduler's thread, in the order of
    :class:`tiering.connector.scheduler.OffloadingConnectorScheduler`.
    """

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
        self.full_attention_group = check_engine(engine_config, kv_cache_config)
        """Index of the first full-attention group."""
        check_options(engine_config, kv_cache_config, lazy_offload, self_describing_kv_events)
        self.cpu_config = derive_cpu_config(kv_cache_config, cpu_capacity_bytes)
        """Geometry of one worker's CPU pool."""
        self.lazy_offload = lazy_offload
        """True in the lazy mode."""
        self.cpu_block_pool = CPUBlockPool(self.cpu_config.num_blocks, enable_kv_cache_events)
        self._world_size = engine_config.world_size
        self.needs = needs_of(kv_cache_config.kv_cache_groups, engine_config.hash_block_size)
        """Blocks that a hit needs of each KV-cache group."""
        self._search = HitSearch(self.needs)
        config = OffloadingKVEventsConfig(enable_kv_cache_events, self_describing_kv_events)
        self.events = OffloadingEventsTracker(config, engine_events)
        """Tracker of KV events."""
        record = self._record if enable_kv_cache_events and self_describing_kv_events else None
        self._gpu: GPUBlockPool | None = None
        self.states: dict[str, RequestState] = {}
        """Requests that have not ended, by id."""
        self._tables = WatchedTables(self.needs, self.states)
        suspects = self._tables.suspects
        self.eager = EagerStores(self.cpu_block_pool, self.needs, record, suspects)
        """Stores of blocks as soon as they are computed."""
        self.lazy = LazyStores(self.cpu_block_pool, lazy_target(self.needs, engine_config.max_batch_tokens), suspects)
        """Stores of blocks that the engine will evict soon."""
        self._tables.watch(self.eager, self.lazy if lazy_offload else None)
        self._loads: dict[str, list[Load]] = {}
        self._stores: dict[int, Store] = {}
        self.ordered: list[Blocks] = []
        """Stores of finished requests, not given to the workers yet; they hold their references already."""
        self._next_load = self._next_store = 0
        self._need_drain = False
        self._counters = SimpleCounters()
        self._warn = LimitedWarning(logger, time.monotonic)

    # --------------------------------------------------------------------------------------------------------- requests

    def bind_gpu_block_pool(self, gpu_block_pool: GPUBlockPool) -> None:
        """Set the engine's own block pool; no block is stored or loaded before this call."""
        self._gpu = gpu_block_pool

    def on_new_request(self, request: EngineRequest) -> None:
        """Admit a new request. Later calls for the same request change nothing."""
        if request.request_id not in self.states:
            self._admit(request)

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``num_computed_tokens`` can be loaded; never the last token.

        A repeated call changes nothing.

        Args:
            request: a waiting request, which has no blocks.
            num_computed_tokens: tokens that the engine's prefix cache holds.

        Returns:
            The number of tokens, and True if they are loaded asynchronously; ``NO_TOKENS`` if there is no hit.
        """
        state = self.states.get(request.request_id) or self._admit(request)
        if state.has_blocks or state.scheduled:
            self._tables.start_over(state)
        state.extend_keys(self.needs)
        state.found_tokens = state.filled_tokens = num_computed_tokens
        first_time, state.touched = not state.touched, True
        if first_time:
            self._counters.queried_tokens += max(0, request.num_tokens - num_computed_tokens)
            self.cpu_block_pool.refresh(chain.from_iterable(state.keys))
        if self._gpu is None or not (state.policy.load and state.may_load):
            return NO_TOKENS
        limit = request.num_tokens - 1
        if state.policy.max_load_tokens is not None:
            limit = min(limit, state.policy.max_load_tokens)
        end = self._search.longest(state.keys, num_computed_tokens, limit, self.cpu_block_pool.cached.__contains__)
        if first_time:
            size = self.needs[self.full_attention_group].gpu_block_size
            self._counters.queried_blocks += max(0, limit // size - num_computed_tokens // size)
            self._counters.hit_blocks += end // size - num_computed_tokens // size
        if end <= num_computed_tokens:
            return NO_TOKENS
        state.matched_at = num_computed_tokens
        return end - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: EngineRequest, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Take the request's blocks, and order its load.

        The engine calls this method twice for a load: with the number of tokens, and with 0 when the request is
        scheduled. A block that was evicted from the CPU pool after the match is ordered as :data:`NOT_HELD`; the worker
        reports its GPU block as not filled.

        Args:
            request: the request.
            blocks: all GPU blocks of the request.
            num_external_tokens: tokens to load behind the computed ones.
        """
        state = self.states.get(request.request_id) or self._admit(request)
        block_ids = blocks.get_block_ids()
        self._tables.allocated(state, block_ids)
        if num_external_tokens <= 0 or self._gpu is None:
            return
        state.filled_tokens = (state.found_tokens or 0) + num_external_tokens
        null, cached = self._gpu.null_block.block_id, self.cpu_block_pool.cached
        pairs: list[tuple[int, int]] = []
        for group, need, ids in zip(state.groups, self.needs, block_ids, strict=True):
            first = state.matched_at // need.gpu_block_size
            end = -(-(state.matched_at + num_external_tokens) // need.gpu_block_size)
            names = chain(group.keys[first:end], [b""] * (end - len(group.keys)))
            pairs += [
                (block, cached.get(key, NOT_HELD))
                for block, key in zip(ids[first:end], names, strict=False)
                if block != null
            ]
        load = Load(state=state, gpu_blocks=[gpu for gpu, _ in pairs], cpu_blocks=[cpu for _, cpu in pairs])
        held = load.held
        self._gpu.touch([self._gpu.blocks[block] for block in load.gpu_blocks])
        self.cpu_block_pool.touch(held)
        self._loads.setdefault(request.request_id, []).append(load)
        state.loading += 1
        self._counters.hit_tokens += num_external_tokens
        self._counters.loaded_blocks += len(held)
        self._counters.shrunk_blocks += len(load.cpu_blocks) - len(held)

    def request_finished(self, request: EngineRequest, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """End a request of an engine with one KV-cache group; see :meth:`request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: EngineRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request, for any reason.

        Blocks that are computed and not stored yet are ordered now, e.g. the last full block, unless a load of the
        request has not ended. A load that was not given to the workers yet is dropped. A load that is under way is
        awaited.

        Args:
            request: the request.
            block_ids: its GPU blocks, per group.

        Returns:
            False and None: the engine may free the blocks at once, because copies hold their own references.
        """
        req_id = request.request_id
        state = self.states.pop(req_id, None)
        self._drop_unissued(req_id)
        if state is None:
            return False, None
        is_whole = state.scheduled and not state.loading and not state.is_withheld
        self._tables.given_up(state)
        if not self.lazy_offload and self._gpu is not None and is_whole and len(block_ids) == len(state.groups):
            for group, ids in zip(state.groups, block_ids, strict=True):
                group.block_ids = list(ids)
            state.look_again()
            self.ordered += self._take_request(state, self._gpu)
            self.eager.leave_over(state)
        self.eager.forget(state)
        return False, None

    # ------------------------------------------------------------------------------------------------------------ steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SimpleCPUOffloadMetadata:
        """Return the step's loads and stores. The engine calls this method once per step, also without tokens."""
        self._tables.follow(scheduler_output)
        meta = SimpleCPUOffloadMetadata(
            need_flush=bool(scheduler_output.preempted_req_ids), need_drain=self._need_drain
        )
        self._need_drain = False
        for req_id, loads in self._loads.items():
            for load in loads:
                if not load.issued:
                    load.issued = True
                    meta.load_event = self._next_load
                    meta.load_gpu_blocks += load.gpu_blocks
                    meta.load_cpu_blocks += load.cpu_blocks
                    meta.load_event_to_reqs.setdefault(self._next_load, []).append(req_id)
                    meta.load_ends.append(len(meta.load_gpu_blocks))
        self._next_load += meta.load_event >= 0
        gpu_blocks, cpu_blocks = self.prepare_store_specs(scheduler_output)
        if gpu_blocks:
            meta.store_event, meta.store_gpu_blocks, meta.store_cpu_blocks = self._next_store, gpu_blocks, cpu_blocks
            self._stores[self._next_store] = Store(gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks)
            self._next_store += 1
        return meta

    def prepare_store_specs(self, scheduler_output: SchedulerOutput) -> tuple[list[int], list[int]]:
        """Choose the blocks that this step stores.

        Returns:
            The GPU blocks and the co-indexed CPU blocks. Both hold their references, and the CPU blocks have their
            names.
        """
        ordered, self.ordered = self.ordered, []
        gpu = self._gpu
        if gpu is not None:
            if self.lazy_offload:
                ordered += self._take(self.lazy.offers(gpu, self.cpu_block_pool.num_free_blocks), gpu)
            else:
                ordered += self._take_eager(scheduler_output, gpu)
        return [block for blocks, _ in ordered for block in blocks], [
            block for _, blocks in ordered for block in blocks
        ]

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Process the workers' reports. The engine may leave out the call if there is no report.

        A store is reported with its step or later. Blocks that the step's loads did not fill come in the same report,
        and are processed first.
        """
        if connector_output.invalid_block_ids:
            own = chain.from_iterable(load.gpu_blocks for loads in self._loads.values() for load in loads)
            self._distrust(set(connector_output.invalid_block_ids).difference(own))
        for req_id in connector_output.finished_recving or ():
            self._load_ended(req_id)
        report: SimpleCPUOffloadWorkerMetadata | None = connector_output.kv_connector_worker_meta
        if report is None:
            return
        for reported, workers in report.completed_store_events.items():
            event = reported if reported >= 0 else failed(reported)
            store = self._stores.get(event)
            if store is None:
                self._warn("copy job %d was reported but is not under way; the report is ignored", store_job(event))
                continue
            if reported >= 0:
                store.completed += workers
            else:
                store.failed += workers
            if store.completed + store.failed >= self._world_size:
                self._store_ended(event, self._stores.pop(event))

    # ------------------------------------------------------------------------------------------------------------- rest

    def has_pending_stores(self) -> bool:
        """Return True while a store is ordered that not all workers have reported."""
        return bool(self._stores or self.ordered)

    def has_pending_work(self) -> bool:
        """Return True while copies are in flight: the engine must keep stepping, or they are never collected."""
        return bool(self._stores or self.ordered or self._loads)

    def take_events(self) -> list[KVCacheEvent]:
        """Return the KV events since the last call, in an order that a consumer can apply."""
        return self.events.take_events(self.cpu_block_pool.take_events())

    def reset_cache(self) -> bool:
        """Drop all blocks, also those that running copies are storing, and return True.

        Running requests go on, but no block of them is stored until they have given their blocks back. Blocks that the
        engine's own cache still holds, and blocks computed on top of them, are not stored either.
        """
        self.events.store_failed(self.cpu_block_pool.pending)
        self.cpu_block_pool.reset()
        self.lazy.reset()
        self.eager.reset(self.states.values())
        self._tables.reset(self._gpu)
        return True

    def copied_blocks(self) -> set[int]:
        """Return the GPU blocks that copies hold references on."""
        copies = chain(chain.from_iterable(self._loads.values()), self._stores.values())
        return set(chain(*(copy.referenced for copy in copies), *(blocks for blocks, _ in self.ordered)))

    def give_up_blocks(self, req_ids: Iterable[str]) -> None:
        """Give back the references of all copies on GPU blocks, before the copies have ended.

        All copies end before the next step. What is being stored never becomes visible, because an engine that zeroes
        new blocks does so before.

        Args:
            req_ids: requests that were being loaded; they load no more.
        """
        self._need_drain = True
        for req_id in req_ids:
            if (state := self.states.get(req_id)) is not None:
                state.may_load = False
        for gpu_blocks, cpu_blocks in self.ordered:
            self._discard(gpu_blocks, cpu_blocks)
            self._release(gpu_blocks, cpu_blocks)
        self.ordered = []
        for store in self._stores.values():
            self._discard(store.gpu_blocks, store.cpu_blocks)
        for copy in chain(chain.from_iterable(self._loads.values()), self._stores.values()):
            self._release(copy.give_up(), ())

    def get_stats(self) -> Mapping[str, Any]:
        """Return the counters and gauges.

        Returns:
            The fields of :class:`SimpleCounters`, the pool's ``cached_blocks``, ``held_blocks`` and ``num_blocks``, and
            under ``tiers`` the pool's counters as a tier.
        """
        counters, pool = self._counters, self.cpu_block_pool
        counters.evicted_blocks, counters.restored_blocks = pool.evictions, self.eager.restored
        counters.dropped_blocks = self.eager.dropped
        return {
            **asdict(counters),
            "cached_blocks": len(pool.cached),
            "held_blocks": pool.num_held_blocks,
            "num_blocks": pool.num_blocks,
            "tiers": {PRIMARY_TIER: tier_fields(counters, pool, self.cpu_config.block_bytes * self._world_size)},
        }

    def shutdown(self) -> None:
        """Do nothing: the workers own the memory."""

    # -------------------------------------------------------------------------------------------------------- internals

    def _admit(self, request: EngineRequest) -> RequestState:
        try:
            policy = policy_of(request)
        except ConfigError as error:
            self._warn("request %s neither loads nor stores KV: %s", shown_name(request.request_id), error)
            policy = NEITHER
        state = RequestState(request, policy, [GroupState() for _ in self.needs])
        self.states[request.request_id] = state
        return state

    def _take_eager(self, output: SchedulerOutput, gpu: GPUBlockPool) -> list[Blocks]:
        ordered = self._take(self.eager.left_over(gpu, self.cpu_block_pool.num_free_blocks), gpu)
        for req_id in output.num_scheduled_tokens:
            state = self.states.get(req_id)
            if state is not None and not state.loading and not state.is_withheld:
                ordered += self._take_request(state, gpu)
        return ordered

    def _take_request(self, state: RequestState, gpu: GPUBlockPool) -> list[Blocks]:
        ordered: list[Blocks] = []
        if state.confirmed_tokens() >= state.next_store_at:
            state.extend_keys(self.needs)
            ordered += self._take(self.eager.offers(state, gpu, self.cpu_block_pool.num_free_blocks), gpu)
        if any(group.lost for group in state.groups):
            ordered += self._take(self.eager.lost(state, gpu), gpu)
        return ordered

    def _take(self, offers: Sequence[Offer], gpu: GPUBlockPool) -> list[Blocks]:
        """Allocate CPU blocks for ``offers``, and take the references on both sides."""
        if not offers:
            return []
        gpu_blocks = [block for _, block in offers]
        cpu_blocks = self.cpu_block_pool.get_new_blocks([key for key, _ in offers])
        all_blocks = gpu.blocks
        gpu.touch([all_blocks[block] for block in gpu_blocks])
        self._counters.stored_blocks += len(offers)
        evicted = self.cpu_block_pool.take_evicted()
        if evicted and not self.lazy_offload:
            self.eager.evicted(evicted)
        return [(gpu_blocks, cpu_blocks)]

    def _record(self, request: EngineRequest, group: int, indexes: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        """Keep the tokens that events need of the blocks stored now, while their request is known."""
        self.events.record_stores(request, self.needs[group], indexes, keys)

    def _store_ended(self, event: int, store: Store) -> None:
        if store.failed:
            self._counters.failed_stores += 1
            self._warn(
                "copy job %d failed: a store of %d blocks, which the CPU pool does not hold",
                store_job(event),
                len(store.cpu_blocks),
            )
            self._discard(store.gpu_blocks, store.cpu_blocks)
        else:
            self.cpu_block_pool.publish(store.cpu_blocks)
        self._release(store.give_up(), store.cpu_blocks)

    def _discard(self, gpu_blocks: Iterable[int], cpu_blocks: Sequence[int]) -> None:
        """Let blocks that were being stored never become visible."""
        self.events.store_failed(self.cpu_block_pool.discard(cpu_blocks))
        self.lazy.failed(gpu_blocks)

    def _distrust(self, unfilled: set[int]) -> None:
        """Drop stores of blocks that other connectors did not fill, and of blocks computed on top of them."""
        if not unfilled:
            return
        wrong = self._tables.distrust(unfilled)
        stores = [*self.ordered, *((store.gpu_blocks, store.cpu_blocks) for store in self._stores.values())]
        dropped = [cpu for blocks in stores for gpu, cpu in zip(*blocks, strict=True) if gpu in wrong]
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
        self._release(load.give_up(), load.held)
        load.state.loading -= 1

    def _drop_unissued(self, req_id: str) -> None:
        loads = self._loads.get(req_id, [])
        for load in [load for load in loads if not load.issued]:
            loads.remove(load)
            self._release(load.give_up(), load.held)
        if not loads:
            self._loads.pop(req_id, None)

    def _release(self, gpu_blocks: Iterable[int], cpu_blocks: Sequence[int]) -> None:
        """Give back the references of a copy. The tail of a prefix goes first, because its head is worth more."""
        self.cpu_block_pool.free_blocks(reversed(cpu_blocks))
        if self._gpu is not None:
            blocks = self._gpu.blocks
            self._gpu.free_blocks([blocks[block] for block in reversed(list(gpu_blocks))])
