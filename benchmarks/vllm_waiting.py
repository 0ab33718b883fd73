"""Time to the first token under load with `primary.promote_waiting` and without it, in the real vLLM.

The model is that of ``vllm_warm_start``. An engine serves two requests at a time. 24 known prompts of 512 tokens are in
a slow tier (a bucket whose server answers each request after 25 ms in the median, or a local disk), in two halves; the
CPU tier holds one and a half of them. A round resets the engine's own cache and asks for the half that was asked for
longer ago, so that most of its blocks come from the slow tier. Its prompts arrive all at once, at random times such
that a queue forms and dissolves, or one at a time. Engines with the word and without it are processes of their own that
take turns in each round, and both are started anew, in the other order. All answers must be equal but for
rounding.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.engine_processes import in_a_process, processes_of, receive, rotated
from benchmarks.harness import Bench, Cell
from benchmarks.slow_s3 import BUCKET, SlowS3, slow_s3
from benchmarks.vllm_engine import BLOCK, STEP_PAUSE, ask, progress, prompt, running, settle
from benchmarks.vllm_warm_start import BLOCK_BYTES, DELAY, write_small
from tests.vllm.rig import Answer, Engine, transfer_config

LENGTH, HALF, TOKENS, AT_ONCE = 512, 12, 16, 2
ROWS = 3 * HALF * (LENGTH // BLOCK + 1) // 2
STARTS, ROUNDS = 2, 3
LOADS = {"all at once": 0.0, "at random": 0.45, "one at a time": None}
"""Mean seconds between arrivals; None: each prompt arrives when the one before has ended."""
NAMES = {False: "off", True: "on"}


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one engine."""

    ttft: list[float]
    """Time to the first token of each request in seconds."""
    seconds: float
    """Time from the first arrival to the last end."""
    read: int
    """Number of blocks that were loaded from the slow tier."""
    answers: list[Answer]


def run(bench: Bench) -> None:
    """Run both engines with each slow tier, then write the table."""
    model = bench.directory / "model"
    in_a_process(write_small, model)
    rows: list[tuple[Cell, ...]] = []
    ratios: dict[str, float] = {}
    with patch.dict(os.environ, OMP_WAIT_POLICY="passive"), slow_s3() as server:
        for place in ("bucket",) if bench.quick else ("bucket", "disk"):
            found: dict[tuple[str, bool], list[Round]] = {}
            for start in range(1 if bench.quick else STARTS):
                for load, on, one in _rounds(bench, model, place, server, start):
                    found.setdefault((load, on), []).append(one)
            for load in LOADS:
                without, early = found[load, False], found[load, True]
                for name, mine in (("off", without), ("on", early)):
                    every = sorted(seconds * 1e3 for one in mine for seconds in one.ttft)
                    rows.append((
                        place,
                        load,
                        name,
                        statistics.median(every),
                        statistics.fmean(every),
                        every[int(0.9 * (len(every) - 1))],
                        statistics.median(one.seconds for one in mine),
                        statistics.fmean(one.read for one in mine),
                    ))  # fmt: skip
                pairs = zip(early, without, strict=True)
                ratio = statistics.median(statistics.fmean(a.ttft) / statistics.fmean(b.ttft) for a, b in pairs)
                ratios[f"{place}, {load}"] = ratio
                rows.append((place, load, "on by off", "", ratio, "", "", ""))
    bench.table(
        f"Time to the first token, ms; {AT_ONCE} requests at a time",
        ("tier", "arrivals", "promote_waiting", "median", "mean", "90th percentile", "round, s", "blocks read"),
        rows,
    )
    for name, ratio in ratios.items():
        bench.target(f"{name}: mean time to the first token, on by off", ratio, 1.0, "max", "x")


