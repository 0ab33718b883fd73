"""Lease on an epoch that no epoch document names, so that garbage collection keeps its blocks."""

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
"""Seconds between two renewals of a lease.

A collector should wait many times as long before it takes a lease for abandoned.
"""

RETRY_SECONDS = 60.0
"""Seconds until a lease that could not be written is tried again."""


class Lease:
    """Renews the lease of an epoch on a shared medium for as long as a tier uses the epoch.

    Private epochs, and epochs named by a revision, need a lease. The scheduler's thread owns this object; the I/O side
    writes the documents. A lease that is late by a failed write does no harm: the blocks are still too young to be
    collected.

    Args:
        name: name of the tier.
        store: the medium.
        io: I/O side that writes the lease.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, name: str, store: BlockStore, io: IoSide, clock: Callable[[], float]) -> None:
        self._name = name
        self._store = store
        self._io = io
        self._clock = clock
        self._document: str | None = None
        self.due = float("inf")
        """Time from which :meth:`tick` has work, in monotonic seconds."""
        self._running = False
        self._failing = False

    def hold(self, namespace: Namespace | None) -> None:
        """Renew the lease of the epoch of ``namespace`` from now on, and no other lease; None: no lease."""
        self._document = None if namespace is None else lease_document(namespace)
        self.due = float("inf") if namespace is None else self._clock()

    def tick(self, now: float) -> None:
        """Renew the lease if it is due."""
        document = self._document
        if document is None or self._running or now < self.due:
            return
        self._running = True
        self.due = now + RENEWAL_SECONDS * random.uniform(0.8, 1.0)
        content = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        self._io.run(IoTask("lease", lambda: self._store.write_document(document, content), self._ended))

    def _ended(self, result: None, error: BaseException | None) -> None:
        self._running = False
        if error is not None:
            self.due = min(self.due, self._clock() + RETRY_SECONDS * random.uniform(0.8, 1.2))
            if not self._failing:
                logger.warning(
                    "tier %s: the lease of its epoch could not be renewed and will be tried again: %s",
                    self._name,
                    error,
                )
        self._failing = error is not None
