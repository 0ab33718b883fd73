"""Threads that a starter starts: no caller waits, and each launch ends in one way."""

from __future__ import annotations

import _thread
import ast
import os
import threading
from pathlib import Path

import pytest

import tiering
from tests.thread_limit import HeldStarts, ThreadLimit
from tiering.runtime import launch as module
from tiering.runtime.daemons import DaemonThreads
from tiering.runtime.launch import STARTER_NAME, Launch, Seats
from tiering.testing.clock import until

ROOT = Path(tiering.__file__).parent.parent


class Report:
    """Launches whose ends are noted."""

    def __init__(self) -> None:
        self.ran_on: list[str] = []
        self.refused: list[BaseException | None] = []

    def launch(self, name: str = "t") -> Launch:
        return Launch(name, self.run, self.refused.append)

    def run(self) -> None:
        self.ran_on.append(threading.current_thread().name)


def test_a_launch_runs_on_a_daemon_thread_of_its_name() -> None:
    seen: list[tuple[str, bool]] = []

    def run() -> None:
        seen.append((threading.current_thread().name, threading.current_thread().daemon))

    launch = Launch("one", run, lambda error: None)
    launch.begin()
    launch.join()
    assert seen == [("one", True)]
    assert not launch.is_alive()


def test_no_caller_waits_for_the_start_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    held, report = HeldStarts(monkeypatch), Report()
    threads, refused = DaemonThreads("d", 2), threading.Event()
    launch = report.launch()
    launch.begin()
    threads.run(lambda: None, refused.set)
    assert until(lambda: held.held == ["t"])
    assert (report.ran_on, held.own) == ([], [])
    assert launch.is_alive()
    launch.join(0.01)
    assert launch.is_alive()
    held.release()
    launch.join()
    threads.stop()
    assert until(lambda: not threads.running())
    assert (report.ran_on, report.refused, refused.is_set()) == (["t"], [], False)


def test_a_launch_that_was_cancelled_in_time_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    held, report = HeldStarts(monkeypatch), Report()
    first, second = report.launch("first"), report.launch("second")
    first.begin()
    second.begin()
    assert until(lambda: held.held == ["first"])
    for launch in (first, second, second):
        launch.cancel()
    assert (report.refused, first.is_alive(), second.is_alive()) == ([None], True, False)
    held.release()
    first.join()
    last = report.launch("last")
    last.begin()
    last.join()
    assert (report.ran_on, report.refused) == (["first", "last"], [None])


def test_a_launch_that_is_refused_is_told_why_before_it_counts_as_ended(thread_limit: ThreadLimit) -> None:
    thread_limit.reach()
    alive: list[bool] = []
    launch = Launch("t", print, lambda error: alive.append(launch.is_alive()))
    launch.begin()
    launch.join()
    assert alive == [True]
    report = Report()
    report.launch().begin()
    assert until(lambda: report.refused)
    assert str(report.refused[0]) == "can't start new thread"


