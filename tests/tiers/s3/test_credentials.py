"""Credentials come from boto3's chain, are renewed, and are never shown."""

from __future__ import annotations

import builtins
import datetime
from pathlib import Path

import pytest

from tests.fake_s3 import FakeS3
from tests.tiers.s3.blocks import empty
from tiering.block_store import Done
from tiering.errors import ConfigError, PermanentStoreError
from tiering.secondary.contract import TierContext
from tiering.testing.tier_rig import make_namespace
from tiers.s3 import S3_TIER, S3Options
from tiers.s3.credentials import CredentialSource
from tiers.s3.store import S3Store


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_DEFAULT_REGION",
        "AWS_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")


def write_profile(path: Path, key: str, secret: str) -> None:
    path.write_text(f"[team]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")


def test_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    source = CredentialSource(None)
    found = source()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("AKID", "secret", "token")
    assert source.region == "eu-west-3"


def test_a_profile_is_used_and_a_rotated_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write_profile(file, "OLD", "old")
    source = CredentialSource("team")
    assert source()["access_key_id"] == "OLD"
    write_profile(file, "NEW", "new")
    assert source()["access_key_id"] == "NEW"


def test_what_boto3_renews_is_asked_for_again_without_a_new_session(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.credentials import RefreshableCredentials

    renewals: list[int] = []

    def renew() -> dict[str, str]:
        renewals.append(len(renewals))
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=1)
        return {"access_key": f"KEY{len(renewals)}", "secret_key": "s", "token": "t", "expiry_time": soon.isoformat()}

    sessions: list[object] = []

    class Session:
        region_name = None

        def __init__(self, profile_name: str | None) -> None:
            sessions.append(self)

        def get_credentials(self) -> RefreshableCredentials:
            return RefreshableCredentials.create_from_metadata(renew(), renew, "test")

    monkeypatch.setattr("boto3.session.Session", Session)
    source = CredentialSource(None)
    assert source()["access_key_id"] != source()["access_key_id"]
    assert len(sessions) == 1
    source.forget()
    source()
    assert len(sessions) == 2


def test_an_answer_is_used_for_minutes_and_not_asked_for_at_every_request(fake: FakeS3) -> None:
    calls: list[int] = []

    class Counting(CredentialSource):
        def __call__(self):  # type: ignore[no-untyped-def]
            calls.append(1)
            return super().__call__()

    store = S3Store(S3Options(bucket=fake.bucket, endpoint_url=fake.endpoint), Counting(None))
    store.open()
    assert [store.get_one(empty(f"ns/{at}")) for at in range(20)] == [Done.ABSENT] * 20
    store.close()
    assert len(calls) <= 3


def test_none_at_all_is_a_permanent_error_that_says_what_to_do() -> None:
    with pytest.raises(PermanentStoreError, match="no AWS credentials found; set AWS_ACCESS_KEY_ID"):
        CredentialSource(None)()


def test_a_profile_that_does_not_exist_is_named() -> None:
    with pytest.raises(PermanentStoreError, match="nobody"):
        CredentialSource("nobody")()


def test_nothing_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    source = CredentialSource(None)
    source()
    assert "hunter2" not in f"{source!r} {source}"


def test_credentials_that_cannot_be_renewed_fail_the_request_with_a_typed_error(fake: FakeS3) -> None:
    broken: list[int] = []

    class Failing(CredentialSource):
        def __call__(self):  # type: ignore[no-untyped-def]
            if broken:
                raise PermanentStoreError("AWS credentials: gone")
            return super().__call__() | {"expires_at": datetime.datetime.now(datetime.UTC)}

    store = S3Store(S3Options(bucket=fake.bucket, endpoint_url=fake.endpoint), Failing(None))
    store.open()
    broken.append(1)
    (outcome,) = store.get([empty("ns/1")])
    store.close()
    assert not isinstance(outcome, Done)


@pytest.mark.parametrize("package", ["boto3", "obstore"])
def test_a_missing_package_is_a_configuration_error_that_names_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: object, **words: object) -> object:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **words)  # type: ignore[arg-type]

    for module in ("tiers.s3.store", "tiers.s3.runtime", "tiers.s3.faults"):
        monkeypatch.delitem(__import__("sys").modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    context = TierContext("s3", memoryview(bytearray(4096)).cast("B", (1, 4096)), (4096,), make_namespace("m", (4096,)))
    with pytest.raises(ConfigError, match="with its extra s3"):
        S3_TIER.build(S3Options(bucket="kv-cache"), context)
