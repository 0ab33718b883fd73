"""The scheduler's thread never waits for the start of an I/O thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.medium.io_fakes import STORE, Primary, all_done, finish, make_job, outcome_names, running_host
from tests.thread_limit import HeldStarts
from tiering.errors import PermanentStoreError
from tiering.medium.host import IoHost
from tiering.medium.side import IoTask
from tiering.testing.clock import FakeClock, until
from tiering.testing.faults import DictStore


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldStarts]:
    starts = HeldStarts(monkeypatch)
    yield starts
    starts.release()


def task(host: IoHost, ran: list[str], name: str, *, lookup: bool = False) -> list[object]:
    """Run a task that notes its name in ``ran``; the returned list receives its error, or None."""
    seen: list[object] = []
    host.run(IoTask(name, lambda: ran.append(name), lambda result, error: seen.append(error), lookup))
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
            host.submit(make_job(primary, STORE, range(4), job_id=job_id))
        lookup = task(host, ran, "lookup", lookup=True)
        plain = task(host, ran, "plain")
        assert host.poll() == []
        assert until(lambda: sorted(held.held) == ["kv-t-io-0", "kv-t-lookup-0"])
        assert (held.own, ran, lookup, plain) == ([], [], [], [])
        held.release()
        assert all(all_done(result.outcomes) for result in finish(host, 3))
        assert end_by_polls(host, lookup, plain)
        assert (lookup, plain) == ([None], [None])
    assert sorted(ran) == ["lookup", "plain"]


def test_closing_while_starts_are_held_up_runs_nothing_and_leaves_nothing(
    held: HeldStarts,
) -> None:
    primary, ran, clock = Primary(8), list[str](), FakeClock()
    store = DictStore()
    with running_host(store, primary, threads=4, clock=clock, release=held.release) as host:
        host.submit(make_job(primary, STORE, range(4)))
        plain = task(host, ran, "plain")
        lookup = task(host, ran, "lookup", lookup=True)
        assert until(lambda: sorted(held.held) == ["kv-t-io-0", "kv-t-lookup-0"])
        assert not host.close(clock()), "the thread that is about to start is one to wait for"
        results = host.poll()
        assert [outcome_names(result.outcomes) for result in results] == [["TemporaryStoreError"] * 4]
        held.release()
        assert host.close(clock() + 10)
        host.poll()
        assert [type(error) for error in (*plain, *lookup)] == [PermanentStoreError] * 2
    assert ran == []
    assert store.calls == []
    assert held.own == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-t-")]
