"""The block store of the local tier: slots in segment files.

A block's place is its slot number. Header and row move in one vectored call between the primary row and the file,
without a copy. Neighbouring slots move together; small ones are read in calls of about half a megabyte. A put is
atomic, because a torn write does not pass the frame's checksum.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering import DeviceError, PermanentStoreError, PlaceLostError, StoreError, TemporaryStoreError
from tiering.tier import (
    BatchStore,
    BlockIO,
    Done,
    Files,
    IoSide,
    Outcome,
    SlotIndex,
    StoreTraits,
    store_error,
    store_errors,
)
from tiers.local.checkpoint import WrittenMarks
from tiers.local.device import probe_direct
from tiers.local.documents import Documents
from tiers.local.layout import PAGE, SegmentGeometry, mount_point
from tiers.local.lock import DirectoryLock
from tiers.local.new_segments import NewSegments, SegmentPace
from tiers.local.recovery import Remembered, remember
from tiers.local.segments import BUFFERS_PER_CALL, READ_CALL, Damage, Read, Segments, UnsyncedError

logger = logging.getLogger("kv_tiering.local")


@dataclass(frozen=True, slots=True)
class Inspection:
    """The differences between the directory and the open store."""

    damaged: tuple[Damage, ...] = ()
    """Segments whose files have changed."""
    moved: str | None = None
    """Reason why the directory as a whole is not this store's any more; None if it is."""
    kept: bool = False
    """True if no block is lost although ``moved`` has a reason."""


