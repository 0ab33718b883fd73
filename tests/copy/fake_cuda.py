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
    code: int = 0
    registered: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if self.code == 0:
            assert address not in self.registered
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


class FakeCuda:
    """``instant``: events are done when recorded; else they are when somebody waits, or the test says so."""

    def __init__(self, *, instant: bool = True) -> None:
        self.instant = instant
        self.log: list[str] = []
        self.compute = FakeStream("compute", self.log)
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.runtime = FakeRuntime()
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

    def current_stream(self, device: object = None) -> FakeStream:
        return self.entered or self.compute

    def cudart(self) -> FakeRuntime:
        return self.runtime
