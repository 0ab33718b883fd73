"""The rows of all engines in one address range, and the files that the service maps."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import pytest

from tiering.errors import RegionError
from tiering.machine.rows import RowSpace, check_rows
from tiering.primary.memory.region import SharedRegion

STRIDE = 4096


def test_rows_of_engines_lie_apart_and_their_place_is_used_again() -> None:
    space, one, two = RowSpace(STRIDE, 1 << 30), SharedRegion.create(4, STRIDE), SharedRegion.create(4, STRIDE)
    first, second = space.add(one.fd, 4), space.add(two.fd, 4)
    space.array[first + 1] = 1
    space.array[second + 1] = 2
    assert (one.array[1] == 1).all()
    assert (two.array[1] == 2).all()
    assert not one.array[0].any()
    space.remove(first)
    assert space.add(two.fd, 4) == first
    with pytest.raises(RegionError, match="do not fit"):
        RowSpace(STRIDE, 3 * STRIDE).add(one.fd, 4)
    one.close()
    two.close()


def test_files_that_others_could_cut_are_refused(tmp_path: Path) -> None:
    loose = os.memfd_create("loose")
    os.ftruncate(loose, STRIDE)
    os.fchmod(loose, 0o666)
    on_disk = os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    os.ftruncate(on_disk, STRIDE)
    os.fchmod(on_disk, 0o666)
    for fd in (loose, on_disk):
        with pytest.raises(RegionError):
            check_rows(fd, STRIDE)
        os.close(fd)
    region = SharedRegion.create(1, STRIDE)
    check_rows(region.fd, STRIDE)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(region.fd, 0)
    region.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_rows_of_another_user_have_to_be_sealed() -> None:
    fd = os.memfd_create("private", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, STRIDE)
    os.fchmod(fd, 0o600)
    check_rows(fd, STRIDE)
    os.fchown(fd, 61001, -1)
    with pytest.raises(RegionError, match=r"with several processes needs machine.keep_rows"):
        check_rows(fd, STRIDE)
    fcntl.fcntl(fd, 1033, 0x2 | 0x4)
    check_rows(fd, STRIDE)
    os.close(fd)


def test_rows_in_pages_that_may_be_missing_after_a_hole_was_punched_are_refused() -> None:
    try:
        fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        os.ftruncate(fd, 1 << 30)
    except OSError as error:
        pytest.skip(f"the kernel has no such pages: {error}")
    fcntl.fcntl(fd, 1033, 0x2 | 0x4)
    with pytest.raises(RegionError, match="has pages of"):
        check_rows(fd, STRIDE, sealed=True)
    os.close(fd)


def test_rows_with_a_name_are_refused_until_all_sides_have_mapped_them() -> None:
    """Anyone with the name could cut the file, and the service would die of the missing page."""
    name = f"kv-test-{os.getpid()}"
    with contextlib.ExitStack() as undo:
        one = SharedRegion.open_shared(name, 8, STRIDE, sides=2)
        undo.callback(one.close)
        with pytest.raises(RegionError, match="neither sealed nor private"):
            check_rows(one.fd, 8 * STRIDE)
        two = SharedRegion.open_shared(name, 8, STRIDE, sides=2)
        undo.callback(two.close)
        check_rows(one.fd, 8 * STRIDE)
