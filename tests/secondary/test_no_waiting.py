"""The scheduler's thread never waits for the start of an I/O thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.secondary.io_fakes import Primary, finish, make_job, outcome_names, running_host
from tests.thread_limit import HeldStarts
from tiering.block_store import BlockIO
from tiering.errors import TemporaryStoreError
from tiering.secondary.io.host import IoHost
from tiering.secondary.io.messages import IoKind, IoTask
from tiering.testing.clock import FakeClock, until
from tiering.testing.faults import DictStore


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldStarts]:
    starts = HeldStarts(monkeypatch)
    yield starts
    starts.release()


def task(host: IoHost, ran: list[str], name: str, *, background: bool = False, lookup: bool = False) -> list[object]:
    """Run a task that notes its name in ``ran``; the returned list receives its error, or None."""
    seen: list[object] = []
    host.run(IoTask(name, lambda: ran.append(name), lambda result, error: seen.append(error), background, lookup))
    return seen


def end_by_polls(host: IoHost, *seen: list[object]) -> bool:
    def ended() -> bool:
        host.poll()
        return all(seen)

    return until(ended)


def test_work_is_submitted_while_starts_are_held_up_and_is_done_later(held: HeldStarts) -> None:
    primary, ran = Primary(8), list[str]()
    with running_host(DictStore(), primary, threads=4, release=held.release) as host:
        for job_id in range(3):
            host.submit(make_job(primary, IoKind.STORE, range(4), job_id=job_id))
        background = task(host, ran, "background", background=True)
        lookup = task(host, ran, "lookup", lookup=True)
        plain = task(host, ran, "plain")
        assert host.poll() == []
        assert until(lambda: held.held == ["kv-t-io-0"])
        assert (held.own, ran, background, lookup, plain) == ([], [], [], [], [])
        held.release()
        assert all(result.all_done for result in finish(host, 3))
        assert end_by_polls(host, background, lookup, plain)
        assert (background, lookup, plain) == ([None], [None], [None])
    assert sorted(ran) == ["background", "lookup", "plain"]


class Hanging(DictStore):
    """A store whose stores wait for ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.entered = threading.Semaphore(0)

    def put_one(self, block: BlockIO) -> None:
        self.entered.release()
        self.go.wait()


def test_a_step_replaces_threads_that_hang_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    primary, store, clock = Primary(8), Hanging(), FakeClock()
    with running_host(store, primary, threads=1, clock=clock, release=store.go.set) as host:
        host.submit(make_job(primary, IoKind.STORE, [0], deadline=clock() + 1))
        assert store.entered.acquire(timeout=10)
        held = HeldStarts(monkeypatch)
        host.submit(make_job(primary, IoKind.LOAD, [1], job_id=1, deadline=clock() + 9))
        clock.advance(1)
        for _ in range(5):
            assert host.poll() == []
        assert until(lambda: bool(held.held))
        assert held.own == []
        held.release()
        assert outcome_names(finish(host)[0].outcomes) == ["ABSENT"]
        assert len(held.held) == 1


def test_no_more_threads_are_asked_for_than_there_is_work(held: HeldStarts) -> None:
    primary = Primary(8)
    with running_host(DictStore(), primary, threads=8, release=held.release) as host:
        host.submit(make_job(primary, IoKind.STORE, [0]))
        host.submit(make_job(primary, IoKind.STORE, [1], job_id=1))
        for _ in range(20):
            host.poll()
        assert len(host._threads.running()) == 2
        held.release()
        finish(host, 2)


def test_closing_while_starts_are_held_up_runs_nothing_and_leaves_nothing(
    held: HeldStarts,
) -> None:
    primary, ran, clock = Primary(8), list[str](), FakeClock()
    store = DictStore()
    with running_host(store, primary, threads=4, clock=clock, release=held.release) as host:
        host.submit(make_job(primary, IoKind.STORE, range(4)))
        background = task(host, ran, "background", background=True)
        lookup = task(host, ran, "lookup", lookup=True)
        assert until(lambda: held.held == ["kv-t-io-0"])
        assert not host.close(clock()), "the thread that is about to start is one to wait for"
        results = host.poll()
        assert [outcome_names(result.outcomes) for result in results] == [["TemporaryStoreError"] * 4]
        assert isinstance(background[0], TemporaryStoreError)
        assert "closing" in str(background[0])
        held.release()
        assert host.close(clock() + 10)
        host.poll()
        assert isinstance(lookup[0], TemporaryStoreError)
    assert ran == []
    assert store.calls == []
    assert held.own == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-t-")]
