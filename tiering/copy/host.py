"""Copies for engines whose KV cache is in host memory.

Copies run on threads of their own, but for loads that a step needs and small stores. The engine's thread makes these
itself: that costs less than to wake another thread, which shares the interpreter with it and has no page in its cache.
Each run of pages at equal distances is one assignment of bytes, for which numpy releases the GIL. An index of pages
at any places would move all bytes twice, through memory of its own, and keep the GIL below 500 elements.
"""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from threading import Barrier
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiering.api.engine import CanonicalKVCaches
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from tiering.copy.contract import OffloadingHandler, TransferError, TransferResult
from tiering.copy.layout import GroupPages, RowLayout, plan_pages
from tiering.copy.submission import Order, joined
from tiering.errors import ConfigError

logger = logging.getLogger("kv_tiering.copy")

_SPLIT_BYTES = 16 << 20
"""Transfers of at least this many bytes are split over the threads."""

_TOGETHER_BYTES = 4 << 20
"""Most bytes of transfers that are copied together."""

_AT_ONCE_SECONDS = 1e-3
"""Most seconds that a step's small stores take the engine's thread."""

_FIRST_BYTES = 4 << 20
"""Most bytes of small stores until some were measured."""

_MEASURED = 16
"""Number of the latest steps whose small stores are measured.

The fastest of them counts: the others may have waited for a processor.
"""

Pages = NDArray[np.uint8]
Runs = list[tuple[slice, slice, int]]
"""Pages by their GPU blocks, their rows, and their place in each of these rows."""


class Direction(Enum):
    """The direction in which a handler copies; the values are the names in results."""

    STORE = ("gpu", "cpu")
    LOAD = ("cpu", "gpu")


def blocks_per_group(kv_caches: CanonicalKVCaches) -> tuple[int, ...]:
    """Return the number of GPU blocks of each KV-cache group's smallest tensor; 0 for one without tensors."""
    return tuple(
        min((int(kv_caches.tensors[ref.tensor_idx].tensor.shape[0]) for ref in refs), default=0)
        for refs in kv_caches.group_data_refs
    )


def check_rows(rows: NDArray[np.uint8], layout: RowLayout) -> None:
    """Raise :class:`ConfigError` unless ``rows`` can hold blocks of ``layout``."""
    if rows.ndim != 2 or rows.dtype != np.uint8 or rows.shape[1] < layout.row_bytes:
        raise ConfigError(
            f"the primary tier's rows ({rows.dtype}, {rows.shape}) cannot hold blocks of {layout.row_bytes} bytes; "
            "scheduler and workers must be given the same configuration"
        )


def runs_of(pages: GroupPages) -> Runs:
    """Return pages as runs: the GPU blocks of a run are at equal distances, and its rows too.

    Blocks and rows of one allocation often are neighbours.
    """
    gpu, rows, subs = pages.gpu.tolist(), pages.rows.tolist(), pages.subs.tolist()
    runs, start, count = Runs(), 0, len(gpu)
    while start < count:
        end, by, down = start + 1, 1, 1
        if end < count and subs[end] == subs[start] and gpu[end] != gpu[start] and rows[end] != rows[start]:
            by, down = gpu[end] - gpu[start], rows[end] - rows[start]
            while end < count and gpu[end] - gpu[end - 1] == by and rows[end] - rows[end - 1] == down:
                if subs[end] != subs[start]:
                    break
                end += 1
        runs.append((_steps(gpu[start], end - start, by), _steps(rows[start], end - start, down), subs[start]))
        start = end
    return runs


def _steps(first: int, count: int, step: int) -> slice:
    """Return the slice of ``count`` places from ``first`` on."""
    end = first + count * step
    return slice(first, end if end >= 0 else None, step)


