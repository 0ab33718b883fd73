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
from tiers.object import S3Options
from tiers.object.s3.credentials import CredentialSource
from tiers.object.s3.lifecycle import check_lifecycle
from tiers.object.store import ObjectStore

BLOCKS, DOCUMENTS = "prod/blocks/", "prod/documents/"
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
        (written,) = rules(client)
        assert written["Filter"]["Prefix"] == BLOCKS
        assert written["Expiration"]["Days"] == 7
        assert check() is None

    def test_other_rules_stay_and_ours_is_replaced(self, client: Any) -> None:
        put_rules(client, rule("logs/", 3))
        check(install_lifecycle=True)
        check(install_lifecycle=True, ttl="2d")
        assert sorted((found["Filter"]["Prefix"], found["Expiration"]["Days"]) for found in rules(client)) == [
            ("logs/", 3),
            (BLOCKS, 2),
        ]

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
