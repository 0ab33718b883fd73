"""Sweeps: the variants of a stack, and the errors of invalid variants."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tiering.config.source import read_plain
from tiering.errors import ConfigError
from tiering.replay.sweep import parse_axis, points, size_text

STACK = {"primary": {"capacity": "8GiB"}, "secondary": [{"type": "local", "path": "/x", "capacity": "1TiB"}]}


def test_a_range_doubles_and_ends_with_its_last_size() -> None:
    assert parse_axis("primary.capacity=1GiB..8GiB").values == ("1GiB", "2GiB", "4GiB", "8GiB")
    assert parse_axis("primary.capacity=1GiB..10GiB").values == ("1GiB", "2GiB", "4GiB", "8GiB", "10GiB")
    assert parse_axis("primary.capacity=1GiB..100GiB/3").values == ("1GiB", "10GiB", "100GiB")


def test_lists_hold_words_and_numbers() -> None:
    axis = parse_axis("secondary[0].min_prefix_blocks=1,8")
    assert (axis.path, axis.values) == (("secondary", 0, "min_prefix_blocks"), (1, 8))
    assert parse_axis("primary.eviction=lru,arc").values == ("lru", "arc")


def test_all_combinations_are_validated_stacks_with_their_text() -> None:
    axes = [parse_axis("primary.capacity=1GiB..2GiB"), parse_axis("secondary[0].eviction=lru,arc")]
    found = points(STACK, axes)
    assert [list(point.settings.values()) for point in found] == [
        ["1GiB", "lru", "local"], ["1GiB", "arc", "local"], ["2GiB", "lru", "local"], ["2GiB", "arc", "local"],
        ["1GiB", "-", "none"], ["2GiB", "-", "none"],
    ]  # fmt: skip
    assert [point.stack.primary.capacity >> 30 for point in found] == [1, 1, 2, 2, 1, 2]
    assert [len(point.stack.secondary) for point in found] == [1, 1, 1, 1, 0, 0]
    assert yaml.safe_load(found[3].text)["secondary"][0]["eviction"] == "arc"
    assert STACK["primary"] == {"capacity": "8GiB"}


def test_a_stack_comes_with_and_without_each_of_its_tiers() -> None:
    tiers = [
        *STACK["secondary"],
        {"type": "s3", "bucket": "kv-cache"},
        {"type": "memory", "name": "spare", "capacity": "1GiB"},
    ]
    axes = [parse_axis("secondary[1].prefix=a/,b/")]
    found = [tuple(point.settings.values()) for point in points({**STACK, "secondary": tiers}, axes)]
    assert found == [
        ("a/", "local+s3+spare"), ("b/", "local+s3+spare"), ("a/", "s3+spare"), ("b/", "s3+spare"),
        ("-", "local+spare"), ("a/", "local+s3"), ("b/", "local+s3"), ("-", "none"),
    ]  # fmt: skip


def test_words_that_need_a_secondary_tier_leave_the_stack_with_the_last_one_that_serves_them() -> None:
    tiers = [{"type": "memory", "capacity": "1GiB"}, *STACK["secondary"]]
    found = points(STACK | {"secondary": tiers, "warm_start": {}, "io": "process"}, [])
    words = {point.settings["secondary"]: yaml.safe_load(point.text).keys() - STACK.keys() for point in found}
    assert words == {
        "memory+local": {"warm_start", "io"},
        "local": {"warm_start", "io"},
        "memory": {"io"},
        "none": set(),
    }


def test_the_text_keeps_references_and_masks_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_DIR", "/var/cache/kv")
    path = tmp_path / "stack.yaml"
    path.write_text(
        "primary: {capacity: 8GiB}\nsalt: opensesame-0123\n"
        "secondary: [{type: local, path: ${KV_DIR}, capacity: 1TiB}]\n"
    )
    point, _ = points(read_plain(path), [])
    assert "${KV_DIR}" in point.text
    assert "opensesame" not in point.text
    assert point.stack.salt == "opensesame-0123"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("primary.capacity", "write it like"),
        ("=1,2", "is not a word"),
        ("primary.capacity=8GiB..1GiB", "below the last"),
        ("primary.capacity=1GiB..8XB", "is not a size"),
        ("primary.capacity=1GiB..8GiB/1", "2 to 400"),
        ("secondary[4].capacity=1GiB,2GiB", r"has no secondary\[4\]; it has 1, numbered from 0"),
        ("secondary.local.capacity=1GiB,2GiB", r"has no secondary\.local; .*write it like secondary\[0\]\.capacity"),
        ("secondary[0]=1,2", "is not a word"),
        ("primary.evicton=lru", "primary.evicton=lru: .*did you mean eviction"),
        ("primary.capacity=1,2,0", "capacity"),
    ],
)
def test_a_wrong_sweep_is_refused_and_says_why(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        points(STACK, [parse_axis(text)])


def test_too_many_stacks_are_refused() -> None:
    axis = parse_axis("primary.promotion_share=" + ",".join(["0.5"] * 30))
    with pytest.raises(ConfigError, match="900 stacks"):
        points(STACK, [axis, axis])


@pytest.mark.parametrize(("size", "text"), [(1 << 30, "1GiB"), (3 << 29, "1536MiB"), (1000, "1000"), (1 << 41, "2TiB")])
def test_sizes_are_written_as_people_write_them(size: int, text: str) -> None:
    assert size_text(size) == text


def test_a_misspelt_word_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"the stack has no primry; did you mean primary\?"):
        points(STACK, [parse_axis("primry.capacity=1GiB,2GiB")])


def test_a_value_that_is_no_yaml_is_refused_with_the_word() -> None:
    with pytest.raises(ConfigError, match=r"primary\.capacity=\.\.\.: .*is not a size"):
        points(STACK, [parse_axis("primary.capacity=...")])


@pytest.mark.parametrize("sweeps", [[], ["primary.capacity=1GiB,2GiB"]])
def test_a_word_that_the_file_misspells_is_named_with_the_file_and_the_line(tmp_path: Path, sweeps: list[str]) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("\nprimry: {capacity: 1GiB}\n")
    with pytest.raises(ConfigError) as told:
        points(read_plain(path), [parse_axis(text) for text in sweeps])
    lines = str(told.value).splitlines()
    assert lines[0] == f"{path}: 2 problems"
    assert lines[2].startswith("  primry (line 2): unknown word; did you mean primary?")


def test_a_swept_value_that_is_wrong_is_named_with_the_file_and_the_sweep(tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("primary: {capacity: 1GiB}\n")
    with pytest.raises(ConfigError) as told:
        points(read_plain(path), [parse_axis("primary.capacity=many")])
    assert str(told.value).startswith(
        f"{path} with --sweep primary.capacity=many: primary.capacity (line 1): 'many' is"
    )
    path.write_text("- primary\n")
    with pytest.raises(ConfigError, match=r"stack\.yaml: the stack: .* is not a mapping of primary"):
        points(read_plain(path), [])
