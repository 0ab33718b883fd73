"""The worth of other engines' memory: hits of engines that share a disk, simulated.

Four engines have CPU tiers of 2.5% of a trace's distinct blocks each, and disks of 25% together; all evict the least
recent block, and requests go to any engine. A prompt hits as far as its blocks are held, and all its blocks are stored.

- "a disk for each engine" has a quarter of the disk's blocks; in all other variants the engines share one disk.
- "peers" also finds blocks in the CPU tiers of the other engines; "the copied block stays" leaves them at their place
  there, "the copied block goes first" makes them the next victims, as engines do.
- "one pool of rows" is one CPU tier of four times the size: the most that engines could reach together.

In the last table, each engine also has a GPU whose cache holds 1%. An inclusive CPU tier stores the blocks of a prompt
when they are computed, an exclusive one when they leave the GPU and have no row; the disk stores them when they are
computed in either case.

``KV_TRACES`` may name further trace files, separated by colons; their names are shown without directories.
"""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Bench, Cell
from tiering.replay.generate import generate
from tiering.replay.readers import Trace

ENGINES, CPU_SHARE, DISK_SHARE, GPU_SHARE = 4, 0.025, 0.25, 0.01
OWN, SHARED, STAYS, FIRST, POOL = (
    "a disk for each engine",
    "one disk",
    "peers, the copied block stays",
    "peers, the copied block goes first",
    "one pool of rows",
)

Prompt = Sequence[int]


class Blocks(OrderedDict[int, None]):
    """Blocks of one tier, the least recent one first.

    Args:
        room: largest number of blocks.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = max(1, room)

    def use(self, block: int) -> int | None:
        """Store a block, or use it again, and return the block that leaves for it; None if none does."""
        self[block] = None
        self.move_to_end(block)
        return self.popitem(last=False)[0] if len(self) > self._room else None


@dataclass(slots=True)
class Hits:
    """Shares of the blocks of all prompts."""

    own: float = 0.0
    """Found in the engine's CPU tier."""
    peers: float = 0.0
    """Found in another one's."""
    disk: float = 0.0
    """Found on the disk."""


def played(prompts: Iterable[Prompt], distinct: int, variant: str) -> Hits:
    """Return the hits of one variant."""
    pools = 1 if variant == POOL else ENGINES
    cpus = [Blocks(int(distinct * CPU_SHARE * ENGINES / pools)) for _ in range(pools)]
    count = ENGINES if variant == OWN else 1
    disks = [Blocks(int(distinct * DISK_SHARE / count)) for _ in range(count)]
    rng, hits, asked = random.Random(11), Hits(), 0
    for prompt in prompts:
        engine = rng.randrange(ENGINES)
        cpu, disk = cpus[engine % pools], disks[engine % len(disks)]
        others = [other for other in cpus if other is not cpu] if variant in (STAYS, FIRST) else []
        asked += len(prompt)
        for block in prompt:
            if block in cpu:
                hits.own += 1
            elif holders := [other for other in others if block in other]:
                hits.peers += 1
                if variant == FIRST:
                    holders[0].move_to_end(block, last=False)
            elif block in disk:
                hits.disk += 1
            else:
                break
            cpu.use(block)
            disk.use(block)
        for block in prompt:
            cpu.use(block)
            disk.use(block)
    return Hits(hits.own / asked, hits.peers / asked, hits.disk / asked)


def played_with_gpus(prompts: Iterable[Prompt], distinct: int, *, exclusive: bool, peers: bool) -> Hits:
    """Return the hits behind the GPUs' caches, of engines that share one disk."""
    gpus, cpus = ([Blocks(int(distinct * share)) for _ in range(ENGINES)] for share in (GPU_SHARE, CPU_SHARE))
    disk, rng, hits, asked = Blocks(int(distinct * DISK_SHARE)), random.Random(11), Hits(), 0
    for prompt in prompts:
        engine = rng.randrange(ENGINES)
        gpu, cpu = gpus[engine], cpus[engine]
        asked += len(prompt)
        held = True
        for block in prompt:
            if held and block not in gpu:
                holders = [other for other in cpus if peers and other is not cpu and block in other]
                if block in cpu:
                    hits.own += 1
                elif holders:
                    hits.peers += 1
                    holders[0].move_to_end(block, last=False)
                elif block in disk:
                    hits.disk += 1
                else:
                    held = False
                if held:  # a load goes through a row
                    cpu.use(block)
            if not exclusive:
                cpu.use(block)
            left = gpu.use(block)
            if exclusive and left is not None and left not in cpu:
                cpu.use(left)
            disk.use(block)
    return Hits(hits.own / asked, hits.peers / asked, hits.disk / asked)


def run(bench: Bench) -> None:
    requests = 300 if bench.quick else 6000
    kinds = {"chat": 1.0, "documents": 0.2}
    traces: dict[str, list[Prompt]] = {
        "generated": [request.hashes.tolist() for request in generate(kinds, requests, 4.0, 128, seed=5)]
    }
    for path in filter(None, os.environ.get("KV_TRACES", "").split(":")):
        traces[Path(path).name] = [request.hashes.tolist() for request in Trace([Path(path)])]
    for name, prompts in traces.items():
        distinct = len({block for prompt in prompts for block in prompt})
        found = {variant: played(prompts, distinct, variant) for variant in (OWN, SHARED, STAYS, FIRST, POOL)}
        rows: list[list[Cell]] = [
            [variant, hits.own + hits.peers, hits.peers, hits.disk, hits.own + hits.peers + hits.disk]
            for variant, hits in found.items()
        ]
        bench.table(
            f"{name}: hits of {ENGINES} engines, shares of the blocks",
            ["variant", "in memory", "of these in another engine's", "on the disk", "all"],
            rows,
        )
        memory = {variant: hits.own + hits.peers for variant, hits in found.items()}
        gain = 100 * (memory[FIRST] - memory[SHARED])
        bench.target(f"{name}: memory hits instead of disk hits", gain, 14.0, "min", "points")
        bench.target(f"{name}: memory hits by those of one pool", memory[FIRST] / memory[POOL], 0.9, "min", "x")
        rows = []
        for word in ("inclusive", "exclusive"):
            for peers in (False, True):
                hits = played_with_gpus(prompts, distinct, exclusive=word == "exclusive", peers=peers)
                cells = hits.own + hits.peers, hits.peers, hits.disk, hits.own + hits.peers + hits.disk
                rows.append([f"{word}, {'peers and disk' if peers else 'disk'}", *cells])
        bench.table(
            f"{name}: hits behind GPUs of {GPU_SHARE:.0%}, shares of the blocks",
            ["CPU tiers", "in memory", "of these in another engine's", "on the disk", "all"],
            rows,
        )
