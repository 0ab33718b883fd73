"""The local tier: a block tier with a slot index, kept over restarts.

Besides moving blocks, the tier does four things in the background. It recovers the directory's blocks, compares the
directory with the open store, adds segments ahead of need, and writes checkpoints. Each runs as a task on the I/O side.
The results are merged into the index here, in bounded pieces per step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from functools import partial

import numpy as np

from tiering.api.namespace import Namespace
from tiering.block_store import Done, Outcome, Place
from tiering.errors import ConfigError, OutOfSpaceError, StoreError, TemporaryStoreError
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.block_tier import BlockTier
from tiering.secondary.contract import TierContext
from tiering.secondary.files import Files, store_error
from tiering.secondary.index.slots import SlotIndex
from tiering.secondary.io.frame import SEQUENCE
from tiering.secondary.io.layers.breaker import BreakerState
from tiering.secondary.io.messages import IoKind, IoResult, IoTask
from tiering.secondary.io.side import IoSide
from tiers.local.bad_slots import BadSlots
from tiers.local.checkpoint import CheckpointBuilder, write_checkpoint
from tiers.local.feed import RecoveryFeed
from tiers.local.layout import Geometry, tier_directory
from tiers.local.new_segments import Pace
from tiers.local.options import LocalOptions
from tiers.local.recovery import Remembered, recover
from tiers.local.segments import Damage
from tiers.local.store import Inspection, LocalStore
from tiers.local.syncs import UnsyncedError

logger = logging.getLogger("kv_tiering.local")

SLICE_SLOTS = 32768
"""Slots copied for a checkpoint in one step."""

INSPECT_SECONDS = 10.0
"""Seconds between two inspections of the directory while blocks are stored."""

INSPECT_AT_ONCE_SECONDS = 1.0
"""Seconds from an inspection to the next one after a failed store."""

RETRY_CHECKPOINT_SECONDS = 30.0
"""Seconds from a failed checkpoint to the next one, at most."""

RETRY_SPACE_SECONDS = 60.0
"""Seconds from a full disk to the next attempt to add a segment."""

_LOG_PERIOD = 30.0

OPEN_WAIT_SECONDS = 2.0
"""Seconds that opening waits for recovery, at most.

