"""The scheduler's thread of an engine neither starts threads, nor waits, nor does I/O."""

from __future__ import annotations

import _thread
import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest

from examples.mini_engine import Engine
from examples.valkey_server import ValkeyServer, serving
from tests.fake_s3 import FakeS3, Trouble
from tests.mini_engine.helpers import ask_all, one_row, options, prompt, wrong_answers
from tests.tiers.local.rig import writes_checkpoint
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.manager.manager import TieringOffloadingManager
from tiering.medium.host import IoHost
from tiering.medium.side import IoTask
from tiering.testing.clock import until
from tiers.local import new_segments
from tiers.local import tier as local_tier
from tiers.local.tier import LocalTier
from tiers.object.definition import ObjectTier

PROMPTS = [prompt(seed, 77, shared=16) for seed in range(6)]
FAST = {"probe_after": "5ms", "probe_max": "10ms"}

TASKS = ("inspect", "checkpoint", "segment", "health", "probe")
"""Names of tasks that the steps of the test need."""


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with serving() as running:
        yield running


class Starts:
    """Threads that are started, and tasks that are run.

    Attributes:
        threads: names of the threads, and the low-level functions, that the thread of the test started.
        tasks: names of the tasks.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.tasks: set[str] = set()
        start, start_low, run = threading.Thread.start, _thread.start_new_thread, IoHost.run
        test = threading.get_ident()

        def noted(thread: threading.Thread) -> None:
            if threading.get_ident() == test:
                self.threads.append(thread.name)
            start(thread)

        def noted_low(*arguments: object) -> int:
            if threading.get_ident() == test:
                self.threads.append(str(arguments))
            return start_low(*arguments)  # type: ignore[call-overload, no-any-return]

        def noted_task(host: IoHost, task: IoTask) -> None:
            self.tasks.add(task.name)
            run(host, task)

        monkeypatch.setattr(threading.Thread, "start", noted)
        monkeypatch.setattr(_thread, "start_new_thread", noted_low)
        monkeypatch.setattr(IoHost, "run", noted_task)

    def has(self, task: str) -> bool:
        return task in self.tasks


BLOCKING = (
    "lock.__enter__",
    "lock.__exit__",
    "lock.acquire",
    "RLock.__enter__",
    "RLock.__exit__",
    "SimpleQueue.get",
    "sleep",
    "urandom",
    "open",
    "open_code",
    "acquire_lock",
)
"""Names of functions that may wait or do I/O; those of ``posix`` and of sockets are added."""

HARMLESS = {"fspath", "getpid", "get_blocking", "sched_yield"}
"""Names of functions of ``posix`` that do no I/O."""

ALLOWED = {
    # These acquire a lock without a wait.
    "threading.py:_wait_for_tstate_lock",
    "tiering/runtime/pool.py:_grow",
    # The logging module has a lock of its own, and writes; each line is rate-limited.
    "logging/__init__.py",
    # The breaker's state is changed under a lock when a probe of a medium in trouble begins or ends.
    "tiering/medium/layers/breaker.py",
    # A checkpoint takes one sequence number, under a lock that I/O threads take once for each unit.
    "tiering/medium/frame.py:take",
}
"""Callers that may call them, as a file with or without a function."""


IO_THREADS = r"lock.* in (threading.py:.*|tiering/.*/host.py:_end_unit), from host.py:"
"""Calls of a reset that wait for I/O threads, until its deadline or for some microseconds."""


class Calls:
    """Calls of functions that may wait or do I/O, from methods of a scheduler half.

    Args:
        methods: names of these methods; default: all but those that may wait until a deadline.
    """

    def __init__(self, *methods: str) -> None:
        self.seen: set[str] = set()
        self.total = 0
        self._methods = {
            method.__code__
            for name, method in vars(OffloadingConnectorScheduler).items()
            if isinstance(method, FunctionType)
            and (name in methods if methods else name not in {"__init__", "shutdown", "reset_cache"})
        }

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or not self._on_a_step(frame):
            return
        self.total += 1
        name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
        if name in BLOCKING or (module == "posix" and name not in HARMLESS) or "socket" in f"{module} {name}":
            file = re.sub(r".*/(?=tiering/|tiers/|python3[^/]*/)", "", frame.f_code.co_filename)
            file = re.sub(r"^python3[^/]*/", "", file)
            if not {file, f"{file}:{frame.f_code.co_name}"} & ALLOWED:
                self.seen.add(f"{name} in {file}:{frame.f_code.co_name}, from {self._from(frame)}")

    def _on_a_step(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self._methods:
                return True
            frame = frame.f_back
        return False

    def _from(self, frame: FrameType | None) -> str:
        while frame is not None:
            if "/tiering/" in frame.f_code.co_filename or "/tiers/" in frame.f_code.co_filename:
                return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            frame = frame.f_back
        return "?"


@contextmanager
def profiled(calls: Calls) -> Iterator[None]:
    """Note the calls of this thread; what earlier tests have left to the garbage collector ends before."""
    gc.collect()
    sys.setprofile(calls)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.fixture
def engine(tmp_path: Path, bucket: FakeS3, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with a tier of each kind of index, coordination, and a recorder."""
    monkeypatch.setattr(new_segments, "FIRST_BYTES", 0)
    monkeypatch.setattr(local_tier, "INSPECT_SECONDS", 0.0)
    shared = {"bucket": bucket.bucket, "endpoint_url": bucket.endpoint, "coordination": server.url, "breaker": FAST}
    stack = {
        "primary": {"capacity": 40 * one_row()},
        "secondary": [
            {"type": "memory", "capacity": "1MiB"},
            {
                "type": "local",
                "path": str(tmp_path / "kv"),
                "capacity": "16MiB",
                "segment_size": "1MiB",
                "breaker": FAST,
            },
            {"type": "s3", **shared},
        ],
        "record_trace": {"path": str(tmp_path / "traces")},
    }
    with Engine(options(num_blocks=30, stack=stack)) as running:
        yield running


