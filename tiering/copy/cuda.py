"""Copies between a CUDA KV cache and pinned primary rows, on side streams of each direction.

All transfers of a step are one submission, and their pages take two stages. A store first gathers the pages of many GPU
blocks into a staging buffer on the device, which has the shape of the rows, with one kernel. Then the rows' pieces
cross the bus. A load goes the other way. The staging buffer has two halves, so that kernels fill one half while the bus
moves the other.

Loads, and stores of small pieces, cross the bus without staging: a kernel with few programs moves pages straight
between the KV cache and the rows, whose memory the device reads and writes. The driver's copies take the engine's
thread some microseconds for each piece, and those to a device run one after the other, whatever their streams: the
inputs of the engine's next step would wait for a whole load, and so would a small load behind a long one. Loads that a
step needs have a stream of their own.

Stores start after the work that the compute stream had when they were submitted. Loads write to the KV cache after that
work. The compute stream waits for a job only in :meth:`CudaCopyHandler.order_before_compute`, and the host only in
:meth:`CudaCopyHandler.wait`.

An engine that measures free memory to size its KV cache does not know of the staging buffers. They are allocated when
the engine registers its KV cache, so that a lack of device memory shows at start.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tiering.api.engine import CanonicalKVCaches
from tiering.copy.batch import BatchCopy, BatchCopyError
from tiering.copy.contract import TransferError, TransferResult
from tiering.copy.cudart import Event, Stream
from tiering.copy.host import Direction, PlannedHandler, blocks_per_group, check_rows
from tiering.copy.layout import GroupPages, RowLayout
from tiering.copy.pages import DeviceGroup, PageKernel, pieces_of, starts_of
from tiering.copy.pinning import PinnedRows
from tiering.copy.submission import Order, chunks_of, may_run_together
from tiering.errors import ConfigError

logger = logging.getLogger("kv_tiering.copy")

_STAGING_BYTES = 64 << 20
_DIRECT_BYTES = 512 << 10
"""Largest mean size of the pieces of a GPU block in a row that a kernel stores itself.

From here on the driver's copies are as fast on an H200, and faster by 5% from 1 MiB on. A kernel that stores beside a
prefill also takes processors from it: products of matrices took 2.3 times as long on an H200, and 1.05 beside staged
stores.
"""
_DIRECT_CHUNK = 128 << 20
"""Bytes that one kernel moves itself; the jobs within them end together."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """The events behind a chunk."""

    moved: Event
    """Recorded when the chunk has crossed the bus."""
    end: Event
    """Recorded when the chunk's work has ended."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A job that was submitted."""

    size: int
    """Bytes to move."""
    begin: Event
    """Recorded before the first copy of the submission."""
    mark: _Mark
    """The events behind the job's last chunk."""
    share: float
    """The job's part of the time until then: jobs of one submission share this time by their bytes."""
    stream: Stream
    """The stream of the submission's kernels; later jobs of the same stream end later."""


