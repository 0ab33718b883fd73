"""The process that the restart loop kills: it opens a tier, checks the expected blocks, then stores."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from pathlib import Path

from tests.tiers.local.rig import LocalRig
from tiering.testing.keys import key_of

CAPACITY = "3MiB"
BATCH = 4
JOBS = 4
LOADED_AT_ONCE = 32


def run(path: str, seed: int, durability: str, first: int, expected: list[int], connection: Connection) -> None:
    """Check ``expected``, then store until killed or told to end.

    Sends ("checked", missing, wrong) once, then ("stored", numbers) for each job that the tier reported as a success.
    """
    rng = random.Random(seed)
    rig = LocalRig(
        Path(path), capacity=CAPACITY, durability=durability, max_inflight=4, checkpoint_interval=0.02
    ).open()
    connection.send(("checked", *check(rig, expected)))
    number = first
    while not connection.poll():
        keys: dict[int, list[int]] = {}
        for job in range(JOBS):
            numbers = list(range(number, number + BATCH))
            number += BATCH
            keys[rig.submit_store([key_of(n) for n in numbers], first_row=job * BATCH)] = numbers
            if rng.random() < 0.1:
                rig.tier.on_schedule_end()
        for job_id, numbers in keys.items():
            if rig.result(job_id).success:
                connection.send(("stored", numbers))
        if rng.random() < 0.2:
            rig.load([key_of(n) for n in rng.sample(range(first, number), min(8, number - first))])
    rig.close()


def check(rig: LocalRig, expected: list[int]) -> tuple[list[int], list[int]]:
    """Return the expected numbers that are not held, and those whose load fails or returns other bytes."""
    missing = [number for number in expected if not rig.lookup([key_of(number)])]
    wrong: list[int] = []
    for start in range(0, len(expected), LOADED_AT_ONCE):
        part = [number for number in expected[start : start + LOADED_AT_ONCE] if number not in missing]
        try:
            arrived = rig.load([key_of(number) for number in part])
        except AssertionError:
            arrived = []
        wrong += [number for number in part if key_of(number) not in arrived]
    return missing, wrong


def run_resets(path: str, seed: int, first: int, connection: Connection) -> None:
    """Store and reset until killed.

    Sends ("found", numbers below ``first`` that the tier holds) once, then ("reset", the first number stored after it)
    for each reset that the tier confirmed.
    """
    rng = random.Random(seed)
    rig = LocalRig(Path(path), capacity=CAPACITY, max_inflight=4, checkpoint_interval=0.02).open()
    older = range(max(0, first - 300), first)
    connection.send(("found", [number for number in older if rig.lookup([key_of(number)])]))
    number = first
    # More blocks than are stored between resets, so that a later process finds old ones on the disk.
    batches = 24
    while True:
        for _ in range(batches):
            rig.store([key_of(number + offset) for offset in range(BATCH)])
            number += BATCH
        if rng.random() < 0.5:
            rig.submit_store([key_of(number + offset) for offset in range(BATCH)])
            number += BATCH
        batches = rng.randrange(4)
        if rng.random() < 0.3:
            rig.checkpoint()
        if rig.tier.reset(rig.context.clock() + rng.choice([0.0, 5.0])):
            connection.send(("reset", number))
        else:
            rig.wait(lambda: rig.step().reset_done)
