"""The jobs of engines at a tier of the service, and the reads that several of them wait for."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tiering.api.keys import GROUP_BYTES, OffloadKey
from tiering.api.request import ReqContext
from tiering.machine.counts import EngineCounts
from tiering.machine.messages import Record


class Engine(Protocol):
    """One connection of an engine, as its tier uses it."""

    name: str
    """Name of the connection, which precedes those of its requests."""
    tier: str
    """Name of the tier that the engine uses over this connection."""
    first_row: int
    """Number of the engine's first row among all rows."""
    num_rows: int
    """Number of the engine's rows."""
    weights: str
    """State of the weights that the engine computes with."""
    reset_at: float
    """Time of the engine's last reset, of the machine's monotonic clock; 0: it was never reset."""
    generation: int
    """Generation that the engine's rows belong to; -1 before it is known."""
    jobs: int
    """Number of jobs of the engine that have not ended."""
    counts: EngineCounts
    """Counts of the connection; those that are read off elsewhere are not kept here."""
    leaving: bool
    """True if nothing is read from the engine any more."""
    follows: bool
    """True if the engine gets the keys of the blocks that leave the tier."""

    @property
    def behind(self) -> bool:
        """True if the engine does not read what was sent; states and wishes can then wait."""

    def send(self, record: Record) -> None:
        """Send a record as soon as there is room."""


@dataclass(slots=True, eq=False)
class EngineJob:
    """A job of an engine."""

    engine: Engine
    """The engine."""
    number: int
    """Its number at the engine."""
    keys: Sequence[OffloadKey]
    """Its keys."""
    rows: Sequence[int]
    """Row of each key, among all rows."""
    request: ReqContext
    """The request, under a name that no other engine uses."""
    deadline: float
    """Time by which it should have ended."""
    is_load: bool
    """True for a load."""
    is_fill: bool
    """True for a store of blocks that were promoted."""
    arrived: bytearray
    """1 for each key that succeeded."""
    left: int
    """Number of keys whose outcome is not known."""

    def nbytes(self, groups: Sequence[int], positions: Sequence[int]) -> int:
        """Return the bytes of some of its blocks; ``groups`` are the bytes of a block per KV-cache group."""
        return sum(groups[int.from_bytes(self.keys[at][-GROUP_BYTES:], "big")] for at in positions)

    def count_outcome(self) -> None:
        """Add the outcome of all its keys to the counts of its engine."""
        counts, good = self.engine.counts, sum(self.arrived)
        counts.engine_rows_busy -= len(self.keys)
        counts.engine_failed_blocks += len(self.keys) - good
        if self.is_load:
            counts.engine_loaded_blocks += good
        else:
            counts.engine_stored_blocks += good


@dataclass(slots=True, eq=False)
class SharedRead:
    """A read of one block from the medium, and the rows that wait for it."""

    job: EngineJob
    """The job that reads it."""
    position: int
    """Position of the block in that job."""
    begun: bool = False
    """True once the tier has the read."""
    followers: list[tuple[EngineJob, int]] = field(default_factory=list)
    """Jobs, and the positions of the block in them."""

    def is_of(self, job: EngineJob, position: int) -> bool:
        """Return True if ``job`` reads the block, at this position."""
        return self.job is job and self.position == position

    def waits(self, job: EngineJob, position: int) -> bool:
        """Return True if ``job`` is to read the block there, and the tier does not have the read yet.

        Two parts of a job may have the same block: one that was queued before another engine's turn came earlier, and
        one that was queued after that engine gave up.
        """
        return not self.begun and self.is_of(job, position)


class Copies(NamedTuple):
    """A block that was read, and the rows that get a copy."""

    source: tuple[EngineJob, int]
    """Job of the read, and the position of the block in it."""
    targets: Sequence[tuple[EngineJob, int]]
    """Jobs that wait, and the positions of the block in them."""
    digest: bytes | None
    """xxh3-128 of the block; None: the tier noted none, and nothing can be copied."""


class LoadPart(NamedTuple):
    """Blocks of one job that the tier is to load in one piece."""

    job: EngineJob
    """The job."""
    positions: Sequence[int]
    """Positions of the blocks in it."""


@dataclass(slots=True)
class _Waiting:
    parts: deque[tuple[LoadPart, int]] = field(default_factory=deque)
    nbytes: int = 0
    credit: int = 0


class FairLoads:
    """Loads that wait for a tier, from which engines take turns by bytes: deficit round robin.

    Args:
        quantum: bytes that an engine may load per turn.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._engines: OrderedDict[Engine, _Waiting] = OrderedDict()

    def __bool__(self) -> bool:
        """Return True if some load waits."""
        return bool(self._engines)

    def nbytes(self, engine: Engine) -> int:
        """Return the bytes of the loads of ``engine`` that wait."""
        return self._engines[engine].nbytes if engine in self._engines else 0

    def add(self, part: LoadPart, nbytes: int) -> None:
        """Let a load of ``nbytes`` bytes wait for its turn."""
        waiting = self._engines.setdefault(part.job.engine, _Waiting())
        waiting.parts.append((part, nbytes))
        waiting.nbytes += nbytes

    def take(self) -> LoadPart:
        """Return the next load; one waits."""
        while True:
            engine, waiting = next(iter(self._engines.items()))
            if (nbytes := waiting.parts[0][1]) <= waiting.credit:
                waiting.credit -= nbytes
                return self._next_of(engine, waiting)
            waiting.credit += self._quantum
            self._engines.move_to_end(engine)

    def overdue(self, now: float) -> Sequence[LoadPart]:
        """Remove and return loads whose deadline is before ``now``; those behind another one follow later."""
        found = []
        for engine, waiting in list(self._engines.items()):
            while waiting.parts and waiting.parts[0][0].job.deadline < now:
                found.append(self._next_of(engine, waiting))
        return found

    def drop(self, engine: Engine) -> Sequence[LoadPart]:
        """Remove and return the loads of ``engine``."""
        return [part for part, _ in self._engines.pop(engine, _Waiting()).parts]

    def clear(self) -> None:
        """Remove all loads."""
        self._engines.clear()

    def _next_of(self, engine: Engine, waiting: _Waiting) -> LoadPart:
        part, nbytes = waiting.parts.popleft()
        waiting.nbytes -= nbytes
        if not waiting.parts:
            del self._engines[engine]
        return part


def copied(
    copies: Sequence[Copies], copy: Callable[[Copies, EngineJob, int], bool]
) -> list[tuple[EngineJob, int, bool]]:
    """Return the outcomes of ``copies``; ``copy`` returns True if a target has the block."""
    return [
        ended
        for each in copies
        for ended in ((*each.source, True), *((job, at, copy(each, job, at)) for job, at in each.targets))
    ]
