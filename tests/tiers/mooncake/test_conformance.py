"""The conformance suites of stores and tiers on a real pool, inspected by Mooncake's own client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from examples.mooncake_pool import Master
from tests.patience import PATIENT
from tests.tiers.mooncake.pool import Raw
from tests.tiers.shared_tier import SharedTierTests
from tiering.api.keys import OffloadKey
from tiering.index.shared import object_name
from tiering.medium.block_store import Place
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.keys import key_of
from tiering.testing.store_tests import BlockStoreTests
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.mooncake import MOONCAKE_TIER, MooncakeOptions
from tiers.mooncake.client import PoolClient
from tiers.mooncake.tier import MooncakeStore

_prefixes = itertools.count()


class _Served:
    """A pool for all tests of the module, with a prefix for each test."""

    raw: Raw
    options: MooncakeOptions

    @pytest.fixture(autouse=True)
    def _medium(self, pool: Master, raw: Raw) -> None:
        self.raw = raw
        self.options = MooncakeOptions(
            master=pool.address,
            prefix=f"test-{next(_prefixes)}",
            absent_ttl=0.05,
            **PATIENT,
        )

    def _name(self, place: Place) -> str:
        return f"{self.options.prefix}/{place}"

    def raw_write(self, place: Place, data: bytes) -> None:
        self.raw.write(self._name(place), data)

    def raw_delete(self, place: Place) -> None:
        self.raw.delete(self._name(place))

    def raw_read(self, place: Place) -> bytes | None:
        return self.raw.read(self._name(place))


class _LastingClient(PoolClient):
    """A client that stays connected when its stores close: the end of a native one takes a second."""

    def close(self) -> None:
        pass


class TestStore(_Served, BlockStoreTests):
    shared = True
    documents = False

    @pytest.fixture(scope="class")
    @classmethod
    def lasting(cls, pool: Master) -> Iterator[PoolClient]:
        client = _LastingClient(MooncakeOptions(master=pool.address), memoryview(b""))
        yield client
        PoolClient.close(client)

    @pytest.fixture(autouse=True)
    def _use(self, lasting: PoolClient) -> None:
        self.client = lasting

    def make_store(self) -> MooncakeStore:
        return MooncakeStore(self.options, self.client)


class TestTier(_Served, SharedTierTests):
    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        self.namespaces = {*getattr(self, "namespaces", set()), context.namespace}
        return MOONCAKE_TIER.build(self.options, context)

    def make_rig(self, model: str = "model-a") -> TierRig:
        return TierRig(self.make_tier, group_bytes=self.group_bytes, model=model, revision="1")

    def raw_places(self) -> Sequence[Place]:
        """Return the places of the suite's keys that hold a block: Mooncake cannot list its keys."""
        keys: list[OffloadKey] = [*K, key_of(1, group=1), key_of(2, group=1)]
        prefixes = [f"{space.directory}/{space.revision_epoch('1').fingerprint.hex()}/" for space in self.namespaces]
        places = [object_name(prefix, key) for prefix in prefixes for key in keys]
        return [place for place in places if self.raw.exists(self._name(place))]
