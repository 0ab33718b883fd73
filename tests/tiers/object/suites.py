"""The conformance suites for the servers of all clouds, whose own clients inspect the media."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import pytest

from tests.patience import PATIENT
from tests.servers import Bucket, Endpoint
from tests.tiers.object.new_epoch import begin_epochs
from tests.tiers.object.rigs import namespace_of
from tests.tiers.shared_tier import SharedTierTests
from tiering.admin.records import Limits, Severity
from tiering.admin.tier_admin import TierAdmin
from tiering.block_tier.definition import TierDefinition
from tiering.config.registry import tier_definition
from tiering.errors import StoreError
from tiering.medium.block_store import Place
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.store_tests import BlockStoreTests
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.object.bucket_options import BucketOptions
from tiers.object.collection_lease import NAME, SECONDS, CollectionLease
from tiers.object.store import ObjectStore

T = TypeVar("T")

BUCKET = "kv-cache"
Serve = Callable[[], AbstractContextManager[Endpoint]]
"""Function that runs a service."""
Start = Callable[[Serve], tuple[Endpoint, Bucket]]
_prefixes = itertools.count()


class Served:
    """One server and bucket for all classes of a module, with a prefix for each test."""

    serve: ClassVar[Serve]
    bucket: Bucket
    definition: TierDefinition
    options: BucketOptions

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, started: Start) -> tuple[Endpoint, Bucket]:
        return started(cls.serve)

    @pytest.fixture(autouse=True)
    def _medium(self, served: tuple[Endpoint, Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
        endpoint, self.bucket = served
        for name, value in endpoint.environment().items():
            monkeypatch.setenv(name, value)
        words = endpoint.words(BUCKET, f"test-{next(_prefixes)}") | {"absent_ttl": 0.05, **PATIENT}
        self.definition = tier_definition(words["type"])
        options = self.definition.options.model_validate(words)
        assert isinstance(options, BucketOptions)
        self.options = options

    def _name(self, place: Place) -> str:
        return f"{self.options.prefix}blocks/{place}"

    def raw_write(self, place: Place, data: bytes) -> None:
        self.bucket.write(self._name(place), data)

    def raw_delete(self, place: Place) -> None:
        self.bucket.delete(self._name(place))


class StoreSuite(Served, BlockStoreTests):
    shared = True

    def make_store(self) -> ObjectStore:
        return ObjectStore(self.options)

    def raw_read(self, place: Place) -> bytes | None:
        return self.bucket.read(self._name(place))


class RealStoreSuite(StoreSuite):
    many: ClassVar[int] = 1005
    """More objects than a page of a list or a request of deletions has."""

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

    def test_more_objects_than_fit_a_page_are_all_listed_and_deleted(self, store: ObjectStore) -> None:
        with ThreadPoolExecutor(8) as pool:
            deque(pool.map(lambda number: self.raw_write(f"many/{number:04}", b"x"), range(self.many)), maxlen=0)
        listed = [place for places in store.list_places("many/") for place in places]
        assert len(listed) == self.many
        store.delete(listed)
        assert self.bucket.names(self._name("many/")) == []

    def test_a_block_is_copied_onto_itself(self, store: ObjectStore) -> None:
        self.raw_write("ns/1", b"content")
        store._renew(self._name("ns/1"))
        assert self.raw_read("ns/1") == b"content"
        assert store._modified(self._name("ns/1")) is not None


class TierSuite(Served, SharedTierTests):
    proves: ClassVar[bool] = True
    """True if the service's ETag of an object is a digest of its bytes."""

    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        return self.definition.build(self.options, context)

    def raw_places(self) -> Sequence[Place]:
        blocks = self._name("")
        return [name.removeprefix(blocks) for name in self.bucket.names(blocks)]

    def raw_read(self, place: Place) -> bytes:
        data = self.bucket.read(self._name(place))
        if data is None:
            raise KeyError(place)
        return data

    def test_a_broken_block_is_removed_if_that_is_proven_and_can_be_stored_again(self, rig: TierRig) -> None:
        rig.store(K[:1])
        (place,) = self.raw_places()
        self.raw_write(place, self.raw_read(place)[:-1] + b"?")
        assert rig.load(K[:1]) == []
        # The scheduler's thread learns of the verdict in a later step, and stores the block only then.
        rig.wait(lambda: rig.store(K[:1]) == K[:1])
        assert rig.load(K[:1]) == K[:1]
        assert self.raw_places() == ([place] if self.proves else [place, f"{place}.1"])

    def test_a_new_common_epoch_is_entered_by_engines_that_start(self) -> None:
        one = self.make_rig().open()
        store = ObjectStore(self.options)
        try:
            one.store(K[:2])
            store.open()
            (begun,) = begin_epochs(store)
            two = self.make_rig().open()
            try:
                assert namespace_of(two).epoch == begun
                assert two.load(K[:2]) == []
            finally:
                two.close()
        finally:
            store.close()
            one.close()


