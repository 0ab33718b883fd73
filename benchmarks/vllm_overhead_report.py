"""Names of the engines of the benchmark ``vllm_overhead``, its tables and targets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median

from benchmarks.harness import Bench, Cell, Spread, show, spread
from benchmarks.vllm_overhead_engine import Answered

BLOCK = 32
SMALL, SMALL_LENGTH, SMALL_OUTPUTS, AT_ONCE, LONG_LENGTH = 40, 100, 4, 8, 4096
SMALL_CACHED = SMALL_LENGTH // BLOCK * BLOCK
CHUNK = 3
"""Blocks of an object, in the row that has several."""

NONE, NULL, IDLE = "none", "null", "ours, idle"
CPU, SIMPLE, LOCAL, S3 = "ours, CPU", "ours, simple", "ours, CPU + local", "ours, CPU + S3"
OFFLOADING, SIMPLE_OFFLOAD = "vLLM OffloadingConnector", "vLLM SimpleCPUOffload"
THEIRS = {OFFLOADING: "OffloadingConnector", SIMPLE_OFFLOAD: "SimpleCPUOffloadConnector"}
EMPTIED = ", CPU emptied"
PROCESS = f"{S3}, io: process"
"""The bucket, whose tier works in a process that the engine starts."""
MACHINE = f"{LOCAL}, machine"
"""The disk behind a machine's service, which serves this engine alone."""
STACKS = (CPU, SIMPLE, LOCAL, S3, PROCESS)
"""Stacks that have goals, and are compared with those of another checkout."""
EXCLUSIVE = f"{LOCAL}, exclusive"
"""A CPU tier that prefers blocks which the engine's own cache does not hold, in front of a disk."""

CHUNKS = f"{S3}, {CHUNK} blocks an object"

CHOICES = {
    "idle": IDLE,
    "cpu": CPU,
    "simple": SIMPLE,
    "local": LOCAL,
    "s3": S3,
    "process": PROCESS,
    "exclusive": EXCLUSIVE,
    "chunks": CHUNKS,
    "machine": MACHINE,
}
"""Engines with our connector that a run may choose, by their word on the command line."""

Round = dict[str, dict[str, Answered]]
"""Answers of each engine, by the part of the round."""


COMPARED = (
    ("new", "cpu"),
    ("new", "thread"),
    ("again", "cpu"),
    ("again", "ttft"),
    ("long new", "cpu"),
    ("long again", "ttft"),
    ("long again", "cpu"),
    ("spins", "ttft"),
)
"""The parts and quantities in which two checkouts are compared."""


class Costs:
    """The rounds' measurements, and their ratios."""

    def __init__(self, rounds: Sequence[Round], each: int) -> None:
        """Create the costs.

        Args:
            rounds: the rounds of all starts.
            each: number of rounds of a start.
        """
        self.rounds = rounds
        self.names = tuple(rounds[0])
        """Names of the engines that ran."""
        self._each = each

    def spread(self, values: Sequence[float]) -> Spread:
        """Return the median of values by round; the interval counts what differs between starts."""
        return spread(values, group=self._each)

    def values(self, name: str, part: str, what: str) -> list[float]:
        """Return one quantity of an engine, by round; "ttft" is the median over the requests."""
        found = [getattr(answered[name][part], what) for answered in self.rounds]
        return [float(median(value)) for value in found] if what == "ttft" else [float(value) for value in found]

    def ratio(self, name: str, base: str, part: str, what: str = "cpu") -> Spread:
        """Return one engine's quantity divided by another's."""
        theirs = self.values(base, part.removesuffix(EMPTIED), what)
        return self.spread([mine / other for mine, other in zip(self.values(name, part, what), theirs, strict=True)])

    def per_token(self, name: str, part: str, what: str) -> float:
        """Return the microseconds per token."""
        tokens = LONG_LENGTH + 1 if part.startswith("long") else SMALL * (SMALL_LENGTH + SMALL_OUTPUTS)
        return median(self.values(name, part, what)) / tokens * 1e6

    def per_request(self, name: str, base: str = NONE) -> Spread:
        """Return the engine thread's milliseconds per new small request, beyond those of ``base``."""
        pairs = zip(self.values(name, "new", "thread"), self.values(base, "new", "thread"), strict=True)
        return self.spread([(mine - theirs) / SMALL * 1e3 for mine, theirs in pairs])


