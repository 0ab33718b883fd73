"""Snapshots of blocks for KV events: the hashes, tokens and parent hash that a block's key stands for.

Consecutive blocks of one request share a run, so that a snapshot costs one number per block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

from tiering.api.keys import OffloadKey

ExternalHash: TypeAlias = bytes | int
"""A block hash in the form that the engine publishes."""

ExtraKeys: TypeAlias = tuple[object, ...] | None
"""Keys that the engine hashed for a hash-block in addition to its tokens, in published form."""

_SHIFT = 6

RUN_BLOCKS = 1 << _SHIFT
"""Largest number of blocks in a run."""

_INDEX = RUN_BLOCKS - 1

MAX_SNAPSHOT_TOKENS = 1 << 24
"""Largest number of tokens in all snapshots together.

With their hashes, the snapshots take about 400 MiB for blocks of 16 tokens, and 250 MiB for larger blocks.
"""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Run:
    """Consecutive blocks of one request and one KV-cache group."""

    keys: Sequence[OffloadKey]
    """Key of each block."""
    hashes: list[ExternalHash]
    """Hashes of the blocks, ``factor`` per block."""
    parent: ExternalHash | None
    """The hash before the first hash; None at the start of a prompt."""
    token_ids: array[int]
    """Tokens of the blocks, followed by ``lookahead`` more."""
    extra_keys: Sequence[ExtraKeys] | None
    """Extra keys of each hash; None if the engine does not provide them."""
    factor: int
    """Hashes per block."""
    block_size: int
    """Tokens per hash."""
    lookahead: int
    """Tokens after a hash-block that its hash covers too."""
    group_idx: int
    """Index of the KV-cache group."""
    kind: str | None
    """Kind of the group, as the engine calls it."""
    window: int | None
    """Sliding window of the group in tokens; None without one."""
    lora_id: int | None
    """Number of the LoRA adapter; None without one."""
    lora_name: str | None
    """Name of the LoRA adapter; None without one."""
    session_id: str | None = None
    """Session of the request, as its client calls it; default: None."""
    live: int = 0
    """Number of blocks whose snapshots are in use."""
    lasting: int = 0
    """Bits of the blocks that the tier which keeps descriptions has announced; bit 0 is the first block."""

    def hashes_of(self, index: int) -> list[ExternalHash]:
        """Return the hashes of block ``index`` of the run."""
        return self.hashes[index * self.factor : (index + 1) * self.factor]

    def part(self, start: int, end: int) -> Run:
        """Return the blocks from ``start`` to ``end`` as a run without blocks in use."""
        if (start, end) == (0, len(self.keys)):
            return self
        first, last, size = start * self.factor, end * self.factor, self.block_size
        return replace(
            self,
            keys=self.keys[start:end],
            hashes=self.hashes[first:last],
            parent=self.hashes[first - 1] if start else self.parent,
            token_ids=self.token_ids[first * size : last * size + self.lookahead],
            extra_keys=None if self.extra_keys is None else self.extra_keys[first:last],
            live=0,
            lasting=self.lasting >> start & (1 << end - start) - 1,
        )

    def parts(self, wanted: Iterable[object]) -> list[Run]:
        """Return the consecutive blocks for which ``wanted`` has a true value, as runs."""
        found, start = list[Run](), 0
        for is_wanted, group in groupby(map(bool, wanted)):
            end = start + sum(1 for _ in group)
            if is_wanted:
                found.append(self.part(start, end))
            start = end
        return found

    def lasting_parts(self) -> list[Run]:
        """Return the blocks that the tier which keeps descriptions has announced, as runs."""
        bits = self.lasting
        return self.parts(bits >> index & 1 for index in range(len(self.keys)))

    def lookahead_of(self, index: int) -> list[list[int]]:
        """Return the later tokens that the hash of each hash-block of block ``index`` covers too."""
        ends = range(index * self.factor + 1, (index + 1) * self.factor + 1)
        return [self.token_ids[end * self.block_size : end * self.block_size + self.lookahead].tolist() for end in ends]


class Snapshots:
    """All snapshots, by key.

    Args:
        max_tokens: largest number of tokens in all runs. Beyond it the oldest runs are dropped, also if their blocks
            are in use; default: 2**24.
    """

    def __init__(self, max_tokens: int = MAX_SNAPSHOT_TOKENS) -> None:
        self.dropped = 0
        """Number of snapshots that were dropped while in use."""
        self.max_tokens = max_tokens
        """Largest number of tokens in all runs."""
        self.tokens = 0
        """Number of tokens in all runs."""
        self._numbers: dict[OffloadKey, int] = {}
        """Number of the run by key; the low bits are the index of the block in the run."""
        self._runs: dict[int, Run] = {}
        """Runs by number, oldest first."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._numbers

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._numbers)

    def lacks_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return True if none of ``keys`` has a snapshot."""
        return self._numbers.keys().isdisjoint(keys)

    def find(self, key: OffloadKey) -> tuple[Run, int] | None:
        """Return the run that describes ``key`` and the block's index in the run; None without a snapshot."""
        number = self._numbers.get(key)
        return None if number is None else (self._runs[number >> _SHIFT], number & _INDEX)

    def add(self, run: Run) -> None:
        """Add a run of at most :data:`RUN_BLOCKS` blocks; its blocks have no snapshots yet."""
        first = self._next << _SHIFT
        run.live = len(run.keys)
        self._numbers.update(zip(run.keys, range(first, first + run.live), strict=True))
        self._runs[self._next] = run
        self._next += 1
        self.tokens += len(run.token_ids)

    def discard(self, key: OffloadKey) -> None:
        """Forget the snapshot of ``key``; ignore a key without a snapshot."""
        number = self._numbers.pop(key, None)
        if number is not None:
            run = self._runs[number >> _SHIFT]
            run.live -= 1
            if not run.live:
                self._forget(number >> _SHIFT)

    def oldest_beyond_bound(self) -> Run | None:
        """Return the run to drop next; None while the bound is kept."""
        if self.tokens <= self.max_tokens:
            return None
        return next(iter(self._runs.values()), None)

    def used(self, run: Run) -> list[tuple[int, OffloadKey]]:
        """Return index and key of the blocks of ``run`` whose snapshots are in use."""
        found = ((index, key, self.find(key)) for index, key in enumerate(run.keys))
        return [(index, key) for index, key, place in found if place is not None and place[0] is run]

    def drop(self, run: Run) -> None:
        """Forget all snapshots of ``run``, and count those in use."""
        for _, key in self.used(run):
            self.dropped += 1
            self.discard(key)

    def _forget(self, run_number: int) -> None:
        self.tokens -= len(self._runs.pop(run_number).token_ids)
