"""The sessions of an engine, and the blocks that only one session uses.

A block belongs to a session if a request of the session has computed it. It is shared once a request outside the
session uses it. When a session is released, the blocks that no other session shares are evicted first in every tier.
Blocks that a request has found in a cache belong to no session: another user may have left them there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tiering.api.hints import SessionId
from tiering.api.keys import OffloadKey

MOST_SHARERS = 8
"""Largest number of sessions that are followed for one block; more of them share it for good."""

LARGEST_SHARE = 8
"""Quotient of all followed blocks and those of one session; its later blocks are not followed."""


Followed = tuple[()] | OffloadKey | list[OffloadKey]
"""The blocks of a session; a single one is no list, because a list takes as much memory as all else."""


class Sessions:
    """The sessions that were used last, as many as the bound on their blocks allows.

    Args:
        most_blocks: largest number of blocks of all sessions together; 0: no session is followed.
    """

    __slots__ = ("_blocks", "_most", "_sessions", "_users")

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._sessions: OrderedDict[SessionId, Followed] = OrderedDict()
        """The blocks that requests of each session have computed, least recently used session first."""
        self._users: dict[OffloadKey, SessionId | tuple[SessionId, ...] | None] = {}
        """The session of each block, the sessions that share it, or None if it is shared for good."""
        self._blocks = 0
        """Number of blocks in the lists of all sessions."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def blocks(self) -> int:
        """Number of blocks that are followed; a block that sessions share counts for each of them."""
        return self._blocks

    def used(self, keys: Sequence[OffloadKey], session_id: SessionId | None) -> None:
        """Note that a request of a session, or of none, uses ``keys``: other sessions' blocks are shared now."""
        users = self._users
        if users.keys().isdisjoint(keys):
            return
        session = None if session_id is None else self._session(session_id)
        for key in keys:
            if key in users and users[key] != session:
                self._share(key, session)
        self._drop_oldest()

    def computed(self, keys: Sequence[OffloadKey], session_id: SessionId) -> None:
        """Note that a request of a session has computed ``keys``."""
        if not self._most:
            return
        session, users = self._session(session_id), self._users
        for key in keys[: max(0, self._most // LARGEST_SHARE - len(self.blocks_of(session)))]:
            if key not in users:
                users[key] = session
                self._follow(key, session)
            elif users[key] != session:
                self._share(key, session)
        self._drop_oldest()

    def release(self, session_id: SessionId) -> list[OffloadKey]:
        """Drop a session, and return its blocks that no other session shares, in the order of a prefix."""
        keys = self.blocks_of(session_id)
        self._sessions.pop(session_id, None)
        self._blocks -= len(keys)
        users, own = self._users, list[OffloadKey]()
        for key in keys:
            user = users.get(key)
            if user == session_id:
                own.append(key)
                del users[key]
            elif isinstance(user, tuple):
                left = tuple(one for one in user if one != session_id)
                users[key] = left if len(left) > 1 else left[0]
            elif user is None:
                users.pop(key, None)
        return own

    def blocks_of(self, session_id: SessionId) -> Sequence[OffloadKey]:
        """Return the blocks that a session has computed, shared ones too."""
        keys = self._sessions.get(session_id, ())
        return (keys,) if isinstance(keys, bytes) else keys

    def own_of(self, session_id: SessionId, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return those of ``keys`` that a session has computed and that no other request has used."""
        return frozenset([key for key in keys if self._users.get(key) == session_id])

    def clear(self) -> None:
        """Drop all sessions, because a reset has dropped their blocks."""
        self._sessions, self._users, self._blocks = OrderedDict(), {}, 0

    def _session(self, session_id: SessionId) -> SessionId:
        """Make a session the most recent one, and return its id."""
        self._sessions.setdefault(session_id, ())
        self._sessions.move_to_end(session_id)
        return session_id

    def _drop_oldest(self) -> None:
        while self._blocks > self._most or len(self._sessions) > self._most:
            self.release(next(iter(self._sessions)))

    def _share(self, key: OffloadKey, session: SessionId | None) -> None:
        """Add a user to a block that has another one; None: a request without a session."""
        user = self._users[key]
        if user is None:
            return
        if session is None:
            self._users[key] = None
        elif isinstance(user, bytes):
            self._users[key] = (user, session)
            self._follow(key, session)
        elif session not in user:
            if len(user) < MOST_SHARERS:
                self._users[key] = (*user, session)
                self._follow(key, session)
            else:
                self._users[key] = None

    def _follow(self, key: OffloadKey, session: SessionId) -> None:
        keys = self._sessions[session]
        if isinstance(keys, list):
            keys.append(key)
        else:
            self._sessions[session] = [keys, key] if isinstance(keys, bytes) else key
        self._blocks += 1
