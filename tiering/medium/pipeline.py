"""Pipeline between primary rows and a medium: frames and checksums stores, verifies and decodes loads.

The pipeline runs units (some blocks of one job) on I/O threads. Payloads move directly between the row and the medium;
only compression needs scratch memory. The pipeline never holds the interpreter lock for long: only numpy, xxhash,
zstandard and the store touch the bytes.

Media with aligned I/O receive the row up to the next multiple of their alignment. The bytes between the end of the
block and that boundary are the row's padding. They are zeroed before a put, so that no bytes of a larger block, which
had the row before, reach the medium. These bytes belong to no block, so concurrent readers of the row are not affected.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Sequence

import numpy as np
from xxhash import xxh3_128_digest

from tiering.errors import ConfigError, CorruptBlockError, OverdueError, PermanentStoreError, StoreError
from tiering.medium.block_store import BlockIO, BlockStore, Done, Outcome
from tiering.medium.codec import BlockCodec, load_zstandard
from tiering.medium.frame import (
    HEADER_BYTES,
    SEQUENCE,
    Codec,
    CorruptReason,
    FrameError,
    FrameHeader,
    SequenceSource,
    encode_header,
    verify,
)
from tiering.medium.layers.breaker import BreakerOpenError, Breakers
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.contract import TransferJob

_log = logging.getLogger("kv_tiering.io")

LOG_PERIOD = 10.0
"""Seconds between two log lines about refused blocks of one tier."""

_SCRATCH_BYTES = 8 << 20


class _HeaderPool:
    """Pool of page-aligned, zeroed header buffers."""

    def __init__(self) -> None:
        self._views: list[memoryview] = []
        self._header_bytes = 0

    def take(self, count: int, header_bytes: int) -> list[memoryview]:
        if header_bytes != self._header_bytes or count > len(self._views):
            memory = memoryview(mmap.mmap(-1, count * header_bytes))
            self._views = [memory[start : start + header_bytes] for start in range(0, len(memory), header_bytes)]
            self._header_bytes = header_bytes
        return self._views[:count]


class _ThreadBuffers(threading.local):
    """Buffers that one I/O thread reuses.

    Headers for puts and for gets do not share memory, because headers for puts must end in zeros.
    """

    def __init__(self) -> None:
        self.put_headers = _HeaderPool()
        self.get_headers = _HeaderPool()
        self.scratch = memoryview(bytearray())
        self.codec: BlockCodec | None = None


class Pipeline:
    """Runs units of jobs on ``store``; several threads call it at once.

    Args:
        store: the medium with its layers.
        primary_view: writable memoryview of the primary rows: uint8, shape (num_rows, row_stride_bytes).
        name: name of the tier.
        breakers: circuit breakers of the tier.
        clock: function that returns monotonic seconds.
        compress: compress stores, where the store takes blocks of any size; loads are always decoded. Default False.
        element_size: bytes of one KV element; default 2.
        sequence: source of sequence numbers; default: that of the process.

    Raises:
        ConfigError: the view is not as described, or the medium or the installation does not support compression.
    """

    def __init__(
        self,
        store: BlockStore,
        primary_view: memoryview,
        *,
        name: str,
        breakers: Breakers,
        clock: Callable[[], float],
        compress: bool = False,
        element_size: int = 2,
        sequence: SequenceSource = SEQUENCE,
    ) -> None:
        rows = np.asarray(primary_view)
        if rows.ndim != 2 or rows.dtype != np.uint8 or not rows.flags.c_contiguous or not rows.flags.writeable:
            raise ConfigError(
                f"tier {name}: the primary view is not a writable, contiguous uint8 buffer of two dimensions"
            )
        if compress:
            if not store.traits.variable_size:
                raise ConfigError(
                    f"tier {name}: compression: this medium has blocks of a fixed size, so compression gains nothing"
                )
            load_zstandard()
        self._store, self._breakers, self._name = store, breakers, name
        self._traits = store.traits
        self._compress = compress
        self._element_size = element_size
        self._clock = clock
        self._sequence = sequence
        self._num_rows, self._stride = rows.shape
        self._address = rows.ctypes.data
        self._memory = rows.reshape(-1).data
        self._buffers = _ThreadBuffers()
        self._refused = RateLimit(LOG_PERIOD, clock)

    def release(self) -> None:
        """Release the primary buffer, so that it can be unmapped.

        No unit is running, and no unit follows.
        """
        self._memory = memoryview(b"")
        self._num_rows = 0

    def run(self, job: TransferJob, positions: Sequence[int]) -> list[Outcome]:
        """Move the blocks at ``positions`` of ``job``, and return outcomes co-indexed with ``positions``.

        Raises:
            PermanentStoreError: the job has rows or sizes outside the primary tier, or the store broke its contract.
        """
        if not self._breakers.allows(load=job.is_promotion):
            return [BreakerOpenError(f"the tier takes no {job.verb}s for the time being")] * len(positions)
        if job.deadline <= self._clock():
            return [OverdueError("the deadline passed while the job was waiting")] * len(positions)
        rows = [job.rows[position] for position in positions]
        sizes = [job.sizes[position] for position in positions]
        if min(rows) < 0 or max(rows) >= self._num_rows or min(sizes) <= 0 or max(sizes) > self._stride:
            raise PermanentStoreError(
                f"tier {self._name}: job {job.job_id} has rows or sizes outside the primary buffer"
            )
        if (self._address | self._stride) % self._traits.alignment:
            raise PermanentStoreError(
                f"tier {self._name}: rows are not aligned to the {self._traits.alignment} bytes that the medium needs"
            )
        unit = self._get if job.is_promotion else self._put
        outcomes = unit(job, positions, rows, sizes)
        if len(outcomes) != len(positions):
            raise PermanentStoreError(
                f"tier {self._name}: the store gave {len(outcomes)} outcomes for {len(positions)} blocks"
            )
        for outcome in outcomes:
            if isinstance(outcome, StoreError):
                release_frames(outcome)
        return outcomes

    def _put(self, job: TransferJob, positions: Sequence[int], rows: list[int], sizes: list[int]) -> list[Outcome]:
        if self._compress and self._traits.alignment == 1:
            return self._store_compressed(job, positions, rows, sizes)
        memory, stride, alignment = self._memory, self._stride, self._traits.alignment
        headers = self._buffers.put_headers.take(len(rows), self._traits.header_bytes)
        sequence = self._sequence.take(len(rows))
        payloads = [memory[row * stride : row * stride + size] for row, size in zip(rows, sizes, strict=True)]
        # Each digest drives the interpreter's memory out of the caches: one after another, they disturb it only once.
        digests = list(map(xxh3_128_digest, payloads))
        blocks: list[BlockIO] = []
        for at, position in enumerate(positions):
            header, payload, row, size, key = headers[at], payloads[at], rows[at], sizes[at], job.moved[position]
            encode_header(
                header,
                key=key,
                fingerprint=job.fingerprint,
                sequence=sequence + at,
                raw_length=size,
                digest=digests[at],
            )
            if padding := -size % alignment:
                end = row * stride + size
                np.frombuffer(memory[end : end + padding], np.uint8).fill(0)
                payload = memory[end - size : end + padding]
            blocks.append(BlockIO(key, job.places[position], header, payload, job.deadline))
        return self._store.put(blocks)

    def _store_compressed(
        self, job: TransferJob, positions: Sequence[int], rows: list[int], sizes: list[int]
    ) -> list[Outcome]:
        slot = max(sizes)
        batch = max(1, _SCRATCH_BYTES // slot)
        buffers = self._buffers
        headers = buffers.put_headers.take(min(batch, len(rows)), self._traits.header_bytes)
        codec = self._codec()
        if len(buffers.scratch) < slot * len(headers):
            buffers.scratch = np.empty(slot * len(headers), np.uint8).data
        outcomes: list[Outcome] = []
        for first in range(0, len(rows), batch):
            blocks: list[BlockIO] = []
            for at in range(first, min(first + batch, len(rows))):
                header, key, size = headers[len(blocks)], job.moved[positions[at]], sizes[at]
                raw = self._memory[rows[at] * self._stride : rows[at] * self._stride + size]
                scratch = buffers.scratch[slot * len(blocks) : slot * len(blocks) + size]
                kind, length = codec.encode(raw, scratch)
                encode_header(
                    header,
                    key=key,
                    fingerprint=job.fingerprint,
                    sequence=self._sequence.take(1),
                    raw_length=size,
                    digest=xxh3_128_digest(raw),
                    codec=kind,
                    stored_length=length,
                )
                payload = raw if kind is Codec.RAW else scratch[:length]
                blocks.append(BlockIO(key, job.places[positions[at]], header, payload, job.deadline))
            outcomes += self._store.put(blocks)
        return outcomes

    def _get(self, job: TransferJob, positions: Sequence[int], rows: list[int], sizes: list[int]) -> list[Outcome]:
        memory, stride, alignment = self._memory, self._stride, self._traits.alignment
        headers = self._buffers.get_headers.take(len(rows), self._traits.header_bytes)
        blocks = [
            BlockIO(
                job.moved[position],
                job.places[position],
                header,
                memory[row * stride : row * stride + size + -size % alignment],
                job.deadline,
            )
            for header, position, row, size in zip(headers, positions, rows, sizes, strict=True)
        ]
        outcomes = self._store.get(blocks)
        if len(outcomes) == len(blocks):
            self._verify(blocks, sizes, outcomes, job)
        return outcomes

    def _verify(
        self, blocks: Sequence[BlockIO], sizes: Sequence[int], outcomes: list[Outcome], job: TransferJob
    ) -> None:
        """Replace the outcome of each block that was read and is not the requested one by an error."""
        read: list[int] = []
        found: list[FrameHeader] = []
        payloads: list[memoryview] = []
        for at, outcome in enumerate(outcomes):
            if outcome is Done.DONE:
                block, size = blocks[at], sizes[at]
                try:
                    header = self._decode(block, size, job.fingerprint)
                except StoreError as error:
                    outcomes[at] = error
                except ConfigError as error:
                    outcomes[at] = PermanentStoreError(str(error))
                else:
                    read.append(at)
                    found.append(header)
                    payloads.append(block.payload if len(block.payload) == size else block.payload[:size])
        # Each digest drives the interpreter's memory out of the caches: one after another, they disturb it only once.
        digests = list(map(xxh3_128_digest, payloads))
        for at, header, digest in zip(read, found, digests, strict=True):
            if digest != header.digest:
                outcomes[at] = FrameError(CorruptReason.PAYLOAD, blocks[at].key)
            elif job.digests is not None:
                job.digests[blocks[at].key] = digest
        refused = [outcome for outcome in outcomes if isinstance(outcome, CorruptBlockError)]
        if refused and (count := self._refused.admit(len(refused))):
            _log.warning(
                "tier %s: %d block(s) on the medium were refused and count as misses; the last: %s",
                self._name,
                count,
                refused[-1],
            )

    def _decode(self, block: BlockIO, size: int, fingerprint: bytes) -> FrameHeader:
        """Check the header of a block that was read, decode its payload, and return the header.

        The digest of the payload is left to compare.

        Raises:
            FrameError: the header is not that of the requested block, or the payload cannot be decoded.
        """
        header = verify(block.header[:HEADER_BYTES], key=block.key, fingerprint=fingerprint, raw_length=size)
        if self._traits.variable_size:
            if block.filled != header.stored_length:
                raise FrameError(CorruptReason.LENGTH, block.key)
        elif header.codec != Codec.RAW:
            raise FrameError(CorruptReason.CODEC, block.key)
        if header.codec != Codec.RAW:
            self._codec().decode(header.codec, block.payload[:size], header.stored_length, block.key)
        return header

    def _codec(self) -> BlockCodec:
        codec = self._buffers.codec
        if codec is None:
            codec = self._buffers.codec = BlockCodec(self._element_size)
        return codec


def release_frames(error: BaseException) -> None:
    """Drop the tracebacks of ``error`` and of its causes.

    Tracebacks would keep views of the primary buffer alive as long as the outcome lives.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            pending += [link.__cause__, link.__context__]
