"""The order and the bounds of a tier's events."""

from __future__ import annotations

from tests.secondary.fakes import keys_of
from tiering.base import OffloadingEvent
from tiering.secondary.event_log import EventLog

K = keys_of(*range(8))


def test_nothing_is_collected_unless_enabled() -> None:
    log = EventLog("DISK", enabled=False, shared=False)
    log.stored(K[:2])
    log.removed(K[:1])
    assert list(log.take()) == []


def test_a_medium_of_our_own_announces_every_removal() -> None:
    log = EventLog("DISK", enabled=True, shared=False)
    log.removed(K[:1])
    log.stored([])
    assert list(log.take()) == [OffloadingEvent(K[:1], "DISK", removed=True)]


def test_a_shared_medium_announces_removals_of_what_was_announced_only() -> None:
    log = EventLog("OBJECT", enabled=True, shared=True)
    log.stored(K[:2])
    log.removed(K[1:4])
    log.removed(K[1:2])
    assert list(log.take()) == [OffloadingEvent(K[:2], "OBJECT", removed=False), OffloadingEvent(K[1:2], "OBJECT", removed=True)]


def test_a_shared_medium_takes_back_what_it_can_no_longer_remember() -> None:
    log = EventLog("OBJECT", enabled=True, shared=True, max_announced=3)
    log.stored(K[:3])
    log.stored(K[3:5])
    assert list(log.take())[-1] == OffloadingEvent(K[:2], "OBJECT", removed=True)
    log.removed(K[:1])
    assert list(log.take()) == []
