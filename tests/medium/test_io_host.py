"""The I/O host: distribution and order of jobs, one report per job, and shutdown."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from tests.medium.io_fakes import LOAD, PAGE, STORE, Primary, all_done, finish, make_job, outcome_names, running_host
from tests.thread_limit import ThreadLimit
from tiering.errors import OverdueError, PermanentStoreError, TemporaryStoreError
from tiering.medium import host as io_host
from tiering.medium.block_store import BlockIO, BlockStore, Done, Outcome, StoreTraits
from tiering.medium.host import LOOKUP_THREADS, SINGLE_UNIT_BYTES, TASK_THREADS, IoHost
from tiering.medium.layers.breaker import BreakerState
from tiering.medium.side import IoTask
from tiering.runtime.depth import AUTO_DEPTH
from tiering.testing.chaos import ChaosLayer, ChaosPlan, Fault
from tiering.testing.clock import FakeClock, until
from tiering.testing.faults import DictStore


class GatedStore(DictStore):
    """A store whose batches wait for ``gate``; ``waiting`` is the number of waiting batches."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.waiting = 0
        self._count = threading.Lock()

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        self._wait()
        return super().put(blocks)

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        self._wait()
        return super().get(blocks)

    def _wait(self) -> None:
        with self._count:
            self.waiting += 1
        self.gate.wait()
        with self._count:
            self.waiting -= 1


def places_of(store: DictStore, operation: str) -> list[tuple[object, ...]]:
    return [places for name, places in store.calls if name == operation]


def run_task(
    host: IoHost, run: Callable[[], object], *, background: bool = False
) -> list[tuple[object, BaseException | None]]:
    """Run a task; the returned list receives the argument of its ``on_done``."""
    seen: list[tuple[object, BaseException | None]] = []
    host.run(IoTask("task", run, lambda result, error: seen.append((result, error)), background))
    return seen


# ---------------------------------------------------------------------------------------------------------- round trips


def test_stored_blocks_are_loaded_into_other_rows() -> None:
    primary, store = Primary(16), DictStore()
    blocks = [primary.block(row) for row in range(8)]
    with running_host(store, primary) as host:
        host.submit(make_job(primary, STORE, range(8)))
        (stored,) = finish(host)
        host.submit(make_job(primary, LOAD, range(8), rows=range(8, 16)))
        (loaded,) = finish(host)
    assert all_done(stored.outcomes)
    assert all_done(loaded.outcomes)
    assert loaded.moved_bytes == 8 * primary.size
    assert [primary.block(row) for row in range(8, 16)] == blocks


def test_outcomes_are_per_block_and_co_indexed_with_the_keys() -> None:
    primary, store = Primary(8), DictStore()
    with running_host(store, primary) as host:
        host.submit(make_job(primary, STORE, [5, 1, 3]))
        finish(host)
        store.frames[3][150] ^= 1
        host.submit(make_job(primary, LOAD, [7, 5, 3, 1]))
        (result,) = finish(host)
    assert outcome_names(result.outcomes) == ["ABSENT", "DONE", "FrameError", "DONE"]
    assert result.moved_bytes == 2 * primary.size


def test_a_job_without_blocks_is_reported() -> None:
    primary = Primary(1)
    with running_host(DictStore(), primary) as host:
        host.submit(make_job(primary, LOAD, []))
        (result,) = host.poll()
    assert (result.outcomes, result.moved_bytes) == ([], 0)


# ----------------------------------------------------------------------------------------------- spreading and ordering


def test_one_job_is_spread_over_all_threads() -> None:
    primary, store = Primary(64), GatedStore()
    with running_host(store, primary, threads=4, release=store.gate.set) as host:
        host.submit(make_job(primary, STORE, range(64)))
        assert until(lambda: store.waiting == 4)
        store.gate.set()
        (result,) = finish(host)
    assert all_done(result.outcomes)
    assert sorted(places_of(store, "put")) == [tuple(range(start, start + 16)) for start in (0, 16, 32, 48)]


