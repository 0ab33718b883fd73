"""The lease under which one collection of a bucket runs at a time.

The lease is a document that is created by a conditional put, and rewritten while the collection runs. A lease that was
not renewed for a while belongs to a collection that was killed. The next one removes it under the version that it read.
A lease whose last renewal lies as far in the future is no lease either: a wrong clock, here or at the service, has made
it, and it would keep all collections off until that time. If its collection lives, the next renewal finds the new lease
and ends this collection. Two collections at a time would do no harm, but would send every request twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable

from tiering import OutOfSpaceError, StoreError, TemporaryStoreError
from tiers.object.store import ObjectStore

NAME = "gc-lease"
"""Name of the document."""

SECONDS = 600.0
"""Seconds between now and the last renewal, in the past or future, from which on a lease is void."""

_CONTENT = re.compile(rb"\S+ process \d+ [0-9a-f]{8}")
"""Content of a lease: the machine, the process, and a random number."""

RENEWALS = 2
"""Failed renewals in a row after which a collection stops: its lease may end soon."""


class CollectionLease:
    """The lease of one process.

    Args:
        store: the open store.
        place: the bucket, for messages.
        clock: function that returns seconds since 1970, compared with the service's times; default: this machine's.
    """

    def __init__(self, store: ObjectStore, place: str, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._place = place
        self._clock = clock
        self._content = f"{socket.gethostname()} process {os.getpid()} {secrets.token_hex(4)}".encode()
        self._held = False
        self._problem: StoreError | None = None

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the lease, and renew it, while the context lasts.

        A bucket that takes no more bytes is collected without a lease: nothing else could free room in it.

        Raises:
            StoreError: another collection holds the lease, or the bucket cannot be used.
        """
        with contextlib.suppress(OutOfSpaceError):
            await asyncio.to_thread(self._acquire)
        renewal = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
            await asyncio.to_thread(self._release)

    def check(self) -> None:
        """Stop a collection that does not hold its lease any more.

        Raises:
            StoreError: the lease was lost, or could not be renewed.
        """
        if self._problem is not None:
            raise self._problem

    def renew(self) -> bool:
        """Renew the lease now, and return False if another collection has taken it over.

        Raises:
            StoreError: the bucket cannot be used.
        """
        if self._store.read_document(NAME) != self._content:
            return False
        self._store.write_document(NAME, self._content)
        return True

    def _acquire(self) -> None:
        self._problem = None
        found = self._store.read_version(NAME)
        if found is not None and abs(self._clock() - found.modified) < SECONDS:
            raise self._taken(found.content)
        if found is not None:
            self._store.remove_version(NAME, found.version)
        holder = self._store.create_document(NAME, self._content)
        if holder != self._content:
            raise self._taken(holder)
        self._held = True

    def _taken(self, content: bytes | None) -> TemporaryStoreError:
        """Return the error about a lease with this content; None: the holder is not known."""
        minutes = f"{SECONDS / 60:.0f} minutes"
        if content is not None and not _CONTENT.fullmatch(content):
            return TemporaryStoreError(
                f"documents/{NAME} of {self._place} is damaged or was written by another program; if no kv-tiering gc "
                f"runs, remove this object, or wait until {minutes} after its last change"
            )
        holder = "it holds the lease now" if content is None else content.decode()
        return TemporaryStoreError(
            f"another collection of {self._place} runs ({holder}); wait until it has ended. If its process was killed, "
            f"its lease ends {minutes} after its last renewal"
        )

    async def _keep(self) -> None:
        pause, failed = SECONDS / 4, 0
        while self._held and self._problem is None:
            await asyncio.sleep(pause)
            try:
                if not await asyncio.to_thread(self.renew):
                    self._problem = self._taken(None)
                failed = 0
            except OutOfSpaceError:
                failed = 0  # the lease ends, and the collection goes on
            except StoreError as error:
                failed += 1
                if failed == RENEWALS:
                    self._problem = error

    def _release(self) -> None:
        held, self._held = self._held, False
        if not held or self._problem is not None:
            return
        with contextlib.suppress(StoreError):
            found = self._store.read_version(NAME)
            if found is not None and found.content == self._content:
                self._store.remove_version(NAME, found.version)
