"""The shared region: its shape, sides that map it in any order, and no debris after any kill."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.thread_limit import ThreadLimit
from tiering.errors import ConfigError, RegionError
from tiering.primary.memory import prefault, region, room
from tiering.primary.memory.filelock import try_lock
from tiering.primary.memory.region import MARK_BYTES, PAGE, SharedRegion, shared_path, sweep

ROWS, ROW_BYTES = 16, 5000


def open_side(
    directory: Path, *, name: str = "engine-0", num_rows: int = ROWS, row_bytes: int = ROW_BYTES, sides: int = 2
) -> SharedRegion:
    return SharedRegion.open_shared(name, num_rows, row_bytes, sides=sides, directory=directory)


def files(directory: Path) -> list[Path]:
    return list(directory.iterdir())


# ---------------------------------------------------------------------------------------------------------------- shape


def test_rows_are_page_aligned_and_zero_and_seen_as_bytes() -> None:
    shared = SharedRegion.create(ROWS, ROW_BYTES)
    assert shared.row_stride == 2 * PAGE
    assert shared.address % PAGE == 0
    assert shared.nbytes == ROWS * shared.row_stride
    assert (shared.view.shape, shared.view.format) == ((ROWS, shared.row_stride), "B")
    assert not shared.array.any()
    np.asarray(shared.view)[3] = 7
    assert (shared.array[3] == 7).all()
    assert not shared.array[4].any()
    shared.close()


def test_an_anonymous_region_is_complete_and_has_no_name() -> None:
    before = set(region.SHM.iterdir())
    shared = SharedRegion.create(ROWS, ROW_BYTES)
    assert shared.is_complete
    assert set(region.SHM.iterdir()) <= before
    shared.close()


def test_sides_see_each_others_marks_also_after_a_close(tmp_path: Path) -> None:
    sides = [
        SharedRegion.open_shared("engine-0", ROWS, ROW_BYTES, sides=5, directory=tmp_path, mark=mark)
        for mark in (None, b"a" * MARK_BYTES, b"a" * MARK_BYTES)
    ]
    assert [side.marks for side in sides] == [[b"a" * MARK_BYTES]] * 3
    sides += [
        SharedRegion.open_shared("engine-0", ROWS, ROW_BYTES, sides=5, directory=tmp_path, mark=mark)
        for mark in (b"b" * MARK_BYTES, b"c" * MARK_BYTES)
    ]
    sides[0].close()
    assert [side.marks for side in sides] == [[b"a" * MARK_BYTES, b"b" * MARK_BYTES]] * 5
    assert all(not side.array.any() for side in sides[1:])
    for side in sides:
        side.close()


def test_marked_sides_of_two_engines_with_one_name_are_not_all_sides_of_one(tmp_path: Path) -> None:
    """Two workers that start before either scheduler would write into each other's rows."""
    mark = b"a" * MARK_BYTES
    worker = SharedRegion.open_shared("engine-0", ROWS, ROW_BYTES, sides=2, directory=tmp_path, mark=mark)
    with pytest.raises(RegionError, match="do two engines share one engine id"):
        SharedRegion.open_shared("engine-0", ROWS, ROW_BYTES, sides=2, directory=tmp_path, mark=mark)
    assert not worker.is_complete
    scheduler = open_side(tmp_path)
    assert worker.is_complete
    for side in (worker, scheduler):
        side.close()


def test_a_region_of_one_process_has_no_marks() -> None:
    shared = SharedRegion.create(ROWS, ROW_BYTES)
    assert shared.marks == []
    shared.close()


@pytest.mark.parametrize(("rows", "row_bytes"), [(0, 1), (1, 0), (-1, 5)])
def test_a_region_that_holds_nothing_is_refused(rows: int, row_bytes: int) -> None:
    with pytest.raises(ConfigError, match="holds nothing"):
        SharedRegion.create(rows, row_bytes)


def test_close_is_idempotent_and_views_outlive_it() -> None:
    shared = SharedRegion.create(ROWS, ROW_BYTES)
    view = shared.view
    shared.close()
    shared.close()
    gc.collect()
    rows = np.asarray(view)
    rows[ROWS - 1] = 9
    assert (rows[ROWS - 1] == 9).all()
    with pytest.raises(RegionError, match="closed"):
        _ = shared.array


def test_closed_regions_keep_no_descriptor() -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    SharedRegion.create(ROWS, ROW_BYTES).close()
    gc.collect()
    before = descriptors()
    for _ in range(5):
        SharedRegion.create(ROWS, ROW_BYTES).close()
    gc.collect()
    assert descriptors() == before


# -------------------------------------------------------------------------------------------------------- several sides


def test_sides_share_memory_and_the_last_one_unlinks(tmp_path: Path) -> None:
    scheduler = open_side(tmp_path, sides=3)
    first = open_side(tmp_path, sides=3)
    assert files(tmp_path) == [shared_path("engine-0", tmp_path)]
    assert not scheduler.is_complete
    second = open_side(tmp_path, sides=3)
    assert files(tmp_path) == []
    assert all(side.is_complete for side in (scheduler, first, second))
    first.array[5] = 42
    assert (scheduler.array[5] == 42).all()
    assert (second.array[5] == 42).all()