def test_jobs_are_cut_less_while_others_wait() -> None:
    primary, store = Primary(64), GatedStore()
    with running_host(store, primary, threads=4, release=store.gate.set) as host:
        host.lanes.stores.finder.depth = 1
        host.submit(make_job(primary, STORE, [0]))
        assert until(lambda: store.waiting == 1)
        for job_id in range(1, 6):
            host.submit(make_job(primary, STORE, range(8 * job_id, 8 * job_id + 8), job_id=job_id))
        host.lanes.stores.finder.depth = 4
        store.gate.set()
        finish(host, 6)
    sizes = sorted(len(places) for places in places_of(store, "put"))
    assert 8 in sizes, "a job is moved as a whole while as many wait as there are places"
    assert sizes[1] < 8, "the last jobs are cut"


def test_a_burst_of_jobs_wakes_one_thread_which_wakes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    primary, store = Primary(8), GatedStore()
    with running_host(store, primary, threads=1, release=store.gate.set) as host:
        host.submit(make_job(primary, STORE, [0]))
        assert until(lambda: store.waiting == 1)
        woken: list[object] = []
        run = host._threads.run

        def noted(work: Callable[[], object], refused: Callable[[TemporaryStoreError], object]) -> None:
            woken.append(work)
            run(work, refused)

        monkeypatch.setattr(host._threads, "run", noted)
        host.lanes.stores.finder.depth = 2
        for job_id in range(1, 8):
            host.submit(make_job(primary, STORE, [job_id], job_id=job_id))
        assert until(lambda: store.waiting == 2)
        assert len(woken) <= 2
        store.gate.set()
        finish(host, 8)


def test_a_direction_runs_no_more_units_than_its_depth() -> None:
    primary, store = Primary(64), GatedStore()
    with running_host(store, primary, threads="auto", release=store.gate.set) as host:
        assert (host.load_depth, host.store_depth) == (AUTO_DEPTH.start, AUTO_DEPTH.start)
        host.lanes.stores.finder.depth = 3
        host.submit(make_job(primary, STORE, range(32)))
        host.submit(make_job(primary, STORE, range(32), job_id=1))
        assert until(lambda: store.waiting == 3)
        host.submit(make_job(primary, LOAD, range(32), rows=range(32, 64), job_id=2))
        assert until(lambda: store.waiting == AUTO_DEPTH.start)
        assert len(host.lanes.stores.running) == 3
        host.lanes.loads.finder.depth = 12
        store.gate.set()
        finish(host, 3)


def test_a_greater_depth_uses_the_threads_that_it_needs() -> None:
    primary, store = Primary(64), GatedStore()
    with running_host(store, primary, threads="auto", release=store.gate.set) as host:
        host.submit(make_job(primary, STORE, range(64)))
        host.submit(make_job(primary, STORE, range(64), job_id=1))
        assert until(lambda: store.waiting == AUTO_DEPTH.start)
        host.lanes.stores.finder.depth = 14
        assert host.poll() == []
        assert until(lambda: store.waiting == 14)
        store.gate.set()
        finish(host, 2)


def test_a_thread_that_cannot_be_started_makes_the_depth_smaller(thread_limit: ThreadLimit) -> None:
    primary, store = Primary(8), GatedStore()
    with running_host(store, primary, threads="auto", release=store.gate.set) as host:
        thread_limit.reach("io-3")
        host.start(0.0, lookups=False)
        assert until(lambda: host._threads.shortage is not None)
        assert host.poll() == []
        host.submit(make_job(primary, STORE, range(8)))
        assert until(lambda: store.waiting == host.lanes.startable == 3)
        store.gate.set()
        assert all_done(finish(host)[0].outcomes)
        assert (host.load_depth, host.store_depth) == (AUTO_DEPTH.start, 3)


def test_a_unit_is_no_larger_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    primary, store = Primary(40), DictStore()
    monkeypatch.setattr(io_host, "BATCH_UNIT_BYTES", 4 * primary.size)
    with running_host(store, primary, threads=2) as host:
        host.submit(make_job(primary, STORE, range(40)))
        finish(host)
    assert {len(places) for places in places_of(store, "put")} == {4}
    assert {place for places in places_of(store, "put") for place in places} == set(range(40))


@pytest.mark.parametrize(("size", "least_put", "least_get"), [(PAGE, 16, 8), (1 << 20, 2, 2), (4 << 20, 1, 1)])
def test_a_job_is_not_cut_into_units_that_cost_more_than_their_blocks(
    size: int, least_put: int, least_get: int
) -> None:
    primary, store = Primary(16, size), DictStore()
    with running_host(store, primary, threads=16, single_units=False) as host:
        for job_id, (load, operation, least) in enumerate(((STORE, "put", least_put), (LOAD, "get", least_get))):
            host.submit(make_job(primary, load, range(16), job_id=job_id))
            finish(host)
            assert {len(places) for places in places_of(store, operation)} == {least}


