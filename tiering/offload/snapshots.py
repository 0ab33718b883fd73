"""Snapshots of blocks for KV events: the hashes, tokens and parent that a block's key stands for.

Consecutive blocks of one request share a *run*, so that a snapshot costs one number per block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tiering.api.keys import OffloadKey

ExternalHash: TypeAlias = bytes | int
"""A block hash as the engine shows it to the outside."""

ExtraKeys: TypeAlias = tuple[object, ...] | None
"""What the engine hashed of a hash-block beside its tokens, in the form that the engine publishes."""

_SHIFT = 6

RUN_BLOCKS = 1 << _SHIFT
"""Largest number of blocks in a run."""

_INDEX = RUN_BLOCKS - 1

MAX_SNAPSHOT_TOKENS = 1 << 24
"""Largest number of tokens in all snapshots together, with their hashes about 400 MiB for blocks of 16 tokens and 250 MiB for larger ones."""


@dataclass(slots=True)
class Run:
    """Consecutive blocks of one request and one KV-cache group."""

    keys: Sequence[OffloadKey]
    """One per block."""
    hashes: list[ExternalHash]
    """``factor`` hashes per block."""
    parent: ExternalHash | None
    """The hash before the first one; None at the beginning of a prompt."""
    token_ids: array[int]
    """The tokens of the blocks, then ``lookahead`` more."""
    extra_keys: Sequence[ExtraKeys] | None
    """One per hash; None if the engine does not tell."""
    factor: int
    """Hashes per block."""
    block_size: int
    """Tokens per hash."""
    lookahead: int
    """Tokens after a hash-block that its hash covers as well."""
    group_idx: int
    """The KV-cache group."""
    kind: str | None
    """The group's kind, as the engine calls it."""
    window: int | None
    """The group's sliding window in tokens."""
    lora_id: int | None
    """The adapter's number."""
    lora_name: str | None
    """The adapter's name."""
    live: int = 0
    """Blocks of the run whose snapshots are in use."""

    def hashes_of(self, index: int) -> list[ExternalHash]:
        """The hashes of block ``index`` of the run."""
        return self.hashes[index * self.factor : (index + 1) * self.factor]

    def lookahead_of(self, index: int) -> list[list[int]]:
        """The tokens behind each hash-block of block ``index`` that its hash covers as well."""
        ends = range(index * self.factor + 1, (index + 1) * self.factor + 1)
        return [self.token_ids[end * self.block_size : end * self.block_size + self.lookahead].tolist() for end in ends]


class Snapshots:
    """All snapshots, by key.

    ``max_tokens`` bounds the tokens of all runs: beyond it the oldest runs are dropped, however many of their blocks
    are in use. ``dropped`` counts the snapshots that went this way.
    """

    def __init__(self, max_tokens: int = MAX_SNAPSHOT_TOKENS) -> None:
        self.dropped = 0
        self._max_tokens = max_tokens
        self._tokens = 0
        self._numbers: dict[OffloadKey, int] = {}
        """Key → number of the run, and in the low bits the block's index in it."""
        self._runs: dict[int, Run] = {}
        """Oldest first."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._numbers

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._numbers)

    def lacks_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether there is a snapshot of none of ``keys``."""
        return self._numbers.keys().isdisjoint(keys)

    def find(self, key: OffloadKey) -> tuple[Run, int] | None:
        """The run that describes ``key``, and the block's index in it."""
        number = self._numbers.get(key)
        return None if number is None else (self._runs[number >> _SHIFT], number & _INDEX)

    def add(self, run: Run) -> None:
        """Keep a run of at most :data:`RUN_BLOCKS` blocks, of none of which there is a snapshot."""
        first = self._next << _SHIFT
        run.live = len(run.keys)
        self._numbers.update(zip(run.keys, range(first, first + run.live), strict=True))
        self._runs[self._next] = run
        self._next += 1
        self._tokens += len(run.token_ids)

    def discard(self, key: OffloadKey) -> None:
        """Nobody needs the snapshot of ``key`` any more."""
        number = self._numbers.pop(key, None)
        if number is not None:
            run = self._runs[number >> _SHIFT]
            run.live -= 1
            if not run.live:
                self._forget(number >> _SHIFT)

    def oldest_beyond_bound(self) -> Run | None:
        """The run that must go, its snapshots in use being those of :meth:`used`; None while the bound is kept."""
        if self._tokens <= self._max_tokens:
            return None
        return next(iter(self._runs.values()), None)

    def used(self, run: Run) -> list[tuple[int, OffloadKey]]:
        """Index and key of the blocks of ``run`` whose snapshots are in use."""
        found = ((index, key, self.find(key)) for index, key in enumerate(run.keys))
        return [(index, key) for index, key, place in found if place is not None and place[0] is run]

    def drop(self, run: Run) -> None:
        """Forget all snapshots of ``run``, and count those in use."""
        for _, key in self.used(run):
            self.dropped += 1
            self.discard(key)

    def _forget(self, run_number: int) -> None:
        self._tokens -= len(self._runs.pop(run_number).token_ids)
