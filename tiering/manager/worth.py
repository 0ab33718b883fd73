"""The measured worth of one tier: the saving by its loads, from a randomised control.

For a few requests, the tier is not asked although a load would pay: these are the controls. A request becomes one with
a probability that falls with the seconds of prefill that it then costs (:data:`MOST_COST` at most). All controls
together cost at most :data:`SHARE` of the seconds that loads have saved. Each request counts with the inverse of the
probability of its role, so that long and short requests count as they come.

The seconds to the first token, and the seconds that the engine computed, are fitted to the expected time of computing,
once for the controls and once for the requests that loaded. The saving is the difference of both fits at the mean of
all these requests. Its interval comes from the distances to the fits. What the fits leave out makes the interval wider,
not the saving wrong.

If the interval lies below zero, loads make requests slower. Then the tier serves only one request in twenty, by which
its recovery shows, and the others are the controls.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import dataclass

import numpy as np

from tiering.api.metric import Metric, MetricKind

_log = logging.getLogger("kv_tiering.manager")

LEAST = 200
"""Smallest number of controls of a known worth."""

PART = 50
"""Number of controls after which the worth is estimated anew, and of the oldest ones that are dropped."""

MOST_PARTS = 10
"""Number of parts that count."""

SHARE = 0.005
"""Share of the saved seconds of prefill that controls may cost."""

MOST_COST = 0.5
"""Largest number of seconds of prefill that one control may cost."""

MOST_OFTEN = 0.1
"""Largest probability of a control."""

TRIED = 0.05
"""Probability that a request loads from a tier whose loads make requests slower."""

FIRST = 20
"""Number of loads before the first control, from which the mean saving is known."""

MEMORY = 1000
"""Number of loads over which the mean saving is taken."""

ERRORS = 2.6
"""Half of the interval, in standard errors: they are themselves estimated, from long-tailed values."""

CLOSED_SECONDS = 3600.0
"""Seconds after which a tier is used again if nothing was measured: all requests may have hints."""

FACTORS = (0.5, 4.0)
"""Bounds of the correction of the expected time of loads."""


@dataclass(slots=True, eq=False)
class Trial:
    """One request whose time to the first token counts for the worth of a tier."""

    rank: int
    """Position of the tier among the secondary ones."""
    is_control: bool
    """True if the tier is not asked for the request."""
    weight: float
    """Inverse of the probability of that."""
    compute: float
    """Expected seconds of computing what the tier holds."""
    load: float
    """Expected seconds of loading it."""
    since: float
    """Time of the choice."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Saving by the loads from a tier in seconds a minute, each with half of its 95% interval."""

    controls: int
    """Number of the controls; while the tier makes requests slower, of the requests that loaded."""
    prefill: float
    """Seconds that the engine need not compute."""
    prefill_margin: float
    """Half of the interval of :attr:`prefill`."""
    ttft: float
    """Seconds that requests get their first token earlier, summed over the requests."""
    ttft_margin: float
    """Half of the interval of :attr:`ttft`."""

    def __str__(self) -> str:
        return (
            f"saves {_spread(self.prefill, self.prefill_margin)} prefill seconds and "
            f"{_spread(self.ttft, self.ttft_margin)} seconds of waiting a minute (N {self.controls})"
        )


def _spread(value: float, margin: float) -> str:
    digits = 0 if margin >= 2.0 else 1 if margin >= 0.2 else 2
    return f"{value:.{digits}f} ± {margin:.{digits}f}"


def _metric(field: str, unit: str, meaning: str, action: str) -> Metric:
    return Metric(MetricKind.GAUGE, unit, meaning, action, f"kv_tiering_{field}", field=field)


_MARGIN = "Half of the 95% interval: the worth is known this well."

