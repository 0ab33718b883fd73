"""Checks in the order of their cost, and the report of how they ended."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TextIO

from benchmarks.gpu.machine import Machine


class Outcome(Enum):
    """The end of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    LEFT_OUT = "left out"
    DRY = "dry"


class NotHereError(Exception):
    """The machine lacks something that a check needs; the check is left out."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a machine."""

    name: str
    """Short name, for ``--only``."""
    claim: str
    """The sentence that holds if the check passes."""
    run: Callable[[Machine], str]
    """Runs the check and returns what was measured; raises if the claim does not hold."""


@dataclass(frozen=True, slots=True)
class Result:
    """One check and its end."""

    check: Check
    """The check."""
    outcome: Outcome
    """Its end."""
    detail: str
    """Measurements, the reason of a failure, or the missing part of the machine."""
    seconds: float
    """Time that the check took."""


def require(condition: bool, problem: str) -> None:
    """Raise AssertionError with ``problem`` unless the condition holds."""
    if not condition:
        raise AssertionError(problem)


def run_checks(checks: Sequence[Check], machine: Machine, out: TextIO) -> list[Result]:
    """Run the checks in order and print each result at once; a check that fails does not stop the others.

    Without a GPU, a check that holds is reported as dry and never as passed: its logic ran, on a stand-in of the
    device that cannot show what the check is for.
    """
    results = []
    for check in checks:
        start = time.monotonic()
        try:
            detail = check.run(machine)
            outcome = Outcome.PASSED if machine.is_gpu else Outcome.DRY
        except NotHereError as reason:
            outcome, detail = Outcome.LEFT_OUT, str(reason)
        except Exception as error:  # any kind of failure is a result
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome, detail = Outcome.FAILED, f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        results.append(Result(check, outcome, detail, time.monotonic() - start))
        print(f"{outcome.value:>8}  {check.name}: {check.claim}", file=out)
        print(f"          {detail} [{results[-1].seconds:.1f} s]", file=out, flush=True)
    return results


def exit_code(results: Sequence[Result]) -> int:
    """Return 0 if every check passed, 1 if one failed, and 2 if one was left out or ran dry."""
    ends = {result.outcome for result in results}
    if Outcome.FAILED in ends:
        return 1
    return 2 if ends - {Outcome.PASSED} else 0


def summary(results: Sequence[Result], machine: Machine) -> str:
    """Return the line that closes a report."""
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in Outcome}
    words = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
    if machine.is_gpu:
        return f"{words} on {machine.name}"
    return f"{words}; no GPU: nothing that only a GPU can show has been checked"
