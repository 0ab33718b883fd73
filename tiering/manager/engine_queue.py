"""Delays of other requests if one computes its blocks instead of loading them.

An engine computes the prompts that it begins in a step together, and looks at further requests once they leave room.
So a prompt that is computed holds up those of its step, and those whose loads end meanwhile: these begin together then,
and each waits for the rests of all. So do those whose loads end until then, and so on, until the engine is idle.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from tiering.manager.load_gate import LoadGate
from tiering.manager.requests import Request

MOST = 32
"""Largest number of requests that wait for loads and count for one decision."""


class Delays(NamedTuple):
    """Seconds that computing costs besides its own duration."""

    before: float
    """Duration of the prompts of other requests that the same step computes."""
    others: float
    """Sum of the times that other requests wait longer."""


NO_DELAYS = Delays(0.0, 0.0)


class EngineQueue:
    """Requests that wait for loads from tiers with a gate, and those of a step that compute instead."""

    __slots__ = ("_computing", "_loading")

    def __init__(self) -> None:
        self._loading: dict[Request, tuple[float, LoadGate, int]] = {}
        """Per request that waits, the expected end of its loads, the gate of the latest, and its last block.

        Blocks of a gate are numbered in the order in which they are asked for.
        """
        self._computing: dict[Request, float] = {}
        """Seconds of computing what a tier holds, by request of the present step."""

    def end_step(self) -> None:
        """Note that what the engine has begun so far is one step, and drop the requests that wait no more."""
        self._computing.clear()
        for one in [one for one in self._loading if _has_ended(one)]:
            del self._loading[one]

    def loads(self, request: Request, gate: LoadGate, end: float, last: int) -> None:
        """Record that a request waits for loads.

        Args:
            request: the request.
            gate: gate of the tier.
            end: time at which the loads are expected to end.
            last: number of their last block (:meth:`LoadGate.last`).
        """
        self._loading[request] = end, gate, last

    def last(self, request: Request) -> int:
        """Return the number of the last block that a request waits for; 0 if it is not known."""
        return self._loading[request][2] if request in self._loading else 0

    def computes(self, request: Request, seconds: float) -> None:
        """Record that a request computes for ``seconds`` what a tier holds."""
        self._computing[request] = seconds

    def begins(self, request: Request) -> None:
        """Record that the present step computes the rest of a request, which has waited for loads."""
        self._computing.setdefault(request, 0.0)

    def awaits(self, request: Request) -> bool:
        """Return True if a request waits for loads."""
        return request in self._loading and not _has_ended(request)

    def has_other(self, request: Request, gate: LoadGate | None = None) -> bool:
        """Return True if a request besides ``request`` waits for loads.

        Args:
            request: the request that does not count.
            gate: gate of the only tier that counts; default: all.
        """
        return any(
            one is not request and not _has_ended(one) and gate in (None, its_gate)
            for one, (_, its_gate, _) in self._loading.items()
        )

    def delays(self, request: Request, compute: float, rest: float, now: float) -> Delays:
        """Return what it costs if a request computes.

        Args:
            request: the request.
            compute: seconds of computing its blocks.
            rest: seconds of computing what is behind the last whole block of a prompt, with what a step takes besides.
            now: present time.
        """
        computing, loading = self._computing, self._loading
        before = sum(computing.values()) - computing.get(request, 0.0)
        others = compute * (len(computing) - (request in computing))
        if loading:
            begin = now + before
            ends = [
                at
                for one, (at, _, _) in islice(loading.items(), MOST)
                if one is not request and one.load_by != math.inf and not one.finished
            ]
            ends.sort()
            others += _delay(ends, begin, compute, rest)
        return Delays(before, others)


def _delay(ends: Sequence[float], begin: float, compute: float, rest: float) -> float:
    """Return the sum of the times by which the first tokens of other prompts are later.

    Delays last until the engine is idle.

    Args:
        ends: times at which their loads end, in their order.
        begin: time at which the engine has computed what it has begun.
        compute: seconds that it computes then.
        rest: seconds of computing the rest of a prompt.
    """
    later, free, count = 0.0, begin + compute, 0
    while count < len(ends) and ends[count] <= free:
        together = bisect_right(ends, free, count) - count
        free += rest * together
        later += free * together
        count += together
    index = 0
    while index < count:
        begin = max(begin, ends[index])
        together = bisect_right(ends, begin, index, count) - index
        begin += rest * together
        later -= begin * together
        index += together
    return later


def _has_ended(request: Request) -> bool:
    """Return True if a request waits for no loads any more."""
    return request.load_by == math.inf or request.finished
