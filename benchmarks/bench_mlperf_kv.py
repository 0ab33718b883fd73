"""The published workload of MLPerf Storage's KV-cache benchmark, over these tiers and its own.

A driver of our own: it follows the parameters that https://github.com/mlcommons/storage (``kv_cache_benchmark``,
version 3.0) publishes and is no submission to MLPerf. Users are chatbots, coders or readers of documents, with the
published ranges of tokens. A turn reads the KV of all earlier turns of its conversation, writes its own, and reads that
again for each 32 tokens that it generates; prompts of 10,000 tokens and more are only written. A conversation ends with
a probability of 0.2 after each turn. A token takes no time to generate in mode ``none``, and 2 ms in mode ``fast``,
which is not counted. The KV has the size of the published models. There is no GPU tier, no RAG and no shared prefix,
and one request runs at a time.

"Tiers" means a manager with a CPU and a local tier; each block is checked when it comes from the disk. "Its own tiers"
means copies in memory, and below them one ``.npy`` file per turn, written with fsync and read past the page cache, with
the published eviction. They are ``MultiTierCache`` of the benchmark itself if ``kv_cache`` can be imported
(PYTHONPATH), and otherwise a double. The capacities are the same. Times include what is still to be written at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import os
import random
import shutil
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tiering
from benchmarks.harness import Bench, Sample, cpu_seconds

TEMPLATES = {
    "chatbot": ((512, 4096), (50, 200)),
    "coding": ((4096, 25_000), (100, 500)),
    "document": ((4096, 16_384), (200, 800)),
}
"""Ranges of a user's context and of its answers, in tokens."""

END_PROBABILITY = 0.2
MOST_TURNS = 50
ONLY_WRITTEN = 10_000
"""Tokens from which a prompt is only written."""

DECODE_BATCH = 32
GENERATION = {"none": 0.0, "fast": 0.002}
"""Seconds that a token takes to generate, by mode."""


class Model(NamedTuple):
    """A published model."""

    name: str
    token_bytes: int
    """Bytes of a token's KV: layers, KV heads, their size, K and V, bytes of a float16."""
    row_tokens: int
    """Tokens of a block of the tiers."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a block of the tiers."""
        return self.row_tokens * self.token_bytes


TINY = Model("tiny-1b", 12 * 4 * 128 * 2 * 2, 64)
LLAMA = Model("llama3.1-8b", 32 * 8 * 128 * 2 * 2, 16)

PIECE = 16
"""Rows that are stored or loaded at once; a turn may be larger than the CPU tier."""

USED_SHARE = 0.8
"""Share of a tier's capacity to which its own eviction frees it."""

Bytes = NDArray[np.uint8]


class Turn(NamedTuple):
    """One request of a user."""

    key: str
    tokens: int
    generated: int
    earlier: tuple[tuple[str, int], ...]
    """Key and tokens of each earlier turn of the conversation."""


