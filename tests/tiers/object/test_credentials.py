"""Credentials come from boto3's chain, are renewed, and never appear in messages."""

from __future__ import annotations

import builtins
import datetime
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_s3 import FakeS3, fake_s3
from tests.tiers.object.blocks import empty
from tests.tiers.object.rigs import Make, lines
from tiering.errors import ConfigError, PermanentStoreError
from tiering.medium.block_store import Done
from tiering.secondary.contract import TierContext
from tiering.testing.clock import FakeClock, until
from tiering.testing.tier_rig import make_namespace
from tiering.testing.tier_tests import K
from tiers.object import S3_TIER, S3Options
from tiers.object.s3.cloud import S3Cloud, check_token
from tiers.object.s3.credentials import FIXED_SECONDS, CredentialSource
from tiers.object.store import ObjectStore


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
    clock = FakeClock()
    source = CredentialSource("team", clock)
    assert source()["access_key_id"] == "OLD"
    write_profile(file, "NEW", "new")
    assert source()["access_key_id"] == "OLD"
    clock.advance(FIXED_SECONDS)
    assert until(lambda: source()["access_key_id"] == "NEW")


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
    first = source()["access_key_id"]
    assert until(lambda: source()["access_key_id"] != first)
    assert len(sessions) == 1
    source.drop()
    source()
    assert len(sessions) == 2


def test_an_answer_is_used_for_minutes_and_not_asked_for_at_every_request(fake: FakeS3) -> None:
    calls: list[int] = []

    class Counting(CredentialSource):
        def __call__(self):  # type: ignore[no-untyped-def]
            calls.append(1)
            return super().__call__()

    options = S3Options(bucket=fake.bucket, endpoint_url=fake.endpoint)
    store = ObjectStore(options, S3Cloud(options, Counting(None)))
    store.open()
    assert [store.get_one(empty(f"ns/{at}")) for at in range(20)] == [Done.ABSENT] * 20
    store.close()
    assert len(calls) <= 3


def test_a_slow_chain_delays_no_request_once_there_are_credentials(fake: FakeS3) -> None:
    slow, released = threading.Event(), threading.Event()

    class Slow(CredentialSource):
        def session(self) -> Any:
            if slow.is_set():
                released.wait()
            return super().session()

    clock = FakeClock()
    source = Slow(None, clock)
    source()
    slow.set()
    clock.advance(FIXED_SECONDS)
    assert [source()["access_key_id"] for _ in range(3)] == ["AKIDFAKE0123456789AB"] * 3

    def renewals() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "s3-credentials" and thread.is_alive()]

    assert until(renewals)
    (renewal,) = renewals()
    assert renewal.daemon
    released.set()
    renewal.join()


def test_rotated_keys_are_found_at_the_first_refusal(
    fake: FakeS3, open_store: Callable[..., ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    fake.access_key = "AKIDROTATED"
    (outcome,) = store.get([empty("ns/1")])
    assert isinstance(outcome, PermanentStoreError)
    assert "InvalidAccessKeyId" in str(outcome)
    looked = len(fake.seen)
    monkeypatch.setattr(store.requests, "_look_again_at", 0.0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDROTATED")
    assert store.get([empty("ns/1")]) == [Done.ABSENT]
    assert store.get([empty("ns/1")]) == [Done.ABSENT]
    assert len(fake.seen) == looked + 3


def test_refused_keys_that_have_not_changed_are_not_looked_up_at_every_refusal(
    fake: FakeS3, open_store: Callable[..., ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    lookups: list[int] = []

    def unchanged(self: CredentialSource) -> bool:
        lookups.append(1)
        return False

    monkeypatch.setattr(CredentialSource, "rotated", unchanged)
    fake.fail(403, code="AccessDenied", times=20)
    assert all(isinstance(outcome, PermanentStoreError) for outcome in store.get([empty("ns/1")] * 20))
    assert len(lookups) == 1


def test_a_job_goes_on_with_rotated_keys(fake: FakeS3, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make().open()
    rig.store(K[:3])
    fake.access_key = "AKIDROTATED"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDROTATED")
    assert rig.load(K[:3]) == K[:3]
    assert rig.tier.get_stats().breaker_opened == 0


class TestSessionToken:
    @pytest.fixture(autouse=True)
    def _token(self, fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token-0123456789")

    def test_never_goes_to_a_host_that_the_endpoint_redirects_to(
        self, fake: FakeS3, open_store: Callable[..., ObjectStore]
    ) -> None:
        with fake_s3() as other:
            fake.redirect_to = other.endpoint.replace("127.0.0.1", "localhost")
            with pytest.raises(PermanentStoreError, match=r"redirects to localhost:\d+, and the session token"):
                open_store()
            assert not other.seen
            assert not [seen for seen in fake.seen if "x-amz-security-token" in seen.headers]

    def test_is_sent_to_the_endpoint(self, fake: FakeS3, open_store: Callable[..., ObjectStore]) -> None:
        open_store()
        assert fake.seen[-1].headers["x-amz-security-token"] == "session-token-0123456789"

    @pytest.mark.parametrize(("host", "warned"), [("s3.example", True), ("127.0.0.1", False), ("localhost", False)])
    def test_over_plain_http_is_warned_about(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str, warned: bool
    ) -> None:
        monkeypatch.setattr("tiers.object.s3.cloud._redirection", lambda options, url: None)
        source = CredentialSource(None)
        source()
        check_token(S3Options(bucket="kv-cache", endpoint_url=f"http://{host}:9000"), source)
        assert bool(lines(caplog, "over plain HTTP")) == warned

    def test_an_endpoint_with_https_never_redirects_to_plain_http(self) -> None:
        options = S3Options(bucket="kv-cache", endpoint_url="https://s3.example")
        sent = S3Cloud(options, CredentialSource(None)).connect().client_options
        assert sent is not None
        assert str(sent["allow_http"]).lower() == "false"


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

    options = S3Options(bucket=fake.bucket, endpoint_url=fake.endpoint)
    store = ObjectStore(options, S3Cloud(options, Failing(None)))
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

    for module in ("tiers.object.store", "tiers.object.sender", "tiers.object.faults"):
        monkeypatch.delitem(__import__("sys").modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    context = TierContext("s3", memoryview(bytearray(4096)).cast("B", (1, 4096)), (4096,), make_namespace("m", (4096,)))
    with pytest.raises(ConfigError, match="with its extra s3"):
        S3_TIER.build(S3Options(bucket="kv-cache"), context)
