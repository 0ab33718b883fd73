"""Lease on an epoch that no epoch document names, so that garbage collection keeps its blocks."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Callable

from tiering.api.namespace import Namespace
from tiering.epochs.epoch import lease_document
from tiering.medium.block_store import BlockStore
from tiering.medium.chore import NEVER, Backoff, Chore
from tiering.medium.side import IoSide

logger = logging.getLogger("kv_tiering.tier")

RENEWAL_SECONDS = 3600.0
"""Seconds between two renewals of a lease.

A collector should wait many times as long before it takes a lease for abandoned.
"""

RETRY_SECONDS = 60.0
"""Seconds until a lease that could not be written is tried again."""


class Lease(Chore):
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
        super().__init__("lease", io, clock, self._renew, Backoff(RETRY_SECONDS))
        self._name = name
        self._store = store
        self._document: str | None = None

    def hold(self, namespace: Namespace | None) -> None:
        """Renew the lease of the epoch of ``namespace`` from now on, and no other lease; None: no lease."""
        self._document = None if namespace is None else lease_document(namespace)
        self.due = NEVER if namespace is None else self._clock()

    def _renew(self) -> None:
        if (document := self._document) is None:
            return
        content = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        self.run(lambda: self._store.write_document(document, content), self._ended)
        self.wake(RENEWAL_SECONDS * random.uniform(0.8, 1.0))

    def _ended(self, result: None, error: BaseException | None) -> None:
        if error is None:
            self.succeeded()
            return
        self.failed()
        if self.failures == 1:
            logger.warning(
                "tier %s: the lease of its epoch could not be renewed and will be tried again: %s", self._name, error
            )
