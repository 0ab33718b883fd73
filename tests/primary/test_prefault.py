"""One side's share of a region's preparation: its pages, their order, and its CPUs."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tiering.primary.memory import prefault as module
from tiering.primary.memory.prefault import Share
from tiering.primary.memory.region import SharedRegion

PAGE = mmap.PAGESIZE


def present(rows: NDArray[np.uint8]) -> list[bool]:
    """Return which pages of the rows this process has in memory, read from the kernel."""
    with open("/proc/self/pagemap", "rb") as file:  # noqa: PTH123
        file.seek(rows.ctypes.data // PAGE * 8)
        entries = np.frombuffer(file.read(rows.nbytes // PAGE * 8), np.uint64)
    return [bool(entry >> 63) for entry in entries.tolist()]


def test_a_side_prepares_its_part_of_each_row_and_no_more() -> None:
    share = Share(4 * PAGE, PAGE + 100, 2 * PAGE + 1)
    region = SharedRegion.create(3, 4 * PAGE, share=share)
    assert present(region.array) == [False, True, True, False] * 3
    assert not region.array.any()
    region.close()


def test_without_a_share_all_pages_are_prepared() -> None:
    region = SharedRegion.create(3, 4 * PAGE)
    assert present(region.array) == [True] * 12
    region.close()


def test_the_parts_of_all_ranks_are_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 3 * PAGE)
    stride, size, ranks = 8 * PAGE, 7 * PAGE + 5, 3
    part = size // ranks
    pages: set[int] = set()
    for rank in range(ranks):
        share = Share(stride, rank * part, (rank + 1) * part + 2)
        for run in share.runs(10 * stride):
            for start, stop in share.ranges(run):
                assert start % PAGE == stop % PAGE == 0
                pages.update(range(start // PAGE, stop // PAGE))
    assert pages == set(range(80))


def test_sides_with_the_same_bytes_begin_at_different_places() -> None:
    runs = [Share(PAGE, 0, PAGE, turn, 4).runs(8 * module._CHUNK) for turn in range(4)]
    assert [run[0][0] // module._CHUNK for run in runs] == [0, 2, 4, 6]
    assert len({frozenset(run) for run in runs}) == 1


def test_memory_is_prepared_on_the_given_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    seen: list[set[int]] = []
    real: Callable[[int, int, int], int] = module.advise

    def madvise(address: int, nbytes: int, advice: int) -> int:
        if advice == module._MADV_POPULATE_WRITE:
            seen.append(os.sched_getaffinity(0))
        return real(address, nbytes, advice)

    monkeypatch.setattr(module, "advise", madvise)
    SharedRegion.create(2, PAGE, share=Share(PAGE, 0, PAGE, cpus=frozenset({one, 99999}))).close()
    SharedRegion.create(2, PAGE, share=Share(PAGE, 0, PAGE, cpus=frozenset({99999}))).close()
    assert seen == [{one}, allowed]
    assert os.sched_getaffinity(0) == allowed
