"""The registration of rows with a faked CUDA runtime: chunks, parts, failures, agreement of ranks."""

from __future__ import annotations

import enum
import mmap
from pathlib import Path
from threading import Event, current_thread
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.copy.fake_cuda import FakeCuda
from tiering.copy import pinning
from tiering.copy.cudart import find_relaxation, maps_registered_memory
from tiering.copy.layout import RowLayout
from tiering.copy.pinning import PinnedRows, Range, chunk_rows, ranges_to_pin
from tiering.errors import ConfigError
from tiering.primary.memory.preparation import PREPARED, Preparation
from tiering.primary.memory.region import SharedRegion

GIB = 1 << 30
PAGE = mmap.PAGESIZE
CPU = torch.device("cpu")
MAPS = Path("/proc/self/maps")


def rows_of(num_rows: int, stride: int = PAGE) -> NDArray[np.uint8]:
    return SharedRegion.create(num_rows, stride).array


# --------------------------------------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize("stride", [PAGE, 2 << 20, 3 * PAGE, 100 * GIB, 5000])
def test_chunks_end_between_rows_on_page_borders_and_cover_all_rows(stride: int) -> None:
    num_rows = max(2, 700 * GIB // stride)
    ranges = ranges_to_pin(num_rows, stride, None)
    assert sum(part.nbytes for part in ranges) == num_rows * stride
    assert all(part.nbytes <= max(64 << 20, stride) for part in ranges)
    assert all(part.offset % PAGE == 0 and part.offset % stride == 0 for part in ranges)
    assert [part.offset for part in ranges[1:]] == [part.offset + part.nbytes for part in ranges[:-1]]


def test_a_pool_is_pinned_in_chunks_that_take_the_driver_milliseconds() -> None:
    assert len(ranges_to_pin(512 * GIB // (2 << 20), 2 << 20, None)) == 512 << 4
    assert chunk_rows(2 << 20) == 32


def test_a_rank_pins_its_large_part_of_each_row_alone() -> None:
    layout = RowLayout(((1 << 20, 1 << 20),), rank=1, world_size=8)
    ranges = ranges_to_pin(100, layout.row_stride, layout.part)
    assert ranges == [Range(row * (16 << 20) + (2 << 20), 2 << 20) for row in range(100)]


@pytest.mark.parametrize(
    ("num_rows", "layout"),
    [
        (100, RowLayout(((1 << 20,),), rank=1, world_size=8)),  # small parts
        (1 << 15, RowLayout(((2 << 20,),), rank=1, world_size=8)),  # too many parts
        (100, RowLayout(((2 << 20,),))),  # the part is the whole row
        (100, RowLayout(((2 << 20,),), rank=1, world_size=8, copies=8)),
        (100, RowLayout(((8 << 20,), (1 << 20,)), rank=1, world_size=2)),  # the groups' parts lie in different places
    ],
)
def test_a_rank_pins_all_rows_where_parts_gain_little(num_rows: int, layout: RowLayout) -> None:
    assert sum(part.nbytes for part in ranges_to_pin(num_rows, layout.row_stride, layout.part)) == (
        num_rows * layout.row_stride
    )


# --------------------------------------------------------------------------------------------------------- registration


def test_a_pool_that_is_larger_than_one_registration_may_be_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 4 * PAGE)
    api = FakeCuda()
    api.runtime.limit = 4 * PAGE
    rows = rows_of(10)
    pinned = PinnedRows(rows, api)
    pinned.acquire(CPU)
    assert pinned.is_pinned
    address = rows.ctypes.data
    assert api.runtime.registered == {
        address: 4 * PAGE,
        address + 4 * PAGE: 4 * PAGE,
        address + 8 * PAGE: 2 * PAGE,
    }
    pinned.release(CPU)
    assert api.runtime.registered == {}


def test_a_chunk_that_fails_leaves_nothing_pinned_and_no_error_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 4 * PAGE)
    api = FakeCuda()
    api.runtime.fails_after = 2
    pageable = np.zeros(1, np.uint8)
    pinned = PinnedRows(rows_of(10), api, rank=3, pageable=pageable)
    with api.watched():
        pinned.acquire(CPU)
        assert (pinned.is_pinned, api.runtime.registered) == (False, {})
        api.runtime.launch()  # the engine's next kernel
    assert pageable[0] == 1
    assert "rank 3: CUDA error 2" in caplog.text
    assert "8 KiB of the" not in caplog.text
    assert f"at byte {8 * PAGE} of" in caplog.text
    assert "ulimit" not in caplog.text
    pinned.release(CPU)


def test_the_error_of_memory_that_is_registered_already_is_not_left_to_the_engine() -> None:
    """The second attempt succeeds, but the engine's next kernel would still raise the first one's error."""
    api = FakeCuda()
    rows = rows_of(4)
    api.runtime.registered[rows.ctypes.data] = PAGE
    pinned = PinnedRows(rows, api)
    with api.watched():
        pinned.acquire(CPU)
        api.runtime.launch()
    assert api.runtime.registered == {rows.ctypes.data: rows.nbytes}


def test_rows_that_copies_would_miss_are_refused_without_an_error_left_behind() -> None:
    """CUDA holds an old registration of a part of the range, whose pages a copy would use."""
    api = FakeCuda()
    rows = rows_of(4)
    api.runtime.registered[rows.ctypes.data + PAGE] = PAGE
    with api.watched():
        with pytest.raises(ConfigError, match="an earlier engine of this process"):
            PinnedRows(rows, api).acquire(CPU)
        api.runtime.launch()


def test_memory_that_cannot_be_unpinned_is_logged_and_leaves_no_error(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeCuda()
    pinned = PinnedRows(rows_of(4), api, rank=1)
    pinned.acquire(CPU)
    api.runtime.registered.clear()
    with api.watched():
        pinned.release(CPU)
        api.runtime.launch()
    assert "rank 1" in caplog.text
    assert "CUDA error 713" in caplog.text


def test_rows_are_pinned_on_the_device_of_the_kv_cache() -> None:
    api = FakeCuda()
    pinned = PinnedRows(rows_of(2), api)
    pinned.acquire(CPU)
    pinned.release(CPU)
    assert api.runtime.on == [CPU] * 2
    assert api.current_device is None


class Status(enum.Enum):
    """A Python enum, as in newer bindings."""

    success = 0


class Refusal(enum.IntEnum):
    out_of_memory = 2


@pytest.mark.parametrize(
    ("answer", "is_pinned"), [(Status.success, True), (Refusal.out_of_memory, False), (ValueError("2"), False)]
)
def test_an_answer_of_cuda_may_be_any_kind_of_enum(
    monkeypatch: pytest.MonkeyPatch, answer: Any, is_pinned: bool
) -> None:
    api = FakeCuda()

    def register(ptr: int, size: int, flags: int) -> Any:
        if isinstance(answer, Exception):
            raise answer  # the enum has no name for this number
        return answer

    monkeypatch.setattr(api.runtime, "cudaHostRegister", register)
    pinned = PinnedRows(rows_of(2), api)
    pinned.acquire(CPU)
    assert pinned.is_pinned is is_pinned


# ---------------------------------------------------------------------------------------------------------------- ranks


def test_ranks_agree_that_no_rank_keeps_pinned_rows_when_one_cannot(caplog: pytest.LogCaptureFixture) -> None:
    """They agree through the byte that the sides of a region share."""
    name = f"test-agree-{id(caplog)}"
    sides = [SharedRegion.open_shared(name, 4, PAGE, sides=2) for _ in range(2)]
    apis = [FakeCuda(), FakeCuda()]
    apis[1].runtime.code = 1
    ranks = [
        PinnedRows(side.array, api, rank=rank, pageable=side.pageable)
        for rank, (side, api) in enumerate(zip(sides, apis, strict=True))
    ]
    ranks[0].acquire(CPU)
    ranks[0].agree(CPU)  # a copy of the self-check, before the other ranks have registered
    ranks[0].expect_agreement()
    assert ranks[0].is_pinned
    ranks[1].acquire(CPU)
    ranks[0].agree(CPU)
    assert [rank.is_pinned for rank in ranks] == [False, False]
    assert apis[0].runtime.registered == {}
    assert "rank 0: another rank could not pin" in caplog.text
    for rank, side in zip(ranks, sides, strict=True):
        rank.release(CPU)
        side.close()


def test_released_rows_do_not_keep_the_region_mapped() -> None:
    region = SharedRegion.create(4, PAGE)
    pinned = PinnedRows(region.array, FakeCuda(), pageable=region.pageable)
    pinned.acquire(CPU)
    address = f"{region.address:x}-"
    region.close()
    assert address in MAPS.read_text()
    pinned.release(CPU)
    assert address not in MAPS.read_text()


# ------------------------------------------------------------------------------------------- beside the engine's start


class _Starting:
    """Rows whose preparation waits until a test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        monkeypatch.setattr(pinning, "_CHUNK_BYTES", 4 * PAGE)
        monkeypatch.setattr(pinning, "find_relaxation", lambda: lambda: self.relaxed.append(current_thread().name))
        self.relaxed: list[str] = []
        self.api = FakeCuda()
        self.rows = rows_of(16)
        self.state = np.zeros(1, np.uint8)
        self.preparation = Preparation(self.state)
        self.go = Event()
        self.preparation.begin(lambda is_over: cast("None", self.go.wait(60)))
        self.pinned = PinnedRows(self.rows, self.api, rank=rank, preparation=self.preparation)

    def end(self) -> None:
        """Wait for the end of the preparation."""
        for thread in enumerate_threads():
            if thread.name == "kv-tiering-prepare":
                thread.join(60)
        assert self.state[0] == PREPARED

    @property
    def chunks(self) -> list[int]:
        """Numbers of the registered chunks, in the order of their registration."""
        return [(address - self.rows.ctypes.data) // (4 * PAGE) for address in self.api.runtime.registered]


@pytest.mark.parametrize(("rank", "first"), [(0, 3), (5, 2)])
def test_beside_a_start_the_row_of_the_check_is_pinned_first(
    monkeypatch: pytest.MonkeyPatch, rank: int, first: int
) -> None:
    start = _Starting(monkeypatch, rank)
    start.pinned.acquire(CPU)
    start.go.set()
    start.end()
    assert start.chunks == [first], "no other range may fail while copies are checked"
    start.pinned.expect_agreement()
    start.end()
    assert sorted(start.chunks) == [0, 1, 2, 3]
    assert start.relaxed == ["kv-tiering-prepare"], "a capture of the engine's graphs would fail"
    assert start.pinned.is_pinned
    start.pinned.release(CPU)
    assert start.chunks == []


def test_rows_that_are_released_meanwhile_are_not_pinned_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    start = _Starting(monkeypatch)
    start.pinned.acquire(CPU)
    start.pinned.expect_agreement()
    start.pinned.release(CPU)
    start.go.set()
    start.end()
    assert start.chunks == []
    start.preparation.close()


def test_a_driver_that_refuses_later_leaves_none_pinned_and_the_rows_in_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = _Starting(monkeypatch)
    start.pinned.acquire(CPU)
    start.pinned.expect_agreement()
    start.api.runtime.fails_after = 2
    start.go.set()
    start.end()
    assert (start.chunks, start.pinned.is_pinned) == ([], False)
    assert caplog.text.count("the copies of all ranks are slower") == 1


def test_without_the_drivers_call_for_captures_rows_are_pinned_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = _Starting(monkeypatch)
    monkeypatch.setattr(pinning, "find_relaxation", lambda: None)
    start.pinned.acquire(CPU)
    assert start.chunks == [0, 1, 2, 3]
    start.go.set()
    start.preparation.close()


def test_the_relaxation_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: modes.append(mode._obj.value))
    relax = find_relaxation(lambda name: driver)
    assert relax is not None
    relax()
    assert modes == [2]  # CU_STREAM_CAPTURE_MODE_RELAXED of cuda.h
    assert find_relaxation(lambda name: object()) is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert find_relaxation(lambda name: driver) is None


# ---------------------------------------------------------------------------------------------------- kernels and rows


class _Driver:
    """A driver whose device 3 has the attribute."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: Any) -> int:  # noqa: N802
        assert attribute == 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM of cuda.h
        found._obj.value = device.value == 3
        return self.code


def test_the_driver_says_whether_kernels_may_use_registered_memory() -> None:
    assert maps_registered_memory(torch.device("cuda", 3), lambda name: _Driver())
    assert not maps_registered_memory(torch.device("cuda", 2), lambda name: _Driver())
    assert not maps_registered_memory(torch.device("cuda", 3), lambda name: _Driver(code=1))


def test_without_a_driver_or_with_rocm_no_kernel_uses_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    assert not maps_registered_memory(torch.device("cuda", 3), missing)
    assert not maps_registered_memory(torch.device("cuda", 3), lambda name: object())
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not maps_registered_memory(torch.device("cuda", 3), lambda name: _Driver())
