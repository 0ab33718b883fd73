"""The described runs of an engine in the documents of a tier, from one start to the next.

Of a run, the blocks that the tier has announced are written: a request may have kept the others from the tier. New ones
are written every :data:`WRITE_SECONDS`, and at the end of the engine, into the present document. A full one is followed
by the next document, in turn; what it described and is still in use is written again, once. The runs that the
last engine wrote come back a few per step, those of the latest document first::

    gathering ── the tier has read its documents ──> restoring ── no run is left ──> writing
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
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

RUNS_PER_WRITE = 512
"""Most new runs of one writing, so that no step takes long; the next writing follows."""


@dataclass(slots=True)
class _Slot:
    """The runs of one document."""

    runs: dict[ReferenceType[Run], None] = field(default_factory=dict)
    """References in order, so that runs that describe nothing any more do not stay in memory."""
    size: int = 0

    def add(self, run: Run) -> None:
        """Add a run, once."""
        if (reference := ref(run)) not in self.runs:
            self.runs[reference] = None
            self.size += packed_size(run)

    def copy(self) -> _Slot:
        """Return a slot with the same runs, which can grow by itself."""
        return _Slot(dict(self.runs), self.size)

    def used(self) -> list[Run]:
        """Return the runs that describe blocks in use."""
        return [run for reference in self.runs if (run := reference()) is not None and run.live]


class DescribedRuns:
    """Writes the runs of new snapshots, and restores those of the last engine.

    Args:
        kept: the part of the tier that keeps them.
        restore: function that takes a run's description of blocks that are announced without one, and returns the runs
            that are in use now.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        kept: TierDescriptions,
        restore: Callable[[Run], Iterable[Run]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = kept.tier
        """Name of the tier that keeps the documents."""
        self._kept = kept
        self._restore = restore
        self._clock = clock
        self._slots = [_Slot() for _ in range(kept.slots)]
        self._present = 0
        """Slot of the present document."""
        self._number = 0
        """Number of the last content."""
        self._new: dict[ReferenceType[Run], None] = {}
        """Runs that have blocks in no document, in order."""
        self._most_new = 2 * RUNS_PER_WRITE
        """Number of new runs from which those that describe nothing any more are forgotten."""
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

    @property
    def waiting(self) -> int:
        """Number of runs that wait to be written, with those that describe nothing any more."""
        return len(self._new)

    def add(self, run: Run) -> None:
        """Write a run, which has more lasting blocks than before, with one of the next writings."""
        self._new[ref(run)] = None
        if len(self._new) >= self._most_new:
            self._new = {known: None for known in self._new if (used := known()) is not None and used.live}
            self._most_new = 2 * max(RUNS_PER_WRITE, len(self._new))

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
        elif not self._new or now < self._written + WRITE_SECONDS or self._kept.writing:
            return
        elif not self.write(RUNS_PER_WRITE) or not self._new:
            self._written = now

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

    def write(self, most: int | None = None) -> bool:
        """Begin to write new runs, ``most`` of them (None: all); return True if the tier takes them.

        Nothing is written before the documents were read.
        """
        if self._found is None or not self._new or self._kept.writing:
            return False
        present = self._present
        slots = {present: self._slots[present].copy()}
        new = list(islice(self._new, most))
        runs = list(new)
        for position, reference in enumerate(runs):
            run = reference()
            if run is None or not run.live:
                continue
            if slots[present].size >= DOCUMENT_BYTES:
                if len(slots) == len(self._slots):
                    break
                present = (present + 1) % len(self._slots)
                slots[present] = _Slot()
                if position < len(new):
                    runs += self._slots[present].runs
            slots[present].add(run)
        documents = [
            Description(slot, self._number + 1 + order, partial(_content, content.used()))
            for order, (slot, content) in enumerate(slots.items())
        ]
        if not self._kept.write(documents):
            return False
        self._present = present
        self._number += len(documents)
        for slot, content in slots.items():
            self._slots[slot] = content
        for reference in new:
            del self._new[reference]
        return True


def _content(runs: Iterable[Run]) -> bytes:
    return pack_runs((part for run in runs for part in run.lasting_parts()), MAX_RUNS_BYTES)
