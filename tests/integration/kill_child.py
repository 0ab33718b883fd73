"""The engine that the kill loop kills: a stack that stores, loads and resets through the public API.

The content of a block depends on its number and on the weights that computed it. A process starts with weights 0, as
its identity says; each reset brings other weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from tiering import (
    ModelIdentity,
    OffloadKey,
    ReqContext,
    TieringOffloadingManager,
    load_stack,
    make_offload_key,
    open_manager,
)
from tiering.primary.memory.region import SharedRegion
from tiering.testing.clock import until
from tiering.testing.frames import random_bytes
from tiers.local.tier import LocalTier

CAPACITY = 16 << 20
GROUP_BYTES = (8192, 5000)
ROWS = 24
BATCH = 6
LOADED_AT_ONCE = ROWS // 2
PATIENCE_SECONDS = 30.0

MODEL = ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="kill loop")


def key_of(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), number % len(GROUP_BYTES))


def number_of(key: OffloadKey) -> int:
    return int.from_bytes(key[:32], "big")


def content(number: int, weights: int) -> bytes:
    return random_bytes(GROUP_BYTES[number % len(GROUP_BYTES)], number * 1_000 + weights).tobytes()


class Child:
    """An engine around a manager, with a second mapping of the rows, like the mapping of a worker."""

    def __init__(self, path: str, region: str, durability: str) -> None:
        stack = load_stack(
            {
                "primary": {"capacity": ROWS * max(GROUP_BYTES)},
                "secondary": [
                    {
                        "type": "local",
                        "path": path,
                        "capacity": CAPACITY,
                        "durability": durability,
                        "checkpoint_interval": "20ms",
                        "required": True,
                    }
                ],
            }
        )
        rows = SharedRegion.open_shared(region, ROWS, max(GROUP_BYTES), sides=2)
        self.worker = SharedRegion.open_shared(region, ROWS, max(GROUP_BYTES), sides=2)
        self.manager: TieringOffloadingManager = open_manager(
            stack, GROUP_BYTES, MODEL, region=rows, enable_events=True
        )
        self.weights = 0
        self._requests = 0

    def wait_for_recovery(self) -> None:
        """Step until the disk's blocks are all known.

        The start waits two seconds for that. On a busy machine it takes longer, and lookups find nothing until then.
        """
        (tier,) = self.manager.secondary_tiers
        assert isinstance(tier, LocalTier)

        def recovered() -> bool:
            self.manager.on_schedule_end()
            return not tier.recovering

        until(recovered, PATIENCE_SECONDS)

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.close()

    def request(self) -> ReqContext:
        self._requests += 1
        ctx = ReqContext(f"r{self._requests}")
        self.manager.on_new_request(ctx)
        return ctx

    def store(self, numbers: Sequence[int]) -> bool:
        """Store blocks; return False if the primary tier had no room."""
        ctx = self.request()
        out = self.manager.prepare_store([key_of(number) for number in numbers], ctx)
        if out is not None:
            for key, row in zip(out.keys_to_store, out.store_spec.block_ids.tolist(), strict=True):
                data = content(number_of(key), self.weights)
                self.worker.array[row, : len(data)] = np.frombuffer(data, np.uint8)
            self.manager.complete_store(out.keys_to_store, ctx)
        self.manager.on_request_finished(ctx)
        return out is not None

    def load(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return those of ``numbers`` that are missing, and those that arrive with wrong bytes."""
        missing: list[int] = []
        wrong: list[int] = []
        for start in range(0, len(numbers), LOADED_AT_ONCE):
            waiting, ctx = list(numbers[start : start + LOADED_AT_ONCE]), self.request()

            def answered(waiting: list[int] = waiting, ctx: ReqContext = ctx) -> bool:
                self.manager.on_schedule_end()
                for number in tuple(waiting):
                    answer = self.manager.lookup(key_of(number), ctx)
                    if answer is not None:
                        waiting.remove(number)
                        if not answer:
                            missing.append(number)
                        elif not self._is_right(number, ctx):
                            wrong.append(number)
                return not waiting

            until(answered, PATIENCE_SECONDS)
            missing.extend(waiting)
            self.manager.on_request_finished(ctx)
        return missing, wrong

    def _is_right(self, number: int, ctx: ReqContext) -> bool:
        """Load a block of the primary tier and compare its bytes."""
        row = int(self.manager.prepare_load([key_of(number)], ctx).block_ids[0])
        expected = content(number, self.weights)
        right = self.worker.array[row, : len(expected)].tobytes() == expected
        self.manager.complete_load([key_of(number)], ctx)
        return right

    def news(self) -> list[tuple[str, list[int]]]:
        """Return the blocks that came to the disk or left it since the last call."""
        self.manager.on_schedule_end()
        return [
            ("removed" if event.removed else "stored", [number_of(key) for key in event.keys])
            for event in self.manager.take_events()
            if event.medium == "STORAGE"
        ]


def run(
    path: str, region: str, seed: int, durability: str, first: int, held: list[int], others: list[int], pipe: Connection
) -> None:
    """Store until told to stop, or killed.

    Sends ("checked", missing of ``held``, wrong of ``held`` and ``others``) first, then ("stored" or "removed",
    numbers) as the disk tier reports them, ("reset", weights) before a reset, and ("wrong", numbers) if there are any.
    """
    rng = random.Random(seed)
    child = Child(path, region, durability)
    child.wait_for_recovery()
    missing, wrong = child.load(held)
    pipe.send(("checked", missing, wrong + child.load(others)[1]))
    number = first
    mine: list[int] = []
    while not pipe.poll():
        numbers = list(range(number, number + BATCH))
        if child.store(numbers):
            number += BATCH
            mine += numbers
        if rng.random() < 0.1:
            _, wrong = child.load(rng.sample(mine, min(4, len(mine))))
            if wrong:
                pipe.send(("wrong", wrong))
        if rng.random() < 0.004:
            child.weights = rng.randrange(1, 1000)
            pipe.send(("reset", [child.weights]))
            child.manager.reset_cache()
            mine.clear()
        for message in child.news():
            pipe.send(message)
    child.close()
