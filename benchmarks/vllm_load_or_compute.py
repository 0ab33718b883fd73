"""Time to the first token in the real vLLM: loading or computing by measurement, never and always.

The models are Llamas, float32, on vLLM's CPU platform in one process: *slow* with 4 layers of hidden size 512, *fast*
with 2 layers of 256. One engine has three tiers in memory that hold the same blocks, with ``load_or_compute`` of
``never``, ``always`` and ``auto``. Each request may use one of them, in turns, so that all three see the same machine.
At full speed, a tier delivers a block in a tenth of the time that a block of a long prompt takes to compute; the chaos
layer slows all three down to a hundredth of that. Requests come one at a time, with a pause as long as computing them
takes; with *load*, each comes together with a new prompt of the same length. The CPU tier and the engine's own cache
are emptied before each. Requests with a choice of tiers are never controls.

*Chosen* has the requests of ``auto`` that loaded, were cut off, and computed. Those that computed do what requests of
``never`` do, and those that loaded what those of ``always`` do, so that their times are taken together. *By choice* is
what the choices cost beside the better one: the mean of both medians, each with its share of the requests, and for
those that were cut off, their own times. If it is beyond the bound, the cell is missed, unless other work on the
machine hides which one is better: then in less than 90% of all pairs of a load and a computation, the better one was
faster, and the cell is open. The speeds of a length and load come in turns from fast to slow and back. The first eight
seconds of a cell do not count, nor do fifteen if its tier has become faster.

*Changes*: a tier that goes from full speed to a part of it and back, under one request after another. Full speed is
that of the present machine. The tier is left at the last request that waited for it, and used again from the first
request on after which all load.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
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
MODELS = {
    "slow": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8},
    "fast": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
}
LENGTHS = (192, 512)
SPEEDS = (1.0, 0.1, 0.01)
LOADS = (False, True)
RULES = ("never", "always", "auto")
FULL_SPEED = 0.1
"""Time of a block at full speed, as a part of the time of computing it."""
ROUNDS = 4
SETTLE_SECONDS = 8.0
RISE_SECONDS = 15.0
"""Seconds that do not count once the tiers have become faster, within which they are used again."""
BAD = (0.01,)
"""Parts of the full speed to which a tier changes."""
CHANGES = 1
"""Times that it changes to each."""
BAD_SECONDS = 15.0
STEADY = 8
"""Requests in a row that must load until the tier counts as used again."""
CLEAR = 0.9
"""Smallest share of pairs in which the better one is faster, if it is clearly better."""
LATEST = 90.0
"""Longest wait for that, in seconds."""


@dataclass(slots=True)
class Measured:
    """Seconds to the first token by rule, in the order of the requests, and what those of ``auto`` chose."""

    ttft: dict[str, list[float]] = field(default_factory=lambda: {rule: [] for rule in RULES})
    chosen: list[str] = field(default_factory=list)

    def times(self, rule: str, chosen: str) -> list[float]:
        """Return the seconds of the requests of ``rule``, and of those of ``auto`` that chose the same."""
        return self.ttft[rule] + [at for at, done in zip(self.ttft["auto"], self.chosen, strict=True) if done == chosen]

    @property
    def by_choice(self) -> float:
        """Mean seconds of the choices, divided by the better one of loading and computing."""
        kinds = {
            "computed": statistics.median(self.times("never", "computed")),
            "loaded": statistics.median(self.times("always", "loaded")),
        }
        chosen = zip(self.chosen, self.ttft["auto"], strict=True)
        return statistics.mean(kinds.get(kind, seconds) for kind, seconds in chosen) / min(kinds.values())

    @property
    def verdict(self) -> str:
        """``held``, ``missed`` or ``open``."""
        computed, loaded = self.times("never", "computed"), self.times("always", "loaded")
        if (self.by_choice - 1.05) * min(statistics.median(computed), statistics.median(loaded)) <= 0.01:
            return "held"
        faster = statistics.mean(a < b for a in computed for b in loaded)
        return "missed" if max(faster, 1.0 - faster) >= CLEAR else "open"


@dataclass(frozen=True, slots=True)
class Change:
    """A tier's change to a part of its speed, and back."""

    left: float
    """Seconds until the last request that waited for the bad tier; 0 without one."""
    waited: int
    """Number of these requests."""
    returned: float
    """Seconds from the change to full speed to the first request from which on all load."""


