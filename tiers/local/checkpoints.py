"""The checkpoints of a local tier: their schedule, and the copy of the index slice by slice."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiering.tier import SEQUENCE, Backoff, Chore, Namespace, store_errors
from tiers.local.checkpoint import CheckpointWriter
from tiers.local.store import Inspection, LocalParts

logger = logging.getLogger("kv_tiering.local")

SLICE_SLOTS = 8192
"""Slots copied for a checkpoint in one step."""

_LAST_SLICE_SLOTS = 1 << 17
"""Slots copied together at the tier's shutdown, when no step is waiting."""

RETRY_SECONDS = 30.0
"""Seconds from a failed checkpoint to the next one, at most."""


class Checkpoints(Chore):
    """Writes the checkpoints of one tier.

    Args:
        parts: parts of the tier, whose index is copied.
        interval: seconds between two checkpoints.
        namespace: returns the present namespace; None while the tier has none.
        examine: receives the comparison of the directory that precedes each checkpoint.
    """

    def __init__(
        self,
        parts: LocalParts,
        interval: float,
        namespace: Callable[[], Namespace | None],
        examine: Callable[[Inspection], object],
    ) -> None:
        super().__init__("checkpoint", parts.io, parts.clock, self._begin, Backoff(RETRY_SECONDS, jitter=0.0))
        self.changed = False
        """True if the index has changed since the last checkpoint."""
        self._name, self._store, self._index = parts.name, parts.store, parts.index
        self._interval = interval
        self._namespace = namespace
        self._examine = examine
        self._writer: CheckpointWriter | None = None
        self._position = 0
        """First slot that is not copied yet."""

    @property
    def copying(self) -> bool:
        """True if the next step copies slots for a checkpoint."""
        return self._writer is not None and not self.running

    def wait_an_interval(self) -> None:
        """Begin an interval before the next checkpoint."""
        self.due = self._clock() + self._interval

    def request(self) -> None:
        """Write a checkpoint in the next steps, without waiting for the end of the interval."""
        self.changed = True
        self.due = self._clock()

    def drop(self) -> None:
        """Drop the copy in progress, because it contains blocks that are gone."""
        if self._writer is not None:
            self._writer = None
            self.wake()

    def tick(self, now: float) -> None:
        """Copy the next slots of a checkpoint, or begin one that is due."""
        if self._writer is None:
            super().tick(now)
        elif not self.running:
            self._copy(self._writer, SLICE_SLOTS)

    def _begin(self) -> None:
        """Begin a checkpoint if the index has changed."""
        if self._writer is not None:
            return
        if not self.changed:
            self.wait_an_interval()
            return
        self.changed = False
        store = self._store
        marks = store.marks
        namespace = self._namespace()

        def begin() -> tuple[Inspection, int]:
            inspection = store.inspect()
            if inspection.moved is not None:
                return inspection, 0
            with store_errors("cannot begin a checkpoint"):
                return inspection, marks.begin()

        def begun(started: tuple[Inspection, int] | None, error: BaseException | None) -> None:
            if started is None:
                self._ended(None, error)
                return
            inspection, generation = started
            self._examine(inspection)
            if namespace is None or self._namespace() != namespace:
                self.wake()
                return
            self._position = 0
            self._writer = CheckpointWriter(store.segments, namespace.fingerprint, generation, SEQUENCE.take(1))

        self.run(begin, begun)

    def advance(self) -> bool:
        """Copy many slots, and return True when no checkpoint is being written.

        It does not bound the time of a step. Used at the tier's shutdown only.
        """
        if self._writer is not None and not self.running:
            self._copy(self._writer, _LAST_SLICE_SLOTS)
        return self._writer is None and not self.running

    def _copy(self, writer: CheckpointWriter, slots: int) -> None:
        """Copy the next ``slots`` slots for the I/O side, which completes the file after the last ones."""
        store = self._store
        stop = min(self._position + slots, store.geometry.num_slots)
        part, self._position = self._index.slice(self._position, stop), stop
        last = stop == store.geometry.num_slots

        def write() -> int:
            with store_errors("cannot write a checkpoint"):
                writer.add(part)
                if not last:
                    return 0
                blocks = writer.finish(store.segments.modified())
                store.marks.drop_before(writer.generation)
            return blocks

        def written(blocks: int | None, error: BaseException | None) -> None:
            if self._writer is not writer:  # dropped meanwhile
                self.wake()
            elif last or error is not None:
                self._writer = None
                self._ended(blocks, error)

        self.run(write, written)

    def _ended(self, blocks: int | None, error: BaseException | None) -> None:
        self.wait_an_interval()
        if error is None:
            self.succeeded()
            logger.debug("tier %s: checkpoint of %d blocks", self._name, blocks)
            return
        self.changed = True
        self.failed()
        if self.failures == 1:
            logger.warning("tier %s: %s; a restart would read more headers; it is tried again", self._name, error)
