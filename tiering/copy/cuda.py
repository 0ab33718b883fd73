"""Copies between a CUDA KV cache and pinned primary rows, on one side stream per direction.

A job is one submission. A store first gathers the job's pages, layer by layer, into a staging buffer on the device. The
buffer has the shape of the rows' segments. Then a single copy moves each row. A load goes the other way. A row
therefore costs one transfer over the bus, for any number of layers. CUDA events mark the end of a job.

The side stream is ordered after the work that the compute stream had when the job was submitted. The compute stream
waits for a job only in :meth:`CudaCopyHandler.order_before_compute`, and the host only in :meth:`CudaCopyHandler.wait`.

An engine that measures free memory to size its KV cache does not know of the staging buffers. They are allocated when
the engine registers its KV cache, so that a lack of device memory shows at start.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tiering.api.engine import CanonicalKVCaches
from tiering.api.transfer import TransferSpec
from tiering.copy.contract import OffloadingHandler, TransferResult
from tiering.copy.host import Direction, blocks_per_group, check_rows, split_spec
from tiering.copy.layout import GroupPages, RowLayout, TransferError, plan_pages
from tiering.errors import ConfigError

logger = logging.getLogger("kv_tiering.copy")

_STAGING_BYTES = 64 << 20
_ALREADY_REGISTERED = 712
"""The runtime's error number cudaErrorHostMemoryAlreadyRegistered."""


class EventLike(Protocol):
    """The methods that are used of a torch.cuda.Event."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any) -> float: ...


class StreamLike(Protocol):
    """The methods that are used of a torch.cuda.Stream."""

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class CudaApi(Protocol):
    """The functions that are used of ``torch.cuda``."""

    def Stream(self, device: Any = ..., priority: int = ...) -> StreamLike: ...  # noqa: N802
    def Event(self, enable_timing: bool = ...) -> EventLike: ...  # noqa: N802
    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...
    def device(self, device: Any) -> AbstractContextManager[Any]: ...
    def current_stream(self, device: Any = ...) -> StreamLike: ...
    def cudart(self) -> Any: ...


class PinnedRows:
    """The primary rows, registered (pinned) with CUDA for as long as a handler uses them.

    Rows that cannot be pinned still work. Copies then pass through the driver's own buffers, which is slower and costs
    time on the caller's thread; this is logged once.
    """

    def __init__(self, rows: NDArray[np.uint8], api: CudaApi | None = None) -> None:
        self.tensor = torch.from_numpy(rows)
        self.api: CudaApi = cast("CudaApi", torch.cuda) if api is None else api
        self._rows = rows
        self._users = 0
        self._registered = False

    def acquire(self, device: torch.device) -> None:
        """Count one more user; the first one pins the rows.

        Args:
            device: the GPU of the KV cache.

        Raises:
            ConfigError: CUDA would copy to other pages than those of the rows.
        """
        if not self._users:
            with self.api.device(device):  # without this, CUDA would create a context on its first device
                self._pin(device)
        self._users += 1

    def _pin(self, device: torch.device) -> None:
        address, nbytes = self._rows.ctypes.data, self._rows.nbytes
        runtime = self.api.cudart()
        code = _status(runtime.cudaHostRegister, address, nbytes, 0)
        if code == _ALREADY_REGISTERED:
            # An earlier mapping had this address and was unmapped without unpinning: copies would go to its pages.
            _status(runtime.cudaHostUnregister, address)
            code = _status(runtime.cudaHostRegister, address, nbytes, 0)
        self._registered = code == 0
        if not self._registered:
            _take_error(device)
        if code == _ALREADY_REGISTERED:
            raise ConfigError(
                "the primary tier's memory lies where an earlier engine of this process left memory registered with "
                "CUDA; shut engines down before the next one is built, or give each a process of its own"
            )
        if not self._registered:
            logger.warning(
                "the primary tier's %d bytes could not be pinned (CUDA error %d): copies will be slower; "
                "raise the limit on locked memory (ulimit -l, docker: --ulimit memlock=-1)",
                nbytes,
                code,
            )

    def release(self, device: torch.device) -> None:
        """Count one user less; the last one unpins the rows."""
        self._users -= 1
        if self._users == 0 and self._registered:
            self._registered = False
            with self.api.device(device):
                code = _status(self.api.cudart().cudaHostUnregister, self._rows.ctypes.data)
            if code:
                logger.warning("the primary tier's memory could not be unpinned (CUDA error %d)", code)


def _status(call: Callable[..., Any], *arguments: int) -> int:
    """Return the error number of a runtime call.

    The number is -1 if it cannot be read: an enum of Python raises for numbers that it has no name for.
    """
    try:
        answer = call(*arguments)
        return int(getattr(answer, "value", answer))
    except (TypeError, ValueError):
        return -1


def _take_error(device: torch.device) -> None:
    """Launch a kernel that takes the pending error of a failed call.

    CUDA reports the error of a failed call again at the thread's next kernel launch, which would be the engine's.
    """
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        logger.debug("took a pending error from CUDA: %s", error)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The pages of one ref of one group."""

    cache: torch.Tensor
    """Pages on the device, shape (num_blocks, words of a page)."""
    start: int
    """First word of the page within a GPU block's part of a segment."""
    stop: int
    """Word after the last one of the page."""