def test_sides_that_start_at_the_same_time_meet(tmp_path: Path) -> None:
    sides: list[SharedRegion] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        sides.append(open_side(tmp_path, sides=8))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [side.is_complete for side in sides] == [True] * 8
    assert files(tmp_path) == []
    sides[0].array[0] = 1
    assert all((side.array[0] == 1).all() for side in sides)


def test_the_name_is_free_again_once_complete(tmp_path: Path) -> None:
    old = [open_side(tmp_path), open_side(tmp_path)]
    old[0].array[0] = 1
    new = [open_side(tmp_path), open_side(tmp_path)]
    assert not new[1].array.any()


def test_names_that_are_no_file_names_do_not_become_paths(tmp_path: Path) -> None:
    sides = [open_side(tmp_path, name="../a/b \n")]
    assert [path.parent for path in files(tmp_path)] == [tmp_path]
    sides.append(open_side(tmp_path, name="../a/b \n"))
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "sides"), [(17, ROW_BYTES, 2), (ROWS, 20000, 2), (ROWS, ROW_BYTES, 3)]
)
def test_sides_that_disagree_are_told(tmp_path: Path, num_rows: int, row_bytes: int, sides: int) -> None:
    first = open_side(tmp_path)
    with pytest.raises(ConfigError, match="same configuration"):
        open_side(tmp_path, num_rows=num_rows, row_bytes=row_bytes, sides=sides)
    assert not open_side(tmp_path).array.any()
    assert first.is_complete


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = shared_path("engine-0", tmp_path)
    path.write_bytes(b"")
    path.chmod(0o644)
    holder = os.open(path, os.O_RDWR)
    try:
        assert try_lock(holder, 0, 0)  # keeps the region from being swept
        with pytest.raises(RegionError, match="not private"):
            open_side(tmp_path)
    finally:
        os.close(holder)


def test_a_header_that_is_never_released_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    path = shared_path("engine-0", tmp_path)
    holder = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        assert try_lock(holder, 0, 0)
        with pytest.raises(RegionError, match="does not let go"):
            SharedRegion.open_shared("engine-0", ROWS, ROW_BYTES, sides=2, directory=tmp_path, timeout=0.0)
    finally:
        os.close(holder)


# -------------------------------------------------------------------------------------------------- nothing left behind


def test_a_side_that_gives_up_leaves_nothing(tmp_path: Path) -> None:
    open_side(tmp_path).close()
    assert files(tmp_path) == []


def test_a_side_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    open_side(tmp_path)
    gc.collect()
    assert files(tmp_path) == []


def test_sweeping_leaves_alone_what_is_held(tmp_path: Path) -> None:
    held = open_side(tmp_path)
    assert sweep(tmp_path) == []
    assert files(tmp_path) == [shared_path("engine-0", tmp_path)]
    held.close()


CHILD = """
import sys, threading
from pathlib import Path
from tiering.primary.memory import region
moment, directory = sys.argv[1], Path(sys.argv[2])
def here(*_, **__):
    print("here", flush=True)
    threading.Event().wait()
if moment == "created": region._agree = here
if moment == "sized": region.os.pwrite = here
if moment == "agreed": region._take_slot = here
if moment == "slot taken": region.SharedRegion.__init__ = here
if moment == "prefaulting": region.prefault = here
side = region.SharedRegion.open_shared("engine-0", 16, 5000, sides=2, directory=directory)
side.array[0] = 99
if moment == "both": other = region.SharedRegion.open_shared("engine-0", 16, 5000, sides=2, directory=directory)
here()
"""


