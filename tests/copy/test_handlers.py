"""The guarantees of every copy handler, on the host and with faked CUDA: exact copies, clean failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.copy import kv
from tests.copy.fake_cuda import FakeCuda
from tests.copy.kv import LAYOUTS, NUM_BLOCKS
from tiering.api.engine import CanonicalKVCaches
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from tiering.copy import host
from tiering.copy.contract import OffloadingHandler, OffloadingWorker, TransferResult
from tiering.copy.cuda import CudaCopyHandler
from tiering.copy.handlers import make_handlers
from tiering.copy.host import Direction, HostCopyHandler
from tiering.copy.layout import RowLayout
from tiering.copy.pinning import PinnedRows
from tiering.errors import ConfigError

Make = Callable[[CanonicalKVCaches, NDArray[np.uint8], RowLayout, Direction], OffloadingHandler]


@pytest.fixture(params=["host", "cuda", "cuda, batched copies"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Function that makes handlers with small chunks, so that a few blocks need several of them."""
    handlers: list[OffloadingHandler] = []
    api = FakeCuda()
    batch = api.batch() if "," in request.param else None

    def build(
        kv_caches: CanonicalKVCaches, rows: NDArray[np.uint8], layout: RowLayout, direction: Direction
    ) -> OffloadingHandler:
        if request.param == "host":
            handlers.append(HostCopyHandler(kv_caches, rows, layout, direction, threads=2))
        else:
            pinned = PinnedRows(rows, api)
            handlers.append(
                CudaCopyHandler(kv_caches, pinned, layout, direction, api.kernel, staging_bytes=1000, batch=batch)
            )
        return handlers[-1]

    monkeypatch.setattr(host, "_SPLIT_BYTES", 1000)
    with api.watched():
        yield build
    assert api.races == []
    for handler in handlers:
        handler.shutdown()
        handler.shutdown()


def run(handler: OffloadingHandler, spec: TransferSpec, job_id: int = 1) -> TransferResult:
    assert handler.transfer_async(job_id, spec)
    handler.wait([job_id])
    (result,) = handler.get_finished()
    assert result.job_id == job_id
    return result


def store_spec(
    blocks: list[int], rows: list[int], sizes: list[int] | None = None, indices: list[int] | None = None
) -> TransferSpec:
    sizes = sizes or [len(blocks)]
    return GPULoadStoreSpec(blocks, sizes, indices or [0] * len(sizes)), CPULoadStoreSpec(rows)


def load_spec(
    blocks: list[int], rows: list[int], sizes: list[int] | None = None, indices: list[int] | None = None
) -> TransferSpec:
    gpu, cpu = store_spec(blocks, rows, sizes, indices)
    return cpu, gpu


def snapshot(kv_caches: CanonicalKVCaches) -> list[NDArray[Any]]:
    return [tensor.tensor.numpy().copy() for tensor in kv_caches.tensors]


