"""An exclusive CPU tier in vLLM: a working set between one and two pools returns from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import CopyNothing
from tests.vllm.rig import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    Answer,
    Engine,
    answers_without_tiers,
    engine,
    prompt,
    whole_blocks,
    wrong,
)

PROMPTS = [prompt(seed) for seed in range(10)]
"""Prompts of six whole blocks each: more than the GPU's pool holds, and less than two such pools."""
ROWS = NUM_BLOCKS
STEP = 128
"""Tokens of a step: four blocks, so that the walk looks at a part of the pool."""


def stack(inclusion: str, **primary: Any) -> dict[str, Any]:
    return {"primary": {"capacity": ROWS * BLOCK_BYTES, "inclusion": inclusion, **primary}}


def in_turn(running: Engine, prompts: Sequence[list[int]] = PROMPTS) -> list[Answer]:
    """Ask one prompt after the other, so that the least recently used blocks leave the pool."""
    answers = []
    for tokens in prompts:
        answers += running.ask([tokens])
        running.settle()
    return answers


def count(running: Engine, name: str) -> int:
    return int(running.connector.scheduler_half.get_stats()["connector"][name])


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, PROMPTS)


def test_two_pools_hold_what_one_pool_and_its_copy_do_not(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, stack("exclusive"), max_num_batched_tokens=STEP) as running:
        assert wrong(in_turn(running), expected) == []
        assert running.moved.get("cpu_to_gpu", 0) == 0
        for _ in range(3):
            answers, loaded = running.loaded(lambda: in_turn(running))
            assert wrong(answers, expected) == []
            assert loaded >= 50 * BLOCK_BYTES
        assert count(running, "exclusive_losses") == 0
        assert count(running, "jobs_flushed") == 0
        copied = count(running, "late_stores")
        assert copied * BLOCK_BYTES == running.moved["gpu_to_cpu"]
        with running.loads_through(CopyNothing):
            assert wrong(in_turn(running), expected) != [], "what is loaded matters"
        running.settle()
        assert running.free_blocks() == NUM_BLOCKS - 1


def test_a_disk_behind_the_tier_gets_each_block_once(llama: Path, expected: list[Answer], tmp_path: Path) -> None:
    disk = {"type": "local", "path": str(tmp_path), "capacity": "64MiB"}
    with engine(llama, {**stack("exclusive"), "secondary": [disk]}, max_num_batched_tokens=STEP) as running:
        for _ in range(2):
            assert wrong(in_turn(running), expected) == []
        answers, loaded = running.loaded(lambda: in_turn(running))
        assert wrong(answers, expected) == []
        assert loaded >= 50 * BLOCK_BYTES
        assert running.tier("local")["blocks"] == whole_blocks(PROMPTS)
        assert running.tier("local")["written_bytes"] < 2 * whole_blocks(PROMPTS) * BLOCK_BYTES
        assert count(running, "late_stores") > 0


def test_negative_control_an_inclusive_tier_of_this_size_finds_nothing(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, stack("inclusive"), max_num_batched_tokens=STEP) as running:
        for _ in range(3):
            answers, loaded = running.loaded(lambda: in_turn(running))
            assert wrong(answers, expected) == []
            assert loaded == 0
        assert count(running, "late_stores") == 0
