"""The hints of a request: statements about the later use of its blocks.

Hints change what is kept, never what an answer is. A request names its session and carries actions. Both come from
``{"kv_tiering": {"session_id": ..., "hints": [...]}}`` in the request's ``kv_transfer_params``, or from fields of the
engine's own request: ``session_id`` and ``kv_hints`` in vLLM. An action has the same form in all of them::

    {"action_type": "release", "payload": {"session_id": "conversation 17"}}

The payload's ``session_id`` is the request's own session if it is left out. The types are:

- *release*, which vLLM's proposal of KV hints calls *demote*: the session is over, and its blocks are evicted first.
- *retain*, *pin* and *expect* with ``seconds``: other blocks are evicted before the blocks of the request, or of the
  session, for this time. A retained block yields if no other is found soon, a pinned one if there is no other. *expect*
  means that the session returns in so many seconds; its blocks are retained for somewhat longer.
- *prefetch*: what slower tiers hold of the request's prompt, or of the session's blocks, is promoted into the CPU tier.
  It begins when the engine gets the request, and goes on if the request ends before. Where prefetches are allowed,
  *expect* also brings what the CPU tier lacks by then.

A malformed hint is ignored, and the rest of the request's parameters stands. Unknown actions are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from tiering.api.keys import OffloadKey
from tiering.api.masking import shown

MAX_ACTIONS = 16
"""Largest number of actions that one request may carry; further ones are malformed."""

MAX_SESSION_BYTES = 256
"""Largest length of a session's name in bytes, as UTF-8."""

RELEASE, RETAIN, PIN, EXPECT, PREFETCH = "release", "retain", "pin", "expect", "prefetch"

ACTIONS = {"demote": RELEASE, **{name: name for name in (RELEASE, RETAIN, PIN, EXPECT, PREFETCH)}}
"""Type of an action in lower case → its name here."""

LONGEST_TYPE = max(map(len, ACTIONS))
"""Length of the longest name of an action; a longer type is not looked at."""

EXPECT_FACTOR = 1.5
"""Quotient of the time for which *expect* retains blocks and the time after which the session returns."""

PREFETCH_AT = 0.8
"""Share of the time until a session is expected after which its blocks are prefetched."""

SessionId = bytes
"""Digest of a session's name and of the cache salt; sessions of different salts are never equal."""


class KeptBlocks(NamedTuple):
    """Blocks that are kept for a time, and the bounds."""

    keys: Sequence[OffloadKey]
    """The blocks, in the order of a prefix."""
    seconds: float
    """The time from now on, in seconds."""
    share: float
    """Largest share of a tier that may be kept in the same way."""
    is_pin: bool = False
    """True if the blocks are pinned, False if they are retained."""
    tenant: bytes = b""
    """Digest of the cache salt; beyond the share, the tenant with the most blocks keeps fewer."""
    is_own: bool = False
    """True if only the session that is expected uses the blocks.

    Those that yield to others beyond the share are then evicted first, if evictions would reach them before the session
    returns.
    """


