from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.fake_s3 import FakeS3
from tests.tiers.object.rigs import Make, make_rig
from tiering.testing.tier_rig import TierRig
from tiers.object.bucket_options import S3Options
from tiers.object.store import ObjectStore


@pytest.fixture
def open_store(fake: FakeS3) -> Iterator[Callable[..., ObjectStore]]:
    stores: list[ObjectStore] = []

    def build(**words: object) -> ObjectStore:
        store = ObjectStore(
            S3Options.model_validate({"bucket": fake.bucket, "endpoint_url": fake.endpoint, "prefix": "prod/"} | words)
        )
        stores.append(store)
        store.open()
        return store

    yield build
    for store in stores:
        store.close()


@pytest.fixture
def make(fake: FakeS3) -> Iterator[Make]:
    rigs: list[TierRig] = []

    def build(kind: type[TierRig] = TierRig, **words: object) -> TierRig:
        rigs.append(make_rig(fake, kind, **words))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()
