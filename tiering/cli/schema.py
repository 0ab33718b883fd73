"""``schema``: the JSON schema of the stack file, for editors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
from pydantic import BaseModel

from tiering.config.registry import TIER_TYPES, tier_definition
from tiering.config.stack_file import PrimaryOptions, StackConfig
from tiering.config.words import descriptions
from tiering.secondary.options import BreakerOptions, RetryOptions, TierOptions

REFERENCE = {"type": "string", "pattern": r"\$\{[^{}]*\}"}
"""A text with an environment reference, which any single value may be."""


@click.command()
def schema() -> None:
    """Print the JSON schema of the stack file, for editors.

    With the YAML language server (VS Code, Neovim, ...), a stack file names its schema in the first line.

    \b
    Example:
      kv-tiering schema > stack.schema.json
      # yaml-language-server: $schema=stack.schema.json
    """
    click.echo(json.dumps(stack_schema(), indent=2))


def stack_schema() -> dict[str, Any]:
    """Return the JSON schema of a stack file. Words of each tier type are checked by its own options."""
    stack = _object(StackConfig)
    words = stack["properties"]
    words["primary"] = {"description": words["primary"]["description"], **_object(PrimaryOptions)}
    kinds = [_tier(kind, tier_definition(kind).options) for kind in TIER_TYPES]
    words["secondary"] = {
        "description": words["secondary"]["description"],
        "type": ["array", "null"],
        "items": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {
                    "anyOf": [{"enum": list(TIER_TYPES)}, {"type": "string", "pattern": ".+:.+"}, REFERENCE],
                    "description": "Type of the tier: a built-in one, or module:Name.",
                }
            },
            "allOf": kinds,
        },
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "kv-tiering stack",
        **stack,
    }


def _tier(kind: str, options: type[TierOptions]) -> dict[str, Any]:
    then = _object(options)
    for word in options.unsupported:
        then["properties"].pop(word, None)
    then["properties"]["type"] = {"const": kind}
    return {"if": {"properties": {"type": {"const": kind}}, "required": ["type"]}, "then": then}


def _object(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of the words of ``model``, with the descriptions of its attributes."""
    given = model.model_json_schema()
    texts = descriptions(model)
    words = {
        word: _word(found, texts.get(word, ""), given.get("$defs", {})) for word, found in given["properties"].items()
    }
    required = given.get("required", [])
    return {
        "type": "object",
        "additionalProperties": False,
        **({"required": required} if required else {}),
        "properties": words,
    }


_PARTS: Mapping[str, type[BaseModel]] = {"RetryOptions": RetryOptions, "BreakerOptions": BreakerOptions}


def _part(choice: Mapping[str, Any], parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a choice, in place of a reference into the model's own schema."""
    name = str(choice.get("$ref", "")).rpartition("/")[2]
    return dict(parts.get(name, {})) if name else choice


def _word(found: Mapping[str, Any], text: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of one word. Every single value may also be an environment reference."""
    name = str(found.get("$ref", "")).rpartition("/")[2]
    if name:
        inner = _object(_PARTS[name]) if name in _PARTS else dict(parts.get(name, {}))
        return {"description": text, **inner}
    kept = {word: value for word, value in found.items() if word not in {"title", "default", "anyOf"}}
    choices = [_part(choice, parts) for choice in found.get("anyOf", ())] or [kept]
    default = {} if found.get("default") is None else {"default": found["default"]}
    return {"description": text, **default, "anyOf": [*choices, REFERENCE]}
