"""The described runs of an engine in the documents of a tier, from one start to the next.

New runs are written every :data:`WRITE_SECONDS`, and at the end of the engine, into the present document. A full one is
followed by the next document, in turn; what it described and is still in use is written again, once. The runs that the
last engine wrote come back a few per step, those of the latest document first::

    gathering ── the tier has read its documents ──> restoring ── no run is left ──> writing
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from weakref import ReferenceType, ref

from tiering.api.descriptions import Description, TierDescriptions
from tiering.connector.run_codec import pack_runs, packed_size, unpack_runs
from tiering.connector.snapshots import Run

WRITE_SECONDS = 30.0
"""Shortest time between two writings."""

GATHER_SECONDS = 10.0
"""Time for which an engine without requests steps until the tier has read its documents."""

DOCUMENT_BYTES = (1 << 20) - (64 << 10)
"""Size from which a document counts as full, with room for runs whose size was estimated too small."""

MAX_RUNS_BYTES = (1 << 20) - (1 << 10)
"""Largest size of the runs of one document."""

MOST_NUMBERS = 1 << 62
"""Number from which a document is not taken for one of an engine's."""

RUNS_PER_STEP = 2
"""Runs that one step restores at most."""


@dataclass(slots=True)
class _Slot:
    """The runs of one document."""

    runs: list[ReferenceType[Run]] = field(default_factory=list)
    """References, so that runs that describe nothing any more do not stay in memory."""
    size: int = 0

    def add(self, run: Run) -> None:
        """Add a run."""
        self.runs.append(ref(run))
        self.size += packed_size(run)

    def copy(self) -> _Slot:
        """Return a slot with the same runs, which can grow by itself."""
        return _Slot(list(self.runs), self.size)

    def used(self) -> list[Run]:
        """Return the runs that describe blocks in use."""
        return [run for reference in self.runs if (run := reference()) is not None and run.live]


class DescribedRuns:
    """Writes the runs of new snapshots, and restores those of the last engine.

    Args:
        kept: the part of the tier that keeps them.
        restore: function that takes a run's description of blocks that are announced without one, and returns the runs
            that are in use now.
        holds: function that returns True if the tier holds a block of a run. What it does not hold is not written: a
            request may have kept it from the tier.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        kept: TierDescriptions,
        restore: Callable[[Run], Iterable[Run]],
        holds: Callable[[Run], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept = kept
        self._restore = restore
        self._holds = holds
        self._clock = clock
        self._slots = [_Slot() for _ in range(kept.slots)]
        self._present = 0
        """Slot of the present document."""
        self._number = 0
        """Number of the last content."""
        self._new: list[ReferenceType[Run]] = []
        """Runs that are in no document."""
        self._found: deque[tuple[int, Run]] | None = None
        """Runs to restore, with their slots; None before the documents are read."""
        self._began = clock()
        self._written = -float("inf")

    @property
    def steps_idle(self) -> bool:
        """True if an engine without requests should step, because runs are gathered or restored."""
        if self._found is not None:
            return bool(self._found)
        return self._clock() < self._began + GATHER_SECONDS

    def add(self, run: Run) -> None:
        """Write a run with the next writing at which the tier holds a block of it."""
        self._new.append(ref(run))

    def step(self) -> None:
        """Gather, restore or write what is due."""
        now = self._clock()
        if self._found is None:
            self._gather()
        elif self._found:
            for _ in range(min(RUNS_PER_STEP, len(self._found))):
                slot, run = self._found.popleft()
                for used in self._restore(run):
                    self._slots[slot].add(used)
        elif self._new and now >= self._written + WRITE_SECONDS:
            self._written = now
            self.write()

    def _gather(self) -> None:
        documents = self._kept.gather(unpack_runs)
        if documents is None:
            return
        ordered = sorted(
            (
                document
                for document in documents
                if 0 <= document.slot < len(self._slots) and document.number < MOST_NUMBERS
            ),
            key=lambda document: -document.number,
        )
        self._found = deque((document.slot, run) for document in ordered for run in reversed(document.content))
        if ordered:
            self._number = ordered[0].number
            self._present = (ordered[0].slot + 1) % len(self._slots)

    def write(self) -> None:
        """Begin to write the runs that are in no document; nothing before the documents were read."""
        if self._found is None or not self._new or self._kept.writing:
            return
        present = self._present
        slots = {present: self._slots[present].copy()}
        runs, waiting = list(self._new), list[ReferenceType[Run]]()
        for position, reference in enumerate(runs):
            run = reference()
            if run is None or not run.live:
                continue
            if not self._holds(run):
                if position < len(self._new):
                    waiting.append(reference)
                continue
            if slots[present].size >= DOCUMENT_BYTES:
                if len(slots) == len(self._slots):
                    break
                present = (present + 1) % len(self._slots)
                slots[present] = _Slot()
                if position < len(self._new):
                    runs += self._slots[present].runs
            slots[present].add(run)
        if len(waiting) == len(self._new):
            return
        documents = [
            Description(slot, self._number + 1 + order, partial(pack_runs, content.used(), MAX_RUNS_BYTES))
            for order, (slot, content) in enumerate(slots.items())
        ]
        if self._kept.write(documents):
            self._present = present
            self._number += len(documents)
            for slot, content in slots.items():
                self._slots[slot] = content
            self._new = waiting
