"""CUDA's batched copy: one call that queues many copies of their own sizes.

``cuMemcpyBatchAsync`` is part of drivers for CUDA 12.8 and newer. Without it, copies are queued one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiering.copy.cudart import driver_function

Addresses = NDArray[np.uint64]
"""Addresses or sizes in bytes, one per copy."""

_IN_STREAM_ORDER = 1
_IN_ANY_ORDER = 3


class BatchCopyError(RuntimeError):
    """The driver did not accept a batched copy; none of its copies was queued."""


class _Attributes(ctypes.Structure):
    """The C ``CUmemcpyAttributes``; locations are only hints, and zero gives none."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", ctypes.c_int * 2),
        ("dst_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """The driver's call for batched copies.

    Args:
        function: ``cuMemcpyBatchAsync`` of the driver.
        reports_index: True if ``function`` has the parameter ``failIdx``, which CUDA 13 removed.
    """

    def __init__(self, function: Callable[..., int], reports_index: bool) -> None:
        self._function = function
        self._reports_index = reports_index

    def __call__(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, stream: int, *, in_stream_order: bool
    ) -> None:
        """Queue one copy per element of the three arrays; the copies of a call may run in any order.

        Args:
            destinations: addresses to copy to; the ranges must not overlap.
            sources: addresses to copy from.
            sizes: bytes of each copy.
            stream: handle of the stream; not the default stream.
            in_stream_order: True if sources must not be read before the stream's earlier work has ended. False if
                nothing writes to them from now on until the stream has ended the copies.

        Raises:
            BatchCopyError: the driver refused the call.
        """
        count = len(sizes)
        if not count:
            return
        attributes = _Attributes(src_access_order=_IN_STREAM_ORDER if in_stream_order else _IN_ANY_ORDER)
        first_of_attributes, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        arrays = [np.ascontiguousarray(array, dtype=np.uint64) for array in (destinations, sources, sizes)]
        code = self._function(
            *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first_of_attributes),
            ctypes.c_size_t(1),
            *((ctypes.byref(failed),) if self._reports_index else ()),
            ctypes.c_void_p(stream),
        )
        if code:
            raise BatchCopyError(f"cuMemcpyBatchAsync refused {count} copies with CUDA error {code}")


def find_batch_copy(load: Callable[[str], Any] = ctypes.CDLL) -> BatchCopy | None:
    """Return the driver's batched copy; None for drivers without one (before CUDA 12.8, ROCm).

    Args:
        load: loads a shared library by name.
    """
    for name, reports_index in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        if (function := driver_function(name, load)) is not None:
            function.restype = ctypes.c_int
            return BatchCopy(function, reports_index)
    return None
