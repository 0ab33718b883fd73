"""Processes of other users for tests of the service; only root can make them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.machine.engines import SmallEngine, key_of
from tiering.errors import TieringError
from tiering.machine.claim import _ask as ask_for_rows
from tiering.machine.link import greet
from tiering.machine.options import PEERS_TIER
from tiering.machine.presence import Presence
from tiering.machine.words import Greeting

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")

ANNA, BERT, CARL = 61001, 61002, 61003
"""Numbers of users that need no name on this machine."""

Held = dict[str, Any]
"""State of a process of a user, which stays between two calls."""


def start_engine(held: Held, socket: Path, tiers: Sequence[str], weights: int, **words: Any) -> list[bool]:
    """Start an engine whose user trusts root's service, and return which tiers are in service."""
    machine = {"user": "root", "keep_rows": PEERS_TIER in tiers, **words.pop("machine", {})}
    held["engine"] = engine = SmallEngine(socket, tiers, machine=machine, reset_deadline="60s", **words)
    engine.weights = weights
    return [engine.serving(tier) for tier in range(len(tiers))]


def store(held: Held, numbers: Sequence[int]) -> bool:
    return bool(held["engine"].store(numbers) and held["engine"].stored())


def load(held: Held, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the blocks that are found, and those whose bytes another user's engine has computed."""
    found: tuple[list[int], list[int]] = held["engine"].load(numbers)
    return found


def forget_rows(held: Held, first: int = 10_000) -> None:
    held["engine"].forget_rows(first)


def reset(held: Held, revision: str | None) -> bool:
    return bool(held["engine"].manager.reset_cache(revision))


def presence_of(held: Held, tier: int) -> Presence:
    found: Presence = held["engine"].manager.secondary_tiers[tier]._connection.presence
    return found


def present(held: Held, tier: int, numbers: Sequence[int]) -> list[int]:
    """Return the blocks that the table of a tier has, as the engine reads it."""
    return [number for number in numbers if presence_of(held, tier).leading([key_of(number)])]


def serving(held: Held) -> bool:
    """Wait until all tiers are in service, and have found their old blocks."""
    engine = held["engine"]
    engine.manager.on_schedule_end()  # learns that the earlier service has gone
    return all(engine.serving(tier) for tier in range(len(engine.manager.secondary_tiers)))


def is_served(held: Held) -> bool:
    """Return True if some tier is in service at the moment."""
    manager = held["engine"].manager
    manager.on_schedule_end()
    return any(tier.serving for tier in manager.secondary_tiers)


def rows_in_use(held: Held) -> int:
    """Return the number of rows of the engine that are not empty."""
    return int(held["engine"]._rows.any(axis=1).sum())


def inherited(held: Held, blocks: int) -> bool:
    """Return True once the engine has got ``blocks`` in rows of one that has ended, or never gets any."""
    manager = held["engine"].manager
    return bool(held["engine"].settle(lambda: len(manager.primary_tier.readable) == blocks, 20.0 if blocks else 1.0))


def claim(held: Held, socket: Path, text: bytes, user: str | None = "root") -> bytes:
    """Return the first six bytes of the rows that the service gives for a claim."""
    connection, fds = ask_for_rows(str(socket), user, text)
    held.setdefault("claims", []).append((connection, fds))
    return os.pread(fds[0], 6, 0)


def end_claim(held: Held) -> None:
    """Let go of the rows of the last claim."""
    connection, fds = held["claims"].pop()
    connection.close()
    for fd in fds:
        os.close(fd)


def write_claimed(held: Held, socket: Path, text: bytes) -> bytes:
    """Claim rows, and write into them."""
    claim(held, socket, text)
    os.pwrite(held["claims"][-1][1][0], b"secret", 0)
    return b"secret"


def knock(held: Held, socket: Path, user: str | None = "root") -> str:
    """Connect as an engine that only asks for the names of the tiers; return "taken", or why that failed."""
    try:
        connection = greet(str(socket), Greeting("").text(), (), user)
    except (OSError, TieringError) as error:
        return str(error)
    held.setdefault("knocks", []).append(connection)
    return "taken"


def knocks(held: Held, socket: Path) -> tuple[int, str]:
    """Connect until the service refuses, and return the number of connections and the reason."""
    number = 0
    while (answer := knock(held, socket)) == "taken":
        number += 1
    return number, answer


def open_others(held: Held, pid: int) -> str:
    """Try to open what another process has open."""
    try:
        os.close(os.open(next(Path(f"/proc/{pid}/fd").iterdir()), os.O_RDONLY))
    except OSError as error:
        return str(error)
    return "opened"


def close(held: Held) -> None:
    held.pop("engine").close()


def _run(user: int, group: int, pipe: Connection) -> None:
    held: Held = {}
    SmallEngine(Path("/nowhere/cache.sock")).close()  # the user may not read what is imported later
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    pipe.send(os.getpid())
    while (order := pipe.recv()) is not None:
        function, args, words = order
        pipe.send(function(held, *args, **words))
    if "engine" in held:
        close(held)


class UserProcess:
    """A process of a user, which runs one function after another.

    Args:
        user: number of the user.
        group: number of its only group; default: that of the service, whose socket it then reaches.
    """

    def __init__(self, user: int, group: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(user, group, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.pid: int = self._pipe.recv()

    def do(self, function: Callable[..., Any], *args: Any, **words: Any) -> Any:
        """Return what a function of this module returns there."""
        self._pipe.send((function, args, words))
        return self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send(None)
            self.process.join(60.0)
        if self.process.is_alive():
            self.kill()
        self._pipe.close()