def test_a_store_beside_a_load_is_cut_as_small_as_the_load() -> None:
    primary, store = Primary(32), GatedStore()
    with running_host(store, primary, threads=4, single_units=False, release=store.gate.set) as host:
        host.submit(make_job(primary, LOAD, range(8)))
        assert until(lambda: store.waiting == 1)
        host.submit(make_job(primary, STORE, range(16), job_id=1))
        assert until(lambda: store.waiting == 3)
        store.gate.set()
        finish(host, 2)
    assert {len(places) for places in places_of(store, "put")} == {8}


def test_a_medium_that_moves_single_blocks_gets_small_units() -> None:
    class _Single(BlockStore):
        traits = StoreTraits(medium="SINGLE")

        def put_one(self, block: BlockIO) -> None: ...

        def get_one(self, block: BlockIO) -> Done:
            return Done.ABSENT

    primary = Primary(1)
    with running_host(_Single(), primary, single_units=False) as host:
        assert (host.unit_bytes, host.least_unit_bytes) == (SINGLE_UNIT_BYTES, 0)


def test_units_start_at_the_head_of_the_prefix_and_are_ordered_by_slot_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    primary, store = Primary(6), DictStore()
    monkeypatch.setattr(io_host, "BATCH_UNIT_BYTES", 3 * primary.size)
    with running_host(store, primary, threads=1) as host:
        host.submit(make_job(primary, STORE, range(6), places=[12, 10, 11, 2, 0, 1]))
        finish(host)
    assert places_of(store, "put") == [(10, 11, 12), (0, 1, 2)]


def test_names_keep_the_order_of_the_prefix() -> None:
    primary, store = Primary(3), DictStore()
    with running_host(store, primary, threads=1) as host:
        host.submit(make_job(primary, STORE, range(3), places=["c", "a", "b"]))
        finish(host)
    assert places_of(store, "put") == [("c", "a", "b")]


def test_loads_go_before_stores_that_came_earlier() -> None:
    primary, store = Primary(8), GatedStore()
    with running_host(store, primary, threads=1, release=store.gate.set) as host:
        host.submit(make_job(primary, STORE, [0]))
        assert until(lambda: store.waiting == 1)
        host.submit(make_job(primary, STORE, [1], job_id=1))
        host.submit(make_job(primary, LOAD, [2], job_id=2))
        store.gate.set()
        results = finish(host, 3)
    assert [result.job_id for result in results] == [0, 2, 1]


def test_tasks_do_not_wait_for_jobs() -> None:
    primary, store = Primary(4), GatedStore()
    with running_host(store, primary, threads=1, release=store.gate.set) as host:
        for job_id in range(3):
            host.submit(make_job(primary, STORE, [job_id], job_id=job_id))
        assert until(lambda: store.waiting == 1)
        seen = run_task(host, lambda: store.waiting)
        assert until(lambda: host.poll() or seen)
        assert seen == [(1, None)]
        store.gate.set()
        finish(host, 3)


def test_a_thread_that_hangs_does_not_stop_the_others() -> None:
    primary, store = Primary(8), ChaosLayer(DictStore())
    store.inject(Fault.HANG, gets=1)
    with running_host(store, primary, threads=2, release=store.release) as host:
        host.submit(make_job(primary, LOAD, [0]))
        assert until(lambda: store.hanging)
        host.submit(make_job(primary, STORE, range(1, 8), job_id=1))
        (result,) = finish(host)
        assert result.job_id == 1


# ------------------------------------------------------------------------------------------------- exactly once, always


