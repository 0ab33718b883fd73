"""Cost of the connector in the real vLLM, beside vLLM's own connectors.

The model is a Llama of 4 layers, hidden size 256, in blocks of 32 tokens, so small that the ratios are upper bounds;
the microseconds are not. All engines are alive at once, each in a process of its own, and answer in turns, in an order
that changes with the round. "None" has no connector. "Null" has one that does nothing (``vllm_null``), and costs vLLM's
own calls of connectors. "Ours, idle" has ours, and requests that neither load nor store. vLLM's two connectors run on
the CPU build with streams that are always ready and a native copy (``vllm_own``). All CPU tiers have 384 MiB. The S3
server (rclone on loopback) is a process of its own and not counted.

A round has 40 new prompts of 100 tokens, 8 at a time, with 4 outputs each; the same again, after the GPU's cache was
emptied; a new prompt of 4,096 tokens with one output; and the same again. Engines with a disk or a bucket repeat what
comes back with an empty CPU tier (the rows "CPU emptied"). "It spins" is the 4,096 tokens from the tier once more, in
an engine that does not rest for 1 ms after a step without a run of the model, as one inside its caller's process.

CPU is that of all threads of the engine, and of the process that it starts for the tier with ``io: process``, until
nothing is in flight in both, at most 20 s after the last answer. "Thread" is the engine's thread until the last answer;
"ms per request" is what it has beyond none; "draining" is its time after the last answer. "Calls" are the engine
thread's part in calls of the connector; vLLM's copy is one. "Runs" are the steps that ran the model; the other steps
wait for an answer. "Copies" are the copies between GPU blocks and the CPU tier alone, which differ: ours run in numpy,
large ones on threads, vLLM's in one native call. In "3 blocks an object", an offloaded block is three of the engine's
(``blocks_per_chunk: 3``), so that a small prompt is one object of 384 KiB. A round is refused unless all engines give
the same answers, all full blocks come back, and disk and bucket then hold each block, as their administration lists
them. Ratios are medians of those within a round. Two engines that do the same differ as long as they live: of nine
without connector, one took 0.95 and another 1.14 of the median. In huge pages, which the engines' memory is in here,
nine took 0.97 to 1.02. All engines are therefore started anew for each quarter of the rounds, too, and the bootstrap
whose 95% an interval is draws whole starts.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.engine_processes import in_a_process, processes_of, receive
from benchmarks.harness import Bench, Cell, Spread, show, spread
from benchmarks.vllm_engine import progress, write_model
from benchmarks.vllm_overhead_engine import VOCABULARY, Answered, Load, Setting, serve
from benchmarks.vllm_own import compile_copy, compiler
from tests.servers import rclone_server
from tests.vllm.rig import transfer_config
from tiering.cli.inspect import read_content
from tiering.config.registry import tier_definition
from tiering.config.stack_file import load_stack

COMPARES_CHECKOUTS = True
STARTS = 4
"""Number of starts of all engines.

Each has as many rounds as the others, after one that does not count.
"""
ROUNDS = 12
"""Number of rounds that count, of all starts together."""
CAPACITY = 384 << 20
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
STACKS = (CPU, SIMPLE, LOCAL, S3, PROCESS)
EXCLUSIVE = f"{LOCAL}, exclusive"
"""A CPU tier that prefers blocks which the engine's own cache does not hold, in front of a disk."""

CHUNKS = f"{S3}, {CHUNK} blocks an object"

Round = dict[str, dict[str, Answered]]
"""Answers of each engine, by the part of the round."""


def lacks() -> str:
    """Return what is missing on this machine; empty if nothing is."""
    return "" if compiler() else "there is no C compiler (cc)"


