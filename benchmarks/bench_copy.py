"""Copies between the KV cache and the primary rows on engines without an accelerator.

The tables show GB/s and CPU seconds per GB in both directions. A job moves 64 blocks of 32 layers (2 MiB a block)
between scattered GPU blocks and scattered rows. Beside the job stand one bare ``copy_`` of the same bytes in one piece,
which shows the limit of the memory, and the same pages moved one by one with torch.

Canonical rows are compared with plain ones for one of 1, 2 and 4 ranks. All of their pages have 64 KiB together.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from benchmarks.harness import Bench, Sample, ratio, timed
from tiering.api.engine import HeadShard, KVCacheGroup
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from tiering.copy.canonical import canonicalize
from tiering.copy.contract import OffloadingHandler
from tiering.copy.host import Direction, HostCopyHandler
from tiering.copy.layout import RowLayout
from tiering.primary.memory.region import SharedRegion

LAYERS = 32
BLOCKS_PER_JOB = 64


def move(handler: OffloadingHandler, spec: TransferSpec, jobs: int) -> None:
    for job_id in range(jobs):
        if not handler.transfer_async(job_id, spec):
            raise RuntimeError("the copy could not be started")
        handler.wait([job_id])
    if not all(result.success for result in handler.get_finished()):
        raise RuntimeError("a copy failed")


def compare(bench: Bench, page_bytes: int) -> None:
    jobs = 1 if bench.quick else 4
    blocks, rows = 4 * BLOCKS_PER_JOB, 3 * BLOCKS_PER_JOB
    cache = {f"l{layer}": torch.ones(blocks, page_bytes, dtype=torch.uint8) for layer in range(LAYERS)}
    canonical = canonicalize(cache, [KVCacheGroup(tuple(cache), 16)], blocks)
    layout = RowLayout.of(canonical)
    region = SharedRegion.create(rows, layout.row_bytes)
    handlers = {
        (direction, threads): HostCopyHandler(canonical, region.array, layout, direction, threads)
        for direction in Direction
        for threads in (1, 2)
    }
    random = np.random.default_rng(0)
    gpu_ids = 1 + random.permutation(blocks - 1)[:BLOCKS_PER_JOB]
    row_ids = random.permutation(rows)[:BLOCKS_PER_JOB]
    gpu, cpu = GPULoadStoreSpec(gpu_ids, [BLOCKS_PER_JOB], [0]), CPULoadStoreSpec(row_ids)
    nbytes = jobs * BLOCKS_PER_JOB * layout.row_bytes
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    torch_rows = torch.from_numpy(region.array)

    def bare() -> Sample:
        return timed(lambda: target.copy_(source), nbytes=nbytes)

    def page_by_page() -> None:
        for _ in range(jobs):
            for layer, tensor in enumerate(cache.values()):
                place = slice(layer * page_bytes, (layer + 1) * page_bytes)
                for block, row in zip(gpu_ids.tolist(), row_ids.tolist(), strict=True):
                    torch_rows[row, place].copy_(tensor[block])

    torch.set_num_threads(1)
    for direction, spec in ((Direction.STORE, (gpu, cpu)), (Direction.LOAD, (cpu, gpu))):
        name = f"{direction.name.lower()}, pages of {page_bytes >> 10} KiB"

        def handler(threads: int, direction: Direction = direction, spec: TransferSpec = spec) -> Sample:
            return timed(lambda: move(handlers[direction, threads], spec, jobs), nbytes=nbytes)

        variants = {
            "bare copy_, 1 thread": bare,
            "host copies, 1 thread": lambda: handler(1),
            "host copies, 2 threads": lambda: handler(2),
        }
        if direction is Direction.STORE:
            variants["page by page with torch"] = lambda: timed(page_by_page, nbytes=nbytes)
        stats = bench.compare(name, variants, unit="GB/s")
        bench.target(
            f"{name}: one thread against a bare copy_",
            ratio(stats["host copies, 1 thread"], stats["bare copy_, 1 thread"]),
            0.5 if page_bytes >= 64 << 10 else 0.3,
            "min",
            "x",
        )
    for copies in handlers.values():
        copies.shutdown()
    region.close()


def compare_layouts(bench: Bench, ranks: int) -> None:
    """Compare one rank's copies to and from canonical rows with those to and from plain rows."""
    jobs, heads, tokens, content = 1 if bench.quick else 4, 8 // ranks, 16, 256
    blocks, rows = 4 * BLOCKS_PER_JOB, 3 * BLOCKS_PER_JOB
    cache = {f"l{layer}": torch.ones(blocks, heads, tokens, content, dtype=torch.bfloat16) for layer in range(LAYERS)}
    groups = [KVCacheGroup(tuple(cache), tokens)]
    caches = {
        "plain": canonicalize(cache, groups, blocks),
        "canonical": canonicalize(cache, groups, blocks, HeadShard(heads, True, ranks - 1, ranks)),
    }
    layouts = {name: RowLayout.of(kv, 1, ranks - 1, ranks) for name, kv in caches.items()}
    region = SharedRegion.create(rows, layouts["plain"].row_bytes)
    random = np.random.default_rng(0)
    gpu = GPULoadStoreSpec(1 + random.permutation(blocks - 1)[:BLOCKS_PER_JOB], [BLOCKS_PER_JOB], [0])
    cpu = CPULoadStoreSpec(random.permutation(rows)[:BLOCKS_PER_JOB])
    nbytes = jobs * BLOCKS_PER_JOB * layouts["plain"].row_bytes // ranks
    for direction, spec in ((Direction.STORE, (gpu, cpu)), (Direction.LOAD, (cpu, gpu))):
        handlers = {name: HostCopyHandler(kv, region.array, layouts[name], direction, 1) for name, kv in caches.items()}

        def copy(name: str, handlers: dict[str, HostCopyHandler] = handlers, spec: TransferSpec = spec) -> Sample:
            return timed(lambda: move(handlers[name], spec, jobs), nbytes=nbytes)

        name = f"{direction.name.lower()}, one of {ranks} rank(s), canonical against plain rows"
        stats = bench.compare(name, {kind: partial(copy, kind) for kind in caches}, unit="GB/s")
        bench.target(name, ratio(stats["canonical"], stats["plain"]), 0.95, "min", "x")
        for handler in handlers.values():
            handler.shutdown()
    region.close()


def run(bench: Bench) -> None:
    """Measure pages of 64 KiB and of 8 KiB, and canonical rows."""
    for page_bytes in (64 << 10, 8 << 10):
        compare(bench, page_bytes)
    for ranks in (1, 2, 4):
        compare_layouts(bench, ranks)
