"""From a stack file to plain data: safe YAML, duplicate keys refused, environment references expanded, lines remembered.

``${VAR}`` in a value is replaced by the environment variable, ``${VAR:-default}`` by the default if it is unset or empty, ``$${`` is a
literal ``${``.  References are resolved after the YAML is read, in values only: what a variable holds can never become structure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tiering.config_errors import FieldPath, Problem, refuse
from tiering.errors import ConfigError

_REFERENCE = re.compile(r"\$\$(?:\{[^{}\n]*\})?|\$\{([^{}\n]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# A reference contains characters that mean something in YAML, so each is carried through the parser under a number between two
# characters for private use.
_OPEN, _CLOSE = "\ue000", "\ue001"
_CARRIED = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")

MAX_NODES = 10_000
"""Values a stack may have after its aliases are followed; far more than any needs."""

MAX_DEPTH = 32
"""Levels that a stack may have."""


@dataclass(slots=True)
class Source:
    """A stack as plain data: where it came from, the line of each field (where known) and what is wrong with it already."""

    name: str
    data: object
    lines: dict[FieldPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_source(stack: str | os.PathLike[str] | Mapping[str, object]) -> Source:
    """Read a stack file, or take a mapping, and expand its environment references.  Raises :class:`ConfigError`."""
    if isinstance(stack, Mapping):
        source, carried = Source("stack", stack), list[str]()
    elif isinstance(stack, (str, os.PathLike)):
        source, carried = _read_file(Path(stack))
    else:
        raise ConfigError(f"a stack is a path to a YAML file or a mapping, not {type(stack).__name__}")
    source.data = _expand(source, source.data, (), carried, [0])
    return source


def _read_file(path: Path) -> tuple[Source, list[str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path}: the stack file cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if _OPEN in text or _CLOSE in text:
        raise ConfigError(f"{path}: characters for private use (U+E000, U+E001) are not allowed")
    carried: list[str] = []

    def carry(match: re.Match[str]) -> str:
        carried.append(match[0])
        return f"{_OPEN}{len(carried) - 1}{_CLOSE}"

    loader = yaml.SafeLoader(_REFERENCE.sub(carry, text))
    source = Source(str(path), None)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{path}: the stack file is empty; it needs at least primary: {{capacity: 8GiB}}")
        _remember_lines(source, node, (), [0])
        if source.problems:
            refuse(source.name, source.problems, source.lines)
        source.data = loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not valid YAML: {_yaml_message(error, carried)}") from None
    finally:
        loader.dispose()
    return source, carried


def _yaml_message(error: Exception, carried: list[str]) -> str:
    mark = getattr(error, "problem_mark", None)
    text = getattr(error, "problem", None) or str(error) or type(error).__name__
    where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
    return _restored(text, carried) + where


def _remember_lines(source: Source, node: yaml.Node, path: FieldPath, count: list[int]) -> None:
    """Note the line of every field; refuse keys given twice, and aliases that multiply without end."""
    _count(source.name, path, count)
    source.lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _remember_lines(source, item, (*path, index), count)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen:
                source.problems.append(Problem((*path, name), f"is given twice, on lines {seen[name]} and {line}"))
            seen[name] = line
            _remember_lines(source, value, (*path, name), count)
            source.lines[*path, name] = line


def _count(name: str, path: FieldPath, count: list[int]) -> None:
    count[0] += 1
    if count[0] > MAX_NODES or len(path) > MAX_DEPTH:
        raise ConfigError(f"{name}: more than {MAX_NODES} values, or {MAX_DEPTH} levels: this is no stack")


def _restored(text: str, carried: list[str]) -> str:
    return _CARRIED.sub(lambda match: carried[int(match[1])], text)


def _expand(source: Source, value: object, path: FieldPath, carried: list[str], count: list[int]) -> object:
    _count(source.name, path, count)
    if isinstance(value, str):
        return _expand_text(source, _restored(value, carried) if carried else value, path)
    if isinstance(value, Mapping):
        restored = ((_restored(key, carried) if isinstance(key, str) else key, item) for key, item in value.items())
        return {key: _expand(source, item, (*path, str(key)), carried, count) for key, item in restored}
    if isinstance(value, (list, tuple)):
        return [_expand(source, item, (*path, index), carried, count) for index, item in enumerate(value)]
    return value


def _expand_text(source: Source, text: str, path: FieldPath) -> str:
    def resolve(match: re.Match[str]) -> str:
        whole = match[0]
        if whole.startswith("$$"):
            return whole[1:]
        name, colon, default = match[1].partition(":-")
        if _NAME.fullmatch(name) is None:
            source.problems.append(Problem(path, f"{whole} is not an environment reference; write ${{NAME}} or ${{NAME:-default}}"))
            return whole
        value = os.environ.get(name)
        if colon:
            return value or default
        if value is None:
            source.problems.append(
                Problem(
                    path,
                    f"the environment variable {name} is not set; set it, or write ${{{name}:-default}} ($${{ is a literal ${{)",
                )
            )
            return whole
        return value

    return _REFERENCE.sub(resolve, text)
