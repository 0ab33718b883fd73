"""Each call of a tier's life to its medium may fail: no promise breaks, and service comes back.

The life (:meth:`tests.tiers.nth_call.World.live`) has an opening, stores, loads, both kinds of resets, and a restart.
It touches every document of a medium: epochs, namespaces, leases, checkpoints, marks, and the lock. A call fails once,
or together with all later ones of its kind for a while.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from examples.valkey_server import ValkeyServer
from tests.fake_s3 import FakeS3
from tests.tiers.nth_call import Call, LocalWorld, MemoryWorld, ObjectWorld, ValkeyWorld, World
from tiering.testing.clock import until
from tiers.memory import MemoryTier, drop_medium

KINDS = ("memory", "valkey", "s3", "local")
LONG = pytest.mark.timeout(900)
INSPECTIONS = frozenset({"stat", "lstat", "fstat", "statvfs", "scandir", "listdir", "close"})
"""Operations that change no file and read none; their failures are swept in the slow tests."""

_numbers = itertools.count()
"""Numbers of the worlds, which no two share."""

Make = Callable[[], World]
Choose = Callable[[int, Call, Sequence[str]], Sequence[str]]


@pytest.fixture
def make(
    request: pytest.FixtureRequest, tmp_path: Path, fake: FakeS3, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> Make:
    """Function that returns the next world of a kind; no two worlds share a medium."""
    return {
        "memory": lambda: MemoryWorld("nth call", monkeypatch),
        "valkey": lambda: ValkeyWorld(server, next(_numbers), monkeypatch),
        "s3": lambda: ObjectWorld(fake, next(_numbers)),
        "local": lambda: LocalWorld(tmp_path / str(next(_numbers)), monkeypatch),
    }[request.param]


def in_turn(position: int, call: Call, faults: Sequence[str]) -> Sequence[str]:
    """Return one fault for each call, a different one for the next call."""
    return () if call.operation in INSPECTIONS else (faults[position % len(faults)],)


def each(position: int, call: Call, faults: Sequence[str]) -> Sequence[str]:
    """Return all faults for each call."""
    return faults


def sweep(make: Make, choose: Choose, *, lasting: bool) -> None:
    """Live one life for each call and each fault that ``choose`` returns for it; all lives must go well."""
    plain = make()
    with plain.watched():
        plain.live()
    assert len({call.subject for call in plain.calls.seen}) > 2
    chosen = [
        (call, fault)
        for position, call in enumerate(plain.calls.seen)
        for fault in choose(position, call, plain.faults)
    ]
    troubles, reached = [], 0
    for call, fault in chosen:
        world, files, before = make(), open_files(), threads()
        world.calls.fail(call, fault, lasting=lasting)
        try:
            with world.watched():
                world.live()
        except (AssertionError, TimeoutError) as error:
            troubles.append(f"{call}, {fault}: {error}")
        reached += bool(world.calls.failed)
        if not until(lambda before=before: threads() <= before, 30):  # type: ignore[misc]
            troubles.append(f"{call}, {fault}: {threads() - before} are left")
        if world.in_process and open_files() > files:
            troubles.append(f"{call}, {fault}: {open_files() - files} descriptors are left")
    assert troubles == []
    assert reached > len(chosen) * 0.8, "the lives differ: their calls are not those that were to fail"


def threads() -> set[threading.Thread]:
    """Return the threads of this process, without those of the server of objects."""
    return {thread for thread in threading.enumerate() if "process_request_thread" not in thread.name}


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@LONG
@pytest.mark.parametrize("make", KINDS, indirect=True)
def test_a_call_that_fails_once_breaks_no_promise(make: Make) -> None:
    sweep(make, in_turn, lasting=False)


@LONG
@pytest.mark.parametrize("make", ["memory", "valkey"], indirect=True)
def test_calls_that_fail_for_a_while_break_no_promise(make: Make) -> None:
    sweep(make, in_turn, lasting=True)


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for a while"])
@pytest.mark.parametrize("make", KINDS, indirect=True)
def test_no_kind_of_fault_of_any_call_breaks_a_promise(make: Make, lasting: bool) -> None:
    sweep(make, each, lasting=lasting)


def test_negative_control_a_reset_that_does_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryTier, "reset", lambda tier, deadline, revision=None: True)
    with pytest.raises(AssertionError, match="WRONG KV"):
        MemoryWorld("nth call", monkeypatch).live()
    drop_medium("nth call")
