"""Threads on demand: a bounded number, as the work needs, and no thread delays the process's end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tests.thread_limit import HeldStarts, ThreadLimit
from tiering.runtime import daemons
from tiering.runtime.daemons import DaemonThreads
from tiering.runtime.launch import Launch
from tiering.testing.clock import until


class Pieces:
    """Work for threads; ``refused`` counts the pieces that no thread runs."""

    def __init__(self, threads: DaemonThreads) -> None:
        self.refused = 0
        self._threads = threads

    def run(self, work: Callable[[], object]) -> None:
        self._threads.run(work, self._refuse)

    def _refuse(self) -> None:
        self.refused += 1


def test_as_many_threads_start_as_there_is_work_at_once_and_no_more_than_the_bound() -> None:
    threads, gate, running = DaemonThreads("t", 3), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        running.release()
        gate.wait()

    assert threads.running() == []
    for _ in range(5):
        Pieces(threads).run(work)
    for _ in range(3):
        assert running.acquire(timeout=10)
    assert len(threads.running()) == 3
    assert not running.acquire(blocking=False)
    gate.set()
    for _ in range(2):
        assert running.acquire(timeout=10)
    threads.stop()
    assert until(lambda: not threads.running())


def test_a_free_thread_is_used_before_another_one_starts() -> None:
    threads, done = DaemonThreads("t", 8), threading.Semaphore(0)
    for _ in range(5):
        Pieces(threads).run(done.release)
        assert done.acquire(timeout=10)
        assert until(lambda: threads.idle == 1)
    assert len(threads.running()) == 1
    threads.stop()


def test_work_submitted_before_the_stop_is_run_and_none_after_it() -> None:
    threads, gate = DaemonThreads("t", 1), threading.Event()
    done: list[int] = []
    pieces = Pieces(threads)
    pieces.run(gate.wait)
    for number in range(3):
        pieces.run(lambda number=number: done.append(number))  # type: ignore[misc]
    threads.stop()
    assert pieces.refused == 0
    pieces.run(lambda: done.append(9))
    assert pieces.refused == 1
    gate.set()
    assert until(lambda: not threads.running())
    assert done == [0, 1, 2]


def test_a_stop_gives_up_the_threads_that_nothing_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldStarts(monkeypatch, "other")
    threads, gate, done = DaemonThreads("t", 3), threading.Event(), threading.Event()
    pieces = Pieces(threads)
    pieces.run(gate.wait)
    assert until(lambda: threads.idle == 0 and not threads._seats.starting)
    Launch("other", print, print).begin()
    assert until(lambda: held.held == ["other"])
    pieces.run(done.set)
    assert len(threads.running()) == 2
    threads.stop()
    assert len(threads.running()) == 1
    gate.set()
    assert done.wait(10)
    held.release()
    assert until(lambda: not threads.running())
    assert pieces.refused == 0


def test_a_stop_leaves_the_thread_that_work_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldStarts(monkeypatch, "other")
    other, threads, done = Launch("other", print, print), DaemonThreads("t", 3), threading.Semaphore(0)
    pieces = Pieces(threads)
    other.begin()
    assert until(lambda: held.held == ["other"])
    for _ in range(2):
        pieces.run(done.release)
    assert len(threads.running()) == 2
    threads.stop()
    assert len(threads.running()) == 1
    held.release()
    assert all(done.acquire(timeout=10) for _ in range(2))
    assert until(lambda: not threads.running())
    assert pieces.refused == 0
    other.join()


def test_an_error_in_one_piece_of_work_ends_no_thread() -> None:
    threads, done = DaemonThreads("t", 1), threading.Event()
    Pieces(threads).run(lambda: 1 // 0)
    Pieces(threads).run(done.set)
    assert done.wait(10)
    threads.stop()


def test_a_thread_without_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "IDLE_SECONDS", 0.01)
    threads, done = DaemonThreads("t", 1), threading.Event()
    Pieces(threads).run(done.set)
    assert until(lambda: not threads.running())
    done.clear()
    Pieces(threads).run(done.set)
    assert done.wait(10)
    threads.stop()


def test_work_that_no_thread_can_run_is_refused(thread_limit: ThreadLimit) -> None:
    threads, done = DaemonThreads("t", 2), threading.Event()
    pieces = Pieces(threads)
    thread_limit.reach()
    pieces.run(done.set)
    assert until(lambda: pieces.refused == 1)
    thread_limit.leave()
    pieces.run(done.set)
    assert done.wait(10)
    assert pieces.refused == 1
    threads.stop()


def test_work_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    program = (
        "import threading\n"
        "from tiering.runtime.daemons import DaemonThreads\n"
        "begun = threading.Event()\n"
        "DaemonThreads('t', 1).run(lambda: (begun.set(), threading.Event().wait()), print)\n"
        "begun.wait()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
