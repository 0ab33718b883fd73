"""Corrupt reads in a shared bucket: one machine's trouble must not delete blocks that others can read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.fake_s3 import LOGIN_PAGE, FakeS3, Trouble, etag
from tests.tiers.object.rigs import Make, block_names, lines
from tiering.block_tier.corrupt import BUDGET
from tiering.errors import TemporaryStoreError
from tiering.testing.clock import until
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.object.sender import Verb
from tiers.object.store import ObjectStore


def damage(fake: FakeS3, names: list[str]) -> None:
    for name in names:
        fake.objects[name] = fake.objects[name][:-1] + bytes([fake.objects[name][-1] ^ 1])


def read_again(rig: TierRig, caplog: pytest.LogCaptureFixture, verdict: str) -> None:
    rig.wait(lambda: lines(caplog, verdict))


def test_a_corrupt_object_is_deleted_after_two_more_reads_under_the_version_that_was_read(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make().open()
    rig.store(K[:1])
    (name,) = block_names(fake)
    damage(fake, [name])
    tag = etag(fake.objects[name])
    assert rig.load(K[:1]) == []
    read_again(rig, caplog, "was deleted")
    assert not block_names(fake)
    assert len(fake.asked("GET", name)) == 3
    assert [seen.headers["if-match"] for seen in fake.asked("DELETE")] == [tag]
    assert rig.store(K[:1]) == K[:1]
    assert rig.load(K[:1]) == K[:1]


@pytest.mark.parametrize("trouble", [Trouble.FLIP, Trouble.LOGIN_PAGE])
def test_a_machine_that_reads_wrong_once_deletes_nothing_and_leaves_the_block_alone(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture, trouble: Trouble
) -> None:
    sick, healthy = make().open(), make().open()
    sick.store(K[:3])
    fake.fail(trouble, method="GET", part="/blocks/")
    assert len(sick.load(K[:1])) == 0
    read_again(sick, caplog, "suspect the memory of this machine")
    assert len(block_names(fake)) == 3
    assert not fake.asked("DELETE") + fake.asked("POST")
    assert sick.lookup(K[:3]) == 0
    assert sick.store(K[:1]) == []
    assert healthy.lookup(K[:3]) == 3
    assert healthy.load(K[:3]) == K[:3]


def test_bytes_that_contradict_their_etag_are_no_evidence_against_the_object(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make().open()
    rig.store(K[:1])
    fake.fail(Trouble.FLIP, method="GET", part="/blocks/", times=1 << 30)
    assert rig.load(K[:1]) == []
    read_again(rig, caplog, "the bytes differ from their ETag")
    assert len(block_names(fake)) == 1


def test_a_proxy_that_answers_everything_with_a_page_deletes_nothing_and_opens_the_breaker(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    sick, healthy = make(breaker={"probe_after": "1m"}).open(), make().open()
    sick.store(K[:20])
    fake.fail(Trouble.LOGIN_PAGE, part="/blocks/", times=1 << 30)
    assert sick.load(K[:20]) == []
    (line,) = lines(caplog, "out of service")
    assert "suspect a proxy" in line
    assert "memory of this machine" in line
    assert not sick.tier.get_stats().available
    fake.heal()
    assert sick.close()
    assert len(block_names(fake)) == 20
    assert healthy.load(K[:20]) == K[:20]


def test_no_process_deletes_more_than_its_budget(fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make().open()
    rig.store(K[:15])
    damage(fake, block_names(fake))
    assert rig.load(K[:15]) == []
    rig.wait(lambda: len(fake.asked("DELETE")) == BUDGET)
    assert rig.close()
    assert len(block_names(fake)) == 15 - BUDGET


@pytest.mark.parametrize("conditional_delete", [412, 0, 501])
def test_a_block_that_was_replaced_meanwhile_is_not_deleted(
    fake: FakeS3, open_store: Callable[..., ObjectStore], conditional_delete: int
) -> None:
    fake.conditional_delete = conditional_delete
    store = open_store()
    fake.objects["prod/blocks/ns/1"] = b"good"
    assert not store.delete_version("ns/1", etag(b"bad"))
    assert fake.objects == {"prod/blocks/ns/1": b"good"}
    assert store.delete_version("ns/1", etag(b"good"))
    assert not fake.objects
    assert not store.delete_version("ns/1", etag(b"good"))


def test_the_service_itself_refuses_to_delete_what_came_after_the_comparison(
    fake: FakeS3, open_store: Callable[..., ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    fake.objects["prod/blocks/ns/1"] = b"bad"
    send = store.requests.send

    def replaced_before_deletion(verb: Verb, request: Any, **words: Any) -> Any:
        if verb is Verb.DELETE:
            fake.objects["prod/blocks/ns/1"] = b"good"
        return send(verb, request, **words)

    monkeypatch.setattr(store.requests, "send", replaced_before_deletion)
    assert not store.delete_version("ns/1", etag(b"bad"))
    assert fake.objects == {"prod/blocks/ns/1": b"good"}


def test_a_block_is_read_again_over_another_connection_and_at_most_as_long_as_a_block(
    fake: FakeS3, open_store: Callable[..., ObjectStore]
) -> None:
    store = open_store()
    fake.objects["prod/blocks/ns/1"] = LOGIN_PAGE
    assert store.read_again("ns/0", 10) is None
    found = store.read_again("ns/1", len(LOGIN_PAGE))
    assert found is not None
    assert (found.content, found.size, found.version) == (LOGIN_PAGE, len(LOGIN_PAGE), etag(LOGIN_PAGE))
    too_long = store.read_again("ns/1", 10)
    assert too_long is not None
    assert (too_long.content, too_long.size) == (b"", len(LOGIN_PAGE))
    ports = [seen.port for seen in fake.asked("GET", "ns/1")]
    assert len(set(ports)) == 2
    fake.fail(503, part="ns/1")
    with pytest.raises(TemporaryStoreError):
        store.read_again("ns/1", 10)


def test_a_refused_block_is_forgotten_when_the_epoch_is_left(fake: FakeS3, make: Make) -> None:
    rig = make().open()
    rig.store(K[:1])
    fake.fail(Trouble.FLIP, method="GET", part="/blocks/")
    assert rig.load(K[:1]) == []
    assert rig.store(K[:1]) == []
    assert rig.tier.reset(1e9)
    assert rig.store(K[:1]) == K[:1]
    assert until(lambda: len(block_names(fake)) == 2)
