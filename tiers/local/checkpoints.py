"""The checkpoints of a local tier: their schedule, the copy of the index, and the writing of the file."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiering.tier import SEQUENCE, Backoff, Chore, IoSide, Namespace, SlotIndex, store_error
from tiers.local.checkpoint import CheckpointBuilder, write_checkpoint
from tiers.local.store import Inspection, LocalStore

logger = logging.getLogger("kv_tiering.local")

SLICE_SLOTS = 8192
"""Slots copied for a checkpoint in one step."""

RETRY_CHECKPOINT_SECONDS = 30.0
"""Seconds from a failed checkpoint to the next one, at most."""


class Checkpoints(Chore):
    """Writes the checkpoints of one tier.

    Args:
        name: the tier's name, for log lines.
        store: the tier's store.
        index: the index to copy.
        io: runs the tasks.
        clock: returns monotonic seconds.
        interval: seconds between two checkpoints.
        namespace: returns the present namespace; None while the tier has none.
        examine: receives the comparison of the directory that precedes each checkpoint.
    """

    def __init__(
        self,
        name: str,
        store: LocalStore,
        index: SlotIndex,
        io: IoSide,
        clock: Callable[[], float],
        interval: float,
        namespace: Callable[[], Namespace | None],
        examine: Callable[[Inspection], object],
    ) -> None:
        super().__init__("checkpoint", io, clock, self._begin, Backoff(RETRY_CHECKPOINT_SECONDS, jitter=0.0))
        self.changed = False
        """True if the index has changed since the last checkpoint."""
        self._name = name
        self._store = store
        self._index = index
        self._interval = interval
        self._namespace = namespace
        self._examine = examine
        self._builder: CheckpointBuilder | None = None

    @property
    def pending(self) -> bool:
        """True if a checkpoint is being written or about to be written."""
        return self.running or (self.changed and self._clock() >= self.due)

    @property
    def copying(self) -> bool:
        """True while each step copies slots for a checkpoint."""
        return self._builder is not None

    def wait_an_interval(self) -> None:
        """Begin an interval before the next checkpoint."""
        self.due = self._clock() + self._interval

    def request(self) -> None:
        """Write a checkpoint in the next steps, without waiting for the end of the interval."""
        self.changed = True
        self.due = self._clock()

    def drop(self) -> None:
        """Drop the copy in progress, because it contains blocks that are gone."""
        if self._builder is not None:
            self._builder, self.running = None, False
            self.wake()

    def tick(self, now: float) -> None:
        """Copy the next slots of a checkpoint, or begin one that is due."""
        if self._builder is not None:
            self._copy_slice(self._builder)
        else:
            super().tick(now)

    def _begin(self) -> None:
        """Begin a checkpoint if the index has changed."""
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
            try:
                return inspection, marks.begin()
            except OSError as error:
                raise store_error(error, "cannot begin a checkpoint") from error

        def begun(started: tuple[Inspection, int] | None, error: BaseException | None) -> None:
            if started is None:
                self._ended(None, error)
                return
            inspection, generation = started
            self._examine(inspection)
            if namespace is None or self._namespace() != namespace:
                self.wake()
                return
            sequence = SEQUENCE.take(1)
            self._builder = CheckpointBuilder(store.geometry, namespace.fingerprint, generation, sequence)
            self.running = True  # until the copy is written

        self.run(begin, begun)

    def advance(self) -> bool:
        """Complete the copy at once, and return True when no checkpoint is being written.

        It does not bound the time of a step. Used at the tier's shutdown only.
        """
        while self._builder is not None:
            self._copy_slice(self._builder)
        return not self.running

    def _copy_slice(self, builder: CheckpointBuilder) -> None:
        """Copy the next slots; after the last ones, write the checkpoint on the I/O side."""
        if not builder.copy(self._index, SLICE_SLOTS):
            return
        store = self._store
        self._builder = None

        def write() -> int:
            try:
                blocks = write_checkpoint(store.directory, builder, store.files, store.segments.modified())
                store.marks.drop_before(builder.generation)
            except OSError as error:
                raise store_error(error, "cannot write a checkpoint") from error
            return blocks

        self.run(write, self._ended)

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
