"""The simple scheduler under the engine: a CPU pool that mirrors the GPU's, without tiers behind it.

The simple scheduler works on the engine's own block pool: it holds references there while copies run and, in its lazy
mode, walks the free queue. So the engine's pool is replaced by one that has these things under the names that vLLM's
pool has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from examples.mini_engine.engine import Engine, EngineOptions
from examples.mini_engine.kv_cache import CacheKey
from examples.mini_engine.worker import Worker, layer_name
from tiering.api.engine import CanonicalKVCaches, EngineConfig, KVCacheGroup
from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.transfer import CPULoadStoreSpec
from tiering.copy.contract import OffloadingHandler
from tiering.copy.handlers import HandlerEntry
from tiering.copy.layout import RowLayout
from tiering.errors import ConfigError
from tiering.simple.cache_config import KVCacheConfig, KVCacheTensor
from tiering.simple.scheduler import SimpleCPUOffloadScheduler
from tiering.simple.selection import SimpleOptions, simple_options
from tiering.simple.worker import SimpleCPUOffloadWorker

ReplaceLoads = Callable[[OffloadingHandler], OffloadingHandler]


@dataclass(slots=True, eq=False)
class PoolBlock:
    """One block: its references, its name, and its neighbours while it is free."""

    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    key: CacheKey | None = None
    block_hash: OffloadKey | None = None
    prev_free_block: PoolBlock | None = None
    next_free_block: PoolBlock | None = None

    @property
    def users(self) -> int:
        """As the engine calls the references."""
        return self.ref_cnt


class FreeQueue:
    """The free blocks, between two blocks that are none; the next to be reused comes first."""

    def __init__(self) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = PoolBlock(-1), PoolBlock(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PoolBlock]:
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            yield block
            block = block.next_free_block

    def append(self, block: PoolBlock) -> None:
        last, tail = self.fake_free_list_tail.prev_free_block, self.fake_free_list_tail
        block.prev_free_block, block.next_free_block = last, tail
        last.next_free_block = tail.prev_free_block = block  # type: ignore[union-attr]
        self._count += 1

    def remove(self, block: PoolBlock) -> None:
        block.prev_free_block.next_free_block = block.next_free_block  # type: ignore[union-attr]
        block.next_free_block.prev_free_block = block.prev_free_block  # type: ignore[union-attr]
        block.prev_free_block = block.next_free_block = None
        self._count -= 1

    def pop(self) -> PoolBlock:
        block = self.fake_free_list_head.next_free_block
        if block is None or block is self.fake_free_list_tail:
            message = "no block is free"
            raise IndexError(message)
        self.remove(block)
        return block


class MirroredPool:
    """A replacement of the engine's ``BlockPool`` with the interface that the simple scheduler needs."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [PoolBlock(number) for number in range(num_blocks)]
        self.null = self.null_block = self.blocks[0]
        self.null.ref_cnt, self.null.is_null = 1, True
        self.free = self.free_block_queue = FreeQueue()
        self.cached: dict[CacheKey, PoolBlock] = {}
        for block in self.blocks[1:]:
            self.free.append(block)

    def take(self, count: int) -> list[PoolBlock]:
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            self._forget(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[PoolBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[PoolBlock]) -> None:
        for block in ordered_blocks:
            if block is not self.null:
                block.ref_cnt -= 1
                if block.ref_cnt == 0:
                    self.free.append(block)

    share, release = touch, free_blocks

    def name(self, block: PoolBlock, key: CacheKey) -> None:
        if block.key is None and key not in self.cached:
            block.key, block.block_hash = key, make_offload_key(key[1], key[0])
            self.cached[key] = block

    def reset(self) -> None:
        for block in list(self.cached.values()):
            self._forget(block)

    def _forget(self, block: PoolBlock) -> None:
        if block.key is not None:
            del self.cached[block.key]
            block.key = block.block_hash = None


class SimpleWorkerHalf(SimpleCPUOffloadWorker):
    """The worker half of the simple scheduler; ``replace_loads`` (for controls) replaces the load handler."""

    replace_loads: ReplaceLoads | None = None

    def make_handlers(
        self, kv_caches: CanonicalKVCaches, rows: memoryview, layout: RowLayout
    ) -> Iterator[HandlerEntry]:
        for source, destination, handler in super().make_handlers(kv_caches, rows, layout):
            if self.replace_loads is not None and issubclass(source, CPULoadStoreSpec):
                handler = self.replace_loads(handler)
            yield source, destination, handler


@dataclass(slots=True)
class SimpleTiers:
    """Both halves, connected; what the engine expects of :class:`examples.mini_engine.tiers.Tiers`."""

    scheduler_half: SimpleCPUOffloadScheduler
    worker_half: SimpleCPUOffloadWorker
    bytes_moved: dict[str, int] = field(default_factory=dict)

    def collect(self, stats: Any) -> None:
        """Add up the statistics of a step."""
        for name, value in (stats.reduce() if stats is not None else {}).items():
            if name.endswith("_total_bytes"):
                kind = name.removesuffix("_total_bytes")
                self.bytes_moved[kind] = self.bytes_moved.get(kind, 0) + int(value)

    def shutdown(self) -> None:
        """Stop the copies."""
        self.worker_half.shutdown()
        self.scheduler_half.shutdown()


class SimpleEngine(Engine):
    """An engine whose ``options.stack`` says ``mode: simple`` (or ``options.offload`` does)."""

    def __init__(self, options: EngineOptions, replace_loads: ReplaceLoads | None = None) -> None:
        extra: Mapping[str, Any] = {**options.offload, **({} if options.stack is None else {"config": options.stack})}
        chosen = simple_options(extra)
        if chosen is None:
            raise ConfigError("mode: the simple engine needs a stack that says mode: simple")
        super().__init__(replace(options, stack=None, offload={}))
        pool = MirroredPool(options.num_blocks)
        self.kv.pool = pool  # type: ignore[assignment]
        self.tiers = connect_simple(self.worker, chosen, pool, options, replace_loads)  # type: ignore[assignment]
        self.worker.connector = self.tiers.worker_half  # type: ignore[union-attr]
        self.scheduler.connector = self.tiers.scheduler_half  # type: ignore[union-attr]


def connect_simple(
    worker: Worker,
    chosen: SimpleOptions,
    pool: MirroredPool,
    options: EngineOptions,
    replace_loads: ReplaceLoads | None = None,
) -> SimpleTiers:
    """Build both halves for the engine of ``worker``."""
    config, cache = worker.model.config, worker.cache
    groups = tuple(
        KVCacheGroup(
            tuple(map(layer_name, layers)),
            cache.block_size,
            config.window_of(layers[0]),
            "full_attention" if config.window_of(layers[0]) is None else "sliding_window",
        )
        for layers in config.groups
    )
    engine = EngineConfig(
        block_sizes=(cache.block_size,) * len(groups),
        hash_block_size=cache.block_size,
        groups=groups,
        enable_prefix_caching=options.prefix_caching,
        max_batch_tokens=options.max_batch_tokens,
        loads_within_step=options.loads_within_step,
    )
    shared_by = [
        tuple(layer_name(layer) for layer, place in cache.layer_tensor.items() if place == number)
        for number in range(len(cache.tensors))
    ]
    tensors = tuple(
        KVCacheTensor(tensor.nbytes, layers) for tensor, layers in zip(cache.tensors, shared_by, strict=True)
    )
    kv_cache = KVCacheConfig(options.num_blocks, tensors, groups)
    worker_half = SimpleWorkerHalf(engine, kv_cache, chosen.cpu_capacity_bytes)
    worker_half.replace_loads = replace_loads
    worker_half.register_kv_caches(worker.kv_caches())
    scheduler_half = SimpleCPUOffloadScheduler(
        engine,
        kv_cache,
        chosen.cpu_capacity_bytes,
        chosen.lazy_offload,
        enable_kv_cache_events=chosen.events,
        self_describing_kv_events=chosen.self_describing_kv_events,
    )
    scheduler_half.bind_gpu_block_pool(pool)
    return SimpleTiers(scheduler_half, worker_half)
