"""Benchmarks with the real vLLM (its environment is .venv-vllm): ``python -m benchmarks.vllm_bench [--quick] [--only ttft|cpu]``."""

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
from benchmarks.vllm_engine import prepare_environment

HERE = Path(__file__).resolve().parent
SUBJECTS = ("ttft", "cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code says whether all ran to the end (and, with --strict, reached their targets)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=SUBJECTS, help="only these (default: all)")
    parser.add_argument("--quick", action="store_true", help="one round: checks that they run; writes no results")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a target was missed")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "bench", help="where JSON goes, and the tiers' disk")
    options = parser.parse_args(argv)
    prepare_environment()
    options.out.mkdir(parents=True, exist_ok=True)
    targets: list[Target] = []
    broken: list[str] = []
    for subject in options.only:
        name = f"vllm_{subject}"
        print(f"\n# {name}", flush=True)
        directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=options.out))
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            bench = Bench(name, directory, quick=options.quick)
            module.run(bench)
            shape = machine(directory)
            write_json(bench, shape, options.out / f"{name}{'.quick' * options.quick}.json")
            if not options.quick:
                write_section(HERE / "RESULTS.md", bench, shape, module.__doc__ or "")
            targets += bench.targets
        except Exception:
            # The other one is still worth its time; what is broken decides the exit code.
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
