"""What the manager remembers of one request, and of one secondary tier; and how tiers share time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.masking import shown
from tiering.api.request import ReqContext
from tiering.api.request_policy import RequestPolicy
from tiering.secondary.contract import SecondaryTierManager

_log = logging.getLogger("kv_tiering.manager")


@dataclass(slots=True, eq=False)
class TierState:
    """One secondary tier, as the manager treats it.

    ``in_service``: it may be asked and given jobs.  ``resetting``: it is out of service only until its reset holds.
    ``settled_until``: per primary row, until when the tier need not be told that its block is used (it holds it, or has
    decided). ``loading_rows``: primary rows that its running loads hold, overdue ones included; at most
    ``max_loading_rows``.
    """

    tier: SecondaryTierManager
    rank: int
    max_loading_rows: int
    settled_until: NDArray[np.float64]
    in_service: bool = True
    resetting: bool = False
    loading_rows: int = 0

    def deadline(self, now: float) -> float:
        """Until when a job that the tier is given ``now`` should have ended."""
        limit = self.tier.load_deadline
        return math.inf if limit is None else now + limit


class UnknownNames:
    """Tells names of tiers that a stack does not have, each once: requests come by the thousand, and names from outside.

    ``known``: the names of the stack's tiers, fastest first.
    """

    __slots__ = ("_known", "_told")

    _MOST = 32

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known
        self._told: set[str] = set()

    def tell(self, req_id: str, names: Iterable[str]) -> None:
        """Warn of those of ``names`` that are not known and were not told before."""
        for name in sorted(set(names).difference(self._known, self._told)):
            if len(self._told) < self._MOST:
                self._told.add(name)
                _log.warning(
                    "request %s: kv_tiering.tiers: %s is no tier of this stack and is ignored (told once); the tiers are %s",
                    req_id,
                    shown(name),
                    ", ".join(self._known),
                )


class Shares:
    """Time that is shared out in turns: each may use an equal part of what is left, so that one that hangs leaves the others theirs."""

    __slots__ = ("_clock", "_deadline", "_turns")

    def __init__(self, clock: Callable[[], float], seconds: float, turns: int) -> None:
        self._clock = clock
        self._deadline = clock() + seconds
        self._turns = turns

    def next_deadline(self) -> float:
        """Until when the next turn may last."""
        now = self._clock()
        deadline = now + max(0.0, self._deadline - now) / max(1, self._turns)
        self._turns -= 1
        return deadline


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    ``policy``: what it asks of the tiers. ``tiers``: the secondary tiers it may use, fastest first; ``wants_all``:
    those that want all of its blocks.  ``refused``: keys that stay a miss for it (no room, or overdue).  ``failed``:
    per tier rank, keys that the tier said it had and did not bring. ``asked``: keys in flight that it waits for.
    ``decide_by``: until when tiers may leave its lookups open (None: none has yet).  ``reserved``: key → row of
    promoted blocks that are pinned for it. ``brought``: key → medium that a block was promoted from for it.
    """

    ctx: ReqContext
    policy: RequestPolicy
    tiers: list[TierState]
    wants_all: list[TierState]
    finished: bool = False
    refused: set[OffloadKey] = field(default_factory=set)
    failed: dict[int, set[OffloadKey]] = field(default_factory=dict)
    asked: set[OffloadKey] = field(default_factory=set)
    reserved: dict[OffloadKey, int] = field(default_factory=dict)
    brought: dict[OffloadKey, str] = field(default_factory=dict)
    decide_by: float | None = None

    def may_wait(self, now: float, patience: float) -> bool:
        """Whether an open answer may stay open: a tier that never decides must not hold a request for ever."""
        if self.decide_by is None:
            self.decide_by = now + patience
        return now < self.decide_by
