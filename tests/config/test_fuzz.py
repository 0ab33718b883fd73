"""Any input as a stack: it is refused with a ConfigError, or it can be printed and read again."""

from __future__ import annotations

import os
import string
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tiering.config.registry import TIER_TYPES, tier_definition
from tiering.config.stack_file import PrimaryOptions, StackConfig, load_stack
from tiering.errors import ConfigError

FAKE = "tests.fake_tier:FAKE_TIER"

MODELS: list[type[BaseModel]] = [
    StackConfig,
    PrimaryOptions,
    *(tier_definition(kind).options for kind in (*TIER_TYPES, FAKE)),
]
WORDS = sorted({word for model in MODELS for word in model.model_fields})

# ----------------------------------------------------------------------------------------- anything that YAML can bring

texts = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="${}:-A*&!<>[]\n\t\0\ud800~/", max_size=12),
    st.sampled_from(
        [
            "${HOME}",
            "${",
            "$HOME",
            "10iB",
            "1GiB",
            "1e400",
            ".inf",
            "***",
            FAKE,
            "local",
            "s3",
            "memory",
            "lru",
            "simple",
        ]
    ),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    texts,
    st.binary(max_size=4),
    st.dates(),
    st.just(5000).map(lambda digits: 10**digits),
)
huge = st.just(5000).map(lambda digits: 10**digits)
keys = st.one_of(
    st.sampled_from(WORDS), st.sampled_from(WORDS), texts, st.integers(-2, 2), st.none(), st.floats(0, 1), huge
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=6)),
    max_leaves=20,
)
tiers = st.fixed_dictionaries(
    {"type": st.sampled_from([*TIER_TYPES, FAKE, "no_such:T", ":"])},
    optional={
        **dict.fromkeys([word for word in WORDS if word != "type"], anything),
        "path": texts,
        "capacity": scalars,
        "bucket": texts,
    },
)
stacks = st.fixed_dictionaries(
    {"primary": st.one_of(st.just({"capacity": "1MiB"}), anything)},
    optional={
        "secondary": st.one_of(st.lists(tiers, max_size=3), anything),
        **dict.fromkeys(sorted(set(StackConfig.model_fields) - {"primary", "secondary"}), anything),
    },
)


def refused_or_read(stack: Any) -> None:
    try:
        config = load_stack(stack)
    except ConfigError as error:
        config, text = None, str(error)
    else:
        text = repr(config)
    text.encode()
    assert config is not None or len(text) < 20_000
    assert config is None or yaml.safe_load(config.describe())


@given(st.one_of(anything, stacks))
def test_a_structure_is_refused_with_a_config_error_or_is_a_stack(stack: Any) -> None:
    refused_or_read(stack if isinstance(stack, dict) else {"primary": stack})


def from_file(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(content)
        file.flush()
        refused_or_read(file.name)


TOKENS = [
    *(
        b"primary",
        b"secondary",
        b"capacity",
        b"type",
        b"path",
        b"name",
        b"s3",
        b"local",
        b"memory",
        b"1MiB",
        b"bucket",
        b"mode",
    ),
    *(
        b": ",
        b"\n",
        b"\n  ",
        b"\n  - ",
        b"{",
        b"}",
        b"[",
        b"]",
        b", ",
        b"&a ",
        b"*a ",
        b"!!int ",
        b"!!bool ",
        b"!x ",
        b"<<: ",
    ),
    *(
        b"'",
        b'"',
        b"${HOME}",
        b"${",
        b"$$",
        b"|",
        b">",
        b"#",
        b"%",
        b"@",
        b"---",
        b"...",
        b"\t",
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
    ),
    *(b'"\\ud800"', b'"\\0"', b"0x", b"1:30", b"2026-11-21", b"=", b"~", b"? ", b"\xef\xbb\xbf", b"\xee\x80\x80"),
]


@given(st.lists(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=3)), max_size=30).map(b"".join))
@example(b"primary: {capacity: !!bool 1MiB}")
@example(b'primary: {capacity: 1MiB}\nnamespace: "\\ue0000\\ue001"\n')
@example(b"\xff\xfe\x00")
@example(b"primary: {capacity: 1MiB}\n0x" + b"f" * 6000 + b": 1\n")
def test_a_file_is_refused_with_a_config_error_or_is_a_stack(content: Any) -> None:
    from_file(content)


# -------------------------------------------------------------------------------------------- every stack that is valid

names = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,10}", fullmatch=True)
free_text = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda text: not set("*@=") & set(text))
sizes = st.integers(1, 1 << 60)
durations = st.floats(1e-6, 1e8)
shares = st.floats(0.01, 1.0)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "admission": st.sampled_from(["all", "second_touch", "none"]),
    "fill": st.sampled_from(["second_touch", "all", "none", True, False]),
    "deadline": durations,
    "retries": st.fixed_dictionaries({}, optional={"attempts": st.integers(1, 20), "backoff": durations}),
    "breaker": st.fixed_dictionaries({}, optional={"failures": st.integers(1, 99), "probe_after": durations}),
    "max_inflight": st.integers(1, 128),
    "primary_share": shares,
    "min_prefix_blocks": st.integers(1, 99),
    "load_or_compute": st.sampled_from(["auto", "always", "never"]),
    "required": st.booleans(),
}
SLOTS: dict[str, st.SearchStrategy[Any]] = {"high_watermark": shares, "eviction": st.sampled_from(["lru", "arc"])}
part = st.text(string.ascii_letters + string.digits + "._- ü", min_size=1, max_size=8)
VALID: dict[str, tuple[dict[str, st.SearchStrategy[Any]], dict[str, st.SearchStrategy[Any]]]] = {
    "memory": ({}, COMMON | SLOTS | {"capacity": sizes, "share": free_text}),
    "local": (
        {"path": st.lists(part, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts)), "capacity": sizes},
        COMMON
        | SLOTS
        | {"durability": st.sampled_from(["none", "fsync"]), "segment_size": sizes, "checkpoint_interval": durations},
    ),
    "mooncake": (
        {"master": st.integers(1, 65535).map(lambda port: f"pool:{port}")},
        COMMON
        | {
            "segment_size": st.sampled_from(["16MiB", "64GiB"]),
            "protocol": st.sampled_from(["tcp", "rdma"]),
            "replicas": st.integers(1, 8),
        },
    ),
    "valkey": (
        {"url": st.integers(1, 65535).map(lambda port: f"valkey://cache:{port}/2?auth_env=POOL")},
        COMMON
        | {
            "prefix": st.from_regex(r"[a-z0-9][a-z/:._-]{0,20}", fullmatch=True),
            "ttl": st.integers(1, 99).map(lambda days: f"{days}d"),
            "ca_file": st.just("/etc/ca.pem"),
            "request_timeout": durations,
        },
    ),
    "s3": (
        {"bucket": st.from_regex(r"[a-z0-9]{3,20}", fullmatch=True)},
        COMMON
        | {
            "compression": st.sampled_from(["none", "zstd"]),
            "ttl": st.integers(1, 99).map(lambda days: f"{days}d"),
            "lookup_deadline": durations,
            "endpoint_url": st.just("http://127.0.0.1:9000"),
            "ca_file": st.just("/etc/ca.pem"),
            "path_style": st.booleans(),
            "profile": free_text,
        },
    ),
}


@st.composite
def valid_stacks(draw: st.DrawFn) -> StackConfig:
    words: dict[str, st.SearchStrategy[Any]] = {
        "namespace": free_text,
        "revision": names,
        "events": st.booleans(),
        "open_deadline": durations,
    }
    if draw(st.booleans()):
        stack = draw(st.fixed_dictionaries({}, optional={"events": st.booleans(), "lazy_offload": st.booleans()}))
        return written({**stack, "mode": "simple", "primary": {"capacity": draw(sizes)}})
    secondary = []
    for index, kind in enumerate(draw(st.lists(st.sampled_from(sorted(VALID)), max_size=3))):
        required, optional = VALID[kind]
        section = draw(st.fixed_dictionaries(required, optional=optional))
        place = {"local": "path", "s3": "bucket"}.get(kind)
        apart = (
            {place: f"{section[place]}{index}x" if kind == "s3" else f"/tier{index}{section[place]}"} if place else {}
        )
        if kind in {"mooncake", "valkey"}:
            apart = {"prefix": f"{section.get('prefix', 'kv')}{index}"}
        share = {"share": f"{section['share']}{index}"} if "share" in section else {}
        secondary.append({**section, **apart, **share, "type": kind, "name": f"t{index}-{draw(names)}"[:32]})
    primary = {
        "capacity": draw(sizes),
        "eviction": draw(st.sampled_from(["lru", "arc"])),
        "promotion_share": draw(shares),
    }
    drawn = draw(st.fixed_dictionaries({}, optional=words))
    if any(section["type"] == "mooncake" for section in secondary):
        drawn = {"revision": draw(names), **drawn}
    return written({**drawn, "primary": primary, "secondary": secondary})


def written(words: dict[str, Any]) -> StackConfig:
    """Return the stack of these values, without expansion of variables."""
    return StackConfig.model_validate(words)


@settings(max_examples=25)
@given(valid_stacks())
@example(StackConfig.model_validate({"primary": {"capacity": 1}, "namespace": "${HOME} $${X} $$ $"}))
def test_a_printed_stack_can_be_read_again(stack: Any) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(stack.describe())
        file.flush()
        assert load_stack(file.name) == stack
    assert load_stack(yaml.safe_load(stack.describe())) == stack


@given(valid_stacks())
def test_a_dumped_stack_can_be_read_again_with_every_default_written_out(stack: Any) -> None:
    assert StackConfig.model_validate(stack.model_dump()) == stack
    assert StackConfig.model_validate_json(stack.model_dump_json()) == stack
    if "$" not in str(stack.model_dump()):
        assert load_stack(stack.model_dump()) == stack
        assert load_stack(stack.model_dump(mode="json")) == stack


def test_what_was_masked_when_it_was_printed_is_not_taken_for_a_secret(tmp_path: Path) -> None:
    stack = load_stack({"primary": {"capacity": "1MiB"}, "salt": "hunter2"})
    for text in (stack.describe(), "primary: {capacity: 1MiB}\nsalt: '**********'\n"):
        (tmp_path / "stack.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"salt.*stands for a secret that was masked when this stack was printed"):
            load_stack(tmp_path / "stack.yaml")


def test_the_environment_is_left_alone() -> None:
    before = dict(os.environ)
    load_stack({"primary": {"capacity": "${KV_SIZE:-1MiB}"}})
    assert dict(os.environ) == before