def test_an_error_while_a_refusal_is_reported_ends_no_starter(
    thread_limit: ThreadLimit, caplog: pytest.LogCaptureFixture
) -> None:
    thread_limit.reach()
    launch = Launch("t", print, lambda error: 1 // 0)
    launch.begin()
    launch.join()
    thread_limit.leave()
    report = Report()
    after = report.launch()
    after.begin()
    after.join()
    assert report.ran_on == ["t"]
    assert "reporting this failed" in caplog.text


def test_one_starter_starts_all_threads() -> None:
    report = Report()
    for _ in range(3):
        launch = report.launch()
        launch.begin()
        launch.join()
    assert [thread.name for thread in threading.enumerate()].count(STARTER_NAME) == 1


def test_without_a_starter_launches_are_refused_and_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def refuse(*arguments: object) -> int:
        tries.append(arguments)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    monkeypatch.setattr(module, "_starter", module._Starter())
    report = Report()
    for _ in range(3):
        report.launch().begin()
    assert len(report.refused) == 3
    assert len(tries) == 1, "one attempt in so short a time"
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(module, "_starter", module._Starter())
    for _ in range(3):
        report.launch().begin()
    assert len(tries) == 4
    threads, refused = DaemonThreads("d", 2), threading.Event()
    threads.run(print, refused.set)
    assert refused.is_set()
    assert not threads.running()


def test_a_forked_child_has_no_threads_of_its_parent_and_starts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    held, report = HeldStarts(monkeypatch), Report()
    first, second = report.launch("first"), report.launch("second")
    first.begin()
    second.begin()
    assert until(lambda: held.held == ["first"])
    child = os.fork()
    if not child:
        for launch in (first, second):
            launch.join()
        held.release()
        own = Report()
        launch = own.launch("own")
        launch.begin()
        launch.join(10)
        os._exit(0 if (own.ran_on, report.ran_on) == (["own"], []) and not first.is_alive() else 1)
    assert os.waitpid(child, 0)[1] == 0
    held.release()
    second.join()
    assert until(lambda: sorted(report.ran_on) == ["first", "second"])
    first.join()


def test_a_start_that_hangs_is_given_up_and_the_launches_behind_it_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LONGEST_START", 0.01)
    held, hung, good = HeldStarts(monkeypatch, "hung"), Report(), Report()

    def refused(error: BaseException | None) -> None:
        # On a busy machine, a start that does not hang may take longer too.
        monkeypatch.setattr(module, "LONGEST_START", 60.0)
        hung.refused.append(error)

    first, second = Launch("hung", hung.run, refused), good.launch("second")
    first.begin()
    second.begin()
    second.join()
    assert until(lambda: not first.is_alive())
    assert (good.ran_on, held.held) == (["second"], ["hung"])
    assert [type(error) for error in hung.refused] == [TimeoutError]
    assert "the start of thread hung takes longer than 0.01 s and is given up" in caplog.text
    held.release()
    assert until(lambda: first._thread is not None)
    first.join()
    third = good.launch("third")
    third.begin()
    third.join()
    assert (hung.ran_on, good.ran_on) == ([], ["second", "third"]), "the owner was told that it will not run"
    assert until(lambda: [thread.name for thread in threading.enumerate()].count(STARTER_NAME) == 1)


def test_while_too_many_starts_hang_launches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_START", 0.01)
    monkeypatch.setattr(module, "_starter", module._Starter())
    held, report = HeldStarts(monkeypatch), Report()
    launches = [report.launch(f"hung {number}") for number in range(module.MAX_STARTERS + 2)]
    for launch in launches:
        launch.begin()
    assert until(lambda: len(report.refused) == len(launches))
    assert len(held.held) == module.MAX_STARTERS
    late = report.launch("late")
    late.begin()
    assert str(report.refused[-1]) == f"can't start new thread: {module.MAX_STARTERS} starts hang"
    held.release()
    assert until(lambda: all(not launch.is_alive() for launch in launches))
    assert until(lambda: _runs(report))
    assert report.ran_on == ["again"]


def _runs(report: Report) -> bool:
    """Launch a thread, and return True if it was started."""
    launch = report.launch("again")
    launch.begin()
    launch.join()
    return bool(report.ran_on)


def test_a_seat_has_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held, seats, report = HeldStarts(monkeypatch), Seats(), Report()
    for _ in range(3):
        seats.take(2, lambda seat: report.launch(f"seat {seat}"))
    assert (len(seats.taken), len(seats.starting), len(seats.running())) == (2, 2, 2)
    first = seats.leave(0)
    seats.take(2, lambda seat: report.launch(f"again {seat}"))
    assert not seats.take_again(0, first)
    assert len(seats.running()) == 3
    assert until(lambda: held.held == ["seat 0"])
    seats.cancel_seats()
    assert [launch.name for launch in seats.running()] == ["seat 0"]
    held.release()
    assert until(lambda: not seats.running())
    assert report.ran_on == ["seat 0"]


STARTERS = {
    "tiering/runtime/launch.py": "the starter",
    "tiering/primary/memory/prefault.py": "the start of an engine",
    "tiering/copy/host.py": "the start of an engine; its threads all start there",
    "tiering/engines/vllm/weights.py": "the start of an engine",
    "tiering/secondary/service/opener.py": "the shutdown of a tier, which may wait until its deadline",
    "tiers/local/device_speed.py": "a measurement of the command line",
}
"""The files that start threads themselves, and when. No step of a scheduler runs them."""


def test_only_the_starter_starts_threads_while_an_engine_runs() -> None:
    words = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"}
    found = set()
    for package in ("tiering", "tiers"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
            names = {getattr(function, "attr", getattr(function, "id", None)) for function in called}
            file = path.relative_to(ROOT).as_posix()
            if names & words and not file.startswith("tiering/testing/"):
                found.add(file)
    assert found == set(STARTERS)
