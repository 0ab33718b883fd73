"""Engines of a benchmark, each in a process of its own that answers through a pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

ANSWER_TIMEOUT = 600.0
"""Longest time until an engine answers, in seconds."""


def in_a_process(work: Callable[..., object], *arguments: object) -> None:
    """Run ``work`` in a child, so that this process stays small beside the engines."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{work.__name__} ended with code {process.exitcode}")


@contextmanager
def processes_of(
    serving: Callable[..., None], processes: Mapping[str, tuple[Any, ...]], first: int = 0
) -> Iterator[dict[str, Connection]]:
    """Start a process per engine, and return the pipe to each when all are ready.

    Args:
        serving: the function that is run in each process, with the pipe as its first argument.
        processes: its further arguments, by engine.
        first: number of the engine to start first.
    """
    context = multiprocessing.get_context("spawn")
    engines: dict[str, Connection] = {}
    with ExitStack() as opened:
        for name in rotated(list(processes), first):
            ours, theirs = context.Pipe()
            process = context.Process(target=serving, args=(theirs, *processes[name]), name=name)
            process.start()
            theirs.close()
            opened.callback(end, process, ours)
            engines[name] = ours
        for pipe in engines.values():
            receive(pipe)
        yield engines


def rotated(names: list[str], by: int) -> list[str]:
    """Return ``names`` in the same cyclic order, with another beginning."""
    at = by % len(names)
    return names[at:] + names[:at]


def end(process: Any, pipe: Connection) -> None:
    """Ask the engine to end, and wait for its end."""
    pipe.close()
    process.join(60)
    if process.is_alive():
        process.kill()
        process.join()


def receive(pipe: Connection) -> Any:
    """Return the engine's answer.

    Raises:
        RuntimeError: the answer took too long.
        EOFError: the engine has ended.
    """
    if not pipe.poll(ANSWER_TIMEOUT):
        raise RuntimeError(f"an engine did not answer within {ANSWER_TIMEOUT:g} s")
    return pipe.recv()
