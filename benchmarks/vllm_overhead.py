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

CPU is that of all threads of the engine, and of the process of its tier (``io: process``, a machine's service), until
nothing is in flight in both, at most 20 s after the last answer. "Thread" is the engine's thread until the last answer;
"ms per request" is what it has beyond none; "draining" is its time after the last answer. "Calls" are the engine
thread's part in calls of the connector; vLLM's copy is one. "Runs" are the steps that ran the model; the other steps
wait for an answer. "Copies" are the copies between GPU blocks and the CPU tier alone, which differ: ours run in numpy,
large ones on threads, vLLM's in one native call. In "3 blocks an object", an offloaded block is three of the engine's
(``blocks_per_chunk: 3``), so that a small prompt is one object of 384 KiB. A round is refused unless all engines give
the same answers, all full blocks come back, and disk and bucket then hold each block, as their administration lists
them. Ratios are medians of those within a round. Two engines that do the same differ as long as they live: of nine
without connector, one took 0.95 and another 1.14 of the median. In huge pages, which the engines' memory is in here,
nine took 0.97 to 1.02. All engines are therefore started anew several times, too, and the bootstrap whose 95% an
interval is draws whole starts. "Beyond null" is a thread's time per request beyond that of "null" in the same start.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.engine_processes import in_a_process, processes_of, receive
from benchmarks.harness import Bench
from benchmarks.vllm_engine import progress, write_model
from benchmarks.vllm_machine import machine_service
from benchmarks.vllm_overhead_engine import VOCABULARY, Answered, Load, Setting, serve
from benchmarks.vllm_overhead_report import (
    AT_ONCE,
    BLOCK,
    CHOICES,
    CHUNK,
    CHUNKS,
    EMPTIED,
    EXCLUSIVE,
    IDLE,
    LOCAL,
    LONG_LENGTH,
    MACHINE,
    NONE,
    NULL,
    PROCESS,
    S3,
    SIMPLE,
    SMALL,
    SMALL_CACHED,
    SMALL_LENGTH,
    SMALL_OUTPUTS,
    STACKS,
    THEIRS,
    Round,
    other,
    report,
    report_against,
)
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
"""Bytes of each CPU tier."""


def lacks() -> str:
    """Return what is missing on this machine; empty if nothing is."""
    return "" if compiler() else "there is no C compiler (cc)"


def run(bench: Bench) -> None:
    """Run rounds over all engines, then write the tables."""
    model = bench.directory / "model"
    in_a_process(write_small_model, model)
    rounds: list[Round] = []
    others = os.getloadavg()[1]
    starts = 1 if bench.quick else bench.starts or STARTS
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
    return BLOCK * CHUNK if name.startswith(CHUNKS) else BLOCK


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
        ours: Collection[str] = [CHOICES[word] for word in bench.engines] or (
            STACKS if bench.against else CHOICES.values()
        )
        trees: dict[str, Path | None] = dict.fromkeys(ours)
        if bench.against is not None:
            trees |= {other(name): bench.against for name in ours}
        services: dict[str, int] = {}
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
            if name.startswith(EXCLUSIVE):
                stack["primary"]["inclusion"] = "exclusive"
            if name.startswith(MACHINE):
                place = opened.enter_context(machine_service(directory / f"service-{number}", tier, CAPACITY))
                services[name] = place[1]
                del stack["secondary"]
                stack["machine"] = {"socket": str(place[0]), "tiers": ["local"]}
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
            words = {"blocks_per_chunk": CHUNK} if name.startswith(CHUNKS) else {}
            config, service = transfer_config(stack | words), services.get(name)
            settings[name] = Setting(model, config, server.environment(), tree=trees[name], service=service)
        progress("overhead: starting the engines")
        engines = opened.enter_context(processes_of(serve, {name: (setting,) for name, setting in settings.items()}))
        yield engines, {name: stack for name, stack in stacks.items() if "secondary" in stack}


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
    words = {"load": False, "store": False} if name.startswith(IDLE) else {}
    long = Load((seeds[0] + 500,), LONG_LENGTH, 1, words=words)
    behind = name.startswith((LOCAL, S3))
    for new, again, load in (("new", "again", small(seeds, words)), ("long new", "long again", long)):
        parts[new] = ask(engine, load)
        empty(engine, "gpu")
        if name.startswith((NULL, IDLE)):
            continue
        parts[again] = ask(engine, load)
        empty(engine, "gpu")
        if behind:
            empty(engine, "cpu")
            parts[again + EMPTIED] = ask(engine, load)
            empty(engine, "gpu")
    spins = Load(long.seeds, LONG_LENGTH, 1, pauses=False)
    if not name.startswith((NONE, NULL, IDLE)):
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
            if name.startswith((PROCESS, MACHINE)) and part in expected and not given.children:
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
