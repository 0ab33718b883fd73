"""The tokens of the last hour by cause."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from tiering.explain.causes import MissCause, Reason
from tiering.explain.explanation import Span

MINUTES = 60
"""Minutes that are summed."""

_PER_DOUBLING = 8
"""Steps in which multiples of a capacity are counted, for each power of two."""

Causes = Counter[tuple[MissCause, str, Reason]]
"""Tokens by cause, tier and reason."""


class _Minute(NamedTuple):
    number: int
    tokens: Causes
    multiples: Counter[tuple[str, int]]
    """Evicted tokens by tier, and by the multiple of its capacity that would have kept them, in steps."""


class LastHour:
    """The computed tokens of the last hour, minute by minute."""

    def __init__(self) -> None:
        self._minutes: deque[_Minute] = deque(maxlen=MINUTES)

    def add(self, minute: int, spans: Iterable[Span]) -> None:
        """Count the tokens of a request that began in a minute."""
        if not self._minutes or self._minutes[-1].number != minute:
            self._minutes.append(_Minute(minute, Counter(), Counter()))
        _, tokens, multiples = self._minutes[-1]
        for span in spans:
            tokens[span.cause, span.tier, span.reason] += span.end - span.first
            if span.factor:
                multiples[span.tier, math.ceil(_PER_DOUBLING * math.log2(span.factor))] += span.end - span.first

    def tokens(self, minute: int) -> Causes:
        """Return the tokens by cause, tier and reason of the hour that ends with a minute."""
        return sum((one.tokens for one in self._last(minute)), Counter())

    def multiples(self, minute: int, tier: str) -> tuple[float, float] | None:
        """Return the multiples of a capacity that would have kept half and nine tenths of evictions.

        They are counted in tokens of the hour that ends with a minute; None if the tier evicted none of them, or its
        capacity is not known.
        """
        steps = Counter[int]()
        for one in self._last(minute):
            for (name, step), tokens in one.multiples.items():
                if name == tier:
                    steps[step] += tokens
        half, most = (_reached(steps, share) for share in (0.5, 0.9))
        return (half, most) if steps else None

    def _last(self, minute: int) -> Iterable[_Minute]:
        return (one for one in self._minutes if one.number > minute - MINUTES)


def _reached(steps: Counter[int], share: float) -> float:
    """Return the multiple that would have kept a share of the tokens."""
    left, multiple = share * steps.total(), 1.0
    for step, tokens in sorted(steps.items()):
        if left > 0:
            left, multiple = left - tokens, math.ceil(100.0 * 2.0 ** (step / _PER_DOUBLING)) / 100.0
    return multiple
