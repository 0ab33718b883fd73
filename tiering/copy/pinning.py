"""The registration (pinning) of the primary rows with CUDA, in chunks that drivers accept.

A copy from or to pinned memory runs beside the engine's thread. A copy from or to other memory goes through the
driver's own buffers, and the engine's thread waits for it.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiering.api.units import format_bytes
from tiering.copy.cudart import ALREADY_REGISTERED, TORCH_CUDA, HostRegistration, find_relaxation
from tiering.errors import ConfigError
from tiering.primary.memory.preparation import Preparation

logger = logging.getLogger("kv_tiering.copy")

_CHUNK_BYTES = 64 << 20
"""Largest registration in bytes, unless a row is larger.

The device accepts no work during a registration: about 3 ms for 64 MiB on an H200.
"""
_SMALLEST_PART = 2 << 20
"""Smallest part of a row in bytes that is registered by itself."""
_MOST_PARTS = 1 << 14
"""Largest number of rows whose parts are registered one by one."""


class Range(NamedTuple):
    """A range of the rows' memory."""

    offset: int
    """First byte, counted from the first row."""
    nbytes: int
    """Size in bytes."""


def chunk_rows(stride: int) -> int:
    """Return the number of rows in a chunk of at most 64 MiB.

    Chunks start on page boundaries, because registrations may not share a page.

    Args:
        stride: distance between rows in bytes.
    """
    step = mmap.PAGESIZE // math.gcd(stride, mmap.PAGESIZE)
    return max(1, _CHUNK_BYTES // stride // step) * step


def ranges_to_pin(num_rows: int, stride: int, part: tuple[int, int] | None) -> list[Range]:
    """Return the ranges that a rank registers.

    A rank that uses at most half of each row registers its part of each row, if the parts are large and not too many.
    Every registered GiB takes the driver time, and 2 MiB of device memory. Otherwise the rank registers all rows.

    Args:
        num_rows: number of rows.
        stride: distance between rows in bytes.
        part: first byte of each row that the rank uses, and the byte after the last one; None: whole rows.
    """
    if part is not None and stride % mmap.PAGESIZE == 0 and num_rows <= _MOST_PARTS:
        start = part[0] // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = -(-part[1] // mmap.PAGESIZE) * mmap.PAGESIZE - start
        if _SMALLEST_PART <= nbytes <= stride // 2:
            return [Range(row * stride + start, nbytes) for row in range(num_rows)]
    step = chunk_rows(stride)
    return [Range(row * stride, min(step, num_rows - row) * stride) for row in range(0, num_rows, step)]


class PinnedRows:
    """The primary rows, registered with CUDA for as long as a handler uses them.

    Rows that cannot be registered still work, more slowly; this is logged once.

    Args:
        rows: the rows, uint8 of shape (num_rows, row_stride), contiguous.
        api: ``torch.cuda`` (default) or a stand-in.
        part: first byte of each row that this rank uses, and the byte after the last one; default: whole rows.
        rank: rank of this worker, for messages; default 0.
        pageable: one byte that all workers of the engine share. A worker whose rows cannot be registered sets it to 1,
            and the others then do not keep theirs registered either. Default: a byte of this worker.
        preparation: registers the rows beside the engine's start, but for the row of the check of copies; default: the
            first user registers all rows.
    """

    def __init__(
        self,
        rows: NDArray[np.uint8],
        api: Any = TORCH_CUDA,
        *,
        part: tuple[int, int] | None = None,
        rank: int = 0,
        pageable: NDArray[np.uint8] | None = None,
        preparation: Preparation | None = None,
    ) -> None:
        if not rows.flags.c_contiguous:
            raise ConfigError("the primary tier's rows must be contiguous to be copied to and from a GPU")
        self.api = api
        self.num_rows, self.stride = rows.shape
        """Number of rows, and the distance between them in bytes."""
        self.chunk_rows = chunk_rows(self.stride)
        """Rows from one multiple of this number to the next lie in one registration."""
        self._bytes: torch.Tensor | None = torch.from_numpy(rows.reshape(-1))
        self._part = part
        self._rank = rank
        self._pageable = np.zeros(1, np.uint8) if pageable is None else pageable
        self._preparation = preparation
        self._begin: Callable[[], None] = lambda: None
        self._users = 0
        self._lock = threading.Lock()  # the preparation registers rows while the last user may release them
        self._registered: list[Range] = []
        self._agreed = True

    @property
    def bytes(self) -> torch.Tensor:
        """All rows as one uint8 tensor of one dimension.

        Raises:
            ConfigError: the last user has released the rows.
        """
        if self._bytes is None:
            raise ConfigError("the primary tier's rows were released")
        return self._bytes

    @property
    def is_pinned(self) -> bool:
        """True if the rows are registered."""
        return bool(self._registered)

    def acquire(self, device: torch.device) -> None:
        """Count one more user; the first one registers the rows, or those of the check of copies.

        Args:
            device: the GPU of the KV cache.

        Raises:
            ConfigError: CUDA would copy to other pages than those of the rows.
        """
        self._users += 1
        if self._users > 1:
            return
        relax = None if self._preparation is None else find_relaxation()
        ranges, now = ranges_to_pin(self.num_rows, self.stride, self._part), slice(None)
        if relax is not None:
            checked = (self.num_rows - 1 - self._rank) * self.stride
            first = next(i for i, part in enumerate(ranges) if checked < part.offset + part.nbytes)
            now = slice(first, first + 1)
        runtime = HostRegistration(self.api, device)
        try:
            pinned = all(self._register(part, runtime) for part in ranges[now])
        except ConfigError:
            self._users -= 1
            raise
        if pinned and self._preparation is not None and relax is not None:
            del ranges[now]
            self._begin = partial(self._preparation.begin, partial(self._register_later, ranges, device, relax))

    def _register_later(
        self, ranges: list[Range], device: torch.device, relax: Callable[[], None], is_over: Callable[[], bool]
    ) -> None:
        """Register ``ranges``, with pauses in which the device accepts the engine's work."""
        relax()
        runtime = HostRegistration(self.api, device)
        for part in ranges:
            began = time.monotonic()
            with self._lock:
                if is_over() or not self._users or not self._registered or not self._register(part, runtime):
                    return
            time.sleep(time.monotonic() - began)

    def _register(self, part: Range, runtime: HostRegistration) -> bool:
        """Register one range; return False if the driver refuses, and then keep none registered.

        Raises:
            ConfigError: CUDA would copy to other pages than those of the rows.
        """
        address = self.bytes.data_ptr()
        code = runtime.register(address + part.offset, part.nbytes)
        if code == ALREADY_REGISTERED:
            # An earlier mapping had this address and was unmapped without unpinning: copies would go to its pages.
            runtime.unregister(address + part.offset)
            code = runtime.register(address + part.offset, part.nbytes)
        if not code:
            self._registered.append(part)
            return True
        self._unpin(runtime)
        if code == ALREADY_REGISTERED:
            raise ConfigError(
                "the primary tier's memory lies where an earlier engine of this process left memory registered "
                "with CUDA; shut engines down before the next one is built, or give each a process of its own"
            )
        self._pageable[0] = 1
        logger.warning(
            "rank %d: CUDA error %d when %s at byte %d of the primary tier's %s were pinned; the copies of all "
            "ranks are slower and delay the engine's steps until primary.capacity is lowered to what the "
            "driver pins (docs/operations.md)",
            self._rank,
            code,
            format_bytes(part.nbytes),
            part.offset,
            format_bytes(self.num_rows * self.stride),
        )
        return False

    def expect_agreement(self) -> None:
        """End the check of copies: a preparation registers the other rows from now on.

        If the driver refused one of them in the course of the check, the rows of the check would be unregistered under
        its copies. The next transfer, which is one of the engine's first step, calls :meth:`agree` with effect.
        """
        self._agreed = False
        self._begin()

    def agree(self, device: torch.device) -> None:
        """Unregister the rows if another rank could not register its rows.

        The first transfer of the engine calls this method, because all ranks have registered their KV cache by then. A
        rank with slow copies delays the others in any case, and registered memory costs device memory.
        """
        if self._agreed:
            return
        self._agreed = True
        if self._registered and self._pageable[0]:
            self._unpin(HostRegistration(self.api, device))
            logger.warning(
                "rank %d: another rank could not pin the primary tier's memory; this rank does not pin it either",
                self._rank,
            )

    def release(self, device: torch.device) -> None:
        """Count one user less; the last one unregisters the rows and drops them."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._unpin(HostRegistration(self.api, device))
            self._bytes = None
            self._pageable = self._pageable.copy()  # the shared byte would keep the rows' memory mapped

    def _unpin(self, runtime: HostRegistration) -> None:
        registered, self._registered = self._registered, []
        for part in reversed(registered):
            if code := runtime.unregister(self.bytes.data_ptr() + part.offset):
                logger.warning(
                    "rank %d: the primary tier's memory at byte %d could not be unpinned (CUDA error %d)",
                    self._rank,
                    part.offset,
                    code,
                )
