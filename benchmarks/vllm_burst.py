"""The burst of chats through our tiering manager and through vLLM's own, in alternating rounds.

The burst is that of the benchmark ``burst``: 200 conversations of 5 turns, 8 requests at a time, without a model, a
primary tier for a quarter of the blocks. Both managers have a disk tier in a new directory: ours the local tier, vLLM's
its ``fs`` tier. One driver serves both, step by step, and compares the first and the last bytes of every block that is
hit with its key. vLLM's manager has no batch lookup, so it is asked key by key, as vLLM's scheduler asks it. The local
tier verifies every load, vLLM's files are not verified. The value is the time in which all requests were served. A
block that is not found costs nothing here, where a model would compute it. So a time means little without the share of
hits.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.bench_burst import BLOCK_BYTES, Driver, Prompt, Scenario, ideal_rate, make_burst
from benchmarks.harness import Bench, Sample, ratio, timed
from benchmarks.vllm_files import vllm_spec
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext

AT_MOST = 0.95
ROUNDS = 7


class VllmManager:
    """vLLM's tiering manager with its file tier, behind the methods that :class:`Driver` calls.

    Args:
        rows: rows of the primary tier.
        root: directory of the files.
    """

    def __init__(self, rows: np.ndarray[Any, np.dtype[np.uint8]], root: Path) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
        from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

        region: Any = SimpleNamespace(create_kv_memoryview=lambda: memoryview(rows.data), cleanup=lambda: None)
        tier = FileSystemTierManager(vllm_spec(), rows.data, "fs", str(root))
        self._manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(len(rows), region), [tier])
        self._contexts: dict[str, Any] = {}
        self._new: list[str] = []

    def on_new_request(self, ctx: ReqContext) -> None:
        from vllm.v1.kv_offload.base import ReqContext as VllmReqContext

        self._contexts[ctx.req_id] = VllmReqContext(req_id=ctx.req_id)
        self._new.append(ctx.req_id)
        self._manager.on_new_request(self._contexts[ctx.req_id])

    def touch(self, keys: Prompt, ctx: ReqContext) -> None:
        """Do nothing: vLLM's connector does not announce a use, and its manager takes a lookup for one."""

    def match_prefix(self, keys: Prompt, ctx: ReqContext) -> PrefixMatch:
        from vllm.v1.kv_offload.base import LookupResult

        hits, pending = 0, False
        for key in keys:
            answer = self._manager.lookup(key, self._contexts[ctx.req_id])
            if answer is LookupResult.MISS:
                break
            hits += answer is LookupResult.HIT
            pending = pending or answer is not LookupResult.HIT
        return PrefixMatch(hits, pending)

    def prepare_load(self, keys: Sequence[bytes], ctx: ReqContext) -> Any:
        return self._manager.prepare_load(keys, self._contexts[ctx.req_id])

    def complete_load(self, keys: Sequence[bytes], ctx: ReqContext) -> None:
        self._manager.complete_load(keys, self._contexts[ctx.req_id])

    def prepare_store(self, keys: Sequence[bytes], ctx: ReqContext) -> Any:
        return self._manager.prepare_store(keys, self._contexts[ctx.req_id])

    def complete_store(self, keys: Sequence[bytes], ctx: ReqContext) -> None:
        self._manager.complete_store(keys, self._contexts[ctx.req_id])

    def on_request_finished(self, ctx: ReqContext) -> None:
        self._manager.on_request_finished(self._contexts.pop(ctx.req_id))

    def on_schedule_end(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self._manager.on_schedule_end(ScheduleEndContext(self._new, ()))
        self._new = []

    def shutdown(self) -> None:
        self._manager.shutdown()


def serve_with_vllm(burst: Sequence[tuple[int, Prompt]], directory: Path) -> Sample:
    """Serve the burst through new tiers of vLLM; the value is the time in seconds."""
    num_rows = len({key for _, keys in burst for key in keys}) // 4
    rows = np.frombuffer(mmap.mmap(-1, num_rows * BLOCK_BYTES), np.uint8).reshape(num_rows, BLOCK_BYTES)
    rows[:] = 1
    root = directory / "vllm"
    manager = VllmManager(rows, root)
    driver = Driver(manager, rows)
    try:
        spent = timed(lambda: driver.serve(burst))
    finally:
        manager.shutdown()
        shutil.rmtree(root, ignore_errors=True)
    return Sample(spent.value, spent.cpu, {"share of hits": driver.counts.hits / driver.counts.blocks})


def serve_with_ours(scenario: Scenario) -> Sample:
    """Serve the burst through new tiers of ours; the value is the time in seconds."""
    sample = scenario.run()
    return Sample(sample.extra["seconds"], sample.cpu, {"share of hits": sample.value})


def run(bench: Bench) -> None:
    """Compare both managers."""
    burst = make_burst(20 if bench.quick else 200)
    bench.note(f"{len(burst)} requests; the ideal hit rate is {ideal_rate(burst):.3f}.")
    ours = Scenario(burst, bench.directory)
    stats = bench.compare(
        "burst of chats, time to serve",
        {"ours, verified": lambda: serve_with_ours(ours), "vLLM": lambda: serve_with_vllm(burst, bench.directory)},
        ROUNDS,
        unit="s",
    )
    bench.target("time to serve, ours against vLLM", ratio(*stats.values()), AT_MOST, "max", "x")
    ours_hit, theirs_hit = (stat.extra["share of hits"] for stat in stats.values())
    bench.target("hits, ours against vLLM", ours_hit / theirs_hit, 1.0, "min", "x")
