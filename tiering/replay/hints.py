"""The hints that the clients of a trace would send: sessions, their next requests, and their ends.

Traces name no sessions. A request continues the session whose last request's full blocks are its own first blocks.
"""

from __future__ import annotations

import random

from tiering.api.hints import EXPECT, NO_HINTS, RELEASE, HintBounds, KeepAction, RequestHints
from tiering.replay.trace import TraceRequest

LIE_SECONDS = 1800.0
"""Seconds after which a hint that lies expects a session that is over."""


class TraceHints:
    """The hints of all requests of one trace, by their numbers in the order of arrival.

    Args:
        share: share of the sessions whose clients send hints, 0 to 1.
        block_tokens: tokens of one block.
        bounds: the actions that the stack follows; default: the release of sessions that are over.
        lies: share of the hinted requests whose hint is wrong, 0 to 1; default: 0. A session that goes on is released,
            and one that is over is expected after :data:`LIE_SECONDS`.
        seed: chooses the sessions and the lies; default: 0.
    """

    def __init__(
        self,
        share: float,
        block_tokens: int,
        bounds: HintBounds | None = None,
        *,
        lies: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.bounds = HintBounds(blocks=1) if bounds is None else bounds
        self._share = share
        self._lies = lies
        self._seed = seed
        self._block_tokens = block_tokens
        self._session_at: dict[int, int] = {}
        """Last full block of a session's latest request → the session."""
        self._session_of: list[int] = []
        self._times: list[float] = []
        self._returns: dict[int, float] = {}
        """Number of each request that the session continues → seconds until the next one."""
        self._last: list[int] = []
        """Number of the latest request of each session."""

    def add(self, request: TraceRequest) -> None:
        """Read the next request of the trace."""
        number = len(self._session_of)
        full = request.hashes[: request.input_tokens // self._block_tokens].tolist()
        found = next((block for block in reversed(full) if block in self._session_at), None)
        if found is None:
            session = len(self._last)
            self._last.append(number)
        else:
            session = self._session_at.pop(found)
            before, self._last[session] = self._last[session], number
            self._returns[before] = request.time - self._times[before]
        if full:
            self._session_at[full[-1]] = session
        self._session_of.append(session)
        self._times.append(request.time)

    def of(self, number: int) -> RequestHints:
        """Return the hints of the request with this number, once the whole trace was read."""
        session = self._session_of[number]
        if random.Random(f"session {self._seed} {session}").random() >= self._share:
            return NO_HINTS
        name, returns, actions = session.to_bytes(8, "big"), self._returns.get(number), self.bounds.actions
        if random.Random(f"lie {self._seed} {number}").random() < self._lies:
            returns = LIE_SECONDS if returns is None else None
        released = (name,) if returns is None and RELEASE in actions else ()
        kept = (KeepAction(EXPECT, None, returns),) if returns and EXPECT in actions else ()
        return RequestHints(name, released, kept)
