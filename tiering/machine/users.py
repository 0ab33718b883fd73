"""The users whose engines a service takes, beside its own.

Each has a service of its own in a thread of the process: connections, tiers, rows and tables that no other user's
engines reach. They have the stack, the socket and the process in common.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from tiering.machine.counts import ServiceCounts, ServiceLook, joined
from tiering.machine.messages import MessageError
from tiering.machine.peers import Peer
from tiering.machine.user_names import UNMAPPED
from tiering.runtime.json_text import parse_json

_log = logging.getLogger("kv_tiering.machine")


def parameters_of(user: str, parameters: str) -> str:
    """Return the parameters of a user's own namespace, which no text of another user's engine can name.

    Args:
        user: name of the user; empty for the service's own, whose namespaces are those of any engine.
        parameters: parameters that an engine has sent.

    Raises:
        MessageError: they are no mapping.
    """
    if not user:
        return parameters
    try:
        words = parse_json(parameters)
    except ValueError as error:
        raise MessageError(f"the parameters of a namespace cannot be read: {error}") from error
    if not isinstance(words, dict):
        raise MessageError("the parameters of a namespace are no mapping")
    return json.dumps({**words, "user": user}, sort_keys=True, separators=(",", ":"))


class OwnService(Protocol):
    """The service of one user, as the others know it."""

    @property
    def is_full(self) -> bool:
        """True if the user has as many connections as it may; any thread may ask."""

    def hand_over(self, peer: Peer) -> None:
        """Take a new connection; any thread may call."""

    def run(self) -> bool:
        """Serve until :meth:`stop`, and return True if nothing touches the engines' rows any more."""

    def stop(self) -> None:
        """Let :meth:`run` end; any thread may call."""

    counts: ServiceCounts
    """Counts at the last look."""

    stopping: bool
    """True once :meth:`stop` was called."""

    def ask(self) -> Future[ServiceLook]:
        """Let the service's thread state the counts of its own user; any thread may call."""


class UserThread(threading.Thread):
    """Runs the service of one further user.

    An engine that keeps this thread busy, or an error in it, costs this user's engines alone.

    Args:
        user: name of the user.
        service: its service.
    """

    def __init__(self, user: str, service: OwnService) -> None:
        super().__init__(name=f"kv-user-{user}", daemon=True)
        self.service = service
        """The user's service."""
        self.has_ended = False
        """True once nothing touches the rows of this user's engines any more."""
        self._user = user

    def start(self) -> None:
        """Start the thread; if there is no room for one, the service refuses this user's engines."""
        try:
            super().start()
        except RuntimeError as error:
            self.has_ended = True  # nothing of the user's has begun
            _log.error("the user %s is not served, because no thread can be started: %s", self._user, error)

    def run(self) -> None:
        try:
            self.has_ended = self.service.run()
        except Exception:
            _log.exception("the user %s is not served any more, until the service is started again", self._user)


def service_for(number: int, own: OwnService, users: Mapping[int, UserThread]) -> tuple[OwnService | None, str]:
    """Return the service of the user of a new connection, or None and the reason of a refusal.

    Args:
        number: number of the user, as the kernel states it.
        own: service of the process's own user.
        users: the further users by their numbers.
    """
    if own.stopping:
        return None, "the service ends; the next one takes connections"
    user = users.get(number)
    service = own if number == os.geteuid() else None if user is None else user.service
    if number == UNMAPPED:
        return None, f"the kernel cannot name the engine's user here ({UNMAPPED}): map it into this user namespace"
    if service is None or (user and not user.is_alive()):
        return None, f"the service takes engines of its own user and of those in its stack's users, not of {number}"
    if service.is_full:
        return None, f"the service has as many connections of the user {number} as it takes"
    return service, ""


def look_at(own: OwnService, users: Mapping[int, UserThread], seconds: float) -> ServiceLook:
    """Return the counts of all users' services, or the last ones of those that do not state them in time.

    Args:
        own: service of the process's own user.
        users: the further users by their numbers.
        seconds: time for all of them.
    """
    until = time.monotonic() + seconds
    alive = [user.service for user in users.values() if user.is_alive()]
    asked = [(service, service.ask()) for service in (own, *alive)]
    looks: list[ServiceLook] = []
    for service, look in asked:
        try:
            looks.append(look.result(max(0.0, until - time.monotonic())))
        except TimeoutError:
            look.cancel()
            looks.append(ServiceLook(replace(service.counts, service_responsive=0)))
    looks += [ServiceLook(user.service.counts) for user in users.values() if user.service not in alive]
    return joined(looks)