class LocalStore(BatchStore):
    """Slots in segment files of a directory, which this process owns from :meth:`open` to :meth:`close`.

    Args:
        directory: the directory.
        geometry: the shape of the segments.
        capacity: bytes of everything in the directory.
        durable: a put ends when the block would survive a loss of power, not only the death of the process; default:
            False.
        files: other file operations, for tests; default: the operating system's.
    """

    traits = StoreTraits(medium="DISK", header_bytes=PAGE, alignment=PAGE, batches=True)

    def __init__(
        self,
        directory: Path,
        geometry: SegmentGeometry,
        capacity: int,
        *,
        durable: bool = False,
        files: Files | None = None,
    ) -> None:
        self.directory = directory
        self.geometry = geometry
        self.capacity = capacity
        self.durable = durable
        self.files = files or Files()
        self.remembered = Remembered()
        """State of the directory at :meth:`open`."""
        self.fresh: list[int] = []
        """Segments that :meth:`open` created."""
        self.bad_slots: bytes | None = None
        """The document of bad slots as it was at :meth:`open`; None if there was none."""
        self._blocks_per_write = BUFFERS_PER_CALL // 2
        self._blocks_per_read = min(READ_CALL // geometry.slot_bytes or self._blocks_per_write, self._blocks_per_write)
        self._mount: Path | None = None
        """Mount point of the disk. While it is not mounted, the directory is not created on the disk below."""
        self._lock = DirectoryLock(directory)
        self._documents = Documents(directory, self.files, self._lock)
        self._warned: set[str] = set()
        """Conditions of the directory that were logged and still last."""
        self._stopping = False
        self._first_pace = SegmentPace.of_first()
        self._parts: NewSegments | None = None
        """Parts of the open directory."""

    @property
    def new_segments(self) -> NewSegments:
        """The creation of segments. Raises :class:`PermanentStoreError` unless the store is open."""
        if self._parts is None:
            raise PermanentStoreError(f"{self.directory} is not open")
        return self._parts

    @property
    def segments(self) -> Segments:
        """The segment files of the open store, as for :attr:`new_segments`."""
        return self.new_segments.segments

    @property
    def marks(self) -> WrittenMarks:
        """The marks of written segments of the open store, as for :attr:`new_segments`."""
        return self.new_segments.marks

    def open(self) -> None:
        if self._parts is not None:
            return
        if self._mount is not None and not os.path.ismount(self._mount):
            raise TemporaryStoreError(
                f"nothing is mounted at {self._mount} any more, where {self.directory} was; mount its disk again"
            )
        with store_errors(f"cannot create {self.directory}"):
            self._documents.make()
        self._lock.acquire()
        try:
            self._warn(read_only=self._lock.read_only)
            self._open_segments()
            self._mount = mount_point(self.directory)
            self._documents.opened()
            self.bad_slots = self.read_document(self.geometry.bad_slots_document)
        except OSError as error:
            self.close()
            raise store_error(error, f"cannot open {self.directory}") from error
        except BaseException:
            self.close()
            raise

    def _warn(self, *, read_only: bool) -> None:
        """Log the conditions of the directory that its operator can correct, each when it begins.

        Raises:
            OSError: the directory cannot be looked at.
        """
        size, mode = self.files.size_of_disk(self.directory), stat.S_IMODE(self.directory.stat().st_mode)
        conditions: dict[str, tuple[bool, tuple[int, ...]]] = {
            "%s: the capacity of %d bytes is above the %d bytes of its file system: "
            "the disk will be full before eviction begins; lower the capacity, or use a larger disk": (
                size < self.capacity,
                (self.capacity, size),
            ),
            "%s: the file system is read-only; its blocks are served, and none are stored": (read_only, ()),
            "%s may be written by other users (mode %03o); they could remove or replace blocks: chmod go-w": (
                mode & (stat.S_IWGRP | stat.S_IWOTH) != 0,
                (mode,),
            ),
        }
        for text, (holds, details) in conditions.items():
            if holds and text not in self._warned:
                logger.warning(text, self.directory, *details)
        self._warned = {text for text, (holds, _) in conditions.items() if holds}

    def _open_segments(self) -> None:
        read_only = self._lock.read_only
        segments = Segments(self.directory, self.geometry, self.files, read_only=read_only)
        adopted = segments.adopt()
        example = self.directory / self.geometry.segment_name(adopted[0]) if adopted else None
        segments.direct = probe_direct(self.files, self.directory, example, read_only=read_only)
        if not segments.direct:
            logger.warning(
                "%s does not take O_DIRECT; reads and writes go through the page cache and cost more CPU",
                self.directory,
            )
        parts = self._parts = NewSegments(segments, self.capacity, WrittenMarks(segments, durable=self.durable))
        if not read_only:
            parts.remove_leftovers()
            if strangers := parts.strangers():
                logger.info(
                    "%s has %d segment(s) of another shape (block size, segment_size); they stay until their room is "
                    "needed, and the oldest goes first",
                    self.directory,
                    len(strangers),
                )
        self.remembered, self.fresh = remember(segments, parts.marks), []
        if not self.remembered.segments:
            pace = self._first_pace = SegmentPace.of_first()
            if self._stopping:
                pace.drop()
            self.fresh = parts.add_first(pace)

    def stop(self) -> None:
        """End a running :meth:`open` early: it creates no further first segments. Any thread may call."""
        self._stopping = True
        self._first_pace.drop()

    def inspect(self) -> Inspection:
        """Compare the directory with the open store.

        Raises:
            StoreError: the directory cannot be inspected.
        """
        segments = self.segments
        with store_errors(f"cannot look into {self.directory}"):
            moved = self._lock.broken() or self._documents.moved()
            if moved is not None:
                return Inspection(moved=moved)
            if segments.read_only and self._lock.takes_writes():
                return Inspection(moved="can be written again", kept=True)
            return Inspection(segments.inspect())

    def tidy(self) -> None:
        """Delete segments that this engine cannot use until the directory is within the capacity.

        Raises:
            StoreError: the files in the directory cannot be counted or deleted.
        """
        with store_errors(f"cannot count what is in {self.directory}"):
            if not self.segments.read_only:
                self.new_segments.make(0)

    def regain(self) -> bool:
        """Return True if the disk takes writes again; if not, drop some segments.

        Raises:
            StoreError: no segment can be dropped.
        """
        with store_errors(f"cannot drop a segment in {self.directory}"):
            owned = not self.segments.read_only and self.inspect().moved is None
            return owned and self.new_segments.regain()

    def close(self) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.segments.close()
            parts.marks.close()
        self._lock.release()

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        outcomes: list[Outcome] = [Done.DONE] * len(blocks)
        runs = self._runs(blocks, outcomes, self._blocks_per_write)
        touched: dict[int, list[int]] = {}
        for run in runs:
            touched.setdefault(self.geometry.locate(_slot(blocks[run[0]]))[0], []).extend(run)
        tickets: dict[int, int] = {}
        if self.durable and self._parts is not None:
            tickets = {segment: self._parts.segments.ledger(segment).begin_write() for segment in touched}
        for run in runs:
            self._put_run(blocks, run, outcomes)
        for segment, ticket in tickets.items():
            self._sync(segment, ticket, touched[segment], outcomes)
        return outcomes

    def _put_run(self, blocks: Sequence[BlockIO], run: list[int], outcomes: list[Outcome]) -> None:
        segment, offset = self.geometry.locate(_slot(blocks[run[0]]))
        try:
            if segment not in self.marks.marked:
                self.marks.mark(segment)
            self.segments.write(segment, offset, _buffers(blocks, run))
        except OSError as error:
            if error.errno == errno.ENOENT:
                for position in run:
                    outcomes[position] = PlaceLostError(f"cannot write slot {blocks[position].place}: {error.strerror}")
            elif len(run) > 1:
                for position in run:
                    self._put_run(blocks, [position], outcomes)
            else:
                outcomes[run[0]] = store_error(error, f"cannot write slot {blocks[run[0]].place}")
        except StoreError as error:
            for position in run:
                outcomes[position] = error

    def _sync(self, segment: int, ticket: int, positions: list[int], outcomes: list[Outcome]) -> None:
        written = [position for position in positions if outcomes[position] is Done.DONE]
        if not written:
            return
        segments = self.segments
        try:
            segments.ledger(segment).end_write(ticket, lambda: segments.sync(segment))
        except OSError as error:
            failure = store_error(error, f"cannot sync segment {segment}")
            if isinstance(failure, DeviceError):
                failure = UnsyncedError(str(failure))
            for position in written:
                outcomes[position] = failure

    def take_suspects(self) -> list[int]:
        """Return the slots that were reported as stored and whose write-back failed since.

        Some of their blocks are not on the device, and the kernel does not report which.
        """
        return [] if self._parts is None else self._parts.segments.take_suspects()

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        outcomes: list[Outcome] = [Done.ABSENT] * len(blocks)
        self._get_runs(blocks, self._runs(blocks, outcomes, self._blocks_per_read), outcomes)
        return outcomes

    def _get_runs(self, blocks: Sequence[BlockIO], runs: Sequence[list[int]], outcomes: list[Outcome]) -> None:
        reads: list[Read] = []
        for run in runs:
            buffers = _buffers(blocks, run)
            reads.append((*self.geometry.locate(_slot(blocks[run[0]])), buffers, sum(map(len, buffers))))
        try:
            results = self.segments.read_each(reads)
        except StoreError as error:
            for run in runs:
                for position in run:
                    outcomes[position] = error
            return
        for run, filled in zip(runs, results, strict=True):
            if not isinstance(filled, OSError):
                for position in run:
                    block = blocks[position]
                    filled -= PAGE + len(block.payload)
                    if filled >= 0 and any(block.header[:8]):
                        block.filled = len(block.payload)
                        outcomes[position] = Done.DONE
            elif filled.errno == errno.ENOENT:
                continue
            elif len(run) > 1:
                self._get_runs(blocks, [[position] for position in run], outcomes)
            else:
                outcomes[run[0]] = store_error(filled, f"cannot read slot {blocks[run[0]].place}")

    def _runs(self, blocks: Sequence[BlockIO], outcomes: list[Outcome], most: int) -> list[list[int]]:
        """Return positions in ``blocks`` in groups of at most ``most`` neighbouring slots.

        Blocks without a valid place get their outcome here and are in no group.
        """
        row_bytes = self.geometry.slot_bytes - PAGE
        num_slots, per_segment = self.geometry.num_slots, self.geometry.slots_per_segment
        valid: list[tuple[int, int, int]] = []
        for position, block in enumerate(blocks):
            place, length = block.place, len(block.payload)
            if isinstance(place, int) and 0 <= place < num_slots and length <= row_bytes:
                valid.append((place, position, length))
            else:
                outcomes[position] = PermanentStoreError(f"slot {place!r} does not hold {length} bytes")
        valid.sort()
        runs: list[list[int]] = []
        previous = -2
        for place, position, length in valid:
            if place == previous + 1 and place % per_segment and len(runs[-1]) < most:
                runs[-1].append(position)
            else:
                runs.append([position])
            # A shorter block leaves a gap behind it.
            previous = place if length == row_bytes else -2
        return runs

    def read_document(self, name: str) -> bytes | None:
        return self._documents.read(name)

    def write_document(self, name: str, data: bytes) -> None:
        self._documents.write(name, data, self._drop_one)

    def list_documents(self, prefix: str) -> Iterable[str]:
        return self._documents.names(prefix)

    def documents_beside(self, prefix: str) -> Mapping[str, Callable[[], bytes | None]]:
        return self._documents.beside(prefix)

    def remove_document(self, name: str) -> None:
        self._documents.remove(name)

    def _drop_one(self) -> bool:
        return not self.segments.read_only and self.new_segments.drop_one()


@dataclass(frozen=True, slots=True)
class LocalParts:
    """Parts of one tier. The scheduler's thread owns the index and the work; tasks run on the I/O side."""

    name: str
    """Name of the tier, for log lines."""
    store: LocalStore
    index: SlotIndex
    io: IoSide
    """I/O side that runs the tasks."""
    clock: Callable[[], float]
    """Function that returns monotonic seconds."""
    stop: threading.Event
    """Event that is set when the tier shuts down."""


def _slot(block: BlockIO) -> int:
    if not isinstance(block.place, int):
        raise PermanentStoreError(f"{block.place!r} is not a slot")
    return block.place


def _buffers(blocks: Sequence[BlockIO], run: Sequence[int]) -> list[memoryview]:
    return [part for position in run for part in (blocks[position].header, blocks[position].payload)]