@contextmanager
def child_at(moment: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, moment, str(directory)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        yield child
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


@pytest.mark.parametrize("moment", ["created", "sized", "agreed", "slot taken", "prefaulting", "mapped"])
def test_a_side_that_is_killed_is_swept_by_the_next_start(tmp_path: Path, moment: str) -> None:
    with child_at(moment, tmp_path) as child:
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert len(files(tmp_path)) == 1
    mine = open_side(tmp_path)
    assert not mine.is_complete
    assert not mine.array.any()
    other = open_side(tmp_path)
    assert mine.is_complete
    assert other.is_complete
    assert files(tmp_path) == []


def test_once_both_sides_have_it_nothing_is_there_to_be_left(tmp_path: Path) -> None:
    with child_at("both", tmp_path) as child:
        assert files(tmp_path) == []
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert files(tmp_path) == []


def test_a_side_that_dies_is_not_counted_while_others_wait(tmp_path: Path) -> None:
    mine = open_side(tmp_path, sides=2)
    theirs = open_side(tmp_path, name="other", sides=2)  # a second region beside it
    third = SharedRegion.open_shared("three", ROWS, ROW_BYTES, sides=3, directory=tmp_path)
    dead = SharedRegion.open_shared("three", ROWS, ROW_BYTES, sides=3, directory=tmp_path)
    dead.close()
    again = SharedRegion.open_shared("three", ROWS, ROW_BYTES, sides=3, directory=tmp_path)
    assert not third.is_complete
    last = SharedRegion.open_shared("three", ROWS, ROW_BYTES, sides=3, directory=tmp_path)
    assert third.is_complete
    last.array[1] = 3
    assert (again.array[1] == 3).all()
    for side in (mine, theirs):
        side.close()
    assert files(tmp_path) == []


def test_a_side_in_another_process_shares_the_memory(tmp_path: Path) -> None:
    with child_at("mapped", tmp_path):
        mine = open_side(tmp_path)
        assert mine.is_complete
        assert (mine.array[0] == 99).all()
        assert files(tmp_path) == []


# ----------------------------------------------------------------------------------------------------------------- room


def test_too_little_shared_memory_says_which_option_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_bavail, f_frsize = 10, PAGE

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    with pytest.raises(RegionError, match=r"--shm-size.*emptyDir.*primary\.capacity"):
        open_side(tmp_path)
    assert files(tmp_path) == []


def cgroup(tmp_path: Path, layout: dict[str, str], membership: str) -> tuple[Path, Path]:
    for name, text in (layout | {"proc/self/cgroup": membership}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "proc", tmp_path / "sys"


def test_the_tightest_memory_group_counts_in_version_2(tmp_path: Path) -> None:
    proc, sysfs = cgroup(
        tmp_path,
        {
            "sys/a/memory.max": "1000\n",
            "sys/a/memory.current": "900\n",
            "sys/a/memory.stat": "anon 100\ninactive_file 300\nactive_file 100\n",
            "sys/a/b/memory.max": "max\n",
            "sys/a/b/memory.current": "10\n",
        },
        "0::/a/b\n",
    )
    assert room.cgroup_free_bytes(proc, sysfs) == 500
    with pytest.raises(RegionError, match=r"--memory.*limits\.memory"):
        room.check_room(501, None, proc=proc, sysfs=sysfs)
    room.check_room(500, None, proc=proc, sysfs=sysfs)


def test_memory_groups_of_version_1_count(tmp_path: Path) -> None:
    proc, sysfs = cgroup(
        tmp_path,
        {
            "sys/memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
            "sys/memory/memory.usage_in_bytes": "5\n",
            "sys/memory/c/memory.limit_in_bytes": "4096\n",
            "sys/memory/c/memory.usage_in_bytes": "1096\n",
            "sys/memory/c/memory.stat": "inactive_file 1\ntotal_inactive_file 96\ntotal_active_file 0\n",
        },
        "5:memory:/c\n4:cpu,cpuacct:/\n",
    )
    assert room.cgroup_free_bytes(proc, sysfs) == 4096 - 1000


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    proc, sysfs = cgroup(tmp_path, {"sys/x": ""}, "0::/\n")
    assert room.cgroup_free_bytes(proc, sysfs) is None


def test_the_memory_of_the_machine_counts(tmp_path: Path) -> None:
    proc, sysfs = cgroup(tmp_path, {"proc/meminfo": "MemTotal: 10 kB\nMemAvailable:    4 kB\n"}, "0::/\n")
    room.check_room(4096, None, proc=proc, sysfs=sysfs)
    with pytest.raises(RegionError, match="memory available"):
        room.check_room(4097, None, proc=proc, sysfs=sysfs)


def test_memory_that_vanished_since_the_check_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, "advise", lambda address, nbytes, advice: 14)
    with pytest.raises(RegionError, match="another program took it"):
        open_side(tmp_path)
    assert files(tmp_path) == []


def test_prefaulting_on_old_kernels_reserves_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_side(tmp_path)
    first.array[:] = 5
    monkeypatch.setattr(prefault, "advise", lambda address, nbytes, advice: 22)
    second = open_side(tmp_path)
    assert (second.array == 5).all()


def test_an_address_space_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(RegionError, match="ulimit -v"):
        SharedRegion.create(ROWS, ROW_BYTES)


def test_threads_that_cannot_be_started_are_a_region_error_with_the_limit(thread_limit: ThreadLimit) -> None:
    thread_limit.reach("prefault")
    with pytest.raises(RegionError, match=r"ulimit -u.* or on memory \(ulimit -v"):
        SharedRegion.create(ROWS, ROW_BYTES)
    assert len(thread_limit.refused) == 1


def test_one_thread_is_enough_to_prepare_the_memory(thread_limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "_CHUNK", room_bytes := 4096)
    thread_limit.refuse = lambda name: "prefault" in name and not name.endswith("-0")
    created = SharedRegion.create(ROWS, ROW_BYTES)
    assert created.nbytes > room_bytes
    assert len(thread_limit.refused) == 1
    created.close()
