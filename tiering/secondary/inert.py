"""Inert tier of a forked child process: it holds and stores nothing, and does not access the medium."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.secondary.contract import JobResult, SecondaryTierManager, StepEnd, TierIntake, TransferJob


class InertTier(TierIntake, SecondaryTierManager):
    """Tier of a forked child, which has the contract's defaults where these suffice.

    :func:`tiering.runtime.forks.inert_in_children` installs its methods.
    """

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return False

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext, is_fill: bool) -> Sequence[int] | None:
        """Return no positions: no block is stored."""
        return ()

    def credit(self, wanted: int, seconds: float) -> int | None:
        """Return 0: no block is stored."""
        return 0

    def submit_store(self, job: TransferJob) -> None:
        """Do nothing, and report nothing."""

    def submit_load(self, job: TransferJob) -> None:
        """Do nothing, and report nothing."""

    def get_finished(self) -> Iterable[JobResult]:
        return ()

    def on_schedule_end(self) -> StepEnd:
        """Rest for ever: nothing is due in this process."""
        return StepEnd(rest=math.inf)

    def open(self, deadline: float) -> bool:
        """Return False: the tier belongs to the parent process and is not in service here."""
        return False
