"""A stack behind vLLM's own tiering: the time that it costs vLLM's thread.

vLLM's real ``TieringOffloadingManager`` over a CPU tier without a GPU, with ``KVTieringTier`` (its ``primary`` and a
``memory`` tier) or vLLM's example tier, which moves no bytes, as the only secondary tier. Blocks are stored, evicted
from vLLM's CPU tier by others, looked up until they are hits, and loaded. "the tier" is the time inside the tier's own
methods, "all" that of all calls of the manager; what vLLM would do between two steps is a sleep, which is not counted.
"CPU" is the processor time of vLLM's thread alone; the other time includes waits for the interpreter's lock. The
number of blocks is that of the stored and the loaded ones; the time of repeated lookups is part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness import Bench, Sample
from tests.engines.vllm_tier.double import METHODS, spec_of

BLOCK_BYTES = 64 << 10
LIMIT = 20.0
"""Microseconds per block on vLLM's thread that the tier may take."""


class Timed:
    """Seconds of calls: by the wall, and of the processor."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def wrap(self, thing: Any, names: Any) -> None:
        """Measure the methods of an object from now on."""
        for name in names:
            if (method := getattr(thing, name, None)) is not None:
                setattr(thing, name, self._timed(method))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **words: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*arguments, **words)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.thread_time() - cpu

        return call


def run(bench: Bench) -> None:
    blocks = 64 if bench.quick else 512
    variants = {
        "a stack": lambda: _round(blocks, ours=True),
        "vLLM's example tier": lambda: _round(blocks, ours=False),
    }
    stats = bench.compare(f"{blocks} blocks of {BLOCK_BYTES >> 10} KiB", variants, unit="µs per block in the tier")
    bench.target("a stack on vLLM's thread", stats["a stack"].median, LIMIT, "max", "µs per block")
    bench.note('Repeat with `make bench-vllm BENCH_ARGS="--only tier"`.')


@contextmanager
def _manager(rows: int, *, ours: bool) -> Iterator[tuple[Any, Any]]:
    """Build vLLM's manager, and yield it with its secondary tier."""
    from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

    from tiering.engines.vllm_tier import KVTieringTier

    memory = np.zeros((rows, BLOCK_BYTES), np.int8)
    region = SimpleNamespace(create_kv_memoryview=lambda: memory.data, cleanup=lambda: None)
    primary = CPUPrimaryTierOffloadingManager(num_chunks=rows, mmap_region=region)
    common = {"offloading_spec": spec_of(), "primary_kv_view": primary.get_kv_memoryview()}
    size = 4 * rows * BLOCK_BYTES
    secondary = [{"type": "memory", "capacity": size}]
    tier = (
        KVTieringTier(**common, tier_type="kv_tiering", primary={"capacity": size}, secondary=secondary)
        if ours
        else ExampleSecondaryTierManager(**common, tier_type="example")
    )
    manager = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[tier])
    try:
        yield manager, tier
    finally:
        manager.shutdown()


def _round(blocks: int, *, ours: bool) -> Sample:
    """Move blocks through vLLM's manager once, and return the microseconds per block."""
    from vllm.v1.kv_offload import base

    with _manager(blocks, ours=ours) as (manager, tier):
        inside, whole = Timed(), Timed()
        inside.wrap(tier, [name for name in METHODS if name not in {"shutdown", "build_metric_definitions"}])
        whole.wrap(
            manager,
            ["on_new_request", "prepare_store", "complete_store", "lookup", "prepare_load", "complete_load"],
        )
        whole.wrap(
            manager,
            ["on_schedule_end", "on_request_finished", "touch"],
        )
        step = base.ScheduleEndContext((), ())

        def until(happened: Callable[[], bool]) -> None:
            while not happened():
                manager.on_schedule_end(step)
                time.sleep(2e-3)

        keys = [base.make_offload_key(number.to_bytes(32, "big"), 0) for number in range(2 * blocks)]
        for name, chosen in (("first", keys[:blocks]), ("second", keys[blocks:])):
            ctx = base.ReqContext(name)
            manager.on_new_request(ctx)
            if manager.prepare_store(chosen, ctx) is None:
                raise RuntimeError("vLLM's CPU tier has no room")
            manager.complete_store(chosen, ctx)
            manager.on_request_finished(ctx)
            until(lambda: not manager.has_pending_work())
        ctx = base.ReqContext("loads")
        manager.on_new_request(ctx)
        wanted = keys[:blocks]

        def found() -> bool:
            answers = {manager.lookup(key, ctx) for key in wanted}
            return answers == {base.LookupResult.HIT}

        until(found)
        manager.prepare_load(wanted, ctx)
        manager.complete_load(wanted, ctx)
        manager.on_request_finished(ctx)
        manager.on_schedule_end(step)
    micro = 1e6 / (3 * blocks)
    extra = {"CPU, the tier": inside.cpu * micro, "all": whole.wall * micro, "CPU, all": whole.cpu * micro}
    return Sample(inside.wall * micro, None, extra)
