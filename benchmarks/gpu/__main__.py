"""The command behind ``make gpu``: ``python -m benchmarks.gpu [--dry] [--only NAME ...]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TextIO

from benchmarks.gpu import connectors, copies, engines, servers, small_models
from benchmarks.gpu.checks import exit_code, run_checks, summary
from benchmarks.gpu.machine import dry_machine, gpu_machine


def main(argv: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the checks, the cheapest first.

    Returns:
        0 if every check passed, 1 if one failed, and 2 if one was left out or ran dry.
    """
    every = (*copies.CHECKS, *engines.CHECKS, *small_models.checks(), *servers.checks(), *connectors.CHECKS)
    checks = {check.name: check for check in every}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Check copies and servers on a GPU.")
    parser.add_argument("--dry", action="store_true", help="run the logic on the CPU, with a stand-in of the device")
    parser.add_argument("--only", nargs="+", choices=list(checks), metavar="NAME", help=f"of {', '.join(checks)}")
    options = parser.parse_args(argv)
    machine = dry_machine() if options.dry else gpu_machine()
    if machine is None:
        print("torch finds no GPU here; --dry runs the logic on a stand-in", file=out)
        return 2
    print(machine.name, file=out)
    results = run_checks([checks[name] for name in options.only or checks], machine, out)
    print(summary(results, machine), file=out)
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
