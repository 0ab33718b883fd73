"""CUDA copies with torch.cuda faked: the calls of a step, the order of work, and the results."""

from __future__ import annotations

import inspect
import subprocess
import sys
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.copy import kv
from tests.copy.fake_cuda import Call, FakeCuda, FakeEvent, FakeStream
from tiering.api.engine import CanonicalKVCaches, KVCacheGroup
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from tiering.copy import cuda, pinning
from tiering.copy.canonical import canonicalize
from tiering.copy.contract import TransferError
from tiering.copy.cuda import CudaCopyHandler
from tiering.copy.handlers import make_handlers
from tiering.copy.host import Direction
from tiering.copy.layout import RowLayout
from tiering.copy.pinning import PinnedRows
from tiering.errors import ConfigError
from tiering.primary.memory.region import SharedRegion


def handler(
    api: FakeCuda, direction: Direction = Direction.STORE, cache: CanonicalKVCaches | None = None, **options: Any
) -> CudaCopyHandler:
    cache = cache or kv.canonical()
    layout = RowLayout.of(cache)
    rows = SharedRegion.create(20, layout.row_bytes).array
    return CudaCopyHandler(cache, PinnedRows(rows, api), layout, direction, api.kernel, **options)


def spec(block: int = 1, row: int = 1) -> TransferSpec:
    return GPULoadStoreSpec([block], [1], [0]), CPULoadStoreSpec([row])


def specs(count: int) -> list[tuple[int, TransferSpec]]:
    return [(job, spec(2 * job + 1, job)) for job in range(count)]


def backwards(jobs: list[tuple[int, TransferSpec]]) -> list[tuple[int, TransferSpec]]:
    return [(job, (cpu, gpu)) for job, (gpu, cpu) in jobs]


def many_layers(page_bytes: int = 64, layers: int = 32, blocks: int = 40) -> CanonicalKVCaches:
    """Return a cache with each layer in an allocation of its own."""
    caches = {f"l{layer}": torch.zeros(blocks, page_bytes, dtype=torch.uint8) for layer in range(layers)}
    return canonicalize(caches, [KVCacheGroup(tuple(caches), 16)], blocks)


# ---------------------------------------------------------------------------------------------------------------- calls


def test_a_decode_step_that_fills_16_blocks_takes_17_calls_without_batched_copies() -> None:
    """One kernel for all layers and one copy per row."""
    api = FakeCuda()
    copies = handler(api, cache=many_layers())
    with api.watched():
        assert copies.transfer_all_async(specs(16)) == []
    assert Counter(call.name for call in api.calls) == {"gather": 1, "copy_": 16}


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("direction", Direction)
def test_a_batched_copy_moves_all_rows_in_one_call(direction: Direction, count: int) -> None:
    api = FakeCuda()
    copies = handler(api, direction, many_layers(), batch=api.batch())
    store = direction is Direction.STORE
    with api.watched():
        copies.transfer_all_async(specs(count) if store else backwards(specs(count)))
    moved = Call("batch", "side1", count * 32 * 64)
    kernel = Call("gather" if store else "scatter", "side0", count * 32 * 64)
    assert api.calls == ([kernel, moved] if store else [moved, kernel])
    assert api.orders == [store]  # the kernel has just written what a store moves


@pytest.mark.parametrize("direction", Direction)
def test_small_pieces_cross_the_bus_in_one_kernel(direction: Direction) -> None:
    api = FakeCuda()
    copies = handler(api, direction, many_layers(), batch=api.batch(), maps_rows=True)
    store = direction is Direction.STORE
    with api.watched():
        assert copies.transfer_all_async(specs(8) if store else backwards(specs(8))) == []
    assert api.calls == [Call("direct gather" if store else "direct scatter", "side0", 8 * 32 * 64)]


