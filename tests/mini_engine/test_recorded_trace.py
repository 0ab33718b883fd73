"""A trace that an engine records, and its replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.mini_engine import Engine, Request
from tests.mini_engine.helpers import SMALL, ask_all, one_row, options, prompt
from tiering.config.stack_file import load_stack
from tiering.replay.model import ReplayModel
from tiering.replay.readers import Trace
from tiering.replay.replay import Replay


def test_a_replay_asks_for_the_blocks_that_the_engine_asked_for(tmp_path: Path) -> None:
    stack: dict[str, Any] = {
        "primary": {"capacity": 64 * one_row(block_size=16)},
        "record_trace": {"path": str(tmp_path / "traces")},
    }
    prompts = [prompt(seed, 40 + 9 * seed, shared=32) for seed in range(5)]
    prompts.append(prompts[0])
    with Engine(options(stack=stack, offload={"block_size": 16})) as engine:
        ask_all(engine, prompts, "ask", max_tokens=3)
        engine.add(Request("never scheduled", prompt(9, 40), 3))
        engine.abort("never scheduled")
        assert engine.tiers is not None
        scheduler = engine.tiers.scheduler_half
    counters = scheduler.get_stats()["connector"]
    assert (counters["requests_recorded"], counters["records_dropped"]) == (len(prompts), 0)
    (path,) = (tmp_path / "traces").iterdir()
    trace = Trace([path])
    recorded = list(trace)
    assert trace.info.block_tokens == 16
    assert sorted(request.input_tokens for request in recorded) == sorted(map(len, prompts))
    assert {request.output_tokens for request in recorded} == {3}
    blocks = [name for request in recorded for name in request.hashes.tolist()]
    assert len(blocks) == sum(len(tokens) // 16 for tokens in prompts)
    prefixes = {tuple(tokens[:end]) for tokens in prompts for end in range(16, len(tokens) + 1, 16)}
    assert len(set(blocks)) == len(prefixes)
    block_bytes = trace.info.block_bytes
    assert block_bytes == SMALL.layers * 2 * 16 * SMALL.kv_heads * SMALL.head_dim * 4
    result = Replay(load_stack(stack), 16, block_bytes, ReplayModel()).run(trace)
    assert (result.requests, result.blocks) == (len(prompts), len(blocks))
