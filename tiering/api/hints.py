"""The hints of a request: statements about the later use of its blocks.

Hints change what is kept, never what an answer is. A request names its session and carries actions. Both come from
``{"kv_tiering": {"session_id": ..., "hints": [...]}}`` in the request's ``kv_transfer_params``, or from fields of the
engine's own request: ``session_id`` and ``kv_hints`` in vLLM. An action has the same form in all of them::

    {"action_type": "release", "payload": {"session_id": "conversation 17"}}

The payload's ``session_id`` is the request's own session if it is left out. The one action with an effect is *release*,
which vLLM's proposal of KV hints calls *demote*: the session is over, so that its blocks are evicted first.

A malformed hint is ignored, and the rest of the request's parameters stands. Unknown actions are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from tiering.api.masking import shown

MAX_ACTIONS = 16
"""Largest number of actions that one request may carry; further ones are malformed."""

MAX_SESSION_BYTES = 256
"""Largest length of a session's name in bytes, as UTF-8."""

RELEASE = frozenset({"release", "demote"})
"""Types of the action that ends a session, in lower case."""

SessionId = bytes
"""Digest of a session's name and of the cache salt; sessions of different salts are never equal."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The parsed hints of one request."""

    session: SessionId | None = None
    """The session of the request; None if it has none."""
    released: tuple[SessionId, ...] = ()
    """Sessions that are over once the request has ended."""
    unknown: int = 0
    """Number of actions of a type that is not known."""
    malformed: Sequence[str] = ()
    """Description of each malformed hint, which was ignored."""


NO_HINTS = RequestHints()
"""The hints of a request without any."""


def parse_hints(
    params: Mapping[str, Any] | None, session_id: object = None, envelope: object = None, salt: str | None = None
) -> RequestHints:
    """Parse the hints of a request; no exception is raised for a hint.

    Args:
        params: the request's ``kv_transfer_params``.
        session_id: the session that the engine's request names; default: none. Parameters override it.
        envelope: the engine's own envelope of hints, whose ``actions`` have the attributes ``action_type`` and
            ``payload``; default: none.
        salt: the request's cache salt; default: none.
    """
    own = params.get("kv_tiering") if params and isinstance(params, Mapping) else None
    own = own if own and isinstance(own, Mapping) else {}
    hints = own.get("hints")
    if session_id is None and envelope is None and hints is None and "session_id" not in own:
        return NO_HINTS
    malformed: list[str] = []
    session = _session(own.get("session_id", session_id), salt, "session_id", malformed)
    released: list[SessionId] = []
    unknown = 0
    for number, (kind, payload) in enumerate(_actions(hints, envelope, malformed)):
        where = f"hints[{number}]"
        if not isinstance(kind, str) or not isinstance(payload, Mapping):
            malformed.append(f"{where}: is not an action with action_type (a text) and payload (a mapping)")
        elif kind.lower() not in RELEASE:
            unknown += 1
        else:
            named = _session(payload.get("session_id"), salt, f"{where}.payload.session_id", malformed)
            over = named if "session_id" in payload else session
            if over is not None:
                released.append(over)
            elif "session_id" not in payload:
                malformed.append(f"{where}: names no session, and the request has none")
    return RequestHints(session, tuple(released), unknown, tuple(malformed))


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


def _session(name: object, salt: str | None, where: str, malformed: list[str]) -> SessionId | None:
    """Return the digest of a session's name; None for no name, or for a malformed one."""
    if name is None:
        return None
    encoded = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else b""
    if not 0 < len(encoded) <= MAX_SESSION_BYTES:
        malformed.append(f"{where}: {shown(name)} is not a text of 1 to {MAX_SESSION_BYTES} bytes")
        return None
    key = blake2b((salt or "").encode("utf-8", "surrogatepass"), digest_size=32).digest()
    return blake2b(encoded, key=key, digest_size=16).digest()
