"""Time until an engine that was killed and started again has a hit in the rows that it had."""

from __future__ import annotations

import os
import signal
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.engine_processes import processes_of, receive
from benchmarks.harness import Bench, Cell
from tests.machine.hosts import service_process
from tiering import (
    ModelIdentity,
    OffloadingManager,
    ReqContext,
    load_stack,
    make_offload_key,
    open_manager,
    wait_for_prefix,
)
from tiering.manager.waiting import wait_until_idle

BLOCKS, BLOCK_BYTES = 256, 512 << 10
STEPS, STEP_SECONDS = 400, 0.005
WAIT = 60.0


def restarts(bench: Bench, directory: Path) -> None:
    """Kill and start an engine several times in turn.

    Args:
        bench: the benchmark.
        directory: an empty directory for the service.
    """
    count = 2 if bench.quick else 8
    tier = {"type": "memory", "name": "local", "capacity": 4 * BLOCK_BYTES, "admission": "none"}
    times: list[tuple[float, float]] = []
    with service_process(directory, tier, capacity="1GiB") as service:
        for number in range(count + 1):
            with processes_of(_engine, {"engine": (str(service.socket), number > 0)}) as started:
                times.append(receive(started["engine"]))
    shown: list[list[Cell]] = [
        [name, statistics.median(each), min(each), max(each)]
        for name, each in zip(("it is open", "its first hit"), zip(*times[1:], strict=True), strict=True)
    ]
    title = f"an engine with {BLOCKS} blocks of 512 KiB is killed and started again {count} times"
    bench.table(title, ["seconds until", "median", "lowest", "highest"], shown)
    typical = statistics.median(hit for _, hit in times[1:])
    bench.target("first CPU hit of an engine that was killed, after its start", typical, 1.0, "max", "s")


def _steps(manager: OffloadingManager) -> None:
    for _ in range(STEPS):
        manager.on_schedule_end()
        time.sleep(STEP_SECONDS)


def _engine(pipe: Connection, socket: str, known: bool) -> None:
    """Send the seconds until it is open and until its first hit, and end by SIGKILL."""
    pipe.send(None)
    keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(BLOCKS)]
    machine = {"socket": socket, "tiers": ["local"], "keep_rows": True}
    stack = load_stack({"primary": {"capacity": 2 * BLOCKS * BLOCK_BYTES}, "machine": machine})
    start = time.perf_counter()
    manager = open_manager(stack, BLOCK_BYTES, ModelIdentity(name="bench", weights="0", dtype="int8", layout="machine"))
    opened = time.perf_counter() - start
    rows, ctx = np.asarray(manager.primary_tier.get_kv_memoryview()), ReqContext("engine")
    manager.on_new_request(ctx)
    if known:
        until = start + WAIT
        wanted = keys[BLOCKS // 2 :][
            :1
        ]  # neither among the first nor among the last blocks, of which the tier has some
        while (match := wait_for_prefix(manager, wanted, ctx, 0.0)).pending or not match.hits:
            if time.perf_counter() > until:
                raise RuntimeError("the blocks are not found")
            manager.on_schedule_end()
            time.sleep(STEP_SECONDS / 5)
        row = rows[int(manager.prepare_load(wanted, ctx).block_ids[0])]
        hit = time.perf_counter() - start
        if not (row == 1).all() or manager.get_stats()["tiers"]["local"]["promotions"]:
            raise RuntimeError("the block does not come from the rows of the engine before")
        manager.complete_load(wanted, ctx)
    else:
        # Blocks of before the service's consent would be recorded later, and perhaps not at all by the time of the end.
        _steps(manager)
        hit = 0.0
        out = manager.prepare_store(keys, ctx)
        if out is None:
            raise RuntimeError("the CPU tier has no room")
        rows[out.store_spec.block_ids] = 1
        manager.complete_store(out.keys_to_store, ctx)
    manager.on_request_finished(ctx)
    wait_until_idle(manager, WAIT)
    _steps(manager)  # the service learns of all blocks
    pipe.send((opened, hit))
    os.kill(os.getpid(), signal.SIGKILL)