class PlannedHandler(OffloadingHandler):
    """Handler that checks the transfers of a step, and then starts them together.

    Args:
        layout: the rows' layout.
        direction: stores or loads.
        num_blocks: number of GPU blocks of each KV-cache group.
        num_rows: number of rows.
    """

    def __init__(self, layout: RowLayout, direction: Direction, num_blocks: tuple[int, ...], num_rows: int) -> None:
        self._layout = layout
        self._direction = direction
        self._num_blocks = num_blocks
        self._num_rows = num_rows
        self._running: dict[int, Any] = {}
        self._instant: list[TransferResult] = []
        """Results of transfers that have ended and were not reported."""
        self._open = True

    @abstractmethod
    def _start_all(self, orders: list[Order]) -> list[int]:
        """Start transfers, and return the ids of those that could not be started."""

    @abstractmethod
    def _run_first(self, orders: list[Order]) -> None:
        """Run transfers before all later work of the engine.

        Raises:
            TransferError: a transfer cannot be made.
        """

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        return not self.transfer_all_async([(job_id, spec)])

    def transfer_all_async(self, jobs: Sequence[tuple[int, TransferSpec]]) -> list[int]:
        orders, refused = self._checked(jobs)
        return refused + self._start_all(orders)

    def _checked(self, jobs: Sequence[tuple[int, TransferSpec]]) -> tuple[list[Order], list[int]]:
        """Return the transfers that can be made, and the ids of the others."""
        refused: list[int] = []
        orders: dict[int, Order] = {}
        for job_id, spec in jobs:
            try:
                if job_id in orders or job_id in self._running:
                    raise TransferError("it is running already")
                orders[job_id] = self._order(job_id, spec)
            except TransferError as error:
                logger.error("copy job %d could not be started: %s", job_id, error)
                refused.append(job_id)
        return list(orders.values()), refused

    def transfer_first(self, jobs: Sequence[tuple[int, TransferSpec]]) -> None:
        self._run_first([self._order(job_id, spec) for job_id, spec in jobs])

    def _take_instant(self) -> list[TransferResult]:
        results, self._instant = self._instant, []
        return results

    def _order(self, job_id: int, spec: TransferSpec) -> Order:
        """Return the checked transfer.

        Raises:
            TransferError: copies are shut down, or ``spec`` goes in another direction, or it names blocks or rows that
                do not exist.
        """
        if not self._open:
            raise TransferError("copies are shut down")
        store = self._direction is Direction.STORE
        gpu, cpu = spec if store else spec[::-1]
        if not isinstance(gpu, GPULoadStoreSpec) or not isinstance(cpu, CPULoadStoreSpec):
            source, destination = (type(side).__name__ for side in spec)
            raise TransferError(f"a {self._direction.name.lower()} handler cannot transfer {source} to {destination}")
        plan = plan_pages(self._layout, gpu, cpu, num_blocks=self._num_blocks, num_rows=self._num_rows, store=store)
        size = 0
        for pages in plan:
            size += len(pages.gpu) * self._layout.gpu_block_bytes[pages.group]
        return Order(job_id, plan, size)

    def _failed(self, job_id: int) -> TransferResult:
        return TransferResult(job_id, False, transfer_type=self._direction.value)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The pages of one ref of one group."""

    cache: Pages
    """Pages in the KV cache, shape (num_blocks, page_bytes)."""
    rows: Pages
    """Pages in the rows, shape (num_rows, factor, page_bytes)."""


@dataclass(slots=True, eq=False)
class _Batch:
    """Transfers that run together."""

    orders: Sequence[Order]
    started: float
    parts: tuple[Future[float], ...]
    """The copies on the threads; none if another rank writes what all ranks hold."""


def _page_views(kv_caches: CanonicalKVCaches, rows: NDArray[np.uint8], layout: RowLayout) -> list[list[_Layer]]:
    factor = layout.block_size_factor
    views: list[list[_Layer]] = []
    for group, refs in enumerate(kv_caches.group_data_refs):
        if not refs:
            views.append([])
            continue
        first, stride = layout.segment_starts[group], layout.block_strides[group]
        blocks = rows[:, first : first + factor * stride].reshape(len(rows), factor, stride)
        if not np.shares_memory(blocks[:1], rows[:1]):
            raise ConfigError("the primary tier's rows cannot be viewed as blocks; they must be contiguous")
        layers = []
        for ref, offset in zip(refs, layout.page_offsets[group], strict=True):
            cache = kv_caches.tensors[ref.tensor_idx].tensor.numpy()[:, : ref.page_size_bytes]
            layers.append(_Layer(cache, blocks[:, :, offset - first : offset - first + ref.page_size_bytes]))
        views.append(layers)
    return views


def _started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads all run already.

    A pool that starts threads on demand can fail in the middle of a transfer: the copy in its queue would still run
    later.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    together = Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(together.wait)
    except RuntimeError as error:
        together.abort()
        pool.shutdown()
        raise ConfigError(
            f"cannot start {threads} threads for copies ({error}); "
            "raise the limit on processes (ulimit -u, docker: --pids-limit) or on memory (ulimit -v)"
        ) from error
    together.wait()
    return pool


def _together(orders: Sequence[Order]) -> Sequence[GroupPages]:
    """Return the pages of several transfers, those of one group together."""
    if len(orders) == 1:
        return orders[0].plan
    by_group: dict[int, list[GroupPages]] = {}
    for order in orders:
        for pages in order.plan:
            by_group.setdefault(pages.group, []).append(pages)
    return list(map(joined, by_group.values()))


class HostCopyHandler(PlannedHandler):
    """Copies in one direction between a KV cache in host memory and the primary rows.

    Each direction has its own handler and threads, so that loads never wait behind stores.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        rows: NDArray[np.uint8],
        layout: RowLayout,
        direction: Direction,
        threads: int | None = None,
    ) -> None:
        """Start the threads.

        Args:
            kv_caches: the engine's KV cache in canonical form.
            rows: the primary rows, uint8 of shape (num_rows, row_stride).
            layout: the rows' layout.
            direction: stores or loads.
            threads: number of copies that run at the same time; default: two, or one on a machine with one core.

        Raises:
            ConfigError: the rows are too small for ``layout``, or the threads cannot be started.
        """
        check_rows(rows, layout)
        super().__init__(layout, direction, blocks_per_group(kv_caches), len(rows))
        self._layers = _page_views(kv_caches, rows, layout)
        self._threads = threads or min(2, os.cpu_count() or 1)
        self._pool = _started_pool(self._threads, f"kv-tiering-{direction.name.lower()}")
        self._running: dict[int, _Batch] = {}
        self._speeds = deque[float](maxlen=_MEASURED)
        """Bytes per second of the latest transfers that were made at once."""
        self._block_bytes = max(layout.gpu_block_bytes)
        self._most_at_once = self._first_at_once = _FIRST_BYTES * layout.writes
        """Most bytes of transfers that are made at once."""

    def transfer_at_once(self, jobs: Sequence[tuple[int, TransferSpec]]) -> Collection[int]:
        room, small, left = self._most_at_once, list[tuple[int, TransferSpec]](), list[int]()
        for job_id, spec in jobs:
            size = len(spec[0].block_ids) * self._block_bytes if isinstance(spec[0], GPULoadStoreSpec) else room + 1
            if size <= room:
                small.append((job_id, spec))
                room -= size
            else:
                left.append(job_id)
        orders, refused = self._checked(small)
        size, began = 0, time.monotonic()
        for order in orders:
            try:
                self._copy_here(order)
            except Exception as error:
                logger.error("copy job %d failed: %s", order.job_id, error, exc_info=error)
                self._instant.append(self._failed(order.job_id))
            else:
                size += order.size
        if size:
            self._speeds.append(size / (time.monotonic() - began))
            self._most_at_once = int(max(self._speeds) * _AT_ONCE_SECONDS)
        elif left and self._most_at_once < self._first_at_once:
            # All that was measured may have waited for a processor: dozens of steps later, a store is measured again.
            self._most_at_once += 1 + (self._most_at_once >> 4)
        return left + refused

    def _start_all(self, orders: list[Order]) -> list[int]:
        """Start transfers, small ones together: they end together, and if one fails, all of them do."""
        batches: list[list[Order]] = []
        room = 0
        for order in orders:
            if not batches or order.size > room:
                batches.append([])
                room = _TOGETHER_BYTES
            batches[-1].append(order)
            room -= order.size
        return [order.job_id for batch in batches if not self._start(batch) for order in batch]

    def _start(self, orders: Sequence[Order]) -> bool:
        """Start transfers together; return False if the pool is shut down."""
        batch = _Batch(orders, time.monotonic(), ())
        if self._direction is Direction.LOAD or self._layout.writes:
            size = sum([order.size for order in orders])
            work = self._work(_together(orders))
            parts = max(1, min(self._threads, len(work))) if size >= _SPLIT_BYTES else 1
            try:
                batch.parts = tuple(self._pool.submit(self._copy, work[part::parts]) for part in range(parts))
            except RuntimeError as error:
                logger.error("%d copy jobs could not be started: %s", len(orders), error)
                return False
        for order in orders:
            self._running[order.job_id] = batch
        return True

    def _run_first(self, orders: list[Order]) -> None:
        """Copy in the caller's thread; it would only wait for another one."""
        for order in orders:
            self._copy_here(order)

    def _copy_here(self, order: Order) -> None:
        """Copy in the caller's thread, and note the result."""
        began = time.monotonic()
        seconds = self._copy(self._work(order.plan)) - began
        self._instant.append(TransferResult(order.job_id, True, order.size, seconds, self._direction.value))

    def _work(self, plan: Iterable[GroupPages]) -> list[tuple[_Layer, Runs]]:
        """Return what is to be copied in each layer."""
        return [(layer, runs) for pages in plan for runs in [runs_of(pages)] for layer in self._layers[pages.group]]

    def _copy(self, work: Iterable[tuple[_Layer, Runs]]) -> float:
        store = self._direction is Direction.STORE
        for layer, runs in work:
            cache, rows = layer.cache, layer.rows
            for blocks, of_rows, sub in runs:
                if store:
                    rows[of_rows, sub] = cache[blocks]
                else:
                    cache[blocks] = rows[of_rows, sub]
        return time.monotonic()

    def get_finished(self) -> list[TransferResult]:
        results = self._take_instant()
        for batch in dict.fromkeys(self._running.values()):
            if all(part.done() for part in batch.parts):
                results += self._results(batch)
        return results

    def _results(self, batch: _Batch) -> list[TransferResult]:
        """Take transfers that have ended off the running ones, and return their results."""
        jobs = [order.job_id for order in batch.orders]
        for job_id in jobs:
            del self._running[job_id]
        if not batch.parts:
            return [TransferResult(job_id, True, transfer_type=self._direction.value) for job_id in jobs]
        for part in batch.parts:
            if (error := part.exception()) is not None:
                for job_id in jobs:
                    logger.error("copy job %d failed: %s", job_id, error, exc_info=error)
                return list(map(self._failed, jobs))
        seconds, kind = max([part.result() for part in batch.parts]) - batch.started, self._direction.value
        return [TransferResult(order.job_id, True, order.size, seconds, kind) for order in batch.orders]

    def wait(self, job_ids: Collection[int]) -> None:
        wait([part for job_id in job_ids if job_id in self._running for part in self._running[job_id].parts])

    def shutdown(self) -> None:
        self._open = False
        self._pool.shutdown(wait=True)
