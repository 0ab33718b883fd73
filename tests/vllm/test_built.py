"""Settings that a worker's model takes on by itself, so that the scheduler's copy lacks them.

A disk that an engine with one value has filled is no use for another value, and the same value finds its blocks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import write_llama4
from tests.vllm.rig import Answer, answers_without_tiers, engine, prompt, wrong
from tests.vllm.server import serve

PROMPTS = [prompt(seed) for seed in range(3)]
TUNING = {"attn_temperature_tuning": True}
LONG = 32_800
"""Length of contexts beyond which vLLM turns attention temperature on."""


def stack(path: Path) -> dict[str, Any]:
    local = {"type": "local", "path": str(path), "capacity": "64MiB"}
    return {"primary": {"capacity": "64MiB"}, "secondary": [local]}


def beside_the_model(model: Path) -> dict[str, Any]:
    """Write the setting to a file beside the model, and return the options of an engine."""
    (model / "generation_config.json").write_text(json.dumps(TUNING))
    return {}


WAYS: dict[str, Any] = {
    "flag": lambda _: {"override_generation_config": TUNING},
    "file": beside_the_model,
    "length": lambda _: {"max_model_len": LONG, "num_gpu_blocks_override": 1100},
}
"""Ways to turn on attention temperature: functions that return an engine's options for a model."""


def answers_of_workers(
    model: Path, disk: Path, workers: int, options: dict[str, Any], log: Path
) -> tuple[list[Answer], float]:
    """Return the answers of a server with workers in other processes, and the bytes that it loaded."""
    words = [f"--{word.replace('_', '-')}={json.dumps(value)}" for word, value in options.items()]
    parallel = ("--distributed-executor-backend", "mp", "--tensor-parallel-size", str(workers))
    bound = "|".join(str(core) for core in range(workers))
    with serve(model, stack(disk), log, *parallel, *words, VLLM_CPU_OMP_THREADS_BIND=bound) as server:
        answers = server.ask(PROMPTS)
        server.ask([prompt(0, 8)], 1)  # one more step, which reports the loads
        return answers, server.loaded()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["flag", *(pytest.param(way, marks=pytest.mark.slow) for way in ("file", "length"))])
def test_attention_temperature_that_only_the_workers_know_separates_kv(way: str, workers: int, tmp_path: Path) -> None:
    model, disk, log = write_llama4(tmp_path / "model"), tmp_path / "disk", tmp_path / "log"
    (model / "generation_config.json").unlink(missing_ok=True)
    without = answers_without_tiers(model, PROMPTS)
    answers, _ = answers_of_workers(model, disk, workers, {}, log)
    assert wrong(answers, without) == []
    shutil.copytree(model, tmp_path / "tuned")
    options = WAYS[way](tmp_path / "tuned")
    tuned = answers_without_tiers(tmp_path / "tuned", PROMPTS, **options)
    assert wrong(tuned, without) == [0, 1, 2]
    for known in (False, True):
        answers, loaded = answers_of_workers(tmp_path / "tuned", disk, workers, options, log)
        assert (wrong(answers, tuned), loaded > 0) == ([], known)


def test_a_part_that_is_built_from_a_changed_copy_of_the_configuration_separates_kv(
    llama: Path, tmp_path: Path
) -> None:
    nested: dict[str, Any] = {
        "hf_overrides": {"architectures": ["NestedLlama"]},
        "model_class_overrides": {"NestedLlama": "tests.vllm.nested_model:NestedLlama"},
    }
    changed = {**nested, "override_generation_config": {"norm": 0.5}}
    expected = [answers_without_tiers(llama, PROMPTS, **options) for options in (nested, changed)]
    assert wrong(*expected) == [0, 1, 2]
    for options, right, known in [
        (nested, expected[0], False),
        (changed, expected[1], False),
        (nested, expected[0], True),
        (changed, expected[1], True),
    ]:
        with engine(llama, stack(tmp_path / "disk"), **options) as running:
            answers, loaded = running.loaded(lambda running=running: running.ask(PROMPTS))  # type: ignore[misc]
            assert (wrong(answers, right), loaded > 0) == ([], known)
            running.settle()
