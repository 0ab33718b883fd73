"""The conformance suite of secondary tiers.

It tests the guarantees of :mod:`tiering.secondary.contract`, also while the medium is changed behind the tier's back.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from tiering.api.keys import OffloadKey
from tiering.medium.block_store import Place
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.keys import key_of
from tiering.testing.store_tests import RawMedium
from tiering.testing.tier_rig import PATIENCE_SECONDS, REQUEST, TierRig

K = [key_of(number) for number in range(32)]


class TierTests(RawMedium):
    """The tests that every tier must pass; a subclass makes tiers, all on this test's medium."""

    group_bytes: ClassVar[tuple[int, ...]] = (64 << 10, 16 << 10)
    """Bytes of a block, per KV-cache group; default: 64 KiB and 16 KiB."""

    @abstractmethod
    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        """Return a tier that is not open, with room for at least 32 blocks."""

    @abstractmethod
    def raw_places(self) -> Sequence[Place]:
        """Return the places at which the medium has blocks now, old and new."""

    def _frame(self, place: Place) -> bytes:
        frame = self.raw_read(place)
        assert frame is not None
        return frame

    def make_rig(self, model: str = "model-a") -> TierRig:
        """Return a rig on this test's medium, not open."""
        return TierRig(self.make_tier, group_bytes=self.group_bytes, model=model)

    @pytest.fixture
    def rig(self) -> Iterator[TierRig]:
        """A rig with an open tier."""
        rig = self.make_rig().open()
        yield rig
        rig.close()

    def test_blocks_come_back_byte_for_byte(self, rig: TierRig) -> None:
        keys = [*K[:8], key_of(1, group=1), key_of(2, group=1)]
        assert rig.store(keys) == keys
        assert rig.lookup(keys) == len(keys)
        assert rig.load(keys) == keys

    def test_only_the_jobs_own_rows_are_written(self, rig: TierRig) -> None:
        rig.store(K[:4])
        rig.rows[40:] = 0x11
        rig.load(K[:4], first_row=41)
        assert (rig.rows[40] == 0x11).all()
        assert (rig.rows[45:] == 0x11).all()

    def test_what_was_never_stored_is_not_held_and_not_loaded(self, rig: TierRig) -> None:
        rig.store(K[:2])
        assert rig.lookup(K[:4]) == 2
        assert rig.lookup(K[4:6]) == 0
        assert rig.load(K[:4]) == K[:2]

    def test_storing_again_is_harmless(self, rig: TierRig) -> None:
        rig.store(K[:3])
        assert rig.store(K[:5]) == K[:5]
        assert rig.load(K[:5]) == K[:5]

    def test_every_job_is_reported_exactly_once(self, rig: TierRig) -> None:
        stores = [rig.submit_store(K[n : n + 4], first_row=n) for n in range(0, 24, 4)]
        for job_id in stores:
            rig.result(job_id)
        loads = [rig.submit_load(K[n : n + 4], first_row=32 + n) for n in range(0, 24, 4)]
        rig.wait(lambda: len(rig.results) == len(stores + loads))
        rig.tier.drain(time.monotonic() + PATIENCE_SECONDS)
        rig.results += rig.tier.get_finished()
        assert dict(rig.reports()) == dict.fromkeys([*stores, *loads], 1)

    def test_admission_names_positions_of_the_keys_and_leaves_them_as_they_are(self, rig: TierRig) -> None:
        keys = tuple(K[:8])
        admitted = rig.intake.admit(keys, REQUEST, False)
        assert admitted is None or list(admitted) == sorted(set(admitted).intersection(range(8)))
        assert rig.intake.admit((), REQUEST, False) in (None, [], ())

    def test_stores_within_the_credit_are_taken_and_give_the_credit_back(self, rig: TierRig) -> None:
        """The manager submits no more blocks than the credit, and asks again later."""
        left, stored = list(K), []
        jobs: list[int] = []
        while left:
            rig.wait(lambda: rig.intake.credit(1000, 0.1) != 0)
            credit = rig.intake.credit(1000, 0.1)
            count = len(left) if credit is None else min(credit, len(left), 5)
            jobs.append(rig.submit_store(left[:count], first_row=len(K) - len(left)))
            after = rig.intake.credit(1000, 0.1)
            assert after is None or after >= 0
            del left[:count]
        for job_id in jobs:
            stored += rig.stored(job_id)
        assert stored == K
        assert rig.load(K) == K
        rig.wait(lambda: rig.intake.credit(1000, 0.1) != 0)

    def test_blocks_that_left_the_queue_can_be_offered_again(self, rig: TierRig) -> None:
        rig.intake.not_stored(tuple(K[:4]))
        assert rig.lookup(K[:4]) == 0
        assert rig.intake.admit(tuple(K[:4]), REQUEST, False) in (None, [0, 1, 2, 3])
        assert rig.store(K[:4]) == K[:4]

    def _loads_none_and_counts(self, rig: TierRig, keys: Sequence[OffloadKey]) -> None:
        before = rig.tier.get_stats()
        assert rig.load(keys) == []
        after = rig.tier.get_stats()
        assert after.promotions_failed - before.promotions_failed == len(keys)
        assert rig.lookup(keys[:1]) == 0

    @pytest.mark.parametrize("part", ["header", "payload"])
    def test_a_flipped_bit_is_a_miss(self, rig: TierRig, part: str) -> None:
        rig.store(K[:1])
        (place,) = self.raw_places()
        frame = bytearray(self._frame(place))
        frame[20 if part == "header" else len(frame) - self.group_bytes[0] // 2] ^= 0x01
        self.raw_write(place, bytes(frame))
        self._loads_none_and_counts(rig, K[:1])
        rig.wait(lambda: rig.tier.get_stats().corrupt_blocks)  # statistics may come later than results
        assert rig.tier.get_stats().corrupt_blocks == 1

    def test_a_truncated_block_is_a_miss(self, rig: TierRig) -> None:
        rig.store(K[:1])
        (place,) = self.raw_places()
        frame = self._frame(place)
        self.raw_write(place, frame[: len(frame) // 2])
        self._loads_none_and_counts(rig, K[:1])

    def test_swapped_blocks_are_misses(self, rig: TierRig) -> None:
        rig.store(K[:2])
        one, two = self.raw_places()
        frames = self._frame(one), self._frame(two)
        self.raw_write(one, frames[1])
        self.raw_write(two, frames[0])
        self._loads_none_and_counts(rig, K[:2])

    def test_a_foreign_models_block_is_a_miss(self, rig: TierRig) -> None:
        rig.store(K[:1])
        (theirs,) = self.raw_places()
        foreign = self._frame(theirs)
        assert rig.close()
        other = self.make_rig(model="model-b").open()
        try:
            assert other.lookup(K[:1]) == 0
            other.store(K[:1])
            for place in self.raw_places():
                self.raw_write(place, foreign)
            self._loads_none_and_counts(other, K[:1])
        finally:
            other.close()

    def test_a_deleted_block_is_a_miss_and_the_others_arrive(self, rig: TierRig) -> None:
        rig.store(K[:3])
        before = set(self.raw_places())
        rig.store(K[3:4])
        (place,) = set(self.raw_places()) - before
        self.raw_delete(place)
        assert rig.load(K[:5]) == K[:3]
        assert rig.lookup(K[:5]) == 3

    def test_after_a_reset_nothing_stored_before_is_served(self, rig: TierRig) -> None:
        rig.store(K[:4])
        assert rig.tier.reset(time.monotonic() + PATIENCE_SECONDS)
        assert rig.lookup(K[:4]) == 0
        assert rig.load(K[:4]) == []
        assert rig.store(K[2:4]) == K[2:4]
        assert rig.load(K[:4]) == K[2:4]

    def test_a_reset_holds_over_a_restart(self, rig: TierRig) -> None:
        """Blocks stored after the reset are not served either.

        Only the process that was reset knows which weights computed them.
        """
        if not self.shared:
            rig.store(K[:4])
        assert rig.tier.reset(time.monotonic() + PATIENCE_SECONDS)
        rig.store(K[2:4])
        assert rig.close()
        again = self.make_rig().open()
        try:
            again.store(K[4:6])
            again.wait(lambda: again.lookup(K[4:6]) == 2)
            for key in K[:4]:
                again.wait(lambda key=key: again.tier.lookup(key, REQUEST) is not None)  # type: ignore[misc]
                assert again.load([key]) == []
        finally:
            again.close()

    def test_a_reset_of_one_leaves_the_others_what_they_share(self, rig: TierRig) -> None:
        if not self.shared:
            pytest.skip("this medium belongs to one tier")
        rig.store(K[:6])
        other = self.make_rig().open()
        try:
            assert rig.tier.reset(time.monotonic() + PATIENCE_SECONDS)
            rig.store(K[2:4])
            other.wait(lambda: other.lookup(K[:6]) == 6)
            assert other.load(K[:6]) == K[:6]
            assert rig.load(K[:6]) == K[2:4]
        finally:
            other.close()

    def test_what_is_stored_under_a_revision_is_found_by_all_that_give_the_same_text(self, rig: TierRig) -> None:
        if not self.shared:
            pytest.skip("this medium belongs to one tier")
        rig.store(K[:2])
        assert rig.tier.reset(time.monotonic() + PATIENCE_SECONDS, "step-1")
        rig.store(K[2:6])
        other = self.make_rig().open()
        try:
            assert other.tier.reset(time.monotonic() + PATIENCE_SECONDS, "step-1")
            other.wait(lambda: other.lookup(K[2:6]) == 4)
            assert other.load(K[:6]) == K[2:6]
            assert other.tier.reset(time.monotonic() + PATIENCE_SECONDS, "step-2")
            assert other.load(K[:6]) == []
        finally:
            other.close()

    def test_what_is_stored_after_a_reset_and_a_restart_is_found_by_later_restarts(self, rig: TierRig) -> None:
        if not self.persistent:
            pytest.skip("this medium does not outlive its tier")
        assert rig.tier.reset(time.monotonic() + PATIENCE_SECONDS)
        assert rig.close()
        second = self.make_rig().open()
        second.store(K[:4])
        assert second.close()
        third = self.make_rig().open()
        try:
            third.wait(lambda: third.lookup(K[:4]) == 4)
            assert third.load(K[:4]) == K[:4]
        finally:
            third.close()

    def test_blocks_are_found_again_after_a_restart(self, rig: TierRig) -> None:
        if not self.persistent:
            pytest.skip("this medium does not outlive its tier")
        keys = [*K[:6], key_of(1, group=1)]
        rig.store(keys)
        assert rig.close()
        again = self.make_rig().open()
        try:
            again.wait(lambda: again.lookup(keys) == len(keys))
            assert again.load(keys) == keys
        finally:
            again.close()

    def test_shutdown_reports_what_was_in_flight_and_may_be_called_twice(self, rig: TierRig) -> None:
        jobs = [rig.submit_store(K[n : n + 4], first_row=n) for n in range(0, 16, 4)]
        assert rig.close()
        rig.results += rig.tier.get_finished()
        assert dict(rig.reports()) == dict.fromkeys(jobs, 1)
        assert rig.close()
        assert not list(rig.tier.get_finished())

    def test_after_shutdown_jobs_fail_and_lookups_say_no(self, rig: TierRig) -> None:
        rig.store(K[:2])
        rig.close()
        assert rig.lookup(K[:2]) == 0
        assert rig.store(K[2:4]) == []
        assert rig.load(K[:2]) == []
