"""Run the benchmarks: ``python -m benchmarks [--only NAME ...] [--quick]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner import run

HERE = Path(__file__).resolve().parent


def found() -> list[str]:
    """Return the names of the benchmarks: ``bench_<name>.py`` beside this file."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks, and return an exit code.

    The code is 0 if all benchmarks ran to the end and, with ``--strict``, reached their targets.
    """
    modules = {name: f"bench_{name}" for name in found()}
    return run("python -m benchmarks", "Run the benchmarks; variants run side by side.", modules, argv)


if __name__ == "__main__":
    sys.exit(main())
