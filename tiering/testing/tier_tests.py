"""The conformance suite of secondary tiers.

It tests the guarantees of :mod:`tiering.secondary.contract`, also while the medium is changed behind the tier's back.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from tiering.api.keys import OffloadKey
from tiering.block_store import Place
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.frames import key_of
from tiering.testing.tier_rig import OTHER_BYTES, PATIENCE_SECONDS, REQUEST, TierRig

K = [key_of(number) for number in range(32)]


class TierTests(ABC):
    """The tests that every tier must pass.

    A subclass makes tiers in :meth:`make_tier`, all on this test's medium. Its raw methods reach that medium without
    the tier.
    """

    group_bytes: ClassVar[tuple[int, ...]] = (64 << 10, 16 << 10)
    """Bytes of a block, per KV-cache group; default: 64 KiB and 16 KiB."""
    persistent: ClassVar[bool] = True
    """True if a tier that is made later finds the stored blocks; default: True."""
    shared: ClassVar[bool] = False
    """True if several tiers use the medium at the same time; default: False.

    A reset of one of them leaves the others their blocks.
    """

    @abstractmethod
    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        """Return a tier that is not open, with room for at least 32 blocks."""

    @abstractmethod
    def raw_places(self) -> Sequence[Place]:
        """Return the places at which the medium has blocks now, old and new."""

    @abstractmethod
    def raw_read(self, place: Place) -> bytes | None:
        """Return the frame at ``place``, header first; None if there is none."""

    @abstractmethod
    def raw_write(self, place: Place, data: bytes) -> None:
        """Replace the content of ``place`` by ``data``."""

    @abstractmethod
    def raw_delete(self, place: Place) -> None:
        """Remove the content of ``place``."""

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

    # ------------------------------------------------------------------------------------------------------ round trips

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
        rig.wait(lambda: not rig.tier.has_pending_work())
        rig.tier.drain(time.monotonic() + PATIENCE_SECONDS)
        rig.results += rig.tier.get_finished()
        assert dict(rig.reports()) == dict.fromkeys([*stores, *loads], 1)

    # --------------------------------------------------------------------------------------- stores that have not begun

    def _holds_no_withdrawn_row(self, rig: TierRig) -> None:
        for place in self.raw_places():
            assert bytes([OTHER_BYTES]) * 64 not in (self.raw_read(place) or b""), "WRONG KV: a withdrawn row was read"
        rig.load(K)

    def test_withdrawn_rows_are_not_read_any_more_while_other_blocks_are_stored(self, rig: TierRig) -> None:
        """Rows are withdrawn and overwritten after each submission, while the tier works on the stores before."""
        jobs: dict[int, set[OffloadKey]] = {}
        withdrawn: set[OffloadKey] = set()
        for first in range(0, len(K), 4):
            keys = K[first : first + 4]
            jobs[rig.submit_store(keys, first_row=first)] = set(keys)
            for job_id, key in rig.withdraw({job_id: rows[::2] for job_id, rows in rig.waiting().items()}):
                assert key not in withdrawn
                withdrawn.add(key)
                jobs[job_id].remove(key)
        assert {job_id: set(rig.stored(job_id)) for job_id in jobs} == jobs
        rig.wait(lambda: not rig.tier.has_pending_work())
        assert dict(rig.reports()) == dict.fromkeys(jobs, 1)
        self._holds_no_withdrawn_row(rig)
        kept = [key for key in K if key not in withdrawn]
        assert rig.load(kept) == kept
        assert rig.store(K) == K, "withdrawn blocks can be stored later"
        assert rig.load(K) == K
        assert rig.close()
        if self.persistent:
            again = self.make_rig().open()
            try:
                self._holds_no_withdrawn_row(again)
            finally:
                again.close()

    def test_a_store_that_is_withdrawn_as_a_whole_is_reported_once_as_failed(self, rig: TierRig) -> None:
        job_id = rig.submit_store(K)
        withdrawn = {key for _, key in rig.withdraw_all()}
        given_up = {row for row, key in enumerate(K) if key in withdrawn}
        assert rig.withdraw({job_id: given_up}) == [], "a block is given up once"
        assert not given_up.intersection(rig.waiting().get(job_id, ())), "a block that was given up does not wait"
        assert rig.stored(job_id) == [key for key in K if key not in withdrawn]
        assert rig.result(job_id).success == (not withdrawn)
        rig.wait(lambda: not rig.tier.has_pending_work())
        assert dict(rig.reports()) == {job_id: 1}
        self._holds_no_withdrawn_row(rig)

    def test_rows_that_do_not_wait_for_a_store_are_not_given_up(self, rig: TierRig) -> None:
        everything = range(len(rig.rows))
        assert rig.waiting([]) == {}
        assert rig.withdraw({}) == []
        assert rig.waiting([1, 999]) == {}, "there are no such jobs"
        assert rig.withdraw({1: everything, 999: everything}) == []
        rig.store(K[:8])
        assert rig.waiting() == {}
        assert rig.withdraw_all() == []
        job_id = rig.submit_load(K[:8])
        assert rig.waiting([job_id]) == {}, "loads are not to be withdrawn"
        assert rig.withdraw({job_id: everything}) == []
        assert rig.result(job_id).success
        store = rig.submit_store(K[8:16])
        assert rig.withdraw({store: range(8, len(rig.rows)), 999: range(8)}) == [], "none of these rows waits"

    def test_a_store_that_lost_blocks_is_reported_once_by_a_reset_and_a_shutdown(self, rig: TierRig) -> None:
        jobs = [rig.submit_store(K[:8])]
        lost = rig.withdraw({job_id: rows[::2] for job_id, rows in rig.waiting().items()})
        assert rig.tier.reset(time.monotonic() + PATIENCE_SECONDS)
        jobs.append(rig.submit_store(K[8:16], first_row=8))
        lost += rig.withdraw({job_id: rows[::2] for job_id, rows in rig.waiting().items()})
        assert rig.close()
        rig.results += rig.tier.get_finished()
        assert dict(rig.reports()) == dict.fromkeys(jobs, 1)
        for job_id, key in lost:
            assert key not in rig.stored(job_id)
        assert rig.waiting() == {}
        assert rig.withdraw_all() == []

    # ------------------------------------------------------------------------------------ media altered behind its back

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

    # --------------------------------------------------------------------------------------------------- reset, restart

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

    # ---------------------------------------------------------------------------------------------------------- the end

    def test_shutdown_reports_what_was_in_flight_and_may_be_called_twice(self, rig: TierRig) -> None:
        jobs = [rig.submit_store(K[n : n + 4], first_row=n) for n in range(0, 16, 4)]
        assert rig.close()
        rig.results += rig.tier.get_finished()
        assert dict(rig.reports()) == dict.fromkeys(jobs, 1)
        assert rig.close()
        assert not rig.tier.has_pending_work()

    def test_after_shutdown_jobs_fail_and_lookups_say_no(self, rig: TierRig) -> None:
        rig.store(K[:2])
        rig.close()
        assert rig.lookup(K[:2]) == 0
        assert rig.store(K[2:4]) == []
        assert rig.load(K[:2]) == []
