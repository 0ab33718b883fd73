"""Moving estimate of a duration that has a fixed part and a part per unit, such as a load of blocks."""

from __future__ import annotations

KEPT = 0.9
"""Weight of all earlier observations beside a new one."""

_DISTINCT = 0.02
"""Smallest relative variance of the numbers of units by which both parts can be told apart."""


class LinearCost:
    """Estimate of the seconds that a number of units takes, from the latest observations.

    The estimate is a weighted least-squares fit of the seconds per unit. Weights fade with time and with each further
    observation. Neither part is negative. While all observations that count have about the same number of units, the
    fixed part is 0, or the quotient of both parts stays as it was.

    Args:
        half_life: seconds after which an observation has half of its weight.
        keeps_quotient: True if the quotient stays; default: False.
    """

    __slots__ = (
        "_half_life",
        "_keeps_quotient",
        "_sum_x",
        "_sum_xx",
        "_sum_xy",
        "_sum_y",
        "_time",
        "_weight",
        "fixed",
        "per_unit",
    )

    def __init__(self, half_life: float, *, keeps_quotient: bool = False) -> None:
        self._half_life = half_life
        self._keeps_quotient = keeps_quotient
        self._time = 0.0
        self.restart()
        self.fixed = 0.0
        """Seconds that do not depend on the number of units."""
        self.per_unit: float | None = None
        """Seconds of each unit; None before the first observation."""

    def per_unit_beside(self, fixed: float) -> float:
        """Return the seconds per unit if the fixed part is at least ``fixed``; 0 before the first observation."""
        if self.per_unit is None:
            return 0.0
        return min(self.per_unit, max(0.0, (self._sum_y - fixed * self._sum_x) / self._weight))

    def restart(self) -> None:
        """Let only later observations count, and what is known of the quotient of both parts."""
        self._weight = self._sum_x = self._sum_xx = self._sum_y = self._sum_xy = 0.0

    def observe(self, units: int, seconds: float, now: float, *, fixed: bool = True) -> None:
        """Record that ``units`` have taken ``seconds``.

        Args:
            units: number of units, at least 1.
            seconds: their duration.
            now: present time, in monotonic seconds.
            fixed: False if the duration does not have the fixed part; default True.
        """
        fade = KEPT * 0.5 ** ((now - self._time) / self._half_life)
        x, y, self._time = 1.0 / units if fixed else 0.0, seconds / units, now
        self._weight = weight = self._weight * fade + 1.0
        self._sum_x = sum_x = self._sum_x * fade + x
        self._sum_xx = sum_xx = self._sum_xx * fade + x * x
        self._sum_y = sum_y = self._sum_y * fade + y
        self._sum_xy = sum_xy = self._sum_xy * fade + x * y
        variance = weight * sum_xx - sum_x * sum_x
        if variance > _DISTINCT * weight * sum_xx:
            self.fixed = max(0.0, (weight * sum_xy - sum_x * sum_y) / variance)
        elif self._keeps_quotient and self.fixed and self.per_unit:
            self.fixed = sum_y / (sum_x + weight * self.per_unit / self.fixed)
        else:
            self.fixed = 0.0
        self.per_unit = (sum_y - self.fixed * sum_x) / weight
        if self.per_unit < 0.0:
            self.per_unit, self.fixed = 0.0, sum_xy / sum_xx
