"""vLLM's own offloading connectors on its CPU build, which does not let them run there.

Both connectors are written for GPUs. What they need of one is replaced: streams and events, which are always ready, and
the copy of a batch of pages, which is one call of native code. Their schedulers, queues, threads and bookkeeping are
vLLM's own and run unchanged. The copies of the OffloadingConnector are then part of the step that orders them; those of
the SimpleCPUOffloadConnector stay on its thread.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

_SOURCE = """
#include <stdint.h>
#include <string.h>
int copy_pages(const uint64_t *to, const uint64_t *from, const uint64_t *bytes, uint64_t pages)
{
    for (uint64_t page = 0; page < pages; page++)
        memcpy((void *)to[page], (const void *)from[page], bytes[page]);
    return 0;
}
"""


def compiler() -> str | None:
    """Return the path of a C compiler; None if there is none."""
    return shutil.which("cc")


def compile_copy(directory: Path) -> Path:
    """Compile the copy of a batch of pages; return the path of the library."""
    source, library = directory / "copy_pages.c", directory / "copy_pages.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler() or "cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


class PageCopy:
    """The native copy, with the CPU seconds that its calls have taken."""

    def __init__(self, library: Path) -> None:
        self._call = ctypes.CDLL(str(library)).copy_pages
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        self.seconds = 0.0

    def __call__(self, to: int, source: int, sizes: int, pages: int, *_: Any) -> int:
        """Copy pages one by one, and return 0; CUDA's further arguments are ignored.

        Args:
            to: address of the array of addresses to copy to.
            source: address of the array of addresses to copy from.
            sizes: address of the array of bytes per page.
            pages: number of pages.
        """
        began = time.thread_time()
        code = int(self._call(to, source, sizes, pages))
        self.seconds += time.thread_time() - began
        return code


class _Stream:
    """A stream whose work has always ended."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event:
    """An event that is recorded at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: _Event) -> float:
        """Return the milliseconds until ``later``."""
        return (later._at - self._at) * 1e3


class _Instead:
    """A module or object with some of its attributes replaced."""

    def __init__(self, real: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _OnGPU:
    """A tensor that passes for one on a GPU."""

    is_cuda = True

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def install(library: Path) -> PageCopy:
    """Let vLLM's connectors run in this process; return the copy that they use."""
    import torch
    from vllm.platforms import current_platform

    copy = PageCopy(library)
    platform = _Instead(
        current_platform,
        Stream=_Stream,
        current_stream=_Stream,
        stream=lambda stream: nullcontext(),
        set_device=lambda device: None,
        is_cuda_alike=lambda: True,
        is_rocm=lambda: False,
    )
    cuda = _Instead(torch.cuda, Stream=_Stream, Event=_Event, current_stream=_Stream)
    streams = _Instead(torch, Event=_Event, cuda=cuda)
    modules: list[Any] = [
        importlib.import_module(f"vllm.v1.{name}")
        for name in (
            "kv_offload.cpu.gpu_worker",
            "kv_offload.cpu.spec",
            "simple_kv_offload.cuda_mem_ops",
            "simple_kv_offload.copy_backend",
            "simple_kv_offload.worker",
        )
    ]
    worker, spec, memory, backend, simple = modules
    for module in (worker, backend, simple):
        module.torch = streams
    for module in (worker, spec, backend):
        module.current_platform = platform
    spec.CPUOffloadingSpec._uses_shared_region = lambda self: False
    memory._batch_memcpy = (copy, 1)
    memory._resolve_max_batch_descriptors = lambda: 0

    def swap(source: Any, to: Any, sizes: Any, **_: Any) -> None:
        copy(to.data_ptr(), source.data_ptr(), sizes.data_ptr(), source.numel())

    worker._select_swap_blocks_fn = lambda *_, **__: swap
    handler = worker.SingleDirectionOffloadingHandler
    begin = handler.__init__

    def begin_on_gpu(self: Any, gpu_tensors: list[Any], *arguments: Any, **words: Any) -> None:
        begin(self, [_OnGPU(tensor) for tensor in gpu_tensors], *arguments, **words)
        self.src_tensors, self.dst_tensors = (
            [tensor.tensor if isinstance(tensor, _OnGPU) else tensor for tensor in tensors]
            for tensors in (self.src_tensors, self.dst_tensors)
        )

    handler.__init__ = begin_on_gpu
    return copy
