"""The conformance suites of stores and tiers on every S3 server at hand; boto3 inspects the media."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest

from tests.fake_s3 import FakeS3
from tests.servers import RawBucket, S3Endpoint, ceph_rgw, moto_server, rclone_server
from tests.tiers.object.rigs import namespace_of
from tiering.block_store import Place
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.store_tests import BlockStoreTests
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K, TierTests
from tiers.object import S3_TIER, S3Options
from tiers.object.epochs import begin_epochs
from tiers.object.store import ObjectStore

BUCKET = "kv-cache"
_prefixes = itertools.count()


class _Served:
    """One server and bucket for a class of tests, with a prefix for each test."""

    serve: ClassVar[Callable[[], AbstractContextManager[S3Endpoint]]]
    bucket: RawBucket
    options: S3Options

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls) -> Iterator[tuple[S3Endpoint, RawBucket]]:
        with cls.serve() as endpoint:
            bucket = endpoint.make_bucket(BUCKET)
            yield endpoint, bucket
            bucket.client.close()

    @pytest.fixture(autouse=True)
    def _medium(self, served: tuple[S3Endpoint, RawBucket], monkeypatch: pytest.MonkeyPatch) -> None:
        endpoint, self.bucket = served
        for name, value in endpoint.environment().items():
            monkeypatch.setenv(name, value)
        self.options = S3Options(
            bucket=BUCKET, prefix=f"test-{next(_prefixes)}", endpoint_url=endpoint.endpoint, absent_ttl=0.05
        )

    def _name(self, place: Place) -> str:
        return f"{self.options.prefix}blocks/{place}"

    def raw_write(self, place: Place, data: bytes) -> None:
        self.bucket.write(self._name(place), data)

    def raw_delete(self, place: Place) -> None:
        self.bucket.delete(self._name(place))


class _StoreSuite(_Served, BlockStoreTests):
    shared = True

    def make_store(self) -> ObjectStore:
        return ObjectStore(self.options)

    def raw_read(self, place: Place) -> bytes | None:
        return self.bucket.read(self._name(place))


class _RealStoreSuite(_StoreSuite):
    def test_only_the_version_that_was_read_is_deleted(self, store: ObjectStore) -> None:
        self.raw_write("ns/1", b"bad")
        found = store.read_again("ns/1", 10)
        assert found is not None
        assert found.content == b"bad"
        self.raw_write("ns/1", b"good")
        assert not store.delete_version("ns/1", found.version)
        again = store.read_again("ns/1", 10)
        assert again is not None
        assert store.delete_version("ns/1", again.version)
        assert self.raw_read("ns/1") is None
        assert not store.delete_version("ns/1", again.version)

    def test_more_objects_than_fit_a_page_are_all_reclaimed(self, store: ObjectStore) -> None:
        for number in range(1005):
            self.raw_write(f"many/{number:04}", b"x")
        assert store.reclaim("many/") == 1005
        assert self.bucket.names(self._name("many/")) == []


class _TierSuite(_Served, TierTests):
    shared = True

    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        return S3_TIER.build(self.options, context)

    def raw_places(self) -> Sequence[Place]:
        blocks = self._name("")
        return [name.removeprefix(blocks) for name in self.bucket.names(blocks)]

    def raw_read(self, place: Place) -> bytes:
        data = self.bucket.read(self._name(place))
        if data is None:
            raise KeyError(place)
        return data

    def test_two_engines_share_a_bucket(self) -> None:
        one, two = self.make_rig().open(), self.make_rig().open()
        try:
            one.store(K[:6])
            assert two.lookup(K[:8]) == 6
            assert two.load(K[:6]) == K[:6]
        finally:
            one.close()
            two.close()

    def test_a_broken_block_is_removed_and_can_be_stored_again(self, rig: TierRig) -> None:
        rig.store(K[:1])
        (place,) = self.raw_places()
        self.raw_write(place, self.raw_read(place)[:-1] + b"?")
        assert rig.load(K[:1]) == []
        rig.wait(lambda: not self.raw_places())
        # The scheduler's thread learns of the deletion in a later step, and stores the block only then.
        rig.wait(lambda: rig.store(K[:1]) == K[:1])
        assert rig.load(K[:1]) == K[:1]

    def test_a_new_common_epoch_is_entered_by_engines_that_start(self) -> None:
        one = self.make_rig().open()
        store = ObjectStore(self.options)
        try:
            one.store(K[:2])
            store.open()
            (begun,) = begin_epochs(store)
            two = self.make_rig().open()
            try:
                assert namespace_of(two).epoch == begun.epoch
                assert two.load(K[:2]) == []
            finally:
                two.close()
        finally:
            store.close()
            one.close()


class TestStoreOnMoto(_StoreSuite):
    serve = staticmethod(moto_server)


class TestTierOnMoto(_TierSuite):
    serve = staticmethod(moto_server)


class TestStoreOnRclone(_RealStoreSuite):
    serve = staticmethod(rclone_server)


class TestTierOnRclone(_TierSuite):
    serve = staticmethod(rclone_server)


@pytest.mark.ceph
class TestStoreOnCeph(_RealStoreSuite):
    serve = staticmethod(ceph_rgw)


@pytest.mark.ceph
class TestTierOnCeph(_TierSuite):
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
