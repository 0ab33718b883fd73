"""``type: object`` names its place by a URL, and means the same place as ``type: s3``."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import tiering
from tests.fake_s3 import FakeS3
from tests.tiers.object.rigs import BLOCK_BYTES
from tiering.errors import ConfigError
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.object import OBJECT_TIER, S3_TIER, ObjectOptions, S3Options

ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"


def options(url: str, **words: object) -> ObjectOptions:
    return ObjectOptions.model_validate({"url": url} | words)


@pytest.mark.parametrize(
    ("url", "scheme", "bucket", "prefix"),
    [
        ("s3://kv-cache", "s3", "kv-cache", ""),
        ("s3://kv-cache/", "s3", "kv-cache", ""),
        ("gs://kv.example.com/prod", "gs", "kv.example.com", "prod/"),
        ("az://container/a/b/", "az", "container", "a/b/"),
    ],
)
def test_a_url_tells_cloud_bucket_and_prefix(url: str, scheme: str, bucket: str, prefix: str) -> None:
    found = options(url, account="myaccount" if scheme == "az" else None)
    assert (found.scheme, found.bucket, found.prefix) == (scheme, bucket, prefix)


@pytest.mark.parametrize(
    "url",
    ["", "kv-cache", "http://kv-cache/x", "s3:/kv-cache", "s3://", "S3://kv-cache", "s3://kv-cache/a//b",
     "s3://kv-cache/../x", "gs://kv-cache?x=1", "az://a/b"],
)  # fmt: skip
def test_what_is_no_url_of_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        options(url, account="myaccount")


@pytest.mark.parametrize("url", ["s3://key:hunter2@kv-cache/x", "az://container?sig=hunter2", "az://c@hunter2/x"])
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiering.load_stack({"primary": {"capacity": "1MiB"}, "secondary": [{"type": "object", "url": url}]})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "word", "value"),
    [
        ("gs://kv-cache", "profile", "prod"),
        ("gs://kv-cache", "sse", "AES256"),
        ("az://kv-cache", "region", "eu-west-1"),
        ("az://kv-cache", "bulk_delete", False),
        ("s3://kv-cache", "account", "myaccount"),
    ],
)
def test_a_word_of_another_cloud_is_refused(
    url: str, word: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ACCOUNT, "myaccount")
    with pytest.raises(ValidationError, match=f"{word} is a word for (s3|az):// only"):
        options(url, **{word: value})


@pytest.mark.parametrize("word", ["account_key", "sas_token", "service_account_key"])
def test_no_secret_is_written_into_a_stack(word: str) -> None:
    with pytest.raises(ValidationError, match="secrets are not written into a stack") as caught:
        options("gs://kv-cache", **{word: "hunter2-hunter2"})
    assert "hunter2" not in str(caught.value)


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ACCOUNT, raising=False)
    with pytest.raises(ValidationError, match="set account, or AZURE_STORAGE_ACCOUNT_NAME"):
        options("az://container")
    monkeypatch.setenv(ACCOUNT, "fromtheworld")
    assert options("az://container").account_name == "fromtheworld"
    assert options("az://container", account="fromstack").account_name == "fromstack"


def test_only_an_azure_endpoint_has_the_account_behind_it() -> None:
    assert options("az://c0ntainer", account="abc", endpoint_url="http://127.0.0.1:1/abc/").endpoint is not None
    with pytest.raises(ValidationError, match="not an endpoint"):
        options("s3://kv-cache", endpoint_url="http://127.0.0.1:1/abc")


@pytest.mark.parametrize("words", [{}, {"endpoint_url": "http://127.0.0.1:9000"}])
def test_both_spellings_are_one_place_and_have_one_name(words: dict[str, object]) -> None:
    by_url = options("s3://kv-cache/prod", **words)
    by_words = S3Options.model_validate({"bucket": "kv-cache", "prefix": "prod/"} | words)
    assert OBJECT_TIER.location(by_url) == S3_TIER.location(by_words)
    assert by_url.tier_name == by_words.tier_name == "s3"


def test_two_tiers_on_one_place_are_refused_whatever_the_spelling() -> None:
    twice = [
        {"type": "object", "name": "a", "url": "s3://kv-cache/x"},
        {"type": "s3", "bucket": "kv-cache", "prefix": "x"},
    ]
    with pytest.raises(ConfigError, match="s3://kv-cache/x/"):
        tiering.load_stack({"primary": {"capacity": "1MiB"}, "secondary": twice})


@pytest.mark.parametrize("order", [1, -1])
def test_blocks_stored_under_one_spelling_are_found_under_the_other(fake: FakeS3, order: int) -> None:
    by_words = S3Options.model_validate({"bucket": fake.bucket, "prefix": "prod", "endpoint_url": fake.endpoint})
    by_url = options(f"s3://{fake.bucket}/prod", endpoint_url=fake.endpoint)
    before, after = (
        TierRig(lambda context, chosen=chosen: OBJECT_TIER.build(chosen, context), group_bytes=(BLOCK_BYTES,))  # type: ignore[misc]
        for chosen in (by_words, by_url)[::order]
    )
    assert before.open().store(K[:3]) == K[:3]
    assert before.close()
    try:
        assert after.open().load(K[:3]) == K[:3]
    finally:
        after.close()
