"""Write the tables of a stack's words into the documents, from the option classes.

A document marks the place of each table with ``<!-- options: NAME -->`` and ``<!-- end of options -->``, where NAME is
one of :data:`TABLES`. Names, values, defaults and meanings come from the fields of the classes and their docstrings.

    python -m scripts.option_tables          # fails if a table is not current
    python -m scripts.option_tables --write  # writes the tables
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tiering.config.problems import allowed_words
from tiering.config.registry import TIER_TYPES, tier_definition
from tiering.config.stack_file import (
    ExplainOptions,
    HintOptions,
    PrimaryOptions,
    RecordOptions,
    StackConfig,
    WarmStartOptions,
)
from tiering.config.words import descriptions
from tiering.machine.options import MachineOptions
from tiering.secondary.options import (
    BlockTierOptions,
    BreakerOptions,
    CompressionOptions,
    RetryOptions,
    SharedOptions,
    SlotOptions,
    TierOptions,
    TtlOptions,
)

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "docs" / "stack-file.md",)
"""Documents with tables of options."""

COMMON = (TierOptions, SlotOptions, BlockTierOptions, SharedOptions, TtlOptions, CompressionOptions)
"""Classes with the words that several tiers have in common, in the order of the table."""

LIKE: Mapping[str, str] = {"s3": "object"}
"""Type of tier → type that has the same words but for those in its table."""

_PARTS: Mapping[str, type[BaseModel]] = {
    "machine": MachineOptions,
    "retries": RetryOptions,
    "breaker": BreakerOptions,
    "record_trace": RecordOptions,
    "hints": HintOptions,
    "warm_start": WarmStartOptions,
    "explain": ExplainOptions,
}
_REGION = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end of options -->)", re.DOTALL)
_DEFAULTS = (
    re.compile(r"\s*\(default: ([^()]*)\)"),
    re.compile(r"[;,] default:? (.+?)(?=\.(?:\s|$)|;|$)"),
    re.compile(r"[;,] None \(default\)[:,] ([^.;]+)"),
)
_SIZES = ("", "KiB", "MiB", "GiB", "TiB")
_DURATIONS = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"), (0.001, "ms"))


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a stack, as a table shows it."""

    name: str
    """Name of the word, with the names of the mappings around it."""
    value: str
    """Kind or choice of values."""
    default: str
    """Default value; empty if there is none."""
    meaning: str
    """Meaning of the word, in the words of its docstring."""


def render(text: str) -> str:
    """Return a document's ``text`` with current tables.

    Raises:
        KeyError: a region names no table.
    """
    return _REGION.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def _stack() -> str:
    return _table(_words(StackConfig))


def _primary() -> str:
    return _table(_words(PrimaryOptions))


def _common() -> str:
    holders = {kind: allowed_words(tier_definition(kind).options) for kind in TIER_TYPES}
    words: dict[str, Word] = {}
    for options in COMMON:
        for word in _words(options):
            words.setdefault(word.name, word)
    tiers = []
    for name in words:
        kinds = [f"`{kind}`" for kind, held in holders.items() if name.partition(".")[0] in held]
        tiers.append("all" if len(kinds) == len(holders) else ", ".join(kinds))
    return _table(words.values(), ("tiers", tiers))


def _tier(kind: str) -> str:
    """Return the table of the words that the class of one tier adds to the common ones, or changes.

    The words of :data:`LIKE` count as common.
    """
    options = tier_definition(kind).options
    bases = COMMON if kind not in LIKE else (*COMMON, tier_definition(LIKE[kind]).options)
    common = {word.name: word for base in bases for word in _words(base)}
    words = {word.name: word for word in _words(options)}
    own = [word for name, word in words.items() if common.get(name) != word and name != "type"]
    refused = [name for name in common if name not in words]
    names = ", ".join(f"`{word}`" for word in refused)
    return f"{_table(own)}\n\nNot supported: {names}."


TABLES: Mapping[str, Callable[[], str]] = {
    "stack": _stack,
    "primary": _primary,
    "common": _common,
    **{kind: partial(_tier, kind) for kind in TIER_TYPES},
}
"""Name of each table → function that returns it."""


