"""Time to the first token in the real vLLM: loading or computing by measurement, never and always.

The model is a Llama of 4 layers, hidden size 512, float32 (16,384 bytes of KV per token), on vLLM's CPU platform in one
process. One engine has three tiers in memory that hold the same blocks, with ``load_or_compute`` of ``never``,
``always`` and ``auto``. Each request may use one of them, in turns, so that all three see the same machine. At full
speed, a tier delivers a block in a tenth of the time that a block of a long prompt takes to compute; the chaos layer
slows all three down to a hundredth of that. Requests come one at a time, with a pause as long as computing them takes;
the CPU tier and the engine's own cache are emptied before each. Requests with a choice of tiers are never controls.

*First* is the first request of ``auto`` after a change of the speed, which does not count in the medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench
from benchmarks.vllm_engine import ask, progress, prompt, running, settle, write_model
from tests.mini_engine.chaos_tier import ChaosTier
from tests.vllm.rig import Engine
from tiering.testing.chaos import Fault

BLOCK = 32
BLOCK_BYTES = BLOCK * 4 * 2 * 512 * 4
LENGTHS = (512,)
SPEEDS = (1.0, 0.1, 0.03, 0.01)
RULES = ("never", "always", "auto")
FULL_SPEED = 0.1
"""Time of a block at full speed, as a part of the time of computing it."""
ROUNDS = 3


@dataclass(slots=True)
class Measured:
    """Seconds to the first token by rule, in the order of the requests."""

    ttft: dict[str, list[float]] = field(default_factory=lambda: {rule: [] for rule in RULES})
    first: float = 0.0
    """That of the first request of ``auto``, which does not count."""

    @property
    def medians(self) -> tuple[float, float, float]:
        """Median seconds of ``never``, ``always`` and ``auto``."""
        never, always, auto = (statistics.median(self.ttft[rule]) for rule in RULES)
        return never, always, auto

    @property
    def by_better(self) -> float:
        """Median of ``auto`` divided by the better one of the others."""
        never, always, auto = self.medians
        return auto / min(never, always)

    @property
    def holds(self) -> bool:
        """True if ``auto`` takes at most 5% and 10 ms longer than the better one."""
        never, always, auto = self.medians
        return auto <= 1.05 * min(never, always) + 0.01


def run(bench: Bench) -> None:
    model = write_model(
        bench.directory / "model",
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    with engine_of(model) as engine:
        subject = Subject(engine)
        speeds = SPEEDS[::3] if bench.quick else SPEEDS
        cells = {
            (tokens, speed): subject.cell(tokens, speed, 1 if bench.quick else ROUNDS)
            for tokens in LENGTHS
            for speed in speeds
        }
    report(bench, cells)


def engine_of(model: Path) -> Any:
    """Return the context of an engine with the three tiers."""
    blocks = max(LENGTHS) // BLOCK
    chaos = "tests.mini_engine.chaos_tier:CHAOS_TIER"
    stack = {
        "primary": {"capacity": 4 * blocks * BLOCK_BYTES, "promotion_share": 1.0},
        "secondary": [
            {
                "type": chaos,
                "name": rule,
                "seed": 1,
                "capacity": 6 * blocks * BLOCK_BYTES,
                "max_inflight": 1,
                "primary_share": 1.0,
                "load_or_compute": rule,
            }
            for rule in RULES
        ],
    }
    return running(model, stack, block_size=BLOCK, gpu_memory_utilization=0.3)  # beside other work


class Subject:
    """One engine, and prompts that its three tiers hold."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prompts = {tokens: [prompt(10 * tokens + number, tokens) for number in range(4)] for tokens in LENGTHS}
        self._numbers = count()
        self._block_seconds = 0.0
        for tokens, prompts in self._prompts.items():
            for one in prompts:
                self._empty()
                self._block_seconds = ask(engine, one, 1, ["never"]).ttft * BLOCK / tokens
                self._empty()
                ask(engine, one, 1, ["always"])  # the tier stores what the last request may not store there
                self._empty()
                ask(engine, one, 1, ["auto"])
        progress(f"computing a block takes {1e3 * self._block_seconds:.2f} ms")

    def cell(self, tokens: int, speed: float, rounds: int) -> Measured:
        """Measure one length at one speed."""
        self._set_speed(speed)
        measured = Measured(first=self._ask("auto", tokens))
        for _ in range(rounds):
            for rule in self._in_turn():
                measured.ttft[rule].append(self._ask(rule, tokens))
        shown = ", ".join(f"{rule} {1e3 * statistics.median(values):.0f}" for rule, values in measured.ttft.items())
        progress(f"{tokens} tokens, speed {speed:g}: {shown} ms, first {1e3 * measured.first:.0f} ms")
        return measured

    def _in_turn(self) -> Sequence[str]:
        first = next(self._numbers) % len(RULES)
        return RULES[first:] + RULES[:first]

    def _ask(self, rule: str, tokens: int) -> float:
        prompts = self._prompts[tokens]
        self._empty()
        time.sleep(self._block_seconds * tokens / BLOCK)
        return ask(self._engine, prompts[next(self._numbers) % len(prompts)], 1, [rule]).ttft

    def _empty(self) -> None:
        """Let the tiers store what they have to, then empty the CPU tier and the engine's own cache."""
        settle(self._engine)
        primary = self._engine.connector.scheduler_half.manager.primary_tier
        primary.drop(list(primary.readable))
        if not self._engine.llm.reset_prefix_cache():
            raise RuntimeError("the engine's own cache is in use")

    def _set_speed(self, speed: float) -> None:
        delay = FULL_SPEED * self._block_seconds / speed
        for rule in RULES:
            chaos = ChaosTier.built[rule].chaos
            chaos._plan = replace(chaos._plan, gets={Fault.DELAY: 1.0}, delay=delay)


def report(bench: Bench, cells: dict[tuple[int, float], Measured]) -> None:
    """Write the table and the targets."""

    def row(one: Measured) -> tuple[str, ...]:
        missed = "" if one.holds else " (missed)"
        times = (f"{1e3 * seconds:,.0f}" for seconds in (*one.medians, one.first))
        never, always, auto, first = times
        return never, always, auto, f"{100 * (one.by_better - 1.0):+.1f}%{missed}", first

    bench.table(
        "Time to the first token, medians",
        ("prompt", "tier's speed", "never ms", "always ms", "auto ms", "auto by better", "first ms"),
        [(f"{tokens:,}", f"{speed:g}", *row(one)) for (tokens, speed), one in cells.items()],
    )
    missed = sum(not one.holds for one in cells.values())
    bench.target(f"cells beyond 5% and 10 ms above the better one, of {len(cells)}", missed, 0, "max", "")
    regret = statistics.mean(max(0.0, one.by_better - 1.0) for one in cells.values())
    bench.target("mean regret", 100 * regret, 3.0, "max", "%")
