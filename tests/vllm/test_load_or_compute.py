"""A slow tier of the real engine: its blocks are computed where that is faster, with the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.mini_engine.chaos_tier import ChaosTier
from tests.vllm.rig import (
    BLOCK,
    BLOCK_BYTES,
    Answer,
    Engine,
    answers_without_tiers,
    engine,
    prompt,
    whole_blocks,
    wrong,
)
from tiering.connector import prefill
from tiering.testing.chaos import Fault

PROMPTS = [prompt(seed) for seed in range(70, 76)]
ROWS = 24
"""Four prompts of six whole blocks."""
SLOW = 1.0
"""Seconds that each block takes, much more than the engine needs to compute a prompt."""


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, PROMPTS)


@contextmanager
def slow_engine(model: Path, rule: str) -> Iterator[Engine]:
    """Return an engine whose prompts only a tier holds, which has become slow."""
    tier: dict[str, Any] = {"type": "tests.mini_engine.chaos_tier:CHAOS_TIER", "name": "slow", "seed": 1}
    stack = {"primary": {"capacity": ROWS * BLOCK_BYTES}, "secondary": [tier | {"load_or_compute": rule}]}
    with engine(model, stack) as running:
        for tokens in PROMPTS:
            running.ask([tokens])
            running.settle()
        for number in range(5):
            running.ask([prompt(1000 + number)])
            running.settle()
        assert running.llm.reset_prefix_cache()
        chaos = ChaosTier.built["slow"].chaos
        chaos._plan = replace(chaos._plan, gets={Fault.DELAY: 1.0}, delay=SLOW)
        running.scheduled.clear()
        yield running
        chaos._plan = replace(chaos._plan, gets={})


def test_a_request_does_not_wait_for_a_tier_that_is_slower_than_computing(llama: Path, expected: list[Answer]) -> None:
    with slow_engine(llama, "auto") as running:
        answers, gated, cut = [], [], []
        for tokens in PROMPTS:
            answers += running.ask([tokens])
            stats = running.tier("slow")
            gated.append(stats["loads_gated"])
            cut.append(stats["loads_cut"])
        assert wrong(answers, expected) == []
        blocks = whole_blocks([PROMPTS[0]])
        # The first load shows that the tier is slow: it ends with the time of computing, and all others are not begun.
        assert cut[0] == cut[-1] == blocks
        assert gated == [blocks * number for number in range(len(PROMPTS))]
        assert stats["gate_closed"] == 1
        prefilled = sum(tokens for tokens in running.scheduled if tokens >= BLOCK)
        assert prefilled == sum(map(len, PROMPTS))
        running.settle()
        assert running.connector.scheduler_half.get_stats()["manager"]["rows_quarantined"] == 0


def test_a_tier_that_is_always_loaded_lets_requests_wait(llama: Path, expected: list[Answer]) -> None:
    with slow_engine(llama, "always") as running:
        before = running.tier("slow")["promotions"]
        answers = running.ask(PROMPTS[:1])
        assert wrong(answers, expected[:1]) == []
        stats = running.tier("slow")
        assert stats["promotions"] - before == whole_blocks(PROMPTS[:1])
        assert (stats["loads_gated"], stats["loads_cut"], stats["gate_closed"]) == (0, 0, 0)


def test_a_fresh_engine_loads_its_first_prompt(
    llama: Path, expected: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "ASSUMED_SPEED", 1.0)  # other work on the machine does not matter
    local = {"type": "local", "path": str(tmp_path), "capacity": "64MiB", "load_or_compute": "auto"}
    stack = {"primary": {"capacity": ROWS * BLOCK_BYTES}, "secondary": [local]}
    with engine(llama, stack) as running:
        running.ask(PROMPTS[:1])
        running.settle()
    with engine(llama, stack) as running:
        assert wrong(running.ask(PROMPTS[:1]), expected[:1]) == []
        stats = running.tier("local")
        assert stats["promotions"] == whole_blocks(PROMPTS[:1])
        assert (stats["loads_gated"], stats["loads_cut"]) == (0, 0)
