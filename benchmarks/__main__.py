"""Run the benchmarks: ``python -m benchmarks [--only NAME ...] [--quick]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner import run

HERE = Path(__file__).resolve().parent


def found() -> list[str]:
    """The names of the benchmarks: ``bench_<name>.py`` beside this file."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code says whether all benchmarks ran (and, with --strict, reached their targets)."""
    modules = {name: f"bench_{name}" for name in found()}
    return run("python -m benchmarks", "Run the benchmarks; variants run side by side.", modules, argv)


if __name__ == "__main__":
    sys.exit(main())
