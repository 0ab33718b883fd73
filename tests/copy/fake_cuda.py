"""A torch.cuda that records what is ordered after what, and runs everything at once on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class FakeStream:
    """``log`` is shared by all streams: what was submitted, in order."""

    name: str
    log: list[str]
    priority: int = 0
    broken: bool = False

    def wait_stream(self, stream: FakeStream) -> None:
        if self.broken:
            raise RuntimeError("CUDA error")
        self.log.append(f"{self.name} waits for {stream.name}")

    def wait_event(self, event: FakeEvent) -> None:
        if self.broken:
            raise RuntimeError("CUDA error")
        self.log.append(f"{self.name} waits for event {event.api.events.index(event)}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")
        if self.broken:
            raise RuntimeError("CUDA error")


@dataclass(eq=False)
class FakeEvent:
    api: FakeCuda
    recorded: bool = False
    done: bool = False
    broken: bool = False

    def record(self, stream: FakeStream) -> None:
        self.recorded = True
        self.done = self.api.instant
        self.api.log.append(f"event on {stream.name}")

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("CUDA error")
        return self.done

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error")
        self.done = True
        self.api.log.append("host waits for event")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.recorded
        assert end.done
        return 2000.0


@dataclass
class FakeRuntime:
    """``code``: what registering answers if not zero.  ``on``: the current device of each call."""

    api: FakeCuda
    code: int = 0
    registered: dict[int, int] = field(default_factory=dict)
    on: list[object] = field(default_factory=list)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> object:  # noqa: N802
        self.on.append(self.api.current_device)
        if self.code:
            return self.code
        if any(start < address + nbytes and address < start + size for start, size in self.registered.items()):
            return 712
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> object:  # noqa: N802
        self.on.append(self.api.current_device)
        return 713 if self.registered.pop(address, None) is None else 0


class FakeCuda:
    """``instant``: events are done when recorded; else they are when somebody waits, or the test says so."""

    def __init__(self, *, instant: bool = True) -> None:
        self.instant = instant
        self.log: list[str] = []
        self.compute = FakeStream("compute", self.log)
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.runtime = FakeRuntime(self)
        self.current_device: object = None
        self.entered: FakeStream | None = None

    def Stream(self, device: object = None, priority: int = 0) -> FakeStream:  # noqa: N802
        self.streams.append(FakeStream(f"side{len(self.streams)}", self.log, priority))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802
        assert enable_timing
        self.events.append(FakeEvent(self))
        return self.events[-1]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.entered = stream
        try:
            yield
        finally:
            self.entered = None

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        before, self.current_device = self.current_device, device
        try:
            yield
        finally:
            self.current_device = before

    def current_stream(self, device: object = None) -> FakeStream:
        return self.entered or self.compute

    def cudart(self) -> FakeRuntime:
        return self.runtime
