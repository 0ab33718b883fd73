"""A burst of chats: hits that are lost because stores come faster than the media take them.

There are 200 conversations of 5 turns behind 20 system prompts of unequal popularity, 8 requests at a time, and no
model: prompts are stored as fast as the tiers let them. The primary tier has room for a quarter of the blocks, a new
local tier for all of them. A request whose store is refused offers it again at every step, for 0.25 s at most, and then
gives up. In the second scenario, a tier behind the local one hangs at its first writes and never returns. The ideal is
the hit rate of a cache without bounds.
"""

from __future__ import annotations

import mmap
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bench, Sample, Stats, open_tier, ratio, timed
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.api.request import ReqContext
from tiering.block_tier.tier import BlockTier
from tiering.index.slots import SlotIndex
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.runtime.news import News
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.chaos import ChaosLayer, ChaosPlan, Fault
from tiers.local.local_options import LocalOptions
from tiers.local.tier import LocalTier
from tiers.memory import MemoryOptions, MemoryStore

BLOCK_BYTES = 512 << 10
AT_A_TIME = 8
TURNS = 5
PROMPTS = 20
PATIENCE = 0.25
"""Seconds for which a refused store is offered again."""
PAUSE = 0.0005
"""Seconds until the next step if no request could go on in the last one."""
KEY_BYTES = 36

Prompt = list[bytes]


def make_burst(conversations: int, seed: int = 13) -> list[tuple[int, Prompt]]:
    """Return the requests in order of arrival: the conversation, and the blocks of its prompt."""
    dice = random.Random(seed)
    shares = [1 / (rank + 1) for rank in range(max(PROMPTS, conversations))]
    systems = [[_key(dice) for _ in range(dice.randint(6, 11))] for _ in range(PROMPTS)]
    prompts = [list(dice.choices(systems, shares[:PROMPTS])[0]) for _ in range(conversations)]
    left = dict.fromkeys(dice.sample(range(conversations), conversations), TURNS)
    burst: list[tuple[int, Prompt]] = []
    while left:
        number = dice.choices(list(left), shares[: len(left)])[0]
        prompts[number] = prompts[number] + [_key(dice) for _ in range(dice.randint(2, 6))]
        burst.append((number, prompts[number]))
        left[number] -= 1
        if not left[number]:
            del left[number]
    return burst


def _key(dice: random.Random) -> bytes:
    return dice.randbytes(KEY_BYTES - 4) + b"\0\0\0\0"


def ideal_rate(burst: Sequence[tuple[int, Prompt]]) -> float:
    """Return the hit rate of a cache without bounds."""
    seen: set[bytes] = set()
    hits = total = 0
    for _, keys in burst:
        hits += sum(key in seen for key in keys)
        total += len(keys)
        seen.update(keys)
    return hits / total


@dataclass(slots=True)
class Counts:
    """Outcome of one burst."""

    hits: int = 0
    blocks: int = 0
    refused: int = 0
    given_up: int = 0
    longest: float = 0.0
    refused_seconds: float = 0.0
    lookups: int = 0


@dataclass(slots=True, eq=False)
class Chat:
    """One request on its way."""

    ctx: ReqContext
    conversation: int
    keys: Prompt
    refused_at: float | None = None
    hits: int | None = None
    stored: list[bytes] = field(default_factory=list)


