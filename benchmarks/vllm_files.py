"""The local tier beside the file tier of vLLM's own offloading (``fs``), in alternating rounds.

Both tiers run in one process, without a model. They get the same jobs: 16 blocks each, between rows of a primary buffer
and a disk. vLLM's ``FileSystemTierManager`` is driven as its tiering manager does, by ``submit_store``, ``submit_load``
and ``get_finished_jobs``, with its 16 + 16 threads and its C extension where the build has one. It writes a file per
block, to a temporary name that is renamed, and checks nothing when it reads. The local tier has its defaults: O_DIRECT,
a checksum of every block, and ``max_inflight: auto``, which finds its depths before the measurement. Its directory is
full, so that each store evicts; the files of vLLM's tier, which evicts nothing, are removed between the rounds.

"Durable" stores count until the blocks survive a loss of power. The local tier has ``durability: fsync``. vLLM has
no such option, so the benchmark calls ``syncfs`` after its last job. Stores "as they are" are the defaults of both.
Loads read the last stored blocks from the device: both tiers use O_DIRECT, and the page cache of every file is dropped
before (``posix_fadvise``). The local tier verifies its loads. The rows of both tiers are compared with what was stored,
outside the measured time.

"The bare device" shows what the disk itself allows: 16 threads that write (and then sync) or read one file, which was
written before, with O_DIRECT and in calls of 2 MiB, without a header or checksum.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.bench_local import TierRun, Workload, learn
from benchmarks.harness import Bench, Sample, Stats, ratio, timed

BLOCKS_PER_JOB = 16
DEVICE_THREADS = 16
DEVICE_CALL = 2 << 20
"""Bytes of one call in the runs of the bare device."""
ROUNDS = 7
SIZES = {"512 KiB": (512 << 10, 2.0), "2 MiB": (2 << 20, 1.2)}
"""Bytes of a block, and the least ratio of durable stores, by the name of the size."""
LOADS_AT_LEAST = 1.0
CPU_AT_MOST = 0.17

_libc = ctypes.CDLL(None, use_errno=True)


class FilesRun:
    """vLLM's file tier over the rows of a workload."""

    def __init__(self, work: Workload) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self.work = work
        self.root = work.directory / f"files-{work.block_bytes}"
        self.keys: list[bytes] = []
        self._jobs = itertools.count()
        self._tier = FileSystemTierManager(vllm_spec(), work.rows.data, "fs", str(self.root))

    def store(self) -> None:
        """Write new blocks, and return when all files have their names."""
        work = self.work
        self.keys = [secrets.token_bytes(32) + b"\0\0\0\0" for _ in range(work.count)]
        self._run(np.arange(work.count), self._tier.submit_store, promotion=False)

    def store_durably(self) -> None:
        """Write new blocks, and sync the file system."""
        self.store()
        sync(self.root)

    def load(self) -> None:
        """Read the blocks of the last store into the second half of the rows."""
        self._run(np.arange(self.work.count, 2 * self.work.count), self._tier.submit_load, promotion=True)

    def clear(self) -> None:
        """Remove the files of the last store; vLLM's tier evicts nothing by itself."""
        for key in self.keys:
            Path(self._tier.file_mapper.get_file_name(key)).unlink()
        self.keys = []

    def close(self) -> None:
        self._tier.shutdown()
        shutil.rmtree(self.root)

    def _run(self, rows: np.ndarray[Any, Any], submit: Any, *, promotion: bool) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        request, left = ReqContext(req_id="bench"), 0
        for start in range(0, len(rows), BLOCKS_PER_JOB):
            keys, part = self.keys[start : start + BLOCKS_PER_JOB], rows[start : start + BLOCKS_PER_JOB]
            submit(TransferJob(next(self._jobs), keys, part, promotion, request))
            left += 1
        while left:
            for result in self._tier.get_finished_jobs():
                if not result.success:
                    raise RuntimeError(f"vLLM's job {result.job_id} failed")
                left -= 1
            time.sleep(0.0005)


