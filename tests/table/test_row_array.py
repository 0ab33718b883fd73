"""The memory of large tables, which arrives in small pages."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tiering.block_tier.intake import GhostFilter
from tiering.index.slots import SlotIndex
from tiering.table.row_array import row_array
from tiering.testing.keys import keys_of


@pytest.mark.parametrize("dtype", [object, np.bool_, np.int32, np.int64])
@pytest.mark.parametrize("rows", [0, 1, 5_000_000])
def test_the_entries_are_empty(rows: int, dtype: type) -> None:
    array = row_array(rows, dtype)
    assert (len(array), array.dtype) == (rows, np.dtype(dtype))
    assert not array[-2:].any()


def test_a_large_array_takes_no_memory_at_first_where_the_process_has_freed_much() -> None:
    """Before, such memory was used again, and cleared at once."""
    for size in (24 << 20, 16 << 20):
        np.ones(size, np.uint8)  # the first one lets the second, and all later ones of its size, come from the heap
    array = row_array(2 << 20, np.int64)
    start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (ctypes.c_ubyte * ((array.nbytes - mmap.PAGESIZE) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), len(pages) * mmap.PAGESIZE, pages) == 0
    assert not any(pages)
    array[-1] = 1
    assert array.sum() == 1


huge_pages = pytest.mark.skipif(
    "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(), reason="there are no huge pages"
)


@huge_pages
def test_the_first_blocks_of_a_large_index_take_no_more_than_the_pages_in_use() -> None:
    index = SlotIndex(8_000_000)
    before = _resident()
    index.add_free(np.arange(4_000_000, 4_004_096))
    keys = keys_of(*range(64))
    plan = index.plan_store(keys, 0.0)
    index.end_store(keys, plan.places, [True] * 64, 0.0)
    assert _resident() - before < 1 << 20, "no array gets 2 MiB at once"


@huge_pages
def test_the_first_touches_that_a_policy_remembers_take_no_huge_pages_also_after_a_reset() -> None:
    ghost = GhostFilter()
    assert _has_small_pages(ghost._table)
    ghost.clear()
    assert _has_small_pages(ghost._table)


def _has_small_pages(array: NDArray[Any]) -> bool:
    """Return True if the kernel may give the whole mapping of ``array`` no huge pages."""
    contains = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            contains = int(mapping[1], 16) <= array.ctypes.data < int(mapping[2], 16)
        elif contains and line.startswith("VmFlags:"):
            return "nh" in line.split()
    raise AssertionError("the array is in no mapping")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
