"""Recovery of a directory's blocks when the directory is opened.

Blocks are recovered from a checkpoint and the segments written since, or else from all headers. Everything here runs on
the I/O side in the background and returns :class:`RecoveredBatch` objects. The scheduler's thread merges them into the
index a few at a time. Each slot is in exactly one batch.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiering.tier import HEADER_BYTES, SEQUENCE, CorruptReason, FrameHeader, RateLimit, Rows, parse_header, store_error
from tiers.local.checkpoint import Checkpoint, WrittenMarks, read_checkpoint
from tiers.local.layout import PAGE
from tiers.local.segments import Segments

logger = logging.getLogger("kv_tiering.local")

BATCH_BLOCKS = 8192
"""Slots in one batch at most.

The scheduler's thread waits for the interpreter lock while a batch is put together.
"""
SCAN_THREADS = 8
"""Threads that read headers at the same time."""

T = TypeVar("T")

_PIECE_SLOTS = 256
_GROUP_SLOTS = 65536
_LOG_PERIOD = 30.0
_NO_SLOTS: Rows = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RecoveredBatch:
    """The recovered content of some slots."""

    keys: list[bytes] = field(default_factory=list)
    """Keys of the blocks, each once, the most recent first."""
    slots: Rows = field(default_factory=lambda: _NO_SLOTS)
    """Slots of the blocks, in the order of ``keys``."""
    sequences: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """Sequence numbers of the blocks, in the order of ``keys``."""
    free: Rows = field(default_factory=lambda: _NO_SLOTS)
    foreign: Rows = field(default_factory=lambda: _NO_SLOTS)
    """Slots with blocks of other namespaces."""
    seen: int = 0
    """Highest sequence number found."""
    scanned: bool = False
    """True if the blocks come from headers, not from the checkpoint."""
    lost: int = 0
    """Number of blocks that the checkpoint names and that are gone."""
    last: bool = False
    """True if no batch follows; default: False. A recovery that is stopped has no last batch."""


Recovery: TypeAlias = Generator[RecoveredBatch | Exception, None, None]
"""Batches, and the reasons why headers cannot be read now: they are read again before the next item."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The state of a directory when it is opened, before the first write."""

    segments: tuple[int, ...] = ()
    checkpoint: Checkpoint | str = "there is none"
    """The last checkpoint, or the reason why there is none."""
    marked: frozenset[int] | None = None
    """Segments written since the checkpoint; None if they are unknown. Marking continues from here."""
    changed: frozenset[int] = frozenset()
    """Segments that are not the files in the checkpoint, although no mark names them."""


def remember(segments: Segments, marks: WrittenMarks) -> Remembered:
    """Read the checkpoint, and continue its marks. Call this before the first write.

    From then on, new frames have higher sequence numbers than the checkpoint, even if the clock was set back.

    Raises:
        OSError: the directory or the marks cannot be read.
    """
    checkpoint = read_checkpoint(segments.directory, segments.geometry, segments.files)
    there = tuple(segments.existing())
    if not isinstance(checkpoint, Checkpoint):
        return Remembered(there, checkpoint)
    SEQUENCE.advance_past(checkpoint.sequence)
    marked = marks.resume(checkpoint.generation)
    if marked is None:
        return Remembered(there, checkpoint)
    modified = segments.modified()
    known = checkpoint.modified
    changed = {
        number
        for number in there
        if number not in known or (number not in marked and modified.get(number) != known[number])
    }
    return Remembered(there, checkpoint, frozenset(marked), frozenset(changed))


def recover(
    segments: Segments,
    remembered: Remembered,
    fingerprint: bytes,
    stop: threading.Event,
) -> Recovery:
    """Return the blocks of one namespace in the segments that existed when the directory was opened.

    A header that the device cannot read counts as no block. Errors that may pass, such as too many open files, are
    yielded instead, and the recovery goes on where it was.

    Args:
        segments: the segment files.
        remembered: the directory's state when it was opened.
        fingerprint: fingerprint of the namespace and epoch.
        stop: ends the recovery early; the remaining slots stay unseen.
    """
    recovery = _Recovery(segments, remembered.segments, fingerprint, stop)
    checkpoint = remembered.checkpoint
    if isinstance(checkpoint, Checkpoint):
        if checkpoint.fingerprint != fingerprint:
            checkpoint = "it is of another namespace or epoch"
        elif remembered.marked is None:
            checkpoint = "what was written since is not known"
        else:
            return recovery.from_checkpoint(checkpoint, remembered.marked, remembered.changed)
    if remembered.segments:
        logger.info("%s: the checkpoint is not used (%s); reading all headers", segments.directory, checkpoint)
    return recovery.scan_all()


