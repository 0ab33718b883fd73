"""The generic tier with a shared index and the real I/O side: conformance, two engines on one medium."""

from __future__ import annotations

import pytest

from tests.medium.named_memory import NamedMemoryStore, RawMemory, make_named_tier
from tiering.block_tier.tier import BlockTier
from tiering.secondary.contract import TierContext
from tiering.testing.store_tests import BlockStoreTests
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K, TierTests
from tiers.memory import MemoryMedium


class _Raw(RawMemory):
    @pytest.fixture(autouse=True)
    def _medium(self) -> None:
        self.memory = MemoryMedium()


class TestNamedMemoryStore(_Raw, BlockStoreTests):
    shared = True

    def make_store(self) -> NamedMemoryStore:
        return NamedMemoryStore(self.memory)


class TestSharedTier(_Raw, TierTests):
    shared = True

    def make_tier(self, context: TierContext) -> BlockTier:
        return make_named_tier(self.memory, context)

    def test_a_corrupt_block_is_deleted_and_can_be_stored_again(self, rig: TierRig) -> None:
        rig.store(K[:1])
        (place,) = self.raw_places()
        self.raw_write(place, b"broken")
        assert rig.load(K[:1]) == []
        rig.wait(lambda: rig.tier.get_stats().blocks_deleted == 1)
        assert not self.raw_places()
        assert rig.store(K[:1]) == K[:1]
        assert rig.load(K[:1]) == K[:1]

    def test_another_engine_finds_what_this_one_stored(self, rig: TierRig) -> None:
        rig.store(K[:20])
        other = self.make_rig().open()
        assert other.lookup(K[:30]) == 20
        assert other.load(K[:20]) == K[:20]
        other.close()

    def test_blocks_that_a_probe_has_not_asked_for_are_announced_when_they_are_read(self, rig: TierRig) -> None:
        rig.store(K[:10])
        other = TierRig(self.make_tier, group_bytes=self.group_bytes, events=True).open()
        try:
            for key in K[4:8]:
                (place,) = [place for place in self.raw_places() if key.hex() in str(place)]
                self.raw_delete(place)
            assert other.lookup(K[:10]) == 10
            assert other.store(K[:10]) == K[:10], "a block that is believed to be there is not stored again"
            assert other.load(K[:10]) == K[:4] + K[8:10]
            announced = [key for event in other.tier.take_events() for key in event.keys if not event.removed]
            assert sorted(announced) == sorted(K[:4] + K[8:10])
        finally:
            other.close()
