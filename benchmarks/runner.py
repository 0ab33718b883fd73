"""Run benchmarks one after another, each in its own directory, and keep their results."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Bench, Target, machine, render_targets, write_json, write_section
from scripts.temporary import clean_up_on_sigterm, temporary_files_in
from tiering.api.units import format_bytes

HERE = Path(__file__).resolve().parent


def run(prog: str, description: str, modules: Mapping[str, str], argv: Sequence[str] | None = None) -> int:
    """Run those of ``modules`` (name on the command line → module in this package) that ``argv`` asks for.

    A module has ``run(bench)``. A module that cannot run everywhere has ``lacks()``, which returns the missing thing or
    an empty string; one that needs much of the disk has ``disk_bytes(quick)``, the bytes. The exit code is 0 if all ran
    to the end and, with --strict, reached their targets.
    """
    options = _arguments(prog, description, sorted(modules), argv)
    clean_up_on_sigterm()
    with temporary_files_in(Path(tempfile.mkdtemp(prefix="kv-bench-"))):
        return _run(modules, options)


def _run(modules: Mapping[str, str], options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    disk: Path = options.directory or options.out
    targets: list[Target] = []
    broken: list[str] = []
    for name in options.only:
        subject = modules[name].removeprefix("bench_")
        print(f"\n# {subject}", flush=True)
        directory = Path(tempfile.mkdtemp(prefix=f"{subject}-", dir=disk))
        try:
            module = importlib.import_module(f"benchmarks.{modules[name]}")
            if missing := getattr(module, "lacks", str)():
                print(f"Left out: {missing}.")
                continue
            if options.against is not None and not getattr(module, "COMPARES_CHECKOUTS", False):
                print("Left out: it cannot compare two checkouts.")
                continue
            choices: Mapping[str, str] = getattr(module, "CHOICES", {})
            if not choices.keys() >= set(options.engines) or (options.starts and not choices):
                print(f"Left out: the engines that it may choose are {' '.join(choices) or 'none'}.")
                continue
            wanted, free = getattr(module, "disk_bytes", int)(options.quick), shutil.disk_usage(directory).free
            if free < wanted:
                print(
                    f"Too little room: {disk} has {format_bytes(free)} free, and {name} takes {format_bytes(wanted)}."
                )
            description = module.__doc__ or ""
            if options.engines:
                names = "; ".join(choices[word] for word in options.engines)
                description = f"Chosen engines of ``{subject}``, which says how they are measured: {names}."
                subject += "_chosen"
            bench = Bench(
                subject,
                directory,
                quick=options.quick,
                rounds=options.rounds,
                against=options.against,
                engines=options.engines,
                starts=options.starts,
            )
            module.run(bench)
            shape = machine(directory)
            write_json(bench, shape, options.out / f"{subject}{'.quick' * options.quick}.json")
            if not options.quick and options.against is None:
                write_section(HERE / "RESULTS.md", bench, shape, description)
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


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "tiering" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{path} is no checkout of the project")
    return path


def _arguments(prog: str, description: str, names: Sequence[str], argv: Sequence[str] | None) -> argparse.Namespace:
    out = HERE.parent / "build" / "bench"
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"{description} Benchmarks: {', '.join(names)}",
        epilog=f"example: {prog} --only {names[0]}",
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", default=names, help="only these (default: all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one round: checks that they run; writes no results"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=(),
        metavar="WORD",
        help="measure these engines alone beside those of the comparison, where a benchmark has a choice; its results "
        "get a section of their own (default: all)",
    )
    parser.add_argument("--starts", type=int, help="number of starts of such engines (default: the benchmark's own)")
    parser.add_argument("--rounds", type=int, help="number of rounds that count (default: the benchmark's own)")
    parser.add_argument(
        "--against",
        type=_checkout,
        metavar="PATH",
        help="another checkout of the project to measure beside this one; writes no results",
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a target was missed")
    parser.add_argument("--out", type=Path, default=out, help="where JSON goes (default: build/bench)")
    parser.add_argument("--directory", type=Path, help="disk to measure (default: --out); use a real disk, not a tmpfs")
    return parser.parse_args(argv)