def run(bench: Bench) -> None:
    cells: dict[tuple[str, int, float, bool], Measured] = {}
    changes: dict[tuple[str, float], list[Change]] = {}
    rounds = bench.rounds or (1 if bench.quick else ROUNDS)
    for name, words in MODELS.items():
        heads = words["num_attention_heads"]
        model = write_model(bench.directory / name, num_key_value_heads=heads, **words)
        with engine_of(model, words) as engine:
            subject = Subject(engine)
            speeds = SPEEDS[::2] if bench.quick else SPEEDS
            for tokens in LENGTHS[:1] if bench.quick else LENGTHS:
                for loaded in LOADS:
                    for speed in speeds:
                        cells[name, tokens, speed, loaded] = subject.cell(tokens, speed, loaded, rounds)
                    speeds = speeds[::-1]
            for speed in BAD:
                changes[name, speed] = [subject.change(speed) for _ in range(CHANGES)]
    report(bench, cells, changes)


def engine_of(model: Path, words: dict[str, int]) -> Any:
    """Return the context of an engine with the three tiers."""
    blocks = max(LENGTHS) // BLOCK
    block_bytes = BLOCK * words["num_hidden_layers"] * 2 * words["hidden_size"] * 4
    chaos = "tests.mini_engine.chaos_tier:CHAOS_TIER"
    stack = {
        "primary": {"capacity": 8 * blocks * block_bytes, "promotion_share": 1.0},
        "secondary": [
            {
                "type": chaos,
                "name": rule,
                "seed": 1,
                "capacity": 12 * blocks * block_bytes,
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
        self._speed = 1.0
        times = []
        for tokens, prompts in self._prompts.items():
            for one in prompts:
                self._empty()
                times.append(ask(engine, one, 1, ["never"]).ttft * BLOCK / tokens)
                self._empty()
                ask(engine, one, 1, ["always"])  # the tier stores what the last request may not store there
                self._empty()
                ask(engine, one, 1, ["auto"])
        self._block_seconds = statistics.median(times[len(times) // 2 :])
        progress(f"computing a block takes {1e3 * self._block_seconds:.2f} ms")

    def cell(self, tokens: int, speed: float, loaded: bool, rounds: int) -> Measured:
        """Measure one length at one speed, once ``auto`` has had some time to find out about it."""
        end = time.monotonic() + (RISE_SECONDS if speed > self._speed else SETTLE_SECONDS)
        self._set_speed(speed)
        while time.monotonic() < end:
            self._ask("auto", tokens, loaded)
        measured = Measured()
        for _ in range(rounds):
            for rule in self._in_turn():
                seconds, chosen = self._ask(rule, tokens, loaded)
                measured.ttft[rule].append(seconds)
                if rule == "auto":
                    measured.chosen.append(chosen)
        shown = ", ".join(f"{rule} {1e3 * statistics.median(values):.0f}" for rule, values in measured.ttft.items())
        choices = Counter(measured.chosen).most_common()
        progress(f"{tokens} tokens, speed {speed:g}, load {loaded}: {measured.verdict}: {shown} ms, {choices}")
        return measured

    def change(self, speed: float) -> Change:
        """Let the tiers change from full speed to ``speed`` and back, under requests of ``auto``."""
        tokens = LENGTHS[-1]
        self._block_seconds = statistics.median(self._ask("never", tokens)[0] for _ in range(5)) * BLOCK / tokens
        self._set_speed(1.0)
        while any(self._ask("auto", tokens)[1] != "loaded" for _ in range(STEADY)):
            pass
        self._set_speed(speed)
        begun, left, waited = time.monotonic(), 0.0, 0
        while time.monotonic() < begun + BAD_SECONDS:
            if self._ask("auto", tokens)[1] != "computed":
                left, waited = time.monotonic() - begun, waited + 1
        self._set_speed(1.0)
        begun, returned, steady = time.monotonic(), 0.0, 0
        while steady < STEADY and time.monotonic() < begun + LATEST:
            at = time.monotonic() - begun
            steady = steady + 1 if self._ask("auto", tokens)[1] == "loaded" else 0
            returned = at if steady <= 1 else returned
        change = Change(left, waited, returned if steady == STEADY else LATEST)
        progress(f"to {speed:g} and back: {change}")
        return change

    def _in_turn(self) -> Sequence[str]:
        first = next(self._numbers) % len(RULES)
        return RULES[first:] + RULES[:first]

    def _ask(self, rule: str, tokens: int, loaded: bool = False) -> tuple[float, str]:
        """Return the seconds to the first token of a request, and what ``auto`` chose."""
        prompts = self._prompts[tokens]
        self._empty()
        time.sleep(self._block_seconds * tokens / BLOCK)
        beside = prompt(1_000_000 + next(self._numbers), tokens) if loaded else None
        before = self._engine.tier("auto")
        seconds = ask(self._engine, prompts[next(self._numbers) % len(prompts)], 1, [rule], beside=beside).ttft
        after = self._engine.tier("auto")
        if after["loads_cut"] > before["loads_cut"]:
            return seconds, "cut"
        return seconds, "computed" if after["loads_gated"] > before["loads_gated"] else "loaded"

    def _empty(self) -> None:
        """Let the tiers store what they have to, then empty the CPU tier and the engine's own cache."""
        settle(self._engine)
        primary = self._engine.connector.scheduler_half.manager.primary_tier
        primary.drop(list(primary.readable))
        if not self._engine.llm.reset_prefix_cache():
            raise RuntimeError("the engine's own cache is in use")

    def _set_speed(self, speed: float) -> None:
        self._speed, delay = speed, FULL_SPEED * self._block_seconds / speed
        for rule in RULES:
            chaos = ChaosTier.built[rule].chaos
            chaos._plan = replace(chaos._plan, gets={Fault.DELAY: 1.0}, delay=delay)


def report(
    bench: Bench,
    cells: dict[tuple[str, int, float, bool], Measured],
    changes: dict[tuple[str, float], list[Change]],
) -> None:
    """Write the tables and the targets."""

    def row(one: Measured) -> tuple[str, ...]:
        never, always, auto = (f"{1e3 * statistics.median(one.ttft[rule]):,.0f}" for rule in RULES)
        chosen = " / ".join(str(one.chosen.count(kind)) for kind in ("loaded", "cut", "computed"))
        return never, always, auto, chosen, f"{100 * (one.by_choice - 1.0):+.1f}%", one.verdict

    bench.table(
        "Time to the first token, medians",
        ("model", "prompt", "speed", "load", "never ms", "always ms", "auto ms", "chosen", "by choice", ""),
        [
            (name, f"{tokens:,}", f"{speed:g}", "yes" if loaded else "no", *row(one))
            for (name, tokens, speed, loaded), one in cells.items()
        ],
    )
    bench.table(
        "A tier that changes: seconds until it is left, requests that waited for it, seconds until it is used again",
        ("model", "to", "left s", "waited", "used again s"),
        [
            (name, f"{speed:g}", f"{one.left:.1f}", str(one.waited), f"{one.returned:.1f}")
            for (name, speed), several in changes.items()
            for one in several
        ],
    )
    verdicts = Counter(one.verdict for one in cells.values())
    clear = f"cells whose choices cost more than 5% and 10 ms, of {len(cells)}, {verdicts['open']} of them open"
    bench.target(clear, verdicts["missed"], 0, "max", "")
    regret = statistics.mean(max(0.0, one.by_choice - 1.0) for one in cells.values() if one.verdict != "open")
    bench.target("mean regret", 100 * regret, 3.0, "max", "%")
    flat = [one for several in changes.values() for one in several]
    bench.target("latest request that waited for a tier that has turned bad", max(x.left for x in flat), 60, "max", "s")
    bench.target("latest use of a tier that has recovered", max(x.returned for x in flat), 60, "max", "s")