WORTH = (
    _metric(
        "worth_controls",
        "requests",
        "Requests that show the worth of the tier, because they computed what the tier held",
        f"Only with `load_or_compute: auto`. Below {LEAST}, the tier's worth is not known, and has no metrics.",
    ),
    _metric(
        "worth_prefill_seconds",
        "seconds",
        "Seconds of prefill a minute that loads from the tier save, as measured",
        "What the tier is there for. Near 0: the tier is not worth its money.",
    ),
    _metric("worth_prefill_margin_seconds", "seconds", "Half of the interval of worth_prefill_seconds", _MARGIN),
    _metric(
        "worth_ttft_seconds",
        "seconds",
        "Seconds a minute that requests get their first token earlier by loads from the tier, summed, as measured",
        "Below 0, with its margin: loads make requests slower, and no request waits for the tier until it recovers.",
    ),
    _metric("worth_ttft_margin_seconds", "seconds", "Half of the interval of worth_ttft_seconds", _MARGIN),
)
"""Metrics of the measured worth; each is a field of a tier's statistics, once it is known."""


class _Part:
    """Sums over some requests, weighted for the fits.

    The arrays have the controls at index 1 and the others at 0, then the powers of the weight, then two of: one, the
    expected seconds of computing, the seconds to the first token, and the computed seconds.
    """

    __slots__ = ("begun", "counts", "moments", "sums")

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.counts = [0, 0]
        self.sums = np.zeros(2)
        self.moments = np.zeros((2, 2, 4, 4))

    def add(self, is_control: bool, observed: list[tuple[float, float, float, float, float]]) -> None:
        arm = int(is_control)  # a truth value would be a mask
        weight, compute, load, ttft, prefill = np.array(observed).T
        values = np.stack((np.ones(len(weight)), compute, ttft, prefill))
        self.moments[arm, 0] += (values * weight) @ values.T
        self.moments[arm, 1] += (values * weight**2) @ values.T
        self.sums += compute.sum(), load.sum()


