"""The conformance suites on every S3 server at hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_s3 import FakeS3
from tests.servers import ceph_rgw, moto_server, rclone_server
from tests.tiers.object.suites import FleetSuite, RealStoreSuite, StoreSuite, TierSuite
from tiering.medium.block_store import Place
from tiering.testing.store_tests import BlockStoreTests
from tiers.object import S3Options
from tiers.object.store import ObjectStore


class TestStoreOnMoto(StoreSuite):
    serve = staticmethod(moto_server)


class TestTierOnMoto(FleetSuite):
    serve = staticmethod(moto_server)


class TestStoreOnRclone(RealStoreSuite):
    serve = staticmethod(rclone_server)


class TestTierOnRclone(TierSuite):
    serve = staticmethod(rclone_server)


@pytest.mark.ceph
class TestStoreOnCeph(RealStoreSuite):
    serve = staticmethod(ceph_rgw)


@pytest.mark.ceph
class TestTierOnCeph(FleetSuite):
    serve = staticmethod(ceph_rgw)


class TestStoreOnAServerThatFails(BlockStoreTests):
    shared = True

    @pytest.fixture(autouse=True)
    def _medium(self, fake: FakeS3) -> None:
        self.fake = fake

    def make_store(self) -> ObjectStore:
        return ObjectStore(S3Options(bucket=self.fake.bucket, endpoint_url=self.fake.endpoint))

    def raw_read(self, place: Place) -> bytes | None:
        return self.fake.objects.get(f"blocks/{place}")

    def raw_write(self, place: Place, data: bytes) -> None:
        self.fake.objects[f"blocks/{place}"] = data

    def raw_delete(self, place: Place) -> None:
        self.fake.objects.pop(f"blocks/{place}", None)

    def break_medium(self) -> Callable[[], None]:
        self.fake.fail(503, times=1 << 30)
        return self.fake.heal
