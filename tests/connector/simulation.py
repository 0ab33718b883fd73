"""A simulated engine with block-by-block memory, to prove KV right in every interleaving of copies.

The scheduler, block pool and prefix cache are the mini engine's; instead of tensors, each GPU block and each primary
row holds the name of the content that was written last. Copies are as late as they can be: a store reads, and a load
writes, when the copy ends. All blocks that a request attends to must be filled before the request computes. Each key
that the manager calls readable must lead to the content of that key.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.mini_engine.kv_cache import KVCacheManager
from examples.mini_engine.request import Request
from examples.mini_engine.scheduler import ConnectorOutput, Scheduler, SchedulerOutput
from examples.mini_engine.simple import MirroredPool
from tests.connector.fakes import FakeManager, make_spec
from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.request import ReqContext
from tiering.api.transfer import GPULoadStoreSpec, LoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata, OffloadingWorkerMetadata, TransferOrder
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.step_loads import STEP_SECONDS

BLOCK = 4
COPY_SECONDS = STEP_SECONDS / 8
"""Seconds that each load takes; eight times the blocks of the largest one fit into a step."""
Content = tuple[int, str]
"""The epoch (number of resets so far) and the name of the written content."""


class WrongKVError(AssertionError):
    """A request would have computed on KV that is not its own, or a tier would have served such KV."""


class WhimsicalManager(FakeManager):
    """A manager that at random loses blocks before their load, refuses stores and defers lookups."""

    loses_matched = True

    def __init__(self, capacity: int, rng: random.Random) -> None:
        super().__init__(capacity)
        self._rng = rng

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1):  # type: ignore[no-untyped-def]
        self.undecided = {self._rng.choice(keys)} if keys and self._rng.random() < 0.05 else set()
        return super().match_prefix(keys, req_context, at_least=at_least)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self.undecided = set()
        victim = self._rng.choice(keys)
        if self.loses_matched and self._rng.random() < 0.1 and self.refs[victim] == 0:
            self.drop(victim)
        return super().prepare_load(keys, req_context)

    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False):  # type: ignore[no-untyped-def]
        self.refuse_stores = self._rng.random() < 0.1
        self.reverse_stores = self._rng.random() < 0.2
        return super().prepare_store(keys, req_context, is_last=is_last)


@dataclass
class SimWorker:
    """One worker's memory and copies."""

    factor: int
    rng: random.Random
    gpu: dict[int, Content] = field(default_factory=dict)
    rows: dict[tuple[int, int, int], Content] = field(default_factory=dict)
    deferred: list[tuple[str, TransferOrder]] = field(default_factory=list)
    running: dict[int, tuple[str, TransferOrder]] = field(default_factory=dict)
    loading: dict[str, int] = field(default_factory=dict)
    unfilled_later: dict[str, list[int]] = field(default_factory=dict)
    copied: set[int] = field(default_factory=set)
    """Loads within a step whose ends were not reported."""
    fills_within_step = True
    invalid: set[int] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    report: OffloadingWorkerMetadata = field(default_factory=OffloadingWorkerMetadata)

    def before_step(self, metadata: OffloadingConnectorMetadata) -> None:
        if metadata.jobs_to_flush:
            self._submit_deferred()
            for job in metadata.jobs_to_flush & self.running.keys():
                self._end(job)

    def start(self, metadata: OffloadingConnectorMetadata) -> None:
        self._submit_deferred()
        for name, blocks in metadata.failed_loads.items():
            if name in metadata.reqs_to_load:
                self.unfilled_later[name] = blocks
            else:
                self.invalid.update(blocks)
                self.received.add(name)
        for name, order in metadata.loads_within_step.items():
            self.running[order.job_id] = (name, order)
            self.copied.add(order.job_id)
            source, destination = order.spec
            assert isinstance(destination, GPULoadStoreSpec)
            for block, place in self._places(destination, source):
                self.gpu[block] = self.rows[place] if self.fills_within_step else self.gpu.get(block, (-1, "garbage"))
        for name, order in metadata.reqs_to_load.items():
            self.running[order.job_id] = (name, order)

    def defer(self, metadata: OffloadingConnectorMetadata) -> None:
        self.deferred += metadata.reqs_to_store.items()

    def progress(self, chance: float) -> None:
        for job in list(self.running):
            if self.rng.random() < chance:
                self._end(job)

    def _submit_deferred(self) -> None:
        for name, order in self.deferred:
            self.running[order.job_id] = (name, order)
        self.deferred = []

    def _end(self, job: int) -> None:
        name, order = self.running.pop(job)
        source, destination = order.spec
        if job in self.copied:
            self.copied.discard(job)
            self.report.finished[job], self.report.load_seconds[job] = 1, COPY_SECONDS
            return
        fails = self.rng.random() < 0.08
        self.report.finished[job] = 1
        if fails:
            self.report.failed.add(job)
        if isinstance(source, GPULoadStoreSpec):
            for block, place in self._places(source, destination):
                self.rows[place] = (-1, "garbage") if fails else self.gpu[block]
            return
        assert isinstance(destination, GPULoadStoreSpec)
        self.report.load_seconds[job] = COPY_SECONDS
        for block, place in self._places(destination, source):
            self.gpu[block] = (-1, "garbage") if fails else self.rows[place]
        if fails:
            self.invalid.update(destination.block_ids.tolist())
        self.invalid.update(self.unfilled_later.pop(name, ()))
        self.received.add(name)

    def _places(self, gpu: GPULoadStoreSpec, cpu: LoadStoreSpec) -> Iterable[tuple[int, tuple[int, int, int]]]:
        """Return (GPU block, (row, group, position in the row)) for each block of a transfer.

        Fails if the transfer names a row that no block needs.
        """
        rows = iter(cpu.block_ids.tolist())  # type: ignore[attr-defined]
        blocks = iter(gpu.block_ids.tolist())
        for group, (size, index) in enumerate(zip(gpu.group_sizes, gpu.block_indices, strict=True)):
            row = -1
            for offset in range(size):
                position = (index + offset) % self.factor
                if offset == 0 or position == 0:
                    row = next(rows)
                yield next(blocks), (row, group, position)
        if next(rows, None) is not None:
            raise WrongKVError("more rows than blocks")


