"""Host copies run off the engine's thread, and a failure in the middle is a result, not an exception."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from tests.copy import kv
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.copy.contract import TransferError
from tiering.copy.host import Direction, HostCopyHandler, runs_of
from tiering.copy.layout import GroupPages, RowLayout
from tiering.errors import ConfigError


class Blocked(HostCopyHandler):
    """A copy that waits for ``gate``, and then fails if ``error`` is set."""

    def __init__(self, *args: object, error: Exception | None = None) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.gate = threading.Event()
        self.error = error
        self.thread: threading.Thread | None = None

    def _copy(self, work: object) -> float:
        self.thread = threading.current_thread()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return super()._copy(work)  # type: ignore[arg-type]


class Counted(HostCopyHandler):
    """A handler that counts the calls that copy."""

    copies = 0

    def _copy(self, work: object) -> float:
        self.copies += 1
        return super()._copy(work)  # type: ignore[arg-type]


def spec(block: int = 1, row: int = 1) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    return GPULoadStoreSpec([block], [1], [0]), CPULoadStoreSpec([row])


def blocked(error: Exception | None = None) -> Blocked:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    return Blocked(cache, kv.make_rows(layout), layout, Direction.STORE, error=error)


def test_the_caller_does_not_wait_for_the_copy() -> None:
    handler = blocked()
    assert handler.transfer_async(1, spec())
    assert handler.get_finished() == []
    handler.gate.set()
    handler.wait([1])
    assert [result.success for result in handler.get_finished()] == [True]
    assert handler.thread is not threading.main_thread()
    handler.shutdown()


def test_a_job_that_is_running_is_not_started_again() -> None:
    handler = blocked()
    assert handler.transfer_async(1, spec())
    assert handler.transfer_async(1, spec(2, 2)) is False
    handler.gate.set()
    handler.shutdown()
    assert len(handler.get_finished()) == 1


def test_a_copy_that_raises_is_a_failed_result(caplog: pytest.LogCaptureFixture) -> None:
    handler = blocked(ValueError("out of order"))
    assert handler.transfer_async(1, spec())
    handler.gate.set()
    handler.wait([1])
    (result,) = handler.get_finished()
    assert not result.success
    assert "copy job 1 failed: out of order" in caplog.text
    handler.shutdown()


def test_small_transfers_of_a_step_are_one_copy_and_a_wrong_one_is_left_out() -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    handler = Counted(cache, rows, layout, Direction.STORE)
    places = {1: (7, 3), 2: (4, 0), 3: (9, 5)}
    jobs = [(job_id, spec(*place)) for job_id, place in places.items()]
    assert handler.transfer_all_async([*jobs, (4, spec(1, 10**6))]) == [4]
    handler.wait([2])
    assert [(result.job_id, result.success) for result in handler.get_finished()] == [(1, True), (2, True), (3, True)]
    assert handler.copies == 1
    for block, row in places.values():
        assert rows[row, : layout.row_bytes].tobytes() == kv.gpu_block(cache, 0, block)
    handler.shutdown()


def test_transfers_beyond_the_bound_are_copied_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    monkeypatch.setattr("tiering.copy.host._TOGETHER_BYTES", 2 * layout.row_bytes)
    handler = Counted(cache, kv.make_rows(layout), layout, Direction.STORE)
    assert handler.transfer_all_async([(job_id, spec(job_id, job_id)) for job_id in range(5)]) == []
    handler.wait(range(5))
    assert [result.transfer_size for result in handler.get_finished()] == [layout.row_bytes] * 5
    assert handler.copies == 3
    handler.shutdown()


def test_a_copy_of_several_transfers_that_raises_fails_them_all() -> None:
    handler = blocked(ValueError("out of order"))
    handler.gate.set()
    assert handler.transfer_all_async([(1, spec()), (2, spec(2, 2))]) == []
    handler.wait([1, 2])
    assert [(result.job_id, result.success) for result in handler.get_finished()] == [(1, False), (2, False)]
    handler.shutdown()


def test_what_a_step_needs_is_copied_in_its_own_thread() -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    rows[:, : layout.row_bytes] = np.arange(len(rows), dtype=np.uint8)[:, None]
    handler = Blocked(cache, rows, layout, Direction.LOAD)
    handler.gate.set()
    handler.transfer_first([(1, spec(7, 3)[::-1]), (2, spec(4, 5)[::-1])])
    assert handler.thread is threading.main_thread()
    assert [set(kv.gpu_block(cache, 0, block)) for block in (7, 4)] == [{3}, {5}]
    results = handler.get_finished()
    assert [(result.job_id, result.success, result.transfer_size) for result in results] == [
        (1, True, layout.row_bytes),
        (2, True, layout.row_bytes),
    ]
    assert all(result.transfer_time is not None for result in results)
    assert handler.get_finished() == []
    with pytest.raises(TransferError):
        handler.transfer_first([(3, spec(7, 10**6)[::-1])])
    handler.shutdown()
    with pytest.raises(TransferError, match="shut down"):
        handler.transfer_first([(4, spec(7, 3)[::-1])])


@pytest.mark.parametrize(
    ("gpu", "rows", "runs"),
    [
        ([4, 5, 6], [7, 8, 9], 1),
        ([2, 1, 0], [3, 4, 5], 1),
        ([1, 2, 3], [4, 2, 0], 1),
        ([5, 9, 8], [1, 3, 5], 2),
        ([0, 0, 7, 9], [1, 2, 3, 4], 3),
        ([3, 5, 7, 9, 2, 1, 0, 8], [5, 6, 7, 8, 2, 1, 0, 9], 3),
    ],
)
def test_pages_at_equal_distances_are_one_copy(gpu: list[int], rows: list[int], runs: int) -> None:
    pages = GroupPages(0, *(np.array(ids, np.int64) for ids in (gpu, rows, [0] * len(gpu))))
    found, places = runs_of(pages), np.arange(10)
    assert [block for blocks, _, _ in found for block in places[blocks].tolist()] == gpu
    assert [row for _, of_rows, _ in found for row in places[of_rows].tolist()] == rows
    assert len(found) == runs


@pytest.mark.parametrize("seed", range(20))
def test_any_pages_are_copied_to_their_own_places(seed: int) -> None:
    dice = random.Random(seed)
    cache = kv.canonical()
    layout = RowLayout.of(cache, dice.choice([1, 1, 3]))
    rows, factor = kv.make_rows(layout), layout.block_size_factor
    most = min(len(cache.tensors[0].tensor) // factor, len(rows))
    first, by, count = dice.randrange(most), dice.choice([-2, -1, 1, 2]), dice.randrange(1, most + 1)
    taken = [(first + number * by) % most for number in range(count)]
    if dice.random() < 0.5:
        taken = dice.sample(range(most), count)
    taken = list(dict.fromkeys(taken))
    blocks = [block * factor + sub for block in dice.sample(range(most), len(taken)) for sub in range(factor)]
    job = GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(taken)
    store = HostCopyHandler(cache, rows, layout, Direction.STORE)
    load = HostCopyHandler(cache, rows, layout, Direction.LOAD)
    before = {block: kv.gpu_block(cache, 0, block) for block in range(len(cache.tensors[0].tensor))}
    untouched = np.delete(rows, taken, axis=0)
    assert store.transfer_at_once([(1, job)]) == []
    assert np.array_equal(np.delete(rows, taken, axis=0), untouched)
    for tensor in cache.tensors:
        tensor.tensor[torch.as_tensor(blocks)] = 0
    load.transfer_first([(2, job[::-1])])
    assert {block: kv.gpu_block(cache, 0, block) for block in before} == before
    store.shutdown()
    load.shutdown()


def test_small_stores_are_made_in_the_thread_of_the_caller_and_a_wrong_one_is_left_out() -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    handler = Blocked(cache, rows, layout, Direction.STORE)
    handler.gate.set()
    assert handler.transfer_at_once([(1, spec(7, 3)), (2, spec(1, 10**6)), (3, spec(4, 5))]) == [2]
    assert handler.thread is threading.main_thread()
    assert [rows[row, : layout.row_bytes].tobytes() for row in (3, 5)] == [kv.gpu_block(cache, 0, b) for b in (7, 4)]
    results = handler.get_finished()
    assert [(result.job_id, result.success, result.transfer_size) for result in results] == [
        (1, True, layout.row_bytes),
        (3, True, layout.row_bytes),
    ]
    assert handler.get_finished() == []
    handler.shutdown()
    assert handler.transfer_at_once([(4, spec(7, 3))]) == [4]


def test_stores_that_would_hold_the_step_up_are_left_to_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    monkeypatch.setattr("tiering.copy.host._FIRST_BYTES", 2 * layout.row_bytes)
    handler = HostCopyHandler(cache, kv.make_rows(layout), layout, Direction.STORE)
    large = GPULoadStoreSpec([1, 2, 3], [3], [0]), CPULoadStoreSpec([1, 2, 3])
    monkeypatch.setattr("tiering.copy.host._AT_ONCE_SECONDS", 1e9)
    assert handler.transfer_at_once([(1, spec(4, 4)), (2, large), (3, spec(5, 5)), (4, spec(6, 6))]) == [2, 4]
    assert handler.transfer_at_once([(2, large), (4, spec(6, 6))]) == [], "as fast as it was"
    monkeypatch.setattr("tiering.copy.host._AT_ONCE_SECONDS", 0.0)
    assert handler.transfer_at_once([(5, spec(7, 7))]) == []
    assert handler.transfer_at_once([(6, spec(8, 8))]) == [6], "all copies were slow"
    assert [result.job_id for result in handler.get_finished()] == [1, 3, 2, 4, 5]
    handler.shutdown()


@pytest.mark.parametrize("bytes_per_second", [0.0, 1e3, 1e5])
def test_one_slow_store_does_not_leave_all_later_ones_to_the_threads(bytes_per_second: float) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    handler = HostCopyHandler(cache, kv.make_rows(layout), layout, Direction.STORE)
    handler._speeds.append(bytes_per_second)
    handler._most_at_once = int(bytes_per_second * 1e-3)
    left = [len(handler.transfer_at_once([(step, spec(step % 3, step % 3))])) for step in range(300)]
    tries = left.index(0)
    assert 20 < tries < 200, "stores that are slow in truth hold few steps up"
    assert handler._most_at_once > layout.row_bytes
    assert sum(left[tries:]) == 0
    handler.shutdown()


def test_a_small_store_that_raises_is_a_failed_result(caplog: pytest.LogCaptureFixture) -> None:
    handler = blocked(ValueError("out of order"))
    handler.gate.set()
    assert handler.transfer_at_once([(1, spec()), (2, spec(2, 2))]) == []
    assert [(result.job_id, result.success) for result in handler.get_finished()] == [(1, False), (2, False)]
    assert "copy job 2 failed: out of order" in caplog.text
    handler.shutdown()


def test_a_rank_that_writes_no_rows_makes_no_store_at_once() -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache, 1, 1, 2, 2)
    rows = kv.make_rows(layout)
    before = rows.copy()
    handler = HostCopyHandler(cache, rows, layout, Direction.STORE)
    assert handler.transfer_at_once([(1, spec())]) == [1]
    assert np.array_equal(rows, before)
    handler.shutdown()


def test_loads_do_not_wait_behind_stores() -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    stores = Blocked(cache, rows, layout, Direction.STORE)
    loads = HostCopyHandler(cache, rows, layout, Direction.LOAD)
    for job_id in range(8):
        assert stores.transfer_async(job_id, spec(job_id, job_id))
    assert loads.transfer_async(9, (spec(20, 11)[1], spec(20, 11)[0]))
    loads.wait([9])
    assert [result.job_id for result in loads.get_finished()] == [9]
    stores.gate.set()
    stores.shutdown()
    loads.shutdown()


def test_shutdown_waits_for_what_is_running_and_its_thread_ends() -> None:
    handler = blocked()
    handler.transfer_async(1, spec())
    threading.Timer(0.01, handler.gate.set).start()
    handler.shutdown()
    assert [result.success for result in handler.get_finished()] == [True]
    assert handler.thread is not None
    assert not handler.thread.is_alive()


def test_large_transfers_are_split_over_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.copy.host._SPLIT_BYTES", 100)
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    together = threading.Barrier(2, timeout=30)

    class Together(HostCopyHandler):
        def _copy(self, work: object) -> float:
            together.wait()
            return super()._copy(work)  # type: ignore[arg-type]

    handler = Together(cache, rows, layout, Direction.STORE, 2)
    assert handler.transfer_async(1, spec(7, 3))
    handler.wait([1])
    assert [result.success for result in handler.get_finished()] == [True]
    assert rows[3, : layout.row_bytes].tobytes() == kv.gpu_block(cache, 0, 7)
    handler.shutdown()


def test_rows_outlive_the_one_who_gave_them() -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    handler = HostCopyHandler(cache, np.asarray(kv.make_rows(layout).data), layout, Direction.STORE)
    assert handler.transfer_async(1, spec())
    handler.wait([1])
    assert handler.get_finished()[0].success
    handler.shutdown()


def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_machine_that_starts_no_more_threads_does_not_fail_a_transfer_half_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = blocked()
    no_more_threads(monkeypatch)
    assert handler.transfer_async(1, spec())
    handler.gate.set()
    handler.wait([1])
    assert [result.success for result in handler.get_finished()] == [True]
    handler.shutdown()


def test_without_threads_there_is_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_threads(monkeypatch)
    with pytest.raises(ConfigError, match=r"pids-limit\) or on memory \(ulimit -v"):
        blocked()
