"""Checks of the copies: pinning, errors left behind, bytes, order, memory and rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.checks import Check, NotHereError, require
from benchmarks.gpu.machine import Machine
from tests.copy import kv
from tiering.api.engine import CanonicalKVCaches, HeadShard, KVCacheGroup
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from tiering.copy.batch import BatchCopy
from tiering.copy.canonical import canonicalize
from tiering.copy.cuda import CudaCopyHandler
from tiering.copy.cudart import HostRegistration
from tiering.copy.host import Direction
from tiering.copy.layout import RowLayout
from tiering.copy.pinning import PinnedRows
from tiering.primary.memory.region import SharedRegion

LAYERS = 32
JOB_BLOCKS = 64
GOALS = {
    "store": {64 << 10: 0.95, 16 << 10: 0.8, 8 << 10: 0.8},
    "load": {64 << 10: 0.9, 16 << 10: 0.8, 8 << 10: 0.8},
}
"""Direction and page size in bytes → least rate, as a part of the rate of a bare pinned copy.

A kernel makes the loads, so that the inputs of the engine's steps do not wait behind them.
"""
MOST_START_SECONDS = 1.0
"""Longest time that the engine's start may wait for a CPU tier of 64 GiB."""
MOST_SUBMIT_SECONDS = 1e-3
"""Longest time that the submission of one block may take on the engine's thread.

On a machine with an H200 it takes 0.2 to 0.5 ms. A copy that the host waits for takes longer.
"""
_STALE = 0xA5
"""Value of the bytes in new staging buffers.

An allocator may return memory that still holds what a check expects.
"""


class Way(NamedTuple):
    """A way to copy."""

    batch: BatchCopy | None
    """The driver's batched copy; None: staged pieces are copied one by one."""
    maps_rows: bool
    """True: a kernel moves small pieces straight between the KV cache and the rows."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Both handlers over one KV cache and rows of its own."""

    cache: CanonicalKVCaches
    region: SharedRegion
    pinned: PinnedRows
    layout: RowLayout
    store: CudaCopyHandler
    load: CudaCopyHandler

    def run(self, handler: CudaCopyHandler, job_id: int, spec: TransferSpec) -> None:
        """Run one transfer to its end."""
        started = handler.transfer_async(job_id, spec)
        handler.wait([job_id])
        require(started and all(result.success for result in handler.get_finished()), "a copy failed")


@contextmanager
def copies_of(
    machine: Machine,
    cache: CanonicalKVCaches,
    num_rows: int,
    way: Way,
    rows: RowLayout | None = None,
    shared: SharedRegion | None = None,
) -> Iterator[Copies]:
    """Build handlers for plain rows of one rank, or for ``rows``, and shut them down in the end.

    The rows are those of ``shared``, or new ones.
    """
    layout = rows or RowLayout.of(cache)
    region = shared or SharedRegion.create(num_rows, layout.row_bytes)
    pinned = PinnedRows(region.array, machine.api)
    with machine.watched():
        store, load = (
            CudaCopyHandler(cache, pinned, layout, direction, machine.kernel, batch=way.batch, maps_rows=way.maps_rows)
            for direction in (Direction.STORE, Direction.LOAD)
        )
        try:
            require(pinned.is_pinned, "the rows could not be pinned; the log has the error's number")
            for half in store.halves + load.halves:
                half.fill_(_STALE)
            yield Copies(cache, region, pinned, layout, store, load)
        finally:
            load.shutdown()
            store.shutdown()
            if shared is None:
                region.close()


def layered(machine: Machine, blocks: int, page_bytes: int, layers: int = LAYERS) -> CanonicalKVCaches:
    """Return a KV cache of random bytes, each layer in an allocation of its own."""
    names = tuple(f"l{layer}" for layer in range(layers))
    tensors = {
        name: torch.randint(0, 256, (blocks, page_bytes), dtype=torch.uint8, device=machine.device) for name in names
    }
    return canonicalize(tensors, [KVCacheGroup(names, 16)], blocks)


def spec(blocks: Any, rows: Any) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    """Return the two sides of a transfer of one KV-cache group."""
    return GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(rows)


def ways(machine: Machine) -> dict[str, Way]:
    """Return the ways to copy on this machine, by name."""
    found = {"one by one": Way(None, maps_rows=False)}
    if machine.batch is not None:
        found["batched"] = Way(machine.batch, maps_rows=False)
    if machine.maps_rows:
        found["by kernel"] = Way(None, maps_rows=True)
    return found


