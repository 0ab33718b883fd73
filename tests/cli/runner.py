"""Runs of the command line, in this process or in a separate one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiering.cli.app import run

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Done:
    """A run that has ended."""

    code: int
    out: str
    err: str


def kv_tiering(*arguments: object) -> Done:
    """Run in this process, with pipes for all streams."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    return Done(code, out.getvalue(), err.getvalue())


def command(*arguments: object) -> list[str]:
    """Return the words that start a separate process."""
    return [sys.executable, "-m", "tiering.cli", *map(str, arguments)]


@contextmanager
def started(*arguments: object, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a separate process that a test interrupts; it is killed if the test ends first.

    SIGINT gets its default action, because a shell that runs the tests in the background makes them ignore it.
    """
    default = ("env", "--default-signal=INT")
    with subprocess.Popen([*default, *command(*arguments)], cwd=ROOT, **options) as running:
        try:
            yield running
        finally:
            running.kill()


def process(*arguments: object, environment: Mapping[str, str] | None = None) -> Done:
    """Run in a separate process."""
    return _done(command(*arguments), environment)


def program(code: str, *arguments: object) -> Done:
    """Run Python code in a separate process."""
    return _done([sys.executable, "-c", code, *map(str, arguments)], None)


def _done(words: list[str], environment: Mapping[str, str] | None) -> Done:
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)
