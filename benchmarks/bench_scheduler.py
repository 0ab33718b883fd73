"""CPU time on the scheduler's thread for many small requests without a common prefix.

There are 8 requests at a time, with prompts of 100 to 600 tokens and 16 to 64 tokens of output. An engine without a
model drives the connector's scheduler half and the tiering manager as vLLM does, step by step. The same engine without
a connector is the floor. A disk answers lookups at once. A bucket leaves each prefix undecided for 13 steps, in which
the engine asks about the request again and again.

The same requests come to an engine with a prefix cache, beside an inclusive and an exclusive CPU tier of twice its
size. Their prompts are all stored late. A step computes up to 8,192 tokens, and an eighth of the cache at most.

In a last scenario, the disk hangs while 20,000 stores wait for it, of one block or of 16 each. They hold all rows. Each
further store takes rows of waiting ones; the numbers are the CPU time of a whole ``prepare_store`` that searches rows,
and of such a search per row that it takes.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks.harness import Bench, Sample, spread, timed
from examples.mini_engine.simple import MirroredPool
from tests.connector.fakes import FakeBlocks, FakeConnectorOutput, FakeSchedulerOutput, make_spec
from tiering.advisor.advisor import SizeAdvisor
from tiering.api.keys import PRIMARY_TIER, OffloadKey, make_offload_key
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.api.request import ReqContext
from tiering.block_tier.tier import BlockTier
from tiering.connector.metadata import OffloadingWorkerMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.index.slots import SlotIndex
from tiering.manager.manager import TieringOffloadingManager
from tiering.medium.block_store import BlockIO
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.runtime.news import News
from tiering.secondary.contract import (
    JobResult,
    PrefixAnswer,
    SecondaryTierManager,
    TierContext,
    TierTraits,
    TransferJob,
)
from tiering.secondary.options import BlockTierOptions
from tiering.testing.faults import DictStore

BLOCK = 16
AT_A_TIME = 8
ROWS = 4096
GPU_BLOCKS = 2048
ASKED = 13
"""Number of steps in which a request is asked about until a bucket has answered."""


class Tier(SecondaryTierManager):
    """A tier that holds nothing, accepts every store, and decides a lookup after some steps."""

    name = "tier"
    traits = TierTraits(announces_news=True)

    def __init__(self, asked: int, news: News) -> None:
        self._steps = asked - 1
        self._news = news
        self._step = 0
        self._asked: dict[OffloadKey, int] = {}
        self._done: list[JobResult] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return False

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        decided_at = self._asked.setdefault(keys[0], self._step + self._steps)
        if self._step < decided_at:
            return PrefixAnswer(0, True)
        self._asked.pop(keys[0])
        return PrefixAnswer(0, False)

    def submit_store(self, job: TransferJob) -> None:
        self._done.append(JobResult(job.job_id, True))

    def submit_load(self, job: TransferJob) -> None:
        self._done.append(JobResult(job.job_id, False))

    def get_finished(self) -> Iterable[JobResult]:
        done, self._done = self._done, []
        return done

    def on_schedule_end(self) -> None:
        self._step += 1
        if self._step in self._asked.values():
            self._news.announce()


@dataclass(slots=True, eq=False)
class Request:
    """A request, with the hashes of its whole life."""

    request_id: str
    num_prompt_tokens: int
    outputs: int
    hashes: list[bytes]
    all_token_ids: list[int]
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    lora_request: None = None
    kv_transfer_params: None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens
        self.block_hashes = self.hashes[: self.num_tokens // BLOCK]

    def sample(self) -> None:
        self.num_tokens += 1
        if self.num_tokens % BLOCK == 0:
            self.block_hashes.append(self.hashes[len(self.block_hashes)])


def requests(count: int, seed: int) -> list[Request]:
    """Return requests of random lengths with new tokens."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        prompt, outputs = dice.randrange(100, 600), dice.randrange(16, 64)
        hashes = [dice.randbytes(32) for _ in range((prompt + outputs) // BLOCK + 1)]
        made.append(Request(f"{seed}-{number}", prompt, outputs, hashes, []))
    return made


class NoConnector:
    """The engine's calls, answered as without a connector."""

    def on_new_request(self, request: Request) -> None: ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: FakeBlocks, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: FakeSchedulerOutput) -> None: ...

    def update_connector_output(self, connector_output: FakeConnectorOutput) -> None: ...

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> None: ...

    def take_events(self) -> Sequence[object]:
        return ()

    def has_pending_work(self) -> bool:
        return False


class Engine:
    """An engine that schedules, hands out GPU blocks and samples, and has no model."""

    def __init__(self, connector: OffloadingConnectorScheduler | NoConnector) -> None:
        self.connector = connector
        self._free = deque(range(1, GPU_BLOCKS))
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._stored: list[int] = []
        self.steps = 0

    def serve(self, work: Iterable[Request]) -> None:
        """Serve all requests, :data:`AT_A_TIME` of them at a time."""
        coming = deque(work)
        while coming or self._running or self._waiting:
            while coming and len(self._running) + len(self._waiting) < AT_A_TIME:
                self._waiting.append(coming.popleft())
                self.connector.on_new_request(self._waiting[-1])
            self._step()

    def _step(self) -> None:
        connector, output = self.connector, FakeSchedulerOutput()
        for request in self._running:
            new = self._grow(request)
            output.cached(request, 1, *([new] if new else ()))
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            tokens, _ = connector.get_num_new_matched_tokens(request, 0)
            if tokens is None:
                self._waiting.append(request)
                continue
            connector.update_state_after_alloc(request, FakeBlocks((self._grow(request),)), 0)
            output.new(request, request.num_prompt_tokens, list(request.blocks))
            self._running.append(request)
        meta = connector.build_connector_meta(output)
        if self._stored:
            report = OffloadingWorkerMetadata(dict.fromkeys(self._stored, 1))
            connector.update_connector_output(FakeConnectorOutput(kv_connector_worker_meta=report))
        self._stored = [order.job_id for order in meta.reqs_to_store.values()] if meta is not None else []
        connector.take_events()
        connector.has_pending_work()
        for request in self._running:
            request.num_computed_tokens = request.num_tokens
            request.sample()
            if request.num_tokens == request.num_prompt_tokens + request.outputs:
                connector.request_finished(request, request.blocks)
                self._give_back(request)
        self._running = [r for r in self._running if r.num_tokens < r.num_prompt_tokens + r.outputs]
        self.steps += 1

    def _grow(self, request: Request) -> list[int]:
        """Give ``request`` the blocks that its tokens need, and return the new ones."""
        missing = -(-request.num_tokens // BLOCK) - len(request.blocks)
        new = [self._free.popleft() for _ in range(missing)]
        request.blocks += new
        return new

    def _give_back(self, request: Request) -> None:
        self._free.extend(reversed(request.blocks))


class CachingEngine(Engine):
    """An engine with a prefix cache, whose CPU tier has twice its size.

    Args:
        blocks: number of GPU blocks.
        exclusive: True if the CPU tier is exclusive.
    """

    def __init__(self, blocks: int, *, exclusive: bool) -> None:
        self._pool = MirroredPool(blocks + 1)
        spec = make_spec(gpu_block_size=BLOCK, max_batch_tokens=min(8192, blocks // 8 * BLOCK))
        rows = CPUPrimaryTierOffloadingManager(np.zeros((2 * blocks, 1), np.uint8).data)
        manager = TieringOffloadingManager(rows, [], exclusive=exclusive)
        spec.get_manager = lambda: manager  # type: ignore[method-assign]
        connector = OffloadingConnectorScheduler(spec)
        connector.bind_gpu_block_pool(self._pool)
        super().__init__(connector)

    def _grow(self, request: Request) -> list[int]:
        old, pool = len(request.blocks), self._pool
        new = [block.block_id for block in pool.take(-(-request.num_tokens // BLOCK) - old)]
        request.blocks += new
        for number in range(max(0, old - 1), min(len(request.blocks), len(request.block_hashes))):
            pool.name(pool.blocks[request.blocks[number]], (0, request.block_hashes[number]))
        return new

    def _give_back(self, request: Request) -> None:
        self._pool.free_blocks(self._pool.blocks[block] for block in reversed(request.blocks))


def scheduler_half(asked: int | None, advisor: SizeAdvisor | None = None) -> OffloadingConnectorScheduler:
    """Return a scheduler half with a full CPU tier.

    Args:
        asked: number of steps after which a tier behind the CPU tier answers; None: there is no such tier.
        advisor: the manager's size advisor; default: none.
    """
    spec = make_spec(gpu_block_size=BLOCK)
    rows = CPUPrimaryTierOffloadingManager(np.zeros((ROWS, 1), np.uint8).data)
    news = News()
    manager = TieringOffloadingManager(rows, [] if asked is None else [Tier(asked, news)], news=news, advisor=advisor)
    spec.get_manager = lambda: manager  # type: ignore[method-assign]
    return OffloadingConnectorScheduler(spec)


class HungStore(DictStore):
    """A medium whose writes do not end before ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def put_one(self, block: BlockIO) -> None:
        self.gate.wait()
        super().put_one(block)


def rows_of_waiting_stores(jobs: int, blocks: int, calls: int) -> tuple[float, float]:
    """Return the CPU seconds of the longest store that searches rows, and of all searches per row taken.

    Args:
        jobs: number of stores that wait.
        blocks: blocks of each store.
        calls: number of further stores.
    """
    rows, store = jobs * blocks, HungStore()
    view = np.zeros((rows, 64), np.uint8).data
    namespace = Namespace.build(ModelIdentity(name="m", weights="w", dtype="bfloat16", layout="bench"), (64,))
    index = SlotIndex(2 * rows)
    index.add_free(np.arange(2 * rows))
    context = TierContext("disk", view, (64,), namespace)
    tier = BlockTier(context, BlockTierOptions(type="bench", deadline="1h"), store, index)
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(view), [tier])
    manager.open_tier(0, time.monotonic() + 5.0)
    ctx = ReqContext("waiting")
    manager.on_new_request(ctx)
    taken: list[float] = []
    try:
        for number in range(jobs + calls):
            keys = [make_offload_key(at.to_bytes(32, "big"), 0) for at in range(number * blocks, (number + 1) * blocks)]
            before = manager.get_stats()["manager"]["queued_evicted"] if number >= jobs else 0
            begun = time.thread_time()
            output = manager.prepare_store(keys, ctx, is_last=number < jobs)
            cpu = time.thread_time() - begun
            if number >= jobs and manager.get_stats()["manager"]["queued_evicted"] > before:
                taken.append(cpu)
            if output is not None:
                manager.complete_store(output.keys_to_store, ctx)
            elif number < jobs:
                raise RuntimeError("the manager found no room")
            else:
                time.sleep(0.01)  # A tier that has just begun a store keeps its rows.
        evicted = manager.get_stats()["manager"]["queued_evicted"]
    finally:
        store.gate.set()
        manager.shutdown()
    return max(taken, default=0.0), sum(taken) / max(evicted, 1)


def exclusive_steps(bench: Bench, count: int) -> None:
    """Compare steps beside an exclusive CPU tier with those beside an inclusive one."""
    for blocks in (1024,) if bench.quick else (1024, 8192, 100_000):
        engines = {word: CachingEngine(blocks, exclusive=word == "exclusive") for word in ("inclusive", "exclusive")}
        for engine in engines.values():
            engine.serve(requests(blocks // 6, 0))  # three caches' worth: the CPU tier is full
        seeds = {word: iter(range(1, 1000)) for word in engines}

        def serving(engine: CachingEngine, seed: Iterator[int]) -> Sample:
            work, before = requests(count, next(seed)), engine.steps
            sample = timed(lambda: engine.serve(work))
            return Sample((sample.cpu or sample.value) / (engine.steps - before) * 1e6)

        name = f"a step of 8 small requests, {blocks:,} GPU blocks"
        variants = {word: partial(serving, engine, seeds[word]) for word, engine in engines.items()}
        stats = bench.compare(name, variants, 21, unit="CPU µs/step")
        pairs = zip(stats["exclusive"].samples, stats["inclusive"].samples, strict=True)
        added = spread([mine - other for mine, other in pairs])
        bench.target(f"CPU per step that an exclusive tier adds, {blocks:,} GPU blocks", added.middle, 5.0, "max", "µs")
        bench.note(f"{blocks:,} GPU blocks: {added.middle:.1f} ({added.low:.1f} to {added.high:.1f}) µs a step more.")


def run(bench: Bench) -> None:
    jobs, calls = (500, 50) if bench.quick else (20_000, 1000)
    measured = [(blocks, *rows_of_waiting_stores(jobs, blocks, calls)) for blocks in (1, 16)]
    bench.table(
        f"a store that needs rows of {jobs} waiting stores",
        ("blocks per store", "longest, CPU ms", "CPU µs per row taken"),
        [(str(blocks), f"{longest * 1e3:.2f}", f"{per_row * 1e6:.1f}") for blocks, longest, per_row in measured],
    )
    bench.target("longest search of rows, CPU", max(longest for _, longest, _ in measured) * 1e3, 2.0, "max", "ms")
    count = 20 if bench.quick else 300
    advisor = SizeAdvisor({PRIMARY_TIER: ROWS})
    engines: dict[str, Engine] = {
        "no connector": Engine(NoConnector()),
        "cpu": Engine(scheduler_half(None)),
        "cpu + advisor": Engine(scheduler_half(None, advisor)),
        "cpu + disk": Engine(scheduler_half(1)),
        "cpu + bucket": Engine(scheduler_half(ASKED)),
    }
    seeds = {name: iter(range(1000)) for name in engines}

    def serving(name: str) -> Callable[[], Sample]:
        def serve() -> Sample:
            work, engine = requests(count, next(seeds[name])), engines[name]
            before = engine.steps
            start = time.process_time()
            sample = timed(lambda: engine.serve(work))
            cpu = time.process_time() - start if sample.cpu is None else sample.cpu
            return Sample(cpu / (engine.steps - before) * 1e6)

        return serve

    stats = bench.compare("a step of 8 small requests", {name: serving(name) for name in engines}, unit="CPU µs/step")
    floor = stats["no connector"]
    for name, limit in (("cpu", 60), ("cpu + disk", 80), ("cpu + bucket", 80)):
        added = sorted(mine - bare for mine, bare in zip(stats[name].samples, floor.samples, strict=True))
        bench.target(f"CPU per step that {name} adds", added[len(added) // 2], limit, "max", "µs")
    extra = sorted(mine - bare for mine, bare in zip(stats["cpu + advisor"].samples, stats["cpu"].samples, strict=True))
    per_step = advisor.accesses / engines["cpu + advisor"].steps
    bench.target("CPU per block looked up that the advisor adds", extra[len(extra) // 2] / per_step, 1.0, "max", "µs")
    exclusive_steps(bench, count)