def report(bench: Bench, rounds: Sequence[Round], each: int) -> None:
    """Write the tables and the targets."""
    costs = Costs(rounds, each)
    title = f"{len(rounds)} alternating rounds in {len(rounds) // each} starts"
    tables(bench, costs, title)
    declare_targets(bench, costs)
    storing = [name for name in costs.names if name not in (NONE, NULL, IDLE)]
    copies = ", ".join(f"{name} {costs.per_token(name, 'new', 'copies'):.1f}" for name in storing)
    bench.note(f"Load of the machine at the end, engines included: {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores.")
    if IDLE in costs.names:
        bench.note(f"CPU of new small prompts, ours, idle, against null: {around(costs.ratio(IDLE, NULL, 'new'))}.")
    for name in filter(costs.names.__contains__, (PROCESS, MACHINE)):
        own, long = (costs.per_token(name, part, "children") for part in ("new", "long new"))
        bench.note(
            f"The tier's process alone, {name}, inside the numbers, CPU us per token: "
            f"{own:.1f} of the new small prompts, {long:.1f} of 4,096 new tokens."
        )
    bench.note(f"Copies alone, inside the numbers, CPU us per token of the new small prompts: {copies}.")


def declare_targets(bench: Bench, costs: Costs) -> None:
    """Compare the measurements with their limits."""
    for name, against, thread, long in (
        (CPU, 1.0, 0.40, 1.05),
        (LOCAL, 1.04, 0.45, 1.08),
        (S3, 1.20, 0.60, 1.25),
        (PROCESS, 1.20, 0.60, 1.25),
    ):
        if name not in costs.names:
            continue
        against_theirs = costs.ratio(name, OFFLOADING, "new")
        bench.target(f"{name}: CPU of new small prompts against {OFFLOADING}", against_theirs, against, "max", "x")
        bench.target(f"{name}: engine's thread per new small request", costs.per_request(name), thread, "max", "ms")
        calls = costs.spread([seconds / SMALL * 1e3 for seconds in costs.values(name, "new", "calls")])
        bench.target(f"{name}: engine's thread in calls of the connector, per request", calls, thread, "max", "ms")
        bench.target(
            f"{name}: CPU of 4,096 new tokens against none", costs.ratio(name, NONE, "long new"), long, unit="x"
        )
    for part, base, goal, shown in (
        ("new", OFFLOADING, 1.20, "new small prompts"),
        ("long new", NONE, 1.25, "4,096 new tokens"),
    ):
        if CHUNKS in costs.names:
            bench.target(f"{CHUNKS}: CPU of {shown} against {base}", costs.ratio(CHUNKS, base, part), goal, "max", "x")
    for name in filter(costs.names.__contains__, STACKS):
        theirs = SIMPLE_OFFLOAD if name == SIMPLE else OFFLOADING
        for what in ("steps", "runs"):
            bench.target(f"{name}: {what} against none", costs.ratio(name, NONE, "new", what), 1.0, "max", "x")
        again = costs.ratio(name, NONE, "again")
        bench.target(f"{name}: CPU of the same again against none", again, 0.44, "max", "x")
        bench.target(
            f"{name}: TTFT of a small hit against {theirs}", costs.ratio(name, theirs, "again", "ttft"), 1.0, unit="x"
        )
        for what, shown in (("ttft", "TTFT"), ("cpu", "CPU")):
            ratio = costs.ratio(name, SIMPLE_OFFLOAD, "long again", what)
            bench.target(
                f"{name}: {shown} of 4,096 tokens from the tier against {SIMPLE_OFFLOAD}", ratio, 1.0, unit="x"
            )
    for part, what, shown in (
        ("new", "cpu", "CPU of new small prompts"),
        ("new", "thread", "engine's thread for new small prompts"),
        ("again", "cpu", "CPU of the same again"),
        ("long new", "cpu", "CPU of 4,096 new tokens"),
    ):
        if SIMPLE not in costs.names:
            break
        ratio = costs.ratio(SIMPLE, SIMPLE_OFFLOAD, part, what)
        bench.target(f"{SIMPLE}: {shown} against {SIMPLE_OFFLOAD}", ratio, 1.0, "max", "x")
    if {MACHINE, LOCAL} <= set(costs.names):
        for part, shown in (("new", "new small prompts"), ("long new", "4,096 new tokens")):
            ratio = costs.ratio(MACHINE, LOCAL, part, "thread")
            bench.target(f"{MACHINE}: engine's thread for {shown} against {LOCAL}", ratio, 1.0, "max", "x")
    if IDLE in costs.names:
        bench.target(f"{IDLE}: CPU of new small prompts against none", costs.ratio(IDLE, NONE, "new"), 1.01, "max", "x")


