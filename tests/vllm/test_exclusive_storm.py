"""An exclusive CPU tier in vLLM while requests come together, end early, and caches are emptied."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import OneWrongBlock
from tests.vllm.models import write_gemma
from tests.vllm.rig import BLOCK_BYTES, NUM_BLOCKS, Answer, Engine, answers_without_tiers, engine, prompt, wrong
from tests.vllm.test_windows import LAYERS, PAGE

STEMS = [prompt(300 + number, length) for number, length in enumerate((70, 130, 200, 260))]
PROMPTS = [stem + prompt(310 + number, 20 + 37 * number % 120) for number, stem in enumerate(STEMS * 4)]
"""Prompts that begin alike in fours: more blocks than the GPU's pool and the CPU tier hold."""
GEMMA: dict[str, Any] = {"num_gpu_blocks_override": 80}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (NUM_BLOCKS * BLOCK_BYTES, {}),
    "windows": (80 * LAYERS * PAGE, GEMMA),
    "sparse windows": (80 * LAYERS * PAGE, {**GEMMA, "prefix_cache_retention_interval": 0}),
}
ROUNDS = 40


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("gemma"))


def storm(running: Engine, expected: list[Answer], seed: int) -> int:
    """Ask prompts together, abort some, and empty caches; return the number of wrong answers."""
    dice, failures = random.Random(seed), 0
    for _ in range(ROUNDS):
        chosen = dice.sample(range(len(PROMPTS)), dice.randrange(1, 6))
        names = running.start([PROMPTS[number] for number in chosen])
        if dice.random() < 0.2:
            for _ in range(dice.randrange(1, 6)):
                running.step()
            running.llm.llm_engine.abort_request(names[-1:])
            names, chosen = names[:-1], chosen[:-1]
        failures += len(wrong(running.finish(names), [expected[number] for number in chosen]))
        event = dice.random()
        if event < 0.06:
            running.settle()
            assert running.llm.reset_prefix_cache()
        elif event < 0.12:
            running.settle()
            running.connector.reset_cache()
    running.settle()
    return failures


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("disk", [False, True], ids=["", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_of_a_storm_differs_from_those_without_tiers(
    kind: str, disk: bool, llama: Path, gemma: Path, tmp_path: Path
) -> None:
    model = llama if kind == "llama" else gemma
    capacity, options = KINDS[kind]
    expected = answers_without_tiers(model, PROMPTS, **options)
    stack: dict[str, Any] = {"primary": {"capacity": capacity, "inclusion": "exclusive"}}
    if disk:
        stack["secondary"] = [{"type": "local", "path": str(tmp_path), "capacity": "64MiB"}]
    with engine(model, stack, max_num_batched_tokens=128, **options) as running:
        failures, loaded = running.loaded(lambda: storm(running, expected, 1))
        assert failures == 0
        assert loaded > 100 * capacity // NUM_BLOCKS // 10
        assert running.connector.scheduler_half.get_stats()["connector"]["late_stores"] > 5
        assert running.free_blocks() == options.get("num_gpu_blocks_override", NUM_BLOCKS) - 1
        with running.loads_through(OneWrongBlock):
            assert storm(running, expected, 2) > 0, "what is loaded matters"
