"""Background probes of a medium whose breaker is open, so that no request has to test the medium.

Each probe exercises the operation that failed. After failed reads, blocks are read: those whose reads failed, and some
others that the tier holds. After failed writes, empty slots are written the way blocks are. On a medium whose places
are names, or without such blocks, a document is written and read instead.

What a probe reads is compared: blocks by their checksums, slots and documents with what was written. A medium, or a
proxy before it, that answers with other bytes is not back in service.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence

from xxhash import xxh3_128_digest

from tiering.block_tier.parts import TierParts
from tiering.errors import ConfigError, CorruptBlockError, DeviceError, StoreError, TemporaryStoreError
from tiering.medium.block_store import BlockIO, Done, Outcome, Place
from tiering.medium.codec import FrameVerifier
from tiering.medium.frame import encode_header
from tiering.medium.layers.breaker import Breaker, BreakerState, is_medium_failure
from tiering.medium.side import IoTask

HEALTH_DOCUMENT = "health"
"""Name of the document that probes write and read; on a shared medium, the prefix of the names."""
_PROOF = b"written to see whether the medium answers: "
_PROBE_KEY = b"kv-tiering health probe"
_NO_NAMESPACE = bytes(16)
_NONCE_BYTES = 16

PROBE_BLOCKS = 8
"""Maximum number of blocks or slots that one probe tries, one after another, until one answers."""


class HealthCheck:
    """Probes reads and writes whenever their breaker allows it, with one probe of each at a time.

    The scheduler's thread calls all methods.

    Args:
        parts: parts of the tier. The probes of a tier that stores nothing write nothing.
        on_bad_places: function that receives the places at which the device reported an error during a probe.
    """

    def __init__(self, parts: TierParts, on_bad_places: Callable[[Sequence[Place]], None]) -> None:
        self._store, self._index, self._io = parts.store, parts.index, parts.io
        self._block_bytes = parts.context.group_bytes
        self._on_bad_places = on_bad_places
        self._writes = parts.options.admission != "none"
        self._document = _own_document() if parts.index.shared else HEALTH_DOCUMENT
        self._probed: list[Breaker] = []
        """Breakers whose probe is running."""

    def tick(self) -> None:
        """Start the probes that are due."""
        breakers = self._io.breakers
        for breaker, probe in ((breakers.reads, self._probe_reads), (breakers.writes, self._probe_writes)):
            closed = breaker.state is BreakerState.CLOSED
            if not closed and breaker not in self._probed and breaker.allows() and breaker.admit():
                self._probed.append(breaker)
                probe(breaker)

    def _run(self, breaker: Breaker, probe: Callable[[], None], ended: Callable[[], None] = lambda: None) -> None:
        """Run ``probe`` on the I/O side, then call ``ended``, and record the result in the breaker."""

        def done(result: None, error: BaseException | None) -> None:
            self._probed.remove(breaker)
            ended()
            if error is None:
                breaker.record_success()
            else:
                breaker.record_failure(error)

        self._io.run(IoTask("health", probe, done))

    def _probe_reads(self, breaker: Breaker) -> None:
        blocks = [*breaker.failed_blocks[-PROBE_BLOCKS:], *self._index.sample(PROBE_BLOCKS)]
        self._run(breaker, lambda: self._read(blocks))

    def _read(self, blocks: Sequence[tuple[bytes, Place]]) -> None:
        """Read ``blocks`` on the I/O side until one is sound or absent.

        Blocks may be damaged on the medium itself. If all that were read are damaged, a document decides.

        Raises:
            StoreError: the last error, if no block was sound or absent.
        """
        error: StoreError | None = None
        wrong: set[Place] = set()
        for key, place in blocks:
            block = self._block(key, place)
            (outcome,) = self._store.get([block])
            if isinstance(outcome, CorruptBlockError) or (outcome is Done.DONE and not _is_sound(block)):
                wrong.add(place)
                error = TemporaryStoreError(
                    f"{len(wrong)} block(s) were read with other bytes, the last one at {place}"
                )
            elif not isinstance(outcome, StoreError) or not is_medium_failure(outcome):
                return
            else:
                error = outcome
        if error is not None and not wrong:
            raise error
        if not self._exchange(must_write=False) and len(wrong) > 1 and error is not None:
            raise error

    def _probe_writes(self, breaker: Breaker) -> None:
        slots = self._index.borrow(PROBE_BLOCKS)
        outcomes: dict[Place, Done | StoreError] = {}

        def ended() -> None:
            self._index.give_back()
            if bad := [slot for slot, outcome in outcomes.items() if isinstance(outcome, DeviceError)]:
                self._on_bad_places(bad)

        self._run(breaker, lambda: self._write(slots, outcomes), ended)

    def _write(self, slots: Sequence[Place], outcomes: dict[Place, Done | StoreError]) -> None:
        """Write into ``slots`` until one write succeeds, and record each outcome; on the I/O side.

        Raises:
            StoreError: the last error, if no write succeeded, or if other bytes were read than were written.
        """
        error: StoreError | None = None
        for slot in slots:
            outcomes[slot] = outcome = self._write_block(slot)
            if not isinstance(outcome, StoreError):
                return
            error = outcome
        if error is not None:
            raise error
        self._exchange(must_write=True)

    def _write_block(self, place: Place) -> Outcome:
        """Write a block of a namespace that no engine has, read it back, and write zeros in its place."""
        written, found = self._block(_PROBE_KEY, place), self._block(_PROBE_KEY, place)
        nonce, size = secrets.token_bytes(_NONCE_BYTES), len(written.payload)
        written.payload[:] = (nonce * (size // _NONCE_BYTES + 1))[:size]
        digest = xxh3_128_digest(written.payload)
        encode_header(
            written.header, key=_PROBE_KEY, fingerprint=_NO_NAMESPACE, sequence=0, raw_length=size, digest=digest
        )
        (outcome,) = self._store.put([written])
        if isinstance(outcome, StoreError):
            return outcome
        (read,) = self._store.get([found])
        (cleared,) = self._store.put([self._block(_PROBE_KEY, place)])
        # A read that fails is the business of the reads' breaker.
        if read is Done.DONE and (found.payload != written.payload or found.header != written.header):
            return TemporaryStoreError(f"{place} was read back with other bytes than were written")
        return cleared

    def _exchange(self, *, must_write: bool) -> bool:
        """Write a document, read it back, and return True if it was compared.

        Args:
            must_write: False if a medium that takes no writes may still answer.

        Raises:
            StoreError: the medium does not answer, or with other bytes than were written.
        """
        proof: bytes | None = _PROOF + secrets.token_hex(_NONCE_BYTES).encode()
        try:
            if self._writes and proof is not None:
                self._store.write_document(self._document, proof)
            else:
                proof = None
        except StoreError:
            if must_write:
                raise
            proof = None
        found = self._store.read_document(self._document)
        if found is not None and (bytes(found) != proof if proof is not None else not bytes(found).startswith(_PROOF)):
            raise TemporaryStoreError(f"document {self._document} was read back with other bytes than were written")
        if self._index.shared and proof is not None:
            # Machines come and go, and their documents must not pile up.
            self._store.remove_document(self._document)
        return found is not None and proof is not None

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


def _is_sound(block: BlockIO) -> bool:
    """Return True if ``block`` holds a block of the format whose checksums are right.

    On a medium with names, it must also be the block of this name. A slot may hold a later block than was expected.
    """
    try:
        header = FrameVerifier().verify(
            block.header, block.payload, key=block.key if isinstance(block.place, str) else None
        )
    except ConfigError:
        return True  # this process cannot decode it
    except StoreError:
        return False
    return block.filled in {-1, header.stored_length}


def _own_document() -> str:
    """Return a name that no other process uses: two probes at once would have written one document."""
    host = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())[:40]
    return f"{HEALTH_DOCUMENT}-{host}-{os.getpid()}"
