"""Events of one tier, in the order in which its blocks were stored and removed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Protocol

from tiering.api.keys import OffloadKey
from tiering.api.manager import LOCAL, MEDIUM_CPU, MEDIUM_STORAGE, REMOTE, OffloadingEvent
from tiering.secondary.contract import MAX_EVENTS, Distance
from tiering.table.disposal import DISPOSAL, Table
from tiering.table.events import EventQueue

MAX_ANNOUNCED = 1 << 20
"""Largest number of keys on a shared medium that this process remembers having announced.

The oldest beyond it are announced as removed.
"""


class BlockNotes(Protocol):
    """Notes of the blocks that a tier alone writes and holds, which are always up to date."""

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Note that the tier holds ``keys``; it may have held some of them before."""

    def removed(self, keys: Sequence[OffloadKey]) -> None:
        """Note that the tier does not hold ``keys`` any more."""

    def clear(self) -> None:
        """Note that the tier holds nothing."""


class EventLog:
    """Collects the events of one tier until they are taken.

    On a medium that only this tier writes, all blocks that the index holds are announced. On a shared medium, the log
    announces a block once, when this process has stored or read it. The log announces the removal of announced
    blocks only.

    Args:
        tier: name of the tier.
        distance: distance of the medium. Events have the medium "CPU" for memory, "STORAGE" for all else, and the
            locality "REMOTE" on the network.
        enabled: False: the log collects nothing, until its attribute is set.
        shared: True if other processes write to the medium as well.
    """

    def __init__(self, tier: str, distance: Distance | None, *, enabled: bool, shared: bool) -> None:
        self._tier = tier
        self._medium = MEDIUM_CPU if distance == "process" else MEDIUM_STORAGE
        self._locality = REMOTE if distance == "network" else LOCAL
        self.enabled = enabled
        self._announced: OrderedDict[OffloadKey, None] | None = OrderedDict() if shared else None
        self._events = EventQueue()
        self.notes: BlockNotes | None = None
        """Notes of the blocks, which are kept also if the log collects nothing."""

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Announce that ``keys`` are readable on the medium."""
        if self.notes is not None:
            self.notes.stored(keys)
        if not self.enabled or not keys:
            return
        if self._announced is None:
            self._add(list(keys), removed=False)
        else:
            self._announce(self._announced, keys)

    def read(self, keys: Sequence[OffloadKey]) -> None:
        """Announce that ``keys`` were read from the medium, if it is shared: others may have stored them."""
        if self.enabled and self._announced is not None:
            self._announce(self._announced, keys)

    def removed(self, keys: Sequence[OffloadKey], *, evicted: bool = False) -> None:
        """Announce that ``keys`` are no longer held.

        Args:
            keys: the blocks.
            evicted: True if they were evicted for room; default False.
        """
        if self.notes is not None:
            self.notes.removed(keys)
        if not self.enabled or not keys:
            return
        gone = list(keys)
        if self._announced is not None:  # a service may send a key twice
            gone = [key for key in keys if self._announced.pop(key, key) is None]
        self._add(gone, removed=True, evicted=evicted, others=len(keys) - len(gone) if evicted else 0)

    def cleared(self, tables: Iterable[Table]) -> None:
        """Announce that no block is held any more.

        ``tables`` have all keys that the index held, and are not used again. The cost does not depend on their
        number.
        """
        if self.notes is not None:
            self.notes.clear()
        if self.enabled and self._announced is not None:
            DISPOSAL.add(tables)
            tables, self._announced = [self._announced], OrderedDict()
        if self.enabled:
            self._events.clear(self._event([], removed=True), tables)
        else:
            DISPOSAL.add(tables)

    def take(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, :data:`~tiering.secondary.contract.MAX_EVENTS` at most."""
        return self._events.take(MAX_EVENTS)

    def _announce(self, announced: OrderedDict[OffloadKey, None], keys: Sequence[OffloadKey]) -> None:
        """Announce those of ``keys`` that are not announced, and the removal of the oldest beyond the bound.

        Without these removals, consumers would keep those keys for ever.
        """
        new = [key for key in keys if key not in announced]
        self._add(new, removed=False)
        announced.update(zip(new, repeat(None), strict=False))
        surplus = len(announced) - MAX_ANNOUNCED
        if surplus > 0:
            self._add([announced.popitem(last=False)[0] for _ in range(surplus)], removed=True)

    def _add(self, keys: list[OffloadKey], *, removed: bool, evicted: bool = False, others: int = 0) -> None:
        if keys or others:
            self._events.add(self._event(keys, removed=removed, evicted=evicted, others=others))

    def _event(
        self, keys: list[OffloadKey], *, removed: bool, evicted: bool = False, others: int = 0
    ) -> OffloadingEvent:
        return OffloadingEvent(keys, self._medium, self._locality, self._tier, removed, evicted=evicted, others=others)