@pytest.mark.parametrize("seed", range(3))
def test_every_job_is_reported_once_whatever_the_medium_does(seed: int) -> None:
    plan = ChaosPlan(
        puts={
            Fault.TEMPORARY: 0.2,
            Fault.PERMANENT: 0.1,
            Fault.OUT_OF_SPACE: 0.1,
            Fault.TORN: 0.1,
            Fault.BIT_FLIP: 0.1,
        },
        gets={Fault.TEMPORARY: 0.2, Fault.PERMANENT: 0.1, Fault.BIT_FLIP: 0.2, Fault.SWAP: 0.2},
    )
    primary, store = Primary(64, seed=seed), ChaosLayer(DictStore(), seed=seed, plan=plan)
    blocks = [primary.block(row) for row in range(32)]
    with running_host(store, primary, threads=4, attempts=2, failures=1000) as host:
        for job_id in range(40):
            kind = STORE if job_id % 2 == 0 else LOAD
            offset = 8 * (job_id // 2 % 4)
            numbers = range(offset, offset + 8)
            rows = numbers if kind is STORE else range(32 + offset, 40 + offset)
            host.submit(make_job(primary, kind, numbers, rows=rows, job_id=job_id))
            (result,) = finish(host)
            assert result.job_id == job_id
            assert len(result.outcomes) == 8
            if kind is LOAD:
                for row, number, outcome in zip(rows, numbers, result.outcomes, strict=True):
                    assert outcome is not Done.DONE or primary.block(row) == blocks[number], f"seed {seed}"
        assert host.poll() == []


def test_an_exception_of_a_store_fails_its_blocks_and_the_thread_lives(caplog: pytest.LogCaptureFixture) -> None:
    class _Broken(DictStore):
        def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
            raise ZeroDivisionError("a bug")

    primary = Primary(4)
    with caplog.at_level(logging.ERROR, "kv_tiering.io"), running_host(_Broken(), primary, threads=1) as host:
        for job_id in range(2):
            host.submit(make_job(primary, STORE, range(4), job_id=job_id))
            (result,) = finish(host)
            assert outcome_names(result.outcomes) == ["PermanentStoreError"] * 4
            assert str(result.outcomes[0]) == "ZeroDivisionError: a bug"
    assert len(caplog.records) == 1


def test_a_store_that_answers_for_too_few_blocks_fails_them_all() -> None:
    class _Short(DictStore):
        def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
            return [Done.DONE]

    primary = Primary(4)
    with running_host(_Short(), primary, threads=1) as host:
        host.submit(make_job(primary, STORE, range(4)))
        assert outcome_names(finish(host)[0].outcomes) == ["PermanentStoreError"] * 4


def test_a_malformed_job_is_reported_as_failed() -> None:
    primary = Primary(4)
    with running_host(DictStore(), primary, threads=1) as host:
        host.submit(make_job(primary, LOAD, [1, 2], rows=[0, 99]))
        host.submit(make_job(primary, LOAD, [1, 2], rows=[0], job_id=1))
        host.submit(make_job(primary, LOAD, [1, 2], places=[0], job_id=2))
        results = finish(host, 3)
    assert all(outcome_names(result.outcomes) == ["PermanentStoreError"] * 2 for result in results)


# -------------------------------------------------------------------------------------------- deadlines and the breaker


def test_an_overdue_job_ends_although_every_thread_hangs() -> None:
    clock, primary, store = FakeClock(), Primary(4), GatedStore()
    with running_host(store, primary, threads=1, clock=clock, release=store.gate.set) as host:
        host.submit(make_job(primary, LOAD, [0]))
        assert until(lambda: store.waiting == 1)
        host.submit(make_job(primary, LOAD, [1, 2], job_id=1, deadline=clock() + 5))
        host.submit(make_job(primary, STORE, [3], job_id=2, deadline=clock() + 9))
        assert host.poll() == []
        clock.advance(5)
        (result,) = host.poll()
        assert result.job_id == 1
        assert outcome_names(result.outcomes) == ["OverdueError"] * 2
        store.gate.set()
        assert sorted(result.job_id for result in finish(host, 2)) == [0, 2]


def test_other_threads_go_on_while_some_hang_beyond_their_deadline() -> None:
    clock, primary, store = FakeClock(), Primary(4), ChaosLayer(DictStore())
    store.inject(Fault.HANG, gets=2)
    with running_host(store, primary, threads=2, clock=clock, release=store.release) as host:
        host.submit(make_job(primary, LOAD, [0, 1], deadline=clock() + 5))
        assert until(lambda: store.hanging == 2)
        host.submit(make_job(primary, STORE, [2, 3], job_id=1))
        assert host.poll() == []
        clock.advance(5)
        (result,) = finish(host)
        assert result.job_id == 1
        store.release()
        assert outcome_names(finish(host)[0].outcomes) == ["ABSENT", "ABSENT"]
        host.submit(make_job(primary, STORE, range(4), job_id=2))
        host.submit(make_job(primary, STORE, range(4), job_id=3))
        finish(host, 2)


def test_a_job_under_way_is_not_reported_at_its_deadline_but_at_its_end() -> None:
    clock, primary, store = FakeClock(), Primary(1), GatedStore()
    with running_host(store, primary, clock=clock, release=store.gate.set) as host:
        host.submit(make_job(primary, STORE, [0], deadline=clock() + 5))
        assert until(lambda: store.waiting == 1)
        clock.advance(10)
        assert host.poll() == []
        store.gate.set()
        assert all_done(finish(host)[0].outcomes)


def test_temporary_errors_are_retried_inside_the_job() -> None:
    primary, store = Primary(4), ChaosLayer(DictStore())
    store.inject(Fault.TEMPORARY, puts=6)
    with running_host(store, primary, threads=1, attempts=3) as host:
        host.submit(make_job(primary, STORE, range(4)))
        assert all_done(finish(host)[0].outcomes)
    assert host.stats.retries == 6


def test_the_breaker_opens_fails_everything_at_once_and_closes_after_a_probe() -> None:
    clock, primary, store = FakeClock(), Primary(4), ChaosLayer(DictStore())
    store.inject(Fault.PERMANENT, puts=3)
    with running_host(store, primary, threads=1, clock=clock, failures=3) as host:
        for job_id in range(3):
            host.submit(make_job(primary, STORE, [0], job_id=job_id))
            finish(host)
        assert host.breakers.writes.state is BreakerState.OPEN
        host.submit(make_job(primary, STORE, [1, 2]))
        assert outcome_names(finish(host)[0].outcomes) == ["BreakerOpenError"] * 2
        assert sum(store.injected.values()) == 3
        clock.advance(1.0)
        host.submit(make_job(primary, STORE, [3]))
        assert all_done(finish(host)[0].outcomes)
        assert host.breakers.state is BreakerState.CLOSED


def test_jobs_that_wait_fail_when_the_breaker_is_tripped_although_every_thread_hangs() -> None:
    primary, store = Primary(4), GatedStore()
    with running_host(store, primary, threads=1, release=store.gate.set) as host:
        host.submit(make_job(primary, LOAD, [0]))
        assert until(lambda: store.waiting == 1)
        host.submit(make_job(primary, STORE, [1, 2], job_id=1))
        host.breakers.trip("too many rows are held")
        (result,) = host.poll()
        assert outcome_names(result.outcomes) == ["BreakerOpenError"] * 2


# ---------------------------------------------------------------------------------------------------------------- tasks


def test_a_tasks_result_reaches_its_callback_on_the_polling_thread() -> None:
    ran_on: list[threading.Thread] = []
    primary = Primary(1)
    with running_host(DictStore(), primary) as host:

        def work() -> int:
            ran_on.append(threading.current_thread())
            return 42

        seen = run_task(host, work)
        assert host.wait(10)
        assert seen == []
        assert host.poll() == []
        assert seen == [(42, None)]
    assert ran_on[0] is not threading.current_thread()


def test_a_tasks_exception_reaches_its_callback() -> None:
    def fails() -> None:
        raise TemporaryStoreError("unreachable")

    with running_host(DictStore(), Primary(1)) as host:
        seen = run_task(host, fails)
        assert host.wait(10)
        host.poll()
    ((result, error),) = seen
    assert result is None
    assert isinstance(error, TemporaryStoreError)


def test_a_callback_that_raises_is_logged_and_costs_no_result(caplog: pytest.LogCaptureFixture) -> None:
    def fails(result: object, error: BaseException | None) -> None:
        raise ZeroDivisionError

    primary = Primary(1)
    with caplog.at_level(logging.ERROR, "kv_tiering.io"), running_host(DictStore(), primary) as host:
        host.run(IoTask("task", lambda: None, fails))
        host.submit(make_job(primary, STORE, [0]))
        assert len(finish(host)) == 1
        assert until(lambda: host.poll() or caplog.records)


def test_a_task_delays_no_job() -> None:
    gate = threading.Event()
    primary = Primary(1)
    with running_host(DictStore(), primary, threads=1, release=gate.set) as host:
        seen = run_task(host, gate.wait)
        host.submit(make_job(primary, STORE, [0]))
        assert all_done(finish(host)[0].outcomes)
        assert seen == []


# ------------------------------------------------------------------------------------------- waiting, draining, closing


def test_waiting_ends_when_something_can_be_polled() -> None:
    primary = Primary(1)
    with running_host(DictStore(), primary) as host:
        assert not host.wait(0)
        host.submit(make_job(primary, STORE, [0]))
        assert host.wait(10)
        assert len(host.poll()) == 1
        assert not host.wait(0)


def test_draining_waits_for_jobs_and_leaves_their_results_to_poll() -> None:
    primary, store = Primary(4), GatedStore()
    clock = FakeClock()
    with running_host(store, primary, clock=clock, release=store.gate.set) as host:
        assert host.drain(clock())
        host.submit(make_job(primary, STORE, range(4)))
        assert not host.drain(clock() + 0.05)
        store.gate.set()
        assert host.drain(clock() + 10)
        assert len(host.poll()) == 1


def test_closing_ends_every_thread_and_fails_what_was_not_begun() -> None:
    primary, store, clock = Primary(4), GatedStore(), FakeClock()
    with running_host(store, primary, threads=1, clock=clock, release=store.gate.set) as host:
        host.submit(make_job(primary, STORE, [0]))
        assert until(lambda: store.waiting == 1)
        host.submit(make_job(primary, STORE, [1, 2], job_id=1))
        assert not host.close(clock())
        (dropped,) = host.poll()
        assert outcome_names(dropped.outcomes) == ["TemporaryStoreError"] * 2
        store.gate.set()
        assert host.close(clock() + 10)
        assert all_done(host.poll()[0].outcomes)
        assert host.close(clock())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-t-")]


def test_closing_says_false_while_a_thread_hangs_and_true_once_it_is_released() -> None:
    primary, store, clock = Primary(2), ChaosLayer(DictStore()), FakeClock()
    store.inject(Fault.HANG, gets=1)
    with running_host(store, primary, clock=clock, release=store.release) as host:
        host.submit(make_job(primary, LOAD, [0]))
        assert until(lambda: store.hanging)
        assert not host.close(clock() + 0.05)
        store.release()
        assert host.close(clock() + 10)
        assert outcome_names(host.poll()[0].outcomes) == ["ABSENT"]


def test_closing_waits_for_background_tasks_which_can_see_it_coming() -> None:
    primary, clock, begun = Primary(1), FakeClock(), threading.Event()

    def wait() -> bool:
        begun.set()
        return host.stopping.wait(30)

    with running_host(DictStore(), primary, clock=clock) as host:
        seen = run_task(host, wait)
        assert begun.wait(10)
        assert host.close(clock() + 10)
        host.poll()
        assert seen == [(True, None)]


def test_a_retry_does_not_keep_a_tier_from_closing() -> None:
    primary, store, clock = Primary(1), ChaosLayer(DictStore()), FakeClock()
    waits = threading.Event()
    with running_host(store, primary, clock=clock, attempts=4) as host:
        retry = host.store

        def sleep(seconds: float) -> None:
            waits.set()
            host.stopping.wait(60)

        retry._sleep = sleep  # type: ignore[attr-defined]
        store.inject(Fault.TEMPORARY, puts=4)
        host.submit(make_job(primary, STORE, [0]))
        assert waits.wait(10)
        assert host.close(clock() + 10)
        assert outcome_names(host.poll()[0].outcomes) == ["TemporaryStoreError"]


def test_what_comes_after_closing_is_reported_as_failed() -> None:
    primary, clock = Primary(1), FakeClock()
    with running_host(DictStore(), primary, clock=clock) as host:
        assert host.close(clock() + 10)
        host.submit(make_job(primary, STORE, [0]))
        seen = run_task(host, lambda: None)
        (result,) = host.poll()
    assert outcome_names(result.outcomes) == ["PermanentStoreError"]
    assert isinstance(seen[0][1], PermanentStoreError)


def test_all_threads_are_started_before_there_is_work() -> None:
    before = threading.active_count()
    with running_host(DictStore(), Primary(1), threads=2) as host:
        assert threading.active_count() == before
        host.start(time.monotonic(), lookups=True)
        assert until(lambda: threading.active_count() == before + 2 + 2 + TASK_THREADS + LOOKUP_THREADS)


def test_the_clock_of_the_context_is_used_unless_another_is_given() -> None:
    clock = FakeClock(5.0)
    primary = Primary(1)
    with running_host(DictStore(), primary, clock=clock) as host:
        host.submit(make_job(primary, STORE, [0], deadline=5.0))
        assert outcome_names(finish(host)[0].outcomes) == ["OverdueError"]


# ------------------------------------------------------------------------------------------------------------- lookups


def lookup(host: IoHost, run: Callable[[], object], expires: float = float("inf")) -> list[BaseException | None]:
    """Run a lookup; the returned list receives its error, or None."""
    ended: list[BaseException | None] = []
    host.run(IoTask("probe", run, lambda result, error: ended.append(error), lookup=True, expires=expires))
    return ended


def polled(host: IoHost, ended: Sequence[object], count: int = 1) -> bool:
    def enough() -> bool:
        host.poll()
        return len(ended) == count

    return until(enough)


def test_lookups_do_not_wait_for_jobs_that_occupy_all_threads() -> None:
    primary, store = Primary(8), GatedStore()
    with running_host(store, primary, threads=2) as host:
        host.submit(make_job(primary, STORE, range(2)))
        host.submit(make_job(primary, STORE, range(2, 4)))
        assert until(lambda: store.waiting == 2)
        assert polled(host, lookup(host, lambda: None))
        store.gate.set()
        finish(host, 2)


def test_jobs_do_not_wait_for_lookups_that_hang() -> None:
    primary, gate = Primary(8), threading.Event()
    with running_host(DictStore(), primary, threads=1) as host:
        ended = [lookup(host, gate.wait) for _ in range(LOOKUP_THREADS + 3)]
        host.submit(make_job(primary, STORE, range(2)))
        (stored,) = finish(host)
        assert all_done(stored.outcomes)
        assert not any(ended)
        gate.set()
        assert all(polled(host, one) for one in ended)


def test_lookups_that_run_at_once_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_host, "LOOKUP_GATHERING", 60.0)
    gate = threading.Event()
    with running_host(DictStore(), Primary(8)) as host:
        slow, quick = lookup(host, gate.wait), lookup(host, lambda: None)
        assert not host.wait(0.2), "the quick one waits for the slow one"
        gate.set()
        assert host.wait(60.0)
        host.poll()
        assert (len(quick), len(slow)) == (1, 1)


