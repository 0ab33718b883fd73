"""Sweeps: the variants of a stack whose words take several values each."""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import yaml

from tiering.api.masking import masked
from tiering.api.units import parse_size
from tiering.config.problems import FieldPath, path_text
from tiering.config.source import StackSource
from tiering.config.stack_file import StackConfig, load_stack
from tiering.errors import ConfigError

MAX_POINTS = 400
"""Largest number of combinations of swept values."""
SECONDARY = "secondary"
"""Setting that names the secondary tiers of a variant."""
NO_TIERS = "none"
"""Value of :data:`SECONDARY` for a variant without secondary tiers."""
LEFT_OUT = "-"
"""Value of a swept word whose tier is left out."""

_PART = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)((?:\[[0-9]+\])*)")
_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_RANGE = re.compile(r"(?P<first>[^.]+(?:\.[0-9]+[A-Za-z]*)?)\.\.(?P<last>[^/]+)(?:/(?P<steps>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class Axis:
    """One swept word and its values."""

    name: str
    """The word as it was written: "primary.capacity"."""
    path: FieldPath
    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One variant of a stack."""

    settings: dict[str, str]
    """Swept word → its value; and :data:`SECONDARY` → the names of the tiers, if the stack has any."""
    stack: StackConfig
    text: str
    """The stack as YAML, with secrets masked and environment references as written."""


def parse_axis(text: str) -> Axis:
    """Return the axis that ``text`` describes.

    Args:
        text: ``word=first..last`` for sizes that double (``word=first..last/9`` for 9 sizes at equal ratios), or
            ``word=value,value,...``.

    Raises:
        ConfigError: the text is no axis.
    """
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"--sweep {text}: write it like primary.capacity=1GiB..1TiB, or primary.eviction=lru,arc")
    path: list[str | int] = []
    for part in name.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigError(f"--sweep {text}: {name} is not a word of a stack; write it like secondary[0].capacity")
        path.append(match[1])
        path += [int(index) for index in re.findall(r"[0-9]+", match[2])]
    span = _RANGE.fullmatch(values)
    if span is not None:
        return Axis(name, tuple(path), tuple(_sizes(text, span)))
    return Axis(name, tuple(path), tuple(_scalar(value) for value in values.split(",")))


def _sizes(text: str, span: re.Match[str]) -> Iterator[str]:
    try:
        first, last = parse_size(span["first"]), parse_size(span["last"])
    except ValueError as error:
        raise ConfigError(f"--sweep {text}: {error}") from error
    if not 0 < first < last:
        raise ConfigError(f"--sweep {text}: the first size must be above 0 and below the last one")
    steps = int(span["steps"]) if span["steps"] else math.ceil(math.log2(last / first)) + 1
    if not 2 <= steps <= MAX_POINTS:
        raise ConfigError(f"--sweep {text}: has {steps} sizes; 2 to {MAX_POINTS} are allowed")
    ratio = 2.0 if not span["steps"] else (last / first) ** (1 / (steps - 1))
    for step in range(steps):
        yield size_text(min(last, round(first * ratio**step)) if step < steps - 1 else last)


def size_text(size: int) -> str:
    """Return a size as a stack file spells it: exactly if it has whole units, else in whole MiB."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= scale and size % scale == 0:
            return f"{size // scale}{unit}"
    return f"{size >> 20}MiB" if size >= 1 << 30 else str(size)


def _scalar(text: str) -> object:
    try:
        value: object = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (int, float, bool)) else text


def points(stack: Mapping[str, Any] | StackSource, axes: Sequence[Axis]) -> list[Point]:
    """Return the variants of a stack: all combinations, with and without secondary tiers.

    The variants with all tiers come first. Those without each secondary tier follow, and last those without any.

    Args:
        stack: the stack with its environment references as written: plain data, or a file that was read.
        axes: the swept words; none: the stack as it is.

    Raises:
        ConfigError: there are too many variants, a word is not in the stack, or a variant is invalid.
    """
    source = stack if isinstance(stack, StackSource) else StackSource("stack", stack)
    if not isinstance(source.data, Mapping):
        load_stack(source)  # raises, with the reason
    words = dict(cast("Mapping[str, Any]", source.data))
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_POINTS:
        raise ConfigError(f"the sweep has {count} stacks, more than {MAX_POINTS}; sweep fewer values")
    found: list[Point] = []
    known: set[tuple[str, ...]] = set()
    tiers = len(words["secondary"]) if isinstance(words.get("secondary"), list) else 0
    left_out = dict.fromkeys([(), *((index,) for index in range(tiers)), tuple(range(tiers))])
    for gone, values in product(left_out, product(*(axis.values for axis in axes))):
        variant, places = copy.deepcopy(words), {("secondary", index) for index in gone}
        settings: dict[str, str] = {}
        for axis, value in zip(axes, values, strict=True):
            _set(variant, axis, value, source)
            settings[axis.name] = LEFT_OUT if axis.path[:2] in places else str(value)
        if gone:
            variant["secondary"] = [tier for index, tier in enumerate(variant["secondary"]) if index not in gone]
        at = "".join(f" --sweep {name}={value}" for name, value in settings.items())
        config = _load(StackSource(f"{source.name} with{at}" if at else source.name, variant, source.lines), bool(gone))
        if tiers:
            settings[SECONDARY] = "+".join(tier.tier_name for tier in config.secondary) or NO_TIERS
        if (key := tuple(settings.values())) not in known:
            known.add(key)
            text = yaml.safe_dump(_shown("", variant), sort_keys=False, default_flow_style=None, width=120)
            found.append(Point(settings, config, text))
    return found


def _load(source: StackSource, tiers_are_left_out: bool) -> StackConfig:
    """Return a variant's stack, without ``warm_start`` and ``io`` where the tiers that they need are gone."""
    try:
        return load_stack(source)
    except ConfigError:  # the same words with all tiers are valid
        if not tiers_are_left_out:
            raise
    words = cast("dict[str, Any]", source.data)
    words.pop("warm_start", None)
    if not words["secondary"]:
        words.pop("io", None)
    return load_stack(source)


def _shown(word: object, value: object) -> object:
    """Return ``value`` with secrets masked; references to environment variables are none."""
    if isinstance(value, dict):
        return {key: _shown(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(word, item) for item in value]
    if isinstance(value, str) and _REFERENCE.fullmatch(value):
        return value
    return masked(word, value)


def _set(words: dict[str, Any], axis: Axis, value: object, source: StackSource) -> None:
    """Set the swept word in a variant of the stack that was read from ``source``."""
    place: Any = words
    for part in axis.path[:-1]:
        try:
            place = place[part]
        except (KeyError, IndexError, TypeError):
            load_stack(source)  # a word that the file misspells is the file's fault
            named = path_text(axis.path[:-1])
            near = difflib.get_close_matches(str(part), list(place) if isinstance(place, dict) else [], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            if isinstance(place, list):
                hint = f"; it has {len(place)}, numbered from 0; write it like secondary[0].capacity"
            raise ConfigError(f"--sweep {axis.name}: the stack has no {named}{hint}") from None
    last = axis.path[-1]
    if not (isinstance(place, dict) and isinstance(last, str)):
        raise ConfigError(f"--sweep {axis.name}: is not a word of the stack; write it like secondary[0].capacity")
    place[last] = value
