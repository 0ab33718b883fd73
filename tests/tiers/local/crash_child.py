"""The process that the restart loop kills: opens a tier, checks what it must hold, then stores until it dies."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from pathlib import Path

from tests.tiers.local.rig import LocalRig
from tiering.testing.frames import key_of

CAPACITY = "3MiB"
BATCH = 4
JOBS = 4


def run(path: str, seed: int, durability: str, first: int, expected: list[int], connection: Connection) -> None:
    """Messages: ("checked", missing, wrong), then ("stored", numbers) for each job that was reported; ends when it is killed or told."""
    rng = random.Random(seed)
    rig = LocalRig(Path(path), capacity=CAPACITY, durability=durability, max_inflight=4, checkpoint_interval=0.02).open()
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
    """Of ``expected``: those not held, and those that do not come back, or come back with other bytes."""
    missing = [number for number in expected if not rig.lookup([key_of(number)])]
    wrong: list[int] = []
    for number in expected:
        key = key_of(number)
        try:
            arrived = rig.load([key])
        except AssertionError:
            arrived = []
        if not arrived and number not in missing:
            wrong.append(number)
    return missing, wrong
