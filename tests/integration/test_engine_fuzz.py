"""Random engines, stacks and events, repeatable from a seed: every answer is bit-identical."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.mini_engine import Engine, EngineOptions, ModelConfig, Request
from examples.mini_engine.request import Status
from tests.mini_engine.helpers import SMALL, one_row, options, prompt, reference

FAULTS = {"TEMPORARY": 0.05, "PERMANENT": 0.03, "BIT_FLIP": 0.05, "SWAP": 0.05, "TORN": 0.05, "DELAY": 0.1}


def random_options(dice: random.Random, path: Path) -> EngineOptions:
    model = replace(SMALL, sliding_window=dice.choice([None, None, 12, 16, 17, 33]))
    factor = dice.choice([1, 1, 2, 4])
    secondary: list[dict[str, Any]] = []
    if dice.random() < 0.4:
        secondary.append({"type": "memory", "capacity": dice.choice(["256KiB", "16MiB"])})
    if dice.random() < 0.5:
        secondary.append({"type": "local", "path": str(path / "local"), "capacity": "8MiB", "segment_size": "2MiB"})
    if dice.random() < 0.5:
        chaos: dict[str, Any] = {
            "type": "tests.mini_engine.chaos_tier:CHAOS_TIER",
            "name": "chaos",
            "seed": dice.randrange(1000),
        }
        chaos |= {"puts": FAULTS, "gets": FAULTS, "retries": {"attempts": 2, "backoff": "1ms", "backoff_max": "2ms"}}
        secondary.append(chaos)
    rows = dice.choice([3, 12, 40, 120])
    return options(
        model=model,
        num_blocks=dice.choice([36, 50, 90]),
        kv_first=dice.random() < 0.5,
        max_batch_tokens=dice.choice([8, 20, 64]),
        max_running=dice.choice([2, 6]),
        stack={
            "primary": {"capacity": rows * one_row(model, factor=factor), "eviction": dice.choice(["lru", "arc"])},
            "secondary": secondary,
        },
        offload={"block_size": 8 * factor, "offload_prompt_only": dice.random() < 0.5},
    )


def play(dice: random.Random, engine: Engine, model: ModelConfig, *, may_change_weights: bool) -> int:
    """Run random events; return the number of checked answers."""
    texts = [prompt(seed, dice.randrange(9, 110), shared=dice.choice([0, 8, 40])) for seed in range(6)]
    coming = [Request(f"r{number}", dice.choice(texts), dice.choice([1, 8])) for number in range(24)]
    asked: list[tuple[Request, ModelConfig | None]] = []
    while coming or engine.scheduler.requests:
        event = dice.random()
        if coming and event < 0.3:
            request = coming.pop()
            engine.add(request)
            asked.append((request, model))
        elif engine.scheduler.requests and event < 0.34:
            engine.abort(dice.choice(sorted(engine.scheduler.requests)))
        elif may_change_weights and event < 0.35:
            model = replace(model, seed=model.seed + 1)
            engine.load_weights(model.seed)
            asked = [
                (
                    request,
                    None
                    if request.output and request.status is not Status.FINISHED
                    else (weights if request.output else model),
                )
                for request, weights in asked
            ]
        engine.step()
    checked = 0
    for request, weights in asked:
        if request.status is Status.FINISHED and weights is not None:
            expected = reference(request.prompt, request.max_tokens, model=weights)
            assert (request.output, request.logit_digests) == expected, request.request_id
            checked += 1
    return checked


def check(seed: int, path: Path) -> None:
    dice = random.Random(seed)
    settings = random_options(dice, path)
    checked = 0
    for last_life in (False, True):
        with Engine(settings) as engine:
            checked += play(dice, engine, settings.model, may_change_weights=last_life)
            assert engine.settle(), f"seed {seed}: work never ended"
            assert len(engine.kv.pool.free) == settings.num_blocks - 1, f"seed {seed}: GPU blocks were lost"
    assert checked > 10, f"seed {seed}: hardly anything was answered"


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_answers_are_right(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_whatever_happens_answers_are_right_for_long(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)
