"""The requests that one store sends: its client, counters by verb, and the change to rotated keys.

The runtime of obstore, which sends them, gets few threads. Idle threads wake each other for every piece of a body: with
one thread instead of two on two cores, gets from rclone took a fifth less CPU. These threads only receive and send; the
tier's own threads compute checksums, run codecs and copy.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import MemoryStore

from tiering import PermanentStoreError, TemporaryStoreError
from tiering.tier import RawBlock, TierStats
from tiers.object.cloud import Cloud
from tiers.object.faults import STORE_FAILURES, Cause

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

logger = logging.getLogger("kv_tiering.object")

T = TypeVar("T")
Passed = tuple[type[Exception], ...]
"""Exceptions of obstore that are raised as they are."""

KEYS_SECONDS = 10.0
"""Seconds after refused credentials have turned out to be unchanged until they are looked up again."""

MOST_THREADS = 4
"""Most threads of obstore's runtime, on machines of 16 cores and more."""
_CORES_PER_THREAD = 4
_VARIABLE = "TOKIO_WORKER_THREADS"

_lock = threading.Lock()
_started = False


def start_runtime() -> None:
    """Start obstore's runtime with few threads, unless it runs already or the environment sets a number."""
    global _started  # noqa: PLW0603
    with _lock:
        if _started:
            return
        _started = True
        if _VARIABLE in os.environ:
            return
        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD))
        os.environ[_VARIABLE] = str(threads)
        try:
            obstore.put(MemoryStore(), "first-use", b"", use_multipart=False)
        finally:
            del os.environ[_VARIABLE]


class Verb(enum.Enum):
    """Kind of a request, as services charge for it."""

    GET = "get"
    HEAD = "head"
    PUT = "put"
    DELETE = "delete"
    LIST = "list"


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

    def report(self, stats: TierStats) -> None:
        """Set the counters of requests in ``stats``, as the service counts them."""
        sent = self.sent
        stats.requests = sum(sent.values())
        stats.requests_get, stats.requests_head, stats.requests_put = sent[Verb.GET], sent[Verb.HEAD], sent[Verb.PUT]
        stats.requests_delete, stats.requests_list = sent[Verb.DELETE], sent[Verb.LIST]
        stats.answers_absent, stats.answers_conflict = self.absent, self.conflicts
        stats.refused_bytes = self.refused_bytes

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

    def look_again(self, name: str, limit: int) -> RawBlock | None:
        """Read an object over new connections, and compare the answer with the service's statements.

        This separates damaged objects from a damaging path. It takes a HEAD and a GET.

        Args:
            name: name of the object.
            limit: longest content to return, in bytes.

        Returns:
            The object; None if there is none.

        Raises:
            TemporaryStoreError: length, version or digest differ from what the service states. The path is suspect then
                (a proxy, or this machine's memory), and not the object.
            StoreError: the object could not be read.
        """
        try:
            # A client of its own has connections of its own.
            fresh = self._cloud.connect()
            stated = self.send(Verb.HEAD, lambda client: obstore.head(client, name), through=fresh)
            result = self.send(Verb.GET, lambda client: obstore.get(client, name), through=fresh)
            size, version = result.meta["size"], self._cloud.version(result.meta)
            expected = self._cloud.digest(result.meta)
            content = result.bytes().to_bytes() if size <= limit else b""
        except FileNotFoundError:
            return None
        except STORE_FAILURES as error:
            raise self._cloud.dialect.translate(error, f"get {name} again") from error
        received = len(content) if size <= limit else size
        if not stated["size"] == size == received:
            raise _suspect_path(f"{received} bytes arrived of an object of {stated['size']}", name)
        if self._cloud.version(stated) != version:
            raise _suspect_path("a HEAD and a GET were answered with different versions", name)
        if size > limit or expected is None:
            return RawBlock(content, size, version)
        if expected != hashlib.md5(content, usedforsecurity=False).hexdigest():
            raise _suspect_path("the bytes differ from their ETag", name)
        return RawBlock(content, size, version, proven=True)

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


def _suspect_path(problem: str, name: str) -> TemporaryStoreError:
    return TemporaryStoreError(f"{problem}; suspect a proxy or this machine's memory (get {name} again)")