@dataclass(frozen=True, slots=True)
class HintBounds:
    """The actions that a stack follows, and their bounds."""

    release: bool = True
    """True if *release* has an effect."""
    blocks: int = 0
    """Largest number of blocks whose sessions are followed."""
    retain: float = 0.0
    """Largest share of a tier that *retain* and *expect* keep together; 0: they have no effect."""
    expect: bool = True
    """True if *expect* has an effect."""
    pin: float = 0.0
    """Largest share of a tier that *pin* keeps; 0: it has no effect."""
    prefetch: float = 0.0
    """Bytes per second that hints of one tenant may prefetch; 0: *prefetch* has no effect."""
    longest: float = 3600.0
    """Longest time for which a hint keeps blocks, in seconds."""

    @property
    def actions(self) -> frozenset[str]:
        """Names of the actions that have an effect."""
        has_effect = {
            RELEASE: self.release and self.blocks > 0,
            RETAIN: self.retain > 0.0,
            EXPECT: self.expect and (self.retain > 0.0 or self.prefetch > 0.0),
            PIN: self.pin > 0.0,
            PREFETCH: self.prefetch > 0.0,
        }
        return frozenset(name for name, has in has_effect.items() if has)

    def kept(
        self, keep: KeepAction, keys: Sequence[OffloadKey], tenant: bytes, own: Sequence[OffloadKey] = ()
    ) -> list[KeptBlocks]:
        """Return the blocks of an action of a tenant, within the bounds.

        Args:
            keep: the action.
            keys: the blocks, in the order of a prefix.
            tenant: digest of the cache salt.
            own: those of the blocks that only the session of an *expect* uses; default: none.
        """
        seconds = keep.seconds * EXPECT_FACTOR if keep.name == EXPECT else keep.seconds
        is_pin = keep.name == PIN
        kept = KeptBlocks(keys, min(seconds, self.longest), self.pin if is_pin else self.retain, is_pin, tenant)
        if not own or keep.name != EXPECT:
            return [kept]
        if len(own) == len(keys):
            return [kept._replace(is_own=True)]
        mine = frozenset(own)
        shared = [key for key in keys if key not in mine]
        return [kept._replace(keys=shared), kept._replace(keys=own, is_own=True)]


class KeepAction(NamedTuple):
    """An action that keeps blocks for a time."""

    name: str
    """:data:`RETAIN`, :data:`PIN` or :data:`EXPECT`."""
    session: SessionId | None
    """The session whose blocks are kept; None: the blocks of the request."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The parsed hints of one request."""

    session: SessionId | None = None
    """The session of the request; None if it has none."""
    released: tuple[SessionId, ...] = ()
    """Sessions that are over once the request has ended."""
    kept: tuple[KeepAction, ...] = ()
    """Actions that keep blocks once the request has ended."""
    prefetched: tuple[SessionId | None, ...] = ()
    """Sessions whose blocks are prefetched when the request arrives; None: those of its prompt."""
    tenant: bytes = b""
    """Digest of the request's cache salt."""
    unknown: int = 0
    """Number of actions of a type that is not known, or has no effect in this stack."""
    malformed: Sequence[str] = ()
    """Description of each malformed hint, which was ignored."""


NO_HINTS = RequestHints()
"""The hints of a request without any."""

ALL_ACTIONS = frozenset(ACTIONS.values())
"""The names of all actions."""


def tenant_of(salt: str | None) -> bytes:
    """Return the digest of a cache salt, which names a tenant."""
    return blake2b((salt or "").encode("utf-8", "surrogatepass"), digest_size=32).digest()


def parse_hints(
    params: Mapping[str, Any] | None,
    session_id: object = None,
    envelope: object = None,
    salt: str | None = None,
    allowed: frozenset[str] = ALL_ACTIONS,
) -> RequestHints:
    """Parse the hints of a request; no exception is raised for a hint.

    Args:
        params: the request's ``kv_transfer_params``.
        session_id: the session that the engine's request names; default: none. Parameters override it.
        envelope: the engine's own envelope of hints, whose ``actions`` have the attributes ``action_type`` and
            ``payload``; default: none.
        salt: the request's cache salt; default: none.
        allowed: names of the actions that have an effect; default: all.
    """
    # Only a mapping is asked for its truth, because that of other values may raise.
    own = params.get("kv_tiering") if params is not None and isinstance(params, Mapping) else None
    own = own if own is not None and isinstance(own, Mapping) else {}
    hints = own.get("hints")
    if session_id is None and envelope is None and hints is None and "session_id" not in own:
        return NO_HINTS
    reader = _Reader(tenant_of(salt))
    session = reader.session(own.get("session_id", session_id), "session_id")
    for number, (kind, payload) in enumerate(_actions(hints, envelope, reader.malformed)):
        where = f"hints[{number}]"
        if not isinstance(kind, str) or not isinstance(payload, Mapping):
            reader.malformed.append(f"{where}: is not an action with action_type (a text) and payload (a mapping)")
        elif len(kind) > LONGEST_TYPE or (name := ACTIONS.get(kind.lower())) is None or name not in allowed:
            reader.unknown += 1
        else:
            reader.read(name, payload, session, where)
    return RequestHints(
        session,
        tuple(reader.released),
        tuple(reader.kept),
        tuple(reader.prefetched),
        reader.tenant,
        reader.unknown,
        tuple(reader.malformed),
    )