class Worth:
    """The worth of one tier, the choice of controls, and the tier's log lines about both.

    Args:
        name: name of the tier.
        seed: seed of the choice.
        now: present time, on the manager's clock in seconds.
    """

    __slots__ = (
        "_dice",
        "_loads",
        "_may_cost",
        "_mean",
        "_measured",
        "_name",
        "_observed",
        "_parts",
        "closed",
        "controls",
        "factor",
        "saving",
    )

    def __init__(self, name: str, seed: int, now: float) -> None:
        self._name = name
        self._dice = random.Random(f"{seed} {name}")
        self._loads = 0
        self._mean = self._may_cost = 0.0
        self._measured = now
        self._observed: list[tuple[float, float, float, float, float]] = []
        self._parts = deque([_Part(now)], MOST_PARTS)
        self.controls = 0
        """Number of controls since the start."""
        self.closed = False
        """True if loads make requests slower, as measured."""
        self.factor = 1.0
        """Quotient of the time that loads take and the time that they are expected to take, as measured."""
        self.saving: Saving | None = None
        """The worth; None while it is not known."""

    @property
    def known(self) -> int:
        """Number of the controls that count."""
        return min(sum(part.counts[arm] for part in self._parts) for arm in (0, 1))

    def begin(self, rank: int, compute: float, load: float, cost: float, now: float) -> Trial | None:
        """Return the trial of a request for which a load pays; None: it loads, and does not count.

        Args:
            rank: position of the tier.
            compute: expected seconds of computing the blocks of the load.
            load: expected seconds of the load.
            cost: seconds of computing all that the request would not load without the tier.
            now: present time.
        """
        probability = 1.0 - TRIED
        if not self.closed:
            probability = 0.0
            if cost <= min(MOST_COST, self._may_cost) and self._loads >= FIRST:
                probability = min(MOST_OFTEN, SHARE * self._mean / cost)
        is_control = probability > 0.0 and self._dice.random() < probability
        if is_control:
            self.controls += 1
            if not self.closed:
                self._may_cost -= cost
            return Trial(rank, True, 1.0 / probability, compute, load, now)
        self._loads += 1
        self._mean += (cost - self._mean) / min(self._loads, MEMORY)
        self._may_cost += SHARE * cost
        return Trial(rank, False, 1.0 / (1.0 - probability), compute, load, now) if probability else None

    def is_closed(self, now: float) -> bool:
        """Return True if loads make requests slower, as measured not long ago."""
        if self.closed and now - self._measured > CLOSED_SECONDS:
            self._turn(now)
            self.saving = None
            _log.info("tier %s: nothing was measured for %g s: it is used again", self._name, CLOSED_SECONDS)
        return self.closed

    def end(self, trial: Trial, prefill: float, now: float) -> bool:
        """Record that the first token of a request is there, and return True if :attr:`factor` is new.

        Args:
            trial: the trial of the request.
            prefill: seconds that the engine took for its prompt.
            now: present time.
        """
        observed = (trial.weight, trial.compute, trial.load, now - trial.since, prefill)
        part, is_rare = self._parts[-1], trial.is_control is not self.closed
        part.counts[trial.is_control] += 1
        if not is_rare:
            self._observed.append(observed)
            if len(self._observed) >= MEMORY:
                self._fold(not trial.is_control)
            return False
        self._measured = now
        part.add(trial.is_control, [observed])
        if part.counts[trial.is_control] == PART:
            self._fold(trial.is_control)
            is_known = self.known >= LEAST
            if is_known:
                self._estimate(now)
            if self._parts[-1] is part:
                self._parts.append(_Part(now))
            return is_known
        return False

    def _fold(self, rare_arm: bool) -> None:
        """Add the observations of the arm that is not ``rare_arm`` to the present part."""
        if self._observed:
            self._parts[-1].add(not rare_arm, self._observed)
            self._observed = []

    def _estimate(self, now: float) -> None:
        """Estimate the worth anew, and follow its sign."""
        known = self.known
        moments = np.sum([part.moments for part in self._parts], axis=0)
        requests = sum(sum(part.counts) for part in self._parts)
        compute, load = np.sum([part.sums for part in self._parts], axis=0) / requests
        saved, variance = np.zeros(2), np.zeros(2)
        for arm, sign in ((1, 1.0), (0, -1.0)):
            first, second = moments[arm]
            fit = np.linalg.lstsq(first[:2, :2], first[:2, 2:], rcond=None)[0]
            saved += sign * (np.array((1.0, compute)) @ fit)
            distance = np.concatenate((-fit, np.eye(2)))
            variance += np.diag(distance.T @ second @ distance) / first[0, 0] ** 2
        margin = ERRORS * np.sqrt(np.maximum(variance, 0.0) * (known / (known - 2.0)))
        if load > 0.0:
            low, high = (saved[1] - saved[0] - margin[0]) / load, (saved[1] - saved[0] + margin[0]) / load
            self.factor = float(min(max(min(max(1.0, low), high), FACTORS[0]), FACTORS[1]))
        a_minute = 60.0 * requests / max(now - self._parts[0].begun, 1e-3)
        ttft, prefill = (saved * a_minute).tolist()
        ttft_margin, prefill_margin = (margin * a_minute).tolist()
        is_first, self.saving = self.saving is None, Saving(known, prefill, prefill_margin, ttft, ttft_margin)
        if self.closed is (ttft + ttft_margin < 0.0):
            if is_first:
                _log.info("tier %s: %s", self._name, self.saving)
            return
        self._turn(now)
        if self.closed:
            text = "its loads make requests slower, so it is used for promotions only until it has recovered"
            _log.warning("tier %s: %s: %s", self._name, self.saving, text)
        else:
            _log.info("tier %s: %s: it has recovered, and is used again", self._name, self.saving)

    def _turn(self, now: float) -> None:
        """Exchange the roles of the controls and of the requests that load, and begin to measure anew."""
        self.closed = not self.closed
        self._observed = []
        self._parts.clear()
        self._parts.append(_Part(now))

    def fields(self) -> dict[str, float]:
        """Return the fields of :data:`WORTH`; those that are not known yet are left out."""
        saving = self.saving
        if saving is None:
            return {"worth_controls": self.known}
        return {
            "worth_controls": saving.controls,
            "worth_prefill_seconds": saving.prefill,
            "worth_prefill_margin_seconds": saving.prefill_margin,
            "worth_ttft_seconds": saving.ttft,
            "worth_ttft_margin_seconds": saving.ttft_margin,
        }
