"""The tokens of the last hour by cause."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tiering.explain.causes import MissCause, Reason
from tiering.explain.explanation import Span

MINUTES = 60
"""Minutes that are summed at most, besides the one that has begun."""

_PER_DOUBLING = 8
"""Steps in which multiples of a capacity are counted, for each power of two."""

Causes = Counter[tuple[MissCause, str, Reason]]
"""Tokens by cause, tier and reason."""


@dataclass(slots=True)
class Tokens:
    """The prompt tokens of the requests that began within a time."""

    prompt: int = 0
    """All of them, those from caches included."""
    causes: Causes = field(default_factory=Counter)
    """Those that were computed."""
    _multiples: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Evicted tokens by tier, and by the multiple of its capacity that would have kept them, in steps."""

    def add(self, prompt: int, spans: Iterable[Span]) -> None:
        """Count the tokens of a request's prompt, and those of them that it computes."""
        self.prompt += prompt
        for span in spans:
            self.causes[span.cause, span.tier, span.reason] += span.end - span.first
            if span.factor:
                self._multiples[span.tier, math.ceil(_PER_DOUBLING * math.log2(span.factor))] += span.end - span.first

    def join(self, other: Tokens) -> None:
        """Count those of another time."""
        self.prompt += other.prompt
        self.causes.update(other.causes)
        self._multiples.update(other._multiples)

    def multiples(self, tier: str) -> tuple[float, float] | None:
        """Return the multiples of a capacity that would have kept half and nine tenths of evictions.

        None if the tier evicted none of the tokens, or its capacity is not known.
        """
        steps = Counter({step: tokens for (name, step), tokens in self._multiples.items() if name == tier})
        half, most = (_reached(steps, share) for share in (0.5, 0.9))
        return (half, most) if steps else None


class LastHour:
    """The tokens of the last hour, minute by minute."""

    def __init__(self) -> None:
        self._minutes: deque[tuple[int, Tokens]] = deque(maxlen=MINUTES + 1)

    def add(self, minute: int, prompt: int, spans: Iterable[Span]) -> None:
        """Count the tokens of a request that began in a minute."""
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, Tokens()))
        self._minutes[-1][1].add(prompt, spans)

    def last(self, minute: int, minutes: int = MINUTES) -> Tokens:
        """Return the tokens of a minute, which has begun, and of the ``minutes`` before it."""
        found = Tokens()
        for number, tokens in self._minutes:
            if number >= minute - minutes:
                found.join(tokens)
        return found


def _reached(steps: Counter[int], share: float) -> float:
    """Return the multiple that would have kept a share of the tokens."""
    left, multiple = share * steps.total(), 1.0
    for step, tokens in sorted(steps.items()):
        if left > 0:
            left, multiple = left - tokens, math.ceil(100.0 * 2.0 ** (step / _PER_DOUBLING)) / 100.0
    return multiple
