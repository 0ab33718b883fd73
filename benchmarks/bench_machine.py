"""One cache per machine: engines that share a service, beside engines with tiers of their own.

The service is a process of its own (``kv-tiering serve``). The first part counts what a bucket is asked for: engines in
one process look the same prompts up at the same time, in blocks of 256 KiB, behind a bucket that answers a GET after
25 ms. The second part plays conversations, whose turns go to any of four engines, with CPU tiers of 32 blocks and disks
large enough for all blocks; "one shared disk" is the share of blocks that some engine has had before. The third part is
the cost of the scheduler's thread: lookups of blocks that the disk holds, as engines read it in memory of the service,
and the end of a step that sends a message with a load of 16 blocks and a notice, and of the next one, which reads the
results. In turn with these, a message of the same size goes to a process that does nothing else: the least that a
message can cost. Then steps with up to 4,000 blocks, which send several messages; the same from two lookups to the
results, beside a tier in the process; and the steps of 5 ms until an engine has four blocks of another one.

The fourth part copies blocks from the rows of one engine to those of another (``peers``), in prompts of 64 MiB; beside
whole loads, as the second engine's manager sees them, are the rates of one thread that copies and verifies as the
service does, of one that only copies, and of one that copies and verifies in huge pages, which shared memory has where
``shmem_enabled`` allows them, per second of CPU time.

Two parts move blocks between a local disk and rows: loads of 512 KiB, beside an engine that is idle and one
that uses the interpreter all the time, in turn with bare reads past the page cache that only compute a digest, which
is what the disk gives without a tier; and loads and stores of 2 MiB beside the steps of ``interference``, whose engine
computes for 5 ms between steps without the interpreter. The tier is in the process of the engine, or in the service,
which is held to the rate that the tier in the process has reached. So is a process that only writes, reads and digests
as many bytes: what that costs the steps, any process costs them that does the work.

The last part kills an engine with ``keep_rows`` and starts it again, in a process of its own: the time from the start
of its manager, with all modules imported, to the first block that it finds in the rows that it had and whose bytes are
right.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from xxhash import xxh3_128_digest

from benchmarks.bench_control_plane import Subject
from benchmarks.bench_interference import Engine, compute_for
from benchmarks.harness import Bench, Cell, Sample, open_tier, ratio, spread, timed
from benchmarks.machine_floors import BareMoves, BareReads, bare_message, bare_peer, notes
from benchmarks.machine_restarts import restarts
from benchmarks.slow_s3 import BUCKET, slow_s3
from tests.machine.hosts import service_process
from tiering import ModelIdentity, OffloadKey, ReqContext, load_stack, make_offload_key, open_manager
from tiering.api.namespace import Namespace
from tiering.config.registry import tier_definition
from tiering.machine.link import ServiceSocket
from tiering.machine.options import PEERS_TIER
from tiering.machine.peer_rows import HeldBlock, Source, copy_block
from tiering.manager.waiting import wait_for_prefix, wait_until_idle
from tiering.primary.memory.region import SharedRegion
from tiering.secondary.contract import SecondaryTierManager, TierContext, TransferJob

MODEL = ModelIdentity(name="bench", weights="0", dtype="int8", layout="machine")
ENGINES, PROMPTS, PROMPT_BLOCKS, BUCKET_BLOCK = 8, 2, 16, 256 << 10
REPLICAS, CPU_ROWS, SMALL_BLOCK = 4, 32, 4 << 10
LOAD_BLOCK, STEP_BLOCK = 512 << 10, 2 << 20
JOB_BLOCKS, JOBS_AHEAD = 16, 4
GET_SECONDS, COMPUTE_SECONDS, BUSY_SECONDS = 0.025, 0.005, 0.002
WAIT = 60.0
ROUNDS = 12

Stack = Mapping[str, Any]


def key_of(*words: int) -> OffloadKey:
    """Return the key of a block that ``words`` identify."""
    return make_offload_key(b"".join(word.to_bytes(8, "big") for word in words).rjust(32, b"\0"), 0)


@contextmanager
def engines(count: int, stack: Callable[[int], Stack], block: int) -> Iterator[list[Any]]:
    """Open the managers of ``count`` engines of this process."""
    with ExitStack() as undo:
        made = []
        for number in range(count):
            made.append(open_manager(load_stack(dict(stack(number))), block, MODEL))
            undo.callback(made[-1].shutdown)
        yield made


def store(manager: Any, keys: list[OffloadKey]) -> None:
    """Store blocks, and wait until all tiers have them."""
    ctx = ReqContext(f"store-{keys[0].hex()[-12:]}")
    manager.on_new_request(ctx)
    out = manager.prepare_store(keys, ctx)
    if out is None:
        raise RuntimeError("the CPU tier has no room")
    manager.complete_store(out.keys_to_store, ctx)
    manager.on_request_finished(ctx)
    if not wait_until_idle(manager, WAIT):
        raise RuntimeError("a store did not end")


# ----------------------------------------------------------------------------------------------------------- the bucket


def bucket(bench: Bench) -> None:
    """Count the requests of engines that want the same prompts at once."""
    count, prompts = (2, 1) if bench.quick else (ENGINES, PROMPTS)
    blocks = [[key_of(prompt, at) for at in range(PROMPT_BLOCKS)] for prompt in range(prompts)]
    capacity = 2 * prompts * PROMPT_BLOCKS * BUCKET_BLOCK
    with slow_s3() as server, ExitStack() as undo:
        undo.enter_context(_variables(server.environment()))
        patient = {"lookup_deadline": "30s", "load_deadline": "60s"}
        tier = {"type": "s3", "bucket": BUCKET, "endpoint_url": server.endpoint, "prefix": "kv/", **patient}
        service = undo.enter_context(
            service_process(_made(bench.directory / "bucket"), tier, environment=server.environment())
        )
        own: Stack = {"primary": {"capacity": capacity}, "secondary": [tier]}
        shared: Stack = {"primary": {"capacity": capacity}, "machine": _machine(service.socket, "s3")}
        for stack in (own, shared):
            with engines(1, lambda _, stack=stack: stack, BUCKET_BLOCK) as (first,):  # type: ignore[misc]
                for keys in blocks:
                    store(first, keys)

        def wanted(stack: Stack) -> Sample:
            server.delay(get=GET_SECONDS)
            with engines(count, lambda _: stack, BUCKET_BLOCK) as made:
                gets = _gets(made, stack)
                seconds = timed(lambda: _load_together(made, blocks)).value
                gets = _gets(made, stack) - gets
            server.delay(get=0.0005)
            return Sample(seconds, extra={"GETs per block": gets / prompts / PROMPT_BLOCKS})

        stats = bench.compare(
            f"{count} engines want the same {prompts * PROMPT_BLOCKS} blocks of a bucket",
            {"a tier in each engine": lambda: wanted(own), "one service": lambda: wanted(shared)},
            repeats=3,
            unit="s",
        )
        gets = stats["one service"].extra["GETs per block"]
        bench.target(f"GETs per block and machine, {count} engines", gets, 1.0, "max")


def _gets(made: list[Any], stack: Stack) -> int:
    """Return the GETs so far; a service counts those of all its engines together."""
    time.sleep(1.2 * ("machine" in stack))  # the service reports about once a second
    for manager in made:
        manager.on_schedule_end()
    counts = [int(manager.get_stats()["tiers"]["s3"]["requests_get"]) for manager in made]
    return max(counts) if "machine" in stack else sum(counts)


def _load_together(made: list[Any], blocks: list[list[OffloadKey]]) -> None:
    """Let all engines look all prompts up at once, and again until each has each block."""
    numbers = itertools.count()

    def asked(manager: Any, keys: list[OffloadKey]) -> tuple[Any, list[OffloadKey], ReqContext]:
        ctx = ReqContext(f"{next(numbers)}")
        manager.on_new_request(ctx)
        return manager, keys, ctx

    waiting = [asked(manager, keys) for manager in made for keys in blocks]
    until = time.monotonic() + WAIT
    while waiting:
        if time.monotonic() > until:
            raise RuntimeError("a load did not end")
        left = []
        for manager, keys, ctx in waiting:
            match = manager.match_prefix(keys, ctx)
            if match.pending:
                left.append((manager, keys, ctx))
                continue
            manager.on_request_finished(ctx)
            if match.hits < len(keys):
                left.append(asked(manager, keys))
        waiting = left
        for manager in made:
            manager.on_schedule_end()
        time.sleep(0.001)


# -------------------------------------------------------------------------------------------------------- conversations


def conversations(bench: Bench) -> None:
    """Compare the hits of replicas with a disk each, with one service, and with one shared disk."""
    turns = 40 if bench.quick else 200
    rng = random.Random(3)
    lengths: dict[int, int] = {}
    plan: list[tuple[int, list[OffloadKey]]] = []
    for _ in range(turns):
        user = rng.randrange(max(4, turns // 6))
        lengths[user] = min(lengths.get(user, 0) + rng.randrange(1, 4), CPU_ROWS // 2)
        plan.append((rng.randrange(REPLICAS), [key_of(7, user, at) for at in range(lengths[user])]))
    total = sum(len(keys) for _, keys in plan)
    seen: set[OffloadKey] = set()
    ideal = 0
    for _, keys in plan:
        ideal += len(seen.intersection(keys))
        seen.update(keys)
    disk = {"type": "local", "capacity": "256MiB", "segment_size": "8MiB"}
    primary = {"capacity": CPU_ROWS * SMALL_BLOCK}
    with service_process(_made(bench.directory / "talk"), {**disk, "path": str(bench.directory / "one")}) as service:
        stacks: dict[str, Callable[[int], Stack]] = {
            "a disk for each engine": lambda number: {
                "primary": primary,
                "secondary": [{**disk, "path": str(bench.directory / f"own{number}")}],
            },
            "one service": lambda _: {"primary": primary, "machine": _machine(service.socket, "local")},
        }
        shares = {name: _play(stack, plan) / total for name, stack in stacks.items()}
    rows: list[list[Cell]] = [[name, share] for name, share in (*shares.items(), ("one shared disk", ideal / total))]
    bench.table(f"hits of {REPLICAS} engines, {turns} turns, {total:,} blocks", ["disks", "share of the blocks"], rows)
    bench.target("hits below one shared disk, points", 100 * (ideal / total - shares["one service"]), 1.0, "max")


def _play(stack: Callable[[int], Stack], plan: list[tuple[int, list[OffloadKey]]]) -> int:
    hits = 0
    with engines(REPLICAS, stack, SMALL_BLOCK) as made:
        for number, (replica, keys) in enumerate(plan):
            manager, ctx = made[replica], ReqContext(f"turn-{number}")
            manager.on_new_request(ctx)
            hits += wait_for_prefix(manager, keys, ctx, WAIT).hits
            manager.on_request_finished(ctx)
            store(manager, keys)
            time.sleep(0.0 if "secondary" in stack(0) else 0.001)
    return hits


# ----------------------------------------------------------------------------------------------- the scheduler's thread


def thread(bench: Bench) -> None:
    """Measure what lookups and messages cost the scheduler's thread."""
    with _tier(bench, "thread", SMALL_BLOCK, 512) as (tier, _, move):
        keys = [key_of(9, at) for at in range(64)]
        move(keys, np.arange(64), load=False)
        ctx = ReqContext("known")
        until = time.monotonic() + WAIT
        while tier.lookup_prefix(keys, ctx).held < len(keys) and time.monotonic() < until:
            tier.on_schedule_end()
            list(tier.get_finished())
        if tier.lookup_prefix(keys, ctx) != (64, False):
            raise RuntimeError("the blocks are not held")
        times = 200 if bench.quick else 5000
        singles = [keys[at : at + 1] for at in range(64)]
        missing = [[key_of(37, at)] for at in range(64)]

        def batches() -> None:
            for _ in range(times // 10):
                tier.lookup_prefix(keys, ctx)

        def single() -> None:
            for at in range(times):
                tier.lookup_prefix(singles[at % 64], ctx)

        def absent() -> None:
            for at in range(times):
                tier.lookup_prefix(missing[at % 64], ctx)

        stats = bench.compare(
            "lookup of a block that is held, and of one that is not",
            {
                "in batches of 64": lambda: Sample(timed(batches, per=times // 10 * 64).value * 1e6),
                "alone": lambda: Sample(timed(single, per=times).value * 1e6),
                "alone, absent": lambda: Sample(timed(absent, per=times).value * 1e6),
            },
            unit="µs per key",
        )
        bench.target("known lookup, batches of 64", stats["in batches of 64"].median, 0.3, "max", "µs per key")
        bench.target("known lookup, single keys", stats["alone"].median, 1.0, "max", "µs per key")
        reading, sending, bare = _messages(tier, 100 if bench.quick else 2000)
    bench.table(
        "end of a step, µs of wall time",
        ["step", "p50", "p99"],
        [
            ["that sends a message", *sending],
            ["that reads the answers", *reading],
            ["a bare message to another process, sending", *bare],
        ],
    )
    bench.target("a message each way, medians together", sending[0] + reading[0], 30.0, "max", "µs")
    bench.target("a message each way, beyond a bare one", sending[0] + reading[0] - bare[0], 30.0, "max", "µs")
    _large_steps(bench)
    blocks = 30_000 if bench.quick else 1_500_000
    costs: list[list[Cell]] = [[f"{blocks:,}", *notes(blocks)]]
    headers = ["blocks", "stored, µs", "removed, µs", "longest call with 256 blocks, ms"]
    bench.table("notes of the blocks that engines read, CPU time of the service's thread", headers, costs)
    _beside_embedded(bench)


def _large_steps(bench: Bench) -> None:
    """Measure steps whose records need several messages."""
    sent: list[tuple[int, bool]] = []
    plain = ServiceSocket.send

    def counted(connection: ServiceSocket, message: bytes) -> bool:
        sent.append((len(message), plain(connection, message)))
        return sent[-1][1]

    sizes, rows = (16, 256, 1008, 4000), []
    with _tier(bench, "large", SMALL_BLOCK, max(sizes)) as (tier, _, move):
        keys = [key_of(41, at) for at in range(max(sizes))]
        for first in range(0, len(keys), JOB_BLOCKS):
            part = slice(first, first + JOB_BLOCKS)
            move(keys[part], np.arange(len(keys))[part], load=False)
        numbers = itertools.count(1 << 30)
        for blocks in sizes:
            found = []
            for _ in range(3 if bench.quick else 9):
                ctx = ReqContext("chatcmpl-" + "0" * 32)
                jobs = [_load(next(numbers), keys, first, ctx) for first in range(0, blocks, JOB_BLOCKS)]
                with mock.patch.object(ServiceSocket, "send", counted):
                    sent.clear()
                    begun = time.thread_time()
                    for job in jobs:
                        tier.submit_load(job)
                    tier.touch(keys[:blocks], ctx)
                    tier.on_schedule_end()
                    spent, at_once, left = time.thread_time() - begun, sum(done for _, done in sent), len(jobs)
                    while left:
                        time.sleep(COMPUTE_SECONDS)
                        results = list(tier.get_finished())
                        tier.on_schedule_end()
                        if not all(result.success for result in results):
                            raise RuntimeError("a load failed")
                        left -= len(results)
                found.append((spent, at_once, sum(done for _, done in sent), sum(n for n, done in sent if done)))
            spent, at_once, messages, nbytes = (statistics.median(each) for each in zip(*found, strict=True))
            rows.append([blocks, int(messages), int(at_once), nbytes / 1024, 1e6 * spent, 1e6 * spent / blocks])
    headers = ["blocks", "messages", "of these in the first step", "KiB", "µs of the thread", "µs per block"]
    bench.table("steps that load many blocks, and touch them", headers, rows)


def _load(number: int, keys: list[OffloadKey], first: int, ctx: ReqContext) -> TransferJob:
    """Return a load of the blocks from ``first`` on, into the rows of the same numbers."""
    rows = np.arange(first, first + JOB_BLOCKS)
    return TransferJob(number, keys[first : first + JOB_BLOCKS], rows, True, ctx, 0.0, False, time.monotonic() + WAIT)


def handed_on(bench: Bench) -> None:
    """Count the steps until an engine has four blocks of another one, beside a tier in the process."""
    times = 5 if bench.quick else 40
    disk = {"type": "local", "capacity": "256MiB", "segment_size": "8MiB"}
    primary = {"capacity": 4 * CPU_ROWS * SMALL_BLOCK}
    own: Stack = {"primary": primary, "secondary": [{**disk, "path": str(bench.directory / "handed-own")}]}
    found: list[list[Cell]] = []
    with service_process(_made(bench.directory / "handed"), {**disk, "path": str(bench.directory / "all")}) as service:
        shared: Stack = {"primary": primary, "machine": _machine(service.socket, "local")}
        for name, stack, count in (("tier in the process", own, 1), ("one service, another engine's", shared, 2)):
            with engines(count, lambda _: stack, SMALL_BLOCK) as made:  # noqa: B023
                taken = [_steps_until_held(made[0], made[-1], at) for at in range(times)]
            steps, seconds = (statistics.median(each) for each in zip(*taken, strict=True))
            found.append([name, int(steps), 1e3 * seconds])
    bench.table("four blocks from the disk, steps of 5 ms", ["tier", "steps", "ms"], found)


def _steps_until_held(owner: Any, manager: Any, number: int) -> tuple[int, float]:
    """Return the steps, and the seconds, until ``manager`` has blocks that ``owner`` has stored."""
    keys = [key_of(43, number, at) for at in range(4)]
    store(owner, keys)
    owner.primary_tier.drop(keys)
    time.sleep(0.02)
    ctx = ReqContext(f"handed-{number}")
    manager.on_new_request(ctx)
    begun, steps = time.perf_counter(), 1
    while (match := manager.match_prefix(keys, ctx)).pending:
        manager.on_schedule_end()
        time.sleep(COMPUTE_SECONDS)
        steps += 1
    seconds = time.perf_counter() - begun
    manager.on_request_finished(ctx)
    if match.hits < len(keys):
        raise RuntimeError("the blocks are not held")
    return steps, seconds


def _beside_embedded(bench: Bench) -> None:
    """Compare the thread's time of a step, from lookups to results, with that of a tier in the process."""
    sizes, times = (16, 32, 256), 20 if bench.quick else 500
    found: dict[str, list[list[float]]] = {}
    for name, inside in (("tier in the process", True), ("one service", False)):
        with _tier(bench, f"whole-{inside}", SMALL_BLOCK, 512, inside=inside) as (tier, _, move):
            keys = [key_of(19, at) for at in range(max(sizes))]
            for first in range(0, len(keys), JOB_BLOCKS):
                part = slice(first, first + JOB_BLOCKS)
                move(keys[part], np.arange(len(keys))[part], load=False)
            found[name] = [_whole_steps(tier, keys[:blocks], times) for blocks in sizes]
    rows: list[list[Cell]] = [
        [name, blocks, *np.percentile(taken, (50, 99)).tolist()]
        for name, each in found.items()
        for blocks, taken in zip(sizes, each, strict=True)
    ]
    bench.table(
        "lookups, loads and results of a step, µs of the scheduler's thread", ["tier", "blocks", "p50", "p99"], rows
    )
    for at, blocks in enumerate(sizes):
        own, shared = (statistics.median(found[name][at]) for name in ("tier in the process", "one service"))
        bench.target(f"thread's time of a step with {blocks} blocks, of the tier in it", shared / own, 1.0, "max", "x")


def _whole_steps(tier: SecondaryTierManager, keys: list[OffloadKey], times: int) -> list[float]:
    """Return the thread's time of each step with two lookups and loads of ``keys``, in microseconds."""
    taken = []
    numbers = itertools.count(1 << 24)
    gc.disable()
    for at in range(times):
        fresh, ctx = [key_of(23, len(keys), at, number) for number in range(16)], ReqContext(f"w{at}")
        jobs = [_load(next(numbers), keys, first, ctx) for first in range(0, len(keys), JOB_BLOCKS)]
        begun = time.perf_counter()
        tier.lookup_prefix(fresh[:8], ctx)
        tier.lookup_prefix(fresh[8:], ctx)
        for job in jobs:
            tier.submit_load(job)
        tier.touch(fresh, ctx)
        tier.on_schedule_end()
        spent, left = time.perf_counter() - begun, len(jobs)
        while left:
            time.sleep(COMPUTE_SECONDS)
            begun = time.perf_counter()
            ended = len(list(tier.get_finished()))
            tier.on_schedule_end()
            spent += (time.perf_counter() - begun) * bool(ended)
            left -= ended
        taken.append(spent * 1e6)
    gc.enable()
    return taken


def _messages(tier: SecondaryTierManager, count: int) -> tuple[list[float], list[float], list[float]]:
    """Return median and p99 of the end of a step that reads, of one that sends, and of a bare message."""
    taken: tuple[list[float], list[float], list[float]] = ([], [], [])
    numbers, rows = itertools.count(1 << 20), np.arange(16)
    gc.disable()
    with bare_peer() as peer:
        for at in range(count):
            for step in range(2):
                if step:
                    fresh = [key_of(11, at, number) for number in range(16)]
                    ctx = ReqContext(f"m{at}")
                    for first in (0, 8):
                        tier.lookup_prefix(fresh[first : first + 8], ctx)
                    until = time.monotonic() + WAIT
                    tier.submit_load(TransferJob(next(numbers), fresh, rows, True, ctx, 0.0, False, until))
                    tier.touch(fresh, ctx)
                begun = time.perf_counter()
                list(tier.get_finished())
                tier.on_schedule_end()
                taken[step].append((time.perf_counter() - begun) * 1e6)
                time.sleep(0.001)
            taken[2].append(bare_message(peer) * 1e6)
    gc.enable()
    shown = [[float(np.percentile(each, share)) for share in (50, 99)] for each in taken]
    return shown[0], shown[1], shown[2]


# ----------------------------------------------------------------------------------------------------- bytes per second


@contextmanager
def _tier(
    bench: Bench, name: str, block: int, rows: int, *, inside: bool = False, capacity: str = "512MiB"
) -> Iterator[tuple[SecondaryTierManager, np.ndarray, Callable[..., None]]]:
    """Open a local tier, here or in a service; yield it, its rows, and a function that moves blocks."""
    region = SharedRegion.create(rows, block)
    array = np.asarray(region.view)
    array[:] = np.random.default_rng(0).integers(0, 256, array.shape[1], np.uint8)
    disk = {"type": "local", "path": str(bench.directory / f"{name}-disk"), "capacity": capacity}
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, disk["path"], ignore_errors=True)
        if inside:
            options = load_stack({"primary": {"capacity": "1GiB"}, "secondary": [disk]}).secondary[0]
        else:
            service = undo.enter_context(service_process(_made(bench.directory / name), disk, capacity="4GiB"))
            machine = _machine(service.socket, "local")
            found = load_stack({"primary": {"capacity": "1GiB"}, "machine": machine}).machine
            if found is None:
                raise RuntimeError("the stack has no machine")
            (options,) = found.tier_options()
        namespace = Namespace.build(MODEL, (block,))
        context = TierContext("local", array.data, (block,), namespace, rows_fd=region.fd)
        tier = tier_definition(options.type).build(options, context)
        undo.callback(region.close)
        undo.callback(lambda: tier.shutdown(time.monotonic() + WAIT))
        open_tier(tier, WAIT)
        numbers = itertools.count()

        def move(keys: list[OffloadKey], at: np.ndarray, *, load: bool, busy: bool = False) -> None:
            """Move blocks in jobs of 16, and wait for their end, idle or with the interpreter."""
            left: set[int] = set()
            for first in range(0, len(keys), JOB_BLOCKS):
                part, job = slice(first, first + JOB_BLOCKS), next(numbers)
                left.add(job)
                order = TransferJob(
                    job, keys[part], at[part], load, ReqContext("move"), 0.0, False, time.monotonic() + WAIT
                )
                (tier.submit_load if load else tier.submit_store)(order)
            tier.on_schedule_end()
            while left:
                for result in tier.get_finished():
                    if not result.success:
                        raise RuntimeError("a job failed")
                    left.discard(result.job_id)
                tier.on_schedule_end()
                until = time.perf_counter() + BUSY_SECONDS * busy
                while time.perf_counter() < until:
                    pass
                time.sleep(0.0002 * (not busy))

        yield tier, array, move


def loads(bench: Bench) -> None:
    """Compare loads of 512 KiB with those of a tier in the process."""
    count = 32 if bench.quick else 256
    with ExitStack() as undo:
        sides = {}
        keys = [key_of(13, at) for at in range(count)]
        for name, inside in (("tier in the process", True), ("one service", False)):
            place = "inside" if inside else "outside"
            _, rows, move = undo.enter_context(_tier(bench, f"loads-{place}", LOAD_BLOCK, 2 * count, inside=inside))
            rows[:count] = np.random.default_rng(1).integers(0, 256, (count, rows.shape[1]), np.uint8)
            for first in range(0, count, JOB_BLOCKS):  # one job at a time, for which any tier has room
                part = slice(first, first + JOB_BLOCKS)
                move(keys[part], np.arange(count)[part], load=False)
            sides[name] = rows, move

        room = SharedRegion.create(count, LOAD_BLOCK)
        undo.callback(room.close)
        bare_rows = np.asarray(room.view)
        bare = BareReads(bench.directory / "bare", rows[:count])

        def load(name: str, busy: bool) -> Sample:
            if name not in sides:
                return timed(lambda: bare.read(bare_rows), nbytes=count * LOAD_BLOCK)
            rows, move = sides[name]
            rows[count:] = 0
            sample = timed(
                lambda: move(keys, count + np.arange(count), load=True, busy=busy), nbytes=count * LOAD_BLOCK
            )
            if not np.array_equal(rows[:count], rows[count:]):
                raise RuntimeError("what came back is not what was stored")
            return sample

        for busy in (False, True):
            stats = bench.compare(
                f"loads of 512 KiB from the disk, beside {'a busy' if busy else 'an idle'} engine",
                {name: partial(load, name, busy) for name in (*sides, "bare reads and digests")},
                unit="GB/s",
            )
    gain = ratio(stats["one service"], stats["tier in the process"])
    bench.target("512 KiB beside a busy engine, against the tier in it", gain, 3.0, "min", "x")
    most = ratio(stats["bare reads and digests"], stats["tier in the process"])
    bench.note(f"512 KiB: bare reads and digests reach {most:.2f} times the tier beside a busy engine.")


def peers(bench: Bench) -> None:
    """Measure loads from the rows of another engine."""
    count = 2 if bench.quick else 8
    sizes = (BUCKET_BLOCK // 4, LOAD_BLOCK, STEP_BLOCK)
    names = (
        "one thread, CPU time",
        "one thread, bare copy, CPU time",
        "one thread, huge pages, CPU time",
        "whole loads, wall time",
    )
    for size in sizes:
        blocks = (64 << 20) // size
        prompts = [[key_of(29, size, prompt, at) for at in range(blocks)] for prompt in range(count)]
        primary = {"capacity": 2 * (64 << 20)}
        memory = {"type": "memory", "name": "local", "capacity": 4 * size}
        with service_process(_made(bench.directory / f"peers{size}"), memory, capacity="4GiB") as service:
            machine = {**_machine(service.socket, PEERS_TIER), "keep_rows": True}
            stack = {"primary": primary, "machine": machine}
            with engines(2, lambda _: stack, size) as (first, second):  # noqa: B023
                rates: list[list[float]] = [[] for _ in names]
                for keys in prompts:
                    _written(first, keys)
                    rates[3].append(blocks * size / _seconds_of_load(first, second, keys) / 1e9)
                    for rate, each in zip(rates, (*_one_thread(size), _one_thread(size, huge=True)[0]), strict=False):
                        rate.append(each)
                    for manager in (first, second):
                        manager.primary_tier.drop(keys)
        shown: list[list[Cell]] = [
            [name, statistics.median(each), min(each), max(each)] for name, each in zip(names, rates, strict=True)
        ]
        bench.table(
            f"blocks of {size >> 10} KiB from another engine's rows, GB/s", ["", "median", "lowest", "highest"], shown
        )
    own, bare, huge = (statistics.median(each) for each in rates[:3])
    bench.target("one thread copies and verifies 2 MiB", own, 10.0, "min", "GB/s")
    bench.target("one thread copies and verifies 2 MiB in huge pages", huge, 10.0, "min", "GB/s")
    bench.target("one thread copies and verifies 2 MiB, against a bare copy", own / bare, 0.6, "min", "x")


def _one_thread(size: int, *, huge: bool = False) -> tuple[float, float]:
    """Return GB per CPU second of one thread that copies and verifies, and of one that copies.

    The rows are those of engines, or anonymous memory, which has huge pages where shared memory may not have them.
    """
    count = (64 << 20) // size
    regions = [] if huge else [SharedRegion.create(count, size) for _ in range(2)]
    pair = [np.empty((count, size), np.uint8) for _ in range(2)] if huge else [region.array for region in regions]
    rows, places = pair
    rows[:], places[:] = np.random.default_rng(5).integers(0, 256, rows.shape, np.uint8), 1
    words = np.zeros(len(rows), np.uint64)
    holder: Any = None
    sources = [
        Source(holder, rows, words, at, HeldBlock(key_of(at), 0, xxh3_128_digest(row.data)))
        for at, row in enumerate(rows)
    ]
    begun = time.thread_time()
    good = [copy_block(source, place) for source, place in zip(sources, places, strict=True)]
    middle = time.thread_time()
    for row, place in zip(rows, places, strict=True):
        np.copyto(place, row)
    end = time.thread_time()
    if not all(good):
        raise RuntimeError("a copy was not verified")
    for region in regions:
        region.close()
    return rows.nbytes / (middle - begun) / 1e9, rows.nbytes / (end - middle) / 1e9


def _written(manager: Any, keys: list[OffloadKey]) -> None:
    """Store blocks of random bytes."""
    rows = np.asarray(manager.primary_tier.get_kv_memoryview())
    if not rows.any():
        rows[:] = np.random.default_rng(3).integers(0, 256, rows.shape[1], np.uint8)
    store(manager, keys)


def _seconds_of_load(owner: Any, manager: Any, keys: list[OffloadKey]) -> float:
    """Load blocks from the rows of ``owner``, and return the seconds."""
    until = time.monotonic() + WAIT
    tier, ctx = manager.secondary_tiers[0], ReqContext(keys[0].hex()[-20:])
    while tier.lookup_prefix(keys, ctx).held < len(keys):
        if time.monotonic() > until:
            raise RuntimeError("the blocks are not found")
        owner.on_schedule_end()
        manager.on_schedule_end()
        time.sleep(0.01)
    manager.on_new_request(ctx)
    begun = time.perf_counter()
    if wait_for_prefix(manager, keys, ctx, WAIT).hits < len(keys):
        raise RuntimeError("a load failed")
    whole = time.perf_counter() - begun
    manager.on_request_finished(ctx)
    return whole


class Flow:
    """Keeps loads and stores of 2 MiB under way, between the steps of an engine."""

    def __init__(self, tier: SecondaryTierManager) -> None:
        self._tier = tier
        self._numbers = itertools.count()
        self._stores: dict[int, list[OffloadKey]] = {}
        self._loads: dict[int, np.ndarray] = {}
        self._free = [(1 + at) * JOB_BLOCKS + np.arange(JOB_BLOCKS) for at in range(JOBS_AHEAD)]
        self._held: deque[list[OffloadKey]] = deque(maxlen=8)
        self._rate = 0.0
        self._begun = (0.0, 0)
        self.moved = 0
        """Bytes of the jobs that have ended."""

    def begin(self, rate: float) -> None:
        """Begin a measurement with at most ``rate`` bytes/s; 0 means no limit."""
        self._rate, self._begun = rate, (time.monotonic(), self.moved)

    def pump(self) -> None:
        """Collect finished jobs and submit the next ones."""
        for result in self._tier.get_finished():
            keys, row = self._stores.pop(result.job_id, None), self._loads.pop(result.job_id, None)
            self.moved += JOB_BLOCKS * STEP_BLOCK * result.success
            if keys is not None and result.success:
                self._held.append(keys)
            if row is not None:
                self._free.append(row)
        now = time.monotonic()
        ahead = (len(self._stores) + len(self._loads)) * JOB_BLOCKS * STEP_BLOCK
        begun, moved = self._begun
        slow = self._rate and self.moved + ahead - moved > self._rate * (now - begun)
        intake = self._tier.traits.intake
        credit = None if intake is None else intake.credit(JOB_BLOCKS, 0.01)
        if not slow and len(self._stores) < JOBS_AHEAD and (credit is None or credit >= JOB_BLOCKS):
            number = next(self._numbers)
            keys = self._stores[number] = [key_of(17, number, at) for at in range(JOB_BLOCKS)]
            self._submit(number, keys, np.arange(JOB_BLOCKS), load=False)
        if not slow and self._free and self._held:
            number = next(self._numbers)
            row = self._loads[number] = self._free.pop()
            self._submit(number, self._held[number % len(self._held)], row, load=True)
        self._tier.on_schedule_end()

    def _submit(self, number: int, keys: list[OffloadKey], rows: np.ndarray, *, load: bool) -> None:
        order = TransferJob(number, keys, rows, load, ReqContext("flow"), 0.0, False, time.monotonic() + WAIT)
        (self._tier.submit_load if load else self._tier.submit_store)(order)

    def drain(self) -> None:
        """Wait until all jobs have ended."""
        self._rate, self._begun = 1e-9, (time.monotonic(), self.moved)
        until = time.monotonic() + WAIT
        while (self._stores or self._loads) and time.monotonic() < until:
            self.pump()
            time.sleep(0.002)
        self._rate = 0.0


def steps(bench: Bench) -> None:
    """Measure the steps of an engine beside a busy tier."""
    subject = Subject(10_000 if bench.quick else 100_000)
    engine = Engine(subject, 20 if bench.quick else 150, compute_for(COMPUTE_SECONDS))
    gc.freeze()
    with ExitStack() as undo:
        flows = {}
        for name, inside in (("inside", True), ("outside", False)):
            rows = (1 + JOBS_AHEAD) * JOB_BLOCKS
            tier, _, _ = undo.enter_context(
                _tier(bench, f"steps-{name}", STEP_BLOCK, rows, inside=inside, capacity="2GiB")
            )
            flows[name] = Flow(tier)
        bare = BareMoves(bench.directory / "bare-moves", STEP_BLOCK, JOB_BLOCKS)
        undo.callback(bare.close)
        undo.callback(gc.unfreeze)
        rates = [0.0]

        def run(name: str, rate: float) -> Sample:
            flow = flows[name]
            flow.begin(rate)
            begun, moved = time.monotonic(), flow.moved
            sample = engine.run(flow.pump)
            reached = (flow.moved - moved) / (time.monotonic() - begun)
            if not rate:
                rates[0] = reached
            flow.drain()
            return Sample(sample.value, extra={**sample.extra, "tier GB/s": reached / 1e9})

        def alone() -> Sample:
            sample = engine.run(lambda: None)
            return Sample(sample.value, extra={**sample.extra, "tier GB/s": 0.0})

        def beside_bare() -> Sample:
            reached: list[float] = []
            with bare.moving(rates[0], reached):
                sample = engine.run(lambda: None)
            return Sample(sample.value, extra={**sample.extra, "tier GB/s": reached[0] / 1e9})

        p99: dict[str, list[float]] = {"alone": [], "service": [], "bare": []}

        def noted(name: str, sample: Sample) -> Sample:
            p99[name].append(sample.extra["p99 µs"])
            return sample

        stats = bench.compare(
            "5 ms of computing between steps",
            {
                "no tier at work": lambda: noted("alone", alone()),
                "tier in the process": lambda: run("inside", 0.0),
                "one service, same rate": lambda: noted("service", run("outside", rates[0])),
                "bare moves in a process, same rate": lambda: noted("bare", beside_bare()),
            },
            repeats=ROUNDS,
            unit="wall µs/step",
        )
    rounds = len(stats["no tier at work"].samples)
    for name, word, of in (
        ("no tier at work", "alone", ""),
        ("bare moves in a process, same rate", "bare", ", of one beside bare moves"),
    ):
        pairs = zip(p99["service"][-rounds:], p99[word][-rounds:], strict=True)
        mean = zip(stats["one service, same rate"].samples, stats[name].samples, strict=True)
        bench.target(f"step beside a service, mean{of}", spread([a / b for a, b in mean]), 1.05, "max", "x")
        bench.target(f"step beside a service, p99{of}", statistics.median(a / b for a, b in pairs), 1.10, "max", "x")
    blocked = [stats[name].extra["blocked steps, ‰"] for name in ("one service, same rate", "no tier at work")]
    bench.target("blocked steps beside a service, more than beside none", blocked[0] - blocked[1], 0.0, "max", "‰")
    share = stats["one service, same rate"].extra["tier GB/s"] / stats["tier in the process"].extra["tier GB/s"]
    bench.note(f"Beside the steps, the service moved {share:.2f} times the bytes of the tier in the process.")


# --------------------------------------------------------------------------------------------------------------- set-up


def _machine(socket: Path, tier: str) -> dict[str, Any]:
    return {"socket": str(socket), "tiers": [tier], "lookup_deadline": "30s", "load_deadline": "60s"}


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for the tiers of this process."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def disk_bytes(quick: bool) -> int:
    """Return the most bytes that its files take."""
    return 5 << 30


def run(bench: Bench) -> None:
    load = os.getloadavg()[0]
    for part in (bucket, conversations, thread, handed_on, peers, loads, steps):
        part(bench)
    restarts(bench, _made(bench.directory / "restarts"))
    bench.note(f"Load average before the run: {load:.1f} on {len(os.sched_getaffinity(0))} cores.")
