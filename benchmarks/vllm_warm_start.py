"""Time to the first token of known prompts: a warm start beside an engine that has run for long.

The model is a Llama of 6 layers, hidden size 512, float32, on vLLM's CPU platform, in one process per engine. Prompts
have 256 tokens, eight blocks each. The first engine computes them with a bucket behind it, publishes what it used, and
stays: it has run for long. Its CPU tier holds all prompts, its own cache does not, and is reset before each pass. Then
engines start in processes of their own, with an empty CPU tier: with the same bucket, whose server answers each request
after 25 ms in the median, and with the disk that another engine has left. Each starts cold (without ``warm_start``) and
warm, in turns. Once the warm start is over, and behind five unknown prompts, so that no time counts that the
first steps of a process take longer, the new engine and the first one answer each known prompt in turns. "By long" is
the median over the prompts of the ratio of both times. All answers must be those of the first engine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.engine_processes import in_a_process, processes_of, receive
from benchmarks.harness import Bench, Cell
from benchmarks.slow_s3 import BUCKET, SlowS3, slow_s3
from benchmarks.vllm_engine import BLOCK, ask, progress, prompt, running, settle, write_model
from tests.vllm.rig import Engine, transfer_config
from tiering.secondary.hot_prefixes import PUBLISH_SECONDS

LAYERS, HIDDEN, HEADS = 6, 512, 8
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
}
"""Words of the model that differ from those of :func:`benchmarks.vllm_engine.write_model`."""
BLOCK_BYTES = BLOCK * LAYERS * 2 * HIDDEN * 4
LENGTH, PROMPTS, TOKENS = 256, 50, 4
ROWS = 2 * PROMPTS * (LENGTH // BLOCK)
UNKNOWN, STARTS = 5, 2
LIMIT = 1.1
DELAY = 0.025
TO_PUBLISH = 1.1 * PUBLISH_SECONDS


@dataclass(frozen=True, slots=True)
class Ready:
    """A new engine that has done its warm start and answered unknown prompts."""

    seconds: float
    """Seconds from the first step until the warm start was over."""
    blocks: int
    """Number of blocks that the warm start has loaded."""


def run(bench: Bench) -> None:
    """Run the first engine, then the new ones beside it, then write the tables."""
    model = bench.directory / "model"
    in_a_process(write_small, model)
    prompts, starts = (4, 1) if bench.quick else (PROMPTS, STARTS)
    rows: list[tuple[Cell, ...]] = []
    with ExitStack() as opened:
        opened.enter_context(patch.dict(os.environ, OMP_WAIT_POLICY="passive"))
        server = opened.enter_context(slow_s3())
        tiers = {
            "bucket": {"type": "s3", "bucket": BUCKET, "endpoint_url": server.endpoint, "prefix": "warm/"},
            "disk": {"type": "local", "path": str(bench.directory / "disk"), "capacity": "2GiB"},
        }
        long = opened.enter_context(_engine(model, tiers["bucket"], server, warm=True))
        with _engine(model, tiers["disk"], server, warm=True) as left:
            for engine in (long, left):
                engine.send(range(prompts))
                receive(engine)
        server.delay(head=DELAY, get=DELAY, put=DELAY)
        for place, tier in tiers.items():
            found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            ready: list[float] = []
            for start in range(starts):
                for warm in (False, True) if start % 2 == 0 else (True, False):
                    with _engine(model, tier, server, warm=warm) as new:
                        new.send(None)
                        state: Ready = receive(new)
                        if (state.blocks >= prompts * (LENGTH // BLOCK)) is not warm:
                            raise RuntimeError(f"{place}: a warm start of {state.blocks} blocks")
                        ready += [state.seconds] * warm
                        pairs = _side_by_side(new, long, prompts)
                    found[warm] += pairs
                    progress(f"warm_start: {place}, {'warm' if warm else 'cold'}: {_by_long(pairs):.2f}")
            for warm, name in ((False, "cold"), (True, "warm start")):
                mine, other = ([seconds[at] for seconds in found[warm]] for at in (0, 1))
                seconds = statistics.median(ready) if warm else ""
                shown = (*_quantiles(mine), *_quantiles(other)[:2], _by_long(found[warm]))
                rows.append((place, name, seconds, *shown))
            bench.target(
                f"{place}: the first {prompts} prompts after a warm start, by an engine that has run for long",
                _by_long(found[True]),
                LIMIT,
                "max",
                "x",
            )
    bench.table(
        f"Time to the first token of the first {prompts} known prompts, ms",
        ("tier", "start", "warm start, s", "median", "90th percentile", "longest", "long: median", "90th", "by long"),
        rows,
    )


def _side_by_side(new: Connection, long: Connection, prompts: int) -> list[tuple[float, float]]:
    """Return the seconds of both engines for each known prompt."""
    pairs: list[tuple[float, float]] = []
    long.send("reset")
    receive(long)
    for seed in range(prompts):
        both: dict[int, tuple[float, list[int]]] = {}
        for at in (0, 1) if seed % 2 else (1, 0):
            engine = (new, long)[at]
            engine.send(seed)
            both[at] = receive(engine)
        if both[0][1] != both[1][1]:
            raise RuntimeError(f"prompt {seed}: other tokens than those of the first engine")
        pairs.append((both[0][0], both[1][0]))
    return pairs


def write_small(model: Path) -> None:
    """Write the model, in a process that needs torch for it."""
    write_model(model, **SHAPE)


@contextmanager
def _engine(model: Path, tier: dict[str, Any], server: SlowS3, *, warm: bool) -> Iterator[Connection]:
    """Run an engine in a process of its own, and return the pipe to it."""
    words: dict[str, Any] = {"warm_start": {}} if warm else {}
    stack = {"primary": {"capacity": ROWS * (BLOCK_BYTES + 4096)}, "secondary": [tier], **words}
    with processes_of(serve, {"engine": (model, transfer_config(stack), server.environment())}) as engines:
        yield engines["engine"]


def serve(pipe: Connection, model: Path, transfer: dict[str, Any], environment: dict[str, str]) -> None:
    """Run an engine's process until the pipe is closed.

    A range lets it compute these prompts and publish them; None lets it start and answer unknown prompts;
    "reset" resets its own cache; a number lets it answer a known prompt.
    """
    os.environ.update(environment)
    with running(model, None, kv_transfer_config=transfer, max_model_len=512) as engine:
        pipe.send("ready")
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            if isinstance(message, range):
                for _ in range(2):
                    reset(engine)
                    for seed in message:
                        ask(engine, prompt(seed, LENGTH), TOKENS)
                        settle(engine)
                time.sleep(TO_PUBLISH)
                ask(engine, prompt(message[-1], LENGTH), TOKENS)
                settle(engine)
                pipe.send("published")
            elif message is None:
                begun = time.perf_counter()
                settle(engine)
                seconds = time.perf_counter() - begun
                for seed in range(UNKNOWN):
                    ask(engine, prompt(1000 + seed, LENGTH), TOKENS)
                settle(engine)
                stats = engine.connector.scheduler_half.get_stats()["manager"]
                pipe.send(Ready(seconds, int(stats["warm_start_blocks"])))
            elif message == "reset":
                reset(engine)
                pipe.send("reset")
            else:
                pipe.send(known(engine, message))


def reset(engine: Engine) -> None:
    """Reset the engine's own cache."""
    settle(engine)
    if not engine.llm.reset_prefix_cache():
        raise RuntimeError("the engine's cache was in use")


def known(engine: Engine, seed: int) -> tuple[float, list[int]]:
    """Answer a known prompt, and return the seconds until the first token, and the tokens.

    Raises:
        RuntimeError: fewer blocks were loaded than the prompt has but for the last one.
    """
    engine.moved.clear()
    asked = ask(engine, prompt(seed, LENGTH), TOKENS)
    settle(engine)
    if engine.moved.get("cpu_to_gpu", 0) < (LENGTH // BLOCK - 1) * BLOCK_BYTES:
        raise RuntimeError(f"prompt {seed}: {engine.moved} bytes were moved: too few")
    return asked.ttft, asked.tokens


def _by_long(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(new / long for new, long in pairs)


def _quantiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 90th percentile and the longest in ms."""
    every = sorted(second * 1e3 for second in seconds)
    return statistics.median(every), every[int(0.9 * (len(every) - 1))], every[-1]
