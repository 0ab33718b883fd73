"""The explanation of one request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tiering.explain.causes import MissCause, Reason

_CHOICE = re.compile(r"^\d+_")
"""Number that vLLM puts in front of the id of a request with several choices."""


class Span(NamedTuple):
    """Neighbouring tokens of a prompt that were computed for one cause."""

    first: int
    """First token."""
    end: int
    """Token behind the last one."""
    cause: MissCause
    """Cause of the misses."""
    tier: str = ""
    """Name of the tier that the cause names; empty for causes without one."""
    reason: Reason = Reason.NONE
    """Reason of :attr:`MissCause.UNSERVED` and :attr:`MissCause.NOT_ALLOWED`."""
    ages: tuple[float, float] | None = None
    """Smallest and largest age of the evictions or losses in seconds; None for other causes."""
    factor: float | None = None
    """Multiple of the tier's capacity at which LRU would have kept all the blocks; None if not known."""
    token: int | None = None
    """First token that differs from the latest known prompt with the same blocks before.

    None if it is not known.
    """


class Explanation(NamedTuple):
    """The causes of all prompt tokens that one request computed."""

    req_id: str
    """Id of the request."""
    time: float
    """Time at which the request began, in seconds since the epoch."""
    prompt: int
    """Tokens of the prompt."""
    computed: int
    """Prompt tokens that were computed: the sum of the spans."""
    spans: tuple[Span, ...]
    """The computed tokens by cause, in their order, without gaps in between."""
    since: float
    """Seconds for which blocks have been followed: nothing is known from before."""

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data, as the socket sends it."""
        return {
            "request": self.req_id,
            "time": self.time,
            "prompt_tokens": self.prompt,
            "computed_tokens": self.computed,
            "followed_seconds": self.since,
            "causes": [_span_data(span) for span in self.spans],
        }


def _span_data(span: Span) -> dict[str, Any]:
    """Return what is known of a span."""
    known = {
        "tier": span.tier,
        "reason": span.reason.word,
        "ages": span.ages,
        "factor": span.factor,
        "token": span.token,
    }
    place = {"first": span.first, "end": span.end, "cause": span.cause.word}
    return place | {word: value for word, value in known.items() if value}


def is_of(name: str, req_id: str) -> bool:
    """Return True if a client knows a request by an id, to which the engine adds a choice and a suffix."""
    return _CHOICE.sub("", name).startswith(f"{req_id}-")


def summary(spans: Sequence[Span]) -> str:
    """Return the tokens by cause and tier on one line, for the log."""
    totals: dict[str, int] = {}
    for span in spans:
        name = f"{span.cause.word} {span.tier}".strip()
        totals[name] = totals.get(name, 0) + span.end - span.first
    return ", ".join(f"{name} {tokens}" for name, tokens in totals.items()) or "nothing"
