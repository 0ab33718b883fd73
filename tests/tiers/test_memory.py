"""The memory tier: the conformance suites, and its own behaviour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.medium.named_memory import RawMemory
from tiering.errors import ConfigError
from tiering.medium.block_store import Place
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.store_tests import BlockStoreTests
from tiering.testing.tier_rig import REQUEST, TierRig
from tiering.testing.tier_tests import K, TierTests
from tiers.memory import MEMORY_TIER, MemoryMedium, MemoryOptions, MemoryStore, MemoryTier, drop_medium, shared_medium


class TestMemoryStore(RawMemory, BlockStoreTests):
    @pytest.fixture(autouse=True)
    def _medium(self) -> None:
        self.memory = MemoryMedium()

    def make_store(self) -> MemoryStore:
        return MemoryStore(self.memory)


class TestMemoryTier(RawMemory, TierTests):
    @pytest.fixture(autouse=True)
    def _medium(self) -> Iterator[None]:
        self.memory = shared_medium("test")
        yield
        drop_medium("test")

    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        return MEMORY_TIER.build(MemoryOptions(type="memory", capacity="16MiB", share="test"), context)

    def raw_places(self) -> Sequence[Place]:
        return list(self.memory.frames)


def _rig(capacity: int, **options: object) -> TierRig:
    options = {"type": "memory", "capacity": capacity, **options}
    return TierRig(lambda context: MemoryTier(context, MemoryOptions.model_validate(options)), group_bytes=(4096,))


def test_capacity_bounds_the_blocks() -> None:
    rig = _rig(8 * (4096 + 128)).open()
    for n in range(0, 16, 4):
        rig.store(K[n : n + 4])
    assert sum(rig.tier.lookup(key, REQUEST) is True for key in K[:16]) == 8
    assert rig.tier.get_stats().evictions == 8
    rig.close()


def test_capacity_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="below one block"):
        _rig(4096)


def test_tiers_that_share_nothing_do_not_see_each_other() -> None:
    one, two = _rig(1 << 20).open(), _rig(1 << 20).open()
    one.store(K[:2])
    assert two.lookup(K[:2]) == 0
    one.close()
    two.close()


@pytest.mark.parametrize("word", ["compression", "ttl", "lookup_deadline"])
def test_words_it_cannot_support_are_refused_with_the_reason(word: str) -> None:
    with pytest.raises(ValueError, match=f"{word} is not supported"):
        MemoryOptions.model_validate({"type": "memory", word: "zstd" if word == "compression" else "1s"})
