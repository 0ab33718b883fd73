"""Model of requests with a known saving, for the measured worth of a tier.

The choice of controls and the estimate are the real ones. Each request has two times to the first token, one with the
load and one without; the real code sees one of them. Lengths have a Pareto distribution, and the waits in front of a
prompt a long-tailed one, so that a few requests outweigh many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.gate_model import LATENCY, LONGEST, SHAPE, TIER_TOKENS_PER_SECOND
from tiering.manager.worth import Worth

PREFILL = 10_000.0
"""Prompt tokens that the engine computes per second."""
MEDIAN_TOKENS = 2_048
SPEEDS = {"1": (1.0,), "0.1": (0.1,), "0.03": (0.03,), "1 and 0.02, alternating": (1.0, 0.02)}
"""Shares of the medium's full speed, each for :data:`PERIOD`."""
PERIOD = 200.0
"""Seconds of one speed."""
GAP = 0.1
"""Seconds between two requests."""
CHUNK = 4_000
"""Requests that are drawn together."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a run at the first known worth, in seconds of waiting a minute."""

    saved: float
    margin: float
    truth: float
    """Saving of the same requests, if all of them had loaded, against none."""
    requests: int
    cost: float
    """Seconds that controls have cost, as a part of those that loads have saved."""

    @property
    def sign_is_right(self) -> bool:
        """True if the measured saving has the sign of the true one."""
        return (self.saved > 0.0) == (self.truth > 0.0)

    @property
    def covers(self) -> bool:
        """True if the truth lies within the interval."""
        return abs(self.saved - self.truth) <= self.margin


def measure(speeds: tuple[float, ...], seed: int) -> Measured:
    """Return the result of one run, which ends once the worth is known."""
    dice, worth = np.random.default_rng(seed), Worth("modelled", seed, 0.0)
    number, saved, cost, truth = 0, 0.0, 0.0, 0.0
    while True:
        lengths = np.minimum(LONGEST, np.power(0.5, 1.0 / SHAPE) * (1.0 + dice.pareto(SHAPE, CHUNK)))
        tokens = MEDIAN_TOKENS * lengths
        computes, loads = tokens / PREFILL, tokens / TIER_TOKENS_PER_SECOND
        waits = dice.lognormal(-3.0, 1.2, CHUNK)
        computed = waits + computes * dice.lognormal(-0.02, 0.2, CHUNK)
        jitter = dice.lognormal(-0.08, 0.4, CHUNK)
        for compute, load, without, wait, slow in zip(
            *(one.tolist() for one in (computes, loads, computed, waits, jitter)), strict=True
        ):
            number += 1
            now = number * GAP
            expected = LATENCY + load / speeds[int(now / PERIOD) % len(speeds)]
            loaded = wait + expected * slow
            trial = worth.begin(0, compute, expected, compute, now)
            if trial is None:
                saved += compute
                continue
            truth += without - loaded
            if trial.is_control:
                cost += compute
            else:
                saved += compute
            worth.end(trial, compute if trial.is_control else 0.0, now + (without if trial.is_control else loaded))
            if worth.saving is not None:
                minutes = (now + (without if trial.is_control else loaded)) / 60.0
                return Measured(
                    worth.saving.ttft, worth.saving.ttft_margin, truth / minutes, number, cost / max(saved, 1e-9)
                )


def measured(runs: int) -> dict[str, list[Measured]]:
    """Return the results of ``runs`` runs for each row of speeds, all with seeds of their own."""
    return {
        name: [measure(speeds, row * runs + number) for number in range(runs)]
        for row, (name, speeds) in enumerate(SPEEDS.items())
    }