def has_hints(request: object) -> bool:
    """Return True if an engine's request carries hints, a session or parameters of ``kv_tiering``."""
    params = getattr(request, "kv_transfer_params", None)
    if isinstance(params, Mapping) and "kv_tiering" in params:
        return True
    return getattr(request, "session_id", None) is not None or getattr(request, "kv_hints", None) is not None


@dataclass(slots=True)
class _Reader:
    """The actions of one request that were read so far."""

    tenant: bytes
    """Digest of the request's cache salt."""
    released: list[SessionId] = field(default_factory=list)
    kept: list[KeepAction] = field(default_factory=list)
    prefetched: list[SessionId | None] = field(default_factory=list)
    unknown: int = 0
    malformed: list[str] = field(default_factory=list)

    def read(self, name: str, payload: Mapping[str, Any], own: SessionId | None, where: str) -> None:
        """Add an action of a known type.

        Args:
            name: name of the action.
            payload: its payload.
            own: the request's session.
            where: place of the action, for a message.
        """
        session = own
        if "session_id" in payload:
            session = self.session(payload["session_id"], f"{where}.payload.session_id")
            if session is None:
                return
        if name == RELEASE:
            if session is None:
                self.malformed.append(f"{where}: names no session, and the request has none")
            else:
                self.released.append(session)
            return
        if name == PREFETCH:
            self.prefetched.append(session if "session_id" in payload else None)
            return
        seconds = payload.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            self.malformed.append(f"{where}.payload.seconds: {shown(seconds)} is not a number of seconds above 0")
        else:
            self.kept.append(KeepAction(name, None if session == own else session, float(min(seconds, 1e9))))

    def session(self, name: object, where: str) -> SessionId | None:
        """Return the digest of a session's name; None for no name, or for a malformed one."""
        if name is None and where == "session_id":
            return None
        # A client may send megabytes, and this is the scheduler's thread: the length is looked at first.
        is_short = isinstance(name, str) and len(name) <= MAX_SESSION_BYTES
        encoded = str(name).encode("utf-8", "surrogatepass") if is_short else b""
        if not 0 < len(encoded) <= MAX_SESSION_BYTES:
            self.malformed.append(f"{where}: {shown(name)} is not a text of 1 to {MAX_SESSION_BYTES} bytes")
            return None
        return blake2b(encoded, key=self.tenant, digest_size=15).digest()


def _actions(hints: object, envelope: object, malformed: list[str]) -> Iterable[tuple[object, object]]:
    """Return type and payload of each action; add what is malformed as a whole to ``malformed``."""
    listed = () if hints is None else hints
    carried = () if envelope is None else getattr(envelope, "actions", None)
    if not isinstance(listed, (list, tuple)) or not isinstance(carried, (list, tuple)):
        malformed.append("hints: is not a list of actions")
        return ()
    if len(listed) + len(carried) > MAX_ACTIONS:
        malformed.append(f"hints: {len(listed) + len(carried)} actions, of which the first {MAX_ACTIONS} are read")
    actions: list[tuple[object, object]] = [
        (action.get("action_type"), action.get("payload", {})) if isinstance(action, Mapping) else (None, None)
        for action in listed[:MAX_ACTIONS]
    ]
    carried = carried[: MAX_ACTIONS - len(actions)]
    return actions + [(getattr(action, "action_type", None), getattr(action, "payload", None)) for action in carried]
