"""Prompts of 4,000 and 64,000 tokens whose KV lies in S3, beside the CPU tier.

The real S3 tier loads from a server in memory, which answers after 25 ms in the median and sends at most so many bytes
per second over all connections. KV takes 1 KiB per token here, so that 64,000 tokens are 62.5 MiB; at 128 KiB per token
and 128 times the bandwidth, the same times result. A load ends when all blocks are in rows of the CPU tier: blocks that
were there already need no load, and both are copied to the GPU alike. So the load is what S3 costs beside DRAM.

The prefill of a tail that no tier holds is modelled: 1,000 tokens take 0.2 seconds behind 64,000 tokens, and 0.1 behind
4,000. *Layer by layer* is on paper: an engine with 32 layers that computes the first layer of the tail once the KV of
that layer has arrived. With a latency l, a load d behind it and a prefill t, the time to the first token is
l + max(d / 32 + t, d + t / 32), against l + d + t.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.bench_bucket_latency import credentials, new_keys, tier
from benchmarks.harness import Bench
from benchmarks.slow_s3 import SlowS3, slow_s3

LATENCY = 0.025
"""Median seconds until the first byte of an answer."""
BLOCK_TOKENS = 256
LAYERS = 32
BANDWIDTHS = (60e6, 250e6)
"""Bytes per second of the server."""
PREFILLS = {4_000: 0.1, 64_000: 0.2}
"""Prompt tokens in S3 → modelled seconds of the prefill of 1,000 tokens behind them."""
STEP = 0.002
"""Seconds between two looks at the job."""


def run(bench: Bench) -> None:
    rounds = 1 if bench.quick else 12
    rows = []
    with slow_s3() as server, credentials(server):
        for tokens, prefill in PREFILLS.items():
            for bandwidth in BANDWIDTHS:
                loads = sorted(timed_loads(server, -(-tokens // BLOCK_TOKENS), bandwidth, rounds))
                load = statistics.median(loads)
                spread = f"{1e3 * loads[0]:.0f} to {1e3 * loads[-1]:.0f}"
                rows.append(
                    (f"{tokens:,}", f"{bandwidth / 1e6:.0f} MB/s", f"{1e3 * load:.0f}", spread, *over(load, prefill))
                )
    bench.table(
        f"Time to the first token over DRAM, {rounds} loads each",
        (
            "tokens",
            "bandwidth",
            "load ms, median",
            "ms, all",
            "DRAM ms (modelled)",
            "S3 over DRAM",
            "layer by layer, on paper",
        ),
        rows,
    )


def over(load: float, prefill: float) -> tuple[str, str, str]:
    """Return the time with DRAM, and what S3 adds to it: as measured, and layer by layer."""
    moved = max(0.0, load - LATENCY)
    by_layers = LATENCY + max(moved / LAYERS + prefill, moved + prefill / LAYERS) - prefill

    def added(seconds: float) -> str:
        return f"+{1e3 * seconds:.0f} ms ({100 * seconds / prefill:+.1f}%)"

    return f"{1e3 * prefill:.0f}", added(load), added(by_layers)


def timed_loads(server: SlowS3, blocks: int, bandwidth: float, rounds: int) -> list[float]:
    """Return the seconds of each load of a prompt, from its submission to its report."""
    taken = []
    with tier(server, 32 + blocks) as rig:
        known = new_keys(blocks)
        for first in range(0, blocks, 32):
            rig.store(known[first : first + 32])
        server.delay(head=LATENCY, get=LATENCY, put=LATENCY)
        server.bound(bandwidth)
        for _ in range(rounds):
            begun = time.perf_counter()
            job = rig.submit_load(known)
            while not any(result.job_id == job for result in rig.tier.get_finished()):
                rig.tier.on_schedule_end()
                time.sleep(STEP)
            taken.append(time.perf_counter() - begun)
        server.bound(0)
    return taken
