"""Finding out what a directory holds when it is opened: from a checkpoint and what was written since, or from every header.

Everything here runs on the I/O side, in the background, and hands over :class:`RecoveredBatch` by batch; the scheduler's thread
merges them into the index a few at a time.  A slot is in exactly one batch.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from tiering.policies.base import Rows
from tiering.secondary.files import store_error
from tiering.secondary.frame import HEADER_BYTES, SEQUENCE, CorruptReason, FrameHeader, parse_header
from tiering.secondary.index.slots import Sequences
from tiering.secondary.ratelimit import RateLimit
from tiers.local.checkpoint import Checkpoint, read_checkpoint
from tiers.local.layout import PAGE
from tiers.local.marks import WrittenMarks
from tiers.local.segments import Segments

logger = logging.getLogger("kv_tiering.local")

BATCH_BLOCKS = 16384
SCAN_THREADS = 8

_PIECE_SLOTS = 256
_FREE_AT_ONCE = 65536
_GROUP_SLOTS = 65536
_LOG_PERIOD = 30.0
_NO_SLOTS: Rows = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RecoveredBatch:
    """What some slots hold: ``keys`` in ``slots`` (co-indexed with ``sequences``, each key once, the most recent first), ``free`` ones,
    ``foreign`` ones.  ``seen``: the highest sequence number met.  ``scanned``: found in headers, not in the checkpoint.
    """

    keys: list[bytes] = field(default_factory=list)
    slots: Rows = field(default_factory=lambda: _NO_SLOTS)
    sequences: Sequences = field(default_factory=lambda: np.empty(0, np.uint64))
    free: Rows = field(default_factory=lambda: _NO_SLOTS)
    foreign: Rows = field(default_factory=lambda: _NO_SLOTS)
    seen: int = 0
    scanned: bool = False


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a directory says of itself when it is opened, before anything is written there.

    ``segments``: their numbers.  ``checkpoint``: the last one, or why there is none.  ``marked``: the segments written since, in which
    marking goes on; None if that is not known.
    """

    segments: tuple[int, ...] = ()
    checkpoint: Checkpoint | str = "there is none"
    marked: frozenset[int] | None = None


def remember(segments: Segments, marks: WrittenMarks) -> Remembered:
    """Read the checkpoint, and go on marking from there.  To be called before the first write; raises :class:`OSError`.

    New frames have higher sequence numbers than the checkpoint from then on, also if the clock was set back.
    """
    checkpoint = read_checkpoint(segments.directory, segments.geometry)
    marked = None
    if isinstance(checkpoint, Checkpoint):
        SEQUENCE.advance_past(checkpoint.sequence)
        marked = marks.resume(checkpoint.generation)
    return Remembered(tuple(segments.existing()), checkpoint, None if marked is None else frozenset(marked))


def recover(segments: Segments, remembered: Remembered, fingerprint: bytes, stop: threading.Event) -> Iterator[RecoveredBatch]:
    """The blocks of the namespace ``fingerprint`` in the segments that were there when the directory was opened.

    ``stop`` ends it early: what is left stays unseen.  A header that the device cannot read counts as none; it raises
    :class:`tiering.errors.TemporaryStoreError` for what may pass, such as too many open files.
    """
    recovery = _Recovery(segments, remembered.segments, fingerprint, stop)
    checkpoint = remembered.checkpoint
    if isinstance(checkpoint, Checkpoint):
        if checkpoint.fingerprint != fingerprint:
            checkpoint = "it is of another namespace or epoch"
        elif remembered.marked is None:
            checkpoint = "what was written since is not known"
        else:
            return recovery.from_checkpoint(checkpoint, remembered.marked)
    if remembered.segments:
        logger.info("%s: the checkpoint is not used (%s); reading all headers", segments.directory, checkpoint)
    return recovery.scan_all()


