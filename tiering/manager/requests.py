"""The manager's state of one request and of one secondary tier, and the division of time among tiers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.masking import shown, shown_name
from tiering.api.request import ReqContext
from tiering.api.request_policy import RequestPolicy
from tiering.secondary.contract import SecondaryTierManager

_log = logging.getLogger("kv_tiering.manager")


@dataclass(slots=True, eq=False)
class TierState:
    """One secondary tier, as the manager treats it."""

    tier: SecondaryTierManager
    rank: int
    """Position among the secondary tiers; 0 is the fastest."""
    max_loading_rows: int
    """Largest number of primary rows that the tier's loads may hold."""
    settled_until: NDArray[np.float64]
    """Per primary row, the time until which uses of its block need not be reported to the tier.

    The tier holds the block until then, or has decided not to take it.
    """
    in_service: bool = True
    """True if the manager may call the tier and submit jobs to it."""
    resetting: bool = False
    """True if the tier is out of service only until its medium has confirmed a reset."""
    loading_rows: int = 0
    """Primary rows that the tier's loads hold, overdue loads included; at most ``max_loading_rows``."""

    def deadline(self, now: float) -> float:
        """Return the time by which a job that is submitted at ``now`` should have ended."""
        limit = self.tier.load_deadline
        return math.inf if limit is None else now + limit


class UnknownNames:
    """Warnings about names of tiers that the stack does not have, one warning per name.

    The names come from clients and requests come by the thousand, so the number of warnings is bounded.
    """

    __slots__ = ("_known", "_told")

    _MOST = 32
    """Largest number of names that are warned about."""

    def __init__(self, known: Sequence[str]) -> None:
        """Create the warnings for a stack whose tiers have the names ``known``, fastest first."""
        self._known = known
        self._told: set[str] = set()

    def tell(self, req_id: str, names: Iterable[str]) -> None:
        """Warn about those of ``names`` that are unknown and were not warned about before."""
        for name in sorted(set(names).difference(self._known, self._told)):
            if len(self._told) < self._MOST:
                self._told.add(name)
                _log.warning(
                    "request %s: kv_tiering.tiers: %s is no tier of this stack and is ignored (told once); "
                    "the tiers are %s",
                    shown_name(req_id),
                    shown(name),
                    ", ".join(self._known),
                )


class Shares:
    """A span of time that is divided among tiers, which take turns.

    Each turn gets an equal part of the time that is left, so that a tier that hangs cannot use up the others' parts.
    """

    __slots__ = ("_clock", "_deadline", "_turns")

    def __init__(self, clock: Callable[[], float], seconds: float, turns: int) -> None:
        """Start the span now.

        Args:
            clock: monotonic clock, in seconds.
            seconds: length of the whole span.
            turns: number of tiers that share the span.
        """
        self._clock = clock
        self._deadline = clock() + seconds
        self._turns = turns

    def next_deadline(self) -> float:
        """Begin the next turn and return the time at which it must end."""
        now = self._clock()
        deadline = now + max(0.0, self._deadline - now) / max(1, self._turns)
        self._turns -= 1
        return deadline


@dataclass(slots=True, eq=False)
class Request:
    """One request, as the manager sees it."""

    ctx: ReqContext
    policy: RequestPolicy
    """The request's own limits on loads and stores."""
    tiers: list[TierState]
    """Secondary tiers that the request may use, fastest first."""
    wants_all: list[TierState]
    """Those of ``tiers`` that want all blocks of the request (the request-level policy)."""
    finished: bool = False
    refused: set[OffloadKey] = field(default_factory=set)
    """Keys that stay a miss for the request, because there was no room or their promotion was overdue."""
    failed: dict[int, set[OffloadKey]] = field(default_factory=dict)
    """Per tier rank, keys that the tier reported as held and failed to load."""
    asked: set[OffloadKey] = field(default_factory=set)
    """Keys whose promotion is in flight and that the request waits for."""
    reserved: dict[OffloadKey, int] = field(default_factory=dict)
    """Key → row of the promoted blocks that are pinned for the request."""
    brought: dict[OffloadKey, str] = field(default_factory=dict)
    """Key → medium from which a block was promoted for the request."""
    decide_by: float | None = None
    """Time until which lookups may stay undecided; None before the request's first undecided lookup."""

    def may_wait(self, now: float, patience: float) -> bool:
        """Return True if an undecided lookup may stay undecided.

        A tier that never decides must not hold up a request for ever.

        Args:
            now: current time, in seconds.
            patience: seconds to wait for a decision, counted from the request's first undecided lookup.
        """
        if self.decide_by is None:
            self.decide_by = now + patience
        return now < self.decide_by