def test_large_pieces_that_are_stored_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's copies move them faster, and without processors of the device."""
    for limit, expected in ((32 * 64, ["direct gather"]), (32 * 64 - 1, ["gather", "batch"])):
        monkeypatch.setattr(cuda, "_DIRECT_BYTES", limit)
        api = FakeCuda()
        copies = handler(api, cache=many_layers(), batch=api.batch(), maps_rows=True)
        with api.watched():
            copies.transfer_all_async(specs(1))
        assert [call.name for call in api.calls] == expected


def test_large_pieces_are_loaded_by_kernels_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of the engine's next step would wait behind copies of the driver."""
    monkeypatch.setattr(cuda, "_DIRECT_BYTES", 0)
    monkeypatch.setattr(cuda, "_DIRECT_CHUNK", 3 * 32 * 64 + 1)
    api = FakeCuda()
    copies = handler(api, Direction.LOAD, many_layers(), batch=api.batch(), maps_rows=True, staging_bytes=2 * 32 * 64)
    with api.watched():
        assert copies.transfer_all_async(backwards(specs(8))) == []
    assert api.calls == [Call("direct scatter", "side0", count * 32 * 64) for count in (3, 3, 2)]


@pytest.mark.parametrize("maps_rows", [False, True])
def test_a_load_that_a_step_needs_does_not_wait_for_those_before_it(maps_rows: bool) -> None:
    """Staged loads share a buffer, and so keep their order."""
    api = FakeCuda(instant=False)
    copies = handler(api, Direction.LOAD, many_layers(), maps_rows=maps_rows)
    long, small = backwards(specs(2))
    with api.watched():
        copies.transfer_all_async([long])
        copies.transfer_first([small])
    assert {call.stream for call in api.calls} == ({"side0", "side2"} if maps_rows else {"side0", "side1"})
    api.events[-1].done = True
    assert [result.job_id for result in copies.get_finished()] == ([small[0]] if maps_rows else [])
    copies.wait([long[0], small[0]])
    left = [long[0]] if maps_rows else [long[0], small[0]]
    assert [result.job_id for result in copies.get_finished()] == left


