"""The reader of stack files: YAML to plain data, with environment references expanded.

Duplicate keys are refused. In values, ``${VAR}`` stands for the environment variable, ``${VAR:-default}`` for the
variable or, if it is unset or empty, the default, and ``$${`` for a literal ``${``. References are resolved after the
YAML is parsed, so the content of a variable can never become structure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tiering.api.masking import MASK, holds_mask, is_secret, record_secrets, shown
from tiering.config.problems import FieldPath, Problem
from tiering.config.yaml_text import MAX_DEPTH, MAX_NODES, Carried, parse_yaml, read_text
from tiering.errors import ConfigError

_REFERENCE = re.compile(r"\$\$(?:\{[^{}\n]*\})?|\$\{([^{}\n]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(slots=True)
class StackSource:
    """A stack as plain data, with its origin and the problems found so far."""

    name: str
    """Path of the file, or "stack" for a mapping; used in messages."""
    data: object
    """The plain data."""
    lines: dict[FieldPath, int] = field(default_factory=dict)
    """Line of each field, where known."""
    problems: list[Problem] = field(default_factory=list)
    """Problems found while reading."""


def read_source(stack: str | os.PathLike[str] | Mapping[str, object] | StackSource) -> StackSource:
    """Read a stack from a file, a mapping or plain data, and expand its environment references.

    Raises:
        ConfigError: the file cannot be read, is not valid YAML or exceeds the limits.
    """
    if isinstance(stack, StackSource):
        source, carried = StackSource(stack.name, stack.data, stack.lines), Carried()
    elif isinstance(stack, Mapping):
        source, carried = StackSource("stack", stack), Carried()
    else:
        path = os.fspath(stack) if isinstance(stack, (str, os.PathLike)) else None
        if not isinstance(path, str):
            raise ConfigError(f"a stack is a path to a YAML file or a mapping, not {type(stack).__name__}")
        source, carried = _read_file(path)
    source.data = _expand(source, source.data, (), carried, [0])
    return source


def _read_file(path: str) -> tuple[StackSource, Carried]:
    text = read_text(path)
    carried = Carried()
    data, lines = parse_yaml(path, _REFERENCE.sub(carried.carry, text), carried)
    return StackSource(path, data, lines), carried


def read_plain(path: str | os.PathLike[str]) -> StackSource:
    """Return a YAML file with its environment references as they are written.

    Raises:
        ConfigError: the file cannot be read, is not valid YAML or exceeds the limits.
    """
    source, carried = _read_file(os.fspath(path))
    source.data = map_texts(source.data, carried.restored)
    return source


def map_texts(value: object, change: Callable[[str], str]) -> object:
    """Return ``value``, plain data, with ``change`` applied to each text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    return [map_texts(item, change) for item in value] if isinstance(value, list) else value


def escaped(text: str) -> str:
    """Return the spelling of ``text`` that yields ``text`` when it is read as a value of a stack."""
    return text.replace("$", "$$") if "${" in text or "$$" in text else text


def _expand(source: StackSource, value: object, path: FieldPath, carried: Carried, count: list[int]) -> object:
    count[0] += 1
    if count[0] > MAX_NODES or len(path) > MAX_DEPTH:
        raise ConfigError(f"{source.name}: more than {MAX_NODES} values, or {MAX_DEPTH} levels: this is not a stack")
    if isinstance(value, str):
        return _expand_text(source, carried.restored(value), path)
    if isinstance(value, Mapping):
        restored = (
            (_printable(carried.restored(key)) if isinstance(key, str) else key, item) for key, item in value.items()
        )
        return {
            key: _expand(source, item, (*path, key if isinstance(key, str) else shown(key)), carried, count)
            for key, item in restored
        }
    if isinstance(value, (list, tuple)):
        return [_expand(source, item, (*path, index), carried, count) for index, item in enumerate(value)]
    return value


def _expand_text(source: StackSource, text: str, path: FieldPath) -> str:
    def problem(what: str) -> None:
        source.problems.append(Problem(path, what))

    def resolve(match: re.Match[str]) -> str:
        whole = match[0]
        if whole.startswith("$$"):
            return whole[1:]
        if match[1] is None:
            problem(
                f"{shown(text)} holds an environment reference that is not closed; "
                "write ${NAME}, or $${ for a literal ${"
            )
            return whole
        name, colon, default = match[1].partition(":-")
        if _NAME.fullmatch(name) is None:
            problem(f"{whole} is not an environment reference; write ${{NAME}} or ${{NAME:-default}}")
            return whole
        value = os.environ.get(name)
        record_secrets(name, value)
        if colon:
            return value or default
        if value is None:
            problem(
                f"the environment variable {name} is not set; "
                f"set it, or write ${{{name}:-default}} ($${{ is a literal ${{)"
            )
            return whole
        return value

    if holds_mask(text):
        problem(
            f"{shown(text)} holds {MASK}, which stands for a secret that was masked when this stack was printed; "
            "write the secret as ${NAME} instead"
        )
    expanded = _REFERENCE.sub(resolve, text)
    record_secrets(next((part for part in path if is_secret(part)), None), expanded)
    if _printable(expanded) != expanded:
        problem(f"{shown(expanded)} holds bytes that are no UTF-8 text")
    return _printable(expanded)


def _printable(text: str) -> str:
    """Return ``text`` with lone surrogates escaped.

    They stand for undecodable bytes, and no error message can contain them.
    """
    return text.encode(errors="backslashreplace").decode()
