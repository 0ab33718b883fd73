"""The object store tier at the latencies of S3, against a server in memory that answers as late.

Blocks of 256 KiB; the tier is driven step by step, as by a scheduler with a step of 5 ms.

- "loads beside lookups": 80 new prompts a second, which the bucket does not hold, are looked up at p50 25 ms, while
  loads of 8 known blocks are timed from submission to the report.
- "held prefixes": 8 requests at a time, each with a prefix of 96 blocks that another process has stored and this one
  does not know yet, at p50 60 ms; the share that the lookups find in full.
- "HEADs of 2 s": the same loads while every lookup hangs for 2 s.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.harness import Bench
from benchmarks.slow_s3 import BUCKET, SlowS3, slow_s3
from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.request import ReqContext
from tiering.testing.tier_rig import TierRig
from tiers.object import S3_TIER, S3Options

BLOCK_BYTES = 256 << 10
STEP = 0.005
PROMPTS_PER_SECOND = 80
PROMPT_BLOCKS = 96
LOAD_BLOCKS = 8
_numbers = itertools.count(1)


def new_keys(count: int) -> list[OffloadKey]:
    """Keys that were never used before."""
    return [make_offload_key(next(_numbers).to_bytes(32, "big"), 0) for _ in range(count)]


def run(bench: Bench) -> None:
    """All cases, against one server."""
    with slow_s3() as server, credentials(server):
        seconds = 1.0 if bench.quick else 10.0
        busy = loads_beside_lookups(server, head=0.025, get=0.025, seconds=seconds)
        hung = loads_beside_lookups(server, head=2.0, get=0.025, seconds=seconds)
        found, late = held_prefixes(server, rounds=1 if bench.quick else 12)
    bench.table(
        f"a load of {LOAD_BLOCKS} blocks, in ms",
        ("lookups beside it", "median", "99th percentile", "longest", "loads"),
        [
            (f"{PROMPTS_PER_SECOND} new prompts/s, p50 25 ms", *times(busy)),
            (f"{PROMPTS_PER_SECOND} new prompts/s, HEADs of 2 s", *times(hung)),
        ],
    )
    bench.target("load beside lookups, 99th percentile", percentile(busy), 0.3, "max", "s")
    bench.target("load beside lookups that hang, 99th percentile", percentile(hung), 0.3, "max", "s")
    bench.target("held prefixes found at p50 60 ms, 8 at a time", found, 0.95, "min", "")
    bench.note(f"lookups answered with no because the bucket was late: {late}")


def times(seconds: Sequence[float]) -> tuple[str, str, str, str]:
    """Median, 99th percentile, longest, count."""
    median, longest = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    return f"{median:.0f}", f"{percentile(seconds) * 1e3:.0f}", f"{longest:.0f}", str(len(seconds))


def percentile(seconds: Sequence[float]) -> float:
    """The 99th percentile: other work on the machine makes the longest of all meaningless."""
    return sorted(seconds)[int(len(seconds) * 0.99) - 1]


def loads_beside_lookups(server: SlowS3, *, head: float, get: float, seconds: float) -> list[float]:
    """Seconds of each load of known blocks while new prompts are looked up."""
    server.delay(head=0.0005, get=0.0005, put=0.0005)
    with tier(server) as rig:
        known = new_keys(LOAD_BLOCKS)
        if rig.store(known) != known:
            raise RuntimeError("the blocks were not stored")
        server.delay(head=head, get=get, put=get)
        taken: list[float] = []
        asking: list[tuple[ReqContext, list[OffloadKey]]] = []
        begun = next_prompt = time.perf_counter()
        job, submitted = rig.submit_load(known), begun
        while time.perf_counter() < begun + seconds:
            while next_prompt <= time.perf_counter():
                next_prompt += 1 / PROMPTS_PER_SECOND
                asking.append((ReqContext(f"r{next_prompt}"), new_keys(PROMPT_BLOCKS)))
            asking = [(ctx, keys) for ctx, keys in asking if rig.tier.lookup_prefix(keys, ctx).undecided]
            rig.tier.on_schedule_end()
            for result in rig.tier.get_finished():
                if result.job_id == job:
                    if not result.success:
                        raise RuntimeError("a load failed")
                    taken.append(time.perf_counter() - submitted)
                    job, submitted = rig.submit_load(known), time.perf_counter()
            time.sleep(STEP)
        taken.append(time.perf_counter() - submitted)
        return taken


def held_prefixes(server: SlowS3, *, rounds: int) -> tuple[float, int]:
    """Share of prefixes that were found in full, and the number of late lookups."""
    server.delay(head=0.0005, get=0.0005, put=0.0005)
    with tier(server) as writer, tier(server) as reader:
        prompts = [new_keys(PROMPT_BLOCKS) for _ in range(rounds * 8)]
        for prompt in prompts:
            for first in range(0, len(prompt), 32):
                writer.store(prompt[first : first + 32])
        server.delay(head=0.06, get=0.06, put=0.06)
        found = 0
        for first in range(0, len(prompts), 8):
            open_prompts = {f"r{first + at}": prompt for at, prompt in enumerate(prompts[first : first + 8])}
            while open_prompts:
                for name, prompt in list(open_prompts.items()):
                    answer = reader.tier.lookup_prefix(prompt, ReqContext(name))
                    if not answer.undecided:
                        found += answer.held == len(prompt)
                        del open_prompts[name]
                reader.tier.on_schedule_end()
                list(reader.tier.get_finished())
                time.sleep(STEP)
        late = getattr(reader.tier.get_stats(), "lookups_late", 0)
        return found / len(prompts), late


@contextmanager
def tier(server: SlowS3, num_rows: int = 64, **words: object) -> Iterator[TierRig]:
    """An open tier on the server, beside ``num_rows`` rows."""
    options = S3Options.model_validate({"bucket": BUCKET, "endpoint_url": server.endpoint, "prefix": "bench", **words})
    rig = TierRig(lambda context: S3_TIER.build(options, context), group_bytes=(BLOCK_BYTES,), num_rows=num_rows)
    rig.open()
    try:
        yield rig
    finally:
        server.delay(head=0.0005, get=0.0005, put=0.0005)
        rig.close()


@contextmanager
def credentials(server: SlowS3) -> Iterator[None]:
    """The server's credentials in the environment."""
    before = {name: os.environ.get(name) for name in server.environment()}
    os.environ.update(server.environment())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