@dataclass(frozen=True, slots=True)
class _Running:
    size: int | None
    begin: EventLike
    end: EventLike
    keep_alive: tuple[torch.Tensor, ...]


def _word(kv_caches: CanonicalKVCaches, group: int) -> torch.dtype:
    """Return the widest integer type that all pages of a group consist of: kernels move words, not bytes."""
    refs = kv_caches.group_data_refs[group]
    tensors = [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
    sizes = (
        [ref.page_size_bytes for ref in refs]
        + [int(t.stride(0)) for t in tensors]
        + [int(t.storage_offset()) for t in tensors]
    )
    return next(
        dtype
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
        if not any(size % dtype.itemsize for size in sizes)
    )


class CudaCopyHandler(OffloadingHandler):
    """Copies in one direction between a CUDA KV cache and pinned rows."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        rows: PinnedRows,
        layout: RowLayout,
        direction: Direction,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        """Allocate the staging buffer and pin the rows.

        Args:
            kv_caches: the engine's KV cache in canonical form, on one GPU.
            rows: the primary rows.
            layout: the rows' layout.
            direction: stores or loads.
            staging_bytes: bytes of device memory for staging; default 64 MiB. At least one row's segment is allocated,
                at most those of all rows. While torch gathers pages, it needs up to as much again.

        Raises:
            ConfigError: the rows are too small for ``layout``, or the device memory does not suffice.
        """
        check_rows(rows.tensor.numpy(), layout)
        self._api = rows.api
        self._layout = layout
        self._direction = direction
        self._rows = rows
        self._num_blocks = blocks_per_group(kv_caches)
        self._device: torch.device = kv_caches.tensors[0].tensor.device
        self._words = [_word(kv_caches, group) for group in range(len(kv_caches.group_data_refs))]
        self._layers = [self._group_layers(kv_caches, group) for group in range(len(self._words))]
        self._staging_rows = [max(1, min(len(rows.tensor), staging_bytes // size)) for size in layout.rank_bytes]
        # Requests wait for loads; no request waits for a store.
        self._stream = self._api.Stream(device=self._device, priority=-1 if direction is Direction.LOAD else 0)
        self._running: dict[int, _Running] = {}
        self._instant: deque[TransferResult] = deque()
        self._open = True
        self._staging = self._allocate_staging()
        rows.acquire(self._device)

    def _allocate_staging(self) -> torch.Tensor:
        size = max(rows * size for rows, size in zip(self._staging_rows, self._layout.rank_bytes, strict=True))
        try:
            with self._api.stream(self._stream):  # torch's allocator assigns memory to a stream; only this one uses it
                return torch.empty(size, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise ConfigError(
                f"no device memory for the {size} bytes that copies to the primary tier need: {error}; "
                "give the engine's KV cache less memory (vLLM: a lower --gpu-memory-utilization)"
            ) from error

    def _group_layers(self, kv_caches: CanonicalKVCaches, group: int) -> list[_Layer]:
        word = self._words[group]
        layers = []
        for ref, offset in zip(kv_caches.group_data_refs[group], self._layout.page_offsets[group], strict=True):
            cache = kv_caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes].view(word)
            layers.append(_Layer(cache, offset // word.itemsize, (offset + ref.page_size_bytes) // word.itemsize))
        return layers

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if not self._open or job_id in self._running:
            logger.error(
                "copy job %d could not be started: %s", job_id, "it is running already" if self._open else "shut down"
            )
            return False
        try:
            gpu, cpu = split_spec(spec, self._direction)
            store = self._direction is Direction.STORE
            plan = plan_pages(
                self._layout, gpu, cpu, num_blocks=self._num_blocks, num_rows=len(self._rows.tensor), store=store
            )
        except TransferError as error:
            logger.error("copy job %d could not be started: %s", job_id, error)
            return False
        if store and not self._layout.writes:
            self._instant.append(TransferResult(job_id, True, transfer_type=self._direction.transfer_type))
            return True
        try:
            self._running[job_id] = self._submit(plan)
        except RuntimeError as error:
            logger.error("copy job %d failed: %s", job_id, error, exc_info=error)
            self._settle()  # the submitted part must not touch a row that is given to another block
            return False
        return True

    def _settle(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            logger.error("the device does not answer: %s", error)  # such a device copies nothing any more either

    def _submit(self, plan: list[GroupPages]) -> _Running:
        begin, end = self._api.Event(enable_timing=True), self._api.Event(enable_timing=True)
        keep: list[torch.Tensor] = []
        size = 0
        self._stream.wait_stream(self._api.current_stream(self._device))
        with self._api.stream(self._stream):
            begin.record(self._stream)
            for pages in plan:
                size += len(pages.gpu) * self._layout.gpu_block_bytes[pages.group]
                for chunk in self._chunks(pages):
                    keep += self._move(chunk)
            end.record(self._stream)
        return _Running(size, begin, end, tuple(keep))

    def _chunks(self, pages: GroupPages) -> Iterator[GroupPages]:
        """Yield parts whose rows fit the staging buffer; the GPU blocks of one row stay together."""
        starts = np.flatnonzero(np.diff(pages.rows, prepend=-1))
        cuts = [*starts[:: self._staging_rows[pages.group]].tolist(), len(pages.rows)]
        for a, b in pairwise(cuts):
            yield GroupPages(pages.group, pages.gpu[a:b], pages.rows[a:b], pages.subs[a:b])

    def _move(self, pages: GroupPages) -> list[torch.Tensor]:
        """Queue one chunk; returns the tensors that must live until the chunk is done."""
        group, layout = pages.group, self._layout
        word = self._words[group]
        changes = np.diff(pages.rows, prepend=-1) != 0
        rows = pages.rows[changes]
        slots = (np.cumsum(changes) - 1) * layout.block_size_factor + pages.subs
        ids, at = self._upload(pages.gpu), self._upload(slots)
        staging = self._staging[: len(rows) * layout.rank_bytes[group]].view(len(rows), -1)
        blocks = staging.view(word).view(len(rows) * layout.block_size_factor, -1)
        if self._direction is Direction.STORE:
            for layer in self._layers[group]:
                blocks[:, layer.start : layer.stop].index_copy_(0, at, layer.cache.index_select(0, ids))
            self._move_rows(group, rows, staging)
        else:
            self._move_rows(group, rows, staging)
            for layer in self._layers[group]:
                layer.cache.index_copy_(0, ids, blocks[:, layer.start : layer.stop].index_select(0, at))
        return [ids, at]

    def _move_rows(self, group: int, rows: NDArray[np.int64], staging: torch.Tensor) -> None:
        start = self._layout.segment_start(group)
        stop = start + self._layout.rank_bytes[group]
        host = self._rows.tensor
        for slot, row in enumerate(rows.tolist()):
            in_row = host[row, start:stop]
            source, destination = (
                (staging[slot], in_row) if self._direction is Direction.STORE else (in_row, staging[slot])
            )
            destination.copy_(source, non_blocking=True)

    def _upload(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(numbers))
        if self._device.type == "cpu":
            return tensor
        # The pinned copy returns to torch's pool, which reuses it only after the copy's end.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def get_finished(self) -> list[TransferResult]:
        results = list(self._instant)
        self._instant.clear()
        for job_id, job in list(self._running.items()):
            try:
                if not job.end.query():
                    break  # there is one stream: a job that was submitted later ends later
                seconds = job.begin.elapsed_time(job.end) / 1000.0
                results.append(TransferResult(job_id, True, job.size, seconds, self._direction.transfer_type))
            except RuntimeError as error:
                logger.error("copy job %d failed: %s", job_id, error, exc_info=error)
                results.append(TransferResult(job_id, False, transfer_type=self._direction.transfer_type))
            del self._running[job_id]
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        for job in [self._running[job_id] for job_id in job_ids if job_id in self._running]:
            try:
                job.end.synchronize()
            except RuntimeError as error:
                logger.error("waiting for copies failed: %s", error)  # get_finished reports the job as failed

    def order_before_compute(self, job_ids: Collection[int]) -> None:
        jobs = [self._running[job_id] for job_id in job_ids if job_id in self._running]
        try:
            compute = self._api.current_stream(self._device)
            for job in jobs:
                compute.wait_event(job.end)
        except RuntimeError as error:
            logger.error("the compute stream cannot wait for copies: %s", error)
            self.wait(job_ids)

    def shutdown(self) -> None:
        if self._open:
            self._open = False
            try:
                with self._api.device(self._device):
                    self.wait(list(self._running))
                self._rows.release(self._device)
            except RuntimeError as error:
                logger.error(
                    "the device does not answer: %s; the primary tier stays pinned until the process ends", error
                )