class _Recovery:
    def __init__(
        self,
        segments: Segments,
        numbers: Sequence[int],
        fingerprint: bytes,
        stop: threading.Event,
    ) -> None:
        self._segments = segments
        self._geometry = segments.geometry
        self._fingerprint = fingerprint
        self._numbers = numbers
        self._stop = stop
        self._lines = RateLimit(_LOG_PERIOD, time.monotonic)

    def from_checkpoint(self, checkpoint: Checkpoint, marked: frozenset[int], changed: frozenset[int]) -> Recovery:
        there, clean = self._slots_mask(self._numbers), self._slots_mask({*self._numbers} - marked - changed)
        doubtful = checkpoint.written[_within(checkpoint.written, clean)].astype(np.int64)
        clean[doubtful] = False
        unclaimed = clean.copy()
        unclaimed[checkpoint.slots[_within(checkpoint.slots, clean)]] = False
        foreign = checkpoint.foreign[_within(checkpoint.foreign, unclaimed)].astype(np.int64)
        unclaimed[foreign] = False
        lost = len(checkpoint) - int(np.count_nonzero(_within(checkpoint.slots, there)))
        if lost:
            text = "%s: %d block(s) are lost: their segments are gone, or beyond the capacity"
            logger.warning(text, self._segments.directory, lost)
        if changed:
            text = "%s: %d segment(s) are not the files in the checkpoint; reading their headers"
            logger.warning(text, self._segments.directory, len(changed))
        yield RecoveredBatch(seen=checkpoint.sequence, lost=lost)
        yield from _in_pieces(np.flatnonzero(unclaimed), foreign)

        found = _Found(checkpoint)
        doubted = marked | changed
        for unsure in (doubtful, *(self._slots_of(number) for number in self._numbers if number in doubted)):
            headers = yield from _repeated(partial(self._scan, unsure))
            found.add(unsure, headers, self._fingerprint)
        if self._stop.is_set():
            return
        for keys, slots in checkpoint.key_batches(BATCH_BLOCKS):
            kept = [
                is_clean or found.confirm(slot, key)
                for key, slot, is_clean in zip(keys, slots.tolist(), _within(slots, clean).tolist(), strict=True)
            ]
            if not all(kept):
                keys, slots = list(compress(keys, kept)), slots[np.array(kept, np.bool_)]
            yield RecoveredBatch(keys, slots.astype(np.int64), np.full(len(slots), checkpoint.sequence, np.uint64))
        found.settle(self._slots_mask(changed))
        yield from found.batches()
        yield RecoveredBatch(last=True)

    def _slots_mask(self, numbers: Iterable[int]) -> NDArray[np.bool_]:
        mask = np.zeros(self._geometry.num_slots, np.bool_)
        for number in numbers:
            mask[self._slots_of(number)] = True
        return mask

    def _slots_of(self, number: int) -> Rows:
        per_segment = self._geometry.slots_per_segment
        return np.arange(number * per_segment, (number + 1) * per_segment)

    def scan_all(self) -> Recovery:
        """Yield all blocks, read from the headers of every segment.

        Blocks are sorted within groups of segments; the segments written last come last. The first blocks are served
        long before the end of the scan.
        """
        found = _Found()
        modified = yield from _repeated(self._segments.modified)
        for number in sorted(self._numbers, key=lambda number: modified.get(number, (0, 0))[1]):
            slots = self._slots_of(number)
            headers = yield from _repeated(partial(self._scan, slots), found.some)
            found.add(slots, headers, self._fingerprint)
            if self._stop.is_set():
                return
            if found.slots >= _GROUP_SLOTS:
                yield from found.batches()
        yield from found.batches()
        yield RecoveredBatch(last=True)

    def _scan(self, slots: Rows) -> list[FrameHeader | None]:
        """Return the headers in ``slots``, in their order; None where no block of this format is.

        The result is shorter if the scan was stopped. Several threads keep the device busy. They are daemons: a thread
        that hangs in the device must not delay the end of the process.
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
            except RuntimeError:
                break
            threads.append(thread)
        work()  # The process may have no more threads: this one does what the others left, if need be all.
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
                # An error that may pass must not turn blocks into free slots.
                if store_error(error, "").temporary:
                    raise store_error(error, f"cannot read headers in {self._segments.directory}") from error
                unreadable = error
            header = parse_header(start) if complete else CorruptReason.LENGTH
            headers.append(None if isinstance(header, CorruptReason) else header)
        if unreadable is not None and self._lines.admit():
            logger.warning("%s: headers cannot be read; the last error: %s", self._segments.directory, unreadable)
        return headers


def _repeated(
    call: Callable[[], T], found: Callable[[], Iterable[RecoveredBatch]] = list
) -> Generator[RecoveredBatch | Exception, None, T]:
    """Return the result of ``call``; before another call, yield what was ``found`` so far, and the error."""
    while True:
        try:
            return call()
        except Exception as error:
            failure = error
        yield from found()
        yield failure


class _Found:
    """The blocks found in headers.

    Of two blocks with one key, the later written one counts; the other slot is free.

    Args:
        checkpoint: blocks written before this checkpoint wait for :meth:`confirm` and :meth:`settle`; default: none.
    """

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        self.slots = 0
        self._before = -1 if checkpoint is None else checkpoint.sequence
        self._doubtful = frozenset[int]() if checkpoint is None else frozenset(checkpoint.written.tolist())
        self._named: Rows = _NO_SLOTS if checkpoint is None else checkpoint.slots.astype(np.int64)
        self._old: dict[int, tuple[bytes, int]] = {}
        self._mine: dict[bytes, tuple[int, int]] = {}
        self._free: list[int] = []
        self._foreign: list[int] = []
        self._seen = 0

    def add(self, slots: Rows, headers: Sequence[FrameHeader | None], fingerprint: bytes) -> None:
        """Add the ``headers`` of ``slots``.

        Nothing is added if there are fewer headers, because the scan was stopped.
        """
        if len(headers) < len(slots):
            return
        self.slots += len(slots)
        for slot, header in zip(slots.tolist(), headers, strict=True):
            if header is None:
                self._free.append(slot)
                continue
            self._seen = max(self._seen, header.sequence)
            if header.key is None or header.fingerprint != fingerprint:
                self._foreign.append(slot)
            elif header.sequence <= self._before and slot not in self._doubtful:
                self._old[slot] = (header.key, header.sequence)
            else:
                self._add_mine(header.key, header.sequence, slot)

    def _add_mine(self, key: bytes, sequence: int, slot: int) -> None:
        best, other = self._mine.get(key, (-1, -1))
        if sequence > best:
            self._mine[key] = (sequence, slot)
        else:
            other = slot
        if other >= 0:
            self._free.append(other)

    def confirm(self, slot: int, key: bytes) -> bool:
        """Return True if ``slot`` holds the block of ``key``, as the checkpoint has it.

        The checkpoint's entry counts then.
        """
        if self._old.get(slot, (None, 0))[0] != key:
            return False
        del self._old[slot]
        return True

    def settle(self, changed: NDArray[np.bool_]) -> None:
        """Sort out old blocks at whose slots the checkpoint does not name them.

        The tier had dropped these blocks, so their slots are free. Two cases are different, because another process put
        the blocks there: slots that the checkpoint names for other blocks, and slots in ``changed`` segments.
        """
        named = set(self._named[np.isin(self._named, np.fromiter(self._old, np.int64, len(self._old)))].tolist())
        for slot, (key, sequence) in self._old.items():
            if changed[slot] or slot in named:
                self._add_mine(key, sequence, slot)
            else:
                self._free.append(slot)
        self._old.clear()

    def some(self) -> Iterator[RecoveredBatch]:
        """Yield what :meth:`batches` does, or nothing if no header was added since."""
        return self.batches() if self.slots else iter(())

    def batches(self) -> Iterator[RecoveredBatch]:
        """Yield all blocks that were added and not confirmed, each once. The block written last comes last."""
        # Headers have the order of writes, not of uses. A later write stands for a more recent use.
        ordered = sorted(self._mine.items(), key=lambda item: item[1])
        free, foreign = np.array(self._free, np.int64), np.array(self._foreign, np.int64)
        self._mine, self._free, self._foreign, self.slots = {}, [], [], 0
        yield RecoveredBatch(seen=self._seen, scanned=True)
        yield from _in_pieces(free, foreign)
        for start in range(0, len(ordered), BATCH_BLOCKS):
            batch = ordered[start : start + BATCH_BLOCKS][::-1]
            yield RecoveredBatch(
                [key for key, _ in batch],
                np.array([slot for _, (_, slot) in batch], np.int64),
                np.array([sequence for _, (sequence, _) in batch], np.uint64),
                scanned=True,
            )


def _in_pieces(free: Rows, foreign: Rows) -> Iterator[RecoveredBatch]:
    for start in range(0, len(free), BATCH_BLOCKS):
        yield RecoveredBatch(free=free[start : start + BATCH_BLOCKS])
    for start in range(0, len(foreign), BATCH_BLOCKS):
        yield RecoveredBatch(foreign=foreign[start : start + BATCH_BLOCKS])


def _within(slots: NDArray[np.int32], mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the ``slots`` that are set in ``mask``; slots beyond its end are not."""
    inside = slots < len(mask)
    inside[inside] = mask[slots[inside]]
    return inside
