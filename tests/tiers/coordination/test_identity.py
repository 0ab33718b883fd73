"""The identifier of a bucket: one for all spellings, and what copies, losses and damage do to it."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from examples.valkey_server import ValkeyServer
from tests.cli.runner import kv_tiering
from tests.fake_s3 import BEGINNING, FakeHandler, FakeS3, Trouble, serving
from tests.tiers.coordination.fleet import Fleet, find, medium_of, ready
from tests.tiers.object.rigs import lines
from tiering.errors import TemporaryStoreError
from tiering.testing.clock import FakeClock, until
from tiering.testing.tier_tests import K
from tiers.coordination import coordination
from tiers.coordination.probes import MACHINES
from tiers.object import identity
from tiers.object.bucket_options import IDENTITY, S3Options
from tiers.object.identity import SUBJECT, BucketIdentity, Identity, pack, parse
from tiers.object.store import ObjectStore
from tiers.valkey.client import ServerAddress, ValkeyClient

DOCUMENT = f"prod/documents/{IDENTITY}"


@pytest.fixture(autouse=True)
def trust(monkeypatch: pytest.MonkeyPatch, patience: None) -> None:
    monkeypatch.setattr(coordination, "VERIFIED_SHARE", 0.0)


@pytest.fixture
def other_endpoint(bucket: FakeS3) -> Iterator[str]:
    """A second address of the bucket, as a private network has one."""
    first = bucket.endpoint
    with serving(bucket, FakeHandler):
        second, bucket.endpoint = bucket.endpoint, first
        yield second


@pytest.fixture
def store(bucket: FakeS3) -> Iterator[ObjectStore]:
    words = {"bucket": bucket.bucket, "endpoint_url": bucket.endpoint, "prefix": "prod"}
    opened = ObjectStore(S3Options.model_validate(words))
    opened.open()
    yield opened
    opened.close()


def directories(client: ValkeyClient) -> set[bytes]:
    """Return the names of the directories in the server."""
    return {name for name in client.call("KEYS", "kv-tiering:1:{*}") if name.endswith(b"}")}


class TestOneBucket:
    def test_machines_that_spell_the_endpoint_differently_share_a_directory(
        self, fleet: Fleet, client: ValkeyClient, other_endpoint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = fleet.machine()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", other_endpoint.replace("127.0.0.1", "localhost"))
        two, three = fleet.machine(endpoint_url=other_endpoint), fleet.machine(endpoint_url=None)
        assert two.lookup(K[:4]) == three.lookup(K[:4]) == 0
        one.store(K[:4])
        assert find(two, K[:4], 4)
        assert find(three, K[:4], 4), "the notice of the upload has corrected the miss"
        assert len(directories(client)) == 1
        assert (fleet.heads(), fleet.uploads()) == (0, 4)

    def test_machines_that_start_together_agree(self, bucket: FakeS3) -> None:
        together, found = threading.Barrier(8), list[bytes]()

        def start() -> None:
            words = {"bucket": bucket.bucket, "endpoint_url": bucket.endpoint, "prefix": "prod"}
            opened = ObjectStore(S3Options.model_validate(words))
            opened.open()
            together.wait()
            found.append(BucketIdentity(opened, writes=True).medium())
            opened.close()

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(found) == {medium_of(bucket)}
        assert len(found) == 8

    def test_the_scheduler_waits_for_no_identifier(self, fleet: Fleet) -> None:
        fleet.bucket.fail(Trouble.HANG, part=IDENTITY)
        one = fleet.machine(whole=False)
        assert fleet.bucket.hanging.acquire(timeout=60)
        assert one.store(K[:4]) == K[:4]
        assert one.lookup(K[:4]) == 4
        assert not ready(one)
        fleet.bucket.closing.set()


class TestCopies:
    def test_a_copied_bucket_has_a_directory_of_its_own(self, fleet: Fleet, client: ValkeyClient) -> None:
        fleet.machine().store(K[:4])
        first = fleet.bucket.objects[DOCUMENT]
        copied = [name for name in fleet.bucket.objects if name.startswith("prod/documents/")]
        for name in copied:
            fleet.bucket.objects[name.replace("prod/", "copy/")] = fleet.bucket.objects[name]
            fleet.bucket.modified[name.replace("prod/", "copy/")] = BEGINNING + datetime.timedelta(days=1)
        two = fleet.machine(prefix="copy")
        assert fleet.bucket.objects[f"copy/documents/{IDENTITY}"] == first
        assert two.lookup(K[:4]) == 0
        assert two.store(K[:4]) == K[:4]
        assert len(directories(client)) == 2

    def test_machines_that_run_follow_a_bucket_that_was_restored(
        self, fleet: Fleet, client: ValkeyClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(coordination, "IDENTITY_SECONDS", 0.0)
        one = fleet.machine()
        one.store(K[:2])
        before = directories(client)
        with fleet.bucket.lock:
            fleet.bucket.objects[DOCUMENT] = pack(bytes(16))
        two = fleet.machine()
        assert until(lambda: bool(lines(caplog, "has another documents/bucket-id")))
        assert two.lookup(K[:4]) == 2
        one.store(K[2:4])
        assert find(two, K[:4], 4)
        assert len(directories(client) - before) == 1

    def test_a_lost_document_comes_back_with_its_number(self, bucket: FakeS3, store: ObjectStore) -> None:
        mine = BucketIdentity(store, writes=True)
        before = mine.medium()
        first = bucket.objects.pop(DOCUMENT)
        assert mine.medium() == before
        assert bucket.objects[DOCUMENT] == first


class TestDamage:
    @pytest.mark.parametrize("damage", [b"", b"x", pack(bytes(16))[:-1], pack(bytes(16))[:-1] + b"x", bytes(48)])
    def test_a_damaged_document_stays_and_the_next_one_counts(
        self, damage: bytes, bucket: FakeS3, store: ObjectStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        bucket.objects[DOCUMENT] = damage
        one, two = BucketIdentity(store, writes=True).medium(), BucketIdentity(store, writes=True).medium()
        assert one == two
        assert bucket.objects[DOCUMENT] == damage
        assert parse(bucket.objects[f"{DOCUMENT}-1"]) is not None
        assert len(lines(caplog, "reads damaged")) == 2

    def test_a_single_damaged_read_changes_nothing(self, bucket: FakeS3, store: ObjectStore) -> None:
        before = BucketIdentity(store, writes=True).medium()
        bucket.fail(Trouble.FLIP, method="GET", part=IDENTITY)
        assert BucketIdentity(store, writes=True).medium() == before
        assert bucket.names(IDENTITY) == [DOCUMENT]

    def test_a_bucket_that_damages_all_documents_is_given_up(self, bucket: FakeS3, store: ObjectStore) -> None:
        bucket.objects |= {f"{DOCUMENT}-{number}": b"x" for number in range(1, identity.MOST_DOCUMENTS)}
        bucket.objects[DOCUMENT] = b"x"
        with pytest.raises(Exception, match="bucket-id-7 read damaged"):
            BucketIdentity(store, writes=True).medium()

    def test_a_later_version_of_the_document_counts_as_damaged(self) -> None:
        known = pack(bytes(16))
        assert parse(known) == bytes(16)
        assert Identity(bytes(16), 1.5).medium == b"0" * 32 + b"@1"
        assert parse(known[:8] + b"\x02" + known[9:]) is None


class TestReaders:
    def test_a_machine_that_only_reads_coordinates_once_another_one_has_written(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(coordination, "RETRY_SECONDS", (0.01, 0.01))
        fleet.machine(coordination=None, whole=False).store(K[:2])
        reader = fleet.machine(admission="none", whole=False)
        assert until(lambda: bool(lines(caplog, "cannot write it (admission: none)")))
        assert reader.lookup(K[:2]) == 2
        assert fleet.bucket.names(IDENTITY) == []
        fleet.machine()
        reader.wait(lambda: ready(reader))

    def test_a_machine_without_permission_to_write_reads_on(self, bucket: FakeS3, store: ObjectStore) -> None:
        clock = FakeClock()
        bucket.fail(403, method="PUT", part=IDENTITY, code="AccessDenied")
        mine = BucketIdentity(store, writes=True, clock=clock)
        for _ in range(3):
            with pytest.raises(TemporaryStoreError, match=r"cannot write it \(.*AccessDenied"):
                mine.medium()
        assert len(bucket.asked("PUT", IDENTITY)) == 1
        clock.advance(identity.REFUSED_SECONDS)
        assert mine.medium() == medium_of(bucket)


def test_check_counts_the_engines_of_the_bucket_whatever_its_spelling(
    fleet: Fleet, server: ValkeyServer, other_endpoint: str, tmp_path: Path
) -> None:
    path = tmp_path / "stack.yaml"
    tier = {"type": "s3", "bucket": fleet.bucket.bucket, "prefix": "prod", "coordination": server.url}

    def check(endpoint: str) -> dict[str, dict[str, str]]:
        words = {"primary": {"capacity": "8MiB"}, "secondary": [tier | {"endpoint_url": endpoint}]}
        path.write_text(yaml.safe_dump(words))
        done = kv_tiering("check", path, "--tier", "s3", "--json", "--no-round-trip", "--block-bytes", "64KiB")
        return {item["subject"]: item for item in json.loads(done.out)["findings"]}

    found = check(fleet.bucket.endpoint)
    assert (found[SUBJECT]["severity"], "no documents/bucket-id yet" in found[SUBJECT]["text"]) == ("info", True)
    assert MACHINES not in found
    fleet.machine()
    fleet.machine()
    counting = ValkeyClient(ServerAddress.parse(server.url), connect_timeout=10.0, timeout=10.0)
    assert until(lambda: len(counting.call("PUBSUB", "CHANNELS", "*")) == 1)
    counting.close()
    medium = medium_of(fleet.bucket).decode()
    for endpoint in (fleet.bucket.endpoint, other_endpoint):
        found = check(endpoint)
        assert "2 engines" in found[MACHINES]["text"]
        assert (found[SUBJECT]["severity"], medium in found[SUBJECT]["text"]) == ("ok", True)
    fleet.bucket.objects[DOCUMENT] = b"x"
    fleet.bucket.objects[f"{DOCUMENT}-1"] = pack(bytes(16))
    found = check(fleet.bucket.endpoint)
    assert (found[SUBJECT]["severity"], found[MACHINES]["text"][:9]) == ("warning", "0 engines")
