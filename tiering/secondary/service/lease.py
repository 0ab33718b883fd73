"""A lease on an epoch that no epoch document names: while it is fresh, garbage collection leaves the blocks of that epoch alone."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Callable

from tiering.api.namespace import Namespace
from tiering.block_store import BlockStore
from tiering.secondary.io.messages import IoTask
from tiering.secondary.io.side import IoSide
from tiering.secondary.service.epoch import lease_document

logger = logging.getLogger("kv_tiering.tier")

RENEWAL_SECONDS = 3600.0
"""How often a lease is renewed.  A collector should wait for many times as long before it takes one for given up."""

RETRY_SECONDS = 60.0
"""How soon a lease that could not be written is tried again."""


class Lease:
    """Renews the lease of a private epoch, or of one that a revision names, on a shared medium, for as long as a tier is in it.

    Owned by the scheduler's thread; documents are written on the I/O side.  A lease that is not written yet costs
    nothing but time: blocks are younger than any collector's patience then.
    """

    def __init__(self, name: str, store: BlockStore, io: IoSide, clock: Callable[[], float]) -> None:
        self._name = name
        self._store = store
        self._io = io
        self._clock = clock
        self._document: str | None = None
        self._due = 0.0
        self._running = False
        self._failing = False

    def hold(self, namespace: Namespace | None) -> None:
        """Renew the lease of the epoch of ``namespace`` from now on, and no other; None: none at all."""
        self._document = None if namespace is None else lease_document(namespace)
        self._due = self._clock()

    def tick(self, now: float) -> None:
        """Renew when it is time."""
        document = self._document
        if document is None or self._running or now < self._due:
            return
        self._running = True
        self._due = now + RENEWAL_SECONDS * random.uniform(0.8, 1.0)
        content = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        self._io.run(
            IoTask("lease", lambda: self._store.write_document(document, content), self._ended, background=True)
        )

    def _ended(self, result: None, error: BaseException | None) -> None:
        self._running = False
        if error is not None:
            self._due = min(self._due, self._clock() + RETRY_SECONDS * random.uniform(0.8, 1.2))
            if not self._failing:
                logger.warning(
                    "tier %s: the lease of its epoch could not be renewed, which is tried again: %s", self._name, error
                )
        self._failing = error is not None