class FleetSuite(TierSuite):
    """The rules of a fleet on one bucket, for services that have conditional requests."""

    @pytest.fixture
    def machines(self) -> Iterator[Callable[[], TierRig]]:
        rigs: list[TierRig] = []

        def start() -> TierRig:
            rigs.append(self.make_rig().open())
            return rigs[-1]

        yield start
        for rig in rigs:
            rig.close()

    def administer(self, work: Callable[[TierAdmin], Coroutine[Any, Any, T]], later: float = 0.0) -> T:
        """Run ``work`` on the bucket's administration, whose clock is ``later`` seconds ahead."""
        with self.definition.admin(self.options, None) as admin:
            admin.clock = lambda: time.time() + later
            return asyncio.run(work(admin))

    def test_machines_that_start_together_agree_on_one_epoch(self) -> None:
        rigs = [self.make_rig() for _ in range(4)]
        try:
            with ThreadPoolExecutor(len(rigs)) as pool:
                list(pool.map(TierRig.open, rigs))
            assert len({namespace_of(rig).epoch for rig in rigs}) == 1
            rigs[0].store(K[:2])
            assert rigs[-1].load(K[:2]) == K[:2]
        finally:
            for rig in rigs:
                rig.close()

    def test_a_reset_of_one_machine_leaves_the_blocks_to_the_others(self, machines: Callable[[], TierRig]) -> None:
        one, other = machines(), machines()
        one.store(K[:4])
        assert one.tier.reset(time.monotonic() + 5)
        assert one.load(K[:4]) == []
        assert other.load(K[:4]) == K[:4]
        assert machines().load(K[:4]) == K[:4]

    def test_blocks_of_an_epoch_without_a_fresh_lease_are_collected(self, machines: Callable[[], TierRig]) -> None:
        common, private = machines(), machines()
        assert private.tier.reset(time.monotonic() + 5)
        private.store(K[4:8])
        common.store(K[:4])
        documents = f"{self.options.prefix}documents/lease-"
        private.wait(lambda: self.bucket.names(documents))
        limits = Limits(abandoned=True)
        assert self.administer(lambda admin: admin.collect(limits, dry_run=False)).removed_blocks == 0
        done = self.administer(lambda admin: admin.collect(limits, dry_run=False), later=limits.grace + 60)
        assert (done.blocks, done.removed_blocks) == (8, 4)
        assert common.load(K[:4]) == K[:4]

    def test_a_listing_goes_on_behind_a_place(self, machines: Callable[[], TierRig]) -> None:
        machines().store(K[:8])
        for number in range(4):
            self.raw_write(f"{'0' * 32}/{'1' * 32}/ab/ab{number:038}", b"one of a folder")

        async def places(admin: TierAdmin, after: str = "") -> list[str]:
            return [block.place async for block in admin.blocks(after)]

        everything = self.administer(places)
        assert len(everything) == 12
        assert everything == sorted(everything)
        for at in (1, 8):
            assert self.administer(lambda admin, at=at: places(admin, everything[at])) == everything[at + 1 :]  # type: ignore[misc]

    def test_one_collection_runs_at_a_time(self) -> None:
        limits = Limits(older_than=0.0)

        async def work() -> None:
            with self.definition.admin(self.options, None) as one, self.definition.admin(self.options, None) as two:
                async with one.exclusively():
                    with pytest.raises(StoreError, match=r"another collection of .* runs"):
                        await two.collect(limits, dry_run=False)
                    await two.collect(limits, dry_run=True)
                await two.collect(limits, dry_run=False)

        asyncio.run(work())

    def test_the_lease_of_a_killed_collection_is_taken_over_and_stops_it_if_it_lives(self) -> None:
        store = self.make_store()
        store.open()
        try:
            slow = CollectionLease(store, "here")
            slow._acquire()
            late = CollectionLease(store, "here", clock=lambda: time.time() + SECONDS + 60)
            late._acquire()
            assert not slow.renew()
            assert late.renew()
            slow._release()
            assert store.read_version(NAME) is not None
            late._release()
            assert store.read_version(NAME) is None
        finally:
            store.close()

    def make_store(self) -> ObjectStore:
        return ObjectStore(self.options)

    def test_blocks_of_every_form_of_names_are_listed(self, machines: Callable[[], TierRig]) -> None:
        one = machines()
        one.store(K[:3])
        place = f"{namespace_of(one).directory}/{'0' * 32}/{'ab' * 20}"
        self.raw_write(place, b"a name without the folder of two digits")

        async def places(admin: TierAdmin) -> list[str]:
            return [block.place async for block in admin.blocks()]

        found = self.administer(places)
        assert place in found
        assert found == sorted(str(name) for name in self.raw_places())

    def test_the_check_finds_every_permission(self) -> None:
        with self.definition.admin(self.options, None) as admin:
            found = {finding.subject: finding.severity for finding in admin.check(64 << 20)}
        steps = ("credentials", "list", "put", "head", "get", "conditional put", "delete one version", "delete")
        assert {step: found.get(step) for step in steps} == dict.fromkeys(steps, Severity.OK)
        assert self.bucket.names(self.options.prefix) == []
