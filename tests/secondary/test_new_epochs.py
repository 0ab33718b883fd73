"""A tier that notices a new common epoch stays where it is until the manager lets it follow."""

from __future__ import annotations

import pytest

from tests.secondary.rig import CTX, K, Rig
from tiering.errors import TemporaryStoreError
from tiering.secondary.contract import PrefixAnswer
from tiering.secondary.service.common_epoch import LOOK_SECONDS, SETTLE_SECONDS, begin_common


def begin(rig: Rig) -> bytes:
    """Begin a new common epoch on the rig's medium, as another process does, and return it."""
    epoch = begin_common(rig.store, rig.context.namespace).epoch
    assert epoch is not None
    return epoch


def look(rig: Rig, seconds: float = LOOK_SECONDS) -> None:
    """Let time pass, and let the looks that are due end."""
    rig.clock.advance(seconds)
    rig.finished()
    rig.io.run_tasks()
    rig.finished()


def available(rig: Rig) -> tuple[int, int]:
    stats = rig.tier.get_stats()
    return stats.available, stats.writable


def test_a_tier_stays_in_its_epoch_until_it_is_to_follow_and_then_enters_the_new_one() -> None:
    rig = Rig(shared=True).opened()
    rig.store_blocks(K[:2])
    old, new = rig.epoch, begin(rig)
    assert not rig.tier.superseded()
    look(rig)
    assert (rig.tier.superseded(), rig.epoch) == (True, old)
    begun = rig.clock()
    assert rig.tier.follow(begun)
    assert (rig.tier.superseded(), rig.epoch, rig.clock()) == (False, new, begun)
    assert available(rig) == (1, 1)
    assert rig.tier.get_stats().private_epoch == 0
    assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(0, True)


def test_a_job_in_flight_does_not_count_in_the_new_epoch() -> None:
    rig = Rig(shared=True).opened()
    job = rig.submit_store(K[:2])
    begin(rig)
    look(rig)
    rig.tier.follow(rig.clock())
    rig.io.finish(job)
    (result,) = rig.finished()
    assert (result.success, result.successful_keys) == (False, [])


def test_the_last_of_several_new_epochs_is_entered() -> None:
    rig = Rig(shared=True).opened()
    begin(rig)
    look(rig)
    last = begin(rig)
    look(rig)
    rig.tier.follow(rig.clock())
    assert rig.epoch == last


@pytest.mark.parametrize("revision", [None, "step-1"])
def test_a_reset_before_it_could_follow_wins(revision: str | None) -> None:
    rig = Rig(shared=True).opened()
    new = begin(rig)
    look(rig)
    rig.tier.reset(rig.clock(), revision)
    own = rig.epoch
    assert (rig.tier.superseded(), own != new) == (False, True)
    rig.tier.follow(rig.clock())
    assert (rig.epoch, available(rig)) == (own, (1, 1))


def test_after_the_shutdown_there_is_nothing_to_follow() -> None:
    rig = Rig(shared=True).opened()
    begin(rig)
    look(rig)
    rig.tier.shutdown(rig.clock() + 1)
    assert not rig.tier.superseded()


def test_a_medium_of_its_own_is_reset_without_a_wait() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    rig.io.hold = True
    begun = rig.clock()
    assert not rig.tier.follow(begun)
    assert (rig.clock(), available(rig)) == (begun, (0, 0))
    rig.io.run_tasks()
    rig.finished()
    assert (rig.tier.reset_done(), available(rig)) == (True, (1, 1))
    assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(0, False)


class TestAnotherSharedTier:
    """One shared tier of the stack has a new common epoch; this one has not noticed any."""

    def test_is_used_again_in_its_epoch_when_a_later_look_finds_no_successor(self) -> None:
        rig = Rig(shared=True).opened()
        rig.store_blocks(K[:2])
        old = rig.epoch
        assert rig.tier.follow(rig.clock())
        assert available(rig) == (0, 0)
        look(rig, SETTLE_SECONDS / 2)
        assert available(rig) == (0, 0), "the operator may still begin an epoch here"
        look(rig, SETTLE_SECONDS / 2)
        assert (available(rig), rig.epoch) == ((1, 1), old)
        assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(2, False)

    def test_serves_nothing_older_if_its_epoch_begins_a_little_later(self) -> None:
        rig = Rig(shared=True).opened()
        rig.tier.follow(rig.clock())
        new = begin(rig)
        look(rig, SETTLE_SECONDS)
        assert (rig.tier.superseded(), available(rig)) == (True, (0, 0))
        rig.tier.follow(rig.clock())
        assert (rig.epoch, available(rig)) == (new, (1, 1))

    def test_is_not_used_while_its_medium_does_not_answer(self) -> None:
        rig = Rig(shared=True).opened()
        rig.tier.follow(rig.clock())
        rig.store.failure = TemporaryStoreError("no")
        look(rig, SETTLE_SECONDS)
        assert available(rig) == (0, 0)
        rig.store.failure = None
        look(rig, SETTLE_SECONDS)
        assert available(rig) == (1, 1)

    def test_a_look_that_began_before_says_nothing(self) -> None:
        rig = Rig(shared=True).opened()
        rig.clock.advance(LOOK_SECONDS)
        rig.finished()
        rig.tier.follow(rig.clock())
        rig.clock.advance(SETTLE_SECONDS)
        rig.io.run_tasks()
        rig.finished()
        assert available(rig) == (0, 0)
