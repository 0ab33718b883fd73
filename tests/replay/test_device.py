"""The engine's own cache in a replay and an exclusive CPU tier beside it, against plain LRU caches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tests.replay.traces import BLOCK_BYTES
from tiering.config.stack_file import load_stack
from tiering.replay.device import DeviceCache
from tiering.replay.generate import generate
from tiering.replay.model import ReplayModel
from tiering.replay.replay import STEP_TOKENS, Replay
from tiering.replay.result import ReplayResult
from tiering.replay.trace import TraceRequest

BLOCK_TOKENS = 512
DISK = {"type": "local", "path": "/nowhere/kv", "capacity": 100_000 * 1100 * 1024}


def prefix(keys: Sequence[object], held: Sequence[object]) -> int:
    """Return the number of leading ``keys`` that a cache holds."""
    known = frozenset(held)
    return next((number for number, key in enumerate(keys) if key not in known), len(keys))


def used(held: Sequence[object], keys: Sequence[object], room: int) -> list[object]:
    """Return the content of an LRU cache after a prompt, the block that was used last in front."""
    known = frozenset(keys)
    return [*keys, *(key for key in held if key not in known)][:room]


@pytest.mark.parametrize("near", [0, 3, 20])
def test_the_engines_cache_is_an_lru_cache_that_shows_what_is_about_to_leave(near: int) -> None:
    rng, held, shown = random.Random(near), list[Any](), set[bytes]()
    device = DeviceCache(20, near)
    for _ in range(500):
        start = rng.randrange(60)
        keys = [bytes([number]) for number in range(start, start + rng.randrange(1, 25))]
        before = list(held)
        assert device.hits(keys) == prefix(keys, held)
        held = used(held, keys[: prefix(keys, held)], 20)
        leaving = device.fill(keys)
        held = used(held, keys, 20)
        everything = [bytes([number]) for number in range(100)]
        assert device.holds(everything) == [key in held for key in everything]
        # Each block is shown once before it leaves, and again after it was used.
        gone = {*before, *keys} - {*held}
        shown = (shown - {*keys} | {*leaving}) - gone | (gone - shown - {*leaving})
        assert not gone & shown
        assert leaving == [key for key in used(before, keys, 10**9) if key in leaving]
        assert near == 0 or set(leaving) - gone <= {*held[-near:]}


@cache
def trace(kind: str) -> list[TraceRequest]:
    kinds = {"talks": {"chat": 1.0, "documents": 0.3}, "agents": {"agents": 1.0, "system": 2.0}}[kind]
    return list(generate(kinds, 500, 4.0, BLOCK_TOKENS, seed=7))


def replayed(
    kind: str, device: int, rows: int, inclusion: str, *tiers: dict[str, Any], prefill: float = 1e9
) -> ReplayResult:
    model = ReplayModel(prefill_tokens_per_second=prefill, device_cache=device * BLOCK_BYTES)
    stack = {"primary": {"capacity": rows * BLOCK_BYTES, "inclusion": inclusion}, "secondary": list(tiers)}
    # Blocks as large as a step, so that few of them count as about to leave.
    return Replay(load_stack(stack), STEP_TOKENS, BLOCK_BYTES, model).run(trace(kind))


def lru_hits(kind: str, room: int) -> float:
    """Return the hit rate of one plain LRU cache."""
    held: list[object] = []
    hits = blocks = 0
    for item in trace(kind):
        keys = item.hashes.tolist()
        blocks += len(keys)
        hits += prefix(keys, held)
        held = used(held, keys, room)
    return hits / blocks


@pytest.mark.parametrize("kind", ["talks", "agents"])
@pytest.mark.parametrize("share", [0.15, 0.3])
def test_an_exclusive_cpu_tier_hits_like_one_lru_cache_of_both_sizes(kind: str, share: float) -> None:
    device = int(share * len({block for item in trace(kind) for block in item.hashes.tolist()}))
    for ratio in (1, 2, 4, 8):
        inclusive, exclusive = (
            replayed(kind, device, ratio * device, inclusion) for inclusion in ("inclusive", "exclusive")
        )
        assert exclusive.hit_rate >= inclusive.hit_rate - 0.001
        if ratio == 1:
            # Negative control: an inclusive tier of this size holds what the engine's cache holds.
            assert inclusive.tiers[1].hit_rate < 0.01
            assert exclusive.tiers[1].hit_rate > 0.03
            assert exclusive.hit_rate == pytest.approx(lru_hits(kind, 2 * device), abs=0.01)
        if ratio != 2:  # nearly all hits at this ratio are hits beyond an inclusive tier's
            assert exclusive.copied_blocks <= 1.3 * inclusive.copied_blocks
        assert exclusive.lost_blocks == 0


@pytest.mark.parametrize("admission", ["all", "second_touch"])
def test_a_disk_behind_an_exclusive_cpu_tier_is_written_as_behind_an_inclusive_one(admission: str) -> None:
    disk = {**DISK, "admission": admission}
    one, other = (replayed("talks", 90, 180, word, disk, prefill=1e6) for word in ("inclusive", "exclusive"))
    assert one.tiers[2].bytes_written == other.tiers[2].bytes_written > 0
    # The CPU tier serves what the disk serves otherwise.
    assert other.hit_rate >= one.hit_rate
    assert other.tiers[1].hit_blocks > one.tiers[1].hit_blocks
    assert other.tiers[2].bytes_read < 1.01 * one.tiers[2].bytes_read, "its hits are more in all"