The first requests after a restart find their blocks then. Recovery continues after that time.
"""


class LocalTier(BlockTier):
    """A tier of slots on a local disk. The package's docstring lists its guarantees.

    Args:
        context: The framework's context of the tier.
        options: The tier's options.
        files: Other file operations, for tests (default: the operating system's).
        io: Another I/O side, for tests (default: one of its own).

    Raises:
        ConfigError: ``options`` do not fit the model's blocks.
    """

    store: LocalStore
    index: SlotIndex
    options: LocalOptions

    def __init__(
        self, context: TierContext, options: LocalOptions, *, files: Files | None = None, io: IoSide | None = None
    ) -> None:
        try:
            geometry = Geometry.plan(options.capacity, max(context.group_bytes), options.segment_size)
        except ConfigError as error:
            raise ConfigError(f"tier {context.name}: {error}") from error
        store = LocalStore(
            tier_directory(options.path, context.replica),
            geometry,
            options.capacity,
            durable=options.durability == "fsync",
            files=files,
        )
        index = SlotIndex(
            geometry.num_slots,
            eviction=options.eviction,
            high_watermark=options.high_watermark,
            low_watermark=options.low_watermark,
        )
        super().__init__(context, options, store, index, io=io)
        self._stop = threading.Event()
        self._bad_slots = BadSlots(context.name, store, index, self.io, context.clock, self._stop)
        self._feed = RecoveryFeed(
            context.name,
            index,
            self.io,
            options.breaker,
            context.clock,
            self._stop,
            self.stats,
            self.announce_stored,
            self._recovered,
        )
        self._recovery_began = 0.0
        self._seen: set[int] = set()
        """Segments whose slots are in the index. A number that is returned again is not added again."""
        self._inspecting = False
        self._inspected_at = float("-inf")
        self._inspect_due = float("inf")
        self._inspection_lines = RateLimit(_LOG_PERIOD, context.clock)
        self._tidy_due = float("inf")
        self._starting_over = False
        """True if another directory is in place of the opened one.

        It is opened once the old one is not used any more.
        """
        self._closing_store = False
        self._open_is_due = False
        """True if the store was not closed since."""
        self._pace: Pace | None = None
        self._complete = False
        self._no_space_until = float("-inf")
        self._builder: CheckpointBuilder | None = None
        self._checkpointing = False
        self._checkpoint_failed = False
        self._checkpoint_due = float("inf")
        self._changed = False

    @property
    def recovering(self) -> bool:
        """True while slots are unseen because their content is not known yet."""
        return self._feed.active

    @property
    def checkpoint_pending(self) -> bool:
        """True if a checkpoint is being written or about to be written."""
        return self._checkpointing or (self._changed and self.context.clock() >= self._checkpoint_due)

    def request_checkpoint(self) -> None:
        """Write a checkpoint in the next steps, without waiting for the end of the interval."""
        self._changed = True
        self._checkpoint_due = self.context.clock()

    # ------------------------------------------------------------------------------------------------------------ hooks

    def open(self, deadline: float) -> bool:
        serving = super().open(deadline)
        if self._feed.active:
            self._wait(self._feed.push, min(deadline, self.context.clock() + OPEN_WAIT_SECONDS))
        return serving

    def on_opened(self, namespace: Namespace) -> None:
        store = self.store
        self._bad_slots.load(store.bad_slots)
        for number in store.fresh:
            self._add_segment(number)
        self._recovery_began = self.context.clock()
        self._checkpoint_due = self._recovery_began + self.options.checkpoint_interval
        remembered, store.remembered = store.remembered, Remembered()
        self._seen.update(remembered.segments)
        if remembered.segments:
            self._feed.begin(partial(recover, store.segments, remembered, namespace.fingerprint, self._stop))
        self._tidy_due = self.context.clock()
        self._grow()

    def on_left(self) -> None:
        self._feed.foreign = self._feed.active
        if self._builder is not None:
            self._builder = None
            self._checkpointing = False

    def on_epoch(self, namespace: Namespace) -> None:
        if self._starting_over:
            self._starting_over = False
            logger.warning("tier %s: %s is open again", self.name, self.store.directory)
            self.on_opened(namespace)
            return
        self._feed.foreign = self._feed.active
        self._changed = True
        # Until a checkpoint of this epoch is written, a restart would have to read every header.
        self._checkpoint_due = self.context.clock()

    def on_step(self) -> None:
        self._feed.tick()
        if self._starting_over:
            self._reopen()
        if self._closing_down:
            return
        if self.namespace is None:
            if self._opened and not self._starting_over:
                # A reset cannot succeed in a directory that is not there any more.
                self._want_inspection(INSPECT_SECONDS)
                if self.context.clock() >= self._inspect_due:
                    self._inspect()
            return
        self._bad_slots.tick()
        if self.context.clock() >= self._tidy_due:
            self._tidy()
        if self.io.breakers.state is not BreakerState.CLOSED or self._feed.failing:
            self._want_inspection(INSPECT_SECONDS)
        if self.context.clock() >= self._inspect_due:
            self._inspect()
        self._grow()
        if self._builder is not None:
            self._copy_slice(self._builder)
        elif self.context.clock() >= self._checkpoint_due:
            self._begin_checkpoint()

    def retire(self, places: Sequence[Place]) -> None:
        super().retire(places)
        self._bad_slots.add(places)

    def _suspect(self, places: Sequence[Place]) -> None:
        """Drop the blocks of ``places`` after a failed sync.

        One of the slots is bad; trials find out which one.
        """
        super().retire(places)
        self._bad_slots.add(places, suspect=True)

    def on_result(self, result: IoResult) -> None:
        failed = result.outcomes.count(Done.DONE) < len(result.outcomes)
        failed = failed and any(isinstance(outcome, StoreError) for outcome in result.outcomes)
        if failed or result.job.kind is IoKind.STORE:
            self._want_inspection(INSPECT_AT_ONCE_SECONDS if failed else INSPECT_SECONDS)
        suspects: list[Place] = [*self.store.take_suspects()]
        if failed:
            found = zip(result.job.places, result.outcomes, strict=True)
            suspects += [place for place, outcome in found if isinstance(outcome, UnsyncedError)]
        if suspects:
            self._suspect(suspects)
        if result.job.kind is not IoKind.STORE:
            return
        self._changed = True
        full = [position for position, outcome in enumerate(result.outcomes) if _is_full(outcome)] if failed else []
        if full:
            keys = [result.job.keys[position] for position in full]
            places = [result.job.places[position] for position in full]
            self.index.states.retire_full(keys, np.array(places, np.int64))
            self._out_of_space(f"{len(full)} block(s) could not be written; using {self.index.slots} slots")

    def revoked_places(self) -> Collection[Place]:
        return self.index.states.revoked

    def shutdown(self, deadline: float) -> bool:
        self.store.stop()  # before the jobs are awaited, because the creation of first segments is one of them
        return super().shutdown(deadline)

    def before_close(self, deadline: float) -> None:
        self._stop.set()
        if self._pace is not None:
            self._pace.abandon()
        self._bad_slots.save()
        self._wait(
            lambda: (
                self._advance_checkpoint() and not (self._feed.fetching or self._bad_slots.busy) and self._pace is None
            ),
            deadline,
        )
        if self.namespace is not None and not self._feed.active:
            self._inspect()
            self._wait(lambda: not self._inspecting, deadline)
        if self._changed and self.namespace is not None:
            self._begin_checkpoint()
            self._wait(self._advance_checkpoint, deadline)

    @property
    def _closing_down(self) -> bool:
        return self._stop.is_set()

    def _recovered(self) -> None:
        """Note the end of recovery: all blocks of the directory are merged."""
        self._want_inspection(0.0)
        self._changed = self._changed or self._feed.scanned
        if self._changed:
            self._checkpoint_due = self.context.clock()
        seconds = self.context.clock() - self._recovery_began
        logger.info(
            "tier %s: %d blocks recovered from %s in %.1f s",
            self.name,
            self.index.blocks,
            self.store.directory,
            seconds,
        )

    # --------------------------------------------------------------------------------------------------------- segments

    def _grow(self) -> None:
        """Add a segment ahead of need, so that slots that were written once are free."""
        free = self.index.free
        if self._pace is not None:
            if not free:
                self._pace.hurry()
            return
        if self._complete or free >= self.store.geometry.slots_per_segment or self._closing_down:
            return
        now = self.context.clock()
        if now < self._no_space_until:
            return
        if self.index.states.full:
            self.index.states.restore_full()
        pace = self._pace = Pace()
        per_segment = self.store.geometry.slots_per_segment
        taken = self._seen | {slot // per_segment for slot in self.index.states.leaving}

        def prepare() -> tuple[Inspection, int | None]:
            inspection = self.store.inspect()
            return inspection, None if inspection.moved else self.store.new_segments.add(pace, taken)

        self.io.run(IoTask("segment", prepare, self._grown, background=True))

    def _grown(self, found: tuple[Inspection, int | None] | None, error: BaseException | None) -> None:
        self._pace = None
        if found is None:
            self._out_of_space(str(error))
            return
        inspection, number = found
        self._inspected(inspection, None)
        if self._starting_over:
            return
        if number is not None:
            self._add_segment(number)
        elif not inspection.damaged:
            self._complete = not self.index.states.full

    def _add_segment(self, number: int) -> None:
        per_segment = self.store.geometry.slots_per_segment
        self._seen.add(number)
        self.index.add_free(number * per_segment + np.arange(per_segment))

    def _tidy(self) -> None:
        """Bring the directory within the capacity, in the background."""
        self._tidy_due = float("inf")
        self.io.run(IoTask("tidy", self.store.tidy, self._tidied, background=True))

    def _tidied(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            logger.warning("tier %s: %s; it is tried again", self.name, error)
            self._tidy_due = self.context.clock() + RETRY_SPACE_SECONDS

    def _out_of_space(self, reason: str) -> None:
        self._complete = False
        now = self.context.clock()
        if now >= self._no_space_until:
            logger.warning("tier %s: %s; trying again in %.0f s", self.name, reason, RETRY_SPACE_SECONDS)
        self._no_space_until = now + RETRY_SPACE_SECONDS

    # ------------------------------------------------------------------------------------------------------- inspection

    def _want_inspection(self, within: float) -> None:
        """Inspect the directory ``within`` seconds of the last inspection, or now if they have passed."""
        self._inspect_due = min(self._inspect_due, max(self.context.clock(), self._inspected_at + within))

    def _inspect(self) -> None:
        """Compare the directory with the open store, unless an inspection is running."""
        if self._inspecting:
            return
        self._inspecting = True
        self._inspect_due = float("inf")
        self.io.run(IoTask("inspect", self.store.inspect, self._inspected, background=True))

    def _inspected(self, inspection: Inspection | None, error: BaseException | None) -> None:
        self._inspecting = False
        self._inspected_at = self.context.clock()
        if inspection is None:
            if count := self._inspection_lines.admit():
                logger.warning("tier %s: %s (%d such failure(s)); it is tried again", self.name, error, count)
            self._want_inspection(INSPECT_SECONDS)
            return
        if inspection.moved is not None:
            self._start_over(inspection.moved, kept=inspection.kept)
        if self._feed.active:
            # Some slots of the damaged segments may be unseen. The directory is inspected again after recovery.
            return
        for damage in inspection.damaged:
            if self.store.segments.disown(damage):
                self._lose_segment(damage)

    def _start_over(self, moved: str, *, kept: bool) -> None:
        """Leave the directory that was opened, and open the one in its place."""
        if self._starting_over:
            return
        self._starting_over = self._open_is_due = True
        blocks = self.index.blocks
        if not kept:
            self.stats.blocks_lost += blocks
        fate = "it is opened again" if kept else f"its {blocks} block(s) are lost, and it is opened again"
        logger.error("tier %s: %s %s: %s", self.name, self.store.directory, moved, fate)
        self._feed.abandon()
        self.leave_medium()
        self.index.states.lose(0, self.index.num_slots)
        self._seen.clear()
        self._bad_slots.clear()
        self._complete = self._changed = False
        self._no_space_until = float("-inf")
        if self._pace is not None:
            self._pace.abandon()

    def _reopen(self) -> None:
        """Close the store once nothing uses it, and open it again."""
        busy = self._feed.fetching or self._inspecting or self._checkpointing or self._bad_slots.busy
        busy = busy or self._pace is not None or not self.idle
        if busy or self._closing_store or self._closing_down or self.index.states.leaving or not self._open_is_due:
            return
        self._closing_store = True
        self.io.run(IoTask("reopen", self.store.close, self._store_closed, background=True))

    def _store_closed(self, result: None, error: BaseException | None) -> None:
        self._closing_store = False
        if isinstance(error, TemporaryStoreError):
            # No thread was available for closing. The store is still open, and is closed in one of the next steps.
            return
        self._open_is_due = False
        if error is not None:
            logger.warning("tier %s: closing %s before it is opened again: %s", self.name, self.store.directory, error)
        self.enter_medium()

    def _lose_segment(self, damage: Damage) -> None:
        number = damage.number
        per_segment = self.store.geometry.slots_per_segment
        lost = self.index.states.lose(number * per_segment, (number + 1) * per_segment)
        self._bad_slots.forget(number * per_segment, (number + 1) * per_segment)
        self._seen.discard(number)
        self._complete = False
        self._changed = True
        if self._builder is not None:
            # The checkpoint's copy contains blocks that are gone.
            self._builder, self._checkpointing = None, False
        self.stats.blocks_lost += len(lost)
        self.announce_removed(lost)
        logger.error(
            "tier %s: segment %s %s: its %d block(s) are lost, and it is replaced; "
            "no other process may change files in %s",
            self.name,
            self.store.geometry.segment_name(number),
            damage.reason,
            len(lost),
            self.store.directory,
        )

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def _begin_checkpoint(self) -> None:
        if self._feed.active or self._checkpointing:
            return
        if not self._changed:
            self._checkpoint_due = self.context.clock() + self.options.checkpoint_interval
            return
        self._checkpointing = True
        self._changed = False
        marks = self.store.marks
        namespace = self.namespace

        def begin() -> tuple[Inspection, int]:
            inspection = self.store.inspect()
            if inspection.moved is not None:
                return inspection, 0
            try:
                return inspection, marks.begin()
            except OSError as error:
                raise store_error(error, "cannot begin a checkpoint") from error

        def begun(started: tuple[Inspection, int] | None, error: BaseException | None) -> None:
            if started is None:
                self._end_checkpoint(None, error)
                return
            inspection, generation = started
            self._inspected(inspection, None)
            if namespace is None or self.namespace != namespace:
                self._checkpointing = False
            else:
                geometry = self.store.geometry
                self._builder = CheckpointBuilder(geometry, namespace.fingerprint, generation, SEQUENCE.take(1))

        self.io.run(IoTask("checkpoint", begin, begun, background=True))

    def _copy_slice(self, builder: CheckpointBuilder) -> None:
        """Copy the next slots; after the last ones, write the checkpoint on the I/O side."""
        num_slots = self.store.geometry.num_slots
        builder.add(self.index.slice(builder.position, min(builder.position + SLICE_SLOTS, num_slots)))
        if builder.position < num_slots:
            return
        self._builder = None
        store = self.store

        def write() -> int:
            try:
                checkpoint = builder.finish(store.segments.modified())
                write_checkpoint(store.directory, checkpoint, store.files)
                store.marks.forget_before(checkpoint.generation)
            except OSError as error:
                raise store_error(error, "cannot write a checkpoint") from error
            return len(checkpoint)

        self.io.run(IoTask("checkpoint", write, self._end_checkpoint, background=True))

    def _end_checkpoint(self, blocks: int | None, error: BaseException | None) -> None:
        self._checkpointing = False
        self._checkpoint_due = self.context.clock() + self.options.checkpoint_interval
        if error is not None:
            self._changed = True
            self._checkpoint_due = min(self._checkpoint_due, self.context.clock() + RETRY_CHECKPOINT_SECONDS)
            if not self._checkpoint_failed:
                logger.warning("tier %s: %s; a restart would read more headers; it is tried again", self.name, error)
            self._checkpoint_failed = True
        elif blocks is not None:
            self._checkpoint_failed = False
            logger.debug("tier %s: checkpoint of %d blocks", self.name, blocks)

    def _advance_checkpoint(self) -> bool:
        """Complete the checkpoint's copy at once, and return True when no checkpoint is being written.

        It does not bound the time of a step. Used at the tier's shutdown only.
        """
        while self._builder is not None:
            self._copy_slice(self._builder)
        return not self._checkpointing


def _is_full(outcome: Outcome) -> bool:
    return isinstance(outcome, OutOfSpaceError)
