"""The conformance suites of stores and tiers on a real server, which valkey-py inspects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import valkey

from examples.valkey_server import ValkeyServer
from tests.patience import PATIENT
from tests.tiers.shared_tier import SharedTierTests
from tiering.medium.block_store import Place
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.store_tests import BlockStoreTests
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.valkey.tier import VALKEY_TIER, ValkeyOptions, ValkeyStore

_prefixes = itertools.count()


class _Served:
    """A server for all tests of the module, with a prefix for each test, and raw access by valkey-py."""

    raw: valkey.Valkey
    options: ValkeyOptions

    @pytest.fixture(autouse=True)
    def _medium(self, server: ValkeyServer) -> None:
        self.raw = valkey.Valkey(port=server.port)
        self.options = ValkeyOptions(
            url=server.url,
            prefix=f"test-{next(_prefixes)}",
            absent_ttl=0.05,
            **PATIENT,
        )

    def _name(self, place: Place) -> str:
        return f"{self.options.prefix}/blocks/{place}"

    def raw_write(self, place: Place, data: bytes) -> None:
        self.raw.set(self._name(place), data)

    def raw_delete(self, place: Place) -> None:
        self.raw.delete(self._name(place))

    def raw_read(self, place: Place) -> bytes | None:
        found = self.raw.get(self._name(place))
        return None if found is None else bytes(found)


class TestStore(_Served, BlockStoreTests):
    shared = True

    def make_store(self) -> ValkeyStore:
        return ValkeyStore(self.options)

    def break_medium(self) -> Callable[[], None]:
        self.raw.config_set("min-replicas-to-write", 1)
        return lambda: self.raw.config_set("min-replicas-to-write", 0)


class TestTier(_Served, SharedTierTests):
    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        return VALKEY_TIER.build(self.options, context)

    def raw_places(self) -> Sequence[Place]:
        return [name.decode().removeprefix(self._name("")) for name in self.raw.keys(f"{self._name('')}*")]

    def test_a_broken_block_is_removed_and_can_be_stored_again(self, rig: TierRig) -> None:
        rig.store(K[:1])
        (place,) = self.raw_places()
        frame = self.raw_read(place)
        assert frame is not None
        self.raw_write(place, frame[:-1] + bytes([frame[-1] ^ 1]))
        assert rig.load(K[:1]) == []
        rig.wait(lambda: not self.raw_places())
        # The scheduler's thread learns of the deletion in a later step, and stores the block only then.
        rig.wait(lambda: rig.store(K[:1]) == K[:1])
        assert rig.load(K[:1]) == K[:1]
