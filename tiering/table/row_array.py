"""Arrays with one entry per row, whose memory the kernel gives in small pages.

numpy requests huge pages for large arrays. The first use of a piece then clears 2 MiB in each of several arrays, in one
call of the scheduler's thread, and on a busy machine the kernel first moves other memory out of the way.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def row_array(num_rows: int, dtype: type[Any]) -> NDArray[Any]:
    """Return an array of zeros, or of None for objects; only the pages in use take memory.

    Args:
        num_rows: number of entries.
        dtype: type of the entries.
    """
    array = np.empty(num_rows, object) if dtype is object else np.zeros(num_rows, dtype)
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