# ----------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_a_row_holds_the_pages_in_order_and_they_come_back(make: Make, layout_name: str, factor: int) -> None:
    cache = kv.canonical(layout_name)
    layout = RowLayout.of(cache, factor)
    rows = kv.make_rows(layout)
    untouched = rows.copy()
    blocks = [17, 3, 8, 22, 5, 11, 2, 19]
    numbers = [9, 1, 4, 0, 7, 2, 11, 6][: len(blocks) // factor]
    assert run(make(cache, rows, layout, Direction.STORE), store_spec(blocks, numbers)).success
    for i, row in enumerate(numbers):
        expected = b"".join(kv.gpu_block(cache, 0, block) for block in blocks[i * factor : (i + 1) * factor])
        assert rows[row, : layout.group_bytes[0]].tobytes() == expected
        assert (rows[row, layout.group_bytes[0] :] == untouched[row, layout.group_bytes[0] :]).all()
    others = np.setdiff1d(np.arange(len(rows)), numbers)
    assert (rows[others] == untouched[others]).all()

    other = kv.canonical(layout_name, seed=1000)
    before = [kv.gpu_block(other, 0, block) for block in range(NUM_BLOCKS)]
    target = [4, 23, 0, 9, 13, 6, 1, 15]
    assert run(make(other, rows, layout, Direction.LOAD), load_spec(target, numbers)).success
    for source, destination in zip(blocks, target, strict=True):
        assert kv.gpu_block(other, 0, destination) == kv.gpu_block(cache, 0, source)
    for block in set(range(NUM_BLOCKS)) - set(target):
        assert kv.gpu_block(other, 0, block) == before[block]


@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("count", [1, 3, 6])
def test_an_unaligned_load_skips_the_leading_part(make: Make, factor: int, first: int, count: int) -> None:
    cache = kv.canonical("split_kv")
    layout = RowLayout.of(cache, factor)
    rows = kv.make_rows(layout)
    stored = list(range(12))
    run(make(cache, rows, layout, Direction.STORE), store_spec(stored, list(range(12 // factor))))
    other = kv.canonical("split_kv", seed=1000)
    before = [kv.gpu_block(other, 0, block) for block in range(NUM_BLOCKS)]
    wanted = stored[first : first + count]
    needed = list(range(first // factor, (first + count - 1) // factor + 1))
    target = list(range(20, 20 - count, -1))
    assert run(make(other, rows, layout, Direction.LOAD), load_spec(target, needed, indices=[first])).success
    for source, destination in zip(wanted, target, strict=True):
        assert kv.gpu_block(other, 0, destination) == kv.gpu_block(cache, 0, source)
    for block in set(range(NUM_BLOCKS)) - set(target):
        assert kv.gpu_block(other, 0, block) == before[block]


def test_groups_have_rows_of_their_own(make: Make) -> None:
    cache = kv.two_groups()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    spec = store_spec([3, 4, 9], [5, 6, 7], sizes=[2, 1], indices=[10, 2])
    result = run(make(cache, rows, layout, Direction.STORE), spec)
    assert (result.transfer_size, result.transfer_type) == (2 * 80 + 40, ("gpu", "cpu"))
    assert rows[5, :80].tobytes() == kv.gpu_block(cache, 0, 3)
    assert rows[6, :80].tobytes() == kv.gpu_block(cache, 0, 4)
    assert rows[7, :40].tobytes() == kv.gpu_block(cache, 1, 9)
    other = kv.two_groups(seed=1000)
    result = run(
        make(other, rows, layout, Direction.LOAD), load_spec([8, 1, 2], [5, 6, 7], sizes=[2, 1], indices=[4, 0])
    )
    assert (result.transfer_size, result.transfer_type) == (2 * 80 + 40, ("cpu", "gpu"))
    assert kv.gpu_block(other, 0, 8) == kv.gpu_block(cache, 0, 3)
    assert kv.gpu_block(other, 1, 2) == kv.gpu_block(cache, 1, 9)


def test_ranks_write_side_by_side(make: Make) -> None:
    caches = [kv.canonical(seed=100 * rank) for rank in range(3)]
    layouts = [RowLayout.of(cache, 2, rank, 3) for rank, cache in enumerate(caches)]
    rows = kv.make_rows(layouts[0])
    for cache, layout in zip(caches, layouts, strict=True):
        assert run(make(cache, rows, layout, Direction.STORE), store_spec([6, 7], [4])).success
    expected = b"".join(kv.gpu_block(cache, 0, block) for cache in caches for block in (6, 7))
    assert rows[4, : layouts[0].group_bytes[0]].tobytes() == expected
    for cache, layout in zip(caches, layouts, strict=True):
        assert run(make(cache, rows, layout, Direction.LOAD), load_spec([1, 2], [4])).success
        assert kv.gpu_block(cache, 0, 1) == kv.gpu_block(cache, 0, 6)


def test_replicated_kv_is_written_by_rank_0_and_read_by_all(make: Make) -> None:
    caches = [kv.canonical(seed=100 * rank) for rank in range(2)]
    layouts = [RowLayout.of(cache, 1, rank, 2, copies=2) for rank, cache in enumerate(caches)]
    rows = kv.make_rows(layouts[0])
    results = [
        run(make(cache, rows, layout, Direction.STORE), store_spec([6], [4]))
        for cache, layout in zip(caches, layouts, strict=True)
    ]
    assert [result.success for result in results] == [True, True]
    assert [result.transfer_size for result in results] == [layouts[0].group_bytes[0], None]
    run(make(caches[1], rows, layouts[1], Direction.LOAD), load_spec([9], [4]))
    assert kv.gpu_block(caches[1], 0, 9) == kv.gpu_block(caches[0], 0, 6)


def test_an_empty_transfer_ends_like_any_other(make: Make) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    assert run(make(cache, kv.make_rows(layout), layout, Direction.LOAD), load_spec([], [])).success


def test_the_transfers_of_a_step_run_together_and_end_one_by_one(make: Make) -> None:
    cache = kv.two_groups()
    layout = RowLayout.of(cache, 2)
    rows = kv.make_rows(layout)
    store = make(cache, rows, layout, Direction.STORE)
    jobs = [
        (1, store_spec([3, 4], [5], sizes=[2, 0], indices=[10, 2])),
        (2, store_spec([1, 2], [99], sizes=[2, 0], indices=[0, 0])),  # there is no row 99
        (3, store_spec([9, 8, 6, 5], [6, 7], sizes=[2, 2], indices=[2, 2])),
        (4, store_spec([], [], sizes=[0, 0], indices=[0, 0])),
    ]
    assert store.transfer_all_async(jobs) == [2]
    store.wait([1, 3, 4])
    assert {result.job_id: result.success for result in store.get_finished()} == {1: True, 3: True, 4: True}
    expected = [(5, 0, (3, 4)), (6, 0, (9, 8)), (7, 1, (6, 5))]
    for row, group, blocks in expected:
        content = b"".join(kv.gpu_block(cache, group, block) for block in blocks)
        assert rows[row, : len(content)].tobytes() == content

    other = kv.two_groups(seed=1000)
    load = make(other, rows, layout, Direction.LOAD)
    loads = [
        (1, load_spec([11], [5], sizes=[1, 0], indices=[1, 0])),  # the second half of row 5
        (2, load_spec([12, 13, 14], [5, 6], sizes=[3, 0], indices=[0, 0])),  # row 5 again, and half of row 6
        (3, load_spec([15], [7], sizes=[0, 1], indices=[0, 3])),
    ]
    assert load.transfer_all_async(loads) == []
    load.wait([1, 2, 3])
    assert len(load.get_finished()) == 3
    for source, destination, group in ((4, 11, 0), (3, 12, 0), (4, 13, 0), (9, 14, 0), (5, 15, 1)):
        assert kv.gpu_block(other, group, destination) == kv.gpu_block(cache, group, source)


def test_transfers_with_the_same_destination_run_one_after_the_other(make: Make) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    load = make(cache, rows, layout, Direction.LOAD)
    assert load.transfer_all_async([(1, load_spec([4], [1])), (2, load_spec([4, 0, 0], [2, 3, 5]))]) == []
    load.wait([1, 2])
    assert [result.success for result in load.get_finished()] == [True, True]
    size = layout.group_bytes[0]
    if isinstance(load, CudaCopyHandler):  # host copies of several jobs may run at once
        assert kv.gpu_block(cache, 0, 4) == rows[2, :size].tobytes()
    assert kv.gpu_block(cache, 0, 0) in (rows[3, :size].tobytes(), rows[5, :size].tobytes())


# -------------------------------------------------------------------------------------------------------------- results


def test_each_result_is_handed_out_once_also_if_nobody_waited(make: Make) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    handler = make(cache, kv.make_rows(layout), layout, Direction.STORE)
    for job_id in range(5):
        assert handler.transfer_async(job_id, store_spec([job_id], [job_id]))
    handler.shutdown()
    assert sorted(result.job_id for result in handler.get_finished()) == list(range(5))
    assert handler.get_finished() == []


def test_waiting_for_unknown_jobs_returns(make: Make) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    handler = make(cache, kv.make_rows(layout), layout, Direction.STORE)
    handler.wait([7, 8])
    assert handler.get_finished() == []


def test_results_have_size_time_and_type(make: Make) -> None:
    cache = kv.canonical("padded")
    layout = RowLayout.of(cache, 2)
    result = run(make(cache, kv.make_rows(layout), layout, Direction.STORE), store_spec([1, 2, 3, 4], [0, 1]))
    assert result.transfer_size == 2 * layout.group_bytes[0]
    assert result.transfer_time is not None
    assert result.transfer_time >= 0
    assert result.transfer_type == ("gpu", "cpu")


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("direction", "spec"),
    [
        (Direction.STORE, store_spec([1, 2], [1])),
        (Direction.STORE, store_spec([1], [12])),
        (Direction.STORE, store_spec([1], [-1])),
        (Direction.STORE, store_spec([NUM_BLOCKS], [1])),
        (Direction.STORE, store_spec([1, 2], [5, 5])),
        (Direction.STORE, load_spec([1], [1])),
        (Direction.LOAD, load_spec([1, 2], [1])),
        (Direction.LOAD, load_spec([-1], [1])),
        (Direction.LOAD, load_spec([NUM_BLOCKS], [1])),
        (Direction.LOAD, load_spec([1], [12])),
        (Direction.LOAD, load_spec([1], [1], sizes=[1, 0], indices=[0, 0])),
    ],
)
def test_a_transfer_that_does_not_fit_is_not_started_and_moves_nothing(
    make: Make, direction: Direction, spec: TransferSpec
) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    rows_before, cache_before = rows.copy(), snapshot(cache)
    handler = make(cache, rows, layout, direction)
    assert handler.transfer_async(1, spec) is False
    handler.wait([1])
    assert handler.get_finished() == []
    assert (rows == rows_before).all()
    assert all((a == b).all() for a, b in zip(snapshot(cache), cache_before, strict=True))


def test_after_shutdown_nothing_starts(make: Make) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    handler = make(cache, kv.make_rows(layout), layout, Direction.STORE)
    handler.shutdown()
    assert handler.transfer_async(1, store_spec([1], [1])) is False


def test_rows_that_are_too_small_are_refused(make: Make) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache, 4)
    with pytest.raises(ConfigError, match="same configuration"):
        make(cache, np.zeros((4, layout.row_bytes - 1), np.uint8), layout, Direction.STORE)


# ------------------------------------------------------------------------------------------------------ the way to them


def test_make_handlers_serves_a_worker_both_ways() -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    worker = OffloadingWorker()
    for source, destination, handler in make_handlers(cache, rows.data, layout):
        worker.register_handler(source, destination, handler)
    assert worker.transfer_all_async([(1, store_spec([3], [2]))]) == []
    worker.wait([1])
    assert worker.transfer_all_async([(2, load_spec([4], [2]))]) == []
    worker.wait([2])
    assert {result.job_id: result.success for result in worker.get_finished()} == {1: True, 2: True}
    assert kv.gpu_block(cache, 0, 4) == kv.gpu_block(cache, 0, 3)
    worker.shutdown()


def test_a_device_that_nothing_copies_from_is_refused() -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    meta = CanonicalKVCaches(
        tuple(type(tensor)(tensor.tensor.to("meta"), tensor.page_size_bytes) for tensor in cache.tensors),
        cache.group_data_refs,
    )
    with pytest.raises(ConfigError, match="meta"):
        next(make_handlers(meta, rows.data, layout))


@pytest.mark.parametrize(("device", "reason"), [("xpu", "torch.xpu's streams"), ("npu", "Ascend's own streams")])
def test_a_kv_cache_on_a_device_without_copies_is_refused_with_the_reason(device: str, reason: str) -> None:
    cache = kv.canonical()
    elsewhere = CanonicalKVCaches(
        tuple(
            type(tensor)(cast("torch.Tensor", SimpleNamespace(device=SimpleNamespace(type=device))), 64)
            for tensor in cache.tensors
        ),
        cache.group_data_refs,
    )
    layout = RowLayout.of(cache)
    with pytest.raises(ConfigError, match=f"'{device}' device and cannot be offloaded: copies there need {reason}"):
        next(make_handlers(elsewhere, kv.make_rows(layout).data, layout))
