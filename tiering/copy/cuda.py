"""Copies between a CUDA KV cache and the primary rows: pinned rows, a side stream for each direction, events.

A job is one submission.  A store first gathers the job's pages, layer by layer, into a staging buffer on the device that looks like the
rows' segments, then moves each row with a single copy; a load goes the other way.  So a row costs one transfer over the bus, however
many layers it has.  The side stream is ordered after what the compute stream had been given when the job was submitted; the compute
stream waits for it only in :meth:`CudaCopyHandler.order_before_compute`, and the host only in :meth:`CudaCopyHandler.wait`.

An engine that measures free memory to size its KV cache does not know of the staging buffers: they are taken when it hands its KV
cache over, so that too little memory shows at start.
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

from tiering.base import CanonicalKVCaches, TransferSpec
from tiering.copy.base import OffloadingHandler, TransferResult
from tiering.copy.host import Direction, blocks_per_group, check_rows, split_spec
from tiering.copy.layout import GroupPages, RowLayout, TransferError, plan_pages
from tiering.errors import ConfigError

logger = logging.getLogger("kv_tiering.copy")

_STAGING_BYTES = 64 << 20
_ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""


class EventLike(Protocol):
    """A torch.cuda.Event."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any) -> float: ...


class StreamLike(Protocol):
    """A torch.cuda.Stream."""

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class CudaApi(Protocol):
    """What is used of ``torch.cuda``."""

    def Stream(self, device: Any = ..., priority: int = ...) -> StreamLike: ...  # noqa: N802
    def Event(self, enable_timing: bool = ...) -> EventLike: ...  # noqa: N802
    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...
    def device(self, device: Any) -> AbstractContextManager[Any]: ...
    def current_stream(self, device: Any = ...) -> StreamLike: ...
    def cudart(self) -> Any: ...


class PinnedRows:
    """The primary rows, registered with CUDA for as long as a handler uses them.

    Rows that cannot be registered still work: copies then pass through the driver's own buffers, slower and in part on the caller's
    thread, which is logged once.
    """

    def __init__(self, rows: NDArray[np.uint8], api: CudaApi | None = None) -> None:
        self.tensor = torch.from_numpy(rows)
        self.api: CudaApi = cast("CudaApi", torch.cuda) if api is None else api
        self._rows = rows
        self._users = 0
        self._registered = False

    def acquire(self, device: torch.device) -> None:
        """One more user; the first one pins.  Raises :class:`ConfigError` if copies to the rows would end elsewhere."""
        if not self._users:
            with self.api.device(device):  # else CUDA would make a context on its first device
                self._pin(device)
        self._users += 1

    def _pin(self, device: torch.device) -> None:
        address, nbytes = self._rows.ctypes.data, self._rows.nbytes
        runtime = self.api.cudart()
        code = _status(runtime.cudaHostRegister, address, nbytes, 0)
        if code == _ALREADY_REGISTERED:
            # It was another mapping's address, which went without being unregistered: copies would go to its pages, not to these.
            _status(runtime.cudaHostUnregister, address)
            code = _status(runtime.cudaHostRegister, address, nbytes, 0)
        self._registered = code == 0
        if not self._registered:
            _take_error(device)
        if code == _ALREADY_REGISTERED:
            raise ConfigError(
                "the primary tier's memory lies where an earlier engine of this process left memory registered with CUDA; shut engines "
                "down before the next one is built, or give each a process of its own"
            )
        if not self._registered:
            logger.warning(
                "the primary tier's %d bytes could not be pinned (CUDA error %d): copies will be slower; raise the limit on locked "
                "memory (ulimit -l, docker: --ulimit memlock=-1)",
                nbytes,
                code,
            )

    def release(self, device: torch.device) -> None:
        """One user less; the last one unpins."""
        self._users -= 1
        if self._users == 0 and self._registered:
            self._registered = False
            with self.api.device(device):
                code = _status(self.api.cudart().cudaHostUnregister, self._rows.ctypes.data)
            if code:
                logger.warning("the primary tier's memory could not be unpinned (CUDA error %d)", code)


