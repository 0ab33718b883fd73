"""The JSON schema of stack files: the shipped file is current and agrees with the stack's validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.cli.runner import kv_tiering
from tiering.cli.schema import stack_schema
from tiering.config.stack_file import load_stack
from tiering.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def accepts(stack: Any) -> bool:
    return bool(jsonschema.Draft7Validator(stack_schema()).is_valid(stack))


def test_the_shipped_schema_is_what_the_command_prints() -> None:
    done = kv_tiering("schema")
    assert done.code == 0
    assert json.loads(done.out) == json.loads((CONFIGS / "stack.schema.json").read_text()), (
        "kv-tiering schema > configs/stack.schema.json"
    )
    jsonschema.Draft7Validator.check_schema(json.loads(done.out))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_each_shipped_stack_names_the_schema_and_satisfies_it(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=stack.schema.json\n")
    assert accepts(yaml.safe_load(text))


LOCAL = {"type": "local", "path": "/var/cache/kv", "capacity": "1GiB"}


@pytest.mark.parametrize(
    "tier",
    [
        LOCAL,
        LOCAL | {"capacity": 1 << 30, "deadline": 2.5, "retries": {"attempts": 2}},
        {"type": "s3", "bucket": "kv-cache", "ttl": "7d", "path_style": True},
        {"type": "memory"},
    ],
)
def test_schema_and_stack_accept_the_same_tiers(tier: dict[str, Any]) -> None:
    stack = {"primary": {"capacity": "8 GiB"}, "secondary": [tier]}
    load_stack(stack)
    assert accepts(stack)


@pytest.mark.parametrize(
    "tier",
    [
        LOCAL | {"capacty": "1GiB"},
        LOCAL | {"capacity": "lots"},
        LOCAL | {"compression": "zstd"},
        LOCAL | {"durability": "raid"},
        LOCAL | {"retries": {"attempts": 0}},
        {"type": "local", "path": "/var/cache/kv"},
        {"type": "s3", "bucket": "kv-cache", "eviction": "arc"},
        {"type": "tape"},
        {"path": "/var/cache/kv"},
    ],
)
def test_schema_and_stack_refuse_the_same_tiers(tier: dict[str, Any]) -> None:
    stack = {"primary": {"capacity": "8GiB"}, "secondary": [tier]}
    with pytest.raises(ConfigError):
        load_stack(stack)
    assert not accepts(stack)


def test_a_reference_may_stand_for_any_single_value() -> None:
    tier = LOCAL | {"max_inflight": "${N}", "fill": "${FILL:-true}", "durability": "${D}"}
    assert accepts({"primary": {"capacity": "${C}"}, "secondary": [tier], "mode": "${MODE:-tiering}"})


def test_a_tier_of_ones_own_keeps_its_own_words() -> None:
    assert accepts({"primary": {"capacity": "1GiB"}, "secondary": [{"type": "my.tier:TIER", "colour": "red"}]})
