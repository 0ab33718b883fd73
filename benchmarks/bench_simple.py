"""The simple scheduler, eager and lazy, beside the tiering manager without secondary tiers.

All run on the mini engine with the same CPU memory. Users talk about documents in several turns. The GPU holds a part
of their KV; the CPU pool holds about half of it (small) or all of it (large). The table shows per variant: TTFT p50 and
p95; the CPU time per engine step of all calls to the connector's scheduler half; the share of prompt tokens that were
not computed (tokens that are computed again after a preemption count as computed); bytes stored and loaded. The tiering
manager stores outputs here as well, as the simple scheduler does (``offload_prompt_only: false``).
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.call_clock import CallClock
from benchmarks.harness import Bench, Sample, ratio
from examples.demo.workload import Shape, Workload
from examples.mini_engine import Engine, EngineOptions, ModelConfig
from examples.mini_engine.simple import SimpleEngine

CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_work",
)
MODEL = ModelConfig(hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, feed_forward=128)
BLOCK = 16
BLOCK_BYTES = 4 * 2 * BLOCK * 2 * 16 * 4
GPU_BLOCKS = 64
SMALL, LARGE = 80, 300
SHAPES = {
    False: Shape(documents=4, users=5, turns=3, document_tokens=400, answer_tokens=6),
    True: Shape(2, 2, 2, 100, 2),
}


def engine_of(mode: str, cpu_blocks: int) -> Engine:
    stack: dict[str, Any] = {"primary": {"capacity": cpu_blocks * BLOCK_BYTES}}
    options = EngineOptions(model=MODEL, num_blocks=GPU_BLOCKS, block_size=BLOCK, stack=stack)
    if mode == "tiering":
        return Engine(
            EngineOptions(
                model=MODEL,
                num_blocks=GPU_BLOCKS,
                block_size=BLOCK,
                stack=stack,
                offload={"offload_prompt_only": False},
            )
        )
    stack |= {"mode": "simple", "lazy_offload": mode == "lazy"}
    return SimpleEngine(options)


def play(mode: str, cpu_blocks: int, workload: Workload) -> Sample:
    with engine_of(mode, cpu_blocks) as engine:
        if engine.tiers is None:
            raise RuntimeError("the engine has no connector")
        clock = CallClock()
        clock.watch(engine.tiers.scheduler_half, CALLS)
        outputs = [answered.output for answered in workload.play(engine, lambda: None)]
        steps, computed = engine.steps, engine.worker.computed_tokens
        seconds = clock.total
        engine.settle()
        moved = engine.tiers.bytes_moved
    ttft = sorted(output.ttft_s for output in outputs)
    prompt = sum(output.prompt_tokens for output in outputs)
    decoded = sum(len(output.tokens) - 1 for output in outputs)
    return Sample(
        seconds / steps * 1e6,
        extra={
            "TTFT p50 ms": statistics.median(ttft) * 1e3,
            "TTFT p95 ms": ttft[int(len(ttft) * 0.95)] * 1e3,
            "hit %": 100 * (1 - (computed - decoded) / prompt),
            "MB stored": moved.get("gpu_to_cpu", 0) / 1e6,
            "MB loaded": moved.get("cpu_to_gpu", 0) / 1e6,
        },
    )


def run(bench: Bench) -> None:
    torch.set_num_threads(1)
    workload = Workload(SHAPES[bench.quick])
    for name, cpu_blocks in (("small CPU pool", SMALL), ("large CPU pool", LARGE)):
        stats = bench.compare(
            f"{name}: {cpu_blocks} blocks, GPU {GPU_BLOCKS}",
            {
                "tiering, no secondary": lambda blocks=cpu_blocks: play("tiering", blocks, workload),  # type: ignore[misc]
                "simple, eager": lambda blocks=cpu_blocks: play("eager", blocks, workload),  # type: ignore[misc]
                "simple, lazy": lambda blocks=cpu_blocks: play("lazy", blocks, workload),  # type: ignore[misc]
            },
            unit="CPU µs/step",
        )
        if not bench.quick:
            for mode in ("simple, eager", "simple, lazy"):
                cost = ratio(stats[mode], stats["tiering, no secondary"])
                bench.target(f"{name}: step, {mode} against tiering", cost, 1.5, "max", "x")
