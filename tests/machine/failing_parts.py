"""A service in a process of its own, in which the part of one user fails or hangs when a test says so."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.machine.hosts import stack_of
from tiering.config.io_process import builders
from tiering.config.stack_file import load_stack
from tiering.machine.service import MachineService
from tiering.machine.users import UserThread

PATIENCE = 60.0


def _serve(pipe: Connection, path: Path, tiers: Sequence[Mapping[str, Any]], users: Sequence[int]) -> None:
    found = builders(load_stack(stack_of(*tiers)).secondary)
    build = partial(MachineService, path, found, most_bytes=1 << 30, shutdown_seconds=5.0, parts=1 + len(users))
    parts = {number: UserThread(str(number), partial(build, user=str(number))) for number in users}
    own = build(users=parts)
    own.listen()
    thread = threading.Thread(target=own.run)
    thread.start()
    going_on = threading.Event()

    def breaks(part: Any, kind: str) -> None:
        del part.turn
        if kind == "hang":
            going_on.wait()
            return
        if kind == "endless":
            part._end_io = lambda _: False
        raise RuntimeError("a defect")

    pipe.send(None)
    while (order := pipe.recv()) is not None:
        kind, number = order
        if kind == "go on":
            going_on.set()
        elif kind != "trouble":
            going_on.clear()
            part: Any = parts[number].service
            part.turn = partial(breaks, part, kind)
            part.wake()
        pipe.send(parts[number].trouble)
    going_on.set()
    own.stop()
    thread.join(PATIENCE)


class FailingParts:
    """A service for this process's user and others."""

    def __init__(self, path: Path, tiers: Sequence[Mapping[str, Any]], users: Sequence[int]) -> None:
        self.socket = path
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, path, tiers, users), daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def _answer(self) -> str:
        assert self._pipe.poll(PATIENCE), "the service does not answer"
        return str(self._pipe.recv() or "")

    def do(self, kind: str, user: int) -> str:
        """Break the part of a user, and return why it is not served before that; empty if it is.

        Args:
            kind: "error" in its thread, "hang" of it until "go on", "endless": an error whose I/O does not end, or
                "trouble", which changes nothing.
            user: number of the user.
        """
        self._pipe.send((kind, user))
        return self._answer()

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send(None)
            self.process.join(PATIENCE)
        self.kill()

    def kill(self) -> None:
        """End the process without a chance to do anything."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


@contextmanager
def failing_parts(path: Path, *tiers: Mapping[str, Any], users: Sequence[int]) -> Iterator[FailingParts]:
    """Run a service whose socket is ``path``."""
    service = FailingParts(path, tiers, users)
    try:
        yield service
    finally:
        service.end()
