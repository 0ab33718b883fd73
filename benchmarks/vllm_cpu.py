"""Cost of the connector without any reuse: CPU seconds per token of the real vLLM.

Engines with tiers stand beside an engine without connector. The model is a Llama of 12 layers, hidden size 768,
float32, on vLLM's CPU platform. Every engine is a process of its own that runs on command, one at a time, in an order
that rotates. Each round has new prompts, the same for all engines. Processes of the very same code differ by some
percent for as long as they live, by the places of their memory. So all are started anew several times, in another order
each time; "by start" shows how far the ratio moves with the starts alone. Threads that wait for others of a parallel
loop sleep (OMP_WAIT_POLICY=passive). By default they spin, and work of other processes on their cores, above all of the
S3 server, would count as seconds of the engine.

CPU seconds are those of all threads of an engine, from before the requests arrive until its copies and tiers have
nothing left to do. The ratio is the median over the rounds of the ratio within a round. Every computed block is stored
in every tier. The S3 server (rclone on loopback) is a process of its own and not counted. "Where" shows CPU seconds per
round by kind of thread; for the main thread, it shows the seconds in the connector's methods and in steps that only see
copies and tiers to their end. "Other threads" are the engine's own arithmetic and the S3 client's runtime.
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.call_clock import CallClock
from benchmarks.engine_processes import in_a_process, processes_of, receive, rotated
from benchmarks.harness import Bench, Cell
from benchmarks.vllm_engine import BLOCK, BLOCK_BYTES, generate, progress, prompt, running, settle, write_model
from tests.servers import rclone_server
from tests.vllm.rig import transfer_config
from tiering.api.keys import PRIMARY_TIER

PROMPTS, LENGTH, OUTPUTS = 2, 1500, 32
STARTS, ROUNDS = 5, 2
"""Number of starts of all engines, and of rounds that count after each start."""
BLOCKS = PROMPTS * (LENGTH // BLOCK)
GPU_BLOCKS = 104
CAPACITY = 104 * (BLOCK_BYTES + 4096)
LIMITS = {"cpu": 1.03, "cpu + local": 1.03, "cpu + s3": 1.06}
WITHOUT = "no connector"


Serving = Callable[[Connection, Path, dict[str, Any] | None, dict[str, str]], None]
"""Function of an engine process; arguments: pipe, model, --kv-transfer-config or None, environment."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One round of one engine: CPU seconds (in all, by kind of thread), wall seconds, bytes per tier."""

    cpu: float
    threads: dict[str, float]
    wall: float
    written: dict[str, int]
    calls: dict[str, float]
    """CPU seconds by method of the connector."""


def run(bench: Bench) -> None:
    """Run rounds over all engines, from several starts of each, then write the tables."""
    progress("cpu: writing the model")
    model = bench.directory / "model"
    in_a_process(write_model, model)
    starts = [rounds_of_a_start(bench, model, number) for number in range(1 if bench.quick else STARTS)]
    report(bench, starts)


def rounds_of_a_start(bench: Bench, model: Path, start: int) -> list[dict[str, Cost]]:
    """Return the costs by engine for each round that counts."""
    rounds: list[dict[str, Cost]] = []
    disk = bench.directory / f"disk-{start}"
    with started(model, disk, start) as engines:
        names = list(engines)
        for number in range((1 if bench.quick else ROUNDS) + 1):
            costs = {}
            for name in rotated(names, number):
                engines[name].send(100 * start + number)
                costs[name] = receive(engines[name])
            rounds.append(costs)
            shown = ", ".join(f"{name} {costs[name].cpu:.2f} s CPU, {costs[name].wall:.1f} s" for name in names)
            progress(f"cpu: start {start + 1}, round {number}{' (does not count)' * (not number)}: {shown}")
    shutil.rmtree(disk)
    check(rounds)
    return rounds[1:]


@contextmanager
def started(
    model: Path,
    disk: Path,
    first: int,
    serving: Serving | None = None,
    others: Mapping[str, dict[str, Any]] | None = None,
) -> Iterator[dict[str, Connection]]:
    """Start an engine process per variant, and return the pipe to each.

    Args:
        first: number of the variant to start first.
        serving: the function that is run in each process; default: :func:`serve`.
        others: further variants, each with its value of --kv-transfer-config; default none.
    """
    progress("starting the engines")
    with ExitStack() as opened:
        opened.enter_context(patch.dict(os.environ, OMP_WAIT_POLICY="passive"))  # read when a process loads the library
        server = opened.enter_context(rclone_server())
        bucket = server.make_bucket("kv-cache")
        local = {"type": "local", "path": str(disk), "capacity": "2GiB"}
        s3 = {"type": "s3", "bucket": bucket.name, "endpoint_url": server.endpoint}
        stacks: dict[str, list[dict[str, Any]] | None] = {
            WITHOUT: None,
            "cpu": [],
            "cpu + local": [local],
            "cpu + s3": [s3],
        }
        transfers = {
            name: None if tiers is None else transfer_config({"primary": {"capacity": CAPACITY}, "secondary": tiers})
            for name, tiers in stacks.items()
        }
        transfers |= others or {}
        processes = {name: (model, transfer, server.environment()) for name, transfer in transfers.items()}
        yield opened.enter_context(processes_of(serving or serve, processes, first))


