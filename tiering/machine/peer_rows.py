"""The tier of the service whose medium is the rows of its engines: what one has, another copies.

The service makes the rows of engines with ``machine.keep_rows``, and records which blocks they hold
(:class:`~tiering.machine.regions.Regions`). Each row has a word in shared memory, which its engine changes when it
takes the row, before anything is written. A load reads the word, copies, looks at the word again, and compares the
digest of the copy with the recorded one. So no row is pinned, and no engine waits for another: it may be stopped, dead
or write as it likes. What cannot be copied is loaded from the disk within the same job, if that holds it
(:attr:`tiering.machine.hosted.HostedTier.pass_on`).

The service's thread calls all methods of the tier; threads of its own copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from tiering.api.keys import GROUP_BYTES, OffloadKey
from tiering.api.request import ReqContext
from tiering.machine.presence import PresenceTable
from tiering.runtime.pool import ThreadPool
from tiering.secondary.contract import (
    JobResult,
    SecondaryTierManager,
    TierContext,
    TierIntake,
    TierTraits,
    TransferJob,
)
from tiering.secondary.tier_stats import TierStats

COPY_THREADS = 4
"""Threads that copy blocks from one engine's rows to another's."""

LOAD_PART = 16
"""Largest number of blocks that one thread copies before it takes other work."""

DROPPED_PER_STEP = 1 << 12
"""Largest number of blocks of emptied records that one step drops."""

MOST_SOURCES = 3
"""Rows that are tried for one block, those with the most recent copies first."""


@dataclass(slots=True)
class HeldBlock:
    """The block that one row holds."""

    key: OffloadKey
    """Its key."""
    word: int
    """Word of the row since the block was complete."""
    digest: bytes
    """xxh3-128 of its bytes."""


class Holder(Protocol):
    """Rows of one engine, which may have ended."""

    rows: NDArray[np.uint8]
    """The rows."""
    words: NDArray[np.uint64]
    """A word per row, which the engine changes."""
    entries: dict[int, HeldBlock]
    """The recorded blocks by row."""

    def copied(self, keys: Sequence[OffloadKey]) -> None:
        """Take note that another engine has got blocks from these rows."""


class Source(NamedTuple):
    """A row that held a block when a load began."""

    holder: Holder
    rows: NDArray[np.uint8]
    words: NDArray[np.uint64]
    row: int
    block: HeldBlock

    def is_unchanged(self) -> bool:
        """Return True if the engine has not taken the row for another block."""
        return int(self.words[self.row]) == self.block.word


class _Copied(NamedTuple):
    job: TransferJob
    sources: Mapping[OffloadKey, Source]
    """The source of each block that has arrived."""
    corrupt: int
    nbytes: int
    seconds: float


class PeerRows(TierIntake, SecondaryTierManager):
    """The blocks in the kept rows of all engines of a namespace.

    Args:
        context: environment of the tier; its rows are those of all engines.
    """

    def __init__(self, context: TierContext) -> None:
        self.name = context.name
        self.traits = TierTraits(
            medium="PEERS", max_load_blocks=LOAD_PART, fill=False, announces_news=True, intake=self
        )
        self._rows: NDArray[np.uint8] = np.asarray(context.primary_view)
        self._groups = context.group_bytes
        self._news = context.news
        self._clock = context.clock
        self._pool = ThreadPool(f"kv-{context.name}", COPY_THREADS)
        self._held: dict[OffloadKey, list[tuple[Holder, int]]] = {}
        self._notes: PresenceTable | None = None
        self._gone: deque[tuple[Holder, dict[int, HeldBlock]]] = deque()
        """Emptied records whose blocks are still found; no load gets one."""
        self._running = 0
        self._ended: deque[_Copied] = deque()
        self._stats = TierStats()

    def note_blocks(self, notes: PresenceTable) -> None:
        """Keep ``notes`` of the blocks held, which engines read."""
        self._notes = notes

    def note(self, holder: Holder, row: int, key: OffloadKey) -> None:
        """Let loads find a block in a row."""
        holders = self._held.setdefault(key, [])
        holders.append((holder, row))
        if len(holders) == 1 and self._notes is not None:
            self._notes.stored((key,))

    def forget(self, holder: Holder, row: int, key: OffloadKey) -> None:
        """Let no load find a block in a row any more; a reset may have dropped it already."""
        holders = self._held.get(key, [])
        if (holder, row) in holders:
            holders.remove((holder, row))
            if not holders:
                del self._held[key]
                if self._notes is not None:
                    self._notes.removed((key,))

    def drop_all(self, holder: Holder, entries: dict[int, HeldBlock]) -> None:
        """Let no load find the blocks of a record that ``holder`` has emptied.

        The next steps drop them; the record is this tier's from then on.
        """
        if entries:
            self._gone.append((holder, entries))
            self._news.announce()

    def _drop_some(self) -> None:
        for _ in range(DROPPED_PER_STEP):
            if not self._gone:
                return
            holder, entries = self._gone[0]
            row, block = entries.popitem()
            self.forget(holder, row, block.key)
            if not entries:
                self._gone.popleft()
        self._news.announce()

    def _sources(self, key: OffloadKey) -> Sequence[Source]:
        """Return rows that hold a block now, the most recent ones first."""
        found = [
            Source(holder, holder.rows, holder.words, row, block)
            for holder, row in reversed(self._held.get(key, ()))
            if (block := holder.entries.get(row)) is not None and block.key == key
        ]
        return [*islice(filter(Source.is_unchanged, found), MOST_SOURCES)]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return key in self._held

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext, is_fill: bool) -> Sequence[int]:
        """Return nothing: blocks come here when engines have them in their rows."""
        return ()

    def submit_store(self, job: TransferJob) -> None:
        self._running += 1
        self._end(_Copied(job, {}, 0, 0, 0.0))

    def submit_load(self, job: TransferJob) -> None:
        self._running += 1
        wanted = [(key, int(row), self._sources(key)) for key, row in zip(job.keys, job.block_ids, strict=True)]
        self._pool.run(lambda: self._copy(job, wanted), lambda _: self._end(_Copied(job, {}, 0, 0, 0.0)))

    def _copy(self, job: TransferJob, wanted: Sequence[tuple[OffloadKey, int, Sequence[Source]]]) -> None:
        """Copy blocks; a thread of the pool calls this method."""
        arrived: dict[OffloadKey, Source] = {}
        corrupt, nbytes, begun = 0, 0, time.monotonic()
        for key, row, sources in wanted:
            target = self._rows[row, : self._groups[int.from_bytes(key[-GROUP_BYTES:], "big")]]
            for source in sources:
                if copy_block(source, target):
                    arrived[key] = source
                    nbytes += len(target)
                    break
                corrupt += source.is_unchanged()
        self._end(_Copied(job, arrived, corrupt, nbytes, time.monotonic() - begun))

    def _end(self, copied: _Copied) -> None:
        self._ended.append(copied)
        self._news.announce()

    def get_finished(self) -> Iterable[JobResult]:
        self._drop_some()
        results: list[JobResult] = []
        taken: dict[Holder, list[OffloadKey]] = {}
        while self._ended:
            job, sources, corrupt, nbytes, seconds = self._ended.popleft()
            self._running -= 1
            for key, source in sources.items():
                taken.setdefault(source.holder, []).append(key)
                if job.digests is not None:
                    job.digests[key] = source.block.digest
            stats = self._stats
            stats.promotions += len(sources)
            stats.promotions_failed += (len(job.keys) - len(sources)) * job.is_promotion
            stats.corrupt_blocks += corrupt
            stats.read_bytes += nbytes
            stats.read_seconds += seconds
            results.append(JobResult(job.job_id, len(sources) == len(job.keys), list(sources), nbytes, seconds))
        for holder, keys in taken.items():
            holder.copied(keys)
        return results

    def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
        """Find no block that was recorded before.

        Engines that were reset have taken their rows for other blocks, or do so before the tier serves them again.
        """
        self._held.clear()
        self._gone.clear()
        if self._notes is not None:
            self._notes.clear()
        return True

    def get_stats(self) -> TierStats:
        return replace(self._stats, blocks=len(self._held), job_latency=list(self._stats.job_latency))

    def open(self, deadline: float) -> bool:
        self._pool.start()
        return True

    def shutdown(self, deadline: float) -> bool:
        self._held.clear()
        self._gone.clear()
        self._notes = None  # the next tier of this name has them
        self._pool.stop()
        return self._pool.join(max(0.0, deadline - self._clock()))


def copy_block(source: Source, target: NDArray[np.uint8]) -> bool:
    """Copy a block, and return True if ``target`` has it."""
    if not source.is_unchanged():
        return False
    np.copyto(target, source.rows[source.row, : len(target)])
    # The word changes before a row is written, and the digest proves the rest: no order of reads has to be relied on.
    return source.is_unchanged() and xxh3_128_digest(target.data) == source.block.digest
