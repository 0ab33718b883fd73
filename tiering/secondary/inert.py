"""Inert tier of a forked child process: it holds and stores nothing, and does not access the medium."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.request import ReqContext, RequestOffloadingContext
from tiering.secondary.contract import JobResult, PrefixAnswer, TransferJob
from tiering.secondary.tier_stats import TierStats


class InertTier:
    """Methods that replace those of a tier in a forked child.

    :func:`tiering.runtime.forks.inert_in_children` installs them.
    """

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return False: no block is held."""
        return False

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        """Return that no block is held."""
        return PrefixAnswer(0, False)

    def submit_store(self, job: TransferJob) -> None:
        """Do nothing, and report nothing."""

    def submit_load(self, job: TransferJob) -> None:
        """Do nothing, and report nothing."""

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext, is_fill: bool) -> Sequence[int] | None:
        """Return no positions: no block is stored."""
        return ()

    def credit(self, wanted: int, seconds: float) -> int | None:
        """Return 0: no block is stored."""
        return 0

    def not_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing."""

    def get_finished(self) -> Iterable[JobResult]:
        """Return no results."""
        return ()

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing."""

    def refresh(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing."""

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        """Return infinity: the method need not be called again."""
        return math.inf

    def take_wanted_keys(self) -> Sequence[OffloadKey]:
        """Return no keys."""
        return ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return the default policy."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Do nothing."""

    def on_schedule_end(self) -> None:
        """Do nothing."""

    def rest(self) -> float:
        """Return infinity: nothing is due in this process."""
        return math.inf

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return no events."""
        return ()

    def has_pending_work(self) -> bool:
        """Return False: there are no jobs."""
        return False

    def get_stats(self) -> TierStats:
        """Return zeros."""
        return TierStats()

    def open(self, deadline: float) -> bool:
        """Return False: the tier belongs to the parent process and is not in service here."""
        return False

    def drain(self, deadline: float) -> bool:
        """Return True: no job is in flight in this process."""
        return True

    def reset(self, deadline: float, revision: str | None = None) -> bool:
        """Return False: the parent's blocks stay as they are."""
        return False

    def reset_done(self) -> bool:
        """Return False: a reset in this process is never certain."""
        return False

    def superseded(self) -> bool:
        """Return False: the tier is in no epoch in this process."""
        return False

    def follow(self, deadline: float) -> bool:
        """Return False; the parent's blocks stay as they are."""
        return False

    def shutdown(self, deadline: float) -> bool:
        """Return True: nothing of the tier runs in this process."""
        return True
