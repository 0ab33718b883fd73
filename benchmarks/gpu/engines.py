"""Checks of the mini engine: KV of a real model goes through the whole connector, to a disk and back."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import Check, require
from benchmarks.gpu.machine import Machine
from examples.mini_engine import Engine, EngineOptions, ModelConfig, Request
from examples.mini_engine.tiers import copy_nothing
from tests.mini_engine.helpers import SMALL
from tiering.api.units import format_bytes

PROMPTS = 8
PROMPT_TOKENS = 400
NEW_TOKENS = 8
WINDOW = 100
"""Tokens of the sliding window of every second layer, in the model that has one."""

Answers = list[tuple[list[int], list[int]]]
"""Tokens and digests of all logits, by prompt."""


def answers(machine: Machine) -> str:
    """Compare answers with KV from the CPU tier and the disk with those without any cache."""
    lines = []
    for window in (None, WINDOW):
        model = replace(ModelConfig() if machine.is_gpu else SMALL, sliding_window=window)
        with tempfile.TemporaryDirectory(prefix="kv-gpu-") as directory:
            lines.append(_compare(machine, model, Path(directory)))
    return "\n          ".join(lines)


def _compare(machine: Machine, model: ModelConfig, directory: Path) -> str:
    dice = random.Random(0)
    length = machine.sized(PROMPT_TOKENS, 60)
    prompts = [[dice.randrange(model.vocabulary) for _ in range(length)] for _ in range(machine.sized(PROMPTS, 2))]
    blocks = -(-(length + NEW_TOKENS) // 16)
    options = EngineOptions(model=model, num_blocks=len(model.groups) * blocks + 3, device=str(machine.device))
    with Engine(replace(options, prefix_caching=False)) as engine:
        expected = _ask(engine, prompts)
    disk = {"type": "local", "path": str(directory), "capacity": "1GiB"}
    options = replace(options, stack={"primary": {"capacity": "256MiB"}, "secondary": [disk]})
    with Engine(options) as engine:
        require(_ask(engine, prompts) == expected, "answers differ while blocks are stored")
        require(engine.settle(), "copies did not end")
        require(_ask(engine, prompts) == expected, "answers differ with KV from the CPU tier")
        from_cpu = engine.loaded_bytes
        require(engine.settle(), "copies did not end")
    with Engine(options) as engine:
        require(_ask(engine, prompts) == expected, "answers differ with KV from the disk after a restart")
        from_disk = _read_bytes(engine)
    with Engine(options, replace_loads=copy_nothing) as engine:
        require(_ask(engine, prompts) != expected, "answers are right although loads copy nothing")
    require(from_cpu > 0 and from_disk > 0, f"{from_cpu} bytes came from the CPU tier, {from_disk} from the disk")
    kind = "full attention" if model.sliding_window is None else "windows in every second layer"
    return (
        f"{kind}: {len(prompts)} answers equal to the last bit of the logits, {format_bytes(from_cpu)} from the CPU "
        f"tier, {format_bytes(from_disk)} from the disk after a restart; loads that copy nothing change them"
    )


def _ask(engine: Engine, prompts: list[list[int]]) -> Answers:
    """Answer the prompts one after the other."""
    found = []
    for number, tokens in enumerate(prompts):
        request = Request(f"{engine.steps}-{number}", tokens, NEW_TOKENS)
        output = engine.run([request])[request.request_id]
        found.append((output.tokens, output.logit_digests))
    return found


def _read_bytes(engine: Engine) -> int:
    stats: dict[str, Any] = engine.tiers.secondary_stats() if engine.tiers is not None else {}
    return sum(int(tier["read_bytes"]) for tier in stats.values())


CHECKS = (Check("mini engine", "answers with KV from the tiers are those without a cache", answers),)
