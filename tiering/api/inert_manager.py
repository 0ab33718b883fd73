"""The manager in a forked child: an empty cache without access to the parent's tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent, OffloadingManager, PrepareStoreOutput
from tiering.api.request import ReqContext, RequestOffloadingContext
from tiering.api.transfer import CPULoadStoreSpec
from tiering.errors import NotReadableError


class InertManager(OffloadingManager):
    """Manager of a forked child, which has the contract's defaults where these suffice.

    See :func:`tiering.runtime.forks.inert_in_children`.
    """

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return False

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Refuse the load, because no block is readable in this process.

        Raises:
            NotReadableError: ``keys`` is not empty.
        """
        if keys:
            raise NotReadableError(list(keys))
        return CPULoadStoreSpec([])

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        """Return None: there is no room."""
        return None

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def take_events(self) -> list[OffloadingEvent]:
        return []

    def open_tier(self, rank: int, deadline: float) -> bool:
        """Return False: the parent has the tiers open."""
        return False

    def reset_cache(self, revision: str | None = None) -> bool:
        """Return False; the parent's blocks stay as they are."""
        return False

    def get_stats(self) -> dict[str, Any]:
        """Return empty statistics."""
        return {"manager": {}, "primary": {}, "tiers": {}}
