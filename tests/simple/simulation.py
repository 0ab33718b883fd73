"""The simple scheduler in the mini engine, over tagged memory and copies that a test ends.

The KV of a token is a tag: a digest of the weights, the KV-cache group and all tokens before. All KV that a request
computes on must have the right tags. A block that was reused too early, loaded from the wrong place or found under the
wrong name is noticed at once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.mini_engine.kv_cache import KVCacheManager
from examples.mini_engine.request import Request, Status
from examples.mini_engine.scheduler import ConnectorOutput, Scheduler, SchedulerOutput
from examples.mini_engine.simple import MirroredPool
from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.api.keys import OffloadKey, make_offload_key
from tiering.connector.step_loads import STEP_SECONDS
from tiering.simple.cache_config import KVCacheConfig, KVCacheTensor
from tiering.simple.metadata import NOT_HELD, SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from tiering.simple.scheduler import SimpleCPUOffloadScheduler

BLOCK = 4
BLOCK_BYTES = 64
COPY_SECONDS = STEP_SECONDS / 8
"""Seconds that each load within a step takes; eight times the blocks of the largest one fit."""

Tag = tuple[int, int, int]
"""Weights, group, digest of the tokens up to this one."""


@dataclass(slots=True)
class Copy:
    """A copy that a worker has been ordered to make."""

    event: int
    is_load: bool
    gpu_blocks: list[int]
    cpu_blocks: list[int]
    req_ids: list[str]
    is_within_step: bool = False


@dataclass(slots=True)
class FakeWorker:
    """One worker's memory: block → tags of its tokens."""

    gpu: dict[int, list[Tag | None]] = field(default_factory=dict)
    cpu: dict[int, list[Tag | None]] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    received: set[str] = field(default_factory=set)
    unfilled: set[int] = field(default_factory=set)
    report: SimpleCPUOffloadWorkerMetadata = field(default_factory=SimpleCPUOffloadWorkerMetadata)
    fills_within_step = True

    def end(self, copy: Copy, *, fails: bool = False) -> None:
        """Make ``copy`` now, or fail it; one within a step was made before the step and never fails."""
        self.copies.remove(copy)
        if copy.is_within_step:
            self.report.finished[copy.event], self.report.load_seconds[copy.event] = 1, COPY_SECONDS
            return
        if copy.is_load:
            for gpu, cpu in zip(copy.gpu_blocks, copy.cpu_blocks, strict=True):
                if cpu == NOT_HELD or fails:
                    self.unfilled.add(gpu)
                else:
                    self.gpu[gpu] = list(self.cpu[cpu])
            self.received.update(copy.req_ids)
            return
        for gpu, cpu in zip(copy.gpu_blocks, copy.cpu_blocks, strict=True):
            self.cpu[cpu] = [None] * BLOCK if fails else list(self.gpu.get(gpu, [None] * BLOCK))
        self.report.finished[copy.event] = 1
        if fails:
            self.report.failed.add(copy.event)


def groups_of(windows: Sequence[int | None]) -> tuple[KVCacheGroup, ...]:
    return tuple(
        KVCacheGroup((f"layer{index}",), BLOCK, window, "full_attention" if window is None else "sliding_window")
        for index, window in enumerate(windows)
    )


def make_scheduler(
    gpu_blocks: int,
    cpu_blocks: int,
    windows: Sequence[int | None] = (None,),
    *,
    lazy: bool = False,
    world_size: int = 1,
    budget: int = 16,
    interval: int | None = None,
    within_step: bool = False,
) -> SimpleCPUOffloadScheduler:
    groups = groups_of(windows)
    sizes = (BLOCK,) * len(groups)
    engine = EngineConfig(
        sizes,
        BLOCK,
        groups,
        world_size=world_size,
        max_batch_tokens=budget,
        retention_interval=interval,
        loads_within_step=within_step,
    )
    layers = tuple(group.layer_names[0] for group in groups)
    cache = KVCacheConfig(gpu_blocks, (KVCacheTensor(gpu_blocks * BLOCK_BYTES, layers),), groups)
    return SimpleCPUOffloadScheduler(engine, cache, cpu_blocks * BLOCK_BYTES, lazy)


