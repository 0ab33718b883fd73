"""Copies between a KV cache on a GPU and the pinned primary rows, beside the limit of the bus.

The tables show GB/s in both directions. A job moves 64 blocks of 32 layers between scattered GPU blocks and scattered
rows. Beside the job stand one bare copy of the same bytes between contiguous pinned memory and device memory, which
shows the limit of the bus, and the same pages moved one by one, each with its own copy. "Submit" is the time that a job
costs the engine's thread before the device has done anything.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Bench, Sample, ratio, timed
from tiering.api.engine import KVCacheGroup
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from tiering.copy.batch import find_batch_copy
from tiering.copy.canonical import canonicalize
from tiering.copy.cuda import CudaCopyHandler
from tiering.copy.cudart import maps_registered_memory
from tiering.copy.host import Direction
from tiering.copy.layout import RowLayout
from tiering.copy.pages import PageKernel
from tiering.copy.pinning import PinnedRows
from tiering.primary.memory.region import SharedRegion

LAYERS = 32
BLOCKS_PER_JOB = 64
NEAR_THE_BUS = 0.8


def lacks() -> str:
    """Return the reason why this benchmark cannot run here; an empty string if it can."""
    return "" if torch.cuda.is_available() else "it needs a CUDA device"


def compare(bench: Bench, page_bytes: int, kernel: PageKernel, device: str = "cuda", api: Any = None) -> None:
    """Measure both directions with pages of this size; ``api`` stands for torch.cuda."""
    cuda = torch.cuda if api is None else api
    jobs = 1 if bench.quick else 8
    blocks, rows = 4 * BLOCKS_PER_JOB, 3 * BLOCKS_PER_JOB
    cache = {f"l{layer}": torch.ones(blocks, page_bytes, dtype=torch.uint8, device=device) for layer in range(LAYERS)}
    canonical = canonicalize(cache, [KVCacheGroup(tuple(cache), 16)], blocks)
    layout = RowLayout.of(canonical)
    region = SharedRegion.create(rows, layout.row_bytes)
    pinned = PinnedRows(region.array, cuda)
    batch = find_batch_copy() if api is None else None
    maps_rows = api is None and maps_registered_memory(torch.device(device))
    handlers = {
        direction: CudaCopyHandler(canonical, pinned, layout, direction, kernel, batch=batch, maps_rows=maps_rows)
        for direction in Direction
    }
    random = np.random.default_rng(0)
    gpu_ids = 1 + random.permutation(blocks - 1)[:BLOCKS_PER_JOB]
    row_ids = random.permutation(rows)[:BLOCKS_PER_JOB]
    in_rows = pinned.bytes.view(rows, -1)
    gpu, cpu = GPULoadStoreSpec(gpu_ids, [BLOCKS_PER_JOB], [0]), CPULoadStoreSpec(row_ids)
    nbytes = BLOCKS_PER_JOB * layout.row_bytes
    on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
    on_host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    pairs = list(zip(gpu_ids.tolist(), row_ids.tolist(), strict=True))

    def bare(store: bool) -> None:
        for _ in range(jobs):
            source, destination = (on_device, on_host) if store else (on_host, on_device)
            destination.copy_(source, non_blocking=True)
        cuda.current_stream().synchronize()

    def page_by_page(store: bool) -> None:
        for _ in range(jobs):
            for layer, tensor in enumerate(cache.values()):
                place = slice(layer * page_bytes, (layer + 1) * page_bytes)
                for block, row in pairs:
                    ends = (tensor[block], in_rows[row, place])
                    source, destination = ends if store else ends[::-1]
                    destination.copy_(source, non_blocking=True)
        cuda.current_stream().synchronize()

    for direction, spec in ((Direction.STORE, (gpu, cpu)), (Direction.LOAD, (cpu, gpu))):
        name = f"{direction.name.lower()}, pages of {page_bytes >> 10} KiB"
        store = direction is Direction.STORE
        stats = bench.compare(
            name,
            {
                "bare copy, contiguous": lambda store=store: timed(lambda: bare(store), nbytes=jobs * nbytes),  # type: ignore[misc]
                "CUDA copies": lambda direction=direction, spec=spec: moved(handlers[direction], spec, jobs, nbytes),  # type: ignore[misc]
                "page by page with torch": lambda store=store: timed(lambda: page_by_page(store), nbytes=jobs * nbytes),  # type: ignore[misc]
            },
            unit="GB/s",
        )
        submit = stats["CUDA copies"].extra["submit us/block"]
        bench.target(
            f"{name}: against a bare copy",
            ratio(stats["CUDA copies"], stats["bare copy, contiguous"]),
            NEAR_THE_BUS,
            "min",
            "x",
        )
        bench.note(f"{name}: submitting takes the engine's thread {submit:.1f} us per block.")
    for handler in handlers.values():
        handler.shutdown()
    region.close()


def moved(handler: CudaCopyHandler, spec: TransferSpec, jobs: int, nbytes: int) -> Sample:
    """Run ``jobs`` jobs that are all submitted at once."""
    submitting = 0.0

    def move() -> None:
        nonlocal submitting
        start = time.perf_counter()
        started = [handler.transfer_async(job_id, spec) for job_id in range(jobs)]
        submitting = time.perf_counter() - start
        handler.wait(range(jobs))
        if not all(started) or not all(result.success for result in handler.get_finished()):
            raise RuntimeError("a copy failed")

    sample = timed(move, nbytes=jobs * nbytes)
    return Sample(sample.value, sample.cpu, {"submit us/block": submitting / jobs / BLOCKS_PER_JOB * 1e6})


def run(bench: Bench) -> None:
    """Measure pages of 64 KiB, of 8 KiB and of 2 KiB."""
    from tiering.copy.kernel import move_pages  # only where there is a GPU

    for page_bytes in (64 << 10, 8 << 10, 2 << 10):
        compare(bench, page_bytes, move_pages)
