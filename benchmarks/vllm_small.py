"""Cost of the connector for many small requests in the real vLLM: CPU time per step and per token.

The model is tiny (a Llama of 3 layers, hidden size 128), so that a step is short and the connector's share of a step is
as large as it gets. Nothing is reused. 8 requests run at a time, with 100 to 600 random tokens each, 48 of them
outputs. Engines with tiers stand beside an engine without connector, as in ``vllm_cpu``: each is a process of its own,
in turns, started anew several times. "Idle connector" is a connector whose methods do nothing; its row has what vLLM
itself spends on any connector, and what the measurement costs.

"Scheduler" is the CPU time of the calling thread (``time.thread_time``) in the methods that vLLM's scheduler calls,
divided by the steps; "worker" is that of the methods that its worker calls. Both run on one thread here, as with vLLM's
in-process executor. CPU per token counts all threads of the engine, until copies and tiers have nothing left to do.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.call_clock import CallClock
from benchmarks.engine_processes import in_a_process, receive, rotated
from benchmarks.harness import Bench, Cell
from benchmarks.vllm_cpu import WITHOUT, started
from benchmarks.vllm_engine import STEP_PAUSE, progress, settle
from tests.vllm.models import VOCABULARY, write_llama
from tests.vllm.rig import Engine, engine

REQUESTS, AT_ONCE, SHORTEST, LONGEST, OUTPUTS = 100, 8, 100, 600, 48
IDLE = "idle connector"
"""Name of the engine with a connector that does nothing."""
IDLE_CONNECTOR = {
    "kv_connector": "IdleConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "tests.vllm.idle_connector",
}
STARTS, ROUNDS = 3, 2
"""Number of starts of all engines, and of rounds that count after each start."""
LIMITS = {"cpu + local": 1.05, "cpu + s3": 1.15}
"""Largest CPU time per token, by engine, as a multiple of that without connector."""
MOST_PER_STEP = 80.0
"""Largest CPU time per step on the scheduler's thread, in microseconds."""

SCHEDULER_CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
)
WORKER_CALLS = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one engine."""

    steps: int
    tokens: int
    cpu: float
    """CPU seconds of all threads."""
    scheduler: dict[str, float]
    """CPU seconds by method that the scheduler calls."""
    worker: float
    """CPU seconds of the methods that the worker calls."""

    @property
    def per_step(self) -> float:
        """Microseconds per step on the scheduler's thread."""
        return sum(self.scheduler.values()) / self.steps * 1e6


def run(bench: Bench) -> None:
    """Run rounds over all engines, from several starts of each, then write the tables."""
    model = bench.directory / "model"
    in_a_process(write_llama, model)
    rounds: list[dict[str, Round]] = []
    for start in range(1 if bench.quick else STARTS):
        disk = bench.directory / f"disk-{start}"
        with started(model, disk, start, serve, {IDLE: IDLE_CONNECTOR}) as engines:
            names = list(engines)
            for number in range((1 if bench.quick else ROUNDS) + 1):
                costs: dict[str, Round] = {}
                for name in rotated(names, number):
                    engines[name].send(100 * start + number)
                    costs[name] = receive(engines[name])
                shown = ", ".join(f"{name} {costs[name].per_step:.0f} us" for name in names)
                progress(f"small: start {start + 1}, round {number}{' (does not count)' * (not number)}: {shown}")
                rounds += [costs] * bool(number)
        shutil.rmtree(disk)
    report(bench, rounds)


def serve(pipe: Connection, model: Path, transfer: dict[str, Any] | None, environment: dict[str, str]) -> None:
    """Run an engine's process: a round per number that arrives, until the pipe is closed."""
    os.environ.update(environment)
    settings = {"num_gpu_blocks_override": 200, "max_num_batched_tokens": 2048, "max_num_seqs": AT_ONCE}
    with engine(model, None, kv_transfer_config=transfer, **settings) as running:
        scheduler, worker = CallClock(), CallClock()
        if running.connector is not None:
            scheduler.watch(running.connector, SCHEDULER_CALLS)
            worker.watch(running.worker, WORKER_CALLS)
        pipe.send("ready")
        while True:
            try:
                number = pipe.recv()
            except EOFError:
                return
            scheduler.seconds.clear()
            worker.seconds.clear()
            cpu = time.process_time()
            steps, tokens = answer(running, random.Random(number))
            answered = dict(scheduler.seconds)
            settle(running)
            pipe.send(Round(steps, tokens, time.process_time() - cpu, answered, worker.total))


def answer(running: Engine, dice: random.Random) -> tuple[int, int]:
    """Answer all requests of a round, and return the numbers of steps and of tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=OUTPUTS, detokenize=False, ignore_eos=True)
    core = running.llm.llm_engine
    prompts = [
        [dice.randrange(VOCABULARY) for _ in range(dice.randint(SHORTEST, LONGEST - OUTPUTS))] for _ in range(REQUESTS)
    ]
    tokens = sum(map(len, prompts)) + REQUESTS * OUTPUTS
    active = steps = 0
    while prompts or active:
        while prompts and active < AT_ONCE:
            core.add_request(f"small-{next(_ids)}", {"prompt_token_ids": prompts.pop()}, sampling)
            active += 1
        outputs = core.step()
        steps += 1
        active -= sum(output.finished for output in outputs)
        if not outputs:
            time.sleep(STEP_PAUSE)
    return steps, tokens


def report(bench: Bench, rounds: list[dict[str, Round]]) -> None:
    """Write the table and the targets."""
    rows: list[list[Cell]] = []
    for name in rounds[0]:
        mine = [costs[name] for costs in rounds]
        ratios = [costs[name].cpu / costs[name].tokens / plain(costs) for costs in rounds]
        rows.append(
            [
                name,
                statistics.median(cost.per_step for cost in mine),
                statistics.median(cost.worker / cost.steps * 1e6 for cost in mine),
                statistics.median(cost.cpu / cost.tokens * 1e6 for cost in mine),
                statistics.median(ratios),
                min(ratios),
                max(ratios),
            ]
        )
        if name in LIMITS:
            bench.target(
                f"CPU per token, {name}, against {WITHOUT}", statistics.median(ratios), LIMITS[name], "max", "x"
            )
            bench.target(
                f"{name}: CPU per step on the scheduler's thread",
                statistics.median(cost.per_step for cost in mine),
                MOST_PER_STEP,
                "max",
                "us",
            )
            dearest = sorted(mine[-1].scheduler, key=lambda method: -mine[-1].scheduler[method])[:5]
            costs = {
                method: [cost.scheduler.get(method, 0.0) / cost.steps * 1e6 for cost in mine] for method in dearest
            }
            shown = ", ".join(f"{method} {statistics.median(values):.1f} us" for method, values in costs.items())
            bench.note(f"{name}: the scheduler's dearest calls, per step: {shown}")
    headers = ("engine", "scheduler us/step", "worker us/step", "CPU us/token", "ratio", "lowest", "highest")
    bench.table(f"{REQUESTS} requests, {AT_ONCE} at a time, {len(rounds)} rounds", headers, rows)


def plain(costs: dict[str, Round]) -> float:
    """Return the CPU seconds per token without connector."""
    return costs[WITHOUT].cpu / costs[WITHOUT].tokens
