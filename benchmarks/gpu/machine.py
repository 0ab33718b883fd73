"""The machine that is checked: a GPU with torch.cuda, or a stand-in on the CPU for dry runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.copy.fake_cuda import FakeCuda
from tiering.copy.batch import BatchCopy, find_batch_copy
from tiering.copy.cudart import maps_registered_memory
from tiering.copy.pages import PageKernel


@dataclass(frozen=True, slots=True)
class Machine:
    """The device of the checks, with the calls that differ between a GPU and the stand-in."""

    name: str
    """Name for the report."""
    device: torch.device
    """Device of the KV caches."""
    api: Any
    """``torch.cuda`` or the stand-in."""
    batch: BatchCopy | None
    """The driver's batched copy."""
    kernel: PageKernel
    """The kernel that gathers and scatters pages."""
    maps_rows: bool
    """True if kernels may use the rows by their addresses on the host."""
    is_gpu: bool
    """False for the stand-in."""
    scale: float
    """Sizes and repetitions are multiplied by this number: 1 on a GPU, less in a dry run."""
    reserved: Callable[[], int]
    """Returns the device memory that torch has reserved, in bytes."""
    free: Callable[[], int]
    """Returns the free device memory in bytes."""
    watched: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)
    """Lets the stand-in see kernels and copies."""

    def sized(self, number: int, least: int = 1) -> int:
        """Return ``number`` scaled, but at least ``least``."""
        return max(least, int(number * self.scale))

    def synchronize(self) -> None:
        """Wait for the work of the compute stream."""
        self.api.current_stream(self.device).synchronize()


def gpu_machine() -> Machine | None:
    """Return the first GPU of this machine; None without one."""
    if not torch.cuda.is_available():
        return None
    from tiering.copy.kernel import move_pages  # only where there is a GPU

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return Machine(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {runtime}",
        device,
        torch.cuda,
        find_batch_copy(),
        move_pages,
        maps_rows=maps_registered_memory(device),
        is_gpu=True,
        scale=1.0,
        reserved=lambda: torch.cuda.memory_reserved(device),
        free=lambda: torch.cuda.mem_get_info(device)[0],
    )


def dry_machine() -> Machine:
    """Return the stand-in, which runs everything at once on CPU tensors."""
    fake = FakeCuda(checks_order=False)
    return Machine(
        "no GPU (dry run)",
        torch.device("cpu"),
        fake,
        fake.batch(),
        fake.kernel,
        maps_rows=True,
        is_gpu=False,
        scale=1 / 64,
        reserved=lambda: 0,
        free=lambda: 0,
        watched=fake.watched,
    )