def tables(bench: Bench, costs: Costs, title: str) -> None:
    """Write one row per engine, for what is new and for what comes back."""
    new: list[list[Cell]] = []
    back: list[list[Cell]] = []
    for name, parts in costs.rounds[0].items():
        row: list[Cell] = [name, costs.per_token(name, "new", "cpu"), around(costs.ratio(name, NONE, "new"))]
        row.append(costs.per_token(name, "new", "thread"))
        row.append(around(costs.per_request(name)) if name != NONE else "")
        row.append(around(costs.per_request(name, NULL)) if NULL in costs.names and name not in (NONE, NULL) else "")
        row += [median(costs.values(name, "new", what)) / SMALL * 1e3 for what in ("calls", "draining")]
        row += [median(costs.values(name, "new", what)) for what in ("steps", "runs")]
        row += [costs.per_token(name, "new", "copies"), max(costs.values(name, "new", "tail"))]
        row.append(around(costs.ratio(name, NONE, "long new")) if "long new" in parts else "")
        new.append(row)
        for suffix in ("", EMPTIED):
            again, long, spins = "again" + suffix, "long again" + suffix, "spins" + suffix
            if again not in parts:
                continue
            row = [name + suffix, around(costs.ratio(name, NONE, again))]
            row.append(median(costs.values(name, again, "ttft")) * 1e3)
            row += [median(costs.values(name, long, "ttft")) * 1e3, costs.per_token(name, long, "cpu")]
            for what, scale in (("ttft", 1e3), ("steps", 1)):
                row.append(median(costs.values(name, spins, what)) * scale if spins in parts else "")
            back.append(row)
    bench.table(
        f"New: {SMALL} prompts of {SMALL_LENGTH} tokens, and one of 4,096; {title}",
        (
            "engine",
            "CPU us/token",
            "x none",
            "thread us/token",
            "ms per request",
            "beyond null",
            "calls ms/request",
            "draining ms/request",
            "steps",
            "runs",
            "copies us/token",
            "longest tail s",
            "4,096 new: x none",
        ),
        new,
    )
    bench.table(
        f"The same again, from the tiers; {title}",
        (
            "engine",
            "small: CPU x none",
            "small: TTFT p50 ms",
            "4,096: TTFT ms",
            "4,096: CPU us/token",
            "it spins: TTFT ms",
            "it spins: steps",
        ),
        back,
    )


def around(value: Spread) -> str:
    """Return a median and its interval for people."""
    return f"{show(value.middle)} ({show(value.low)} to {show(value.high)})"


def other(name: str) -> str:
    """Return the name of an engine with the code of the other checkout."""
    return f"{name} (other)"


def report_against(bench: Bench, rounds: Sequence[Round], each: int) -> None:
    """Write this checkout's costs as multiples of the other's; more than 1.03 is a regression."""
    costs = Costs(rounds, each)
    tables(
        bench, costs, f"{len(rounds)} alternating rounds in {len(rounds) // each} starts; (other) is {bench.against}"
    )
    rows: list[list[Cell]] = []
    for name in (name for name in costs.names if other(name) in costs.names):
        row: list[Cell] = [name]
        for part, what in COMPARED:
            ratio = costs.ratio(name, other(name), part, what)
            row.append(around(ratio))
            bench.target(f"{name}: {what} of {part!r} against the other checkout", ratio, 1.03, "max", "x")
        rows.append(row)
    bench.table("This checkout against the other", ("engine", *(f"{part}, {what}" for part, what in COMPARED)), rows)
