"""The sessions of an engine, and the blocks that only one session uses.

A block belongs to a session if a request of the session has computed it and its store was the first one: no request
has left it in the CPU tier before. The block is shared once a request outside the session uses or computes it. When a
session is released, the blocks that no other session shares are evicted first in every tier. Other blocks belong to no
session, because their users are not known: those that a request has found in a cache, and those that it has computed
although a cache has them, such as the last block of a prompt, or blocks behind one that was evicted.

A session that is dropped beyond the bound is not over. The blocks that it shares are shared for good then.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

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

    def used(self, keys: Collection[OffloadKey], session_id: SessionId | None) -> None:
        """Note that a request of a session, or of none, uses ``keys``: other sessions' blocks are shared now."""
        users = self._users
        if users.keys().isdisjoint(keys):
            return
        session = None if session_id is None else self._session(session_id)
        if not {*map(users.get, keys)} <= {session, None}:  # most sessions use their own blocks again
            for key in keys:
                if key in users and users[key] != session:
                    self._share(key, session)
        self._drop_oldest()

    def computed(
        self, keys: Sequence[OffloadKey], session_id: SessionId | None, new: Collection[OffloadKey] | None = None
    ) -> None:
        """Note that a request of a session, or of none, has computed blocks and offered them.

        Args:
            keys: the blocks.
            session_id: the session; None: the request has none.
            new: those of the blocks that no request has left in the CPU tier before; default: all.
        """
        if session_id is None:
            self.used(keys, None)
            return
        if not self._most:
            return
        if new is not None and (known := [key for key in keys if key not in new] if new else keys):
            self.used(known, session_id)
            keys = [key for key in keys if key in new] if new else ()
        session, users = self._session(session_id), self._users
        keys = keys[: max(0, self._most // LARGEST_SHARE - len(self.blocks_of(session)))]
        if len(keys) > 1 and users.keys().isdisjoint(keys):
            self._follow_new(keys, session)
            keys = ()
        for key in keys:
            if key not in users:
                users[key] = session
                self._follow(key, session)
            elif users[key] != session:
                self._share(key, session)
        self._drop_oldest()

    def release(self, session_id: SessionId, *, is_over: bool = True) -> list[OffloadKey]:
        """Drop a session, and return its blocks that no other session shares, in the order of a prefix.

        Args:
            session_id: the session.
            is_over: False if the session may use the blocks that it shares again; default True.
        """
        keys = self.blocks_of(session_id)
        self._sessions.pop(session_id, None)
        self._blocks -= len(keys)
        users, own = self._users, list[OffloadKey]()
        if {*map(users.get, keys)} == {session_id}:
            own += dict.fromkeys(keys)
            deque(map(users.__delitem__, own), maxlen=0)
            return own
        for key in keys:
            user = users.get(key)
            if user == session_id:
                own.append(key)
                del users[key]
            elif isinstance(user, tuple):
                left = tuple(one for one in user if one != session_id)
                users[key] = None if not is_over else left if len(left) > 1 else left[0]
            elif user is None:
                users.pop(key, None)
        return own

    def blocks_of(self, session_id: SessionId) -> Sequence[OffloadKey]:
        """Return the blocks that a session has computed, shared ones too."""
        keys = self._sessions.get(session_id, ())
        return (keys,) if isinstance(keys, bytes) else keys

    def own_of(self, session_id: SessionId, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of ``keys`` that a session has computed and that no other request has used."""
        users = list(map(self._users.get, keys))
        if users.count(session_id) == len(keys):
            return keys
        return [key for key, user in zip(keys, users, strict=True) if user == session_id]

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
            self.release(next(iter(self._sessions)), is_over=False)

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

    def _follow_new(self, keys: Sequence[OffloadKey], session: SessionId) -> None:
        """Let a session follow blocks that no other session follows."""
        distinct = dict.fromkeys(keys, session)
        self._users.update(distinct)
        self._sessions[session] = [*self.blocks_of(session), *distinct]
        self._blocks += len(distinct)

    def _follow(self, key: OffloadKey, session: SessionId) -> None:
        keys = self._sessions[session]
        if isinstance(keys, list):
            keys.append(key)
        else:
            self._sessions[session] = [keys, key] if isinstance(keys, bytes) else key
        self._blocks += 1