def run(bench: Bench) -> None:
    """Run rounds over all engines, then write the tables."""
    model = bench.directory / "model"
    in_a_process(write_small_model, model)
    rounds: list[Round] = []
    others = os.getloadavg()[1]
    starts = 1 if bench.quick else STARTS
    each = 1 if bench.quick else -(-(bench.rounds or ROUNDS) // starts)
    for start in range(starts):
        directory = bench.directory / f"start-{start}"
        directory.mkdir()
        with started(bench, directory, model) as (engines, stacks):
            for number in range(each + 1):
                answered = one_round(start * (each + 1) + number, engines)
                check_answers(answered)
                for name, stack in stacks.items():
                    check_tiers(name, stack, (number + 1) * blocks_of(name))
                if number:
                    rounds.append(answered)
                shown = ", ".join(f"{name} {parts['new'].cpu * 1e3:.0f} ms" for name, parts in answered.items())
                which = f"round {number} of {each}{' (does not count)' * (not number)}"
                progress(f"overhead: start {start + 1} of {starts}, {which}: {shown}")
    if bench.against is None:
        report(bench, rounds, each)
        bench.note(f"Load of the machine before the start, from others: {others:.1f} on {os.cpu_count()} cores.")
    else:
        report_against(bench, rounds, each)


def block_of(name: str) -> int:
    """Return the tokens of an offloaded block of an engine."""
    return BLOCK * CHUNK if name == CHUNKS else BLOCK


def blocks_of(name: str) -> int:
    """Return the number of blocks that an engine stores in a round."""
    block = block_of(name)
    return SMALL * (SMALL_LENGTH // block) + LONG_LENGTH // block


def write_small_model(directory: Path) -> None:
    """Write the model of this benchmark."""
    write_model(
        directory,
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
    )


@contextmanager
def started(
    bench: Bench, directory: Path, model: Path
) -> Iterator[tuple[dict[str, Connection], dict[str, dict[str, Any]]]]:
    """Start all engines; yield the pipe to each, and the stacks of those with secondary tiers."""
    with ExitStack() as opened:
        # Else where its pages happen to lie makes an engine faster or slower for life, by up to 14%.
        opened.enter_context(patch.dict(os.environ, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}))
        server = opened.enter_context(rclone_server())
        opened.enter_context(patch.dict(os.environ, server.environment()))  # for the administration of the bucket
        stacks: dict[str, dict[str, Any]] = {}
        trees: dict[str, Path | None] = {} if bench.against else {IDLE: None}
        trees.update(dict.fromkeys(STACKS))
        if bench.against is None:
            trees |= {EXCLUSIVE: None, CHUNKS: None}
        if bench.against is not None:
            trees.update({other(name): bench.against for name in STACKS})
        for number, name in enumerate(trees):
            tier: dict[str, Any] = {
                "type": "local",
                "path": str(directory / f"disk-{number}"),
                "capacity": "3GiB",
            }
            if name.startswith(S3):
                bucket = server.make_bucket(f"kv-cache-{number}")
                tier = {"type": "s3", "bucket": bucket.name, "endpoint_url": server.endpoint}
            stack: dict[str, Any] = {"primary": {"capacity": CAPACITY}}
            if name.startswith(SIMPLE):
                stack["mode"] = "simple"
            elif name.startswith((LOCAL, S3)):
                stack |= {"secondary": [tier], "keep_secondary": True}
            if name.startswith(PROCESS):
                stack["io"] = "process"
            if name == EXCLUSIVE:
                stack["primary"]["inclusion"] = "exclusive"
            stacks[name] = stack
        settings = {NONE: Setting(model, None, {})}
        if bench.against is None:
            null = {"kv_connector": "NullConnector", "kv_connector_module_path": "benchmarks.vllm_null"}
            settings[NULL] = Setting(model, null | {"kv_role": "kv_both"}, {})
            library = compile_copy(directory)
            for name, connector in THEIRS.items():
                words = {"cpu_bytes_to_use": CAPACITY}
                config = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": words}
                settings[name] = Setting(model, config, {}, copies=library)
        for name, stack in stacks.items():
            words = {"blocks_per_chunk": CHUNK} if name == CHUNKS else {}
            settings[name] = Setting(model, transfer_config(stack | words), server.environment(), tree=trees[name])
        progress("overhead: starting the engines")
        engines = opened.enter_context(processes_of(serve, {name: (setting,) for name, setting in settings.items()}))
        yield engines, {name: stack for name, stack in stacks.items() if "secondary" in stack}


def other(name: str) -> str:
    """Return the name of an engine with the code of the other checkout."""
    return f"{name} (other)"


def one_round(number: int, engines: Mapping[str, Connection]) -> Round:
    """Return how each engine has answered the round's requests."""
    seeds = tuple(range(number * 1000, number * 1000 + SMALL))
    order = list(engines)
    random.Random(number).shuffle(order)
    answered = {name: turn(name, engines[name], seeds) for name in order}
    return {name: answered[name] for name in engines}


def turn(name: str, engine: Connection, seeds: tuple[int, ...]) -> dict[str, Answered]:
    """Return how one engine has answered the parts of a round."""
    parts: dict[str, Answered] = {}
    words = {"load": False, "store": False} if name == IDLE else {}
    long = Load((seeds[0] + 500,), LONG_LENGTH, 1, words=words)
    behind = name.startswith((LOCAL, S3))
    for new, again, load in (("new", "again", small(seeds, words)), ("long new", "long again", long)):
        parts[new] = ask(engine, load)
        empty(engine, "gpu")
        if name in (NULL, IDLE):
            continue
        parts[again] = ask(engine, load)
        empty(engine, "gpu")
        if behind:
            empty(engine, "cpu")
            parts[again + EMPTIED] = ask(engine, load)
            empty(engine, "gpu")
    spins = Load(long.seeds, LONG_LENGTH, 1, pauses=False)
    if name not in (NONE, NULL, IDLE):
        parts["spins"] = ask(engine, spins)
        empty(engine, "gpu")
    if behind:
        empty(engine, "cpu")
        parts["spins" + EMPTIED] = ask(engine, spins)
        empty(engine, "gpu")
    return parts


def small(seeds: tuple[int, ...], words: dict[str, Any]) -> Load:
    """Return the round's small requests, with ``words`` for the tiers."""
    return Load(seeds, SMALL_LENGTH, SMALL_OUTPUTS, AT_ONCE, words)


def ask(engine: Connection, load: Load) -> Answered:
    """Return how the engine has answered ``load``."""
    engine.send(load)
    answered = receive(engine)
    if not isinstance(answered, Answered):
        raise RuntimeError(f"an engine returned {answered!r}")
    return answered


def empty(engine: Connection, caches: str) -> None:
    """Empty the GPU's cache ("gpu"), or the CPU tier too ("cpu")."""
    engine.send(caches)
    if not receive(engine):
        raise RuntimeError("an engine's cache could not be emptied")


# ------------------------------------------------------------------------------------------------ what a round must do


def check_answers(answered: Round) -> None:
    """Refuse a round with wrong answers, in which too little came back, or whose CPU is incomplete.

    Raises:
        RuntimeError: an engine did less than the round asks for, or its process was not counted.
    """
    expected = {part: answered[NONE][part].answers for part in ("new", "long new")}
    for name, parts in answered.items():
        for part, given in parts.items():
            if given.answers != expected["long new" if part.startswith(("long", "spins")) else "new"]:
                raise RuntimeError(f"{name}, {part}: other answers than without a connector")
            least = 0
            if name != NONE and part not in expected:
                # The last token of a prompt is computed, and with it perhaps its block.
                least = SMALL_CACHED if part.startswith("again") else LONG_LENGTH - block_of(name)
            if name.startswith(PROCESS) and part in expected and not given.children:
                raise RuntimeError(f"{name}, {part}: the CPU of the tier's process was not counted")
            if min(given.cached) < least or (part in expected and any(given.cached)):
                raise RuntimeError(f"{name}, {part}: {given.cached} tokens were cached, not {least} of each prompt")


def check_tiers(name: str, stack: Mapping[str, Any], blocks: int) -> None:
    """Refuse a round after which a disk or bucket does not hold all blocks until now.

    Raises:
        RuntimeError: the medium has another number of blocks.
    """
    (options,) = load_stack(stack).secondary
    with tier_definition(options.type).admin(options, None) as admin:
        content = asyncio.run(read_content(admin))
    held = sum(epoch.blocks for epoch in content.epochs)
    if held != blocks or content.unreadable:
        raise RuntimeError(f"{name}: the medium holds {held} blocks, not {blocks}")


# ----------------------------------------------------------------------------------------------------------- the report


class Costs:
    """The rounds' measurements, and their ratios."""

    def __init__(self, rounds: Sequence[Round], each: int) -> None:
        """Create the costs.

        Args:
            rounds: the rounds of all starts.
            each: number of rounds of a start.
        """
        self.rounds = rounds
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

    def per_request(self, name: str) -> Spread:
        """Return the engine thread's milliseconds per new small request, beyond those without connector."""
        pairs = zip(self.values(name, "new", "thread"), self.values(NONE, "new", "thread"), strict=True)
        return self.spread([(mine - none) / SMALL * 1e3 for mine, none in pairs])


def report(bench: Bench, rounds: Sequence[Round], each: int) -> None:
    """Write the tables and the targets."""
    costs = Costs(rounds, each)
    title = f"{len(rounds)} alternating rounds in {len(rounds) // each} starts"
    tables(bench, costs, title)
    declare_targets(bench, costs)
    copies = ", ".join(
        f"{name} {costs.per_token(name, 'new', 'copies'):.1f}" for name in (OFFLOADING, SIMPLE_OFFLOAD, *STACKS)
    )
    bench.note(f"Load of the machine at the end, engines included: {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores.")
    bench.note(f"CPU of new small prompts, ours, idle, against null: {around(costs.ratio(IDLE, NULL, 'new'))}.")
    own, long = (costs.per_token(PROCESS, part, "children") for part in ("new", "long new"))
    bench.note(
        f"The tier's process alone, {PROCESS}, inside the numbers, CPU us per token: "
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
        bench.target(f"{CHUNKS}: CPU of {shown} against {base}", costs.ratio(CHUNKS, base, part), goal, "max", "x")
    for name in STACKS:
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
        ratio = costs.ratio(SIMPLE, SIMPLE_OFFLOAD, part, what)
        bench.target(f"{SIMPLE}: {shown} against {SIMPLE_OFFLOAD}", ratio, 1.0, "max", "x")
    bench.target(f"{IDLE}: CPU of new small prompts against none", costs.ratio(IDLE, NONE, "new"), 1.01, "max", "x")


def tables(bench: Bench, costs: Costs, title: str) -> None:
    """Write one row per engine, for what is new and for what comes back."""
    new: list[list[Cell]] = []
    back: list[list[Cell]] = []
    for name, parts in costs.rounds[0].items():
        row: list[Cell] = [name, costs.per_token(name, "new", "cpu"), around(costs.ratio(name, NONE, "new"))]
        row += [costs.per_token(name, "new", "thread"), around(costs.per_request(name)) if name != NONE else ""]
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


def report_against(bench: Bench, rounds: Sequence[Round], each: int) -> None:
    """Write this checkout's costs as multiples of the other's; more than 1.03 is a regression."""
    costs = Costs(rounds, each)
    tables(
        bench, costs, f"{len(rounds)} alternating rounds in {len(rounds) // each} starts; (other) is {bench.against}"
    )
    rows: list[list[Cell]] = []
    for name in STACKS:
        row: list[Cell] = [name]
        for part, what in COMPARED:
            ratio = costs.ratio(name, other(name), part, what)
            row.append(around(ratio))
            bench.target(f"{name}: {what} of {part!r} against the other checkout", ratio, 1.03, "max", "x")
        rows.append(row)
    bench.table("This checkout against the other", ("engine", *(f"{part}, {what}" for part, what in COMPARED)), rows)


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
