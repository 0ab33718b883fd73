"""The object store tier against real servers on loopback: GB/s and this process's CPU seconds per GB.

Blocks of 2 MiB go uncompressed, 8 at a time. "Tier" is everything between a primary row and the socket: frame,
xxh3-128, layers, the probe for an existing object, and obstore. Beside it stand obstore alone (one buffer up; bytes
down and copied into the row) and boto3 with its defaults. The servers are processes of their own, and their CPU time
does not count. But they share the machine, so GB/s tell more about the servers than about the tier. rclone serves files
in memory. Ceph RGW keeps objects in memory, and is skipped where it is not installed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import obstore
from botocore.config import Config
from obstore.store import S3Store as ObjectClient

from benchmarks.harness import Bench, Sample, Stats, timed
from examples import s3_server
from scripts import ceph_rgw
from tiering.api.keys import make_offload_key
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.api.request import ReqContext
from tiering.index.shared import object_name
from tiering.medium.block_store import Done
from tiering.medium.host import IoHost
from tiering.secondary.contract import TierContext, TransferJob
from tiers.object.bucket_options import S3Options
from tiers.object.store import ObjectStore

BLOCK_BYTES = 2 << 20
CONCURRENCY = 8
BUCKET = "kv-cache"
PUT_LIMIT, GET_LIMIT = 0.6, 1.0


@dataclass(slots=True)
class Workload:
    """Rows to send, rows to fill, and the clients. Each round of puts writes new names and removes them."""

    server: s3_server.S3Server
    rows: np.ndarray[Any, np.dtype[np.uint8]]
    arrived: np.ndarray[Any, np.dtype[np.uint8]]
    namespace: Namespace
    client: ObjectClient
    boto: Any
    pool: ThreadPoolExecutor
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return self.count * BLOCK_BYTES

    def host(self, *, check_existing: bool = True) -> tuple[ObjectStore, IoHost]:
        """Return a store and an I/O side over the rows, as the tier has them.

        The first half of the rows is sent; the second half is filled.
        """
        words = {
            "bucket": BUCKET,
            "endpoint_url": self.server.endpoint,
            "max_inflight": CONCURRENCY,
            "check_existing": check_existing,
        }
        options = S3Options.model_validate(words)
        store = ObjectStore(options)
        store.open()
        memory = self.rows.base
        assert memory is not None
        context = TierContext("s3", memoryview(memory.data), (BLOCK_BYTES,), self.namespace)
        return store, IoHost(store, options, context)

    def job(self, load: bool, prefix: str) -> TransferJob:
        keys = [make_offload_key(at.to_bytes(32, "big"), 0) for at in range(self.count)]
        places = [object_name(prefix, key) for key in keys]
        rows = np.arange(self.count) + (self.count if load else 0)
        job = TransferJob(next(self.numbers), keys, rows, load, ReqContext("bench"))
        job.move(keys, rows.tolist(), places, [BLOCK_BYTES] * self.count)
        job.fingerprint = self.namespace.fingerprint
        return job

    def put(self, send: Callable[[str], object]) -> Sample:
        prefix = f"put/{next(self.numbers)}/"
        sample = timed(lambda: send(prefix), nbytes=self.nbytes)
        for page in obstore.list(self.client, chunk_size=1000):
            names = [item["path"] for item in page if prefix in item["path"]]
            obstore.delete(self.client, names)
        return sample

    def get(self, receive: Callable[[], object]) -> Sample:
        self.arrived.fill(0)
        sample = timed(receive, nbytes=self.nbytes)
        if not np.array_equal(self.arrived[0], self.rows[0]) or not np.array_equal(self.arrived[-1], self.rows[-1]):
            raise RuntimeError("what came back is not what was sent")
        return sample


def run(bench: Bench) -> None:
    """Measure puts and gets on both servers."""
    with serving_rclone() as server:
        measure(bench, "rclone", server)
    if ceph_rgw.installed():
        with ceph_rgw.serving() as ceph:
            # The processes are the context's to end; only where the server is, and its keys, are needed here.
            measure(
                bench,
                "Ceph RGW",
                s3_server.S3Server(ceph.endpoint, ceph.access_key, ceph.secret_key, ceph.processes[0]),
            )
    else:
        bench.note(f"Ceph RGW was left out: not installed (apt-get install {' '.join(ceph_rgw.PACKAGES)})")


def measure(bench: Bench, name: str, server: s3_server.S3Server) -> None:
    """Measure all clients against one server."""
    with ExitStack() as stack:
        work = stack.enter_context(workload(server, 8 if bench.quick else 48))
        store, host = open_host(stack, work)
        _, unasked = open_host(stack, work, check_existing=False)
        puts = bench.compare(
            f"{name}: put",
            {
                "tier": lambda: work.put(lambda prefix: finish(host, work.job(False, prefix))),
                "tier, check_existing: false": lambda: work.put(
                    lambda prefix: finish(unasked, work.job(False, prefix))
                ),
                "obstore": lambda: work.put(lambda prefix: spread(work, put_obstore(work, prefix))),
                "boto3": lambda: work.put(lambda prefix: spread(work, put_boto3(work, prefix))),
            },
            unit="GB/s",
        )
        finish(host, work.job(False, "get/"))
        spread(work, put_obstore(work, "bare/"))
        gets = bench.compare(
            f"{name}: get",
            {
                "tier": lambda: work.get(lambda: finish(host, work.job(True, "get/"))),
                "obstore": lambda: work.get(lambda: spread(work, get_obstore(work, "bare/"))),
                "boto3": lambda: work.get(lambda: spread(work, get_boto3(work, "bare/"))),
            },
            unit="GB/s",
        )
        places = [f"nothing/{at}" for at in range(16 if bench.quick else 256)]
        head = bench.compare(
            f"{name}: questions", {"8 at a time": lambda: timed(lambda: ask(store, places), per=len(places))}, unit="s"
        )
    bench.target(f"{name}: CPU of a put", puts["tier"].cpu, PUT_LIMIT, "max", "s/GB")
    bench.target(f"{name}: CPU of a get", gets["tier"].cpu, GET_LIMIT, "max", "s/GB")
    bench.table(
        f"{name}: CPU s/GB",
        ("client", "put", "get"),
        [
            (client, cpu(puts, client), cpu(gets, client))
            for client in ("tier", "tier, check_existing: false", "obstore", "boto3")
        ],
    )
    bench.note(f"{name}: a question whether an object is there costs {(head['8 at a time'].cpu or 0) * 1e6:.0f} CPU µs")


def cpu(stats: dict[str, Stats], client: str) -> float | str:
    """Return the CPU s/GB of ``client`` if it was measured."""
    return (stats[client].cpu or 0.0) if client in stats else "as above"


def finish(host: IoHost, job: TransferJob) -> None:
    """Run one job to its end."""
    host.submit(job)
    results: list[TransferJob] = []
    while not results:
        host.wait(1.0)
        results = list(host.poll())
    failed = [outcome for outcome in job.outcomes if outcome is not Done.DONE]
    if failed:
        raise RuntimeError(f"{len(failed)} blocks failed: {failed[:1]}")


def ask(store: ObjectStore, places: list[str]) -> None:
    for first in range(0, len(places), CONCURRENCY):
        store.probe(places[first : first + CONCURRENCY])


def spread(work: Workload, one: Callable[[int], object]) -> None:
    for _ in work.pool.map(one, range(work.count)):
        pass


def put_obstore(work: Workload, prefix: str) -> Callable[[int], object]:
    return lambda at: obstore.put(work.client, f"{prefix}{at:04}", work.rows[at], use_multipart=False)


def get_obstore(work: Workload, prefix: str) -> Callable[[int], object]:
    def one(at: int) -> None:
        body = obstore.get(work.client, f"{prefix}{at:04}").bytes()
        np.copyto(work.arrived[at], np.frombuffer(memoryview(body), np.uint8))

    return one


def put_boto3(work: Workload, prefix: str) -> Callable[[int], object]:
    return lambda at: work.boto.put_object(Bucket=BUCKET, Key=f"{prefix}{at:04}", Body=work.rows[at].tobytes())


def get_boto3(work: Workload, prefix: str) -> Callable[[int], object]:
    def one(at: int) -> None:
        body = work.boto.get_object(Bucket=BUCKET, Key=f"{prefix}{at:04}")["Body"].read()
        np.copyto(work.arrived[at], np.frombuffer(body, np.uint8))

    return one


@contextmanager
def workload(server: s3_server.S3Server, count: int) -> Iterator[Workload]:
    """Make rows and clients for ``server``, with its credentials in the environment meanwhile."""
    s3_server.create_bucket(server, BUCKET)
    memory = np.zeros((2 * count, BLOCK_BYTES), np.uint8)
    memory[:count] = np.random.default_rng(7).integers(0, 256, (count, BLOCK_BYTES), np.uint8)
    namespace = Namespace.build(
        ModelIdentity(name="bench", weights="0", dtype="bfloat16", layout="bench"), (BLOCK_BYTES,)
    )
    client = ObjectClient(
        BUCKET,
        config={
            "endpoint": server.endpoint,
            "aws_endpoint_url_s3": server.endpoint,
            "access_key_id": server.access_key,
            "secret_access_key": server.secret_key,
            "region": "us-east-1",
            "unsigned_payload": True,
            "virtual_hosted_style_request": False,
        },
        client_options={"allow_http": True},
    )
    boto = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
        config=Config(max_pool_connections=CONCURRENCY, s3={"addressing_style": "path"}),
    )
    before = {name: os.environ.get(name) for name in server.environment()}
    os.environ.update(server.environment())
    try:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            yield Workload(server, memory[:count], memory[count:], namespace, client, boto, pool)
    finally:
        boto.close()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def open_host(stack: ExitStack, work: Workload, *, check_existing: bool = True) -> tuple[ObjectStore, IoHost]:
    store, host = work.host(check_existing=check_existing)
    stack.callback(store.close)
    stack.callback(host.close, float("inf"))
    return store, host


@contextmanager
def serving_rclone() -> Iterator[s3_server.S3Server]:
    """Run rclone over a directory in memory, if there is one."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 2 << 30 else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-s3-") as directory:
        server = s3_server.start_rclone(Path(directory) / "objects")
        try:
            yield server
        finally:
            s3_server.stop(server.process)