class Driver:
    """Serves a burst through a tiering manager, step by step, without a model."""

    def __init__(self, manager: Any, rows: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._manager = manager
        self._rows = rows
        self.counts = Counts()

    def serve(self, burst: Sequence[tuple[int, Prompt]]) -> None:
        """Serve all requests, each in its turn; a conversation's next turn begins when the last one has ended."""
        coming, running = list(burst), list[Chat]()
        number = 0
        while coming or running:
            busy = {chat.conversation for chat in running}
            place = 0
            while len(running) < AT_A_TIME and place < len(coming):
                if coming[place][0] in busy:
                    place += 1
                    continue
                conversation, keys = coming.pop(place)
                busy.add(conversation)
                running.append(Chat(ReqContext(f"r{number}"), conversation, keys))
                self._manager.on_new_request(running[-1].ctx)
                self._manager.touch(keys, running[-1].ctx)
                number += 1
            left = [chat for chat in running if not self._step(chat)]
            moved = len(left) < len(running)
            running = left
            self._manager.on_schedule_end()
            if not moved:
                time.sleep(PAUSE)

    def _step(self, chat: Chat) -> bool:
        """Take a request one step further, and return True if the request has ended."""
        manager, counts = self._manager, self.counts
        if chat.hits is None:
            counts.lookups += 1
            match = manager.match_prefix(chat.keys, chat.ctx)
            if match.pending:
                return False
            chat.hits = match.hits
            counts.hits += match.hits
            counts.blocks += len(chat.keys)
            self._load(chat)
        elif chat.stored:
            manager.complete_store(chat.stored, chat.ctx)
            manager.on_request_finished(chat.ctx)
            return True
        missing = chat.keys[chat.hits :]
        output = manager.prepare_store(missing, chat.ctx) if missing else None
        if missing and output is None:
            now = time.perf_counter()
            if chat.refused_at is None:
                chat.refused_at, counts.refused = now, counts.refused + 1
            if now - chat.refused_at < PATIENCE:
                return False
            counts.given_up += len(missing)
        self._note_refusal(chat)
        if output is not None and output.keys_to_store:
            chat.stored = list(output.keys_to_store)
            rows = output.store_spec.block_ids
            self._rows[rows, :KEY_BYTES] = self._rows[rows, -KEY_BYTES:] = _marks(chat.stored)
            return False
        manager.on_request_finished(chat.ctx)
        return True

    def _note_refusal(self, chat: Chat) -> None:
        if chat.refused_at is not None:
            seconds = time.perf_counter() - chat.refused_at
            self.counts.refused_seconds += seconds
            self.counts.longest = max(self.counts.longest, seconds)

    def _load(self, chat: Chat) -> None:
        """Check that the rows of all hits have the right blocks."""
        keys = chat.keys[: chat.hits]
        if keys:
            rows = self._manager.prepare_load(keys, chat.ctx).block_ids
            marks = _marks(keys)
            if not ((self._rows[rows, :KEY_BYTES] == marks) & (self._rows[rows, -KEY_BYTES:] == marks)).all():
                raise RuntimeError(f"WRONG KV: {chat.ctx.req_id} got a block of another key")
            self._manager.complete_load(keys, chat.ctx)


def _marks(keys: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A burst, and the tiers that serve it."""

    burst: Sequence[tuple[int, Prompt]]
    directory: Path
    hung: bool = False
    words: dict[str, object] = field(default_factory=dict)

    def run(self) -> Sample:
        """Serve the burst through new tiers; the value is the share of hits."""
        distinct = len({key for _, keys in self.burst for key in keys})
        num_rows = distinct // 4
        rows = np.frombuffer(mmap.mmap(-1, num_rows * BLOCK_BYTES), np.uint8).reshape(num_rows, BLOCK_BYTES)
        rows[:] = 1
        with self._tiers(rows, distinct) as (tiers, news):
            primary = CPUPrimaryTierOffloadingManager(rows.data)
            manager = TieringOffloadingManager(primary, tiers, news=news, shutdown_deadline=2.0)
            driver = Driver(manager, rows)
            spent = timed(lambda: driver.serve(self.burst))
            stats, counts = manager.get_stats(), driver.counts
        local, count = stats["tiers"]["local"], stats["manager"]
        extra = {
            "seconds": spent.value,
            "refused stores": float(counts.refused),
            "longest refusal, ms": counts.longest * 1e3,
            "blocks given up": float(counts.given_up),
            "stores dropped": float(local["stores_dropped"]),
            "local evictions": float(local["evictions"]),
            "promotions without room": float(count["promotions_without_room"]),
            "lookups per request": counts.lookups / len(self.burst),
        }
        return Sample(counts.hits / counts.blocks, spent.cpu, extra)

    @contextmanager
    def _tiers(
        self, rows: np.ndarray[Any, np.dtype[np.uint8]], distinct: int
    ) -> Iterator[tuple[list[SecondaryTierManager], News]]:
        news = News()
        namespace = Namespace.build(
            ModelIdentity(name="burst", weights="0", dtype="int8", layout="burst"), (BLOCK_BYTES,)
        )
        context = TierContext("local", rows.data, (BLOCK_BYTES,), namespace, news=news)
        path = self.directory / "local"
        capacity = int(1.2 * distinct * (BLOCK_BYTES + 4096)) + (64 << 20)
        words = {"type": "local", "path": str(path), "capacity": capacity, **self.words}
        tiers: list[SecondaryTierManager] = [LocalTier(context, LocalOptions.model_validate(words))]
        chaos = ChaosLayer(MemoryStore(), plan=ChaosPlan(puts={Fault.HANG: 1.0}))
        if self.hung:
            options = MemoryOptions.model_validate({"type": "memory", "capacity": 2 * distinct * BLOCK_BYTES})
            tiers.append(BlockTier(replace(context, name="hung"), options, chaos, _all_free(2 * distinct)))
        try:
            for tier in tiers:
                open_tier(tier, 60)
            yield tiers, news
        finally:
            chaos.release()
            for tier in tiers:
                tier.shutdown(time.monotonic() + 60)
            shutil.rmtree(path, ignore_errors=True)


def _all_free(slots: int) -> SlotIndex:
    index = SlotIndex(slots)
    index.add_free(np.arange(slots))
    return index


def disk_bytes(quick: bool) -> int:
    """Return the most bytes that its files take."""
    return 1 << 30 if quick else 3 << 30


def run(bench: Bench) -> None:
    burst = make_burst(20 if bench.quick else 200)
    ideal = ideal_rate(burst)
    distinct = len({key for _, keys in burst for key in keys})
    blocks = sum(len(keys) for _, keys in burst)
    bench.note(f"{len(burst)} requests, {blocks} blocks ({distinct} distinct); the ideal hit rate is {ideal:.3f}.")
    alone, hung = Scenario(burst, bench.directory), Scenario(burst, bench.directory, hung=True)
    stats = bench.compare(
        "burst of chats", {"local": alone.run, "local + hung tier": hung.run}, repeats=5, unit="share of hits"
    )
    bench.target("hit rate below the ideal", 100 * (ideal - stats["local"].median), 1.0, "max", "points")
    bench.target("hits beside a hung tier", _hits(stats), 0.98, "min", "of those without it")
    for name, stat in stats.items():
        bench.target(f"longest refusal of a store, {name}", stat.extra["longest refusal, ms"], 50, "max", "ms")


def _hits(stats: dict[str, Stats]) -> float:
    return ratio(stats["local + hung tier"], stats["local"])
