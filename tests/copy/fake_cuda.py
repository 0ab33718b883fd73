"""A torch.cuda on CPU tensors that is as strict as a device where that can hide a defect.

Everything runs at once. What the fake checks beside the bytes:

- Order: :attr:`FakeCuda.races` lists every two accesses to the same bytes, one of them a write, that no stream, event
  or wait of the host orders.
- Errors left behind: the error of a failed runtime call is raised by the next kernel.
- Registration: ranges have a largest size, may not share a page, and a copy may not cross the border of two.
- Calls: :attr:`FakeCuda.calls` lists every kernel, copy and batched copy, with its stream.

Kernels and copies are seen inside ``with api.watched()``.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiering.copy.batch import BatchCopy
from tiering.copy.pages import DeviceGroup

DispatchMode: Any = TorchDispatchMode
"""torch's class, whose methods have no types."""

KERNELS = {"fill_", "zero_", "zeros"}
"""Operators that launch a kernel."""

Clock = dict[object, int]
"""Time up to which a waiter has seen each stream's work."""


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


@dataclass(eq=False)
class FakeStream:
    """A stream of the fake device.

    Attributes:
        broken: True: every call on the stream fails.
    """

    api: FakeCuda
    name: str
    cuda_stream: int
    priority: int = 0
    broken: bool = False
    clock: Clock = field(default_factory=dict)

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error")

    def wait_stream(self, stream: FakeStream) -> None:
        self._check()
        self.api.log.append(f"{self.name} waits for {stream.name}")
        _merge(self.clock, stream.clock)

    def wait_event(self, event: FakeEvent) -> None:
        self._check()
        self.api.log.append(f"{self.name} waits for event {self.api.events.index(event)}")
        _merge(self.clock, event.clock)

    def synchronize(self) -> None:
        self.api.log.append(f"host waits for {self.name}")
        self._check()
        _merge(self.api.host, self.clock)

    def work(self) -> int:
        """Begin a piece of work after all work that the host has waited for; return its time."""
        _merge(self.clock, self.api.host)
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]


@dataclass(eq=False)
class FakeEvent:
    api: FakeCuda
    timed: bool
    recorded: bool = False
    done: bool = False
    broken: bool = False
    clock: Clock = field(default_factory=dict)

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.api.current_stream()
        self.recorded = True
        self.done = self.api.instant
        self.clock = dict(stream.clock)
        self.api.log.append(f"event on {stream.name}")

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("CUDA error")
        return self.done

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error")
        self.done = True
        _merge(self.api.host, self.clock)
        self.api.log.append("host waits for event")

    def elapsed_time(self, end_event: FakeEvent) -> float:
        if not (self.timed and end_event.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.recorded and end_event.recorded):
            raise RuntimeError("CUDA error: invalid resource handle")
        return 2000.0


@dataclass
class FakeRuntime:
    """The CUDA runtime's host registrations, and its last error.

    Attributes:
        code: error code of every registration; 0: none.
        limit: largest range that can be registered, in bytes.
        on: the current device of each call.
    """

    api: FakeCuda
    code: int = 0
    limit: int = 256 << 30
    fails_after: int | None = None
    registered: dict[int, int] = field(default_factory=dict)
    on: list[object] = field(default_factory=list)
    last_error: int = 0

    def _answer(self, code: int) -> int:
        self.on.append(self.api.current_device)
        self.last_error = code or self.last_error
        return code

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> object:  # noqa: N802
        if self.code:
            return self._answer(self.code)
        if size > self.limit or (self.fails_after is not None and len(self.registered) >= self.fails_after):
            return self._answer(2)
        if any(_pages_overlap(ptr, size, start, length) for start, length in self.registered.items()):
            return self._answer(712)
        self.registered[ptr] = size
        return self._answer(0)

    def cudaHostUnregister(self, ptr: int) -> object:  # noqa: N802
        return self._answer(713 if self.registered.pop(ptr, None) is None else 0)

    def launch(self) -> None:
        """Launch a kernel and raise the runtime's last error, as torch does after every launch."""
        code, self.last_error = self.last_error, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def holds(self, address: int, nbytes: int) -> bool | None:
        """Return True if one registration holds the range, False if only a part of it, None if none does."""
        found = [
            start <= address and address + nbytes <= start + size
            for start, size in self.registered.items()
            if start < address + nbytes and address < start + size
        ]
        return all(found) if found else None


