"""Output of all commands: consoles, numbers for people, and JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, ProgressColumn, TextColumn

from tiering.api.masking import mask_text


def stdout() -> Console:
    """Return a console for results: colours and the terminal's width, or plain lines without a terminal."""
    return _console(sys.stdout)


def progress(*columns: ProgressColumn) -> Progress:
    """Return a display of progress on a terminal, with a description and ``columns``."""
    console = _console(sys.stderr)
    shown = (TextColumn("{task.description}"), *columns)
    return Progress(*shown, console=console, transient=True, disable=not console.is_terminal)


def _console(file: Any) -> Console:
    # Without a terminal, lines are not wrapped: scripts read them by line.
    terminal = bool(getattr(file, "isatty", lambda: False)())
    return Console(file=file, highlight=False, markup=False, width=None if terminal else 10_000)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print a result as JSON, with secrets masked."""
    click.echo(mask_text(json.dumps(value, indent=2, default=str)))


def duration(seconds: float) -> str:
    """Return seconds for people: ``"3.2 d"``, ``"14 min"``, ``"8.1 ms"``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= length * (1.5 if length > 1 else 1):
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def age(when: float, now: float | None = None) -> str:
    """Return the time since ``when`` (seconds since 1970) for people."""
    return duration(max(0.0, (time.time() if now is None else now) - when))


def rate(bytes_per_second: float) -> str:
    """Return a bandwidth for people, in decimal units as vendors use them."""
    return f"{bytes_per_second / 1e9:.2f} GB/s" if bytes_per_second >= 1e8 else f"{bytes_per_second / 1e6:.1f} MB/s"
