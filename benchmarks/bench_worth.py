"""The measured worth of a tier in runs whose true saving is known (benchmarks/worth_model.py).

The choice of controls and the estimate are the real ones, and requests are modelled. Each run ends when the worth is
known, after the first 200 controls. *Truth* is the saving of the same requests in seconds of waiting a minute, if all
of them loaded, against none. Lengths have a Pareto distribution and waits a log-normal one. *Highest cost* is that of
the controls in the dearest run, as a part of the seconds of prefill that loads have saved.
"""

from __future__ import annotations

from statistics import fmean

from benchmarks.harness import Bench
from benchmarks.worth_model import measured

RUNS = 250
"""Runs for each row of speeds."""


def run(bench: Bench) -> None:
    results = measured(2 if bench.quick else RUNS)
    rows = [
        (
            name,
            f"{fmean(one.truth for one in runs):,.1f}",
            f"{fmean(one.saved for one in runs):,.1f}",
            f"{fmean(one.margin for one in runs):,.1f}",
            f"{100 * fmean(one.sign_is_right for one in runs):.1f}%",
            f"{100 * fmean(one.covers for one in runs):.1f}%",
            f"{fmean(one.requests for one in runs):,.0f}",
            f"{100 * max(one.cost for one in runs):.2f}%",
        )
        for name, runs in results.items()
    ]
    columns = ("tier's speed", "truth s/min", "measured s/min", "±", "sign right", "covers", "requests", "highest cost")
    bench.table(f"Measured worth at 200 controls, {RUNS} runs each", columns, rows)
    everything = [one for runs in results.values() for one in runs]
    bench.target("sign of the worth right", 100 * fmean(one.sign_is_right for one in everything), 99.0, "min", "%")
    bench.target("interval covers the truth", 100 * fmean(one.covers for one in everything), 95.0, "min", "%")