class DeviceRun:
    """One file on the same disk, written and read as fast as the disk allows."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self._path = work.directory / f"device-{work.block_bytes}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._pool = ThreadPoolExecutor(DEVICE_THREADS)
        os.posix_fallocate(self._fd, 0, work.nbytes)
        self.store()

    def store(self) -> None:
        """Write the blocks, and sync the file."""
        self._move(os.pwritev, 0, self.work.nbytes)
        os.fdatasync(self._fd)

    def load(self) -> None:
        """Read the blocks into the second half of the rows."""
        self._move(os.preadv, self.work.nbytes, self.work.nbytes)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)
        self._path.unlink()

    def _move(self, call: Callable[[int, list[memoryview], int], int], first: int, nbytes: int) -> None:
        """Move ``nbytes`` of the rows, from byte ``first`` on."""
        memory = self.work.rows.reshape(-1).data

        def move(offset: int) -> None:
            length = min(DEVICE_CALL, nbytes - offset)
            if call(self._fd, [memory[first + offset : first + offset + length]], offset) != length:
                raise RuntimeError("a call on the bare device was short")

        for _ in self._pool.map(move, range(0, nbytes, DEVICE_CALL)):
            pass


def vllm_spec() -> Any:
    """Return the parts of an offloading spec that vLLM's file tier reads."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig("bench", "int8"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace())


def sync(directory: Path) -> None:
    """Wait until everything that was written to the file system of ``directory`` is on the device."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        if _libc.syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs failed")
    finally:
        os.close(fd)


def drop_cache(directory: Path) -> None:
    """Drop the page cache of all files below ``directory``."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def run(bench: Bench) -> None:
    """Compare both tiers, for each size of blocks."""
    has_c = importlib.util.find_spec("vllm.fs_io_C") is not None
    bench.note(f"vLLM's C extension for its file tier: {'in use' if has_c else 'not in this build'}.")
    for size, (block_bytes, durable_at_least) in SIZES.items():
        _size(bench, size, block_bytes, durable_at_least)


def _size(bench: Bench, size: str, block_bytes: int, durable_at_least: float) -> None:
    work = Workload.make(bench.directory, block_bytes, (32 if bench.quick else 512) << 20)
    files, plain, durable = FilesRun(work), TierRun(work, "auto"), TierRun(work, "auto", "fsync")
    device = DeviceRun(work)
    try:
        learn(bench, plain, f"{size}, as it is")
        learn(bench, durable, f"{size}, durable")
        stores = bench.compare(
            f"durable stores, {size} blocks",
            {
                "local tier, fsync": lambda: timed(durable.store, nbytes=work.nbytes),
                "vLLM's files, syncfs": lambda: _store(files, durable=True),
                "the bare device, fdatasync": lambda: timed(device.store, nbytes=work.nbytes),
            },
            ROUNDS,
            unit="GB/s",
        )
        bench.compare(
            f"stores as they are, {size} blocks",
            {
                "local tier": lambda: timed(plain.store, nbytes=work.nbytes),
                "vLLM's files": lambda: _store(files, durable=False),
            },
            ROUNDS,
            unit="GB/s",
        )
        plain.store()
        files.clear()
        files.store()
        loads = bench.compare(
            f"loads, {size} blocks",
            {
                "local tier, verified": lambda: _load(plain),
                "vLLM's files, not verified": lambda: _load(files),
                "the bare device": lambda: _load(device),
            },
            ROUNDS,
            unit="GB/s",
        )
    finally:
        device.close()
        files.close()
        plain.close()
        durable.close()
    _targets(bench, size, stores, loads, durable_at_least)


def _store(files: FilesRun, *, durable: bool) -> Sample:
    if files.keys:
        files.clear()
    sync(files.work.directory)
    return timed(files.store_durably if durable else files.store, nbytes=files.work.nbytes)


def _load(tier: TierRun | FilesRun | DeviceRun) -> Sample:
    """Read all blocks from the device into wiped rows, and compare the rows with what was stored."""
    work = tier.work
    work.rows[work.count :] = 1
    drop_cache(work.directory)
    sample = timed(tier.load, nbytes=work.nbytes)
    if not np.array_equal(work.rows[: work.count], work.rows[work.count :]):
        raise RuntimeError("a load returned other bytes than were stored")
    return sample


def _targets(
    bench: Bench, size: str, stores: dict[str, Stats], loads: dict[str, Stats], durable_at_least: float
) -> None:
    ours, theirs, _ = stores.values()
    bench.target(f"durable stores, {size}, against vLLM's files", ratio(ours, theirs), durable_at_least, "min", "x")
    ours, theirs, _ = loads.values()
    bench.target(f"loads, {size}, against vLLM's files", ratio(ours, theirs), LOADS_AT_LEAST, "min", "x")
    bench.target(f"loads, {size}, CPU", ours.cpu, CPU_AT_MOST, "max", "s/GB")
