"""CUDA copies with torch.cuda faked: what waits for what, when results come, what is pinned."""

from __future__ import annotations

import enum
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.copy import kv
from tests.copy.fake_cuda import FakeCuda
from tiering.api.engine import KVCacheGroup
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from tiering.copy import cuda
from tiering.copy.canonical import canonicalize
from tiering.copy.cuda import CudaCopyHandler, PinnedRows
from tiering.copy.handlers import make_handlers
from tiering.copy.host import Direction
from tiering.copy.layout import RowLayout
from tiering.errors import ConfigError
from tiering.primary.memory.region import SharedRegion


def handler(api: FakeCuda, direction: Direction = Direction.STORE) -> CudaCopyHandler:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    return CudaCopyHandler(cache, PinnedRows(kv.make_rows(layout), api), layout, direction)


def spec(block: int = 1, row: int = 1) -> TransferSpec:
    return GPULoadStoreSpec([block], [1], [0]), CPULoadStoreSpec([row])


def test_the_side_stream_waits_for_the_compute_stream_and_never_the_reverse() -> None:
    api = FakeCuda()
    assert handler(api).transfer_async(1, spec())
    assert api.log == ["side0 waits for compute", "event on side0", "event on side0"]


def test_all_of_a_job_s_copies_are_submitted_to_the_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeCuda()
    copies = handler(api)
    used = []
    real = torch.Tensor.copy_

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        used.append((api.current_stream().name, non_blocking))
        return real(self, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    copies.transfer_async(1, (GPULoadStoreSpec([1, 2, 3], [3], [0]), CPULoadStoreSpec([5, 1, 7])))
    assert used == [("side0", True)] * 3


def test_the_host_waits_for_nothing_when_it_submits_or_polls() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    copies.transfer_async(2, spec(2, 2))
    assert copies.get_finished() == []
    assert not any("host waits" in line for line in api.log)


def test_a_job_is_finished_when_its_last_event_is() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    copies.transfer_async(2, spec(2, 2))
    api.events[0].done = True
    assert copies.get_finished() == []
    api.events[1].done = True
    (result,) = copies.get_finished()
    assert (result.job_id, result.success, result.transfer_time) == (1, True, 2.0)
    copies.wait([2])
    assert [result.job_id for result in copies.get_finished()] == [2]


def test_a_wait_is_for_the_job_s_event_and_not_for_the_device() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    copies.transfer_async(2, spec(2, 2))
    copies.wait([1, 99])
    assert [event.done for event in api.events] == [False, True, False, False]


def test_what_is_computed_later_can_be_ordered_after_a_job_without_the_host_waiting() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    copies.transfer_async(2, spec(2, 2))
    del api.log[:]
    copies.order_before_compute([2, 99])
    assert api.log == ["compute waits for event 3"]


def test_a_compute_stream_that_cannot_be_ordered_is_waited_for() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    api.compute.broken = True
    copies.order_before_compute([1])
    assert api.events[1].done


def test_loads_run_on_a_stream_of_higher_priority() -> None:
    api = FakeCuda()
    both = [handler(api, direction) for direction in (Direction.STORE, Direction.LOAD)]
    assert [stream.priority for stream in api.streams] == [0, -1]
    for copies in both:
        copies.shutdown()


def test_a_submission_that_fails_has_ended_before_it_is_reported() -> None:
    api = FakeCuda()
    copies = handler(api)
    api.streams[0].broken = True
    assert copies.transfer_async(1, spec()) is False
    assert api.log == ["host waits for side0"]
    assert copies.get_finished() == []


def test_a_device_error_while_copying_is_a_failed_result() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    api.events[1].broken = True
    copies.wait([1])
    assert [(result.job_id, result.success) for result in copies.get_finished()] == [(1, False)]


def test_a_job_that_is_running_is_not_started_again() -> None:
    copies = handler(FakeCuda(instant=False))
    assert copies.transfer_async(1, spec())
    assert copies.transfer_async(1, spec()) is False


def test_rows_are_pinned_once_for_both_directions_and_unpinned_after_the_last() -> None:
    api = FakeCuda()
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    pinned = PinnedRows(rows, api)
    store, load = (CudaCopyHandler(cache, pinned, layout, direction) for direction in Direction)
    assert api.runtime.registered == {rows.ctypes.data: rows.nbytes}
    store.shutdown()
    store.shutdown()
    assert api.runtime.registered
    load.shutdown()
    assert api.runtime.registered == {}


def test_rows_that_cannot_be_pinned_are_warned_about_and_used(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeCuda()
    api.runtime.code = 2
    copies = handler(api)
    assert "ulimit -l" in caplog.text
    assert copies.transfer_async(1, spec())
    copies.shutdown()
    assert [result.success for result in copies.get_finished()] == [True]


def test_rows_are_pinned_and_unpinned_on_the_device_of_the_kv_cache() -> None:
    api = FakeCuda()
    copies = handler(api)
    copies.shutdown()
    assert api.runtime.on == [torch.device("cpu")] * 2
    assert api.current_device is None


def test_a_device_that_is_gone_does_not_keep_the_other_direction_from_shutting_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = FakeCuda()
    copies = handler(api)

    def device(device: object) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(api, "device", device)
    copies.shutdown()
    assert copies.transfer_async(1, spec()) is False


def test_rows_at_the_address_of_a_mapping_that_went_without_unpinning_are_pinned_anew() -> None:
    api = FakeCuda()
    layout = RowLayout.of(kv.canonical())
    rows = kv.make_rows(layout)
    api.runtime.registered[rows.ctypes.data] = 4096
    CudaCopyHandler(kv.canonical(), PinnedRows(rows, api), layout, Direction.STORE)
    assert api.runtime.registered == {rows.ctypes.data: rows.nbytes}


def test_rows_that_copies_would_miss_are_refused() -> None:
    """CUDA knows a part of the range from before, and would copy to the pages that were there then."""
    api = FakeCuda()
    layout = RowLayout.of(kv.canonical())
    rows = kv.make_rows(layout)
    api.runtime.registered[rows.ctypes.data + 4096] = 4096
    with pytest.raises(ConfigError, match="an earlier engine of this process"):
        CudaCopyHandler(kv.canonical(), PinnedRows(rows, api), layout, Direction.STORE)


def test_the_engine_does_not_see_the_error_of_rows_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA hands it to the next kernel launch, which is one of ours."""
    launched = []

    def zeros(*size: int, device: torch.device) -> torch.Tensor:
        launched.append(device)
        raise RuntimeError("CUDA error: the call before failed")

    monkeypatch.setattr(torch, "zeros", zeros)
    api = FakeCuda()
    api.runtime.code = 2
    handler(api).shutdown()
    assert launched == [torch.device("cpu")]


class Status(enum.Enum):
    """An enum of Python's, as newer bindings make them."""

    success = 0


class Refusal(enum.IntEnum):
    out_of_memory = 2


@pytest.mark.parametrize(
    ("answer", "warns"), [(Status.success, False), (Refusal.out_of_memory, True), (ValueError("2"), True)]
)
def test_an_answer_of_cuda_may_be_any_kind_of_enum(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: Any, warns: bool
) -> None:
    api = FakeCuda()

    def register(address: int, nbytes: int, flags: int) -> Any:
        if isinstance(answer, Exception):
            raise answer  # no name for this number
        return answer

    monkeypatch.setattr(api.runtime, "cudaHostRegister", register)
    handler(api)
    assert ("could not be pinned" in caplog.text) == warns


def test_too_little_device_memory_shows_at_start_and_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeCuda()
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    pinned = PinnedRows(kv.make_rows(layout), api)

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        CudaCopyHandler(cache, pinned, layout, Direction.STORE)
    assert api.runtime.registered == {}


def test_staging_is_taken_at_start_and_is_no_larger_than_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = torch.empty

    def empty(size: int, **kwargs: Any) -> torch.Tensor:
        sizes.append(size)
        return real(size, **kwargs)

    cache = kv.canonical()
    layout = RowLayout.of(cache)
    monkeypatch.setattr(torch, "empty", empty)
    copies = CudaCopyHandler(cache, PinnedRows(kv.make_rows(layout, 3), FakeCuda()), layout, Direction.STORE)
    assert copies.transfer_async(1, spec())
    assert sizes == [3 * layout.rank_bytes[0]]


def test_a_direction_that_cannot_be_had_leaves_nothing_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    log = []

    class Handler:
        def __init__(self, kv_caches: Any, rows: Any, layout: Any, direction: Direction) -> None:
            if direction is Direction.LOAD:
                raise ConfigError("no device memory")
            log.append("built")

        def shutdown(self) -> None:
            log.append("shut down")

    monkeypatch.setattr(cuda, "CudaCopyHandler", Handler)
    on_gpu = cast(
        "Any", SimpleNamespace(tensors=[SimpleNamespace(tensor=SimpleNamespace(device=torch.device("cuda", 1)))])
    )
    with pytest.raises(ConfigError, match="no device memory"):
        list(make_handlers(on_gpu, np.zeros((1, 8), np.uint8).data, RowLayout(((8,),))))
    assert log == ["built", "shut down"]


def test_it_imports_where_there_is_no_cuda() -> None:
    code = "import tiering.copy.cuda, torch; assert not torch.cuda.is_initialized()"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("factor", [1, 2])
def test_a_round_trip_on_a_real_device(factor: int) -> None:
    tensors = {name: tensor.cuda() for name, tensor in kv.split_kv().items()}
    cache = canonicalize(tensors, kv.one_group(), kv.NUM_BLOCKS)
    expected = [tensor.tensor.clone() for tensor in cache.tensors]
    layout = RowLayout.of(cache, factor)
    region = SharedRegion.create(32, layout.row_bytes)
    (_, _, store), (_, _, load) = make_handlers(cache, region.view, layout)
    blocks, rows = list(range(kv.NUM_BLOCKS)), list(range(31, 31 - kv.NUM_BLOCKS // factor, -1))
    gpu, cpu = GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(rows)
    assert store.transfer_async(1, (gpu, cpu))
    store.wait([1])
    for tensor in cache.tensors:
        tensor.tensor.zero_()
    assert load.transfer_async(2, (cpu, gpu))
    load.wait([2])
    results = store.get_finished() + load.get_finished()
    assert [result.success for result in results] == [True, True]
    assert all(torch.equal(a.tensor, b) for a, b in zip(cache.tensors, expected, strict=True))
    store.shutdown()
    load.shutdown()
    region.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_computed_after_a_store_cannot_reach_it_on_a_real_device() -> None:
    cache = canonicalize(
        {"l0": torch.full((64, 1 << 20), 7, dtype=torch.uint8, device="cuda")}, [KVCacheGroup(("l0",), 16)], 64
    )
    layout = RowLayout.of(cache)
    region = SharedRegion.create(64, layout.row_bytes)
    (_, _, store), (_, _, load) = make_handlers(cache, region.view, layout)
    assert store.transfer_async(1, (GPULoadStoreSpec(range(64), [64], [0]), CPULoadStoreSpec(range(64))))
    store.order_before_compute([1])
    cache.tensors[0].tensor.zero_()
    store.wait([1])
    assert (region.array == 7).all()
    store.shutdown()
    load.shutdown()
    region.close()