class Beside:
    """Another connector under vLLM's MultiConnector: it loads blocks that ours lacks, and sometimes fails."""

    def __init__(self, ours: OffloadingConnectorScheduler, rng: random.Random) -> None:
        self._ours = ours
        self._rng = rng
        self._promised: dict[str, int] = {}
        self.loads: list[tuple[Request, int, int, tuple[list[int], ...]]] = []
        """Request, first token, last token and blocks of each load that is about to begin."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._promised.pop(request.request_id, None)
        answer = self._ours.get_num_new_matched_tokens(request, num_computed_tokens)
        blocks = (request.num_tokens - 1 - num_computed_tokens) // BLOCK
        if answer[0] != 0 or blocks < 1 or self._rng.random() < 0.6:
            return answer
        self._promised[request.request_id] = num_computed_tokens
        return BLOCK * self._rng.randint(1, blocks), True

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        start = self._promised.pop(request.request_id, None)
        if start is not None and num_external_tokens:
            self.loads.append((request, start, start + num_external_tokens, blocks.get_block_ids()))
            num_external_tokens = 0
        self._ours.update_state_after_alloc(request, blocks, num_external_tokens)


class Simulation:
    """An engine with connector, manager and workers, driven by one seeded random generator."""

    half_resets = 0.02
    """Probability, per step, of a reset of the tiers that leaves the engine's own cache as it is."""
    new_epochs = 0.02
    """Probability, per step, of a new common epoch, which empties the manager at the step's end."""

    def __init__(
        self,
        seed: int,
        windows: Sequence[int | None],
        *,
        factor: int,
        world_size: int,
        prompt_only: bool,
        exclusive: bool = False,
        feeds_tiers: bool = False,
        within_step: bool = False,
        manager: Any = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.windows, self.factor = windows, factor
        self.epoch = 0
        self.oldest_epoch = 0
        """Epoch of the oldest KV that the engine may still use.

        A reset of the tiers may leave the engine's own cache as it is.
        """
        self.now = 0.0
        self.manager = manager or WhimsicalManager(24 * len(windows), self.rng)
        spec = make_spec(
            *windows,
            gpu_block_size=BLOCK,
            block_size=BLOCK * factor,
            manager=self.manager,
            world_size=world_size,
            offload_prompt_only=prompt_only,
            sharer_wait=3.0,
            max_batch_tokens=24,
            loads_within_step=within_step,
            retention_interval=random.Random(seed).choice((None, 0, 4 * BLOCK)),
        )
        self.manager.loses_matched = not within_step
        self.connector = OffloadingConnectorScheduler(spec, clock=lambda: self.now)
        self.kv = KVCacheManager(20 * len(windows), BLOCK, windows)
        self.manager.exclusive, self.manager.feeds_tiers = exclusive, feeds_tiers
        if exclusive or self.rng.random() < 0.5:
            self.kv.pool = pool = MirroredPool(20 * len(windows))  # type: ignore[assignment]
            self.connector.bind_gpu_block_pool(pool)
        self.other = Beside(self.connector, self.rng)
        self.scheduler = Scheduler(self.kv, self.other, max_batch_tokens=24, max_running=3)
        self.workers = [SimWorker(factor, self.rng) for _ in range(world_size)]
        self.received: dict[str, int] = {}
        self.count = 0
        self.loaded_requests = self.loads_within_step = 0
        self.flushed = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._disturb()
            self.step(progress=0.4)
        for _ in range(400):
            if not self.scheduler.has_work():
                break
            self.step(progress=0.9)
        self._check_end()

    def _disturb(self) -> None:
        if len(self.scheduler.requests) < 5 and self.rng.random() < 0.4:
            self.count += 1
            stem = [self.rng.randrange(2)] * self.rng.randrange(4, 36)
            prompt = stem + [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 12))]
            self.scheduler.add(Request(f"r{self.count}", prompt, max_tokens=self.rng.randrange(1, 10)))
        if self.scheduler.requests and self.rng.random() < 0.05:
            self.scheduler.abort(self.rng.choice(list(self.scheduler.requests)))
        if self.rng.random() < 0.02:
            self.epoch += 1
            self.oldest_epoch = self.epoch
            self.scheduler.reset()
        if self.rng.random() < self.half_resets:
            self.epoch += 1
            self.connector.reset_cache()
        self.manager.epoch_begins = self.rng.random() < self.new_epochs

    def step(self, progress: float) -> None:
        self.now += 1.0
        epochs = self.manager.epochs_begun
        output = self.scheduler.schedule()
        self.epoch += self.manager.epochs_begun - epochs
        metadata: OffloadingConnectorMetadata = output.connector_metadata
        self.flushed += len(metadata.jobs_to_flush)
        self.loaded_requests += len(metadata.reqs_to_load)
        self.loads_within_step += len(metadata.loads_within_step)
        loads, self.other.loads = self.other.loads, []
        for worker in self.workers:
            worker.before_step(metadata)
            worker.progress(progress / 2)
            worker.start(metadata)
            for load in loads:
                self._load_elsewhere(worker, *load)
            self._compute(worker, output)
            worker.defer(metadata)
            worker.progress(progress)
        sampled = self._sample(output)
        self.scheduler.update(output, sampled, self._connector_output())
        self._check_readable()

    def _connector_output(self) -> ConnectorOutput:
        report: OffloadingWorkerMetadata | None = None
        invalid: set[int] = set()
        for worker in self.workers:
            if not worker.report.is_empty():
                report = worker.report if report is None else report.aggregate(worker.report)
                worker.report = OffloadingWorkerMetadata()
            invalid |= worker.invalid
            worker.invalid = set()
            for name in worker.received:
                self.received[name] = self.received.get(name, 0) + 1
            worker.received = set()
        done = {name for name, count in self.received.items() if count == len(self.workers)}
        self.received = {name: count for name, count in self.received.items() if name not in done}
        return ConnectorOutput(None, done, invalid, None, report)

    # -------------------------------------------------------------------------------------------------------- computing

    def _name(self, request: Request, group: int, index: int, end: int) -> str:
        """Return the name of the content of block ``index`` once ``end`` tokens of the request are computed."""
        upto = min(end, (index + 1) * BLOCK)
        if upto == (index + 1) * BLOCK:
            return make_offload_key(request.block_hashes[index], group).hex()
        return f"{group} {request.all_token_ids[:upto]}"

    def _compute(self, worker: SimWorker, output: SchedulerOutput) -> None:
        counts: Mapping[str, int] = output.num_scheduled_tokens
        for name, count in counts.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            start = end - count
            epoch = self.epoch  # epoch of the oldest block that the request attends to
            tables = self.kv.blocks_of(request).get_block_ids()
            for group, (window, table) in enumerate(zip(self.windows, tables, strict=True)):
                oldest = 0 if window is None else max(0, start - window + 1)
                for index in range(oldest // BLOCK, -(-start // BLOCK)):
                    wanted = {self._name(request, group, index, start), self._name(request, group, index, end)}
                    found = worker.gpu.get(table[index])
                    if (
                        found is None
                        or found[0] < self.oldest_epoch
                        or (found[1] not in wanted and not self._is_full(request, group, index, found))
                    ):
                        raise WrongKVError(
                            f"{name} computes token {start}: block {index} of group {group} holds {found}, not {wanted}"
                        )
                    epoch = min(epoch, found[0])
            for group, table in enumerate(tables):
                for index in range(start // BLOCK, -(-end // BLOCK)):
                    if not table[index]:
                        raise WrongKVError(f"{name} computes into the null block")
                    worker.gpu[table[index]] = (epoch, self._name(request, group, index, end))

    def _is_full(self, request: Request, group: int, index: int, found: Content) -> bool:
        """Return True for a full block; after a failed load the engine steps back into full blocks."""
        return (
            index < len(request.block_hashes) and found[1] == make_offload_key(request.block_hashes[index], group).hex()
        )

    def _load_elsewhere(
        self, worker: SimWorker, request: Request, start: int, end: int, tables: tuple[list[int], ...]
    ) -> None:
        """Begin to fill blocks through the other connector, which may fail at any block on any worker."""
        filled = start // BLOCK + (self.rng.randrange((end - start) // BLOCK) if self.rng.random() < 0.2 else end)
        for group, table in enumerate(tables):
            for index in range(start // BLOCK, min(end // BLOCK, len(table))):
                if table[index]:
                    good = index < filled
                    worker.gpu[table[index]] = (
                        (self.epoch, self._name(request, group, index, end)) if good else (-1, "garbage")
                    )
                    if not good:
                        worker.invalid.add(table[index])
        worker.received.add(request.request_id)

    def _sample(self, output: SchedulerOutput) -> dict[str, tuple[int, int, float]]:
        sampled = {}
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            if request.num_computed_tokens == request.num_tokens:
                sampled[name] = (sum(request.all_token_ids) % 3, 0, self.now)
        return sampled

    # --------------------------------------------------------------------------------------------------------- checking

    def _check_readable(self) -> None:
        for key, row in self.manager.rows.items():
            if self.manager.refs[key] >= 0:
                group = int.from_bytes(key[-4:], "big")
                for worker in self.workers:
                    epoch, name = worker.rows[row, group, self.factor - 1]
                    if (epoch, name) != (self.epoch, key.hex()):
                        raise WrongKVError(
                            f"row {row} is to hold {key.hex()} of epoch {self.epoch}, holds {name} of {epoch}"
                        )

    def check_notes(self) -> None:
        """Check that each block which waits for a late store has the content that its name says."""
        cache = self.connector._engine_cache
        assert cache is not None
        for key, ids in cache.blocks_of.items():
            for worker in self.workers:
                if worker.gpu[ids[-1]] != (self.epoch, key.hex()) and cache.holds([key]) == [True]:
                    raise WrongKVError(f"GPU block {ids[-1]} is noted for {key.hex()}, holds {worker.gpu[ids[-1]]}")

    def _check_end(self) -> None:
        assert not self.scheduler.has_work()
        assert not self.manager.live
        assert set(self.manager.refs.values()) <= {0}
        assert not self.manager.lost
        assert not len(self.connector.fences)
        assert len(self.kv.pool.free) == self.kv.num_blocks - 1
        cpu = self.connector.get_stats()["tiers"]["cpu"]
        assert cpu["queries"] == cpu["hits"] + cpu["misses"]
