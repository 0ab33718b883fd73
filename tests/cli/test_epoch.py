"""``epoch new`` over a stack with two shared media: a bucket and a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import valkey
import yaml

from examples.valkey_server import ValkeyServer, serving
from tests.cli.runner import kv_tiering
from tests.epochs.common import find_common
from tests.fake_s3 import FakeS3, fake_s3
from tiering.admin.records import KnownNamespace
from tiering.epochs.documents import new_invalidation
from tiering.epochs.state import CommonEpoch
from tiering.errors import TemporaryStoreError
from tiering.testing.tier_rig import TierRig, make_namespace
from tiering.testing.tier_tests import K
from tiers.object import S3_TIER, S3Options
from tiers.object.command import ObjectAdmin
from tiers.object.store import ObjectStore
from tiers.valkey.tier import VALKEY_TIER, ValkeyAdmin, ValkeyOptions, ValkeyStore

BLOCK = 64 << 10
NAMESPACE = make_namespace("model-a", (BLOCK,))


@dataclass(frozen=True)
class Media:
    """A bucket and a pool, and the stack that names them."""

    bucket: FakeS3
    pool: ValkeyServer
    stack: Path

    def fill(self, *tiers: str) -> None:
        """Store blocks in the tiers called ``tiers``."""
        for name in tiers:
            rig = TierRig(
                lambda context, name=name: (  # type: ignore[misc]
                    S3_TIER.build(S3Options.model_validate(self.words["s3"]), context)
                    if name == "s3"
                    else VALKEY_TIER.build(ValkeyOptions.model_validate(self.words["valkey"]), context)
                ),
                group_bytes=(BLOCK,),
            ).open()
            assert rig.store(K[:2]) == K[:2]
            rig.close()

    @property
    def words(self) -> dict[str, dict[str, str]]:
        return {
            "s3": {"bucket": self.bucket.bucket, "endpoint_url": self.bucket.endpoint, "prefix": "prod/"},
            "valkey": {"url": self.pool.url},
        }

    def found(self, tier: str) -> CommonEpoch:
        store = (
            ObjectStore(S3Options.model_validate(self.words["s3"]))
            if tier == "s3"
            else ValkeyStore(ValkeyOptions.model_validate(self.words["valkey"]))
        )
        store.open()
        try:
            return find_common(store, NAMESPACE)
        finally:
            store.close()


@pytest.fixture
def media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Media]:
    monkeypatch.setattr("tiering.admin.shared_admin.SURE_SECONDS", 1e-9)
    with fake_s3() as bucket, serving() as pool:
        for name, value in bucket.environment().items():
            monkeypatch.setenv(name, value)
        found = Media(bucket, pool, tmp_path / "stack.yaml")
        secondary = [{"type": name, **words} for name, words in reversed(found.words.items())]
        secondary[1]["retries"] = {"attempts": 1}  # type: ignore[assignment]
        found.stack.write_text(yaml.safe_dump({"primary": {"capacity": "8MiB"}, "secondary": secondary}))
        yield found


@pytest.mark.parametrize("tier", [(), ("--tier", "s3"), ("--tier", "valkey")])
def test_one_new_epoch_concerns_all_shared_tiers(media: Media, tier: tuple[str, ...]) -> None:
    media.fill("s3", "valkey")
    dry = kv_tiering("epoch", "new", media.stack, "--all", *tier)
    assert [line.split("\t")[0] for line in dry.out.splitlines()] == ["valkey", "s3"]
    assert media.found("s3").invalidations == media.found("valkey").invalidations == ()
    done = kv_tiering("epoch", "new", media.stack, "--namespace", NAMESPACE.directory, "--yes", *tier)
    assert done.code == 0, done.err
    assert [line.split("\t")[0] for line in done.out.splitlines()] == ["valkey", "s3", "s3", "valkey"], "durable first"
    assert done.err.count("upgrade all engines first") == 1
    assert "upgrade" not in dry.err
    (mark,) = media.found("s3").invalidations
    assert media.found("valkey").invalidations == (mark,)
    again = kv_tiering("epoch", "new", media.stack, "--all", "--yes", *tier)
    assert again.code == 0
    assert media.found("s3").invalidations == media.found("valkey").invalidations != (mark,)


def test_a_namespace_that_one_medium_lacks_begins_on_the_other(media: Media) -> None:
    media.fill("s3")
    done = kv_tiering("epoch", "new", media.stack, "--namespace", NAMESPACE.directory, "--yes")
    assert (done.code, "valkey\tno namespace" in done.out) == (0, True)
    assert len(media.found("s3").invalidations) == 1
    assert kv_tiering("epoch", "new", media.stack, "--namespace", "0" * 8, "--yes").code == 2


DAMAGED = "0" * 32
"""A namespace whose document is damaged."""


def damage(media: Media) -> None:
    """Add the document of a namespace, with content that is no JSON, to both media."""
    media.bucket.objects[f"prod/documents/namespace-{DAMAGED}.json"] = b"{bad"
    store = ValkeyStore(ValkeyOptions.model_validate(media.words["valkey"]))
    store.open()
    store.write_document(f"namespace-{DAMAGED}.json", b"{bad")
    store.close()


def test_a_damaged_document_of_one_namespace_keeps_no_epoch_from_beginning(media: Media) -> None:
    media.fill("s3", "valkey")
    damage(media)
    done = kv_tiering("epoch", "new", media.stack, "--all", "--yes")
    assert done.code == 0, done.err
    for name in media.words:
        assert len(media.found(name).invalidations) == 1
        for namespace in (DAMAGED, NAMESPACE.directory):
            assert f"{name}\t{namespace[:8]}: a new epoch has begun" in done.out


def test_a_namespace_whose_epoch_cannot_begin_keeps_no_other_from_beginning(
    media: Media, monkeypatch: pytest.MonkeyPatch
) -> None:
    media.fill("s3", "valkey")
    damage(media)
    begin = ObjectAdmin.begin_epoch

    async def fail_for_one(self: ObjectAdmin, namespace: str, invalidation: bytes) -> str:
        if namespace == DAMAGED:
            raise TemporaryStoreError("the document cannot be written")
        return await begin(self, namespace, invalidation)

    monkeypatch.setattr(ObjectAdmin, "begin_epoch", fail_for_one)
    done = kv_tiering("epoch", "new", media.stack, "--all", "--yes")
    assert done.code == 1
    assert f"s3: {DAMAGED[:8]}: no new epoch has begun: the document cannot be written" in done.err
    assert len(media.found("s3").invalidations) == len(media.found("valkey").invalidations) == 1


def test_media_that_have_lost_their_documents_are_no_success(media: Media) -> None:
    done = kv_tiering("epoch", "new", media.stack, "--all", "--yes")
    assert done.code == 1
    assert all(f"{name}: holds no namespace whose epoch could begin" in done.err for name in media.words)


def test_a_pool_that_loses_its_memory_before_the_epoch_begins_is_no_success(
    media: Media, monkeypatch: pytest.MonkeyPatch
) -> None:
    media.fill("s3", "valkey")
    listed = ValkeyAdmin.namespaces

    async def namespaces(self: ValkeyAdmin) -> list[KnownNamespace]:
        found = await listed(self)
        valkey.Valkey(port=media.pool.port).flushall()
        return found

    monkeypatch.setattr(ValkeyAdmin, "namespaces", namespaces)
    done = kv_tiering("epoch", "new", media.stack, "--all", "--yes")
    assert done.code == 1
    assert "valkey: its documents have gone meanwhile" in done.err


@pytest.mark.parametrize("down", ["s3", "valkey"])
def test_a_medium_that_is_down_gets_the_epoch_later_and_the_command_says_so(media: Media, down: str) -> None:
    media.fill("s3", "valkey")
    if down == "s3":
        media.bucket.fail(503, times=10**9)
    else:
        media.pool.kill()
    done = kv_tiering("epoch", "new", media.stack, "--all", "--yes")
    up = "valkey" if down == "s3" else "s3"
    assert (done.code, f"{up}\t{NAMESPACE.directory[:8]}: a new epoch has begun" in done.out) == (1, True)
    assert f"{down}: has no new epoch yet: engines of the stack begin it there" in done.err
    media.bucket.heal()
    assert len(media.found(up).invalidations) == 1


def test_a_medium_that_fails_between_the_two_writes_is_named(media: Media) -> None:
    media.fill("s3", "valkey")
    media.bucket.fail(503, times=10**9, method="PUT")
    done = kv_tiering("epoch", "new", media.stack, "--all", "--yes")
    assert done.code == 1
    assert "s3: has no new epoch yet" in done.err
    media.bucket.heal()
    assert media.found("s3").invalidations == ()
    (mark,) = media.found("valkey").invalidations
    assert kv_tiering("epoch", "new", media.stack, "--all", "--yes").code == 0, "a repetition is safe"
    (later,) = media.found("s3").invalidations
    assert media.found("valkey").invalidations == (mark, later)


def test_a_pool_that_loses_its_memory_while_it_is_watched_gets_the_epoch_again(
    media: Media, monkeypatch: pytest.MonkeyPatch
) -> None:
    media.fill("valkey")
    monkeypatch.setattr("tiering.admin.shared_admin.SURE_SECONDS", 10.0)
    now = 0.0
    mark = new_invalidation()
    answers: list[bool] = []

    async def pause(seconds: float) -> None:
        nonlocal now
        now += 4.0
        answers.append(media.found("valkey").covers([mark]))
        if now == 4.0:
            with valkey.Valkey(port=media.pool.port) as raw:
                raw.flushall()

    monkeypatch.setattr("tiering.admin.shared_admin.time.monotonic", lambda: now)
    monkeypatch.setattr("tiering.admin.shared_admin.asyncio.sleep", pause)

    async def begin() -> None:
        with ValkeyAdmin(ValkeyOptions.model_validate(media.words["valkey"])) as admin:
            await admin.begin_epoch(NAMESPACE.directory, mark)
            await admin.watch_epochs([NAMESPACE.directory], mark)

    asyncio.run(begin())
    assert (answers, media.found("valkey").covers([mark])) == ([True] * 3, True)


def test_a_pool_that_is_gone_at_the_end_of_the_watch_is_an_error(media: Media) -> None:
    media.fill("valkey")
    mark = new_invalidation()

    async def begin() -> None:
        with ValkeyAdmin(ValkeyOptions.model_validate(media.words["valkey"])) as admin:
            await admin.begin_epoch(NAMESPACE.directory, mark)
            media.pool.kill()
            await admin.watch_epochs([NAMESPACE.directory], mark)

    with pytest.raises(TemporaryStoreError):
        asyncio.run(begin())
