"""The readable forms of sizes, durations and shares, and the base class of the stack file's parts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from tiering.api.masking import masked, shown

MAX_SIZE = 1 << 60
"""Largest size that a stack may contain, in bytes: 1 EiB."""

MAX_DURATION = 3650 * 86400.0
"""Longest duration that a stack may contain, in seconds: 3650 days."""

_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*((?:[kmgtpe]i?)?b?)\s*", re.IGNORECASE)

_SIZE_UNITS = {"": 1} | {unit: 1000**power for power, unit in enumerate("kmgtpe", start=1)}

_SIZE_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgtpe", start=1)}

_DURATION = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*(us|ms|s|m|min|h|d|w)\s*", re.IGNORECASE)

_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

_NO_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/.*|.*%[A-Za-z_][A-Za-z0-9_]*%.*", re.DOTALL)
"""URLs, and variables as Windows writes them."""

_VARIABLE = re.compile(r"\$(\{|[A-Za-z_][A-Za-z0-9_]*)")


def parse_size(value: object) -> int:
    """Return the bytes that ``"8GiB"``, ``"500GB"``, ``"64 MiB"`` or a whole number of bytes stands for.

    Raises:
        ValueError: the value is not a size, or exceeds :data:`MAX_SIZE`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"{shown(value)} is not a size; write it like 8GiB, 500GB or a number of bytes")
        size = int(Decimal(match[1]) * _SIZE_UNITS[match[2].lower().removesuffix("b")])
    if abs(size) > MAX_SIZE:
        raise ValueError(f"{shown(value)} is out of range; the largest size is 1EiB")
    return size


def parse_duration(value: object) -> float:
    """Return the seconds that ``"7d"``, ``"500ms"``, ``"2m"`` or a number of seconds stands for.

    Raises:
        ValueError: the value is not a duration, or exceeds :data:`MAX_DURATION`.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number, unit = value, 1.0
    else:
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(
                f"{shown(value)} is not a duration; write it like 500ms, 10s, 5m, 12h, 7d or a number of seconds"
            )
        number, unit = float(match[1]), _DURATION_UNITS[match[2].lower()]
    if not abs(number) <= MAX_DURATION / unit:
        raise ValueError(f"{shown(value)} is out of range; the longest duration is 3650d")
    return float(number) * unit


def format_bytes(nbytes: float) -> str:
    """Return ``nbytes`` in readable form, e.g. ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def check_path(path: str) -> str:
    """Return ``path`` if it is a plausible path.

    Raises:
        ValueError: the path contains a NUL character or an unexpanded variable.
    """
    if "\0" in path:
        raise ValueError("holds a NUL character, which no path can")
    found = _VARIABLE.search(path)
    if found is not None:
        name = found[1] if found[1] != "{" else "NAME"
        raise ValueError(
            f"{shown(path)} holds {found[0]!r}, which would not be expanded; write ${{{name}}} or ${{{name}:-default}}"
        )
    return path


def _check_directory(path: str) -> str:
    if _NO_PATH.fullmatch(path):
        raise ValueError(f"{shown(path)} is a URL or holds %NAME%, which would not be expanded; write a plain path")
    if os.path.expanduser(check_path(path)).startswith("~"):  # noqa: PTH111 - pathlib raises RuntimeError instead
        raise ValueError(
            f"{shown(path)} begins with the home directory of a user that is not known; write the path in full"
        )
    return path


def _check_file(path: Path) -> Path:
    check_path(str(path))
    return path


_SIZE_PATTERN = r"^\s*\d+(\.\d+)?\s*([kKmMgGtTpPeE]i?)?[bB]?\s*$"
_DURATION_PATTERN = r"^\s*\d+(\.\d+)?\s*(us|ms|s|m|min|h|d|w)\s*$"

Size = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(gt=0),
    WithJsonSchema({"type": ["integer", "string"], "pattern": _SIZE_PATTERN, "minimum": 1}),
]
"""A size: bytes, or text such as "8GiB"."""

Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0),
    WithJsonSchema({"type": ["number", "string"], "pattern": _DURATION_PATTERN, "exclusiveMinimum": 0}),
]
"""A duration: seconds, or text such as "10s"."""

Share = Annotated[float, Field(gt=0.0, le=1.0)]
"""A fraction greater than 0, at most 1."""

Directory = Annotated[str, Field(min_length=1), AfterValidator(_check_directory)]
"""Path of a directory; ``~`` stands for a home directory. Validation does not access the directory."""

FilePath = Annotated[Path, AfterValidator(_check_file)]
"""Path of a file. Validation does not access the file."""


class Strict(BaseModel):
    """A part of the stack file. Unknown words are errors; values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=False, hide_input_in_errors=True)

    def __repr_args__(self) -> Iterable[tuple[str | None, object]]:
        """Return the fields for ``repr`` and ``str``, with secrets masked."""
        return [(name, masked(name, value)) for name, value in self]
