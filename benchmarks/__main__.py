"""Run the benchmarks: ``python -m benchmarks [--only NAME ...] [--quick]``."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Bench, Target, machine, render_targets, write_json, write_section

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def found() -> list[str]:
    """The names of the benchmarks: ``bench_<name>.py`` beside this file."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run the benchmarks; variants run side by side. Benchmarks: " + ", ".join(found()),
        epilog="example: python -m benchmarks --only control_plane",
    )
    parser.add_argument("--only", nargs="+", choices=found(), metavar="NAME", default=found(), help="only these (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: checks that they run; writes no results")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a target was missed")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="where JSON goes (default: build/bench)")
    parser.add_argument("--directory", type=Path, help="disk to measure (default: --out); use a real disk, not a tmpfs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code says whether all benchmarks ran (and, with --strict, reached their targets)."""
    options = arguments(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    disk: Path = options.directory or options.out
    targets: list[Target] = []
    broken: list[str] = []
    for name in options.only:
        print(f"\n# {name}", flush=True)
        directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=disk))
        try:
            module = importlib.import_module(f"benchmarks.bench_{name}")
            bench = Bench(name, directory, quick=options.quick)
            module.run(bench)
            shape = machine(directory)
            write_json(bench, shape, options.out / f"{name}{'.quick' * options.quick}.json")
            if not options.quick:
                write_section(HERE / "RESULTS.md", bench, shape, module.__doc__ or "")
            targets += bench.targets
        except Exception:
            # The others are still worth their time; what is broken decides the exit code.
            traceback.print_exc()
            broken.append(name)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    if targets:
        print(render_targets(targets, judged=not options.quick))
    if options.quick:
        print("\nA quick run: the numbers mean nothing and were not written to benchmarks/RESULTS.md.")
    if broken:
        print(f"\nDid not run to the end: {', '.join(broken)}", file=sys.stderr)
    missed = [target for target in targets if not target.ok]
    return 1 if broken or (missed and options.strict and not options.quick) else 0


if __name__ == "__main__":
    sys.exit(main())
