"""Stores that wait for the answer to a claim: briefly, in order, and reported once whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.block_tier.rig import CTX, K, Rig
from tiering.api.keys import OffloadKey
from tiering.errors import TemporaryStoreError
from tiering.medium.block_store import Place, StoreProbe
from tiering.secondary.contract import PrefixAnswer
from tiers.coordination.coordinated import CLAIM_SECONDS, CoordinatedIndex, LeftBlocks
from tiers.coordination.coordination import ValkeyCoordination
from tiers.coordination.scope import Claim, Inbox

LAPSE = 10.0


class FakeCoordination(ValkeyCoordination):
    """Coordination whose answers a test gives."""

    def __init__(self) -> None:
        self.answers = True
        """True while the service answers."""
        self.prefixes: list[str] = []
        self.claims: list[Claim] = []
        self.told: list[Place] = []
        self.unclaimed: list[Place] = []
        self.watched: list[OffloadKey] = []
        self.declines: list[OffloadKey] = []
        self.inbox = Inbox()
        self.closed = False

    @property
    def ready(self) -> bool:
        return self.answers

    @property
    def lapse_seconds(self) -> float:
        return LAPSE

    def enter(self, place_prefix: str) -> None:
        self.prefixes.append(place_prefix)

    def leave(self) -> None:
        self.prefixes.append("")

    def ask(self, probe: Callable[[Sequence[Place]], StoreProbe], places: Sequence[Place]) -> StoreProbe:
        return probe(places)

    def claim(self, claim: Claim) -> None:
        self.claims.append(claim)

    def stored(self, places: Sequence[Place]) -> None:
        self.told += places

    def released(self, places: Sequence[Place]) -> None:
        self.unclaimed += places

    def watch(self, keys: Sequence[OffloadKey], places: Sequence[Place]) -> None:
        self.watched += keys

    def declined(self, keys: Sequence[OffloadKey], places: Sequence[Place]) -> None:
        self.declines += keys

    def take(self) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
        return self.inbox.take()

    def close(self, timeout: float) -> bool:
        self.closed = True
        return True


class FleetRig(Rig):
    """A shared tier with coordination, on a fake I/O side."""

    def __init__(self, **options: Any) -> None:
        self.fleet = FakeCoordination()
        index = CoordinatedIndex(self.fleet, counts_touches=options.get("admission") == "second_touch")
        super().__init__(index=index, **options)
        self.opened()

    def ended(self) -> list[tuple[int, list[OffloadKey] | None]]:
        """Return the jobs that have ended, each with the keys that were stored; None: all."""
        return [
            (result.job_id, None if result.successful_keys is None else list(result.successful_keys))
            for result in self.finished()
        ]


def test_a_store_waits_for_the_answer_and_uploads_what_is_granted() -> None:
    rig = FleetRig()
    job = rig.submit_store(K[:4])
    assert (rig.ended(), rig.io.jobs) == ([], [])
    rig.fleet.claims[0].granted = [True, False, True, False]
    assert rig.ended() == []
    (upload,) = rig.io.jobs
    assert (upload.moved, upload.rows, rig.fleet.watched) == ([K[0], K[2]], [0, 2], [K[1], K[3]])
    rig.io.finish(job)
    assert rig.ended() == [(job, [K[0], K[2]])]
    stats = rig.tier.get_stats()
    assert (stats.stores_left, stats.cascades, stats.cascades_active, stats.stores_dropped) == (2, 2, 0, 0)
    assert rig.fleet.told == upload.places


def test_a_tier_is_not_drained_while_a_claim_is_not_answered() -> None:
    rig = FleetRig()
    job = rig.submit_store(K[:2])
    assert not rig.tier.drain(rig.clock())
    rig.fleet.claims[0].granted = [True, True]
    assert not rig.tier.drain(rig.clock()), "the upload runs"
    rig.io.finish(job)
    assert rig.tier.drain(rig.clock())


def test_a_store_without_any_grant_ends_and_may_be_offered_again() -> None:
    rig = FleetRig()
    job = rig.submit_store(K[:2])
    rig.fleet.claims[0].granted = [False, False]
    assert rig.ended() == [(job, [])]
    rig.submit_store(K[:2])
    rig.fleet.claims[1].granted = [True, True]
    rig.ended()
    assert [list(upload.moved) for upload in rig.io.jobs] == [K[:2]]


@pytest.mark.parametrize("gone", [False, True], ids=["slow", "gone"])
def test_a_store_goes_ahead_without_an_answer(gone: bool) -> None:
    rig = FleetRig()
    rig.submit_store(K[:2])
    if gone:
        rig.fleet.answers = False
    else:
        rig.clock.advance(CLAIM_SECONDS)
    rig.ended()
    assert len(rig.io.jobs) == 1


def test_without_a_service_nothing_is_claimed() -> None:
    rig = FleetRig()
    rig.fleet.answers = False
    rig.submit_store(K[:2])
    assert (len(rig.io.jobs), rig.fleet.claims) == (1, [])


def test_the_claim_of_a_failed_upload_is_released() -> None:
    rig = FleetRig()
    job = rig.submit_store(K[:2])
    rig.fleet.claims[0].granted = [True, True]
    rig.ended()
    places = rig.io.jobs[0].places
    rig.io.finish(job, [TemporaryStoreError("no")] * 2)
    rig.ended()
    assert (rig.fleet.told, rig.fleet.unclaimed) == ([], list(places))


def test_a_reset_drops_the_stores_that_wait_and_an_answer_comes_too_late() -> None:
    rig = FleetRig()
    job = rig.submit_store(K[:2])
    rig.tier.reset(rig.clock())
    assert rig.fleet.claims[0].dropped == set(rig.fleet.claims[0].places), "whoever grants the claim gives it up"
    rig.fleet.claims[0].granted = [True, True]
    assert rig.ended() == [(job, [])]
    assert (rig.io.jobs, rig.fleet.told) == ([], [])
    assert rig.fleet.prefixes[1] == "" != rig.fleet.prefixes[2] != rig.fleet.prefixes[0]
    assert rig.tier.get_stats().cascades_active == 0


def test_a_block_that_was_stored_before_a_reset_is_not_told_in_the_new_epoch() -> None:
    rig = FleetRig()
    job = rig.submit_store(K[:2])
    rig.fleet.claims[0].granted = [True, True]
    rig.ended()
    places = rig.io.jobs[0].places
    rig.tier.reset(rig.clock())
    assert rig.fleet.unclaimed == places, "others may upload at once, should the upload not succeed"
    rig.io.finish(job)
    rig.ended()
    assert (rig.fleet.told, rig.fleet.unclaimed) == ([], places)


def test_the_granted_claims_of_stores_that_a_reset_drops_are_released() -> None:
    rig = FleetRig()
    job = rig.submit_store(K[:3])
    claim = rig.fleet.claims[0]
    claim.granted = [True, False, True]
    rig.tier.reset(rig.clock())
    assert rig.fleet.unclaimed == [claim.places[0], claim.places[2]]
    assert rig.ended() == [(job, [])]


def left_to_others(rig: FleetRig, keys: Sequence[OffloadKey]) -> None:
    """Submit a store whose blocks another machine has claimed."""
    rig.submit_store(keys)
    rig.fleet.claims[-1].granted = [False] * len(keys)
    rig.ended()


def wanted(rig: FleetRig) -> list[OffloadKey]:
    """Return the keys that the tier asks for after a step; probes are answered."""
    rig.ended()
    rig.io.run_tasks("probe")
    rig.ended()
    return list(rig.tier.on_schedule_end().wanted)


def test_blocks_whose_claim_has_lapsed_are_asked_for_once_more() -> None:
    rig = FleetRig()
    left_to_others(rig, K[:4])
    rig.clock.advance(LAPSE)
    assert wanted(rig) == [], "machines do not ask at the same time"
    rig.clock.advance(LAPSE)
    assert wanted(rig) == K[:4]
    left_to_others(rig, K[:4])
    rig.clock.advance(2 * LAPSE)
    assert wanted(rig) == [], "nobody asks for the same blocks again and again"


def test_blocks_that_the_other_machine_has_stored_are_not_asked_for() -> None:
    rig = FleetRig()
    left_to_others(rig, K[:4])
    rig.fleet.inbox.stored.extend(K[:3])
    rig.ended()
    rig.clock.advance(2 * LAPSE)
    assert wanted(rig) == K[3:4]


def test_blocks_that_the_other_machine_has_stored_without_a_notice_are_not_asked_for() -> None:
    rig = FleetRig()
    left_to_others(rig, K[:2])
    rig.store.held.update(rig.fleet.claims[0].places)
    rig.clock.advance(2 * LAPSE)
    assert wanted(rig) == []


def test_blocks_that_were_left_before_a_reset_are_not_asked_for() -> None:
    rig = FleetRig()
    left_to_others(rig, K[:2])
    rig.tier.reset(rig.clock() + 10)
    rig.clock.advance(2 * LAPSE)
    assert wanted(rig) == []


def test_the_blocks_that_are_remembered_as_left_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.coordination.coordinated.MAX_LEFT", 3)
    left = LeftBlocks(LAPSE, lambda: 0.0)
    left.add(K[:2], 0.0)
    left.add(K[2:4], 0.0)
    left.add(K[4:5], 0.0)
    assert [left.take_lapsed(LAPSE), left.take_lapsed(LAPSE), left.take_lapsed(LAPSE)] == [K[:2], K[4:5], []]
    left.add(K[2:4], 0.0)
    assert left.take_lapsed(LAPSE) == K[2:4]


def test_the_end_reports_the_stores_that_wait() -> None:
    rig = FleetRig()
    job = rig.submit_store(K[:2])
    rig.fleet.claims[0].granted = [False, False]
    assert rig.tier.shutdown(rig.clock() + 10)
    assert (rig.ended(), rig.fleet.closed) == ([(job, [])], True)


def test_a_block_that_another_machine_has_stored_is_held_at_once() -> None:
    rig = FleetRig()
    rig.tier.lookup_prefix(K[:2], CTX)
    rig.io.run_tasks()
    rig.ended()
    assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(0, False)
    assert rig.fleet.watched == K[:1]
    rig.fleet.inbox.stored.extend(K[:2])
    rig.ended()
    assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(2, False)


def test_a_second_touch_in_the_fleet_makes_a_declined_block_wanted() -> None:
    rig = FleetRig(admission="second_touch")
    assert (rig.tier.admit(K[:2], CTX, False), rig.fleet.declines) == ([], K[:2])
    rig.fleet.inbox.touched.append(K[1])
    rig.ended()
    assert list(rig.tier.on_schedule_end().wanted) == [K[1]]
    assert rig.tier.admit(K[1:2], CTX, False) is None
    rig.submit_store(K[1:2])
    assert len(rig.fleet.claims) == 1