def _pages_overlap(a: int, a_size: int, b: int, b_size: int) -> bool:
    def pages(start: int, size: int) -> range:
        return range(start // mmap.PAGESIZE, (start + size - 1) // mmap.PAGESIZE + 1)

    first, second = pages(a, a_size), pages(b, b_size)
    return first.start < second.stop and second.start < first.stop


class Access(NamedTuple):
    start: int
    stop: int
    writes: bool
    stream: FakeStream
    time: int


class Call(NamedTuple):
    name: str
    stream: str
    nbytes: int


class FakeCuda:
    """The fake of ``torch.cuda`` and of the driver.

    Args:
        instant: True: events are done when recorded. False: they are done when a caller waits, or a test says so.
        checks_order: False leaves out the check of the order of accesses, whose time is quadratic in their number.
    """

    def __init__(self, *, instant: bool = True, checks_order: bool = True) -> None:
        self.instant = instant
        self.checks_order = checks_order
        self.log: list[str] = []
        self.calls: list[Call] = []
        self.races: list[tuple[Access, Access]] = []
        self.orders: list[bool] = []
        self.host: Clock = {}
        self.compute = FakeStream(self, "compute", 1)
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.runtime = FakeRuntime(self)
        self.batch_code = 0
        self.current_device: object = None
        self._entered: list[FakeStream] = []
        self._accesses: list[Access] = []

    # ------------------------------------------------------------------------------------------------------- torch.cuda

    def Stream(self, device: object = None, priority: int = 0) -> FakeStream:  # noqa: N802
        self.streams.append(FakeStream(self, f"side{len(self.streams)}", len(self.streams) + 2, priority))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802
        self.events.append(FakeEvent(self, enable_timing))
        return self.events[-1]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._entered.append(stream)
        try:
            yield
        finally:
            self._entered.pop()

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        before, self.current_device = self.current_device, device
        try:
            yield
        finally:
            self.current_device = before

    def current_stream(self, device: object = None) -> FakeStream:
        return self._entered[-1] if self._entered else self.compute

    def cudart(self) -> FakeRuntime:
        return self.runtime

    # ----------------------------------------------------------------------------------------------------------- driver

    def batch(self) -> BatchCopy:
        """The driver's batched copy, in the form of CUDA 13."""
        return BatchCopy(self._copy_batch, reports_index=False)

    def _copy_batch(
        self, dsts: Any, srcs: Any, sizes: Any, count: Any, attrs: Any, attrs_idxs: Any, num_attrs: Any, stream: Any
    ) -> int:
        if self.batch_code:
            return self.batch_code
        destinations, sources, lengths = (
            np.ctypeslib.as_array(ctypes.cast(array, ctypes.POINTER(ctypes.c_uint64)), (count.value,)).tolist()
            for array in (dsts, srcs, sizes)
        )
        order = attrs._obj.src_access_order
        ends = sorted((start, start + size) for start, size in zip(destinations, lengths, strict=True))
        overlap = any(a[1] > b[0] for a, b in pairwise(ends))
        if overlap or order not in (1, 3) or num_attrs.value != 1 or attrs_idxs._obj.value != 0:
            return 1
        self.orders.append(order == 1)
        on = next(one for one in self.streams if one.cuda_stream == stream.value)
        self.calls.append(Call("batch", on.name, sum(lengths)))
        time = on.work()
        for destination, source, size in zip(destinations, sources, lengths, strict=True):
            self._check_registration(destination, source, size)
            self._touch(on, time, source, size, writes=False)
            self._touch(on, time, destination, size, writes=True)
            ctypes.memmove(destination, source, size)
        return 0

    def kernel(
        self, group: DeviceGroup, blocks: torch.Tensor, target: torch.Tensor, *, store: bool, direct: bool = False
    ) -> None:
        """Run the kernel of copies, byte by byte."""
        self.runtime.launch()
        stream = self.current_stream()
        time = stream.work()
        width = group.word.itemsize
        for position, block in enumerate(blocks.tolist()):
            for address, stride, staged, in_row, size in group.pages.t().tolist():
                page = address + block * stride
                if direct:
                    other = int(target[position]) + in_row
                    if self.runtime.holds(other, size * width) is not True:
                        raise RuntimeError("CUDA error: an illegal memory access was encountered")
                else:
                    other = target.data_ptr() + position * group.block_bytes + staged
                source, destination = (page, other) if store else (other, page)
                self._touch(stream, time, source, size * width, writes=False)
                self._touch(stream, time, destination, size * width, writes=True)
                ctypes.memmove(destination, source, size * width)
        name = ("direct " if direct else "") + ("gather" if store else "scatter")
        self.calls.append(Call(name, stream.name, len(blocks) * group.block_bytes))

    # ----------------------------------------------------------------------------------------------------------- checks

    @contextmanager
    def watched(self) -> Iterator[FakeCuda]:
        """Record the kernels and copies of torch on CPU tensors as those of this device."""
        with _Watch(self):
            yield self

    def write(self, tensor: torch.Tensor) -> None:
        """Write to a tensor on the compute stream, like a forward pass."""
        self._touch_tensor(self.compute, self.compute.work(), tensor, writes=True)

    def saw(self, name: str, arguments: tuple[Any, ...], out: torch.Tensor | None) -> None:
        """Record an operator of torch before it runs.

        On the compute stream, where tests prepare their tensors, only :meth:`write` counts as an access.
        """
        stream = self.current_stream()
        if name in KERNELS:
            self.runtime.launch()
        if stream is self.compute:
            self.calls.append(Call(name, stream.name, 0))
            return
        time = stream.work()
        if name == "copy_":
            written, source = arguments[:2]
            self._check_registration(written.data_ptr(), source.data_ptr(), written.nbytes)
            self._touch_tensor(stream, time, source, writes=False)
        else:
            written = arguments[0] if name in ("fill_", "zero_") else None
        if written is not None:
            self._touch_tensor(stream, time, written, writes=True)
        nbytes = written.nbytes if written is not None else 0
        self.calls.append(Call(name, stream.name, nbytes))

    def _check_registration(self, *ends_and_size: int) -> None:
        *addresses, size = ends_and_size
        if any(self.runtime.holds(address, size) is False for address in addresses):
            raise RuntimeError("CUDA error: a copy crosses the border of a registration")

    def _touch_tensor(self, stream: FakeStream, time: int, tensor: torch.Tensor, *, writes: bool) -> None:
        if tensor.dim() > 1 and not tensor.is_contiguous() and self.checks_order:
            for part in tensor:
                self._touch_tensor(stream, time, part, writes=writes)
        else:
            self._touch(stream, time, tensor.data_ptr(), tensor.nbytes, writes=writes)

    def _touch(self, stream: FakeStream, time: int, start: int, nbytes: int, *, writes: bool) -> None:
        if not self.checks_order:
            return
        access = Access(start, start + nbytes, writes, stream, time)
        self.races += [
            (one, access)
            for one in self._accesses
            if one.start < access.stop
            and access.start < one.stop
            and (one.writes or writes)
            and stream.clock.get(one.stream, 0) < one.time
        ]
        self._accesses.append(access)


class _Watch(DispatchMode):  # type: ignore[misc]
    def __init__(self, api: FakeCuda) -> None:
        super().__init__()
        self._api = api
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        if name in KERNELS | {"copy_"}:
            self._api.saw(name, args, kwargs.get("out"))
        return func(*args, **kwargs)
