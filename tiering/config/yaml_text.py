"""The YAML parser of stack files: plain data only, with the line of each field, within fixed limits."""

from __future__ import annotations

import os
import re
import secrets
import select
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from tiering.api.masking import mask_text, safe_cause
from tiering.config.problems import FieldPath, Problem, refuse
from tiering.errors import ConfigError

MAX_BYTES = 1 << 20
"""Largest stack file, in bytes."""

MAX_NODES = 10_000
"""Largest number of values in a stack after its aliases are expanded; far more than any stack needs."""

MAX_DEPTH = 32
"""Largest number of levels in a stack."""

PIPE_SECONDS = 10.0
"""Time limit for a pipe to deliver a stack, in seconds."""

_LONGEST_MESSAGE = 200
_LEGACY_NUMBER = re.compile(r"[-+]?0[0-9_]+|[-+]?[0-9][0-9_]*(:[0-9_]+)+(\.[0-9_]*)?")
"""Numbers that YAML 1.1 reads in octal or to the base 60. Stack files mean neither, so they stay text."""

_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")


class Carried:
    """The environment references of a file while its YAML is parsed.

    References contain characters with a meaning in YAML. Before parsing, each reference is replaced by a number between
    unguessable marks; afterwards the references are restored in the parsed values.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._references: list[str] = []
        self._carried = re.compile(f"\ue000{self._mark}:([0-9]+)\ue001")

    def carry(self, match: re.Match[str]) -> str:
        """Record a reference and return its placeholder."""
        self._references.append(match[0])
        return f"\ue000{self._mark}:{len(self._references) - 1}\ue001"

    def restored(self, text: str) -> str:
        """Return ``text`` with its references restored."""
        return self._carried.sub(lambda match: self._references[int(match[1])], text) if self._references else text


def read_text(path: str) -> str:
    """Return the text of a YAML file.

    Raises:
        ConfigError: the path is not a regular file or a pipe, cannot be read, is not UTF-8, or exceeds a limit.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return _read(path, fd).decode()
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: the path contains NUL, or the bytes are not UTF-8
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = f"it is no text in UTF-8 (byte {error.start})"
        where = "" if path.startswith("/") else f" from the working directory {_working_directory()}"
        text, cause = f"{_file(path)}: cannot be read{where}: {_clipped(reason)}", safe_cause(error)
    # Raised outside the handler, because the operating system's error quotes the path, which may contain a password.
    raise ConfigError(text) from cause


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "(which is gone)"


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
    raise ConfigError(f"{_file(path)}: has more than {MAX_BYTES >> 20} MiB: this is not a stack")


def parse_yaml(name: str, text: str, carried: Carried) -> tuple[object, dict[FieldPath, int]]:
    """Parse YAML into plain data and the line of each field.

    Args:
        name: name of the file in messages.
        text: the YAML.
        carried: the references that placeholders in ``text`` stand for.

    Raises:
        ConfigError: the YAML is invalid, contains tags that create objects, has duplicate keys, expands aliases without
            end, or has too many values or levels.
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
        reason = f"more than {MAX_NODES} values, or {MAX_DEPTH} levels: this is not a stack"
    except (yaml.YAMLError, RecursionError) as error:
        reason = f"not valid YAML: {_message(error, carried)}"
    # Raised outside the handlers, because a parser error in the traceback quotes its input, which may be a password.
    if problems:
        refuse(_file(name), problems, lines)
    raise ConfigError(f"{_file(name)}: {reason}")


class _TooMuchError(Exception):
    """More values or levels than a stack may have."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that composes a bounded number of nodes and creates plain data only. Dates stay text."""

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
    """Return ``make`` with its exceptions turned into parser errors.

    A type tag can precede a text that is not a value of that type.
    """

    def guarded(loader: Any, node: yaml.ScalarNode) -> Any:
        if _LEGACY_NUMBER.fullmatch(node.value):
            return node.value
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
    """Record the line of every field and the duplicate keys. Follows aliases.

    Raises:
        _TooMuchError: the stack has too many values or levels; endless aliases do too.
    """
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
    # A password that begins with * or ! and lacks quotes reads as an alias or a tag; do not quote it in the message.
    if " alias " in text or " tag " in text:
        text = f"{text.partition(chr(39))[0].rstrip()} (a text that begins with * or ! needs quotes)"
    where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
    return _clipped(carried.restored(text)) + where


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 3] + "..."


def _file(path: str) -> str:
    """Return the path as errors show it."""
    return mask_text(path if path.isprintable() else repr(path))