def workload(users: int, turns: int, seed: int, scale: int = 1) -> list[Turn]:
    """Return requests in the order in which they run.

    Args:
        users: number of users.
        turns: number of requests.
        seed: seed of all random numbers.
        scale: quotient of all published numbers of tokens; 1 for the workload itself.
    """
    dice = random.Random(seed)
    profiles = []
    for _ in range(users):
        contexts, lengths = TEMPLATES[dice.choice(list(TEMPLATES))]
        profiles.append((dice.randint(*contexts) // scale, dice.randint(*lengths) // scale))
    conversations: dict[int, list[tuple[str, int]]] = {}
    found: list[Turn] = []
    for number in range(turns):
        user = number % users
        earlier = conversations.get(user, [])
        if earlier and (dice.random() < END_PROBABILITY or len(earlier) >= MOST_TURNS):
            earlier = []
        context, generated = profiles[user]
        tokens = dice.randint(max(1, context // 4), context)
        found.append(Turn(f"turn_{number}", tokens, dice.randint(max(1, generated // 4), generated), tuple(earlier)))
        conversations[user] = [*earlier, (found[-1].key, tokens)]
    return found


class Data:
    """The KV of all turns: parts of one buffer of random bytes, at a place of their own.

    Args:
        model: the model.
        tokens: tokens of the longest turn.
    """

    def __init__(self, model: Model, tokens: int) -> None:
        self.model = model
        self._bytes = np.random.default_rng(0).integers(0, 256, tokens * model.token_bytes + (1 << 20), np.uint8)

    def of(self, key: str, tokens: int) -> Bytes:
        """Return the KV of a turn."""
        start = 64 * (int(hashlib.sha256(key.encode()).hexdigest(), 16) % ((1 << 20) // 64))
        return self._bytes[start : start + tokens * self.model.token_bytes]


class Cache(ABC):
    """A cache with the KV of turns."""

    @abstractmethod
    def store(self, key: str, kv: Bytes) -> None:
        """Store the KV of a turn."""

    @abstractmethod
    def load(self, key: str, into: Bytes) -> int:
        """Fill ``into`` with the KV of a turn, and return how many leading bytes are right."""

    def settle(self) -> None:
        """Wait until everything is written."""

    @abstractmethod
    def close(self) -> None:
        """Give up memory and files."""


class Tiers(Cache):
    """A CPU and a local tier of this project.

    Args:
        model: the model.
        directory: place of the local tier.
        memory: bytes of the CPU tier.
        disk: bytes of the local tier.
        durability: word of the local tier.
    """

    def __init__(self, model: Model, directory: Path, memory: int, disk: int, durability: str) -> None:
        directory.mkdir()
        self._size = model.row_bytes
        stack = directory / "stack.yaml"
        stack.write_text(
            f"primary: {{capacity: {memory}}}\n"
            f"secondary: [{{type: local, path: {directory}/kv, capacity: {disk}, durability: {durability}}}]\n"
        )
        identity = tiering.ModelIdentity(model.name, "0", "float16", f"{model.row_tokens} tokens")
        self._manager = tiering.open_manager(tiering.load_stack(stack), model.row_bytes, identity)
        self._context = tiering.ReqContext("the only request at its time")

    def _keys(self, key: str, nbytes: int) -> list[bytes]:
        count = -(-nbytes // self._size)
        return [hashlib.sha256(f"{key} {number}".encode()).digest() + bytes(4) for number in range(count)]

    def store(self, key: str, kv: Bytes) -> None:
        keys, size = self._keys(key, len(kv)), self._size
        at = 0
        while at < len(keys):

            def write(position: int, row: Bytes, first: int = at) -> None:
                part = kv[(first + position) * size : (first + position + 1) * size]
                row[: len(part)] = part

            stored = tiering.store_prefix(self._manager, keys[at : at + PIECE], self._context, write)
            at += stored
            if not stored:  # all rows wait for the disk
                time.sleep(0.001)

    def load(self, key: str, into: Bytes) -> int:
        keys, size = self._keys(key, len(into)), self._size
        at = 0
        while at < len(keys):

            def read(position: int, row: Bytes, first: int = at) -> None:
                part = into[(first + position) * size : (first + position + 1) * size]
                part[:] = row[: len(part)]

            loaded = tiering.load_prefix(self._manager, keys[at : at + PIECE], self._context, read)
            at += loaded
            if not loaded:
                break
        return min(at * size, len(into))

    def settle(self) -> None:
        while self._manager.has_pending_work():
            self._manager.on_schedule_end()
            time.sleep(0.001)

    def close(self) -> None:
        self._manager.shutdown()


@dataclass
class OwnTiers(Cache):
    """A double of the benchmark's own tiers: copies in memory, and files below them.

    Args:
        directory: place of the files.
        memory: bytes in memory.
        disk: bytes of the files.
    """

    directory: Path
    memory: int
    disk: int
    _copies: OrderedDict[str, Bytes] = field(default_factory=OrderedDict)
    _files: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.directory.mkdir()

    def store(self, key: str, kv: Bytes) -> None:
        if len(kv) > 0.95 * self.memory:
            self._write(key, kv)
            return
        while sum(map(len, self._copies.values())) + len(kv) > USED_SHARE * self.memory and self._copies:
            oldest, copy = self._copies.popitem(last=False)
            self._write(oldest, copy)
        self._copies[key] = kv.copy()

    def _write(self, key: str, kv: Bytes) -> None:
        while self._files and sum(self._files.values()) + len(kv) > self.disk:
            oldest, _ = self._files.popitem(last=False)
            (self.directory / f"{oldest}.npy").unlink()
        with (self.directory / f"{key}.npy").open("wb") as file:
            np.save(file, kv, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        self._files[key] = len(kv)

    def load(self, key: str, into: Bytes) -> int:
        if key in self._copies:
            self._copies.move_to_end(key)
            into[:] = self._copies[key]
        elif key in self._files:
            self._files.move_to_end(key)
            path = self.directory / f"{key}.npy"
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            into[:] = np.load(path, allow_pickle=False)
        else:
            return 0
        return len(into)

    def close(self) -> None:
        self._copies.clear()


class TheirTiers(Cache):
    """``MultiTierCache`` of the benchmark itself, given the same data as all others.

    Args:
        model: the model.
        directory: place of the files.
        memory: bytes in memory.
        disk: bytes of the files.
    """

    def __init__(self, model: Model, directory: Path, memory: int, disk: int) -> None:
        self._model = model
        cache, models = importlib.import_module("kv_cache.cache"), importlib.import_module("kv_cache.models")
        gib = float(1 << 30)
        with contextlib.redirect_stdout(io.StringIO()):
            self._cache: Any = cache.MultiTierCache(
                model_config=models.MODEL_CONFIGS[model.name],
                gpu_memory_gb=0,
                cpu_memory_gb=memory / gib,
                cache_dir=str(directory),
                storage_capacity_gb=disk / gib,
                seed=0,
            )
        self._cache.generator = self
        self._kv: Bytes | None = None
        self._read: Bytes | None = None
        for backend in self._cache.backends.values():
            self._keep_what_is_read(backend)

    def _keep_what_is_read(self, backend: Any) -> None:
        original = backend.read

        def read(key: str) -> Any:
            answer = original(key)
            self._read = answer[0]
            return answer

        backend.read = read

    def generate(self, sequence_length: int, key: str | None = None) -> Any:
        """Return the KV that :meth:`store` is about to store."""
        return self._kv

    def store(self, key: str, kv: Bytes) -> None:
        self._kv = kv
        self._cache.allocate_cache(key, len(kv) // self._model.token_bytes)

    def load(self, key: str, into: Bytes) -> int:
        location, _ = self._cache.access_cache(key)
        if location is None or self._read is None:
            return 0
        # What it has read is in memory of its own, and is not copied again.
        return len(into) if len(self._read) == len(into) and self._read[0] == into[0] else 0

    def close(self) -> None:
        for backend in self._cache.backends.values():
            backend.clear()


@dataclass
class _Clock:
    """Seconds and bytes of calls of one kind."""

    seconds: list[float] = field(default_factory=list)
    nbytes: int = 0

    def timed(self, work: Callable[[], int]) -> int:
        start = time.perf_counter()
        moved = work()
        if moved:
            self.seconds.append(time.perf_counter() - start)
            self.nbytes += moved
        return moved

    @property
    def p95(self) -> float:
        """The 95th percentile in milliseconds; 0 without calls."""
        return float(np.percentile(self.seconds, 95)) * 1e3 if self.seconds else 0.0


def play(cache: Cache, turns: Sequence[Turn], data: Data, token_seconds: float = 0.0) -> Sample:
    """Run all requests on a cache, and return cached tokens per second and the rest.

    Args:
        cache: the cache.
        turns: the requests.
        data: the KV of all turns.
        token_seconds: seconds that a token takes to generate, which are not counted.

    Raises:
        RuntimeError: bytes that were loaded are not those that were stored.
    """
    reads, writes = _Clock(), _Clock()
    token_bytes = data.model.token_bytes
    into = np.empty(max(turn.tokens for turn in turns) * token_bytes, np.uint8)
    wanted, generating = 0, 0.0

    def load(key: str, tokens: int) -> bool:
        place, kv = into[: tokens * token_bytes], data.of(key, tokens)
        place[0], place[-1] = kv[0], kv[-1] ^ 255
        loaded = reads.timed(lambda: cache.load(key, place))
        if isinstance(cache, (Tiers, OwnTiers)) and loaded == len(kv) and not np.array_equal(place[-64:], kv[-64:]):
            raise RuntimeError(f"{key}: other bytes came back than were stored")
        return loaded == len(kv)

    def store(key: str, kv: Bytes) -> int:
        cache.store(key, kv)
        return len(kv)

    cpu, start = cpu_seconds(), time.perf_counter()
    for turn in turns:
        for key, tokens in turn.earlier:
            wanted += tokens
            load(key, tokens)
        kv = data.of(turn.key, turn.tokens)
        writes.timed(lambda kv=kv, turn=turn: store(turn.key, kv))  # type: ignore[misc]
        if turn.tokens < ONLY_WRITTEN:
            for _ in range(1 + -(-turn.generated // DECODE_BATCH)):
                wanted += turn.tokens
                load(turn.key, turn.tokens)
        if token_seconds:
            began = time.perf_counter()
            time.sleep(turn.generated * token_seconds)
            generating += time.perf_counter() - began
    settling = time.perf_counter()
    cache.settle()
    end = time.perf_counter()
    extra = {
        "GB/s read": reads.nbytes / 1e9 / max(sum(reads.seconds), 1e-9),
        "GB/s written": writes.nbytes / 1e9 / (sum(writes.seconds) + end - settling),
        "P95 read ms": reads.p95,
        "P95 write ms": writes.p95,
        "share of tokens found": reads.nbytes / token_bytes / max(wanted, 1),
    }
    return Sample(reads.nbytes / token_bytes / (end - start - generating), cpu_seconds() - cpu, extra)


def run(bench: Bench) -> None:
    if bench.quick:
        _compare(bench, TINY, workload(2, 6, seed=7, scale=64), "none", 16 << 20, 128 << 20)
        return
    turns = workload(4, 16, seed=7)
    _compare(bench, TINY, turns, "none", 1 << 30, 6 << 30)
    _compare(bench, TINY, turns, "fast", 1 << 30, 6 << 30)
    _compare(bench, LLAMA, workload(4, 8, seed=7), "none", 1 << 30, 6 << 30, rounds=1)
    bench.note(
        'Repeat with `make bench BENCH_ARGS="--only mlperf_kv"`. With `kv_cache_benchmark` of mlcommons/storage in '
        "PYTHONPATH, its own code takes the place of the double. llama3.1-8b runs once, with 8 turns."
    )


def _compare(
    bench: Bench, model: Model, turns: Sequence[Turn], mode: str, memory: int, disk: int, rounds: int = 3
) -> None:
    """Run all variants on one workload."""
    data = Data(model, max(turn.tokens for turn in turns))
    numbers = iter(range(1 << 30))
    place = bench.directory / f"{model.name}-{mode}"
    place.mkdir()

    def variant(make: Callable[[Path], Cache]) -> Callable[[], Sample]:
        def once() -> Sample:
            path = place / str(next(numbers))
            cache = make(path)
            try:
                return play(cache, turns, data, GENERATION[mode])
            finally:
                cache.close()
                shutil.rmtree(path, ignore_errors=True)

        return once

    variants = {
        "tiers": variant(lambda path: Tiers(model, path, memory, disk, "none")),
        "tiers, durability fsync": variant(lambda path: Tiers(model, path, memory, disk, "fsync")),
    }
    if importlib.util.find_spec("kv_cache") is None:
        variants["its own tiers (double)"] = variant(lambda path: OwnTiers(path, memory, disk))
        variants["its own files only (double)"] = variant(lambda path: OwnTiers(path, 0, disk))
    else:
        variants["its own tiers"] = variant(lambda path: TheirTiers(model, path, memory, disk))
        variants["its own files only"] = variant(lambda path: TheirTiers(model, path, 0, disk))
    written = sum(turn.tokens for turn in turns) * model.token_bytes / 1e9
    sizes = f"{memory >> 20} MiB in memory, {disk >> 20} MiB on disk"
    title = f"{model.name}, mode {mode}, {len(turns)} turns, {written:.2f} GB of KV, {sizes}"
    bench.compare(title, variants, rounds, unit="cached tokens/s", warmup=0)