class Simulation:
    """An engine with ``world_size`` workers; copies wait in ``workers[i].copies`` for :meth:`end_copies`."""

    def __init__(
        self,
        *,
        gpu_blocks: int = 24,
        cpu_blocks: int = 32,
        windows: Sequence[int | None] = (None,),
        lazy: bool = False,
        world_size: int = 1,
        budget: int = 16,
        max_running: int = 4,
        prefix_caching: bool = True,
        interval: int | None = None,
        within_step: bool = False,
    ) -> None:
        self.kv = KVCacheManager(gpu_blocks, BLOCK, windows, prefix_caching)
        self.pool = MirroredPool(gpu_blocks)
        self.kv.pool = self.pool  # type: ignore[assignment]
        words: dict[str, Any] = {"lazy": lazy, "world_size": world_size, "budget": budget, "interval": interval}
        self.half = make_scheduler(gpu_blocks, cpu_blocks, windows, within_step=within_step, **words)
        self.half.bind_gpu_block_pool(self.pool)
        self.scheduler = Scheduler(self.kv, self.half, max_batch_tokens=budget, max_running=max_running)
        self.workers = [FakeWorker() for _ in range(world_size)]
        self.weights = self.oldest_weights = 0
        self.finished: list[Request] = []
        self.metadata: list[SimpleCPUOffloadMetadata] = []
        self.under_way: dict[tuple[bool, int], Copy] = {}
        """Copies that some workers have yet to report, by (is load that is waited for, event)."""
        self._arrived: Counter[str] = Counter()
        self._done: Counter[int] = Counter()
        self._contents: dict[OffloadKey, list[Tag]] = {}

    # ---------------------------------------------------------------------------------------------------------- driving

    def add(self, name: str, tokens: Sequence[int], max_tokens: int = 4) -> Request:
        request = Request(name, tokens, max_tokens)
        self.scheduler.add(request)
        return request

    def run(self, name: str, tokens: Sequence[int], max_tokens: int = 4) -> Request:
        """Run a request to its end; copies end at once."""
        request = self.add(name, tokens, max_tokens)
        while request.status not in {Status.FINISHED, Status.ABORTED}:
            self.step()
            self.end_copies()
        return request

    def end_copies(self) -> None:
        for worker in self.workers:
            for copy in list(worker.copies):
                worker.end(copy)

    def settle(self) -> None:
        """Run until no request and no copy is left."""
        for _ in range(2000):
            if not self.scheduler.has_work():
                return
            self.end_copies()
            self.step()
        raise AssertionError("work never ended")

    def reset(self) -> None:
        """Change the weights and reset everything: all KV computed so far is wrong from now on."""
        self.weights += 1
        self.oldest_weights = self.weights
        self._contents.clear()
        assert self.scheduler.reset()

    def reset_by_half(self) -> None:
        """Change the weights and reset the tiers alone; the engine keeps its cache and running requests."""
        self.weights += 1
        self._contents.clear()
        assert self.half.reset_cache()

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        meta: SimpleCPUOffloadMetadata = output.connector_metadata
        self.metadata.append(meta)
        self._order(meta)
        sampled = {}
        for req_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            end = request.num_computed_tokens
            self._compute(request, end - count, end)
            if end == request.num_tokens:
                sampled[req_id] = (hash(tuple(request.all_token_ids)) % 50, 0, 0.0)
        known = dict(self.scheduler.requests)
        ended = self.scheduler.update(output, sampled, self._collect())
        self.finished += ended
        assert all(request.request_id in known for request in ended)
        return output

    # ----------------------------------------------------------------------------------------------------------- checks

    def check_references(self) -> None:
        """Check that both pools have exactly the references of requests and of unfinished copies."""
        gpu: Counter[int] = Counter()
        cpu: Counter[int] = Counter()
        for copy in self.under_way.values():
            gpu.update(copy.gpu_blocks)
            cpu.update(block for block in copy.cpu_blocks if block != NOT_HELD)
        for gpu_blocks, cpu_blocks in self.half.ordered:
            gpu.update(gpu_blocks)
            cpu.update(cpu_blocks)
        for req_id in self.kv._tables:
            for table in self.kv._tables[req_id].blocks:
                gpu.update(block.block_id for block in table if not block.is_null)  # type: ignore[attr-defined]
        assert {block.block_id: block.ref_cnt for block in self.pool.blocks[1:] if block.ref_cnt} == dict(gpu)
        pool = self.half.cpu_block_pool
        assert pool.refs == cpu
        free = [block.block_id for block in self.pool.free]
        assert len(free) == len(self.pool.free) == len(set(free)) == self.kv.num_blocks - 1 - len(gpu)
        assert pool.num_free_blocks + len(pool.refs) == pool.num_blocks

    def check_contents(self) -> None:
        """Check on every worker that each findable block of the CPU pool has the content of its name."""
        for key, block in self.half.cpu_block_pool.cached.items():
            for worker in self.workers:
                assert worker.cpu[block] == self._contents[key]

    def check_nothing_is_held(self) -> None:
        """Check that nothing is held when nothing runs: no references, and all blocks are free or findable."""
        self.check_references()
        self.check_contents()
        pool = self.half.cpu_block_pool
        assert len(self.pool.free) == self.kv.num_blocks - 1
        assert (len(pool.refs), len(pool.pending)) == (0, 0)
        assert pool.num_blank_blocks + len(pool.cached) == pool.num_free_blocks == pool.num_blocks
        assert not self.half.has_pending_work()
        assert not self.half.states
        assert self.half.eager.idle

    # -------------------------------------------------------------------------------------------------------- internals

    def _order(self, meta: SimpleCPUOffloadMetadata) -> None:
        if meta.need_flush:
            for worker in self.workers:
                for copy in [copy for copy in worker.copies if not copy.is_load]:
                    worker.end(copy)
        if meta.within_step is not None:
            event, gpu_blocks, cpu_blocks = meta.within_step
            self._order_one(Copy(event, True, list(gpu_blocks), list(cpu_blocks), [], is_within_step=True))
            for worker in self.workers:
                for gpu, cpu in zip(gpu_blocks, cpu_blocks, strict=True):
                    worker.gpu[gpu] = list(worker.cpu[cpu]) if worker.fills_within_step else [None] * BLOCK
        if meta.load_event >= 0:
            req_ids = meta.load_event_to_reqs[meta.load_event]
            self._order_one(Copy(meta.load_event, True, meta.load_gpu_blocks, meta.load_cpu_blocks, req_ids))
        if meta.store_event >= 0:
            self._order_one(Copy(meta.store_event, False, meta.store_gpu_blocks, meta.store_cpu_blocks, []))

    def _order_one(self, copy: Copy) -> None:
        assert len(copy.gpu_blocks) == len(copy.cpu_blocks) > 0
        assert 0 not in copy.gpu_blocks, "the null block is never copied"
        self.under_way[copy.is_load and not copy.is_within_step, copy.event] = copy
        for worker in self.workers:
            worker.copies.append(copy)

    def _collect(self) -> ConnectorOutput:
        invalid: set[int] = set()
        report = SimpleCPUOffloadWorkerMetadata()
        for worker in self.workers:
            invalid |= worker.unfilled
            report.aggregate(worker.report)
            self._arrived.update(worker.received)
            worker.unfilled, worker.received, worker.report = set(), set(), SimpleCPUOffloadWorkerMetadata()
        received = {req_id for req_id, workers in self._arrived.items() if workers == len(self.workers)}
        for req_id in received:
            del self._arrived[req_id]
        for key, copy in list(self.under_way.items()):
            if key[0] and received.issuperset(copy.req_ids):
                del self.under_way[key]
        for event, workers in report.finished.items():
            self._done[event] += workers
            if self._done[event] == len(self.workers):
                del self.under_way[False, event]
        return ConnectorOutput(set(), received, invalid, None, report)

    def _compute(self, request: Request, start: int, end: int) -> None:
        tokens = request.all_token_ids
        digests = [0]
        for token in tokens[:end]:
            digests.append(hash((digests[-1], token)))
        tables = self.kv.blocks_of(request).get_block_ids()
        weights = self.weights  # the oldest weights of all KV that the request attends to
        for group, (window, table) in enumerate(zip(self.kv.windows, tables, strict=True)):
            seen = 0 if window is None else max(0, start - window + 1)
            for worker in self.workers:
                for position in range(seen, start):
                    block = worker.gpu.get(table[position // BLOCK])
                    assert block is not None, f"{request.request_id}: token {position} of group {group} has no KV"
                    tag = block[position % BLOCK]
                    assert tag is not None
                    assert tag[0] >= self.oldest_weights
                    assert tag[1:] == (group, digests[position + 1]), (
                        f"{request.request_id}: token {position} of group {group} is wrong"
                    )
                    weights = min(weights, tag[0])
        for group, table in enumerate(tables):
            for worker in self.workers:
                for position in range(start, end):
                    if position % BLOCK == 0:
                        worker.gpu[table[position // BLOCK]] = [None] * BLOCK
                    worker.gpu[table[position // BLOCK]][position % BLOCK] = (weights, group, digests[position + 1])
            for index in range(start // BLOCK, end // BLOCK):
                key = make_offload_key(request.block_hashes[index], group)
                self._contents[key] = [
                    (self.weights, group, digest) for digest in digests[index * BLOCK + 1 : (index + 1) * BLOCK + 1]
                ]


def tokens(seed: int, length: int, shared: int = 0) -> list[int]:
    """Return random tokens; all prompts have their first ``shared`` tokens in common."""
    common, own = random.Random(-1), random.Random(seed)
    return [common.randrange(50) for _ in range(shared)] + [own.randrange(50) for _ in range(length - shared)]
