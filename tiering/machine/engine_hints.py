"""The hints that an engine gets from a tier of the service: hot keys, and the events of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.block_tier.event_log import EventLog
from tiering.machine.messages import MAX_KEYS, Kind, Record
from tiering.machine.presence import Presence
from tiering.secondary.contract import MAX_ENGINES, TierContext, TierHotKeys

KEYS_PER_ROW = 2
"""Hot keys that are asked for, per row.

Some of them no tier holds any more, or several engines have published.
"""


class MachineHints(TierHotKeys):
    """The hot keys and events of one tier, as an engine uses it; owned by the scheduler's thread.

    The service publishes what all its engines use: this part sends each prefix when it is used, and publishes nothing
    itself. An event announces a block when this engine has stored or read it, and its removal when the service has
    reported it. After a connection has ended, removals may have been missed: all blocks are then announced as removed.

    Args:
        context: environment of the tier.
        write: function that sends a record, and returns False if it cannot be sent.
        serves: function that returns True while the service serves the tier.
    """

    def __init__(self, context: TierContext, write: Callable[[Record], bool], serves: Callable[[], bool]) -> None:
        self._write = write
        self._serves = serves
        self.follows = context.enable_events
        """True if the engine's events are collected."""
        self._log = EventLog(context.name, context.distance, enabled=context.enable_events, shared=True)
        self._most = KEYS_PER_ROW * (context.primary_view.shape or (0,))[0]
        self._asks = 0
        self._is_asked = False
        self._found: list[list[Sequence[OffloadKey]]] = []
        """The runs of each engine that have come for the last question."""
        self._is_complete = False

    def used(self, keys: Sequence[OffloadKey]) -> None:
        # The tail first, because the service takes each record for a prefix, and the last one is the most recent.
        for first in reversed(range(0, len(keys), MAX_KEYS)):
            self._write(Record(Kind.USE, keys=keys[first : first + MAX_KEYS]))

    def gather(self) -> Sequence[Sequence[Sequence[OffloadKey]]] | None:
        if self._is_complete:
            found = [runs for runs in self._found if runs]
            self.forget()
            return found
        if not self._is_asked and self._serves():
            self._asks += 1
            self._found = [[] for _ in range(MAX_ENGINES)]
            self._is_asked = self._write(Record(Kind.GATHER, self._asks, seconds=float(self._most)))
        return None

    def forget(self) -> None:
        """Drop the question, whose answer may never come, and what has come of it."""
        self._is_asked = self._is_complete = False
        self._found = []
        self._asks += 1  # the rest of an answer does not count

    def take(self, record: Record) -> None:
        """Process a record of the service."""
        if record.kind == Kind.REMOVED:
            if record.keys:
                self._log.removed(record.keys, evicted=bool(record.flag))
            else:
                self._log.cleared(())
        elif record.kind == Kind.HOT and record.number == self._asks and self._is_asked:
            if not record.keys:
                self._is_complete = True
            elif record.flag < MAX_ENGINES:
                self._found[record.flag].append(record.keys)

    def stored(self, keys: Sequence[OffloadKey], presence: Presence | None) -> None:
        """Announce blocks that this engine has stored or read.

        A block may have left the tier before the service sent the result; its removal has come already then.

        Args:
            keys: the blocks.
            presence: the blocks that the tier holds, or None.
        """
        if presence is not None and self._log.enabled:
            keys = [key for key in keys if presence.leading((key,))]
        self._log.stored(keys)

    def cleared(self) -> None:
        """Announce that no block is held any more, or that it is not known which are."""
        self._log.cleared(())

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call."""
        return self._log.take()
