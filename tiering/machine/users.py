"""The users whose engines a service takes, beside its own.

Each has a service of its own in a thread of the process: connections, tiers, rows and tables that no other user's
engines reach. They have the stack, the socket and the process in common.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol, Self

from tiering.machine.counts import ServiceCounts, ServiceLook, joined
from tiering.machine.link import SILENT_SECONDS
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


RESTART_SECONDS = 5.0
"""Shortest time between two starts of the service of a user that fails."""

_BEAT_SECONDS = 0.02

HANGS = f"its thread has not run for {SILENT_SECONDS:g} s"
"""Trouble of a user whose engines get no answers."""


class OwnService(Protocol):
    """The service of one user, as the others know it."""

    @property
    def is_full(self) -> bool:
        """True if the user has as many connections as it may; any thread may ask."""

    def hand_over(self, peer: Peer) -> None:
        """Take a new connection; any thread may call."""

    def run(self, beat: Callable[[], object]) -> bool:
        """Serve until :meth:`stop`, and return True if nothing touches the engines' rows any more.

        Args:
            beat: function that is called after each turn, several times a second.
        """

    def stop(self) -> None:
        """Let :meth:`run` end; any thread may call."""

    def abort(self) -> bool:
        """End all I/O after an error in :meth:`run`, let go of the engines, and return as :meth:`run` does.

        I/O that does not end is waited for until :meth:`stop`.
        """

    def take_over(self, failed: Self) -> None:
        """Take the connections that wait for a service that has failed, and go on with its counters."""

    counts: ServiceCounts
    """Counts at the last look."""

    stopping: bool
    """True once :meth:`stop` was called."""

    def ask(self) -> Future[ServiceLook]:
        """Let the service's thread state the counts of its own user; any thread may call."""


class UserThread:
    """Runs the service of one further user in a thread.

    What keeps the thread busy, or an error in it, costs this user's engines alone. After an error, the service ends all
    I/O, lets go of its engines, and a new one is started. A thread that hangs cannot be ended: its engines run without
    tiers, and rows of jobs that have begun stay out of use, until it goes on or the process ends. The thread of the
    process's own user calls all methods.

    Args:
        user: name of the user.
        build: function that returns a service.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, user: str, build: Callable[[], OwnService], clock: Callable[[], float] = time.monotonic) -> None:
        self.service = build()
        """The user's service."""
        self.has_ended = True
        """True if nothing touches the rows of this user's engines."""
        self.trouble = ""
        """Why the user is not served at the moment; empty if it is."""
        self._user = user
        self._build = build
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._beat_at = self._due = 0.0
        self._stopped = False

    def start(self) -> None:
        """Start the thread; if there is no room for one, the user's engines are refused until there is."""
        self._beat_at = self._clock()
        self._due = self._beat_at + RESTART_SECONDS
        thread = threading.Thread(target=self._run, args=(self.service,), name=f"kv-user-{self._user}", daemon=True)
        self._thread, self.has_ended, self.trouble = thread, False, ""
        try:
            thread.start()
        except RuntimeError as error:
            self.has_ended, self.trouble = True, f"no thread can be started: {error}"
            _log.error("the user %s is not served, because %s", self._user, self.trouble)
            return
        if self._stopped:  # a signal came while the service was built
            self.service.stop()

    def stop(self) -> None:
        """Let the service end; a signal's handler may call, too."""
        self._stopped = True
        self.service.stop()

    def is_alive(self) -> bool:
        """Return True if the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def ends(self, seconds: float, beat: Callable[[], object] = lambda: None) -> bool:
        """Wait for the end of the thread, and return True if nothing touches the engines' rows any more.

        Args:
            seconds: longest wait.
            beat: function that is called several times a second.
        """
        until = self._clock() + seconds
        while self.is_alive() and self._thread is not None and self._clock() < until:
            self._thread.join(_BEAT_SECONDS)
            beat()
        return self.has_ended

    def step(self) -> None:
        """Note whether the thread hangs, and start a service anew that has failed."""
        now = self._clock()
        if self.is_alive():
            hangs = now > self._beat_at + SILENT_SECONDS
            if hangs and not self.trouble:
                self.trouble = HANGS
                _log.error("the user %s is not served: %s; it is at\n%s", self._user, HANGS, self._place())
            elif self.trouble == HANGS and not hangs:
                self.trouble = ""
                _log.warning("the user %s is served again: its thread goes on", self._user)
        elif self.has_ended and not self._stopped and now >= self._due:
            before = self.service
            try:
                self.service = self._build()
            except OSError as error:
                self._due = now + RESTART_SECONDS
                _log.error("the service of the user %s cannot be started: %s", self._user, error)
                return
            self.service.take_over(before)
            self.start()

    def _run(self, service: OwnService) -> None:
        try:
            self.has_ended = service.run(self._beat)
        except Exception:
            self.trouble = "it has failed"
            _log.exception(
                "the service of the user %s has failed; it is started again once all I/O has ended", self._user
            )
            self.has_ended = service.abort()

    def _beat(self) -> None:
        self._beat_at = self._clock()

    def _place(self) -> str:
        """Return where the thread is, as text."""
        frame = sys._current_frames().get(self._thread.ident or 0) if self._thread is not None else None
        return "".join(traceback.format_stack(frame)[-3:]) if frame is not None else "its end"


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
    if service is None:
        return None, f"the service takes engines of its own user and of those in its stack's users, not of {number}"
    if user is not None and (user.trouble or not user.is_alive()):
        return None, f"the part of the service for the user {number} is out of order: {user.trouble or 'it has ended'}"
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
    alive = [user.service for user in users.values() if user.is_alive() and not user.trouble]  # others do not answer
    asked = [(service, service.ask()) for service in (own, *alive)]
    looks: list[ServiceLook] = []
    for service, look in asked:
        try:
            looks.append(look.result(max(0.0, until - time.monotonic())))
        except TimeoutError:
            look.cancel()
            looks.append(ServiceLook(replace(service.counts, service_responsive=0)))
    looks += [ServiceLook(user.service.counts) for user in users.values() if user.service not in alive]
    found = joined(looks)
    found.service.service_users_away = sum(bool(user.trouble) for user in users.values())
    return found
