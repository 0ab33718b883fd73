"""One machine of a simulated fleet: an engine without a model, in a process of its own.

The machine steps every few milliseconds. A request looks its prompt up, waits for the load, "computes" the rest for as
long as a GPU might, and stores it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tiering import ModelIdentity, OffloadKey, ReqContext, load_stack, make_offload_key, open_manager
from tiering.manager.waiting import wait_until_idle

MODEL = ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="fleet")
BLOCK_BYTES = 16 << 10
STEP = 0.005
COMPUTE = 0.002
"""Seconds to compute one block."""
TIER = "s3"

COUNTERS = (
    "requests",
    "requests_get",
    "requests_head",
    "requests_put",
    "requests_list",
    "answers_absent",
    "answers_conflict",
    "promotions",
    "cascades",
    "stores_left",
)
"""Counters of the bucket's tier that a report contains."""


@dataclass(slots=True)
class Report:
    """Results of one load on one machine."""

    counters: dict[str, int] = field(default_factory=dict)
    """The bucket's counters, since the start of the load."""
    asked: int = 0
    """Blocks that requests asked for."""
    computed: int = 0
    """Blocks that were computed."""
    waits: list[float] = field(default_factory=list)
    """Seconds from the begin of each request that loaded blocks to their arrival."""
    misses: list[float] = field(default_factory=list)
    """Seconds from the begin of each request that loaded nothing to the decision to compute."""
    found: list[float] = field(default_factory=list)
    """Times on the monotonic clock at which each prompt of a watch was found first."""


@dataclass(slots=True)
class _Running:
    ctx: ReqContext
    keys: list[OffloadKey]
    begun: float
    ready: float | None = None
    """Time at which the computation ends."""


class Machine:
    """An engine with CPU memory and a bucket.

    Args:
        stack: the stack.
    """

    def __init__(self, stack: Mapping[str, Any]) -> None:
        self.manager = open_manager(load_stack(stack), BLOCK_BYTES, MODEL)
        self._row = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, np.uint8)
        self._rows = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        self._running: list[_Running] = []
        self._requests = 0

    def counters(self) -> dict[str, int]:
        """Return the counters of the bucket's tier since the start."""
        stats = self.manager.get_stats()["tiers"][TIER]
        return {name: int(stats[name]) for name in COUNTERS}

    def play(self, arrivals: Sequence[tuple[float, Sequence[int]]]) -> Report:
        """Serve requests, each a time and the numbers of its blocks, until all have ended."""
        report, before = Report(), self.counters()
        waiting = list(reversed(arrivals))
        while waiting or self._running:
            now = time.monotonic()
            while waiting and waiting[-1][0] <= now:
                due, numbers = waiting.pop()
                self._running.append(_Running(self._request(), keys_of(numbers), due))
                report.asked += len(numbers)
            self._running = [running for running in self._running if not self._advance(running, report)]
            self.manager.on_schedule_end()
            time.sleep(STEP)
        wait_until_idle(self.manager)
        report.counters = {name: count - before[name] for name, count in self.counters().items()}
        return report

    def watch(self, prompts: Sequence[Sequence[int]], since: float, seconds: float) -> Report:
        """Look prompts up in the bucket's tier at every step, and note when each is found first."""
        report, keys = Report(), [keys_of(numbers) for numbers in prompts]
        (tier,) = self.manager.secondary_tiers
        found: dict[int, float] = {}
        ctx = self._request()
        while len(found) < len(keys) and time.monotonic() < since + seconds:
            for at, prompt in enumerate(keys):
                if at not in found and tier.lookup_prefix(prompt, ctx).held == len(prompt):
                    found[at] = time.monotonic()
            self.manager.on_schedule_end()
            time.sleep(STEP)
        self.manager.on_request_finished(ctx)
        report.found = [found.get(at, since + seconds) for at in range(len(keys))]
        return report

    def _request(self) -> ReqContext:
        self._requests += 1
        ctx = ReqContext(f"r{self._requests}")
        self.manager.on_new_request(ctx)
        return ctx

    def _advance(self, running: _Running, report: Report) -> bool:
        """Go on with a request, and return True if it has ended."""
        manager, ctx, keys, now = self.manager, running.ctx, running.keys, time.monotonic()
        if running.ready is None:
            match = manager.match_prefix(keys, ctx)
            if match.pending:
                return False
            hits = match.hits
            (report.waits if hits else report.misses).append(now - running.begun)
            manager.touch(keys[:hits], ctx)
            manager.prepare_load(keys[:hits], ctx)
            manager.complete_load(keys[:hits], ctx)
            report.computed += len(keys) - hits
            running.ready = now + COMPUTE * (len(keys) - hits)
        if now < running.ready:
            return False
        output = manager.prepare_store(keys, ctx)
        if output is not None:
            for row in np.asarray(output.store_spec.block_ids).tolist():
                self._rows[row, :BLOCK_BYTES] = self._row
            manager.complete_store(output.keys_to_store, ctx)
        manager.on_request_finished(ctx)
        return True


def keys_of(numbers: Sequence[int]) -> list[OffloadKey]:
    """Return the keys of blocks with these numbers."""
    return [make_offload_key(number.to_bytes(32, "big"), 0) for number in numbers]


def serve(pipe: Connection, stack: Mapping[str, Any]) -> None:
    """Run a machine, which takes (method, arguments) from the pipe and returns reports; None ends it."""
    machine = Machine(stack)
    pipe.send(None)
    try:
        while (call := pipe.recv()) is not None:
            method, arguments = call
            pipe.send(getattr(machine, method)(*arguments))
    finally:
        machine.manager.shutdown()


def zipf(seed: int, documents: int, count: int, exponent: float = 1.1) -> list[int]:
    """Return ``count`` documents, drawn by Zipf's law."""
    weights = [1 / (rank + 1) ** exponent for rank in range(documents)]
    return random.Random(seed).choices(range(documents), weights, k=count)