def exercise(engine: Engine, seen: Callable[[str], bool] = lambda part: True) -> None:
    """Make the tiers store, load, grow, inspect, write a checkpoint and probe a medium in trouble.

    Args:
        engine: the engine.
        seen: function that returns True once a task of this name was run; default: always.
    """
    assert engine.tiers is not None
    manager = engine.tiers.scheduler_half.manager
    assert isinstance(manager, TieringOffloadingManager)
    _, local, s3 = manager.secondary_tiers
    assert isinstance(local, LocalTier)
    assert isinstance(s3, ObjectTier)

    def stepped(done: Callable[[], object]) -> bool:
        engine.step()
        return bool(done())

    for turn in range(2):
        assert wrong_answers(ask_all(engine, PROMPTS, f"turn {turn}"), PROMPTS) == []
        assert engine.settle()
    local.checkpoints.request()
    assert until(lambda: stepped(lambda: seen("checkpoint") and not writes_checkpoint(local)))
    for tier in (local, s3):
        tier.io.breakers.trip("test")
        assert until(lambda tier=tier: stepped(lambda: seen("health") and tier.get_stats().writable))  # type: ignore[misc]
    ask_all(engine, PROMPTS, "after", max_tokens=2)
    assert engine.settle()


def test_no_step_starts_a_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(monkeypatch)
    exercise(engine, starts.has)
    monkeypatch.undo()
    assert [task for task in TASKS if not starts.has(task)] == []
    assert starts.threads == []


def test_no_step_waits_or_does_io(engine: Engine) -> None:
    calls = Calls()
    with profiled(calls):
        exercise(engine)
    assert calls.total > 1000
    assert sorted(calls.seen) == []


def test_a_reset_waits_only_for_io_threads_and_until_its_deadline_when_all_shared_media_are_down(
    engine: Engine, bucket: FakeS3, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exercise(engine)
    assert engine.tiers is not None
    half = engine.tiers.scheduler_half
    waits: list[float] = []
    wait = IoHost.wait

    def noted(host: IoHost, timeout: float) -> bool:
        waits.append(timeout)
        return wait(host, timeout)

    monkeypatch.setattr(IoHost, "wait", noted)
    for down in (server.kill, lambda: bucket.fail(Trouble.RESET, times=1 << 20)):
        down()
        for turn in range(2):  # the second reset comes before the media have confirmed the first one
            calls = Calls("reset_cache")
            with profiled(calls):
                half.reset_cache()
            assert calls.total > 100
            other = {call for call in calls.seen if not re.match(IO_THREADS, call)}
            assert {call for call in other if not call.startswith("urandom")} == set()  # random names never wait
            assert all(0 < seconds <= 0.05 for seconds in waits)
            ask_all(engine, PROMPTS, f"{down} {turn}", max_tokens=2)
    bucket.heal()


def test_no_reset_waits_for_a_valkey_that_is_killed_in_its_calls_and_a_bucket_that_refuses(
    engine: Engine, bucket: FakeS3, server: ValkeyServer
) -> None:
    assert engine.tiers is not None
    half, over = engine.tiers.scheduler_half, threading.Event()

    def kill() -> None:
        while not over.wait(0.02):  # calls begin meanwhile, and are cut
            server.restart()
            bucket.fail(Trouble.RESET, times=8)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for turn in range(20):
            ask_all(engine, PROMPTS[:2], f"killed {turn}", max_tokens=2)
            calls = Calls("reset_cache")
            with profiled(calls):
                half.reset_cache()
            other = {call for call in calls.seen if not re.match(IO_THREADS, call)}
            assert {call for call in other if not call.startswith("urandom")} == set()
    finally:
        over.set()
        killer.join()
        bucket.heal()
