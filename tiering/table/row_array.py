"""Arrays with one entry per row, whose memory the kernel gives in small pages.

numpy requests huge pages for large arrays. The first use of a piece then clears 2 MiB in each of several arrays, in one
call of the scheduler's thread, and on a busy machine the kernel first moves other memory out of the way.

numpy also takes memory that the process has freed before, and clears all of it in the call that creates an array: 80 MB
in 9 ms. Large arrays of numbers therefore have mappings of their own.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGE_ARRAY = 1 << 20
"""Smallest size in bytes of an array with a mapping of its own."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def row_array(num_rows: int, dtype: type[Any]) -> NDArray[Any]:
    """Return an array of zeros, or of None for objects; only the pages in use take memory.

    Args:
        num_rows: number of entries.
        dtype: type of the entries.
    """
    array: NDArray[Any]
    if dtype is object:
        array = np.empty(num_rows, object)
    elif (size := num_rows * np.dtype(dtype).itemsize) < LARGE_ARRAY:
        array = np.zeros(num_rows, dtype)
    else:
        array = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype)
    # Without support for huge pages, the kernel refuses, and there is nothing to avoid.
    _advise(array, mmap.MADV_NOHUGEPAGE)
    return array


def free_pages(array: NDArray[Any]) -> None:
    """Return the pages of an array of numbers to the kernel, without the interpreter lock.

    Afterwards all entries are 0.
    """
    _advise(array, mmap.MADV_DONTNEED)


def _advise(array: NDArray[Any], advice: int) -> None:
    """Advise the kernel on the whole pages of ``array``."""
    start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        _libc.madvise(start, length, advice)
