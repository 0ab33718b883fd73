"""kill -9 at any moment of a whole stack: reported blocks survive, none is wrong, no debris stays."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.integration import kill_child
from tiering.primary.memory.region import SHM, shared_path
from tiers.local.layout import used_bytes

NEWEST = 200
"""Number of newest blocks, of some 1,300 slots, that eviction cannot have reached.

The number leaves room for blocks that were written and not reported.
"""

OTHERS = 40
"""Number of older blocks to check: these may be missing, but not wrong."""


class Loop:
    """Engines in one directory, one after the other, and their reports."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.rng = random.Random(seed)
        self.region = f"kill-{os.getpid()}-{seed}"
        self.stored: dict[int, None] = {}
        """Blocks on the disk, in the order of their reports."""
        self.others: list[int] = []
        """Blocks that were on the disk once."""
        self.checked = 0
        self.loaded = 0
        self.resets = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.integration.kill_child"])
        self._first = 0

    def round(self, durability: str, *, kill: bool = True) -> None:
        ours, theirs = self._context.Pipe()
        held = list(self.stored)[-NEWEST:]
        others = self.rng.sample(self.others, min(OTHERS, len(self.others)))
        arguments = (
            str(self.path),
            self.region,
            self.rng.randrange(1 << 30),
            durability,
            self._first,
            held,
            others,
            theirs,
        )
        self._first += 1_000_000
        process = self._context.Process(target=kill_child.run, args=arguments)
        process.start()
        theirs.close()
        resets = self.resets
        try:
            if kill and self.rng.random() < 0.2:
                process.join(self.rng.uniform(0.0, 0.2))
            else:
                self._check(ours, held)
                for _ in range(self.rng.randrange(60)):
                    assert self._note(ours, 60), "the engine ended by itself"
                if kill:
                    process.join(self.rng.uniform(0.0, 0.005))
            if kill:
                process.kill()
            else:
                ours.send("stop")
                while self._note(ours, 60):
                    pass
                process.join(60)
                assert process.exitcode == 0
            while self._note(ours, 0):
                pass
        finally:
            process.kill()
            process.join()
            process.close()
            ours.close()
        if self.resets > resets:
            # Blocks stored after a reset have weights that the identity does not name, so no later engine finds them.
            self._forget(list(self.stored))
        assert used_bytes(self.path) <= kill_child.CAPACITY

    def _check(self, pipe: Connection, held: list[int]) -> None:
        for message in _messages(pipe, 60):
            if message[0] == "checked":
                assert message == ("checked", [], []), f"(word, missing, wrong) = {message}"
                self.checked += 1
                self.loaded += len(held)
                return
        pytest.fail("the engine ended before it had looked")

    def _note(self, pipe: Connection, timeout: float) -> bool:
        """Take one message; return False if none comes in time or the engine has ended."""
        for message in _messages(pipe, timeout):
            word, numbers = message[:2]
            if word == "stored":
                self.stored.update(dict.fromkeys(numbers))
            elif word == "removed":
                self._forget(numbers)
            elif word == "reset":
                self.resets += 1
                self._forget(list(self.stored))
            elif word == "checked":
                assert message[1:] == ([], [])
            else:
                pytest.fail(f"wrong KV: {numbers}")
            return True
        return False

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self.stored.pop(number, None)
        self.others += numbers


Message = tuple[str, list[int]] | tuple[str, list[int], list[int]]
"""A word, the block numbers that it concerns, and for "checked" the numbers of wrong blocks."""


def _messages(pipe: Connection, timeout: float) -> Iterator[Message]:
    """Yield messages until none comes in time or the other side has ended."""
    try:
        while pipe.poll(timeout):
            yield pipe.recv()
    except (EOFError, ConnectionResetError):
        return


def _run(path: Path, seed: int, rounds: int) -> Loop:
    loop = Loop(path, seed)
    for number in range(rounds):
        try:
            loop.round("none" if number % 3 else "fsync")
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, round {number}: {error}") from error
    loop.round("none", kill=False)
    assert not list(path.rglob("*.new"))
    assert not shared_path(loop.region, SHM).exists()
    return loop


def test_15_kills(tmp_path: Path) -> None:
    loop = _run(tmp_path, 1, 15)
    assert loop.checked > 5
    assert loop.loaded > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_hundreds_of_kills(tmp_path: Path, seed: int) -> None:
    loop = _run(tmp_path, seed, 100)
    assert loop.checked > 50
    assert loop.loaded > 500
    assert loop.resets > 0
