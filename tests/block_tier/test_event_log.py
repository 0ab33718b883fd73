"""The order and the bounds of a tier's events."""

from __future__ import annotations

import pytest

from tiering.api.manager import OffloadingEvent
from tiering.block_tier import event_log
from tiering.block_tier.event_log import EventLog
from tiering.secondary.contract import MAX_EVENTS, Distance
from tiering.testing.keys import keys_of

K = keys_of(*range(8))


def test_nothing_is_collected_unless_enabled() -> None:
    log = EventLog("local", "machine", enabled=False, shared=False)
    log.stored(K[:2])
    log.removed(K[:1])
    assert list(log.take()) == []


def test_a_medium_of_our_own_announces_every_removal() -> None:
    log = EventLog("local", "machine", enabled=True, shared=False)
    log.removed(K[:1])
    log.stored([])
    assert list(log.take()) == [OffloadingEvent(K[:1], "STORAGE", "LOCAL", "local", removed=True)]


def test_a_shared_medium_announces_removals_of_what_was_announced_only() -> None:
    log = EventLog("s3", "network", enabled=True, shared=True)
    log.stored(K[:2])
    log.removed(K[1:4])
    log.removed(K[1:2])
    assert list(log.take()) == [
        OffloadingEvent(K[:2], "STORAGE", "REMOTE", "s3", removed=False),
        OffloadingEvent(K[1:2], "STORAGE", "REMOTE", "s3", removed=True),
    ]


def test_evictions_of_what_was_not_announced_are_counted() -> None:
    log = EventLog("disk", "machine", enabled=True, shared=True)
    log.stored(K[:2])
    log.removed(K[1:4], evicted=True)
    log.removed(K[4:5], evicted=True)
    log.removed(K[5:6])
    assert [(event.keys, event.others) for event in log.take()] == [(K[:2], 0), (K[1:2], 2), ([], 1)]


def test_a_key_that_is_removed_twice_at_once_is_announced_once() -> None:
    """The list may come from another process."""
    log = EventLog("disk", "machine", enabled=True, shared=True)
    log.stored(K[:2])
    log.removed([K[0], K[1], K[0]])
    assert [(event.removed, event.keys) for event in log.take()] == [(False, K[:2]), (True, K[:2])]


def test_a_shared_medium_takes_back_what_it_can_no_longer_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_ANNOUNCED", 3)
    log = EventLog("s3", "network", enabled=True, shared=True)
    log.stored(K[:3])
    log.stored(K[3:5])
    assert list(log.take())[-1] == OffloadingEvent(K[:2], "STORAGE", "REMOTE", "s3", removed=True)
    log.removed(K[:1])
    assert list(log.take()) == []


def test_a_shared_medium_announces_once_what_is_stored_read_or_stored_again() -> None:
    log = EventLog("s3", "network", enabled=True, shared=True)
    log.read(K[:2])
    log.stored(K[:3])
    log.read(K[:3])
    assert [event.keys for event in log.take()] == [K[:2], K[2:3]]


def test_a_medium_of_our_own_knew_what_is_read() -> None:
    log = EventLog("local", "machine", enabled=True, shared=False)
    log.read(K[:2])
    assert list(log.take()) == []


def test_at_a_reset_everything_announced_is_removed_also_what_the_index_has_forgotten() -> None:
    log = EventLog("s3", "network", enabled=True, shared=True)
    log.stored(K[:3])
    log.cleared([dict.fromkeys(K[:1])])
    assert [(set(event.keys), event.removed) for event in log.take()] == [(set(K[:3]), False), (set(K[:3]), True)]


@pytest.mark.parametrize(
    ("distance", "told"),
    [
        ("process", ("CPU", "LOCAL")),
        ("machine", ("STORAGE", "LOCAL")),
        ("network", ("STORAGE", "REMOTE")),
        (None, ("STORAGE", "LOCAL")),
    ],
)
def test_events_say_the_words_that_routers_know(distance: Distance | None, told: tuple[str, str]) -> None:
    log = EventLog("t", distance, enabled=True, shared=False)
    log.stored(K[:1])
    assert [(event.medium, event.locality, event.tier) for event in log.take()] == [(*told, "t")]


def test_more_events_than_a_tier_may_return_at_once_follow_with_the_next_call() -> None:
    log = EventLog("local", "machine", enabled=True, shared=False)
    for _ in range(MAX_EVENTS + 1):
        log.removed(K[:1])
    log.stored(K[:1])
    assert len(list(log.take())) == MAX_EVENTS
    assert [event.removed for event in log.take()] == [True, False]
    assert list(log.take()) == []
