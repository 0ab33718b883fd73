"""Reading a stack's YAML: bounded in bytes, values and levels, with the line of each field, and nothing but plain data."""

from __future__ import annotations

import os
import re
import secrets
import select
import stat
import time
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from tiering.config.problems import FieldPath, Problem, refuse
from tiering.errors import ConfigError

MAX_BYTES = 1 << 20
"""Largest stack file, in bytes."""

MAX_NODES = 10_000
"""Most values of a stack after its aliases are followed; far more than any needs."""

MAX_DEPTH = 32
"""Most levels of a stack."""

PIPE_SECONDS = 10.0
"""How long a pipe may take to deliver a stack, in seconds."""

_LONGEST_MESSAGE = 200
_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")


class Carried:
    """Environment references on their way through the YAML parser.

    A reference contains characters that mean something in YAML.  Each is replaced by a number between marks that nobody
    can guess, and put back in the values that the parser returns.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._references: list[str] = []
        self._carried = re.compile(f"\ue000{self._mark}:([0-9]+)\ue001")

    def carry(self, match: re.Match[str]) -> str:
        """Return the text that stands for a reference."""
        self._references.append(match[0])
        return f"\ue000{self._mark}:{len(self._references) - 1}\ue001"

    def restored(self, text: str) -> str:
        """Return ``text`` with its references put back."""
        return self._carried.sub(lambda match: self._references[int(match[1])], text) if self._references else text


def read_text(path: str) -> str:
    """Return the text of a stack file, a regular file or a pipe.  Raises :class:`ConfigError` for anything else, and beyond limits."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return _read(path, fd).decode()
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or bytes that are no UTF-8
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{_file(path)}: the stack file cannot be read: {_clipped(reason)}") from error


def _read(path: str, fd: int) -> bytes:
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        what = "a directory" if stat.S_ISDIR(mode) else "a device"
        raise ConfigError(f"{_file(path)}: is {what}; a stack is read from a regular file or a pipe")
    deadline = time.monotonic() + PIPE_SECONDS
    data = bytearray()
    while len(data) <= MAX_BYTES:
        if stat.S_ISFIFO(mode) and not select.select([fd], (), (), max(deadline - time.monotonic(), 0.0))[0]:
            raise ConfigError(f"{_file(path)}: the pipe did not deliver a stack within {PIPE_SECONDS:g} s")
        piece = os.read(fd, MAX_BYTES + 1 - len(data))
        if not piece:
            return bytes(data)
        data += piece
    raise ConfigError(f"{_file(path)}: has more than {MAX_BYTES >> 20} MiB: this is no stack")


def parse_yaml(name: str, text: str, carried: Carried) -> tuple[object, dict[FieldPath, int]]:
    """Return the plain data that ``text`` describes, and the line of each field.

    ``name`` of the file is for errors.  Raises :class:`ConfigError` for invalid YAML, tags that make objects, keys
    given twice, aliases that multiply without end, and too many values or levels.
    """
    lines: dict[FieldPath, int] = {}
    problems: list[Problem] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _walk(node, (), lines, problems, [0])
            if not problems:
                return loader.construct_document(node), lines
        reason = "the stack file is empty; it needs at least primary: {capacity: 8GiB}"
    except _TooMuchError:
        reason = f"more than {MAX_NODES} values, or {MAX_DEPTH} levels: this is no stack"
    except (yaml.YAMLError, RecursionError) as error:
        reason = f"not valid YAML: {_message(error, carried)}"
    # Raised outside of the handlers: the parser's errors repeat what they could not read, which may be a password.
    if problems:
        refuse(_file(name), problems, lines)
    raise ConfigError(f"{_file(name)}: {reason}")


class _TooMuchError(Exception):
    """More values or levels than a stack has."""


class _Loader(yaml.SafeLoader):
    """Composes a bounded number of nodes, and makes plain data only: dates stay the text that they are."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in _PLAIN
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        if self._nodes > MAX_NODES or self._depth > MAX_DEPTH + 1:
            raise _TooMuchError
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _guarded(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``make``, the errors of which are the parser's: a tag can be put before a text that is no value of its type."""

    def guarded(loader: Any, node: yaml.ScalarNode) -> Any:
        try:
            return make(loader, node)
        except (ValueError, LookupError, OverflowError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"not a value of type {kind}", node.start_mark
            ) from None

    return guarded


for _kind in ("null", "bool", "int", "float"):
    _tag = f"tag:yaml.org,2002:{_kind}"
    _Loader.add_constructor(_tag, _guarded(_Loader.yaml_constructors[_tag]))
_Loader.yaml_constructors["tag:yaml.org,2002:timestamp"] = yaml.SafeLoader.construct_yaml_str


def _walk(
    node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int], problems: list[Problem], count: list[int]
) -> None:
    """Note the line of every field, and the keys given twice.  Follows aliases, and raises where they multiply without end."""
    count[0] += 1
    if count[0] > MAX_NODES or len(path) > MAX_DEPTH:
        raise _TooMuchError
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*path, index), lines, problems, count)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value) if isinstance(key, yaml.ScalarNode) else "?", key.start_mark.line + 1
            if name in seen:
                problems.append(Problem((*path, name), f"is given twice, on lines {seen[name]} and {line}"))
            seen[name] = line
            _walk(value, (*path, name), lines, problems, count)
            lines[*path, name] = line


def _message(error: Exception, carried: Carried) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character {chr(error.character)!a} is not allowed (position {error.position})"
    mark = getattr(error, "problem_mark", None)
    text = getattr(error, "problem", None) or str(error) or type(error).__name__
    # The text of an alias or a tag may be a password that begins with * or !, which needs quotes.
    if " alias " in text or " tag " in text:
        text = f"{text.partition(chr(39))[0].rstrip()} (a text that begins with * or ! needs quotes)"
    where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
    return _clipped(carried.restored(text)) + where


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 3] + "..."


def _file(path: str) -> str:
    """The path as errors show it."""
    return path if path.isprintable() else repr(path)
