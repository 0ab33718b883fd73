"""The jobs of engines at a tier of the service, and the reads that several of them wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.machine.counts import EngineCounts
from tiering.machine.messages import Record


class Engine(Protocol):
    """One connection of an engine, as its tier uses it."""

    name: str
    """Name of the connection, which precedes those of its requests."""
    first_row: int
    """Number of the engine's first row among all rows."""
    num_rows: int
    """Number of the engine's rows."""
    weights: str
    """State of the weights that the engine computes with."""
    generation: int
    """Generation that the engine's rows belong to; -1 before it is known."""
    jobs: int
    """Number of jobs of the engine that have not ended."""
    counts: EngineCounts
    """Counts of the connection; those that are read off elsewhere are not kept here."""
    leaving: bool
    """True if nothing is read from the engine any more."""

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


@dataclass(slots=True, eq=False)
class SharedRead:
    """A read of one block from the medium, and the rows that wait for it."""

    row: int
    followers: list[tuple[EngineJob, int]] = field(default_factory=list)
    """Jobs, and the positions of the block in them."""


class Copies(NamedTuple):
    """A block that was read, and the rows that get a copy."""

    source: tuple[EngineJob, int]
    """Job of the read, and the position of the block in it."""
    targets: Sequence[tuple[EngineJob, int]]
    """Jobs that wait, and the positions of the block in them."""
    digest: bytes | None
    """xxh3-128 of the block; None: the tier noted none, and nothing can be copied."""


def copied(
    copies: Sequence[Copies], copy: Callable[[Copies, EngineJob, int], bool]
) -> list[tuple[EngineJob, int, bool]]:
    """Return the outcomes of ``copies``; ``copy`` returns True if a target has the block."""
    return [
        ended
        for each in copies
        for ended in ((*each.source, True), *((job, at, copy(each, job, at)) for job, at in each.targets))
    ]
