"""Loading or computing by measurement: the time to the first token beside never and always loading.

A discrete-event model (benchmarks/gate_model.py) has the real manager, its gate and the measurement of the prefill, in
simulated time; the engine's steps and the medium are modelled. At full speed, the medium delivers the blocks of
200,000 tokens a second. Each request has a prefix of its own, which only the tier holds. Lengths have a Pareto
distribution of shape 1.5, up to eight medians. The load is the share of time that the engine would compute without a
tier. The first three requests of a run are left out: until one has been computed, the engine's speed is not known.
A fresh engine has cells of its own, of ten requests each: it knows neither speed, so that no choice can be as good as
the better one, and the assumed speed of the engine bounds what that costs (tiering/connector/prefill.py). An engine
that starts again finds the speeds that another one has left in the tier after 30 other requests of the same cell.
*auto by better* compares the means of all other requests; below 0%, the choice is better than both, because the speed
changes or both do a part. The plot and the tables are those of the first of five seeds; the targets are those of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from benchmarks.gate_model import FRESH, LENGTHS, PREFILLS, Cell, Cold, Comparison, cold, cold_grid, compare, grid
from benchmarks.harness import Bench

SEEDS = 5
"""Seeds of the grid."""

MOST_TIMES = 6.5
"""Largest quotient of the first prompt's time and the better one.

Six by the assumed speed, and what whole steps add.
"""

LOWEST, HIGHEST, STEP = 0.30, 1.10, 0.02
"""Ends of the plot's axis and the width of a character, in times of the better one."""


class Point(NamedTuple):
    """One cell in the plot."""

    prefill: float
    """Prompt tokens that the engine computes per second."""
    speeds: str
    """Speeds of the tier."""
    times: float
    """Mean time to the first token, divided by the better one of never and always."""


def plot(points: Sequence[Point]) -> str:
    """Return a plot with a line for each prefill speed and tier speed, and a mark for each of its cells."""
    at_one = round((1.0 - LOWEST) / STEP)
    lines = [f"{'':29}{LOWEST:<{at_one}.1f}1.0  by the better one; a digit is a number of cells"]
    last = 0.0
    for prefill, speeds in dict.fromkeys((one.prefill, one.speeds) for one in points):
        marks = [0] * (round((HIGHEST - LOWEST) / STEP) + 1)
        for one in points:
            if (one.prefill, one.speeds) == (prefill, speeds):
                marks[min(max(0, round((one.times - LOWEST) / STEP)), len(marks) - 1)] += 1
        marked = [str(count) if count else "|" if column == at_one else " " for column, count in enumerate(marks)]
        first = f"{prefill:,.0f}" if prefill != last else ""
        lines.append(f"{first:>7}  {speeds:<20}{''.join(marked)}".rstrip())
        last = prefill
    return "\n".join(["```text", *lines, "```"])


def _speeds(cell: Cell) -> str:
    return " then ".join(f"{speed:g}" for speed in cell.speeds)


def run(bench: Bench) -> None:
    cells = grid(10, PREFILLS[:1]) if bench.quick else grid(50)
    first = [compare(cell) for cell in cells]
    compared = first + [compare(cell, seed) for seed in range(1, 1 if bench.quick else SEEDS) for cell in cells]
    bench.note(
        "**auto by better, by prefill tokens/s and the tier's speed: one mark for each length and load**\n\n"
        + plot([Point(one.cell.prefill, _speeds(one.cell), one.auto / one.best) for one in first])
    )
    for tokens in LENGTHS:
        bench.table(
            f"Mean time to the first token, median prompt {tokens:,} tokens",
            ("prefill tokens/s", "tier's speed", "load", "never ms", "always ms", "auto ms", "auto by better"),
            [_row(one) for one in first if one.cell.tokens == tokens],
        )
    bench.target(
        f"cells beyond 5% and 10 ms above the better one, of {len(compared)}",
        sum(not one.holds for one in compared),
        0,
        "max",
        "",
    )
    bench.target("mean regret", 100 * sum(one.regret for one in compared) / len(compared), 3.0, "max", "%")

    seeds = range(1 if bench.quick else 2)
    fresh, again = (
        [cold(cell, seed, again=again) for seed in seeds for cell in cold_grid()] for again in (False, True)
    )
    _cold_table(bench, "A fresh engine", fresh)
    _cold_table(bench, "An engine that starts again", again)
    bench.target(
        "first prompt of a fresh engine, by the better one", max(x.first for x in fresh), MOST_TIMES, "max", "x"
    )
    bench.target(f"mean regret of its first {FRESH} prompts", _regret(fresh), 15.0, "max", "%")
    beyond = sum(not one.holds for one in again)
    bench.target(f"first prompts after a restart beyond 5% and 10 ms, of {len(again)}", beyond, 0, "max", "")
    bench.target(f"mean regret of its first {FRESH} prompts after a restart", _regret(again), 3.0, "max", "%")


def _regret(cells: Sequence[Cold]) -> float:
    return 100.0 * (mean(max(1.0, one.mean) for one in cells) - 1.0)


def _cold_table(bench: Bench, title: str, fresh: Sequence[Cold]) -> None:
    speeds = sorted({one.cell.speeds for one in fresh}, reverse=True)
    bench.table(
        f"{title}: times of the first prompt and of the first {FRESH} by the better one, mean and largest",
        ("prefill tokens/s", *(f"tier's speed {speed:g}" for (speed,) in speeds)),
        [
            (
                f"{prefill:,.0f}",
                *(
                    _fresh([one for one in fresh if one.cell.prefill == prefill and one.cell.speeds == speed])
                    for speed in speeds
                ),
            )
            for prefill in sorted({one.cell.prefill for one in fresh})
        ],
    )


def _fresh(cells: Sequence[Cold]) -> str:
    firsts, means = [one.first for one in cells], [one.mean for one in cells]
    return f"{mean(firsts):.2f}, {max(firsts):.2f} / {mean(means):.2f}, {max(means):.2f}"


def _row(one: Comparison) -> tuple[str, ...]:
    times = (f"{1000 * seconds:,.0f}" for seconds in (one.never, one.always, one.auto))
    by_better = f"{100 * (one.auto / one.best - 1.0):+.1f}%" + ("" if one.holds else " (missed)")
    return f"{one.cell.prefill:,.0f}", _speeds(one.cell), f"{one.cell.load:g}", *times, by_better
