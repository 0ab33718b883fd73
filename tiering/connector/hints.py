"""The hints of one engine's requests: sessions that end, blocks to keep, and blocks to prefetch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tiering.api.engine import OffloadingSpec
from tiering.api.hints import EXPECT, PREFETCH_AT, KeepAction, KeptBlocks, RequestHints, SessionId, parse_hints
from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingManager
from tiering.api.masking import shown_name
from tiering.connector.counters import SchedulerCounters
from tiering.connector.groups import interleave
from tiering.connector.protocols import EngineRequest
from tiering.connector.requests import RequestState
from tiering.manager.sessions import Sessions
from tiering.runtime.ratelimit import LimitedWarning

logger = logging.getLogger("kv_tiering.connector")


class FollowedHints:
    """The hints of one engine's requests, and the sessions that they name.

    Args:
        spec: the configuration, whose ``hints`` are followed.
        manager: manager of the tiers.
        counters: counters of the scheduler half.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        manager: OffloadingManager,
        counters: SchedulerCounters,
        clock: Callable[[], float],
    ) -> None:
        self._bounds = spec.hints
        self._actions = spec.hints.actions
        self._manager = manager
        self._counters = counters
        self._warn_hints = LimitedWarning(logger, clock)
        self.sessions = Sessions(spec.hints.blocks)
        """Sessions whose blocks are followed."""

    def of(self, request: EngineRequest) -> RequestHints:
        """Return the hints of a request, and count those that have no effect."""
        hints = parse_hints(
            getattr(request, "kv_transfer_params", None),
            getattr(request, "session_id", None),
            getattr(request, "kv_hints", None),
            getattr(request, "cache_salt", None),
            self._actions,
        )
        if hints.malformed:
            self._counters.hints_ignored += len(hints.malformed)
            self._warn_hints("request %s: %s; ignored", shown_name(request.request_id), "; ".join(hints.malformed))
        self._counters.hints_unknown += hints.unknown
        return hints

    def prefetch(self, state: RequestState, own: Sequence[Sequence[OffloadKey]]) -> None:
        """Prefetch the blocks that a new request hints at.

        Args:
            state: the request.
            own: the request's own blocks, by KV-cache group.
        """
        for session in state.hints.prefetched if state.policy.tiers is None else ():
            chains = own if session is None else [list(self.sessions.blocks_of(session))]
            for keys in filter(None, chains):
                self._manager.prefetch(keys, state.hints.tenant, self._bounds.prefetch, has_holes=session is not None)

    def kept(self, state: RequestState) -> list[KeptBlocks]:
        """Return the blocks that the hints of a request keep; have those that it expects prefetched."""
        kept, bounds = list[KeptBlocks](), self._bounds
        may_prefetch = bounds.prefetch > 0.0 and state.policy.load and state.policy.tiers is None
        for action in state.hints.kept:
            keys = interleave(state.keys) if action.session is None else list(self.sessions.blocks_of(action.session))
            if not keys:
                continue
            if bounds.retain or action.name != EXPECT:
                kept += bounds.kept(action, keys, state.hints.tenant, self._own(action, state.hints.session, keys))
            if may_prefetch and action.name == EXPECT and action.seconds <= bounds.longest:
                after = PREFETCH_AT * action.seconds
                self._manager.prefetch(keys, state.hints.tenant, bounds.prefetch, after, has_holes=True)
        return kept

    def _own(self, action: KeepAction, session: SessionId | None, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of ``keys`` that only one session uses: that of an *expect*, or else ``session``."""
        session = session if action.session is None else action.session
        if session is None or action.name != EXPECT:
            return ()
        return self.sessions.own_of(session, keys)

    def released(self, state: RequestState) -> list[OffloadKey]:
        """Return the blocks of the sessions that end with a request and that no other session shares."""
        released: list[OffloadKey] = []
        for session in state.hints.released:
            own = self.sessions.release(session)
            self._counters.sessions_released += bool(own)
            released += own
        return released
