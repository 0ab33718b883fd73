"""The local tier: a block tier with a slot index, kept over restarts.

Besides moving blocks, the tier does four things in the background. It recovers the directory's blocks, compares the
directory with the open store, adds segments ahead of need, and writes checkpoints. Each runs as a task on the I/O side.
The results are merged into the index here, in bounded pieces per step.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence

from tiering import ConfigError, OutOfSpaceError, StoreError, TemporaryStoreError
from tiering.tier import (
    Backoff,
    BlockTier,
    Chore,
    Done,
    Files,
    Namespace,
    Place,
    RateLimit,
    SlotIndex,
    TierContext,
    TransferJob,
)
from tiers.local.bad_slots import BadSlots
from tiers.local.checkpoints import Checkpoints
from tiers.local.feed import RecoveryFeed
from tiers.local.growth import Growth
from tiers.local.layout import SegmentGeometry, tier_directory
from tiers.local.local_options import LocalOptions
from tiers.local.recovery import Remembered, recover
from tiers.local.segments import Damage, UnsyncedError
from tiers.local.store import Inspection, LocalParts, LocalStore

logger = logging.getLogger("kv_tiering.local")

OPEN_WAIT_SECONDS = 2.0
"""Seconds that opening waits for recovery, at most.

The first requests after a restart find their blocks then. Recovery continues after that time.
"""

INSPECT_SECONDS = 10.0
"""Seconds between two inspections of the directory while blocks are stored."""

INSPECT_AT_ONCE_SECONDS = 1.0
"""Seconds from an inspection to the next one after a failed store."""

_LOG_PERIOD = 30.0


class LocalTier(BlockTier):
    """A tier of slots on a local disk. The package's docstring lists its guarantees.

    Args:
        context: the framework's context of the tier.
        options: the tier's options.
        files: other file operations, for tests; default: the operating system's.

    Raises:
        ConfigError: ``options`` do not fit the model's blocks.
    """

    store: LocalStore
    index: SlotIndex
    options: LocalOptions

    def __init__(self, context: TierContext, options: LocalOptions, *, files: Files | None = None) -> None:
        try:
            geometry = SegmentGeometry.plan(options.capacity, max(context.group_bytes), options.segment_size)
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
        super().__init__(context, options, store, index)
        self._stop = threading.Event()
        self._closing_down = False
        parts = LocalParts(context.name, store, index, self.io, context.clock, self._stop)
        attempts = options.breaker.probe_after, options.breaker.probe_max
        self._bad_slots = BadSlots(parts)
        self._feed = RecoveryFeed(parts, Backoff(*attempts), self.stats, self.announce_stored, self._recovered)
        self._growth = Growth(
            parts,
            self._examine_between,
            lambda: self._jobs.places_wanted,
            lambda: self._feed.active and not self._feed.failing,
            self._note_change,
        )
        self._inspections = Inspections(parts, self._examine)
        self.checkpoints = Checkpoints(
            parts, options.checkpoint_interval, lambda: self.namespace, self._examine_between
        )
        self._recovery_began = 0.0
        self._closing = Chore("reopen", self.io, context.clock, self._close_store)
        """Closes a store whose directory is to be opened again."""
        self._reopenings = Backoff(*attempts)
        self._kept_until = float("-inf")
        """Time until which a directory whose blocks are kept is not opened again; it serves meanwhile."""
        self._starting_over = False
        """True if another directory is in place of the opened one.

        It is opened once the old one is not used any more.
        """

    @property
    def recovering(self) -> bool:
        """True while slots are unseen because their content is not known yet."""
        return self._feed.active

    def open(self, deadline: float) -> bool:
        serving = super().open(deadline)
        if self._feed.active:
            self.wait(self._feed.push, min(deadline, self.context.clock() + OPEN_WAIT_SECONDS))
        return serving

    def on_opened(self, namespace: Namespace) -> None:
        store = self.store
        self._bad_slots.load(store.bad_slots)
        self._recovery_began = self.context.clock()
        self.checkpoints.wait_an_interval()
        remembered, store.remembered = store.remembered, Remembered()
        if remembered.segments:
            self._feed.begin(recover(store.segments, remembered, namespace.fingerprint, self._stop))
        self._growth.begin(remembered.segments, store.fresh)

    def on_left(self) -> None:
        self._feed.foreign = self._feed.active
        self.checkpoints.drop()

    def on_epoch(self, namespace: Namespace) -> None:
        if self._starting_over:
            self._starting_over = False
            logger.warning("tier %s: %s is open again", self.name, self.store.directory)
            self.on_opened(namespace)
            return
        self._feed.foreign = self._feed.active
        # Until a checkpoint of this epoch is written, a restart would have to read every header.
        self.checkpoints.request()

    def on_step(self) -> float:
        feed, now = self._feed, self._clock()
        recovers = feed.active
        if recovers:
            feed.tick(now)
            recovers = feed.active
        if now >= self._closing.due:
            self._closing.tick(now)
        if self._closing_down:
            return 0.0
        if self._life.namespace is None:
            if self.opened and not self._starting_over:
                # A reset cannot succeed in a directory that is not there any more.
                self._inspections.want()
                self._inspections.tick(now)
            return 0.0
        breakers = self.io.breakers
        self._bad_slots.tick(now)
        # The state of a closed breaker is 0.
        if breakers.reads.state or breakers.writes.state or (recovers and feed.failing):
            self._inspections.want()
        if now >= self._inspections.due:
            self._inspections.tick(now)
        self._growth.tick(now)
        # While recovery runs, the index does not have all blocks.
        if not recovers and (self.checkpoints.copying or now >= self.checkpoints.due):
            self.checkpoints.tick(now)
        return 0.0 if recovers or self._starting_over else math.inf

    def retire(self, places: Sequence[Place]) -> None:
        super().retire(places)
        self._bad_slots.add(places)

    def _suspect(self, places: Sequence[Place]) -> None:
        """Drop the blocks of ``places`` after a failed sync.

        One of the slots is bad; trials find out which one.
        """
        super().retire(places)
        self._bad_slots.add(places, suspect=True)

    def on_result(self, job: TransferJob) -> None:
        failed = job.outcomes.count(Done.DONE) < len(job.outcomes)
        failed = failed and any(isinstance(outcome, StoreError) for outcome in job.outcomes)
        if failed:
            self._inspections.hurry()
        elif not job.is_promotion:
            self._inspections.want()
        suspects: list[Place] = [*self.store.take_suspects()]
        if failed:
            found = zip(job.places, job.outcomes, strict=True)
            suspects += [place for place, outcome in found if isinstance(outcome, UnsyncedError)]
        if suspects:
            self._suspect(suspects)
        if job.is_promotion:
            return
        self.checkpoints.changed = True
        if failed and (full := [outcome for outcome in job.outcomes if isinstance(outcome, OutOfSpaceError)]):
            self._growth.writes_refused(len(full), str(full[0]))

    def _note_change(self) -> None:
        self.checkpoints.changed = True

    def revoked_places(self) -> Collection[Place]:
        states = self.index.states
        return states.revoked if states.leaving or states.bad else ()

    def shutdown(self, deadline: float) -> bool:
        self.store.stop()  # before the jobs are awaited, because the creation of first segments is one of them
        return super().shutdown(deadline)

    def before_close(self, deadline: float) -> None:
        self._closing_down = True
        self._stop.set()
        self._growth.stop()
        self._bad_slots.save()
        self.wait(lambda: self.checkpoints.advance() and not self._in_background, deadline)
        if self.namespace is not None and not self._feed.active:
            self._inspections.start()
            self.wait(lambda: not self._inspections.running, deadline)
            self.checkpoints.start()
            self.wait(self.checkpoints.advance, deadline)

    @property
    def _in_background(self) -> bool:
        """True while a task of recovery, of bad slots or of growth is running."""
        return self._feed.running or self._bad_slots.busy or self._growth.running

    def _recovered(self) -> None:
        """Note the end of recovery: all blocks of the directory are merged."""
        self._inspections.hurry(now=True)
        if self.checkpoints.changed or self._feed.scanned:
            self.checkpoints.request()
        seconds = self.context.clock() - self._recovery_began
        logger.info(
            "tier %s: %d blocks recovered from %s in %.1f s",
            self.name,
            self.index.blocks,
            self.store.directory,
            seconds,
        )

    def _examine_between(self, inspection: Inspection) -> bool:
        """Examine an inspection by another task; return True if the directory is still the opened one."""
        self._inspections.note()
        self._examine(inspection)
        return not self._starting_over

    def _examine(self, inspection: Inspection) -> None:
        now = self._clock()
        if inspection.moved is not None and (not inspection.kept or now >= self._kept_until):
            self._kept_until = now + self._reopenings.failed()
            self._start_over(inspection.moved, kept=inspection.kept)
        if self._feed.active:
            # Some slots of the damaged segments may be unseen. The directory is inspected again after recovery.
            return
        for damage in inspection.damaged:
            if self.store.segments.disown(damage):
                self._drop_segment(damage)

    def _start_over(self, moved: str, *, kept: bool) -> None:
        """Leave the directory that was opened, and open the one in its place."""
        if self._starting_over:
            return
        self._starting_over = True
        self._closing.wake()
        self.stats.reopened += 1
        blocks = self.index.blocks
        if not kept:
            self.stats.blocks_lost += blocks
        fate = "it is opened again" if kept else f"its {blocks} block(s) are lost, and it is opened again"
        logger.error("tier %s: %s %s: %s", self.name, self.store.directory, moved, fate)
        self._feed.drop()
        self.leave_medium()
        self.index.states.fail(0, self.index.num_slots)
        self._bad_slots.clear()
        self.checkpoints.changed = False
        self._growth.start_over()

    def _close_store(self) -> None:
        """Close the store once nothing uses it, and open it again."""
        busy = self._in_background or self._inspections.running or self.checkpoints.running or not self.idle
        if not (busy or self._closing_down or self.index.states.leaving):
            self._closing.run(self.store.close, self._store_closed)

    def _store_closed(self, result: None, error: BaseException | None) -> None:
        if isinstance(error, TemporaryStoreError):
            # No thread was available for closing. The store is still open, and is closed in one of the next steps.
            self._closing.wake()
            return
        if error is not None:
            logger.warning("tier %s: closing %s before it is opened again: %s", self.name, self.store.directory, error)
        self.enter_medium()

    def _drop_segment(self, damage: Damage) -> None:
        number = damage.number
        per_segment = self.store.geometry.slots_per_segment
        lost = self.index.states.fail(number * per_segment, (number + 1) * per_segment)
        self._bad_slots.drop(number * per_segment, (number + 1) * per_segment)
        self._growth.drop(number)
        self.checkpoints.changed = True
        self.checkpoints.drop()
        self.announce_removed(lost)
        name = self.store.geometry.segment_name(number)
        if damage.dropped:
            self.stats.evictions += len(lost)
            logger.warning("tier %s: segment %s %s: it held %d block(s)", self.name, name, damage.reason, len(lost))
            return
        self.stats.blocks_lost += len(lost)
        logger.error(
            "tier %s: segment %s %s: its %d block(s) are lost, and it is replaced; "
            "no other process may change files in %s",
            self.name,
            name,
            damage.reason,
            len(lost),
            self.store.directory,
        )


class Inspections(Chore):
    """Compares the directory of one tier with the open store.

    Args:
        parts: parts of the tier.
        examine: receives the differences.
    """

    def __init__(self, parts: LocalParts, examine: Callable[[Inspection], object]) -> None:
        super().__init__("inspect", parts.io, parts.clock, lambda: self.run(parts.store.inspect, self._ended))
        self._name = parts.name
        self._examine = examine
        self._at = float("-inf")
        self._lines = RateLimit(_LOG_PERIOD, parts.clock)

    def want(self) -> None:
        """Inspect the directory in the ordinary time after the last inspection, or now if that has passed."""
        self.due = min(self.due, self._at + INSPECT_SECONDS)

    def hurry(self, *, now: bool = False) -> None:
        """Inspect the directory soon after the last inspection, for a reason.

        Args:
            now: do not wait after the last inspection; default: False.
        """
        self.due = min(self.due, self._at + (0.0 if now else INSPECT_AT_ONCE_SECONDS))

    def note(self) -> None:
        """Note that another task has inspected the directory now."""
        self._at = self._clock()

    def _ended(self, inspection: Inspection | None, error: BaseException | None) -> None:
        self.note()
        if inspection is not None:
            self._examine(inspection)
            return
        if count := self._lines.admit():
            logger.warning("tier %s: %s (%d such failure(s)); it is tried again", self._name, error, count)
        self.want()
