"""Pools of threads: parked before their work, refusals without threads, and no wait for callers."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.thread_limit import HeldStarts, ThreadLimit
from tiering.errors import TemporaryStoreError
from tiering.runtime import pool as pool_module
from tiering.runtime.pool import FEW_THREADS, LENT_SECONDS, LONGEST_START, RETRY_SECONDS, ThreadPool
from tiering.testing.clock import FakeClock, until

ROOT = Path(__file__).parents[2]


class Pieces:
    """Work for threads; ``refused`` has the reasons for the pieces that no thread runs."""

    def __init__(self, pool: ThreadPool) -> None:
        self.refused: list[TemporaryStoreError] = []
        self._pool = pool

    def run(self, work: Callable[[], object]) -> None:
        self._pool.run(work, self.refused.append)


def ended(pool: ThreadPool) -> bool:
    pool.stop()
    return pool.join(10.0)


def test_all_threads_are_started_at_once_and_parked() -> None:
    pool = ThreadPool("t", 3)
    assert pool.start(10.0)
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("t-")}
    assert names == {"t-0", "t-1", "t-2"}
    assert (pool.alive, pool.shortage) == (3, None)
    assert ended(pool)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("t-")]


def test_no_more_work_runs_at_once_than_there_are_threads() -> None:
    pool, gate, running = ThreadPool("t", 3), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        running.release()
        gate.wait()

    for _ in range(5):
        Pieces(pool).run(work)
    for _ in range(3):
        assert running.acquire(timeout=10)
    assert not running.acquire(blocking=False)
    gate.set()
    for _ in range(2):
        assert running.acquire(timeout=10)
    assert ended(pool)


def test_work_submitted_before_the_stop_is_run_and_none_after_it() -> None:
    pool, gate, done = ThreadPool("t", 1), threading.Event(), []
    pieces = Pieces(pool)
    pieces.run(gate.wait)
    for number in range(3):
        pieces.run(lambda number=number: done.append(number))  # type: ignore[misc]
    pool.stop()
    assert pieces.refused == []
    pieces.run(lambda: done.append(9))
    assert ["stopped" in str(error) for error in pieces.refused] == [True]
    assert not pool.join(0.0)
    gate.set()
    assert pool.join(10.0)
    assert done == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 3])
def test_work_submitted_while_another_thread_stops_the_pool_is_run_or_refused(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    class Interrupted(SimpleQueue[object]):
        """A queue whose caller is interrupted before work is queued, by a stop of the pool."""

        def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
            if isinstance(item, tuple) and not stopped:
                stopped.append(True)
                assert ended(pool)
            super().put(item)

    stopped: list[bool] = []
    monkeypatch.setattr(pool_module, "SimpleQueue", Interrupted)
    pool, done = ThreadPool("t", size), []
    assert pool.start(10.0)
    pieces = Pieces(pool)
    pieces.run(lambda: done.append(True))
    assert (done, ["stopped" in str(error) for error in pieces.refused]) == ([], [True])
    assert pool.join(10.0)


def test_the_last_thread_refuses_work_that_comes_behind_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(SimpleQueue[object]):
        """A queue in which work arrives just behind the order to end."""

        def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
            super().put(item)
            if not isinstance(item, tuple) and not late:
                late.append(True)
                super().put((lambda: done.append(True), refused.append))

    late: list[bool] = []
    refused: list[TemporaryStoreError] = []
    done: list[bool] = []
    monkeypatch.setattr(pool_module, "SimpleQueue", Late)
    pool = ThreadPool("t", 1)
    assert pool.start(10.0)
    assert ended(pool)
    assert (done, ["stopped" in str(error) for error in refused]) == ([], [True])


def test_an_error_in_one_piece_of_work_ends_no_thread() -> None:
    pool, done = ThreadPool("t", 1), threading.Event()
    Pieces(pool).run(lambda: 1 // 0)
    Pieces(pool).run(done.set)
    assert done.wait(10)
    assert ended(pool)


def test_no_caller_waits_for_a_start_and_work_waits_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    held, pool, done = HeldStarts(monkeypatch), ThreadPool("t", 2), threading.Event()
    pieces = Pieces(pool)
    pieces.run(done.set)
    assert until(lambda: held.held == ["t-0"])
    assert not pool.start()
    assert held.own == []
    assert pieces.refused == []
    held.release()
    assert done.wait(10)
    assert ended(pool)


def test_work_that_no_thread_can_run_is_refused_and_later_work_tries_again(thread_limit: ThreadLimit) -> None:
    clock = FakeClock()
    pool, done = ThreadPool("t", 2, clock), threading.Event()
    pieces = Pieces(pool)
    thread_limit.reach()
    pieces.run(done.set)
    assert until(lambda: len(pieces.refused) == 1)
    assert "ulimit -u" in str(pieces.refused[0])
    assert str(pool.shortage) == "can't start new thread"
    pieces.run(done.set)
    assert len(pieces.refused) == 2
    assert len(thread_limit.refused) == 1, "not tried again before its time"
    thread_limit.leave()
    clock.advance(RETRY_SECONDS)
    pieces.run(done.set)
    assert done.wait(10)
    assert len(pieces.refused) == 2
    assert until(lambda: pool.alive == 2 and pool.shortage is None)
    assert ended(pool)


def test_the_threads_that_run_do_the_work_while_others_are_missing(thread_limit: ThreadLimit) -> None:
    clock = FakeClock()
    pool, done = ThreadPool("t", 3, clock), threading.Semaphore(0)
    thread_limit.reach("t-1")
    assert not pool.start(10.0)
    assert (pool.alive, str(pool.shortage)) == (1, "can't start new thread")
    for _ in range(4):
        Pieces(pool).run(done.release)
    for _ in range(4):
        assert done.acquire(timeout=10)
    thread_limit.leave()
    clock.advance(RETRY_SECONDS)
    Pieces(pool).run(done.release)
    assert until(lambda: pool.alive == 3)
    assert ended(pool)


class Limit:
    """Threads of all pools that a limit allows, and the clock of the pools."""

    def __init__(self, thread_limit: ThreadLimit, most: int) -> None:
        self.clock = FakeClock()
        thread_limit.refuse = lambda name: name.startswith("t-") and self.running >= most

    @property
    def running(self) -> int:
        return sum(thread.name.startswith("t-") for thread in threading.enumerate())

    def pool(self, name: str, size: int) -> ThreadPool:
        return ThreadPool(f"t-{name}", size, self.clock)


def test_at_a_limit_each_pool_gets_a_few_threads_of_those_that_took_all(thread_limit: ThreadLimit) -> None:
    limit = Limit(thread_limit, 12)
    pools = [limit.pool("first", 12), limit.pool("second", 8), limit.pool("third", 1)]
    assert [pool.start(10.0) for pool in pools] == [True, False, True]
    assert until(lambda: limit.running == sum(pool.alive for pool in pools))
    first, second, third = (pool.alive for pool in pools)
    assert first > second >= FEW_THREADS
    assert third == 1
    assert str(pools[0].shortage) == "can't start new thread"
    done = threading.Semaphore(0)
    for pool in pools:
        for _ in range(3):
            pool.run(done.release, lambda error: None)
    for _ in range(9):
        assert done.acquire(timeout=10)
    thread_limit.leave()
    limit.clock.advance(LENT_SECONDS)
    assert all(pool.start(10.0) for pool in pools)
    assert [pool.alive for pool in pools] == [12, 8, 1]
    assert all(map(ended, pools))


def test_at_a_limit_a_pool_without_threads_gets_one_for_a_later_attempt(thread_limit: ThreadLimit) -> None:
    limit = Limit(thread_limit, 4)
    first, second, done = limit.pool("first", 4), limit.pool("second", 4), threading.Event()
    assert first.start(10.0)
    pieces = Pieces(second)
    pieces.run(done.set)
    assert until(lambda: pieces.refused and limit.running < 4)
    limit.clock.advance(RETRY_SECONDS)
    pieces.run(done.set)
    assert done.wait(10)
    assert first.alive >= 1
    assert ended(first)
    assert ended(second)


def test_no_pool_gives_up_its_last_thread(thread_limit: ThreadLimit) -> None:
    limit = Limit(thread_limit, 3)
    pools = [limit.pool("first", 3), limit.pool("second", 2), limit.pool("third", 2)]
    assert [pool.start(1.0) for pool in pools[:2]] == [True, True]
    assert not pools[2].start(1.0)
    assert pools[0].alive >= 1
    assert all(map(ended, pools))


def test_work_is_refused_while_the_start_of_the_first_thread_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    held, pool, done = HeldStarts(monkeypatch), ThreadPool("t", 1, clock), threading.Event()
    pieces = Pieces(pool)
    pieces.run(done.set)
    assert until(lambda: held.held == ["t-0"])
    assert pieces.refused == []
    clock.advance(LONGEST_START)
    pieces.run(done.set)
    assert ["their start hangs" in str(error) for error in pieces.refused] == [True, True]
    held.release()
    assert until(lambda: pool.alive == 1)
    pieces.run(done.set)
    assert done.wait(10)
    assert ended(pool)


def test_a_stop_during_the_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    held, pool, done = HeldStarts(monkeypatch), ThreadPool("t", 3), threading.Event()
    pieces = Pieces(pool)
    pieces.run(done.set)
    assert until(lambda: held.held == ["t-0"])
    pool.stop()
    assert not pool.join(0.0)
    held.release()
    assert pool.join(10.0)
    assert pool.alive == 1, "the others were not needed any more"
    assert done.is_set()


def test_work_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    program = (
        "import threading\n"
        "from tiering.runtime.pool import ThreadPool\n"
        "begun = threading.Event()\n"
        "ThreadPool('t', 1).run(lambda: (begun.set(), threading.Event().wait()), print)\n"
        "begun.wait()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


STARTERS = {
    "tiering/runtime/pool.py": "a pool, without a wait for its threads",
    "tiering/primary/memory/prefault.py": "the start of an engine",
    "tiering/primary/memory/preparation.py": "the start of an engine, whose first steps the thread may outlast",
    "tiering/copy/host.py": "the start of an engine; its threads all start there",
    "tiering/engines/vllm/weights.py": "the start of an engine",
    "tiering/engines/mailbox.py": "the start of an engine; the thread ends with it",
    "tiering/config/io_process.py": "the start of an engine; the thread ends with the tiers",
    "tiering/machine/link.py": "the start of an engine; the thread ends with it",
    "tiering/machine/users.py": "the start of a service; the threads end with it",
    "tiering/machine/ledger.py": "once for each service that an engine joins; the thread ends at once",
    "tiering/epochs/opener.py": "the shutdown of a tier, which may wait until its deadline",
    "tiers/local/device.py": "a measurement of the command line",
    "tiers/local/recovery.py": "the recovery of a directory, on an I/O thread",
    "tiers/object/s3/credentials.py": "the renewal of credentials, on an I/O thread",
}
"""The files that start threads themselves, and when. No step of a scheduler runs them."""


def test_only_pools_start_threads_while_an_engine_runs() -> None:
    words = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"}
    found = set()
    for package in ("tiering", "tiers"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            called: set[ast.expr] = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
            called |= {base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases}
            names = {getattr(function, "attr", getattr(function, "id", None)) for function in called}
            file = path.relative_to(ROOT).as_posix()
            if names & words and not file.startswith("tiering/testing/"):
                found.add(file)
    assert found == set(STARTERS)
