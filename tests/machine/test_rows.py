"""The rows of all engines in one address range, and the files that the service maps."""

from __future__ import annotations

import contextlib
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
