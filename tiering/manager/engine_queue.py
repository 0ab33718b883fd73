"""Delays of other requests if one computes its blocks instead of loading them.

An engine computes the prompts that it begins in a step together, and looks at further requests once they leave room.
So a prompt that is computed holds up those of its step, and those whose loads end meanwhile: these begin together then,
and each waits for the rests of all.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import NamedTuple

from tiering.manager.load_gate import LoadGate
from tiering.manager.requests import Request

MOST = 64
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
        self._loading: dict[Request, tuple[float, LoadGate]] = {}
        """When the loads of each request that waits are expected to end, and the gate of the latest one."""
        self._computing: dict[Request, float] = {}
        """Seconds of computing, by request of the present step."""

    def begin_step(self) -> None:
        """Note that the engine has computed what it has begun so far, and drop the requests that wait no more."""
        self._computing.clear()
        for one in [one for one in self._loading if _has_ended(one)]:
            del self._loading[one]

    def loads(self, request: Request, gate: LoadGate, end: float) -> None:
        """Record that a request waits for loads until about ``end``."""
        self._loading[request] = end, gate

    def computes(self, request: Request, seconds: float) -> None:
        """Record that a request computes for ``seconds`` what a tier holds."""
        self._computing[request] = seconds

    def has_other(self, request: Request, gate: LoadGate | None = None) -> bool:
        """Return True if a request besides ``request`` waits for loads.

        Args:
            request: the request that does not count.
            gate: gate of the only tier that counts; default: all.
        """
        return any(
            one is not request and not _has_ended(one) and gate in (None, its_gate)
            for one, (_, its_gate) in self._loading.items()
        )

    def delays(self, request: Request, compute: float, rest: float, now: float) -> Delays:
        """Return what it costs if a request computes.

        Args:
            request: the request.
            compute: seconds of computing its blocks.
            rest: seconds of computing what is behind the last whole block of a prompt, at most.
            now: present time.
        """
        computing, loading = self._computing, self._loading
        before = sum(computing.values()) - computing.get(request, 0.0)
        others = compute * (len(computing) - (request in computing))
        if loading:
            begin = now + before
            end = begin + compute
            held = [
                at
                for one, (at, _) in islice(loading.items(), MOST)
                if at < end and one is not request and not _has_ended(one)
            ]
            others += sum(end - max(at, begin) for at in held) + rest * len(held) * (len(held) - 1)
        return Delays(before, others)


def _has_ended(request: Request) -> bool:
    """Return True if a request waits for no loads any more."""
    return request.load_by == math.inf or request.finished
