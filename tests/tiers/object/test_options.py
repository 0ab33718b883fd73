"""Options of an object store: accepted values and refused ones."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tiers.object import S3_TIER, S3Options, small_block_warning

MIB = 1 << 20


def options(**words: object) -> S3Options:
    return S3Options.model_validate({"bucket": "kv-cache"} | words)


@pytest.mark.parametrize(
    ("word", "value"), [("capacity", "1TiB"), ("high_watermark", 0.9), ("low_watermark", 0.8), ("eviction", "arc")]
)
def test_nothing_that_needs_to_see_all_accesses(word: str, value: object) -> None:
    with pytest.raises(ValidationError, match=rf"{word} is not supported.*no engine sees all accesses"):
        options(**{word: value})


@pytest.mark.parametrize("word", ["access_key_id", "secret_access_key", "session_token"])
def test_no_secret_in_the_stack_and_none_in_the_message(word: str) -> None:
    with pytest.raises(ValidationError, match="secrets are not written into a stack") as caught:
        options(**{word: "hunter2-hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "normal"), [("", ""), ("prod", "prod/"), ("prod/", "prod/"), ("a/b=1/c.d", "a/b=1/c.d/")]
)
def test_a_prefix_ends_with_a_slash(given: str, normal: str) -> None:
    assert options(prefix=given).prefix == normal


@pytest.mark.parametrize("prefix", ["blocks", "a/blocks/", "documents/b", "a/documents"])
def test_a_prefix_that_lies_within_another_stack_s_objects_is_refused(prefix: str) -> None:
    with pytest.raises(ValidationError, match=r"has the part '(blocks|documents)', which names the objects of a stack"):
        options(prefix=prefix)


def test_parts_that_only_begin_like_a_stack_s_objects_are_prefixes() -> None:
    assert options(prefix="blocks-of-mine/my-documents").prefix == "blocks-of-mine/my-documents/"


@pytest.mark.parametrize("prefix", ["/", "/prod", "a//b", "../x", "a/./b", "a b", "ä"])
def test_a_prefix_that_could_mean_two_things_is_refused(prefix: str) -> None:
    with pytest.raises(ValidationError, match="is not a prefix"):
        options(prefix=prefix)


@pytest.mark.parametrize("bucket", ["", "ab", "a/b", "a..b", "-ab", "s3://kv"])
def test_what_is_no_bucket_name_is_refused(bucket: str) -> None:
    with pytest.raises(ValidationError, match="not a bucket's name"):
        options(bucket=bucket)


@pytest.mark.parametrize("endpoint", ["host:9000", "ftp://host", "http://", "http://host/bucket", "https://host?x=1"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="not an endpoint"):
        options(endpoint_url=endpoint)


def test_an_endpoint_with_credentials_is_refused_without_repeating_them() -> None:
    with pytest.raises(ValidationError, match="must not contain credentials") as caught:
        options(endpoint_url="https://key:hunter2@host")
    assert "hunter2" not in str(caught.value)


def test_path_style_goes_with_an_endpoint_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert not options().uses_path_style
    assert options(endpoint_url="http://host").uses_path_style
    assert not options(endpoint_url="http://host", path_style=False).uses_path_style
    assert options(path_style=True).uses_path_style


def test_ttl_counts_whole_days() -> None:
    assert options(ttl="7d").ttl_days == 7
    with pytest.raises(ValidationError, match="whole days"):
        options(ttl="36h")


def test_words_that_need_another_word_say_so() -> None:
    with pytest.raises(ValidationError, match="needs sse"):
        options(sse_kms_key_id="k")
    with pytest.raises(ValidationError, match="needs a ttl"):
        options(install_lifecycle=True)


def test_compression_is_supported() -> None:
    assert options(compression="zstd").compression == "zstd"


def test_two_tiers_in_one_place_can_be_told() -> None:
    assert S3_TIER.location(options(prefix="a")) == S3_TIER.location(options(prefix="a/"))
    assert S3_TIER.location(options(prefix="a")) != S3_TIER.location(options(prefix="b"))
    assert S3_TIER.persistent


def test_small_blocks_are_warned_about() -> None:
    assert "512 KiB" in (small_block_warning(MIB // 2) or "")
    assert small_block_warning(4 * MIB) is None
