"""The manager in a forked child: an empty cache without access to the parent's tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent, PrefixMatch, PrepareStoreOutput
from tiering.api.request import ReqContext, RequestOffloadingContext
from tiering.api.transfer import CPULoadStoreSpec
from tiering.errors import NotReadableError


class InertManager:
    """The methods that replace the manager's in a forked child.

    See :func:`tiering.runtime.forks.inert_in_children`.
    """

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return False."""
        return False

    def still_pending(self, req_context: ReqContext) -> bool:
        """Return False: no lookup is pending."""
        return False

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        """Return no hits."""
        return PrefixMatch(0, False)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Refuse the load, because no block is readable in this process.

        Raises:
            NotReadableError: ``keys`` is not empty.
        """
        if keys:
            raise NotReadableError(list(keys))
        return CPULoadStoreSpec([])

    def count_sources(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        """Return an empty mapping."""
        return {}

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing."""

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing."""

    def refresh(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing."""

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        """Return None: there is no room."""
        return None

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Do nothing."""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return the default policy."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Do nothing."""

    def take_events(self) -> list[OffloadingEvent]:
        """Return no events."""
        return []

    def open_tier(self, rank: int, deadline: float) -> bool:
        """Return False: the parent has the tiers open."""
        return False

    def on_schedule_end(self) -> None:
        """Do nothing."""

    def has_pending_work(self) -> bool:
        """Return False."""
        return False

    def reset_cache(self, revision: str | None = None) -> bool:
        """Return False; the parent's blocks stay as they are."""
        return False

    def get_stats(self) -> dict[str, Any]:
        """Return empty statistics."""
        return {"manager": {}, "primary": {}, "tiers": {}}

    def shutdown(self) -> None:
        """Do nothing."""
