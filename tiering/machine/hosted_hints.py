"""The hints of a tier of the service for its engines: hot keys, and blocks that have left the tier.

Engines send the prefixes that their requests use, and the service publishes those of all engines together. An engine
that starts asks for what was published. Engines that follow events get the keys of the blocks that have left the tier,
before the results that come later. What an engine has stored or read itself needs no message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from tiering.api.keys import GROUP_BYTES, OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.block_tier.tier import BlockTier
from tiering.machine.engine_jobs import Engine
from tiering.machine.messages import MAX_KEY_BYTES, MAX_KEYS, Kind, Record
from tiering.secondary.contract import MAX_ENGINES, SecondaryTierManager, TierHotKeys
from tiering.secondary.hot_prefixes import HotPrefixes

MOST_HOT = 1 << 14
"""Largest number of keys that one engine gets for its warm start."""

RUN_KEYS = 4
"""Keys that each run counts more than it has, because each is a record of its own."""

EVENTS_PER_STEP = 64
"""Number of times that a step takes events.

A reset may remove millions of keys, which a tier returns some thousands at a time.
"""


class HostedHints:
    """The hints of one tier; the service's thread calls all methods.

    Args:
        tier: the tier.
    """

    def __init__(self, tier: SecondaryTierManager) -> None:
        self._tier = tier
        self._hot = TierHotKeys() if tier.traits.hot_keys is None else tier.traits.hot_keys
        self._prefixes = HotPrefixes()
        self._asking: dict[Engine, Record] = {}
        """The last question of each engine that waits for hot keys."""
        self._lost: set[Engine] = set()
        """Engines that were too far behind for some events."""
        self._first = 0
        """Order of the first event that counts; those before are of blocks that a reset has invalidated."""

    @property
    def busy(self) -> bool:
        """True if an engine waits for hot keys."""
        return bool(self._asking)

    def follow(self) -> None:
        """Let the tier collect events, because an engine that follows them is about to use it."""
        if isinstance(self._tier, BlockTier):
            self._tier.collect_events()

    def take_use(self, record: Record) -> None:
        """Record that a request of an engine used a prefix which may be published."""
        if record.keys:
            self._prefixes.used(record.keys)

    def take_question(self, engine: Engine, record: Record) -> None:
        """Record that an engine asks for hot keys; ``seconds`` is the largest number of keys."""
        self._asking[engine] = record

    def leave(self, engine: Engine) -> None:
        """Drop what ``engine`` waits for."""
        self._asking.pop(engine, None)
        self._lost.discard(engine)

    def reset(self) -> None:
        """Drop what was used, and the events until now, because all blocks are invalid."""
        self._prefixes.clear()
        self._asking.clear()
        self._first = OffloadingEvent([], "", "", "", removed=True).order

    def publish(self, now: float) -> None:
        """Let the tier begin to write what the requests of all engines used."""
        if chains := self._prefixes.take(now):
            self._hot.publish(chains)

    def step(self, now: float, engines: Sequence[Engine]) -> None:
        """Publish if it is due, answer questions, and send events.

        Args:
            now: seconds of the service's clock.
            engines: the engines whose blocks may meet those of the tier.
        """
        if self._prefixes.is_due(now):
            self.publish(now)
        # An engine that reads nothing gets one answer: its later questions wait.
        ready = [engine for engine in self._asking if not engine.behind]
        if ready and (found := self._hot.gather()) is not None:
            for engine in ready:
                record = self._asking.pop(engine)
                if engine in engines:
                    self._answer(engine, record, found[:MAX_ENGINES])
        followers = [engine for engine in engines if engine.follows]
        for engine in [engine for engine in self._lost if not engine.behind]:
            self._lost.discard(engine)
            engine.send(Record(Kind.REMOVED))
        for _ in range(EVENTS_PER_STEP):
            events = list(self._tier.take_events())
            if not events:
                break
            removed = [event for event in events if followers and event.removed and event.order >= self._first]
            for evicted, some in groupby(removed, attrgetter("evicted")):
                self._send_removed([key for event in some for key in event.keys], evicted, followers)

    @staticmethod
    def _answer(engine: Engine, record: Record, found: Sequence[Sequence[Sequence[OffloadKey]]]) -> None:
        """Send the runs of all sources in turn, as many as the engine wants, and a record without keys."""
        left = min(MOST_HOT, int(record.seconds))
        for source, run in _in_turn(found):
            if left <= 0:
                break
            for keys in _sendable(run[:MAX_KEYS]):
                left -= len(keys) + RUN_KEYS
                engine.send(Record(Kind.HOT, record.number, flag=source, keys=keys))
        engine.send(Record(Kind.HOT, record.number))

    def _send_removed(self, removed: Sequence[OffloadKey], evicted: bool, engines: Sequence[Engine]) -> None:
        """Send keys in few records, because an engine with many that wait is behind."""
        for first in range(0, len(removed), MAX_KEYS):
            for keys in _sendable(removed[first : first + MAX_KEYS]):
                for engine in engines:
                    if engine.behind:
                        self._lost.add(engine)
                    elif engine not in self._lost:
                        engine.send(Record(Kind.REMOVED, flag=int(evicted), keys=keys))


def _sendable(keys: Sequence[OffloadKey]) -> Iterable[Sequence[OffloadKey]]:
    """Return ``keys`` by their length, because a record has keys of one length.

    A medium may have keys of other lengths than those of its engines. Those that no message can have are left out.
    """
    by_length: dict[int, list[OffloadKey]] = {}
    for key in keys:
        by_length.setdefault(len(key), []).append(key)
    return [found for length, found in by_length.items() if GROUP_BYTES < length <= MAX_KEY_BYTES]


def _in_turn(found: Sequence[Sequence[Sequence[OffloadKey]]]) -> Iterable[tuple[int, Sequence[OffloadKey]]]:
    """Yield the runs of several sources in turn, each with the number of its source."""
    for at in range(max(map(len, found), default=0)):
        for source, runs in enumerate(found):
            if at < len(runs):
                yield source, runs[at]
