"""Store, reset, kill -9 at a random moment, open again: confirmed resets leave no old block."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

import pytest

from tests.tiers.local import crash_child


def _rounds(path: Path, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    first = resets = 0
    for number in range(rounds):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=crash_child.run_resets, args=(str(path), rng.randrange(1 << 30), first, theirs)
        )
        process.start()
        theirs.close()
        try:
            assert ours.poll(60), f"seed {seed}, round {number}: the child says nothing"
            assert ours.recv() == ("found", []), f"seed {seed}, round {number}: blocks from before a reset are back"
            for _ in range(rng.randrange(12)):
                assert ours.poll(60), f"seed {seed}, round {number}: the child hangs"
                first, resets = ours.recv()[1], resets + 1
            process.join(rng.uniform(0.0, 0.01))
        finally:
            process.kill()
            process.join()
        try:
            while ours.poll(0):
                first, resets = ours.recv()[1], resets + 1
        except (EOFError, ConnectionResetError):
            pass
        ours.close()
    assert resets > rounds


def test_6_kills(tmp_path: Path) -> None:
    _rounds(tmp_path, 3, 6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_hundreds_of_kills(tmp_path: Path, seed: int) -> None:
    _rounds(tmp_path, seed, 100)
