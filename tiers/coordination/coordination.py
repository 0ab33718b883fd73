"""Coordination over a Valkey or Redis server, with one thread that sends and one that receives.

Every notice is a hint. A block is served only after it was loaded and verified; a wrong hint costs requests. While the
server does not answer, the tier works as without it, and nothing waits for it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tiering import StoreError, TemporaryStoreError
from tiering.tier import Backoff, Flag, OffloadKey, Place, StoreProbe, ThreadPool
from tiers.coordination import directory
from tiers.coordination.directory import SCRIPTS, Directory, digests_of, load_scripts
from tiers.coordination.scope import MAX_BATCH, Claim, Scope
from tiers.valkey.client import ServerAddress, Subscription, ValkeyClient

logger = logging.getLogger("kv_tiering.coordination")

TIMEOUT_SECONDS = 0.2
"""Seconds within which the server must answer, and within which a connection must be made."""

RETRY_SECONDS = (0.5, 15.0)
"""Shortest and longest seconds between two attempts to reach a server that is gone."""

VERIFIED_SHARE = 1 / 16
"""Share of a complete directory's denials that are verified by a request to the medium.

A directory that denies a block which is there is no longer complete, and is filled again.
"""

IDENTITY_SECONDS = 300.0
"""Seconds between two reads of the medium's identifier, which changes if the medium is restored."""

_IDLE_SECONDS = 0.25