def serve(pipe: Connection, model: Path, transfer: dict[str, Any] | None, environment: dict[str, str]) -> None:
    """Run an engine's process: a round per number that arrives, until the pipe is closed."""
    os.environ.update(environment)
    with running(
        model, None, kv_transfer_config=transfer, num_gpu_blocks_override=GPU_BLOCKS, max_model_len=2048
    ) as engine:
        clock = CallClock()
        if engine.connector is not None:
            clock.watch(engine.connector, CALLS)
            clock.watch(engine.worker, CALLS)
        pipe.send("ready")
        while True:
            try:
                number = pipe.recv()
            except EOFError:
                return
            prompts = [prompt(1000 * number + at, LENGTH) for at in range(PROMPTS)]
            clock.seconds.clear()
            threads, cpu, wall = thread_seconds(), time.process_time(), time.perf_counter()
            generate(engine, prompts, OUTPUTS)
            draining = time.thread_time()
            settle(engine)
            draining = time.thread_time() - draining
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            spent = {kind: seconds - threads.get(kind, 0.0) for kind, seconds in thread_seconds().items()}
            spent |= {"connector": clock.total, "draining": draining}
            written = {"cpu": engine.moved.get("gpu_to_cpu", 0)}
            if engine.connector is not None:
                tiers = engine.connector.scheduler_half.get_stats()["tiers"]
                written |= {
                    name: int(counters["written_bytes"]) for name, counters in tiers.items() if name != PRIMARY_TIER
                }
            pipe.send(Cost(cpu, spent, wall, written, dict(clock.seconds)))


CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
)


def thread_seconds() -> dict[str, float]:
    """Return the CPU seconds so far of this process's threads by kind."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # it has ended
            continue
        name = names.get(int(task.name), "other threads")
        kind = next((word for word in ("kv-tiering", "kv-") if name.startswith(word)), name)
        kind = {"kv-tiering": "copies", "kv-": "tier I/O", "MainThread": "main thread"}.get(kind, "other threads")
        found[kind] = found.get(kind, 0.0) + seconds
    return found


def check(rounds: list[dict[str, Cost]]) -> None:
    """Check that every tier has taken every block of every prompt.

    Otherwise its costs would look too good.
    """
    for name, cost in rounds[-1].items():
        for tier, written in cost.written.items():
            if name != WITHOUT and written < len(rounds) * BLOCKS * BLOCK_BYTES:
                raise RuntimeError(f"{name}: {tier} took {written} bytes, not {len(rounds) * BLOCKS * BLOCK_BYTES}")


def report(bench: Bench, starts: list[list[dict[str, Cost]]]) -> None:
    """Write the tables and the targets."""
    rounds = [costs for start in starts for costs in start]
    tokens = PROMPTS * (LENGTH + OUTPUTS)
    kinds = ("main thread", "connector", "draining", "copies", "tier I/O", "other threads")
    costs: list[list[Cell]] = []
    where: list[list[Cell]] = []
    for name in (WITHOUT, *LIMITS):
        mine = [costs_of[name] for costs_of in rounds]
        ratios = [cost[name].cpu / cost[WITHOUT].cpu for cost in rounds]
        by_start = [statistics.mean(cost[name].cpu / cost[WITHOUT].cpu for cost in start) for start in starts]
        row: list[Cell] = [name, statistics.median(cost.cpu for cost in mine) / tokens * 1e3, statistics.median(ratios)]
        spread = f"{min(by_start):.3f} to {max(by_start):.3f}"
        costs.append([*row, min(ratios), max(ratios), spread, statistics.median(cost.wall for cost in mine)])
        where.append([name, *(statistics.median(cost.threads.get(kind, 0.0) for cost in mine) for kind in kinds)])
        if name in LIMITS:
            bench.target(
                f"CPU per token, {name}, against {WITHOUT}", statistics.median(ratios), LIMITS[name], "max", "x"
            )
    title = (
        f"{PROMPTS} prompts of {LENGTH} tokens and {OUTPUTS} outputs each, {len(rounds)} rounds, {len(starts)} starts"
    )
    bench.table(
        title, ("engine", "CPU ms per token", "ratio", "lowest", "highest", "by start", "wall s per round"), costs
    )
    bench.table("Where: CPU s per round", ("engine", *kinds), where)
    dearest = {name: sorted(rounds[-1][name].calls.items(), key=lambda item: -item[1])[:4] for name in LIMITS}
    for name, methods in dearest.items():
        shown = ", ".join(f"{method} {seconds * 1e3:.1f} ms" for method, seconds in methods)
        bench.note(f"{name}: the connector's dearest methods, CPU per round: {shown}")