def _status(call: Callable[..., Any], *arguments: int) -> int:
    """A runtime call's error number; -1 if it has none that can be read (an enum of Python's knows only numbers that it names)."""
    try:
        answer = call(*arguments)
        return int(getattr(answer, "value", answer))
    except (TypeError, ValueError):
        return -1


def _take_error(device: torch.device) -> None:
    """CUDA gives the error of a call that failed to the thread's next kernel launch as well: to one that nobody needs."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        logger.debug("taken from CUDA: %s", error)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One ref of one group: its pages on the device, and where they lie in a GPU block's part of a segment, in words."""

    cache: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Running:
    size: int | None
    begin: EventLike
    end: EventLike
    keep_alive: tuple[torch.Tensor, ...]


def _word(kv_caches: CanonicalKVCaches, group: int) -> torch.dtype:
    """The widest integer that all pages of a group are made of: kernels move words, not bytes."""
    refs = kv_caches.group_data_refs[group]
    tensors = [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
    sizes = [ref.page_size_bytes for ref in refs] + [int(t.stride(0)) for t in tensors] + [int(t.storage_offset()) for t in tensors]
    return next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.int8) if not any(size % dtype.itemsize for size in sizes)
    )


class CudaCopyHandler(OffloadingHandler):
    """Copies one way between a CUDA KV cache and pinned rows.

    ``staging_bytes``: of device memory per direction, and up to as much again while torch gathers pages; one row's part of this rank
    where that is more, and no more than all rows'.
    Raises :class:`ConfigError` if the rows are too small for ``layout``, or there is no device memory for it.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        rows: PinnedRows,
        layout: RowLayout,
        direction: Direction,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
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
        # Loads are waited for by requests; stores by nobody.
        self._stream = self._api.Stream(device=self._device, priority=-1 if direction is Direction.LOAD else 0)
        self._running: dict[int, _Running] = {}
        self._instant: deque[TransferResult] = deque()
        self._open = True
        self._staging = self._allocate_staging()
        rows.acquire(self._device)

    def _allocate_staging(self) -> torch.Tensor:
        size = max(rows * size for rows, size in zip(self._staging_rows, self._layout.rank_bytes, strict=True))
        try:
            with self._api.stream(self._stream):  # torch's allocator gives memory to a stream, and only this one uses it
                return torch.empty(size, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise ConfigError(
                f"no device memory for the {size} bytes that copies to the primary tier need: {error}; leave the engine's KV cache less "
                "(vLLM: a lower --gpu-memory-utilization)"
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
            logger.error("copy job %d could not be started: %s", job_id, "it is running already" if self._open else "shut down")
            return False
        try:
            gpu, cpu = split_spec(spec, self._direction)
            store = self._direction is Direction.STORE
            plan = plan_pages(self._layout, gpu, cpu, num_blocks=self._num_blocks, num_rows=len(self._rows.tensor), store=store)
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
            self._settle()  # what was submitted of it must not touch a row that is given to somebody else
            return False
        return True

    def _settle(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            logger.error("the device does not answer: %s", error)  # then it copies nothing any more either

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
        """Parts whose rows fit the staging buffer.  Rows are never split: GPU blocks of one row are neighbours."""
        starts = np.flatnonzero(np.diff(pages.rows, prepend=-1))
        cuts = [*starts[:: self._staging_rows[pages.group]].tolist(), len(pages.rows)]
        for a, b in pairwise(cuts):
            yield GroupPages(pages.group, pages.gpu[a:b], pages.rows[a:b], pages.subs[a:b])

    def _move(self, pages: GroupPages) -> list[torch.Tensor]:
        """Queue one chunk; returns what must live until it is done."""
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
            source, destination = (staging[slot], in_row) if self._direction is Direction.STORE else (in_row, staging[slot])
            destination.copy_(source, non_blocking=True)

    def _upload(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(numbers))
        if self._device.type == "cpu":
            return tensor
        # The pinned copy goes back to torch's pool, which reuses it only after the copy's end.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def get_finished(self) -> list[TransferResult]:
        results = list(self._instant)
        self._instant.clear()
        for job_id, job in list(self._running.items()):
            try:
                if not job.end.query():
                    break  # one stream: what was submitted later ends later
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
                logger.error("the device does not answer: %s; the primary tier stays pinned until the process ends", error)