def _table(words: Iterable[Word], extra: tuple[str, Sequence[str]] | None = None) -> str:
    head = ["word", *([extra[0]] if extra else []), "value", "default", "meaning"]
    rows = [[f"`{word.name}`", word.value, word.default, word.meaning] for word in words]
    if extra:
        rows = [[name, tiers, *rest] for (name, *rest), tiers in zip(rows, extra[1], strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _words(model: type[BaseModel], prefix: str = "") -> list[Word]:
    texts = descriptions(model)
    schemas = model.model_json_schema()["properties"]
    words: list[Word] = []
    for name, field in model.model_fields.items():
        meaning, told = _meaning(texts[name])
        if name in _PARTS:
            words += [Word(name, "mapping", "", meaning), *_words(_PARTS[name], f"{name}.")]
        elif field.default is PydanticUndefined:
            words.append(Word(f"{prefix}{name}", _value(schemas[name]), "required", meaning))
        else:
            default = _default(field.default, schemas[name])
            # The docstring describes a default that depends on other words, or on the environment.
            if told not in {"", "None"} and (field.default is None or told.startswith("`")):
                default = told
            words.append(Word(f"{prefix}{name}", _value(schemas[name]), default, meaning))
    return words


def _meaning(text: str) -> tuple[str, str]:
    """Return a docstring without its default, as Markdown, and the default's text."""
    text = re.sub(r":\w+:`~([\w.]+)`", lambda found: f"`{found[1].rpartition('.')[2]}`", text)
    text = re.sub(r":\w+:`([\w.]+)`", r"`\1`", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    text = re.sub(r'"([\w:.*-]+)"', r"`\1`", text)
    told = ""
    for pattern in _DEFAULTS:
        if (found := pattern.search(text)) is not None:
            told = found[1]
            text = text[: found.start()] + text[found.end() :]
            break
    text = re.sub(r"True \(default\) (if|to) ", r"True \1 ", text).replace(" (default)", "")
    return text.replace("|", "\\|"), told


def _default(value: object, schema: Mapping[str, Any]) -> str:
    """Return a default value as a stack would write it."""
    if value in ("", (), None):
        return "empty" if value == "" else "none"
    kind = _value(schema)
    if isinstance(value, bool):
        return str(value).lower()
    if kind == "size" and isinstance(value, int):
        power = max(power for power in range(len(_SIZES)) if value % 1024**power == 0)
        return f"{value // 1024**power}{_SIZES[power]}"
    if kind == "duration" and isinstance(value, float):
        length, unit = next((length, unit) for length, unit in _DURATIONS if round(value / length, 6) % 1 == 0)
        return f"{value / length:g}{unit}"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _value(schema: Mapping[str, Any]) -> str:
    """Return the kind of a word's values, from its JSON schema."""
    choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    if any("const" in choice for choice in choices):
        return ", ".join(_value(choice) for choice in choices)
    schema = next(iter(choices), schema)
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "type" not in schema:
        return "mapping"
    if "pattern" in schema and isinstance(schema["type"], list):
        return "size" if "integer" in schema["type"] else "duration"
    if schema["type"] == "integer":
        least, most = schema["minimum"], schema["maximum"]
        return f"{least} to {most}" if most < 1 << 30 else f"from {least}"
    if schema["type"] == "number":
        return "share"
    if "anyOf" in schema.get("items", ()):
        return "list of names or numbers"
    return {"boolean": "true, false", "string": "text", "array": "list of tiers"}[schema["type"]]


def main() -> int:
    """Check or write the tables, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check the documents' tables of options.")
    parser.add_argument("--write", action="store_true", help="write the tables")
    write = parser.parse_args().write
    stale = [path for path in DOCUMENTS if render(path.read_text()) != path.read_text()]
    for path in stale:
        if write:
            path.write_text(render(path.read_text()))
        sys.stdout.write(f"{path.relative_to(ROOT)}: {'written' if write else 'not current; run with --write'}\n")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