def _rounds(bench: Bench, model: Path, place: str, server: SlowS3, start: int) -> list[tuple[str, bool, Round]]:
    """Return the rounds of both engines, in their order."""
    processes = {}
    for on in (False, True) if start % 2 == 0 else (True, False):
        name = f"{place}-{start}-{NAMES[on]}"
        tier: dict[str, Any] = (
            {"type": "local", "path": str(bench.directory / name), "capacity": "2GiB"}
            if place == "disk"
            else {"type": "s3", "bucket": BUCKET, "endpoint_url": server.endpoint, "prefix": f"{name}/"}
        )
        primary = {"capacity": ROWS * (BLOCK_BYTES + 4096), "promote_waiting": on}
        transfer = transfer_config({"primary": primary, "secondary": [tier]})
        processes[NAMES[on]] = (model, transfer, server.environment())
    server.delay(head=0.0005, get=0.0005, put=0.0005)
    found: list[tuple[str, bool, Round]] = []
    with processes_of(serve, processes) as engines:
        for pipe in engines.values():
            pipe.send(None)
            receive(pipe)
        server.delay(head=DELAY, get=DELAY, put=DELAY)
        for number in range(1 if bench.quick else ROUNDS):
            for at, load in enumerate(LOADS):
                answers = []
                for name in rotated(list(engines), number + at):
                    engines[name].send((load, 100 * start + number))
                    one: Round = receive(engines[name])
                    answers.append(one.answers)
                    found.append((load, name == "on", one))
                if not all(itertools.starmap(agree, zip(*answers, strict=True))):
                    raise RuntimeError(f"{place}: the engines' answers differ")
                shown = ", ".join(f"{NAMES[on]} {statistics.fmean(o.ttft) * 1e3:.0f} ms" for _, on, o in found[-2:])
                progress(f"waiting: {place}, {load}: {shown}")
    return found


def agree(one: Answer, other: Answer) -> bool:
    """Return True if two answers are equal but for rounding, until two tokens are equally probable.

    Requests run in other batches in each engine, so that sums are rounded differently.
    """
    for mine, theirs, a, b in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
        if abs(a - b) > 1e-3:
            return False
        if mine != theirs:
            return True
    return True


def serve(pipe: Connection, model: Path, transfer: dict[str, Any], environment: dict[str, str]) -> None:
    """Run an engine's process: a round per message, until the pipe is closed."""
    os.environ.update(environment)
    halves = [[prompt(half * HALF + seed, LENGTH) for seed in range(HALF)] for half in range(2)]
    with running(
        model, None, kv_transfer_config=transfer, max_model_len=640, max_num_seqs=AT_ONCE, num_gpu_blocks_override=64
    ) as engine:
        pipe.send("ready")
        turn = 0
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            if message is None:
                for tokens in halves[0] + halves[1]:
                    ask(engine, tokens, 1)
                    settle(engine)
                pipe.send("stored")
                continue
            load, seed = message
            if not engine.llm.reset_prefix_cache():
                raise RuntimeError("the engine's cache was in use")
            prompts, turn = halves[turn % 2], turn + 1
            random.Random(seed).shuffle(order := list(range(HALF)))
            pipe.send(answered(engine, [prompts[at] for at in order], LOADS[load], seed))


def answered(engine: Engine, prompts: Sequence[list[int]], between: float | None, seed: int) -> Round:
    """Answer prompts that arrive as the load says, and return the round."""
    from vllm import SamplingParams

    dice = random.Random(seed)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, detokenize=False, ignore_eos=True)
    core, tier = engine.llm.llm_engine, _slow_tier(engine)
    read = engine.tier(tier)["promotions"]
    times = [0.0]
    while between is not None and len(times) < len(prompts):
        times.append(times[-1] + (dice.expovariate(1 / between) if between else 0.0))
    arrived: list[float] = []
    first: dict[str, float] = {}
    answers: dict[str, Answer] = {}
    begun = time.perf_counter()
    done = 0
    while done < len(prompts):
        now = time.perf_counter() - begun
        while len(arrived) < len(prompts) and (
            times[len(arrived)] <= now if between is not None else len(arrived) == done
        ):
            at = len(arrived)
            arrived.append(now if between is None else times[at])
            core.add_request(f"waiting-{begun}-{at}", {"prompt_token_ids": prompts[at]}, sampling)
        scheduled = len(engine.scheduled)
        outputs = core.step() if core.has_unfinished_requests() else []
        now = time.perf_counter() - begun
        for output in outputs:
            first.setdefault(output.request_id, now)
            tokens = list(output.outputs[0].token_ids)
            probable = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
            answers[output.request_id] = Answer(tokens, probable)
            done += output.finished
        if not outputs and (len(engine.scheduled) == scheduled or not engine.scheduled[-1]):
            time.sleep(STEP_PAUSE)
    seconds = time.perf_counter() - begun
    settle(engine)
    names = [f"waiting-{begun}-{at}" for at in range(len(prompts))]
    ttft = [first[name] - arrival for name, arrival in zip(names, arrived, strict=True)]
    return Round(ttft, seconds, engine.tier(tier)["promotions"] - read, [answers[name] for name in names])


def _slow_tier(engine: Engine) -> str:
    return str(engine.connector.scheduler_half.manager.secondary_tiers[0].name)