def best(machine: Machine) -> Way:
    """Return the way of an engine on this machine."""
    return Way(machine.batch, machine.maps_rows)


# --------------------------------------------------------------------------------------------------------------- checks


def pinning(machine: Machine) -> str:
    """Pin some GiB and release them."""
    gib = 4 * machine.scale
    row = 2 << 20
    region = SharedRegion.create(max(1, int(gib * (1 << 30)) // row), row)
    pinned = PinnedRows(region.array, machine.api)
    free, start = machine.free(), time.perf_counter()
    pinned.acquire(machine.device)
    seconds, taken = time.perf_counter() - start, free - machine.free()
    is_pinned = pinned.is_pinned
    pinned.release(machine.device)
    region.close()
    require(is_pinned, "the rows could not be pinned; the log has the error's number")
    return f"{seconds / gib:.2f} s and {taken / gib / (1 << 20):.1f} MiB of device memory per GiB"


def parts_of_rows(machine: Machine) -> str:
    """Pin one of eight ranks' parts of each row, beside the whole rows."""
    layout = RowLayout(((2 << 20,),), rank=3, world_size=8)
    region = SharedRegion.create(machine.sized(256, 4), layout.row_bytes)
    gib = region.nbytes / (1 << 30)
    measured = []
    for part in (layout.part, None):
        pinned = PinnedRows(region.array, machine.api, part=part)
        free, start = machine.free(), time.perf_counter()
        pinned.acquire(machine.device)
        seconds, taken = time.perf_counter() - start, free - machine.free()
        is_pinned = pinned.is_pinned
        pinned.release(machine.device)
        require(is_pinned, f"{'parts of' if part else 'whole'} rows could not be pinned")
        measured.append(f"{seconds / gib:.3f} s and {taken / gib / (1 << 20):.1f} MiB per GiB of pool")
    region.close()
    return f"its parts alone: {measured[0]}; all rows: {measured[1]}"


def pending_errors(machine: Machine) -> str:
    """Provoke errors of registration, and launch a kernel behind each."""
    region = SharedRegion.create(4, 1 << 20)
    address = region.array.ctypes.data
    calls: dict[str, Callable[[HostRegistration], int]] = {
        "registering twice": lambda runtime: runtime.register(address, 1 << 20),
        "unregistering unknown memory": lambda runtime: runtime.unregister(address + (2 << 20)),
    }
    runtime = HostRegistration(machine.api, machine.device)
    codes = []
    with machine.watched():
        require(runtime.register(address, 1 << 20) == 0, "a first registration failed")
        for name, call in calls.items():
            code = call(runtime)
            require(code != 0, f"{name} is no error here")
            codes.append(f"{name}: {code}")
            torch.zeros(16, device=machine.device)  # raises an error that was left behind
            machine.synchronize()
        require(runtime.unregister(address) == 0, "unregistering failed")
    region.close()
    return "; ".join(codes)


def layouts(machine: Machine) -> str:
    """Store and load every layout of engines, and compare every byte."""
    compared = 0
    for way in ways(machine).values():
        for name, make in kv.LAYOUTS.items():
            for factor in (1, 2):
                tensors = {layer: tensor.to(machine.device) for layer, tensor in _moved(make(), machine).items()}
                cache = canonicalize(tensors, kv.one_group(), kv.NUM_BLOCKS)
                compared += _round_trip(machine, cache, way, RowLayout.of(cache, factor), name)
    for way in ways(machine).values():
        cache = layered(machine, 8, 32 << 10, 3)
        compared += _round_trip(machine, cache, way, RowLayout.of(cache), "large pages")
    return f"{compared} blocks, {len(kv.LAYOUTS) + 1} layouts, {' and '.join(ways(machine))}"


def _moved(tensors: Mapping[str, torch.Tensor], machine: Machine) -> dict[str, torch.Tensor]:
    """Return copies of the tensors on the device, with their strides; layers keep sharing storage."""
    storages: dict[int, torch.UntypedStorage] = {}
    moved = {}
    for name, tensor in tensors.items():
        key = tensor.untyped_storage().data_ptr()
        if key not in storages:
            storages[key] = tensor.untyped_storage().to(device=machine.device)
        empty = torch.empty(0, dtype=tensor.dtype, device=machine.device)
        moved[name] = empty.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
    return moved


def _round_trip(machine: Machine, cache: CanonicalKVCaches, way: Way, rows: RowLayout, name: str) -> int:
    num_blocks = int(cache.tensors[0].tensor.shape[0])
    expected = [tensor.tensor.clone() for tensor in cache.tensors]
    with copies_of(machine, cache, num_blocks, way, rows) as copies:
        blocks = np.random.default_rng(0).permutation(num_blocks)
        gpu, cpu = spec(blocks, np.arange(num_blocks // rows.block_size_factor)[::-1])
        copies.run(copies.store, 1, (gpu, cpu))
        for refs in cache.group_data_refs:
            for ref in refs:
                cache.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes].zero_()
        copies.run(copies.load, 2, (cpu, gpu))
        machine.synchronize()
    same = all(torch.equal(a.tensor, b) for a, b in zip(cache.tensors, expected, strict=True))
    require(same, f"{name}: bytes differ after a round trip")
    return num_blocks


def canonical_rows(machine: Machine) -> str:
    """Compare every byte of one of 1, 2 and 4 ranks, and measure both directions beside plain rows."""
    lines, names = [], tuple(f"l{layer}" for layer in range(machine.sized(LAYERS, 2)))
    blocks = machine.sized(JOB_BLOCKS, 4)
    for ranks, outside in ((1, True), (2, True), (4, True), (2, False)):
        heads = 8 // ranks
        shape = (4 * blocks, heads, 16, 256) if outside else (4 * blocks, 16, heads, 256)
        pages = {name: torch.randint(1 << 15, shape, dtype=torch.int16, device=machine.device) for name in names}
        layers = pages if outside else {name: page.transpose(1, 2) for name, page in pages.items()}
        rates = {}
        for name, shard in (("plain", None), ("canonical", HeadShard(heads, outside, ranks - 1, ranks))):
            cache = canonicalize(layers, [KVCacheGroup(names, 16)], 4 * blocks, shard)
            rows = RowLayout.of(cache, 1, ranks - 1, ranks)
            _round_trip(machine, cache, best(machine), rows, f"{name} rows of {ranks} rank(s)")
            with copies_of(machine, cache, 3 * blocks, best(machine), rows) as copies:
                rates[name] = [_rate(machine, copies, handler)[0] / ranks for handler in (copies.store, copies.load)]
        shares = [canonical / plain for canonical, plain in zip(rates["canonical"], rates["plain"], strict=True)]
        order = "heads" if outside else "tokens"
        lines.append(
            f"{ranks} rank(s), {order} outside: stores {shares[0]:.2f} and loads {shares[1]:.2f} of plain rows"
        )
    return "\n          ".join(lines)


def start(machine: Machine) -> str:
    """Prepare a large CPU tier while the device works and captures graphs, and use it then."""
    gib, row = 64 if machine.is_gpu else 0.0625, 1 << 20
    cache = layered(machine, 64, row // 4, 4)
    layout = RowLayout.of(cache)
    began = time.perf_counter()
    region = SharedRegion.create(int(gib * (1 << 30)) // row, row, in_background=True)
    pinned = PinnedRows(region.array, machine.api, preparation=region.preparation if region.in_background else None)
    store, load = (
        CudaCopyHandler(
            cache, pinned, layout, direction, machine.kernel, batch=machine.batch, maps_rows=machine.maps_rows
        )
        for direction in (Direction.STORE, Direction.LOAD)
    )
    pinned.expect_agreement()
    returned, steps, captures = time.perf_counter() - began, [0.0], 0
    number = torch.zeros(1024, device=machine.device)
    while not region.is_prepared:
        step = time.perf_counter()
        for _ in range(20):
            number += 1
        machine.synchronize()
        steps.append(time.perf_counter() - step)
        if machine.is_gpu and len(steps) % 50 == 0:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                number += 1
            captures += 1
    seconds = time.perf_counter() - began
    require(pinned.is_pinned, "the rows could not be pinned; the log has the error's number")
    copies = Copies(cache, region, pinned, layout, store, load)
    expected = [tensor.tensor.clone() for tensor in cache.tensors]
    gpu, cpu = spec(range(64), np.linspace(0, len(region.array) - 1, 64).astype(int))
    with machine.watched():
        copies.run(store, 1, (gpu, cpu))
        for tensor in cache.tensors:
            tensor.tensor.zero_()
        copies.run(load, 2, (cpu, gpu))
    machine.synchronize()
    same = all(torch.equal(a.tensor, b) for a, b in zip(cache.tensors, expected, strict=True))
    load.shutdown()
    store.shutdown()
    region.close()
    require(same, "bytes differ after a round trip")
    require(returned < MOST_START_SECONDS or not machine.is_gpu, f"the start took {returned:.2f} s")
    return (
        f"{gib} GiB: the start took {returned:.2f} s, the tier joined after {seconds:.1f} s; meanwhile {captures} "
        f"captured graphs and steps of {np.median(steps) * 1e3:.2f} ms, 99% below {np.quantile(steps, 0.99) * 1e3:.1f} "
        f"ms, the longest {max(steps) * 1e3:.0f} ms"
    )


def pipeline_stages(machine: Machine) -> str:
    """Store by the workers of several pipeline stages in turn, look at the rows, and load other blocks."""
    compared, blocks, all_heads = 0, machine.sized(JOB_BLOCKS, 4), 4
    for split, ranks, canonical, factor in (
        ((0, 1), 1, False, 1),
        ((0, 1, 1, 2), 2, False, 2),
        ((0, 0, 0, 1), 2, True, 1),
        ((0, 1, 1, 2), 4, True, 2),
    ):
        dice = torch.Generator().manual_seed(len(split) + ranks)
        shape = (len(split), 2 * blocks, all_heads, 16, 128)
        whole = torch.randint(0, 1 << 15, shape, generator=dice, dtype=torch.int16)
        count, stages = all_heads // ranks, 1 + max(split)
        parts = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
        page = count * 16 * 128 * 2
        stage_bytes = tuple((split.count(stage) * page,) for stage in range(stages))
        region = SharedRegion.create(blocks, len(split) * ranks * page * factor)
        workers = []
        for number, (stage, rank) in enumerate(parts):
            own = [layer for layer, its_stage in enumerate(split) if its_stage == stage]
            heads = slice(rank * count, (rank + 1) * count)
            tensors = {f"l{layer}": whole[layer, :, heads].contiguous().to(machine.device) for layer in own}
            shard = HeadShard(count, True, rank, ranks) if canonical else None
            cache = canonicalize(tensors, [KVCacheGroup(tuple(tensors), 16)], 2 * blocks, shard)
            workers.append((tensors, heads, cache, RowLayout.of(cache, factor, number, len(parts), 1, stage_bytes)))
        gpu, cpu = spec(range(blocks), range(blocks // factor))
        for job_id, (_, _, cache, rows) in enumerate(workers):
            with copies_of(machine, cache, blocks, best(machine), rows, region) as copies:
                copies.run(copies.store, job_id, (gpu, cpu))
        name = f"{'canonical' if canonical else 'plain'} rows of {stages} stages of {ranks} rank(s)"
        content = whole[:, :blocks].reshape(len(split), blocks // factor, factor, *shape[2:])
        if canonical:
            expected = content.permute(1, 2, 0, 3, 4, 5)
        else:
            ordered = [
                content[[layer for layer, its in enumerate(split) if its == stage], :, :, rank * count :][
                    :, :, :, :count
                ].permute(1, 2, 0, 3, 4, 5)
                for stage, rank in parts
            ]
            expected = torch.cat([part.reshape(blocks // factor, -1) for part in ordered], dim=1)
        stored = region.array[: blocks // factor, : len(split) * ranks * page * factor]
        found = torch.from_numpy(stored.copy()).view(torch.int16)
        require(torch.equal(found, expected.reshape(blocks // factor, -1)), f"{name}: the rows have other bytes")
        gpu, cpu = spec(range(blocks, 2 * blocks), range(blocks // factor))
        for job_id, (tensors, heads, cache, rows) in enumerate(workers):
            with copies_of(machine, cache, blocks, best(machine), rows, region) as copies:
                copies.run(copies.load, job_id, (cpu, gpu))
            machine.synchronize()
            for layer, tensor in tensors.items():
                right = whole[int(layer[1:]), :blocks, heads]
                require(torch.equal(tensor[blocks:].cpu(), right), f"{name}: a load brought other bytes")
                require(torch.equal(tensor[:blocks].cpu(), right), f"{name}: a load changed other blocks")
            compared += blocks
        region.close()
    return f"{compared} blocks of 2 and 3 stages of 1 to 4 ranks, plain and canonical"


def order(machine: Machine) -> str:
    """Queue long kernels before copies and behind them, and look at whose bytes arrive."""
    for name, way in ways(machine).items():
        for page_bytes in (8 << 10, 64 << 10):
            blocks = machine.sized(64, 4)
            cache = layered(machine, blocks, page_bytes, 4)
            with copies_of(machine, cache, blocks, way) as copies:
                gpu, cpu = spec(range(blocks), range(blocks))
                _busy(machine)
                for tensor in cache.tensors:
                    tensor.tensor.fill_(7)
                require(copies.store.transfer_async(1, (gpu, cpu)), "a store could not be started")
                copies.store.order_before_compute([1])
                for tensor in cache.tensors:
                    tensor.tensor.fill_(9)
                copies.store.wait([1])
                stored = copies.region.array[:, : copies.layout.row_bytes]
                require(bool((stored == 7).all()), f"{name}: a store did not see exactly the work queued before it")
                _busy(machine)
                for tensor in cache.tensors:
                    tensor.tensor.zero_()
                require(copies.load.transfer_async(2, (cpu, gpu)), "a load could not be started")
                copies.load.order_before_compute([2])
                seen = [tensor.tensor.clone() for tensor in cache.tensors]
                copies.load.wait([2])
                machine.synchronize()
                require(all(bool((one == 7).all()) for one in seen), f"{name}: work behind a load did not see it")
    return f"pages of 8 and 64 KiB, {' and '.join(ways(machine))}"


def _busy(machine: Machine) -> None:
    """Keep the compute stream busy for about a tenth of a second."""
    if machine.is_gpu:
        cuda: Any = torch.cuda
        cuda._sleep(200_000_000)


def memory(machine: Machine) -> str:
    """Submit many transfers of changing sizes, and compare the reserved device memory."""
    blocks = machine.sized(256, 8)
    cache = layered(machine, blocks, 4096, machine.sized(LAYERS, 2))
    with copies_of(machine, cache, blocks, best(machine)) as copies:
        random = np.random.default_rng(1)

        def submit(job_id: int, count: int) -> None:
            gpu, cpu = spec(random.permutation(blocks)[:count], random.permutation(blocks)[:count])
            copies.run(copies.store, job_id, (gpu, cpu))
            copies.run(copies.load, job_id, (cpu, gpu))

        for job_id in range(4):
            submit(job_id, blocks)
        before = machine.reserved()
        for job_id in range(machine.sized(400, 4)):
            submit(10 + job_id, 1 + int(random.integers(blocks)))
        growth = machine.reserved() - before
    require(growth <= 4 << 20, f"torch reserved {growth >> 20} MiB more in the course of copies")
    return f"{growth} bytes more after the first transfers"


def far_offsets(machine: Machine) -> str:
    """Copy blocks whose offset in one allocation needs more than 31 bits."""
    page, layers = 4096, 3
    blocks = machine.sized(((5 << 30) // 2) // (page * layers), 8)
    if machine.is_gpu and machine.free() < 4 << 30:
        raise NotHereError("it needs 4 GiB of free device memory")
    pool = torch.zeros(layers, blocks, page, dtype=torch.uint8, device=machine.device)
    names = tuple(f"l{layer}" for layer in range(layers))
    cache = canonicalize(dict(zip(names, pool, strict=True)), [KVCacheGroup(names, 16)], blocks)
    ids = [1, blocks // 2, blocks - 2, blocks - 1]
    for way in ways(machine).values():
        for number, block in enumerate(ids):
            pool[:, block] = 100 + number
        with copies_of(machine, cache, 8, way) as copies:
            gpu, cpu = spec(ids, range(len(ids)))
            copies.run(copies.store, 1, (gpu, cpu))
            pool.zero_()
            copies.run(copies.load, 2, (cpu, gpu))
            machine.synchronize()
        right = all(bool((pool[:, block] == 100 + number).all()) for number, block in enumerate(ids))
        require(right, "bytes at large offsets went elsewhere")
        require(int(pool[:, blocks // 2 + 1].max()) == 0, "bytes were written beside their block")
    return f"offsets up to {pool.nbytes / (1 << 30):.1f} GiB in one allocation"


def rates(machine: Machine) -> str:
    """Measure both directions by page size, beside a bare pinned copy and beside matrix products."""
    lines, problems = [], []
    for page_bytes in (8 << 10, 16 << 10, 28 << 10, 64 << 10, 256 << 10):
        blocks = machine.sized(JOB_BLOCKS, 4)
        cache = layered(machine, 4 * blocks, page_bytes, machine.sized(LAYERS, 2))
        with copies_of(machine, cache, 3 * blocks, best(machine)) as copies:
            bare = _bare_rate(machine, blocks * copies.layout.row_bytes)
            for handler, name in ((copies.store, "store"), (copies.load, "load")):
                alone, submit = _rate(machine, copies, handler)
                with _products(machine) as slowdown:
                    beside, _ = _rate(machine, copies, handler)
                part = alone / bare[name]
                lines.append(
                    f"{name}s of {page_bytes >> 10} KiB pages: {alone:.1f} GB/s, {part:.2f} of a bare copy, "
                    f"{beside:.1f} GB/s beside matrix products{slowdown()}, one block submitted in "
                    f"{submit * 1e6:.0f} us"
                )
                if part < (goal := GOALS[name].get(page_bytes, 0)):
                    problems.append(f"{lines[-1]}; the goal is {goal} of a bare copy")
                if submit > MOST_SUBMIT_SECONDS:
                    problems.append(f"{lines[-1]}; the goal is {MOST_SUBMIT_SECONDS * 1e6:.0f} us")
    if machine.is_gpu and problems:
        raise AssertionError("\n          ".join(problems))
    return "\n          ".join(lines)


def _bare_rate(machine: Machine, nbytes: int) -> dict[str, float]:
    """Return GB/s of one contiguous pinned copy each way."""
    device = torch.ones(nbytes, dtype=torch.uint8, device=machine.device)
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=machine.is_gpu)
    found = {}
    for name, source, destination in (("store", device, host), ("load", host, device)):
        destination.copy_(source, non_blocking=True)
        machine.synchronize()
        repeats = machine.sized(16)
        start = time.perf_counter()
        for _ in range(repeats):
            destination.copy_(source, non_blocking=True)
        machine.synchronize()
        found[name] = repeats * nbytes / (time.perf_counter() - start) / 1e9
    return found


def _rate(machine: Machine, copies: Copies, handler: CudaCopyHandler) -> tuple[float, float]:
    """Return GB/s of scattered blocks, and the seconds that the submission of one block takes."""
    random = np.random.default_rng(2)
    blocks = machine.sized(JOB_BLOCKS, 4)
    gpu, cpu = spec(1 + random.permutation(4 * blocks - 1)[:blocks], random.permutation(3 * blocks)[:blocks])
    store = handler is copies.store
    transfer: TransferSpec = (gpu, cpu) if store else (cpu, gpu)
    copies.run(handler, 0, transfer)
    repeats = machine.sized(16)
    start = time.perf_counter()
    for job_id in range(repeats):
        handler.transfer_async(job_id, transfer)
    handler.wait(range(repeats))
    rate = repeats * blocks * copies.layout.row_bytes / (time.perf_counter() - start) / 1e9
    handler.get_finished()
    one_gpu, one_cpu = spec([1], [0])
    one: TransferSpec = (one_gpu, one_cpu) if store else (one_cpu, one_gpu)
    times = []
    for job_id in range(machine.sized(200, 3)):
        start = time.perf_counter()
        handler.transfer_async(1000 + job_id, one)
        times.append(time.perf_counter() - start)
        handler.wait([1000 + job_id])
    handler.get_finished()
    return rate, float(np.median(times))


@contextmanager
def _products(machine: Machine) -> Iterator[Callable[[], str]]:
    """Keep the compute stream busy with matrix products; the value tells their slowdown afterwards."""
    if not machine.is_gpu:
        yield lambda: ""
        return
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=machine.device)
    machine.synchronize()
    begin, end, alone = (machine.api.Event(enable_timing=True) for _ in range(3))
    begin.record()
    for _ in range(8):
        a @ a
    alone.record()
    for _ in range(64):
        a @ a
    end.record()
    yield lambda: f" (which took {alone.elapsed_time(end) / 8 / begin.elapsed_time(alone):.2f} times as long)"
    machine.synchronize()


CHECKS = (
    Check("pinning", "rows are pinned in chunks", pinning),
    Check("parts", "a rank of eight pins its parts of the rows alone", parts_of_rows),
    Check("errors", "no failed registration leaves an error to the engine's next kernel", pending_errors),
    Check("layouts", "every layout comes back bit for bit, by every way to copy", layouts),
    Check("start", "an engine works while its CPU tier is prepared", start),
    Check("order", "a store sees what was queued before it, and what comes after a load sees the load", order),
    Check("memory", "copies reserve no more device memory after the start", memory),
    Check("offsets", "blocks beyond 2 GiB of an allocation go to their place", far_offsets),
    Check("canonical", "canonical rows come back bit for bit; their rates beside those of plain rows", canonical_rows),
    Check("stages", "each pipeline stage moves the bytes of its own layers, and no others", pipeline_stages),
    Check("rates", "copies reach their goals beside a bare pinned copy", rates),
)
"""The checks of copies, the cheapest first."""
