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
        lies: share of those sessions that are also ended after a request that is not the last; default 0.
        seed: seed of the choice of these sessions; default 0.
    """

    def __init__(self, share: float, block_tokens: int, *, lies: float = 0.0, seed: int = 0) -> None:
        self._share = share
        self._block_tokens = block_tokens
        self._lies = lies
        self._seed = seed
        self._session_at: dict[int, int] = {}
        """Last full block of a session's latest request → the session."""
        self._session_of: list[int] = []
        self._requests: list[list[int]] = []
        """Numbers of the requests of each session."""

    def add(self, request: TraceRequest) -> None:
        """Read the next request of the trace."""
        number = len(self._session_of)
        full = request.hashes[: request.input_tokens // self._block_tokens].tolist()
        found = next((block for block in reversed(full) if block in self._session_at), None)
        if found is None:
            session = len(self._requests)
            self._requests.append([])
        else:
            session = self._session_at.pop(found)
        if full:
            self._session_at[full[-1]] = session
        self._session_of.append(session)
        self._requests[session].append(number)

    def of(self, number: int) -> RequestHints:
        """Return the hints of the request with this number, once the whole trace was read."""
        session = self._session_of[number]
        chance = random.Random(self._seed << 32 | session)
        if chance.random() >= self._share:
            return NO_HINTS
        name, requests = session.to_bytes(8, "big"), self._requests[session]
        ends = {requests[-1]}
        if chance.random() < self._lies:
            ends.add(chance.choice(requests))
        return RequestHints(name, (name,) if number in ends else ())