class _Recovery:
    def __init__(self, segments: Segments, numbers: Sequence[int], fingerprint: bytes, stop: threading.Event) -> None:
        self._segments = segments
        self._geometry = segments.geometry
        self._fingerprint = fingerprint
        self._numbers = numbers
        self._stop = stop
        self._lines = RateLimit(_LOG_PERIOD, time.monotonic)

    # --------------------------------------------------------------------------------------------------------- checkpoint

    def from_checkpoint(self, checkpoint: Checkpoint, marked: frozenset[int]) -> Iterator[RecoveredBatch]:
        per_segment = self._geometry.slots_per_segment
        clean = np.zeros(self._geometry.num_slots, np.bool_)
        for number in self._numbers:
            if number not in marked:
                clean[number * per_segment : (number + 1) * per_segment] = True
        doubtful = checkpoint.written[_within(checkpoint.written, clean)].astype(np.int64)
        clean[doubtful] = False
        unclaimed = clean.copy()
        unclaimed[checkpoint.slots[_within(checkpoint.slots, clean)]] = False
        foreign = checkpoint.foreign[_within(checkpoint.foreign, unclaimed)].astype(np.int64)
        unclaimed[foreign] = False
        yield RecoveredBatch(foreign=foreign, seen=checkpoint.sequence)
        yield from _in_pieces(np.flatnonzero(unclaimed))

        again = [doubtful, *(self._slots_of(number) for number in self._numbers if number in marked)]
        found = _Found()
        for unsure in again:
            found.add(unsure, self._scan(unsure), self._fingerprint)
        if self._stop.is_set():
            return
        unchanged = found.take_unchanged(checkpoint)
        for keys, slots in checkpoint.key_batches(BATCH_BLOCKS):
            kept = [
                is_clean or unchanged.get(slot) == key
                for key, slot, is_clean in zip(keys, slots.tolist(), _within(slots, clean).tolist(), strict=True)
            ]
            if not all(kept):
                keys, slots = list(compress(keys, kept)), slots[np.array(kept, np.bool_)]
            yield RecoveredBatch(keys, slots.astype(np.int64), np.full(len(slots), checkpoint.sequence, np.uint64))
        yield from found.batches()

    def _slots_of(self, number: int) -> Rows:
        per_segment = self._geometry.slots_per_segment
        return np.arange(number * per_segment, (number + 1) * per_segment)

    # --------------------------------------------------------------------------------------------------------------- scan

    def scan_all(self) -> Iterator[RecoveredBatch]:
        """Everything, sorted within groups of segments, those written last coming last: the first blocks serve long before the end."""
        found = _Found()
        for number in sorted(self._numbers, key=self._segments.written_at):
            slots = self._slots_of(number)
            found.add(slots, self._scan(slots), self._fingerprint)
            if self._stop.is_set():
                return
            if found.slots >= _GROUP_SLOTS:
                yield from found.batches()
                found = _Found()
        yield from found.batches()

    def _scan(self, slots: Rows) -> list[FrameHeader | None]:
        """The headers in ``slots``, in their order, None where there is no block of this format; short if it was told to stop.

        Several at a time, to keep the device busy.  The threads are daemons: one that hangs in the device must not hold up the end of
        the process.
        """
        pieces = [slots[start : start + _PIECE_SLOTS] for start in range(0, len(slots), _PIECE_SLOTS)]
        found: list[list[FrameHeader | None]] = [[] for _ in pieces]
        waiting = deque(enumerate(pieces))
        errors: list[BaseException] = []

        def work() -> None:
            while not self._stop.is_set():
                try:
                    position, piece = waiting.popleft()
                except IndexError:
                    return
                try:
                    found[position] = self._scan_piece(piece)
                except BaseException as error:
                    errors.append(error)

        threads: list[threading.Thread] = []
        for _ in pieces[:SCAN_THREADS]:
            thread = threading.Thread(target=work, name="kv-scan", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                # The process may have no more threads: those that run, or else this one, do all of it.
                break
            threads.append(thread)
        if not threads:
            work()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [header for part in found for header in part]

    def _scan_piece(self, slots: Rows) -> list[FrameHeader | None]:
        locate = self._geometry.locate
        headers: list[FrameHeader | None] = []
        page = memoryview(mmap.mmap(-1, PAGE))
        start = page[:HEADER_BYTES]
        unreadable: OSError | None = None
        for slot in slots.tolist():
            segment, offset = locate(slot)
            complete = False
            try:
                complete = self._segments.read(segment, offset, [page]) == PAGE
            except OSError as error:
                # What passes must not turn blocks into free slots: recovery ends here, and what was not read stays unseen.
                if store_error(error, "").temporary:
                    raise store_error(error, f"cannot read headers in {self._segments.directory}") from error
                unreadable = error
            header = parse_header(start) if complete else CorruptReason.LENGTH
            headers.append(None if isinstance(header, CorruptReason) else header)
        if unreadable is not None and self._lines.admit():
            logger.warning("%s: headers cannot be read, the last because: %s", self._segments.directory, unreadable)
        return headers


class _Found:
    """What headers say, sorted out: of two blocks with one key the later written one counts, the other slot is free."""

    def __init__(self) -> None:
        self.slots = 0
        self._mine: dict[bytes, tuple[int, int]] = {}
        self._free: list[int] = []
        self._foreign: list[int] = []
        self._seen = 0

    def add(self, slots: Rows, headers: Sequence[FrameHeader | None], fingerprint: bytes) -> None:
        """The ``headers`` in ``slots`` (fewer if the scan was told to stop, and then nothing counts)."""
        if len(headers) < len(slots):
            return
        self.slots += len(slots)
        mine, free, foreign = self._mine, self._free, self._foreign
        for slot, header in zip(slots.tolist(), headers, strict=True):
            if header is None:
                free.append(slot)
                continue
            self._seen = max(self._seen, header.sequence)
            if header.key is None or header.fingerprint != fingerprint:
                foreign.append(slot)
                continue
            sequence, other = mine.get(header.key, (-1, -1))
            if header.sequence > sequence:
                mine[header.key] = (header.sequence, slot)
            else:
                other = slot
            if other >= 0:
                free.append(other)

    def take_unchanged(self, checkpoint: Checkpoint) -> dict[int, bytes]:
        """Take out what was written before ``checkpoint``; slot → key.

        The checkpoint knows of those blocks, and how recent they are, or had given them up: those slots are free.
        """
        doubtful = set(checkpoint.written.tolist())
        old = {
            slot: key for key, (sequence, slot) in self._mine.items() if sequence <= checkpoint.sequence and slot not in doubtful
        }
        for key in old.values():
            del self._mine[key]
        held = set(checkpoint.slots[np.isin(checkpoint.slots, np.fromiter(old, np.int64, len(old)))].tolist())
        self._free += [slot for slot in old if slot not in held]
        return old

    def batches(self) -> Iterator[RecoveredBatch]:
        """All that was added and not taken out, the block written last coming last."""
        # Headers say when a block was written, not when it was used: the later, the more recent.
        ordered = sorted(self._mine.items(), key=lambda item: item[1])
        yield RecoveredBatch(
            free=np.array(self._free, np.int64), foreign=np.array(self._foreign, np.int64), seen=self._seen, scanned=True
        )
        for start in range(0, len(ordered), BATCH_BLOCKS):
            batch = ordered[start : start + BATCH_BLOCKS][::-1]
            yield RecoveredBatch(
                [key for key, _ in batch],
                np.array([slot for _, (_, slot) in batch], np.int64),
                np.array([sequence for _, (sequence, _) in batch], np.uint64),
                scanned=True,
            )


def _in_pieces(free: Rows) -> Iterator[RecoveredBatch]:
    for start in range(0, len(free), _FREE_AT_ONCE):
        yield RecoveredBatch(free=free[start : start + _FREE_AT_ONCE])


def _within(slots: NDArray[np.int32], mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of ``slots`` are inside ``mask`` and set there."""
    inside = slots < len(mask)
    inside[inside] = mask[slots[inside]]
    return inside
