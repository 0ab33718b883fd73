"""The hints that the clients of a trace would send: the session of each request, and its end.

Traces name no sessions. A request continues the session whose last request's full blocks are its own first blocks.
"""

from __future__ import annotations

import random

from tiering.api.hints import NO_HINTS, RequestHints
from tiering.replay.trace import TraceRequest


class TraceHints:
    """The hints of all requests of one trace, by their numbers in the order of arrival.

    Args:
        share: share of the sessions whose clients name them and end them, 0 to 1.
        block_tokens: tokens of one block.
    """

    def __init__(self, share: float, block_tokens: int) -> None:
        self._share = share
        self._block_tokens = block_tokens
        self._session_at: dict[int, int] = {}
        """Last full block of a session's latest request → the session."""
        self._session_of: list[int] = []
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
            self._last[session] = number
        if full:
            self._session_at[full[-1]] = session
        self._session_of.append(session)

    def of(self, number: int) -> RequestHints:
        """Return the hints of the request with this number, once the whole trace was read."""
        session = self._session_of[number]
        if random.Random(session).random() >= self._share:
            return NO_HINTS
        name = session.to_bytes(8, "big")
        return RequestHints(name, (name,) if number == self._last[session] else ())