@pytest.mark.parametrize("limit", [40, 48, 79])
def test_a_job_of_staged_and_direct_groups_ends_with_both(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A row that is loaded before the bus has written it would have the bytes of another block."""
    monkeypatch.setattr(cuda, "_DIRECT_BYTES", limit)
    api, cache = FakeCuda(instant=False), kv.two_groups()  # blocks of 80 and of 40 bytes
    layout = RowLayout.of(cache)
    pinned = PinnedRows(SharedRegion.create(20, layout.row_bytes).array, api)
    with api.watched():
        store, load = (
            CudaCopyHandler(cache, pinned, layout, way, api.kernel, batch=api.batch(), maps_rows=True)
            for way in Direction
        )
        rows = CPULoadStoreSpec([1, 2, 3, 4])
        assert store.transfer_async(1, (GPULoadStoreSpec([1, 2, 3, 4], [2, 2], [0, 0]), rows))
        store.wait([1])
        assert [result.success for result in store.get_finished()] == [True]
        assert load.transfer_async(2, (rows, GPULoadStoreSpec([11, 12, 13, 14], [2, 2], [0, 0])))
        load.order_before_compute([2])
        for tensor in cache.tensors:
            api.write(tensor.tensor[11:15])
    assert {call.name for call in api.calls} >= {"gather", "direct gather", "batch", "direct scatter"}
    assert api.races == []


@pytest.mark.parametrize("maps_rows", [False, True])
def test_rows_that_are_not_pinned_are_copied_by_torch_alone(maps_rows: bool) -> None:
    """A batched copy and a kernel need addresses that the device may use."""
    api = FakeCuda()
    api.runtime.code = 1
    with api.watched():
        copies = handler(api, cache=many_layers(), batch=api.batch(), maps_rows=maps_rows)
        del api.calls[:]
        assert copies.transfer_all_async(specs(1)) == []
    assert {call.name for call in api.calls} == {"gather", "copy_"}


def test_neighbouring_rows_that_touch_are_one_copy() -> None:
    api = FakeCuda()
    copies = handler(api, cache=many_layers(4096, 1))
    gpu = GPULoadStoreSpec([5, 9, 2, 7, 3], [5], [0])
    with api.watched():
        copies.transfer_async(1, (gpu, CPULoadStoreSpec([4, 5, 6, 9, 10])))
    assert [call.nbytes for call in api.calls if call.name == "copy_"] == [3 * 4096, 2 * 4096]


def test_no_copy_crosses_the_border_of_two_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 6 * 4096)
    for batch in (False, True):
        api = FakeCuda()
        copies = handler(api, cache=many_layers(4096, 1), batch=api.batch() if batch else None)
        with api.watched():
            assert copies.transfer_async(1, (GPULoadStoreSpec(range(8), [8], [0]), CPULoadStoreSpec(range(2, 10))))
        nbytes = [call.nbytes for call in api.calls if call.name in ("copy_", "batch")]
        assert nbytes == ([8 * 4096] if batch else [4 * 4096, 4 * 4096])


def test_the_driver_s_refusal_of_a_batch_costs_no_job(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeCuda()
    api.batch_code = 801
    copies = handler(api, cache=many_layers(28 << 10, 2), batch=api.batch())
    assert copies.transfer_all_async(specs(3)) == []
    api.batch_code = 0
    assert copies.transfer_async(9, spec(30, 9))
    assert api.orders == []
    assert caplog.text.count("CUDA error 801") == 1
    assert [result.success for result in copies.get_finished()] == [True] * 4


# ---------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("maps_rows", [False, True])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_step_needs_is_there_before_it_computes(maps_rows: bool, is_first: bool) -> None:
    """A load that the step does not wait for is the negative control."""
    api = FakeCuda(instant=False)
    cache = many_layers()
    copies = handler(api, Direction.LOAD, cache, batch=api.batch(), maps_rows=maps_rows)
    jobs = backwards(specs(4))
    with api.watched():
        if is_first:
            copies.transfer_first(jobs)
        else:
            assert copies.transfer_all_async(jobs) == []
        for tensor in cache.tensors:
            api.write(tensor.tensor[1:8])
    assert bool(api.races) is not is_first


@pytest.mark.parametrize("factor", [1, 2])
def test_what_could_not_be_submitted_is_copied_page_by_page(
    factor: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, cache = FakeCuda(), kv.two_groups()
    layout = RowLayout.of(cache, factor)
    rows = SharedRegion.create(20, layout.row_bytes).array
    rows[:] = np.random.default_rng(1).integers(0, 256, rows.shape, np.uint8)
    expected, pinned = kv.two_groups(), PinnedRows(rows, api)
    copies, other = (CudaCopyHandler(each, pinned, layout, Direction.LOAD, api.kernel) for each in (cache, expected))
    cpu = CPULoadStoreSpec([3, 4, 7] if factor == 1 else [3, 7])
    gpu = GPULoadStoreSpec([5, 9, 6], [2, 1], [0, 0])
    assert other.transfer_async(1, (cpu, gpu))
    monkeypatch.setattr(copies, "_submit", fails)
    copies.transfer_first([(1, (cpu, gpu))])
    assert "out of memory" in caplog.text
    assert [(result.job_id, result.success) for result in copies.get_finished()] == [(1, True)]
    for mine, theirs in zip(cache.tensors, expected.tensors, strict=True):
        assert torch.equal(mine.tensor, theirs.tensor)
    monkeypatch.setattr(torch.Tensor, "copy_", fails)
    with pytest.raises(TransferError, match="copy job 2"):
        copies.transfer_first([(2, (cpu, gpu))])


def fails(*args: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("way", ["one by one", "batched", "by kernel"])
@pytest.mark.parametrize("page_bytes", [64, 28 << 10])
def test_copies_are_ordered_with_the_engine_s_work_and_with_each_other(page_bytes: int, way: str) -> None:
    """The engine writes to a block, stores it and loads another one; many chunks share the staging buffer."""
    api = FakeCuda(instant=False)
    cache = many_layers(page_bytes, 3)
    layout = RowLayout.of(cache)
    rows = SharedRegion.create(12, layout.row_bytes).array
    pinned = PinnedRows(rows, api)
    store, load = (
        CudaCopyHandler(
            cache,
            pinned,
            layout,
            direction,
            api.kernel,
            staging_bytes=4 * 3 * page_bytes,
            batch=api.batch() if way == "batched" else None,
            maps_rows=way == "by kernel",
        )
        for direction in Direction
    )
    with api.watched():
        for round_ in range(3):
            for tensor in cache.tensors:
                api.write(tensor.tensor[:20])  # a forward pass, and the zeroing of blocks that a load then fills
            api.write(cache.tensors[0].tensor[20:])
            assert store.transfer_all_async([(10 * round_ + job, order) for job, order in specs(6)]) == []
            loads = [
                (10 * round_ + job, (CPULoadStoreSpec([6 + job]), GPULoadStoreSpec([30 + job], [1], [0])))
                for job in range(6)
            ]
            assert load.transfer_all_async(loads) == []
            assert api.races == []
            load.order_before_compute([10 * round_ + job for job in range(6)])
            store.wait([10 * round_ + job for job in range(6)])
    assert api.races == []


@pytest.mark.parametrize("maps_rows", [False, True])
def test_the_fake_sees_a_block_that_is_overwritten_while_it_is_stored(maps_rows: bool) -> None:
    """Negative control of the test above."""
    api = FakeCuda(instant=False)
    cache = many_layers(64, 1)
    copies = handler(api, cache=cache, maps_rows=maps_rows)
    with api.watched():
        copies.transfer_async(1, spec(3, 3))
        api.write(cache.tensors[0].tensor[4])
        assert api.races == []
        api.write(cache.tensors[0].tensor[3])
    assert len(api.races) == 1


def test_what_is_computed_later_can_be_ordered_after_a_job_without_the_host_waiting() -> None:
    api = FakeCuda(instant=False)
    cache = many_layers(64, 1)
    copies = handler(api, cache=cache)
    with api.watched():
        copies.transfer_all_async(specs(3))
        copies.order_before_compute([0, 1, 2, 99])
        api.write(cache.tensors[0].tensor)
    assert api.races == []
    assert not any("host waits" in line for line in api.log)


def test_a_staged_load_crosses_the_bus_before_the_engine_s_work_has_ended() -> None:
    """Only the scatter to the KV cache has to wait."""
    api = FakeCuda(instant=False)
    copies = handler(api, Direction.LOAD, many_layers())
    copies.transfer_async(1, spec()[::-1])
    assert [line for line in api.log if "compute" in line] == ["side0 waits for compute"]


def test_the_compute_stream_never_waits_for_a_submission() -> None:
    api = FakeCuda()
    for direction in Direction:
        jobs = specs(2) if direction is Direction.STORE else backwards(specs(2))
        handler(api, direction).transfer_all_async(jobs)
    assert not any(line.startswith("compute") for line in api.log)


def test_the_host_waits_for_nothing_when_it_submits_or_polls() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    copies.transfer_async(2, spec(2, 2))
    assert copies.get_finished() == []
    assert not any("host waits" in line for line in api.log)


def test_a_compute_stream_that_cannot_be_ordered_is_waited_for() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    api.compute.broken = True
    copies.order_before_compute([1])
    assert [result.success for result in copies.get_finished()] == [True]


def test_loads_run_on_streams_of_higher_priority() -> None:
    api = FakeCuda()
    both = [handler(api, direction) for direction in (Direction.STORE, Direction.LOAD)]
    assert [stream.priority for stream in api.streams] == [0, 0, -1, -1, -1]
    for copies in both:
        copies.shutdown()


# -------------------------------------------------------------------------------------------------------------- results


def test_a_job_is_finished_when_its_last_event_is() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    first = api.events[-1]
    copies.transfer_async(2, spec(2, 2))
    assert copies.get_finished() == []
    first.done = True
    (result,) = copies.get_finished()
    assert (result.job_id, result.success, result.transfer_time) == (1, True, 2.0)
    copies.wait([2])
    assert [result.job_id for result in copies.get_finished()] == [2]


@pytest.mark.parametrize(("maps_rows", "waiting"), [(False, True), (True, False)])
def test_the_time_of_a_load_that_crosses_the_bus_in_a_kernel_has_no_wait_for_the_engine(
    maps_rows: bool, waiting: bool
) -> None:
    """A staged load begins to cross the bus at once."""
    api = FakeCuda(instant=False)
    copies = handler(api, Direction.LOAD, many_layers(), maps_rows=maps_rows)
    copies.transfer_async(1, spec()[::-1])
    assert api.log.index("side0 waits for compute") < api.log.index("event on side1" if waiting else "event on side0")


def test_jobs_of_one_submission_end_with_their_own_chunk_and_share_its_time() -> None:
    api = FakeCuda(instant=False)
    layout = RowLayout.of(kv.canonical())
    copies = handler(api, staging_bytes=4 * layout.rank_bytes[0])  # two blocks in each half
    copies.transfer_all_async(specs(5))
    copies.wait([1])
    assert [(result.job_id, result.transfer_time) for result in copies.get_finished()] == [(0, 2.0), (1, 1.0)]
    copies.wait([4])
    copies.wait([3])
    assert [result.job_id for result in copies.get_finished()] == [2, 3, 4]


def test_a_wait_is_for_the_job_s_event_and_not_for_the_device() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    of_first = len(api.events)
    copies.transfer_async(2, spec(2, 2))
    copies.wait([1, 99])
    assert [event.done for event in api.events[of_first - 1 :]] == [True] + [False] * (len(api.events) - of_first)


def test_a_submission_that_fails_has_ended_before_it_is_reported() -> None:
    api = FakeCuda()
    copies = handler(api)
    api.streams[1].broken = True
    assert copies.transfer_all_async(specs(2)) == [0, 1]
    assert api.log[-2:] == ["host waits for side0", "host waits for side1"]
    assert copies.get_finished() == []


def test_a_device_error_while_copying_is_a_failed_result() -> None:
    api = FakeCuda(instant=False)
    copies = handler(api)
    copies.transfer_async(1, spec())
    api.events[-1].broken = True
    copies.wait([1])
    assert [(result.job_id, result.success) for result in copies.get_finished()] == [(1, False)]


def test_a_job_that_is_running_is_not_started_again() -> None:
    copies = handler(FakeCuda(instant=False))
    assert copies.transfer_async(1, spec())
    assert copies.transfer_async(1, spec()) is False
    assert copies.transfer_all_async([(2, spec(2, 2)), (2, spec(3, 3))]) == [2]


# ----------------------------------------------------------------------------------------------------------- start, end


def test_rows_are_pinned_once_for_both_directions_and_unpinned_after_the_last() -> None:
    api = FakeCuda()
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    pinned = PinnedRows(rows, api)
    store, load = (CudaCopyHandler(cache, pinned, layout, direction, api.kernel) for direction in Direction)
    assert api.runtime.registered == {rows.ctypes.data: rows.nbytes}
    store.shutdown()
    store.shutdown()
    assert api.runtime.registered
    load.shutdown()
    assert api.runtime.registered == {}


def test_rows_that_cannot_be_pinned_are_used() -> None:
    api = FakeCuda()
    api.runtime.code = 2
    with api.watched():
        copies = handler(api)
        assert copies.transfer_async(1, spec())
    copies.shutdown()
    assert [result.success for result in copies.get_finished()] == [True]


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


def test_shutdown_lets_the_engine_free_its_kv_cache_and_frees_the_staging_buffer() -> None:
    """This holds while the engine still has the handler, too."""
    api = FakeCuda()
    tensors = kv.block_first()
    cache = canonicalize(tensors, kv.one_group(), kv.NUM_BLOCKS)
    copies = handler(api, cache=cache)
    copies.transfer_async(1, spec())
    staging = weakref.ref(copies.halves[0].untyped_storage())
    kept = [weakref.ref(tensor) for tensor in tensors.values()]
    kept += [weakref.ref(tensor.tensor) for tensor in cache.tensors]
    copies.shutdown()
    del tensors, cache
    assert [tensor() for tensor in kept] == [None] * len(kept)
    assert not copies.halves
    assert staging() is None
    assert [result.success for result in copies.get_finished()] == [True]


def test_too_little_device_memory_shows_at_start_and_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeCuda()
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    pinned = PinnedRows(kv.make_rows(layout), api)

    def allocate(self: CudaCopyHandler) -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            return real(self)

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    real = CudaCopyHandler._allocate_staging
    monkeypatch.setattr(CudaCopyHandler, "_allocate_staging", allocate)
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        CudaCopyHandler(cache, pinned, layout, Direction.STORE, api.kernel)
    assert api.runtime.registered == {}


def test_staging_is_taken_at_start_and_is_no_larger_than_twice_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    api = FakeCuda()
    copies = CudaCopyHandler(cache, PinnedRows(kv.make_rows(layout, 3), api), layout, Direction.STORE, api.kernel)

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError

    monkeypatch.setattr(torch, "empty", empty)
    assert copies.transfer_async(1, spec())
    assert [half.nbytes for half in copies.halves] == [3 * layout.rank_bytes[0]] * 2


@pytest.mark.parametrize("fails", ["the load handler", "the check"])
def test_what_fails_at_registration_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    log = []

    class Handler:
        def __init__(
            self, kv_caches: Any, rows: Any, layout: Any, direction: Direction, kernel: Any, **ways: Any
        ) -> None:
            self.name = direction.name.lower()
            if direction is Direction.LOAD and fails == "the load handler":
                raise MemoryError
            log.append(f"{self.name} built")

        def shutdown(self) -> None:
            log.append(f"{self.name} shut down")

    def check(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cuda, "CudaCopyHandler", Handler)
    monkeypatch.setitem(sys.modules, "tiering.copy.kernel", cast("Any", SimpleNamespace(move_pages=None)))
    monkeypatch.setattr("tiering.copy.self_check.check_round_trip", check)
    on_gpu = cast(
        "Any", SimpleNamespace(tensors=[SimpleNamespace(tensor=SimpleNamespace(device=torch.device("cuda", 1)))])
    )
    with pytest.raises(MemoryError):
        list(make_handlers(on_gpu, np.zeros((1, 8), np.uint8).data, RowLayout(((8,),))))
    if fails == "the check":
        assert log == ["store built", "load built", "load shut down", "store shut down"]
    else:
        assert log == ["store built", "store shut down"]


@pytest.mark.parametrize(
    ("fake", "real"),
    [(FakeCuda, torch.cuda), (FakeStream, torch.cuda.Stream), (FakeEvent, torch.cuda.Event)],
)
def test_the_fake_takes_the_arguments_of_torch(fake: type, real: Any) -> None:
    """Each parameter of the fake has torch's name and position."""
    own = {"watched", "write", "saw", "batch", "kernel", "work", "Stream", "Event"}
    checked = []
    for name, function in vars(fake).items():
        if name.startswith("_") or name in own or not inspect.isfunction(function) or name == "stream":
            continue
        mine = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
        theirs = [parameter for parameter in inspect.signature(getattr(real, name)).parameters if parameter != "self"]
        assert mine == theirs[: len(mine)], name
        checked.append(name)
    assert checked


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
