"""The object tier on Google Cloud Storage, against a double of its XML API."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator

import pytest

from tests.fake_gcs import TOKEN, FakeGcs, fake_gcs
from tests.fake_s3 import Trouble
from tests.tiers.object.blocks import block, content, empty
from tests.tiers.object.suites import FleetSuite, RealStoreSuite
from tiering.admin.records import Limits, Severity
from tiering.errors import OutOfSpaceError, PermanentStoreError, StoreError, TemporaryStoreError
from tiering.medium.block_store import Done
from tiers.object import OBJECT_TIER, ObjectOptions
from tiers.object.sender import Verb
from tiers.object.store import ObjectStore


class TestStoreOnGcs(RealStoreSuite):
    serve = staticmethod(fake_gcs)


class TestTierOnGcs(FleetSuite):
    serve = staticmethod(fake_gcs)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with fake_gcs() as running:
        for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def store(server: FakeGcs) -> Iterator[ObjectStore]:
    words = server.words(server.bucket, "prod") | {"check_existing": False}
    made = ObjectStore(ObjectOptions.model_validate(words))
    made.open()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("status", "code", "kind", "text"),
    [
        (401, "AuthenticationRequired", PermanentStoreError, "no credentials"),
        (403, "AccessDenied", PermanentStoreError, "role Storage Object User"),
        (403, "UserProjectAccountProblem", PermanentStoreError, "billing"),
        (404, "NoSuchBucket", PermanentStoreError, "no such bucket"),
        (403, "QuotaExceeded", OutOfSpaceError, "over a quota"),
        (429, "SlowDown", TemporaryStoreError, "throttles"),
        (503, "ServiceUnavailable", TemporaryStoreError, "overloaded"),
        (409, "Conflict", TemporaryStoreError, "under way"),
    ],
)
def test_a_failure_names_its_cause(
    server: FakeGcs, store: ObjectStore, status: int, code: str, kind: type[StoreError], text: str
) -> None:
    server.fail(status, method="PUT", times=9, code=code)
    with pytest.raises(StoreError) as caught:
        store.put_one(block("ns/1"))
    assert type(caught.value) is kind
    assert text in str(caught.value)


def test_an_object_that_is_there_is_not_replaced_and_counts_as_stored(server: FakeGcs, store: ObjectStore) -> None:
    first, second = block("ns/1", seed=1), block("ns/1", seed=2)
    store.put_one(first)
    store.put_one(second)
    assert server.objects["prod/blocks/ns/1"] == content(first)
    assert store.requests.sent[Verb.HEAD] == 0


def test_the_generation_that_was_read_is_the_one_that_is_deleted(server: FakeGcs, store: ObjectStore) -> None:
    store.put_one(block("ns/1"))
    found = store.read_again("ns/1", 1 << 20)
    assert found is not None
    assert found.version == str(server.generations["prod/blocks/ns/1"])
    assert store.delete_version("ns/1", found.version)
    assert [seen.headers["x-goog-if-generation-match"] for seen in server.asked("DELETE")] == [found.version]


def test_bytes_that_contradict_their_etag_are_no_evidence_against_the_object(
    server: FakeGcs, store: ObjectStore
) -> None:
    store.put_one(block("ns/1"))
    server.fail(Trouble.FLIP, method="GET", part="blocks/")
    with pytest.raises(TemporaryStoreError, match="differ from their ETag"):
        store.read_again("ns/1", 1 << 20)


def test_a_token_that_was_changed_is_used_from_the_first_refusal_on(
    server: FakeGcs, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.access_key = f"{TOKEN}-renewed"
    with pytest.raises(PermanentStoreError):
        store.get_one(empty("ns/1"))
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", server.access_key)
    monkeypatch.setattr(store.requests, "_look_again_at", 0.0)
    assert store.get_one(empty("ns/1")) is Done.ABSENT


def test_a_listing_has_pages(server: FakeGcs, store: ObjectStore) -> None:
    server.page = 3
    server.make_bucket(server.bucket)
    for number in range(10):
        store.put_one(block(f"ns/{number}"))
    assert sum(len(places) for places in store.list_places("")) == 10


def test_deletion_goes_on_behind_an_object_that_is_gone(server: FakeGcs, store: ObjectStore) -> None:
    places = [f"ns/{number}" for number in range(6)]
    for place in places[3:]:
        store.put_one(block(place))
    store.delete(places)
    assert not server.objects


@pytest.mark.parametrize(("ttl", "text"), [("7d", "ttl is not checked"), (None, "no ttl")])
def test_the_check_tells_that_the_rules_cannot_be_read(server: FakeGcs, ttl: str | None, text: str) -> None:
    options = ObjectOptions.model_validate(server.words(server.bucket, "prod") | {"ttl": ttl})
    with OBJECT_TIER.admin(options, None) as admin:
        (found,) = [finding for finding in admin.check(64 << 20) if finding.subject == "lifecycle"]
    assert text in found.text
    assert found.severity is Severity.INFO


def test_blocks_older_than_the_ttl_are_collected_where_no_rule_can_be_checked(
    server: FakeGcs, store: ObjectStore
) -> None:
    folder = f"{'0' * 32}/{'1' * 32}/00"
    for number in range(4):
        store.put_one(block(f"{folder}/{number:02x}"))
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=8)
    server.modified[f"prod/blocks/{folder}/01"] = long_ago
    options = ObjectOptions.model_validate(server.words(server.bucket, "prod") | {"ttl": "7d"})
    with OBJECT_TIER.admin(options, None) as admin:
        done = asyncio.run(admin.collect(Limits(), dry_run=False))
    assert (done.blocks, done.removed_blocks) == (4, 1)
    assert f"prod/blocks/{folder}/01" not in server.objects