class CudaCopyHandler(PlannedHandler):
    """Copies in one direction between a CUDA KV cache and pinned rows."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        rows: PinnedRows,
        layout: RowLayout,
        direction: Direction,
        kernel: PageKernel,
        staging_bytes: int = _STAGING_BYTES,
        batch: BatchCopy | None = None,
        maps_rows: bool = False,
    ) -> None:
        """Allocate the staging buffer and pin the rows.

        Args:
            kv_caches: the engine's KV cache in canonical form, on one GPU.
            rows: the primary rows.
            layout: the rows' layout.
            direction: stores or loads.
            kernel: gathers and scatters pages; :func:`tiering.copy.kernel.move_pages` on a GPU.
            staging_bytes: bytes of device memory for staging; default 64 MiB. At least two GPU blocks are allocated, at
                most twice the size of all rows.
            batch: the driver's batched copy; default: none, copies are queued one by one.
            maps_rows: True if kernels may use registered memory by its addresses on the host; default: False.

        Raises:
            ConfigError: the rows are too small for ``layout``, or the device memory does not suffice.
        """
        check_rows(rows.bytes.view(rows.num_rows, rows.stride).numpy(), layout)
        super().__init__(layout, direction, blocks_per_group(kv_caches), rows.num_rows)
        self._open = False  # until the pins are held
        self._api = rows.api
        self._rows = rows
        self._kernel = kernel
        self._batch = batch
        self._device: torch.device = kv_caches.tensors[0].tensor.device
        own = [group for group, pages in enumerate(layout.page_bytes) if pages]
        self._groups = {group: DeviceGroup.of(kv_caches, layout, group) for group in own}
        is_load = direction is Direction.LOAD
        self._direct = {
            group: maps_rows and (is_load or pages.piece_bytes <= _DIRECT_BYTES)
            for group, pages in self._groups.items()
        }
        self._capacity = [self._blocks_in_half(size, staging_bytes // 2) for size in layout.gpu_block_bytes]
        # Requests wait for loads; no request waits for a store.
        priority = -1 if is_load else 0
        self._kernels = self._api.Stream(device=self._device, priority=priority)
        self._bus = self._api.Stream(device=self._device, priority=priority)
        self._first = self._api.Stream(device=self._device, priority=priority) if is_load else self._kernels
        """Stream of the loads that a step needs, which do not wait for those before them."""
        self.halves = self._allocate_staging()
        """Halves of the staging buffer on the device; empty after the shutdown."""
        self._freed: list[Event | None] = [None, None]
        self._turn = 0
        self._running: dict[int, _Running] = {}
        rows.acquire(self._device)
        self._open = True

    def _blocks_in_half(self, block_bytes: int, half_bytes: int) -> int:
        factor = self._layout.block_size_factor
        blocks = min(self._rows.num_rows * factor, half_bytes // max(1, block_bytes))
        return int(max(1, blocks // factor * factor or blocks))

    def _allocate_staging(self) -> list[torch.Tensor]:
        sizes = zip(self._capacity, self._layout.gpu_block_bytes, strict=True)
        half = -(-max(blocks * size for blocks, size in sizes) // 16) * 16  # both halves start at a whole word
        try:
            with self._api.stream(self._kernels):
                return list(torch.empty(2 * half, dtype=torch.uint8, device=self._device).view(2, half))
        except RuntimeError as error:
            raise ConfigError(
                f"no device memory for the {2 * half} bytes that copies to the primary tier need: {error}; "
                "give the engine's KV cache less memory (vLLM: a lower --gpu-memory-utilization)"
            ) from error

    def _start_all(self, orders: list[Order], kernels: Stream | None = None) -> list[int]:
        if self._direction is Direction.STORE and not self._layout.writes:
            self._instant += [
                TransferResult(order.job_id, True, transfer_type=Direction.STORE.value) for order in orders
            ]
            return []
        if not orders:
            return []
        refused: list[int] = []
        together = (
            [orders]
            if may_run_together(orders, store=self._direction is Direction.STORE)
            else [[order] for order in orders]
        )
        for part in together:
            try:
                self._submit_or_retry(part, kernels or self._kernels)
            except RuntimeError as error:
                logger.error("copy jobs %s failed: %s", [order.job_id for order in part], error, exc_info=error)
                self._settle()  # the submitted part must not touch a row that is given to another block
                refused += [order.job_id for order in part]
        return refused

    def _run_first(self, orders: list[Order]) -> None:
        """Submit the orders, and let the engine's stream wait; copy page by page what could not be submitted."""
        refused = set(self._start_all(orders, self._first))
        for order in orders:
            if order.job_id in refused:
                self._move_pages(order)
        self.order_before_compute([order.job_id for order in orders])

    def _move_pages(self, order: Order) -> None:
        """Copy the pages of a load on the engine's stream, without memory on the device, and wait for them.

        Raises:
            TransferError: the device does not copy.
        """
        layout, rows = self._layout, self._rows
        try:
            for group, *places in order.plan:
                pages = list(
                    zip(self._groups[group].caches, layout.page_offsets[group], layout.page_bytes[group], strict=True)
                )
                for gpu, row, sub in zip(*(array.tolist() for array in places), strict=True):
                    start = row * rows.stride + sub * layout.block_strides[group]
                    for cache, offset, size in pages:
                        own = rows.bytes[start + offset : start + offset + size]
                        cache[gpu, :size].view(torch.uint8).copy_(own)
        except RuntimeError as error:
            raise TransferError(f"copy job {order.job_id}, which the step needs, failed: {error}") from error
        self._instant.append(TransferResult(order.job_id, True, order.size, transfer_type=self._direction.value))

    def _submit_or_retry(self, orders: list[Order], kernels: Stream) -> None:
        """Submit the orders; if the driver refuses a batched copy, queue single copies from now on."""
        try:
            self._submit(orders, kernels)
        except BatchCopyError as error:
            logger.warning("%s: %s; copies on this device are queued one by one from now on", self._device, error)
            self._settle()
            self._batch = None
            self._submit(orders, kernels)

    def _submit(self, orders: list[Order], kernels: Stream) -> None:
        self._rows.agree(self._device)
        compute = self._api.current_stream(self._device)
        # The bus goes last: the end of a job's last chunk is then the end of its chunks on both streams.
        chunks = sorted(chunks_of(orders, self._most_blocks), key=lambda chunk: not self._is_direct(chunk.pages.group))
        all_direct = all(self._is_direct(chunk.pages.group) for chunk in chunks)
        if not all_direct:
            kernels = self._kernels  # the staging buffer is theirs
        begin = self._api.Event(enable_timing=True)
        with self._api.stream(kernels):
            numbers = self._upload([self._numbers(chunk.pages) for chunk in chunks])
            kernels.wait_stream(compute)
            # A staged load may cross the bus before the KV cache may be written.
            begin.record(kernels if all_direct or self._direction is Direction.STORE else self._bus)
            marks = [_Mark(begin, begin)]
            last = [0] * len(orders)
            for chunk, places in zip(chunks, numbers, strict=True):
                marks.append(self._queue(chunk.pages, places, kernels))
                for job in chunk.jobs:
                    last[job] = len(marks) - 1
        moved = 0
        for job, order in sorted(enumerate(orders), key=lambda entry: last[entry[0]]):
            moved += order.size
            mark = marks[last[job]]
            self._running[order.job_id] = _Running(order.size, begin, mark, order.size / max(moved, 1), kernels)

    def _most_blocks(self, group: int) -> int:
        """Return the largest number of GPU blocks in a chunk."""
        if self._is_direct(group):
            return max(1, _DIRECT_CHUNK // self._layout.gpu_block_bytes[group])
        return self._capacity[group]

    def _is_direct(self, group: int) -> bool:
        return self._direct[group] and self._rows.is_pinned

    def _numbers(self, pages: GroupPages) -> NDArray[np.int64]:
        """Return the ids of the GPU blocks, and their addresses in the rows if the kernel needs them."""
        if not self._is_direct(pages.group):
            return pages.gpu
        starts = starts_of(pages, self._groups[pages.group], self._rows.stride)
        return np.concatenate((pages.gpu, starts + self._rows.bytes.data_ptr()))

    def _upload(self, numbers: list[NDArray[np.int64]]) -> Sequence[torch.Tensor]:
        """Copy numbers to the device in one piece, and return their parts there."""
        if not numbers:
            return ()
        tensor = torch.from_numpy(np.concatenate(numbers))
        if self._device.type != "cpu":
            # The pinned copy returns to torch's pool, which reuses it only after the copy's end.
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return torch.split(tensor, [len(part) for part in numbers])

    def _queue(self, pages: GroupPages, places: torch.Tensor, kernels: Stream) -> _Mark:
        """Queue the copies of one chunk, and return the events behind them.

        Args:
            pages: the GPU blocks and their rows.
            places: ids of the GPU blocks, on the device, and behind them their addresses in the rows if these are used.
            kernels: the stream of the submission's kernels, which is the current one.
        """
        group, count = self._groups[pages.group], len(pages.gpu)
        if len(places) > count:
            self._kernel(group, places[:count], places[count:], store=self._direction is Direction.STORE, direct=True)
            end = self._api.Event(enable_timing=True)
            end.record(kernels)
            return _Mark(end, end)
        if self._direction is Direction.STORE:
            half, staging = self._next_half(self._kernels)
            self._kernel(group, places, staging, store=True)
            gathered = self._api.Event(enable_timing=False)
            gathered.record(self._kernels)
            self._bus.wait_event(gathered)
            self._move_rows(pages, group, staging)
            moved = self._api.Event(enable_timing=True)
            moved.record(self._bus)
            self._freed[half] = moved
            return _Mark(moved, moved)
        half, staging = self._next_half(self._bus)
        self._move_rows(pages, group, staging)
        moved, end = self._api.Event(enable_timing=True), self._api.Event(enable_timing=False)
        moved.record(self._bus)
        self._kernels.wait_event(moved)
        self._kernel(group, places, staging, store=False)
        end.record(self._kernels)
        self._freed[half] = end
        return _Mark(moved, end)

    def _next_half(self, stream: Stream) -> tuple[int, torch.Tensor]:
        """Return the half of the staging buffer that was used longer ago; ``stream`` waits until it is free."""
        self._turn = 1 - self._turn
        freed = self._freed[self._turn]
        if freed is not None:
            stream.wait_event(freed)
        return self._turn, self.halves[self._turn]

    def _move_rows(self, pages: GroupPages, group: DeviceGroup, staging: torch.Tensor) -> None:
        """Queue the copies between the staging buffer and the rows."""
        rows, store = self._rows, self._direction is Direction.STORE
        pieces = pieces_of(pages, group, rows.stride, rows.chunk_rows)
        if self._batch is not None and rows.is_pinned:
            device = pieces.device + np.uint64(staging.data_ptr())
            host = pieces.host + np.uint64(rows.bytes.data_ptr())
            destinations, sources = (host, device) if store else (device, host)
            # Stores read what the kernel has just gathered. Nothing writes to the rows between the order of a load and
            # its end.
            self._batch(destinations, sources, pieces.sizes, self._bus.cuda_stream, in_stream_order=store)
            return
        with self._api.stream(self._bus):
            for device_at, host_at, size in zip(*(array.tolist() for array in pieces), strict=True):
                ends = staging[device_at : device_at + size], rows.bytes[host_at : host_at + size]
                source, destination = ends if store else ends[::-1]
                destination.copy_(source, non_blocking=True)

    def _settle(self) -> None:
        for stream in dict.fromkeys((self._kernels, self._first, self._bus)):
            try:
                stream.synchronize()
            except RuntimeError as error:
                logger.error("the device does not answer: %s", error)  # such a device copies nothing any more either

    def get_finished(self) -> list[TransferResult]:
        results = self._take_instant()
        busy = set[Stream]()
        for job_id, job in list(self._running.items()):
            try:
                if job.stream in busy:
                    continue  # a job that was submitted later ends later
                if not job.mark.end.query():  # type: ignore[no-untyped-call]
                    busy.add(job.stream)
                    continue
                seconds = job.begin.elapsed_time(job.mark.moved) / 1000.0 * job.share
                results.append(TransferResult(job_id, True, job.size, seconds, self._direction.value))
            except RuntimeError as error:
                logger.error("copy job %d failed: %s", job_id, error, exc_info=error)
                results.append(self._failed(job_id))
            del self._running[job_id]
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        for job in [self._running[job_id] for job_id in job_ids if job_id in self._running]:
            try:
                job.mark.end.synchronize()
            except RuntimeError as error:
                logger.error("waiting for copies failed: %s", error)  # get_finished reports the job as failed

    def order_before_compute(self, job_ids: Collection[int]) -> None:
        ends = [self._running[job_id].mark.end for job_id in job_ids if job_id in self._running]
        try:
            compute = self._api.current_stream(self._device)
            for end in dict.fromkeys(ends):
                compute.wait_event(end)
        except RuntimeError as error:
            logger.error("the compute stream cannot wait for copies: %s", error)
            self.wait(job_ids)

    def shutdown(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            with self._api.device(self._device):
                self.wait(list(self._running))
            # The engine may free its KV cache while it holds this handler.
            self._groups, self.halves, self._freed = {}, [], [None, None]
            self._rows.release(self._device)
        except RuntimeError as error:
            logger.error("the device does not answer: %s; the primary tier stays pinned until the process ends", error)