class ValkeyCoordination:
    """Coordination of the machines that share a medium, over one server.

    The scheduler's thread calls all methods but :meth:`ask`, which I/O threads call. None but :meth:`ask` and
    :meth:`close` may block, and no method raises because of the server.

    Args:
        name: name of the tier.
        address: the server.
        identify: returns the identifier of the medium, equal on all machines; blocks, and raises StoreError.
        listing: lists the places of all blocks below a prefix, in batches; blocks, and raises StoreError.
        ca_file: PEM file of the authorities that may sign the server's certificate; default: the system's.
        announce: wakes up callers that wait for news; any thread calls it.
        on_absent: receives the places of granted blocks that a complete directory denies, so that an upload need not
            look first; default: nothing.

    Raises:
        ConfigError: the package ``valkey`` is missing.
    """

    def __init__(
        self,
        name: str,
        address: ServerAddress,
        identify: Callable[[], bytes],
        listing: Callable[[str], Iterator[Sequence[Place]]],
        *,
        ca_file: Path | None = None,
        announce: Callable[[], object] = lambda: None,
        on_absent: Callable[[Sequence[Place]], object] = lambda places: None,
    ) -> None:
        self._name = name
        self._identify = identify
        self._medium = b""
        """Identifier of the medium, which the sending thread finds before the server counts as ready."""
        self._identify_due = 0.0
        self._announce = announce
        self._on_absent = on_absent
        self._client = ValkeyClient(
            address,
            connect_timeout=TIMEOUT_SECONDS,
            timeout=TIMEOUT_SECONDS,
            ca_file=ca_file,
            name="kv-tiering-fleet",
            scripts=SCRIPTS,
        )
        self._threads = ThreadPool(f"kv-{name}-fleet", 3)
        self._listing = listing
        self._filling = False
        """True while a directory is being filled from the medium, so that its denials can be trusted."""
        self._scope: Scope | None = None
        self._left: deque[Scope] = deque()
        """Scopes of earlier epochs, with notices that still have to be sent."""
        self._ready = False
        self._warned = False
        self._waits = Backoff(*RETRY_SECONDS)
        self._due = 0.0
        self._connections = 0
        """Number of connections and names so far; the receiving thread subscribes anew after each change."""
        self._wake = Flag()
        self._stop = threading.Event()
        self._begun: set[Callable[[], None]] = set()
        """The work that a thread does, or is about to begin."""
        self._short_of_threads = False
        self._random = random.Random()

    # ------------------------------------------------------------------------------------------- the scheduler's thread

    @property
    def ready(self) -> bool:
        """True while the server answers."""
        return self._ready

    @property
    def lapse_seconds(self) -> float:
        """Seconds after which the claim of a machine that has died is open to others."""
        return directory.LEASE_MS / 1000

    def enter(self, place_prefix: str) -> None:
        """Coordinate the blocks below ``place_prefix`` (a namespace and epoch) from now on, and no others."""
        self._scope = Scope(Directory(self._client, self._medium, place_prefix), self._announce, self._on_absent)
        self._wake.set()
        self._start()

    def leave(self) -> None:
        """Coordinate no new blocks until :meth:`enter`; queued notices are still sent."""
        scope, self._scope = self._scope, None
        if scope is not None and self._ready:
            self._left.append(scope)
            self._wake.set()

    def claim(self, claim: Claim) -> None:
        """Claim the upload of blocks; the claim is answered later, or never."""
        scope = self._scope
        if scope is not None:
            scope.queue.claims.append(claim)
            self._wake.set()

    def stored(self, places: Sequence[Place]) -> None:
        """Notify the fleet that ``places`` hold blocks now."""
        scope = self._scope
        if scope is None or not places:
            return
        scope.store(places)
        self._wake.set()

    def released(self, places: Sequence[Place]) -> None:
        """Release claims on blocks that are not uploaded after all."""
        scope = self._scope
        if scope is not None and places and self._ready:
            scope.queue.released.extend(places)
            self._wake.set()

    def watch(self, keys: Sequence[OffloadKey], places: Sequence[Place]) -> None:
        """Report in :meth:`take` if another machine stores one of these blocks."""
        scope = self._scope
        if scope is not None and self._ready:
            scope.queue.watched.extend(zip(keys, places, strict=True))
            self._wake.set()

    def declined(self, keys: Sequence[OffloadKey], places: Sequence[Place]) -> None:
        """Count a touch of blocks that admission has declined; :meth:`take` reports second touches."""
        scope = self._scope
        if scope is not None and self._ready:
            scope.queue.declined.extend(zip(keys, places, strict=True))
            self._wake.set()

    def take(self) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
        """Return the watched blocks that were stored since the last call, and the declined ones touched again."""
        scope = self._scope
        if scope is not None and (len(self._begun) < 2 or self._threads.alive < self._threads.size):
            self._start()
        return ((), ()) if scope is None else scope.inbox.take()

    def close(self, timeout: float) -> bool:
        """End all threads within ``timeout`` seconds, and return True if none runs."""
        self._stop.set()
        self._wake.set()
        self._threads.stop()
        ended = self._threads.join(max(timeout, 0.0))
        self._ready = False
        self._client.close()
        return ended

    def _start(self) -> None:
        """Start the threads that do not run; without threads, the tier works as without coordination."""
        self._threads.start()
        for work in (self._run_sender, self._run_receiver):
            if work not in self._begun and not self._stop.is_set():
                self._begun.add(work)
                self._threads.run(work, partial(self._unstarted, work))

    def _unstarted(self, work: Callable[[], None], error: BaseException) -> None:
        self._begun.discard(work)
        if not self._short_of_threads:
            self._short_of_threads = True
            logger.warning(
                "tier %s: coordination needs a thread, and none can be started; it is tried again: %s",
                self._name,
                error,
            )

    # --------------------------------------------------------------------------------------------------- lookup threads

    def ask(self, probe: Callable[[Sequence[Place]], StoreProbe], places: Sequence[Place]) -> StoreProbe:
        """Return which of ``places`` hold a block, from the server or, in doubt, from the medium.

        Args:
            probe: looks at the medium.
            places: places of blocks.
        """
        scope = self._scope
        if not self._ready or scope is None or not str(places[0]).startswith(scope.directory.place_prefix):
            return probe(places)
        digests = digests_of(places)
        try:
            complete, held = scope.directory.answers(digests)
        except StoreError as error:
            self._lost(error)
            return probe(places)
        if not complete:
            self._want_fill(scope)
        denied = [position for position, answer in enumerate(held) if not answer]
        if complete:
            # The prefix ends at the first denial, so no other one needs to be verified.
            denied = denied[:1] if self._random.random() < VERIFIED_SHARE else []
        answers: list[bool | None] = list(held)
        if denied:
            found = probe([places[position] for position in denied]).held
            for position, answer in zip(denied, found, strict=True):
                answers[position] = answer
            missing = [places[position] for position in denied if answers[position]]
            if missing and complete:
                scope.suspect(missing)
            elif missing:
                scope.queue.stored.extend(missing)
                self._wake.set()
        return StoreProbe(tuple(answers))

    # ----------------------------------------------------------------------------------------------- the sending thread

    def _run_sender(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(_IDLE_SECONDS)
            self._wake.clear()
            self._finish_left()
            scope = self._scope
            if scope is None:
                continue
            try:
                if not self._ready and not self._connect():
                    continue
                self._look_at_medium()
                self._use_medium(scope)
                self._send(scope)
            except StoreError as error:
                self._lost(error)
            except Exception as error:
                logger.exception("tier %s: coordination failed unexpectedly", self._name)
                self._lost(TemporaryStoreError(f"{type(error).__name__}: {error}"))
        scope = self._scope
        if scope is not None:
            self._left.append(scope)
        self._finish_left()

    def _finish_left(self) -> None:
        """Send what waits in earlier epochs, above all the releases of claims."""
        while self._left:
            scope = self._left.popleft()
            try:
                while self._ready and scope.queue.waiting():
                    scope.send(self._client)
            except StoreError as error:
                logger.debug("tier %s: the last notices could not be sent: %s", self._name, error)

    def _connect(self) -> bool:
        """Reach for the server if it is time, and return True if it answers."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._client.replies(load_scripts())
        self._identify_due = 0.0
        self._look_at_medium()
        scope = self._scope
        if scope is not None:
            scope.queue.drop_late()
            scope.incomplete = True
            self._use_medium(scope)
        self._waits.succeeded()
        self._connections += 1
        self._ready = True
        if self._warned:
            logger.warning("tier %s: coordination is back", self._name)
            self._warned = False
        return True

    def _look_at_medium(self) -> None:
        """Read the identifier of the medium if it is time; a known one stays if there is no answer.

        Raises:
            StoreError: no identifier is known yet, and there is no answer.
        """
        now = time.monotonic()
        if now < self._identify_due:
            return
        try:
            self._medium = self._identify()
        except StoreError as error:
            if not self._medium:
                raise
            logger.debug("tier %s: the identifier of the medium cannot be read: %s", self._name, error)
        self._identify_due = now + IDENTITY_SECONDS

    def _use_medium(self, scope: Scope) -> None:
        """Let a scope use the directory of the present medium."""
        if scope.directory.medium != self._medium:
            scope.directory.identify(self._medium)
            scope.incomplete = True
            self._connections += 1

    def _lost(self, error: StoreError) -> None:
        """Do without the server until it answers again. Any thread may call."""
        self._ready = False
        self._due = time.monotonic() + self._waits.failed()
        if not self._warned:
            self._warned = True
            logger.warning(
                "tier %s: coordination is gone, and the tier works without it until it is back: %s", self._name, error
            )

    def _send(self, scope: Scope) -> None:
        """Send all that waits, and begin the fill that is due."""
        directory = scope.directory
        scope.judge()
        if scope.overflowed:
            self._client.call(*directory.distrust())
            scope.overflowed = False
            self._want_fill(scope)
        if scope.incomplete and not self._filling:
            scope.incomplete = False
            complete, _ = directory.answers(b"")
            if not complete and self._client.call(*directory.claim_fill()) is not None:
                self._filling = True
                self._threads.run(partial(self._fill, directory), partial(self._unfilled, scope))
        if scope.missed:
            scope.missed = False
            scope.look_again()
        while scope.queue.waiting():
            scope.send(self._client)

    def _want_fill(self, scope: Scope) -> None:
        if not self._filling:
            scope.incomplete = True

    # -------------------------------------------------------------------------------------------------- the fill

    def _unfilled(self, scope: Scope, error: StoreError) -> None:
        self._filling, scope.incomplete = False, True
        if not self._stop.is_set():
            logger.warning("tier %s: the fleet's directory cannot be filled: %s", self._name, error)

    def _fill(self, directory: Directory) -> None:
        """Add the blocks of the medium to a directory; machines add those that they store meanwhile."""
        try:
            generation, count = directory.fill(b""), 0
            for places in self._listing(directory.place_prefix):
                for at in range(0, len(places), MAX_BATCH):
                    digests = digests_of(places[at : at + MAX_BATCH])
                    if self._stop.is_set() or directory.fill(digests) != generation:
                        return
                count += len(places)
            if directory.finish(generation):
                logger.info("tier %s: the fleet's directory is complete: %d blocks", self._name, count)
        except StoreError as error:
            logger.warning(
                "tier %s: the fleet's directory could not be filled, so that lookups go on asking the bucket: %s",
                self._name,
                error,
            )
        finally:
            self._filling = False

    # --------------------------------------------------------------------------------------------- the receiving thread

    def _run_receiver(self) -> None:
        scope: Scope | None = None
        subscription: Subscription | None = None
        connection, fresh = 0, False
        while not self._stop.is_set():
            try:
                if scope is not self._scope or subscription is None or connection != self._connections:
                    subscription = self._close(subscription)
                    scope, connection = self._scope, self._connections
                    if scope is None or not self._ready:
                        self._stop.wait(_IDLE_SECONDS / 10)
                        continue
                    subscription, fresh = self._client.subscribe(scope.directory.channel), True
                notice = subscription.read(_IDLE_SECONDS)
                if notice is not None and scope is not None:
                    scope.receive(notice[1])
                if fresh and scope is not None:
                    # The subscription holds by now; what was announced before has to be looked up.
                    fresh, scope.missed = False, True
                    self._wake.set()
            except StoreError as error:
                subscription = self._close(subscription)
                logger.debug("tier %s: notices may be missed: %s", self._name, error)
                self._stop.wait(_IDLE_SECONDS)
            except Exception:
                subscription = self._close(subscription)
                logger.exception("tier %s: receiving the fleet's notices failed unexpectedly", self._name)
                self._stop.wait(_IDLE_SECONDS)
        self._close(subscription)

    @staticmethod
    def _close(subscription: Subscription | None) -> None:
        if subscription is not None:
            subscription.close()
