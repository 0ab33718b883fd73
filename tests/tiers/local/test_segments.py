"""Segment files: one call for neighbours, short calls, media that refuse, files created in advance."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import FaultyDevice
from tiering.errors import (
    ConfigError,
    DeviceError,
    OutOfSpaceError,
    PermanentStoreError,
    ReadOnlyError,
    StoreError,
    TemporaryStoreError,
)
from tiering.medium.block_store import BlockIO, Done
from tiering.medium.files import Files
from tiering.testing.frames import block_to_get, block_to_put, frame_bytes
from tiering.testing.tier_rig import TierRig
from tiers.local.checkpoint import WrittenMarks
from tiers.local.layout import MAX_SEGMENTS, PAGE, SegmentGeometry, used_bytes, used_bytes_of_few
from tiers.local.local_options import LocalOptions
from tiers.local.new_segments import SegmentPace
from tiers.local.segments import Segments
from tiers.local.store import LocalStore
from tiers.local.tier import LocalTier

BLOCK_BYTES = 16 << 10
CAPACITY = 2 << 20
GEOMETRY = SegmentGeometry.plan(CAPACITY, BLOCK_BYTES, 512 << 10)


@pytest.fixture
def device() -> FaultyDevice:
    return FaultyDevice()


@pytest.fixture
def store(tmp_path: Path, device: FaultyDevice) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "kv", GEOMETRY, CAPACITY, files=device)
    store.open()
    device.calls.clear()
    yield store
    device.fail = lambda operation, path: None
    store.close()


def blocks(store: LocalStore, *slots: int, size: int = BLOCK_BYTES) -> list[BlockIO]:
    return [block_to_put(store, slot, size, number=slot) for slot in slots]


def come_back(store: LocalStore, put: list[BlockIO]) -> bool:
    got = [block_to_get(store, block.place, len(block.payload), number=int(block.place)) for block in put]
    return store.get(got) == [Done.DONE] * len(got) and list(map(frame_bytes, got)) == list(map(frame_bytes, put))


def operations(device: FaultyDevice, *names: str) -> int:
    return sum(operation in names for operation, _ in device.calls)


# ----------------------------------------------------------------------------------------------------------- coalescing


def test_neighbouring_slots_go_in_one_call_whatever_their_order(store: LocalStore, device: FaultyDevice) -> None:
    put = blocks(store, 5, 3, 4, 2, 9)
    assert store.put(put) == [Done.DONE] * 5
    assert operations(device, "write") == 2
    device.calls.clear()
    assert come_back(store, put)
    assert operations(device, "read") == 2


def test_a_run_ends_at_the_end_of_its_segment(store: LocalStore, device: FaultyDevice) -> None:
    end = GEOMETRY.slots_per_segment
    put = blocks(store, end - 2, end - 1, end, end + 1)
    assert store.put(put) == [Done.DONE] * 4
    assert operations(device, "write") == 2
    assert come_back(store, put)


def test_blocks_shorter_than_a_slot_are_not_run_together(store: LocalStore) -> None:
    put = blocks(store, 1, 2, 3, size=PAGE)
    assert store.put(put) == [Done.DONE] * 3
    assert come_back(store, put)


def test_a_run_longer_than_a_vectored_call_is_cut(tmp_path: Path, device: FaultyDevice) -> None:
    geometry = SegmentGeometry(2 * PAGE, 700, 1)
    store = LocalStore(tmp_path, geometry, 16 << 20, files=device)
    store.open()
    device.calls.clear()
    put = blocks(store, *range(700), size=PAGE)
    assert store.put(put) == [Done.DONE] * 700
    assert operations(device, "write") == 2
    assert come_back(store, put)
    store.close()


@pytest.mark.parametrize(
    ("block_bytes", "count", "reads"), [(64 << 10, 9, 1), (64 << 10, 10, 2), (512 << 10, 3, 3), (2 << 20, 3, 1)]
)
def test_neighbours_below_half_a_megabyte_are_read_in_calls_of_that_size(
    tmp_path: Path, device: FaultyDevice, block_bytes: int, count: int, reads: int
) -> None:
    geometry = SegmentGeometry(block_bytes + PAGE, count, 1)
    store = LocalStore(tmp_path, geometry, 16 << 20, files=device)
    store.open()
    device.calls.clear()
    put = blocks(store, *range(count), size=block_bytes)
    assert store.put(put) == [Done.DONE] * count
    assert operations(device, "write") == 1
    assert come_back(store, put)
    assert operations(device, "read") == reads
    store.close()


def test_one_read_that_fails_does_not_fail_the_other_reads_of_a_call(store: LocalStore, device: FaultyDevice) -> None:
    put = blocks(store, 1, 3, 4, 6)
    assert store.put(put) == [Done.DONE] * 4
    fails = iter([False, True, False, False, True])

    def fail(operation: str, path: Path) -> None:
        if operation == "read" and next(fails):
            raise OSError(errno.EIO, "bad sector")

    device.fail = fail
    got = [block_to_get(store, block.place, BLOCK_BYTES, number=int(block.place)) for block in put]
    outcomes = store.get(got)
    assert [type(outcome) for outcome in outcomes] == [Done, Done, DeviceError, Done]
    assert [frame_bytes(got[at]) for at in (0, 1, 3)] == [frame_bytes(put[at]) for at in (0, 1, 3)]


# ---------------------------------------------------------------------------------------------------------------- marks


def marks_of(store: LocalStore, generation: int) -> set[int] | None:
    marks = WrittenMarks(Segments(store.directory, GEOMETRY, Files()), durable=False)
    try:
        return marks.resume(generation)
    finally:
        marks.close()


def test_the_first_write_of_a_generation_marks_its_segment(store: LocalStore) -> None:
    first = store.marks.begin()
    assert store.put(blocks(store, 0, 1)) == [Done.DONE] * 2
    assert marks_of(store, first) == {0}
    assert store.put(blocks(store, GEOMETRY.slots_per_segment)) == [Done.DONE]
    assert marks_of(store, first) == {0, 1}
    second = store.marks.begin()
    assert marks_of(store, second) == set()
    assert store.put(blocks(store, 2)) == [Done.DONE]
    assert marks_of(store, second) == {0}


def test_a_segment_is_marked_before_the_write(store: LocalStore, device: FaultyDevice) -> None:
    store.marks.begin()
    device.calls.clear()
    assert store.put(blocks(store, 0)) == [Done.DONE]
    assert store.put(blocks(store, 1)) == [Done.DONE]
    written = [path.name.split("-")[0] for operation, path in device.calls if operation == "write"]
    assert written == ["written", "slots", "slots"]


# --------------------------------------------------------------------------------------------------- calls that do less


@pytest.mark.parametrize("limit", [PAGE, 3 * PAGE, 7 * PAGE])
def test_calls_that_move_less_are_taken_up_where_they_stopped(
    store: LocalStore, device: FaultyDevice, limit: int
) -> None:
    device.limit = limit
    put = blocks(store, 0, 1, 2)
    assert store.put(put) == [Done.DONE] * 3
    assert come_back(store, put)


@pytest.mark.parametrize("limit", [100, PAGE + 17])
def test_through_the_page_cache_calls_may_stop_anywhere(tmp_path: Path, limit: int) -> None:
    device = FaultyDevice()
    device.direct = False
    store = LocalStore(tmp_path, GEOMETRY, CAPACITY, files=device)
    store.open()
    assert not store.segments.direct
    device.limit = limit
    put = blocks(store, 0, 1)
    assert store.put(put) == [Done.DONE] * 2
    assert come_back(store, put)
    store.close()


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EIO, DeviceError),
        (errno.ENODATA, DeviceError),
        (errno.EROFS, ReadOnlyError),
        (errno.ENOSPC, OutOfSpaceError),
        (errno.EDQUOT, OutOfSpaceError),
        (errno.EAGAIN, TemporaryStoreError),
        (errno.ENOMEM, TemporaryStoreError),
    ],
)
def test_errors_of_the_device_are_typed(
    store: LocalStore, device: FaultyDevice, number: int, expected: type[StoreError]
) -> None:
    device.errors = {"write": number, "read": number}
    assert [type(outcome) for outcome in store.put(blocks(store, 0, 1))] == [expected] * 2
    assert [type(outcome) for outcome in store.get(blocks(store, 0, 1))] == [expected] * 2


def test_one_bad_block_of_a_run_does_not_fail_its_neighbours(store: LocalStore, device: FaultyDevice) -> None:
    put = blocks(store, 0, 1, 2)
    tries = 0

    def fail(operation: str, path: Path) -> None:
        nonlocal tries
        if operation in {"read", "write"}:
            tries += 1
            # The write of the whole run fails, then the write of its second block alone.
            if tries in {1, 3}:
                raise OSError(errno.EIO, "bad sector")

    device.fail = fail
    first, second, third = store.put(put)
    assert (first, third) == (Done.DONE, Done.DONE)
    assert isinstance(second, PermanentStoreError)
    tries = 0
    first, second, third = store.get([block_to_get(store, slot, BLOCK_BYTES, number=slot) for slot in range(3)])
    assert (first, third) == (Done.DONE, Done.DONE)
    assert isinstance(second, PermanentStoreError)


def test_a_write_that_could_not_be_synced_is_not_reported(tmp_path: Path, device: FaultyDevice) -> None:
    store = LocalStore(tmp_path, GEOMETRY, CAPACITY, durable=True, files=device)
    store.open()
    device.errors = {"sync": errno.EIO}
    assert all(isinstance(outcome, PermanentStoreError) for outcome in store.put(blocks(store, 0, 1)))
    device.errors.clear()
    store.close()


def test_a_place_that_is_no_slot_is_refused_and_the_others_are_served(store: LocalStore) -> None:
    wrong = [block_to_put(store, place, BLOCK_BYTES) for place in (-1, GEOMETRY.num_slots, "../x")]
    good = blocks(store, 7)
    outcomes = store.put([*wrong, *good, block_to_put(store, 8, BLOCK_BYTES + PAGE)])
    assert [isinstance(outcome, PermanentStoreError) for outcome in outcomes] == [True, True, True, False, True]
    assert come_back(store, good)


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b", "A", "x" * 200])
def test_a_document_is_never_a_path(store: LocalStore, name: str) -> None:
    with pytest.raises(PermanentStoreError, match="cannot name a document"):
        store.write_document(name, b"")
    with pytest.raises(PermanentStoreError, match="cannot name a document"):
        store.read_document(name)


def test_a_store_that_is_not_open_fails_blocks_and_does_not_raise(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, GEOMETRY, CAPACITY)
    assert [type(outcome) for outcome in store.put(blocks(store, 0))] == [PermanentStoreError]
    assert [type(outcome) for outcome in store.get(blocks(store, 0))] == [PermanentStoreError]


def test_a_directory_that_cannot_be_made_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create"):
        LocalStore(tmp_path / "file" / "kv", GEOMETRY, CAPACITY).open()


def test_after_a_failed_opening_the_directory_is_free_and_can_be_opened(tmp_path: Path, device: FaultyDevice) -> None:
    store = LocalStore(tmp_path, GEOMETRY, CAPACITY, files=device)
    device.errors = {"allocate": errno.ENOSPC}
    with pytest.raises(OutOfSpaceError):
        store.open()
    assert not list(tmp_path.glob("slots-*"))
    device.errors.clear()
    other = LocalStore(tmp_path, GEOMETRY, CAPACITY, files=device)
    other.open()
    other.close()


# ---------------------------------------------------------------------------------------------------------- on the disk


def test_files_and_directories_are_private(store: LocalStore) -> None:
    store.write_document("x", b"x")
    for path in [store.directory, *store.directory.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_segments_are_allocated_before_they_are_used(store: LocalStore) -> None:
    (first, *_) = sorted(store.directory.glob("slots-*"))
    assert first.stat().st_blocks * 512 >= GEOMETRY.segment_bytes


def test_a_segment_that_is_needed_at_once_is_not_written_first(tmp_path: Path, device: FaultyDevice) -> None:
    geometry = SegmentGeometry(BLOCK_BYTES + PAGE, 64, 2)
    store = LocalStore(tmp_path, geometry, geometry.segment_bytes * 3, files=device)
    store.open()
    store.segments.directory.joinpath(geometry.segment_name(1)).unlink()
    (damage,) = store.inspect().damaged
    assert (damage.number, damage.reason) == (1, "was removed")
    assert store.segments.disown(damage)
    assert not store.segments.disown(damage)
    device.calls.clear()
    pace = SegmentPace()
    pace.hurry()
    assert store.new_segments.add(pace) == 1
    assert operations(device, "allocate") == 1
    assert operations(device, "write") == 0
    assert store.new_segments.add(SegmentPace()) is None
    put = blocks(store, 64, 65)
    assert store.put(put) == [Done.DONE] * 2
    assert come_back(store, put)
    store.close()


def test_segments_of_another_shape_are_deleted_oldest_first_when_room_is_needed(tmp_path: Path) -> None:
    sizes = {"slots-8192-4-000000": 3, "slots-8192-4-000001": 1, "slots-12288-9-000000": 2}
    for name, age in sizes.items():
        path = tmp_path / name
        path.write_bytes(bytes(600 << 10))
        os.utime(path, (1000 - age, 1000 - age))
    store = LocalStore(tmp_path, GEOMETRY, CAPACITY)
    store.open()
    assert used_bytes(tmp_path) <= CAPACITY
    left = [name for name in sizes if (tmp_path / name).exists()]
    assert left in (["slots-8192-4-000001"], ["slots-8192-4-000001", "slots-12288-9-000000"], [])
    while store.new_segments.add(SegmentPace(share=1.0)) is not None:
        assert used_bytes(tmp_path) <= CAPACITY
    assert not any((tmp_path / name).exists() for name in sizes)
    store.close()


def test_a_smaller_capacity_gives_segments_back(tmp_path: Path) -> None:
    big = LocalStore(tmp_path, SegmentGeometry.plan(4 << 20, BLOCK_BYTES, 256 << 10), 4 << 20)
    big.open()
    while big.new_segments.add(SegmentPace(share=1.0)) is not None:
        pass
    assert used_bytes(tmp_path) > 3 << 20
    big.close()
    small = LocalStore(tmp_path, SegmentGeometry.plan(2 << 20, BLOCK_BYTES, 256 << 10), 2 << 20)
    small.open()
    small.tidy()
    assert used_bytes(tmp_path) <= 2 << 20
    assert small.remembered.segments
    small.close()


def test_other_files_in_the_directory_count_and_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(bytes(CAPACITY - (100 << 10)))
    with pytest.raises(OutOfSpaceError, match="holds other files"):
        LocalStore(tmp_path, GEOMETRY, CAPACITY).open()
    assert (tmp_path / "notes").exists()


# ------------------------------------------------------------------------------------------------------------- geometry


@pytest.mark.parametrize("capacity", [1 << 20, 100 << 20, 10 << 30, 500 << 30, 30 << 40])
@pytest.mark.parametrize("block", [4096, 5000, 512 << 10, 2 << 20, 100 << 20])
def test_all_slots_fit_into_the_capacity(capacity: int, block: int) -> None:
    try:
        geometry = SegmentGeometry.plan(capacity, block, 1 << 30)
    except ConfigError:
        assert capacity < 2 * block
        return
    assert geometry.slot_bytes >= block + PAGE
    assert geometry.slot_bytes % PAGE == 0
    assert geometry.max_segments * geometry.segment_bytes < capacity
    assert geometry.max_segments * geometry.segment_bytes > capacity * 0.55 - geometry.segment_bytes
    assert geometry.segment_bytes <= max(1 << 30, geometry.slot_bytes)


def test_a_capacity_can_change_without_changing_the_shape() -> None:
    shapes = {SegmentGeometry.plan(capacity << 30, 2 << 20, 1 << 30).segment_name(0) for capacity in (5, 50, 500, 5000)}
    assert len(shapes) == 1


def test_a_capacity_below_one_block_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(ConfigError, match="below one block"):
        SegmentGeometry.plan(1 << 20, 2 << 20, 1 << 30)


def test_a_segment_size_that_makes_too_many_files_is_refused_with_the_least_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"segment_size: 1 bytes would make \d+ segment files .* set at least 16384"):
        SegmentGeometry.plan(1 << 30, 4096, 1)
    assert SegmentGeometry.plan(1 << 30, 4096, 16384).max_segments <= MAX_SEGMENTS
    assert SegmentGeometry.plan(60 << 40, 2 << 20, 1 << 30).max_segments <= MAX_SEGMENTS


SMALL = SegmentGeometry.plan(8 << 20, 4096, 1)
"""A geometry of a thousand segments of one slot each."""


def test_very_many_small_segments_are_created_with_one_count_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[Path] = []

    def count(root: Path, most: int) -> int | None:
        counts.append(root)
        return used_bytes_of_few(root, most)

    monkeypatch.setattr("tiers.local.new_segments.used_bytes_of_few", count)
    store = LocalStore(tmp_path / "kv", SMALL, 8 << 20)
    store.open()
    store.close()
    assert 1 <= len(store.fresh) <= 256
    assert len(counts) <= 2


def test_the_creation_of_first_segments_ends_when_the_tier_is_shut_down(tmp_path: Path) -> None:
    class Stopping(FaultyDevice):
        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            if new.name.endswith("-000002"):
                opening.stop()

    opening = LocalStore(tmp_path / "kv", SMALL, 8 << 20, files=Stopping())
    opening.open()
    opening.close()
    assert opening.fresh == [0, 1, 2]


def test_a_tier_that_is_shut_down_while_it_opens_creates_no_further_segments(tmp_path: Path) -> None:
    class Waiting(Files):
        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            if new.name.endswith("-000002"):
                began.set()
                stopped.wait(20)

    class StoppedTier(LocalTier):
        def shutdown(self, deadline: float) -> bool:
            stop = self.store.stop

            def stop_and_tell() -> None:
                stop()
                stopped.set()

            self.store.stop = stop_and_tell  # type: ignore[method-assign]
            return super().shutdown(deadline)

    began, stopped = threading.Event(), threading.Event()
    options = LocalOptions.model_validate(
        {"type": "local", "path": str(tmp_path / "kv"), "capacity": 8 << 20, "segment_size": 1}
    )
    rig = TierRig(lambda context: StoppedTier(context, options, files=Waiting()), group_bytes=(4096,))
    rig.tier.open(0.0)
    assert began.wait(20)
    assert rig.tier.shutdown(time.monotonic() + 20)
    assert len(list((tmp_path / "kv").glob("slots-*"))) == 3
