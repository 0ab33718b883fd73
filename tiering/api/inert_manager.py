"""A manager in a child made by fork: an empty cache that takes nothing, and leaves the parent's tiers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent, PrefixMatch, PrepareStoreOutput
from tiering.api.request import ReqContext, RequestOffloadingContext
from tiering.api.transfer import CPULoadStoreSpec
from tiering.errors import NotReadableError


class InertManager:
    """The methods that take the place of the manager's in a forked child (:func:`tiering.runtime.forks.inert_in_children`)."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """No."""
        return False

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        """None of them."""
        return PrefixMatch(0, False)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Nothing is readable in this process: raises :class:`NotReadableError`."""
        if keys:
            raise NotReadableError(list(keys))
        return CPULoadStoreSpec([])

    def count_sources(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        """None."""
        return {}

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Nothing is done."""

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Nothing is done."""

    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """There is no room."""
        return None

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Nothing is done."""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """The default policy."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Nothing is done."""

    def take_events(self) -> list[OffloadingEvent]:
        """None."""
        return []

    def on_schedule_end(self) -> None:
        """Nothing is done."""

    def has_pending_work(self) -> bool:
        """No."""
        return False

    def reset_cache(self, revision: str | None = None) -> bool:
        """The parent's blocks stay as they are."""
        return False

    def get_stats(self) -> dict[str, Any]:
        """Nothing."""
        return {"manager": {}, "primary": {}, "tiers": {}}

    def shutdown(self) -> None:
        """Nothing is done."""