def test_a_lookup_waits_for_others_until_its_deadline_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_host, "LOOKUP_GATHERING", 600.0)
    gate, clock = threading.Event(), FakeClock()
    with running_host(DictStore(), Primary(8), clock=clock) as host:
        slow = lookup(host, gate.wait)
        ends_late = lookup(host, lambda: clock.advance(2), expires=clock() + 1)
        assert polled(host, ends_late)
        gate.set()
        assert polled(host, slow)


def test_a_lookup_waits_until_its_own_deadline_beside_one_that_may_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_host, "LOOKUP_GATHERING", 600.0)
    gate, clock = threading.Event(), FakeClock()
    with running_host(DictStore(), Primary(8), clock=clock) as host:
        slow, patient = lookup(host, gate.wait), lookup(host, lambda: None)
        assert not host.wait(0.2), "the patient one waits for the slow one"
        ends_late = lookup(host, lambda: clock.advance(2), expires=clock() + 1)
        assert polled(host, ends_late)
        assert patient
        gate.set()
        assert polled(host, slow)


def test_a_lookup_does_not_wait_long_for_one_that_hangs() -> None:
    gate = threading.Event()
    with running_host(DictStore(), Primary(8)) as host:
        hangs = lookup(host, gate.wait)
        for _ in range(3):
            assert polled(host, lookup(host, lambda: None))
        assert not hangs
        gate.set()
        assert polled(host, hangs)


def test_a_lookup_that_nothing_waits_for_any_more_is_not_begun() -> None:
    primary, gate, clock = Primary(8), threading.Event(), FakeClock()
    begun: list[int] = []
    with running_host(DictStore(), primary, clock=clock) as host:
        for _ in range(LOOKUP_THREADS):
            lookup(host, gate.wait)
        late = lookup(host, lambda: begun.append(1), expires=clock() + 1)
        timely = lookup(host, lambda: begun.append(2), expires=clock() + 3)
        clock.advance(2)
        gate.set()
        assert polled(host, late)
        assert polled(host, timely)
    assert isinstance(late[0], OverdueError)
    assert begun == [2]
