"""Engines for tests of the service, in this process or in a child: managers whose stack names it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tiering import (
    ModelIdentity,
    OffloadKey,
    ReqContext,
    load_stack,
    make_offload_key,
    open_manager,
    wait_for_prefix,
)
from tiering.machine.options import PEERS_TIER
from tiering.testing.clock import until
from tiering.testing.frames import random_bytes

GROUP_BYTES = (16384, 10000)
PATIENCE = 60.0
TIERS = ("local",)


def key_of(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), number % len(GROUP_BYTES))


def content(number: int, weights: int) -> bytes:
    return random_bytes(GROUP_BYTES[number % len(GROUP_BYTES)], number * 1_000 + weights).tobytes()


def model(name: str = "model") -> ModelIdentity:
    return ModelIdentity(name=name, weights="0" * 40 if name == "model" else name, dtype="bfloat16", layout="machine")


class SmallEngine:
    """A manager over rows of its own, whose blocks have bytes that follow from number and weights.

    Args:
        socket: the service's socket; None: the words have the tiers.
        tiers: names of the service's tiers.
        rows: number of rows.
        name: name of the model.
        words: further words of the stack.
    """

    def __init__(
        self, socket: Path | None, tiers: Sequence[str] = TIERS, rows: int = 24, name: str = "model", **words: Any
    ) -> None:
        if socket is not None:
            words["machine"] = {"socket": str(socket), "tiers": list(tiers), **words.pop("machine", {})}
        stack = load_stack({"primary": {"capacity": rows * max(GROUP_BYTES)}, "shutdown_deadline": "5s", **words})
        self.manager = open_manager(stack, GROUP_BYTES, model(name))
        self.weights = 0
        self._requests = 0
        self._rows = np.asarray(self.manager.primary_tier.get_kv_memoryview())

    def request(self) -> ReqContext:
        self._requests += 1
        ctx = ReqContext(f"r{self._requests}")
        self.manager.on_new_request(ctx)
        return ctx

    def store(self, numbers: Sequence[int]) -> bool:
        """Store blocks; return False if the primary tier had no room."""
        return bool(self.rows_of_store(numbers))

    def rows_of_store(self, numbers: Sequence[int]) -> list[int]:
        """Store blocks, and return their rows; none if the primary tier had no room, or had all blocks."""
        ctx = self.request()
        out = self.manager.prepare_store([key_of(number) for number in numbers], ctx)
        if out is not None:
            for key, row in zip(out.keys_to_store, out.store_spec.block_ids.tolist(), strict=True):
                data = content(int.from_bytes(key[:32], "big"), self.weights)
                self._rows[row, : len(data)] = np.frombuffer(data, np.uint8)
            self.manager.complete_store(out.keys_to_store, ctx)
        self.manager.on_request_finished(ctx)
        return [] if out is None else out.store_spec.block_ids.tolist()

    def load(self, numbers: Sequence[int], patience: float = PATIENCE) -> tuple[list[int], list[int]]:
        """Return those of ``numbers`` that are found, and those that have wrong bytes."""
        found: list[int] = []
        wrong: list[int] = []
        for number in numbers:
            key, ctx = key_of(number), self.request()
            match = wait_for_prefix(self.manager, [key], ctx, patience)
            if match.hits and not match.pending:
                row = int(self.manager.prepare_load([key], ctx).block_ids[0])
                expected = content(number, self.weights)
                if self._rows[row, : len(expected)].tobytes() != expected:
                    wrong.append(number)
                self.manager.complete_load([key], ctx)
                found.append(number)
            self.manager.on_request_finished(ctx)
        return found, wrong

    def settle(self, done: Callable[[], bool], patience: float = PATIENCE) -> bool:
        """Run steps until ``done()``, and return True if that came in time."""

        def step() -> bool:
            self.manager.on_schedule_end()
            return done()

        return done() or until(step, patience)

    def stored(self) -> bool:
        """Run steps until all stores have ended."""
        return self.settle(lambda: not self.manager.has_pending_work())

    def serving(self, tier: int = 0) -> bool:
        """Run steps until a tier is in service, and has found its old blocks."""
        found: Any = self.manager.secondary_tiers[tier]
        return self.settle(lambda: found.serving and not found.get_stats().recovering)

    def stat(self, name: str, tier: str = "local") -> int:
        return int(self.manager.get_stats()["tiers"][tier][name])

    def forget_rows(self, first: int = 10_000) -> None:
        """Fill all rows with other blocks, so that the next load comes from the tiers."""
        rows = len(self._rows)
        for start in range(first, first + rows, 4):
            self.settle(lambda start=start: self.store(range(start, start + 4)))  # type: ignore[misc]
            self.stored()

    def close(self) -> None:
        self.manager.shutdown()


def storm(socket: Path, seed: int, tiers: Sequence[str], pipe: Connection, turns: Any) -> None:
    """Store and load shared numbers until the pipe has something; sends ("wrong", numbers) and counts.

    The shared number ``turns`` counts turns of a store and four loads.

    Engines of one storm share the numbers, so that they find each other's blocks. A reset brings other weights, under
    a revision.
    """
    rng = random.Random(seed)
    peers = {"keep_rows": True} if PEERS_TIER in tiers else {}
    engine = SmallEngine(socket, tiers, machine={"load_deadline": "2s", "lookup_deadline": "100ms", **peers})
    loaded = 0
    pipe.send(("up", os.getpid()))
    while not pipe.poll():
        first = rng.randrange(0, 150)
        engine.store(range(first, first + 4))
        found, wrong = engine.load([rng.randrange(0, 150) for _ in range(4)], patience=5.0)
        loaded += len(found)
        engine.manager.on_schedule_end()
        if wrong:
            pipe.send(("wrong", wrong))
        if rng.random() < 0.002:
            engine.weights = rng.randrange(1, 4)
            engine.manager.reset_cache(f"step-{engine.weights}")
        if loaded % 20 == 0:
            pipe.send(("promoted", engine.stat("promotions", tiers[0])))
        turns.value += 1
    stats = engine.manager.get_stats()["tiers"][tiers[0]]
    engine.close()
    pipe.send(("end", loaded, stats["promotions"], stats["cascades"]))


class StormProcess:
    """A child process that runs a storm."""

    def __init__(self, socket: Path, seed: int, tiers: Sequence[str] = TIERS) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.turns: Any = context.Value("Q", 0, lock=False)
        """Turns so far, in ``turns.value``."""
        self.process = context.Process(target=storm, args=(socket, seed, tiers, theirs, self.turns), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(PATIENCE), "the engine did not come up"
        self.wrong: list[int] = []
        self.promoted = 0
        """Number of blocks that came from the first of the tiers."""

    def drain(self) -> None:
        """Read what the child has sent."""
        try:
            while self.pipe.poll():
                what, *rest = self.pipe.recv()
                if what == "wrong":
                    self.wrong += rest[0]
                elif what == "promoted":
                    self.promoted = rest[0]
                elif what == "end":
                    self.promoted = rest[1]
        except (EOFError, OSError):
            return

    def end(self) -> None:
        """Let the child end its storm, and wait for it."""
        with contextlib.suppress(OSError):
            self.pipe.send("stop")
        self.process.join(PATIENCE)
        self.drain()
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
