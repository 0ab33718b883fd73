"""Write, kill -9 at a random moment, open again: no reported block is lost, and no block is wrong."""

from __future__ import annotations

import multiprocessing
import random
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.tiers.local import crash_child
from tests.tiers.local.rig import LocalRig

SAFE = 100
"""Number of newest blocks, of some 250 slots, that eviction cannot have reached.

Recovery rounds the recency of blocks; the number leaves room for this.
"""


def _receive(connection: Connection, timeout: float) -> list[object] | None:
    """Return the next message; None if none comes in time or the other side was killed."""
    try:
        return list(connection.recv()) if connection.poll(timeout) else None
    except (EOFError, ConnectionResetError):
        return None


def _rounds(path: Path, seed: int, rounds: int, durability: str) -> None:
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    stored: list[int] = []
    first = 0
    checked = 0
    for number in range(rounds):
        ours, theirs = context.Pipe()
        arguments = (str(path), rng.randrange(1 << 30), durability, first, stored[-SAFE:], theirs)
        process = context.Process(target=crash_child.run, args=arguments)
        process.start()
        theirs.close()
        # Some processes die before they have recovered, the others in the middle of their stores.
        early = rng.random() < 0.2
        if early:
            process.join(rng.uniform(0.0, 0.1))
        else:
            message = _receive(ours, 60)
            assert message == ["checked", [], []], f"seed {seed}, round {number}: {message}"
            checked += 1
            for _ in range(rng.randrange(40)):
                message = _receive(ours, 60)
                assert message is not None, f"seed {seed}, round {number}: the child ended by itself"
                stored += message[1]  # type: ignore[arg-type]
            process.join(rng.uniform(0.0, 0.005))
        process.kill()
        process.join()
        while (message := _receive(ours, 0)) is not None:
            if message[0] == "stored":
                stored += message[1]  # type: ignore[arg-type]
        ours.close()
        first += 10_000
    assert checked > rounds // 2
    rig = LocalRig(path, capacity=crash_child.CAPACITY).open()
    try:
        assert crash_child.check(rig, stored[-SAFE:]) == ([], []), f"seed {seed}"
    finally:
        rig.close()


@pytest.mark.parametrize(("seed", "durability"), [(1, "none"), (2, "fsync")])
def test_25_restarts(tmp_path: Path, seed: int, durability: str) -> None:
    _rounds(tmp_path, seed, 25 if durability == "none" else 8, durability)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_hundreds_of_restarts(tmp_path: Path, seed: int) -> None:
    _rounds(tmp_path, seed, 100, "none" if seed % 2 else "fsync")
