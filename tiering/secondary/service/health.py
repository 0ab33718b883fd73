"""Background probes of a medium whose breaker is open, so that no request has to test the medium.

Each probe exercises the operation that failed. After failed reads, blocks are read: those whose reads failed, and some
others that the tier holds. After failed writes, empty slots are written the way blocks are. On a medium whose places
are names, or without such blocks, a document is read or written instead.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
from collections.abc import Callable, Sequence

from tiering.block_store import BlockIO, BlockStore, Done, Place
from tiering.errors import DeviceError, StoreError, TemporaryStoreError
from tiering.secondary.index.contract import TierIndex
from tiering.secondary.io.layers.breaker import Breaker, BreakerState, is_medium_failure
from tiering.secondary.io.messages import IoTask
from tiering.secondary.io.side import IoSide

HEALTH_DOCUMENT = "health"
"""Name of the document that probes read and write; on a shared medium, the prefix of the names."""
_PROOF = b"written to see whether the medium answers\n"
_PROBE_KEY = b"kv-tiering health probe"

PROBE_BLOCKS = 8
"""Maximum number of blocks or slots that one probe tries, one after another, until one answers."""


class HealthCheck:
    """Probes reads and writes whenever their breaker allows it, with one probe of each at a time.

    The scheduler's thread calls all methods.

    Args:
        store: the medium, without layers.
        index: index of the blocks on the medium.
        io: I/O side that runs the probes.
        block_bytes: bytes of one block of each KV-cache group.
        on_bad_places: function that receives the places at which the device reported an error during a probe.
    """

    def __init__(
        self,
        store: BlockStore,
        index: TierIndex,
        io: IoSide,
        block_bytes: Sequence[int],
        on_bad_places: Callable[[Sequence[Place]], None],
    ) -> None:
        self._store = store
        self._index = index
        self._io = io
        self._block_bytes = tuple(block_bytes)
        self._on_bad_places = on_bad_places
        self._document = _own_document() if index.shared else HEALTH_DOCUMENT
        self._reading = False
        self._writing = False

    def tick(self) -> None:
        """Start the probes that are due."""
        reads, writes = self._io.breakers.reads, self._io.breakers.writes
        if reads.state is not BreakerState.CLOSED and not self._reading and reads.allows():
            self._probe_reads(reads)
        if writes.state is not BreakerState.CLOSED and not self._writing and writes.allows():
            self._probe_writes(writes)

    # ------------------------------------------------------------------------------------------------------------ reads

    def _probe_reads(self, breaker: Breaker) -> None:
        failed = breaker.failed_blocks[-PROBE_BLOCKS:]
        if not breaker.admit():
            return
        self._reading = True
        blocks = [*failed, *self._index.sample(PROBE_BLOCKS)]

        def ended(result: None, error: BaseException | None) -> None:
            self._reading = False
            _record(breaker, error)

        self._io.run(IoTask("health", lambda: self._read(blocks), ended, background=True))

    def _read(self, blocks: Sequence[tuple[bytes, Place]]) -> None:
        """Read ``blocks`` on the I/O side until one is answered for.

        Raises:
            StoreError: the last error, if no block was answered for.
        """
        error: StoreError | None = None
        for key, place in blocks:
            (outcome,) = self._store.get([self._block(key, place)])
            if not isinstance(outcome, StoreError) or not is_medium_failure(outcome):
                return
            error = outcome
        if error is not None:
            raise error
        if self._store.read_document(self._document) not in {None, _PROOF}:
            raise TemporaryStoreError(f"document {self._document} was read back with other bytes than were written")

    # ----------------------------------------------------------------------------------------------------------- writes

    def _probe_writes(self, breaker: Breaker) -> None:
        if not breaker.admit():
            return
        self._writing = True
        slots = self._index.borrow(PROBE_BLOCKS)
        outcomes: dict[Place, Done | StoreError] = {}

        def ended(result: None, error: BaseException | None) -> None:
            self._writing = False
            self._index.give_back([slot for slot in slots if outcomes.get(slot) is Done.DONE])
            bad = [slot for slot, outcome in outcomes.items() if isinstance(outcome, DeviceError)]
            if bad:
                self._on_bad_places(bad)
            _record(breaker, error)

        self._io.run(IoTask("health", lambda: self._write(slots, outcomes), ended, background=True))

    def _write(self, slots: Sequence[Place], outcomes: dict[Place, Done | StoreError]) -> None:
        """Write zeros into ``slots`` until one write succeeds, and record each outcome; on the I/O side.

        Raises:
            StoreError: the last error, if no write succeeded.
        """
        error: StoreError | None = None
        for slot in slots:
            (outcome,) = self._store.put([self._block(_PROBE_KEY, slot)])
            outcomes[slot] = outcome
            if not isinstance(outcome, StoreError):
                return
            error = outcome
        if error is not None:
            raise error
        self._store.write_document(self._document, _PROOF)
        if self._index.shared:
            # Machines come and go, and their documents must not pile up.
            self._store.remove_document(self._document)

    def _block(self, key: bytes, place: Place) -> BlockIO:
        """Return buffers for one block, filled with zeros, with the medium's alignment."""
        traits = self._store.traits
        size = max(self._block_bytes)
        if not traits.variable_size and key is not _PROBE_KEY and key[-1] < len(self._block_bytes):
            size = self._block_bytes[key[-1]]
        size += -size % traits.alignment
        memory = memoryview(mmap.mmap(-1, traits.header_bytes + size + mmap.PAGESIZE))
        start = traits.header_bytes + -traits.header_bytes % traits.alignment
        return BlockIO(key, place, memory[: traits.header_bytes], memory[start : start + size])


def _own_document() -> str:
    """Return a name that no other process uses: two probes at once would have written one document."""
    host = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())[:40]
    return f"{HEALTH_DOCUMENT}-{host}-{os.getpid()}"


def _record(breaker: Breaker, error: BaseException | None) -> None:
    if error is None:
        breaker.record_success()
    else:
        breaker.record_failure(error)
