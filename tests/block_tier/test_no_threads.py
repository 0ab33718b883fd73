"""In a process that cannot start threads, all work fails for now and succeeds once threads can start."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.block_tier.fakes import FakeStore, make_context
from tests.medium.io_fakes import STORE, Primary, all_done, finish, make_job, outcome_names, running_host
from tests.thread_limit import ThreadLimit
from tiering.epochs.opener import Opener
from tiering.errors import TemporaryStoreError
from tiering.medium.side import IoTask
from tiering.runtime.pool import RETRY_SECONDS
from tiering.testing.clock import FakeClock, until
from tiering.testing.faults import DictStore


def test_a_task_without_a_thread_ends_with_a_temporary_error(thread_limit: ThreadLimit) -> None:
    seen: list[tuple[object, BaseException | None]] = []
    task = IoTask("recovery", lambda: 42, lambda result, error: seen.append((result, error)))
    clock = FakeClock()
    with running_host(DictStore(), Primary(1), clock=clock) as host:
        thread_limit.reach()
        host.run(task)
        assert seen == []
        assert until(lambda: host.poll() or seen)
        ((result, error),) = seen
        assert result is None
        assert isinstance(error, TemporaryStoreError)
        assert "ulimit -u" in str(error)
        assert "memory (ulimit -v" in str(error)
        thread_limit.leave()
        clock.advance(RETRY_SECONDS)
        host.run(task)
        assert until(lambda: host.poll() or len(seen) == 2)
        assert seen[1] == (42, None)


def test_jobs_and_tasks_without_any_thread_fail_at_once_and_later_ones_are_done(thread_limit: ThreadLimit) -> None:
    clock, primary, failed = FakeClock(), Primary(4), []
    with running_host(DictStore(), primary, clock=clock) as host:
        thread_limit.reach()
        for job_id in range(20):
            host.submit(make_job(primary, STORE, range(4), job_id=job_id))
        host.run(IoTask("probe", lambda: 1, lambda result, error: failed.append(error)))
        assert [outcome_names(result.outcomes) for result in finish(host, 20)] == [["TemporaryStoreError"] * 4] * 20
        assert until(lambda: host.poll() or failed)
        assert isinstance(failed[0], TemporaryStoreError)
        assert len(thread_limit.refused) == 1, "one attempt in so short a time, however many jobs there are"
        thread_limit.leave()
        clock.advance(RETRY_SECONDS)
        host.submit(make_job(primary, STORE, range(4)))
        assert all_done(finish(host)[0].outcomes)


def test_threads_that_are_missing_are_started_when_they_can_be(thread_limit: ThreadLimit) -> None:
    clock, primary, gate = FakeClock(), Primary(8), threading.Event()

    class Gated(DictStore):
        waiting = 0

        def put_one(self, block: object) -> None:
            Gated.waiting += 1
            gate.wait()

    with running_host(Gated(), primary, threads=4, clock=clock, release=gate.set) as host:
        thread_limit.reach("io-1", "io-2", "io-3")
        host.submit(make_job(primary, STORE, range(8)))
        assert until(lambda: Gated.waiting == 1 and bool(thread_limit.refused))
        assert host.poll() == []
        thread_limit.leave()

        def started() -> bool:
            # The attempt that was refused may not have ended yet.
            clock.advance(RETRY_SECONDS)
            host.run(IoTask("look", lambda: None, lambda result, error: None))
            host.poll()
            return Gated.waiting == 4

        assert until(started)
        gate.set()
        assert all_done(finish(host)[0].outcomes)


def test_the_log_tells_of_the_limit_once(thread_limit: ThreadLimit, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    thread_limit.reach()
    with caplog.at_level(logging.ERROR, "kv_tiering.io"), running_host(DictStore(), Primary(1), clock=clock) as host:
        for attempt in range(50):
            clock.advance(RETRY_SECONDS)
            host.run(IoTask("open", lambda: None, lambda result, error: None))
            assert until(lambda attempt=attempt: len(thread_limit.refused) > attempt and not host._threads.starting)  # type: ignore[misc]
            host.poll()
    assert len(caplog.records) == 1


def test_a_store_is_closed_although_no_thread_can_be_started_at_first(thread_limit: ThreadLimit) -> None:
    store = FakeStore()
    thread_limit.refuse = lambda name: len(thread_limit.refused) < 3
    Opener(make_context(FakeClock()), store).close(10.0)
    assert (store.closed, len(thread_limit.refused)) == (1, 3)


def test_a_store_that_no_thread_can_be_had_for_is_left_to_the_end_of_the_process(
    thread_limit: ThreadLimit, caplog: pytest.LogCaptureFixture
) -> None:
    store = FakeStore()
    thread_limit.reach()
    Opener(make_context(FakeClock()), store).close(0.0)
    assert store.closed == 0
    assert "left to the end of the process" in caplog.text
