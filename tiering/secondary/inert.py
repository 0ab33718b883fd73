"""A tier in a child made by fork: it holds nothing, takes nothing, and leaves the parent's medium alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.request import ReqContext, RequestOffloadingContext
from tiering.secondary.contract import JobResult, PrefixAnswer, TransferJob
from tiering.secondary.stats import TierStats


class InertTier:
    """The methods that take the place of a tier's in a forked child (:func:`tiering.runtime.forks.inert_in_children`)."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """No."""
        return False

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        """None of them."""
        return PrefixAnswer(0, False)

    def submit_store(self, job: TransferJob) -> None:
        """Nothing is done, and nothing is reported."""

    def submit_load(self, job: TransferJob) -> None:
        """Nothing is done, and nothing is reported."""

    def get_finished(self) -> Iterable[JobResult]:
        """None."""
        return ()

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Nothing is done."""

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        """The tier need never be told."""
        return math.inf

    def take_wanted_keys(self) -> Sequence[OffloadKey]:
        """None."""
        return ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """The default policy."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Nothing is done."""

    def on_schedule_end(self) -> None:
        """Nothing is done."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """None."""
        return ()

    def has_pending_work(self) -> bool:
        """No."""
        return False

    def get_stats(self) -> TierStats:
        """Zeros."""
        return TierStats()

    def open(self, deadline: float) -> bool:
        """The tier is the parent's: it is not in service here."""
        return False

    def drain(self, deadline: float) -> bool:
        """No job is in flight in this process."""
        return True

    def reset(self, deadline: float, revision: str | None = None) -> bool:
        """The parent's blocks stay as they are."""
        return False

    def reset_done(self) -> bool:
        """No."""
        return False

    def shutdown(self, deadline: float) -> bool:
        """Nothing of the tier runs in this process."""
        return True
