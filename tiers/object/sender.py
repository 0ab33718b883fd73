"""The requests that one store sends: its client, counters by verb, and the change to rotated keys."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import AlreadyExistsError, PreconditionError

from tiering import PermanentStoreError
from tiers.object.cloud import Cloud
from tiers.object.faults import STORE_FAILURES, Cause
from tiers.object.verbs import Verb

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

logger = logging.getLogger("kv_tiering.object")

T = TypeVar("T")
Passed = tuple[type[Exception], ...]
"""Exceptions of obstore that are raised as they are."""

KEYS_SECONDS = 10.0
"""Seconds after refused credentials have turned out to be unchanged until they are looked up again."""


class RequestSender:
    """Sends the requests of one store. Any thread may call.

    When the service refuses the credentials, they are looked up again, and the request is sent once more if they have
    changed. No other request is repeated.

    Args:
        cloud: the back end.
    """

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._client: Client | None = None
        self._lock = threading.Lock()
        self._keys_lock = threading.Lock()
        self._look_again_at = 0.0
        self.sent: Counter[Verb] = Counter()
        """Requests sent so far, by kind."""
        self.absent = 0
        """Answers that there is no such object (404)."""
        self.conflicts = 0
        """Puts and deletions that the service refused because of their condition (409, 412)."""
        self.refused_bytes = 0
        """Bytes of puts that the service did not take."""

    def use(self, client: Client | None) -> None:
        """Send requests over ``client`` from now on; None: no requests."""
        self._client = client

    @property
    def client(self) -> Client:
        """The present client.

        Raises:
            PermanentStoreError: the store is not open.
        """
        client = self._client
        if client is None:
            raise PermanentStoreError(f"{self._cloud.options.location} is not open")
        return client

    def count(self, verb: Verb, requests: int = 1) -> None:
        """Count requests that are sent without :meth:`send`."""
        with self._lock:
            self.sent[verb] += requests

    def send(self, verb: Verb, request: Callable[[Client], T], *, through: Client | None = None, size: int = 0) -> T:
        """Send a request and return its result.

        Args:
            verb: kind of the request.
            request: sends it through the client given to it.
            through: client to use; default: the present one, and its successor if keys have changed.
            size: bytes that the request uploads; default: 0.

        Raises:
            Exception: one of :data:`tiers.object.faults.STORE_FAILURES`, as obstore raised it.
            PermanentStoreError: the store is not open.
        """
        client = through or self.client
        try:
            self.count(verb)
            return request(client)
        except STORE_FAILURES as error:
            # A service that says 404 has accepted the keys. Most lookups end so, and a diagnosis reads the whole text.
            if (
                through is not None
                or isinstance(error, FileNotFoundError)
                or self._cloud.dialect.diagnose(error).cause not in {Cause.KEYS, Cause.PERMISSION}
                or not self._has_new_keys(client)
            ):
                self._note(error, size)
                raise
        try:
            self.count(verb)
            return request(self.client)
        except STORE_FAILURES as error:
            self._note(error, size)
            raise

    def do(self, verb: Verb, request: Callable[[Client], T], doing: str, *, size: int = 0, passed: Passed = ()) -> T:
        """Send a request as :meth:`send` does; raise a StoreError for exceptions that are not ``passed``.

        ``doing`` names the request in messages. ``request`` also reads the answer.
        """
        try:
            return self.send(verb, request, size=size)
        except passed:
            raise
        except STORE_FAILURES as error:
            raise self._cloud.dialect.translate(error, doing) from error

    def find(self, verb: Verb, request: Callable[[Client], T], doing: str) -> T | None:
        """Send a request about one object, as :meth:`do`; return None if there is no such object."""
        try:
            return self.do(verb, request, doing, passed=(FileNotFoundError,))
        except FileNotFoundError:
            return None

    def _note(self, error: Exception, size: int) -> None:
        with self._lock:
            self.absent += isinstance(error, FileNotFoundError)
            self.conflicts += isinstance(error, (AlreadyExistsError, PreconditionError))
            self.refused_bytes += size

    def _has_new_keys(self, client: Client) -> bool:
        """Return True if requests go over another client than ``client``, whose keys were refused."""
        with self._keys_lock:
            if self._client is not client:
                return self._client is not None
            if time.monotonic() < self._look_again_at:
                return False
            if not self._cloud.rotated():
                self._look_again_at = time.monotonic() + KEYS_SECONDS
                return False
            self._client = self._cloud.connect()
        logger.info("%s: the credentials have changed; the new ones are used", self._cloud.options.location)
        return True
