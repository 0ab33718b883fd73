"""Lifecycle rules through boto3, with moto in the same process."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from tests.fake_s3 import FakeS3
from tiering.admin.records import Severity
from tiers.object import S3Options
from tiers.object.s3.credentials import CredentialSource
from tiers.object.s3.settings import check_lifecycle, probe_settings
from tiers.object.store import ObjectStore

BLOCKS, DOCUMENTS, HOT_KEYS = "prod/blocks/", "prod/documents/", "prod/documents/hot-"
NOW = datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in FakeS3().environment().items():
        monkeypatch.setenv(name, value)
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="kv-cache")
        yield client
        client.close()


def check(**words: object) -> str | None:
    options = S3Options.model_validate({"bucket": "kv-cache", "prefix": "prod/", "ttl": "7d"} | words)
    return check_lifecycle(options, CredentialSource(None), BLOCKS, DOCUMENTS)


def rules(client: Any) -> list[dict[str, Any]]:
    try:
        return list(client.get_bucket_lifecycle_configuration(Bucket="kv-cache")["Rules"])
    except ClientError:
        return []


def days(client: Any) -> dict[str, int]:
    """Return the days after which objects expire, by prefix."""
    return {
        found["Filter"]["Prefix"]: found["Expiration"]["Days"]
        for found in rules(client)
        if "Days" in found["Expiration"]
    }


def put_rules(client: Any, *chosen: dict[str, Any]) -> None:
    client.put_bucket_lifecycle_configuration(Bucket="kv-cache", LifecycleConfiguration={"Rules": list(chosen)})


def rule(prefix: str, days: int, **words: Any) -> dict[str, Any]:
    return {
        "ID": f"rule {prefix}",
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "Expiration": {"Days": days},
    } | words


class TestLifecycle:
    def test_a_missing_rule_is_told_and_not_written(self, client: Any) -> None:
        assert "no lifecycle rule removes prod/blocks/* after 7 days" in (check() or "")
        assert rules(client) == []

    def test_the_rule_is_written_on_request(self, client: Any) -> None:
        assert check(install_lifecycle=True) is None
        assert days(client) == {BLOCKS: 7, HOT_KEYS: 1}
        assert check() is None

    def test_a_rule_for_hot_keys_is_added_to_rules_that_were_written_before_there_were_any(self, client: Any) -> None:
        put_rules(client, rule(BLOCKS, 7))
        assert check() is None
        assert days(client) == {BLOCKS: 7}
        assert check(install_lifecycle=True) is None
        assert days(client) == {BLOCKS: 7, HOT_KEYS: 1}

    def test_other_rules_stay_and_ours_is_replaced(self, client: Any) -> None:
        put_rules(client, rule("logs/", 3))
        check(install_lifecycle=True)
        check(install_lifecycle=True, ttl="2d")
        assert days(client) == {"logs/": 3, BLOCKS: 2, HOT_KEYS: 1}
        assert len(rules(client)) == 5

    @pytest.mark.parametrize(
        "useless",
        [
            rule(BLOCKS, 8),
            rule(BLOCKS, 7, Status="Disabled"),
            rule("prod/blocks/ab", 7),
            rule(BLOCKS, 7, Filter={"Tag": {"Key": "a", "Value": "b"}}),
        ],
    )
    def test_a_rule_that_does_not_do_it_is_not_enough(self, client: Any, useless: dict[str, Any]) -> None:
        put_rules(client, useless)
        assert check() is not None

    def test_a_rule_that_reaches_the_documents_is_warned_about(self, client: Any) -> None:
        put_rules(client, rule("", 5))
        assert "lost epoch document" in (check() or "")

    @pytest.mark.parametrize("status", ["Enabled", "Suspended"])
    def test_a_bucket_with_versions_needs_rules_for_old_versions_and_delete_markers(
        self, client: Any, status: str
    ) -> None:
        client.put_bucket_versioning(Bucket="kv-cache", VersioningConfiguration={"Status": status})
        put_rules(client, rule(BLOCKS, 7))
        assert "no lifecycle rule removes noncurrent versions of prod/blocks/*" in (check() or "")
        old = {"NoncurrentVersionExpiration": {"NoncurrentDays": 3}}
        put_rules(client, rule(BLOCKS, 7, **old))
        assert "no lifecycle rule removes the delete markers of prod/blocks/*" in (check() or "")
        put_rules(client, rule(BLOCKS, 7, **old), rule("", 1, Expiration={"ExpiredObjectDeleteMarker": True}))
        assert check() is None

    def test_the_rules_that_are_written_do_for_versions_too_and_let_no_document_expire(self, client: Any) -> None:
        client.put_bucket_versioning(Bucket="kv-cache", VersioningConfiguration={"Status": "Enabled"})
        assert check(install_lifecycle=True) is None
        assert check() is None
        for found in rules(client):
            assert found["NoncurrentVersionExpiration"]["NoncurrentDays"] == 1
            assert "Days" not in found["Expiration"] or found["Filter"]["Prefix"] in {BLOCKS, HOT_KEYS}

    def test_no_ttl_needs_no_rule(self, client: Any) -> None:
        assert check(ttl=None) is None

    def test_what_the_service_refuses_is_told_and_no_error(self, client: Any) -> None:
        assert "may not hold" in (check(bucket="another") or "")

    def test_is_looked_at_once_and_said_once(self, fake: FakeS3, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        store = ObjectStore(S3Options(bucket=fake.bucket, endpoint_url=fake.endpoint, ttl="1d"))
        store.open()
        store.open()
        store.close()
        assert [record.name for record in caplog.records if record.name.startswith("kv_tiering")] == [
            "kv_tiering.object"
        ]


@pytest.mark.parametrize("retention", [None, {"Mode": "COMPLIANCE", "Days": 30}])
def test_a_check_names_a_bucket_with_object_lock(client: Any, retention: dict[str, Any] | None) -> None:
    client.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    if retention is not None:
        client.put_object_lock_configuration(
            Bucket="locked",
            ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": retention}},
        )

    def subjects(bucket: str) -> dict[str, tuple[Severity, str]]:
        options = S3Options.model_validate({"bucket": bucket})
        found = probe_settings(options, CredentialSource(None), writes=True)
        return {finding.subject: (finding.severity, finding.remedy) for finding in found}

    severity, remedy = subjects("locked")["object lock"]
    assert severity is (Severity.WARNING if retention is None else Severity.ERROR)
    assert remedy.startswith("use a bucket without object lock")
    assert "object lock" not in subjects("kv-cache")
