"""The block store of the local tier: slots in segment files.

A block's place is its slot number. Header and row move in one vectored call between the primary row and the file,
without a copy; neighbouring slots move together. A put is atomic, because a torn write does not pass the frame's
checksum.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import stat
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiering.block_store import BlockIO, BlockStore, Done, Outcome, Place, StoreTraits
from tiering.errors import (
    DeviceError,
    OutOfSpaceError,
    PermanentStoreError,
    PlaceLostError,
    StoreError,
    TemporaryStoreError,
)
from tiering.secondary.files import DIRECTORY_MODE, Files, store_error
from tiers.local.direct import probe_direct
from tiers.local.documents import remove_durably
from tiers.local.layout import PAGE, Geometry, mount_point, used_bytes_of_few
from tiers.local.lock import DirectoryLock
from tiers.local.marks import WrittenMarks
from tiers.local.recovery import Remembered, remember
from tiers.local.segments import BUFFERS_PER_CALL, FILL_BYTES, Damage, Pace, Segments
from tiers.local.syncs import UnsyncedError

logger = logging.getLogger("kv_tiering.local")

_DOCUMENT = re.compile(r"[a-z0-9][a-z0-9.-]{0,127}")
_DOCUMENT_BYTES = 1 << 20
_PATTERN = 0x5A
_COUNTED_AT_ONCE = 10_000
_FIRST_BYTES = 256 << 20
"""Bytes of a new directory that are written before the tier serves."""

_FIRST_SEGMENTS = 256
"""Most segments of a new directory that are created before the tier serves."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """The differences between the directory and the open store."""

    damaged: tuple[Damage, ...] = ()
    """Segments whose files have changed."""
    moved: str | None = None
    """Reason why the directory as a whole is not this store's any more; None if it is."""
    kept: bool = False
    """True if no block is lost although ``moved`` has a reason."""


class LocalStore(BlockStore):
    """Slots in segment files of a directory, which this process owns from :meth:`open` to :meth:`close`.

    Args:
        directory: The directory.
        geometry: The shape of the segments.
        capacity: Bytes of everything in the directory.
        durable: A put ends when the block would survive a loss of power; without it, the death of the process (default:
            False).
        direct: Use O_DIRECT if the file system takes it (default: True).
        files: Other file operations, for tests (default: the operating system's).
    """

    traits = StoreTraits(medium="DISK", header_bytes=PAGE, alignment=PAGE, batches=True)

    def __init__(
        self,
        directory: Path,
        geometry: Geometry,
        capacity: int,
        *,
        durable: bool = False,
        direct: bool = True,
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
        self._try_direct = direct
        self._warned_of_mode = False
        self._mount: Path | None = None
        """Mount point of the disk. While it is not mounted, the directory is not created on the disk below."""
        self._lock = DirectoryLock(directory)
        self._documents_opened: tuple[int, int] | None = None
        """Device and inode of the directory of documents that :meth:`open` found or this store made."""
        self._documents_guard = threading.Lock()
        """Held while the directory of documents is made, so that no inspection takes it for a stranger's."""
        self._stopping = False
        self._first_pace: Pace | None = None
        self._gave_up = False
        """True if a segment was given up for a document and no document has been written since."""
        self._segments: Segments | None = None
        self._marks: WrittenMarks | None = None

    # ------------------------------------------------------------------------------------------------------- life cycle

    @property
    def segments(self) -> Segments:
        """The segment files. Raises :class:`PermanentStoreError` unless the store is open."""
        if self._segments is None:
            raise PermanentStoreError(f"{self.directory} is not open")
        return self._segments

    @property
    def marks(self) -> WrittenMarks:
        """The marks of written segments. Raises :class:`PermanentStoreError` unless the store is open."""
        if self._marks is None:
            raise PermanentStoreError(f"{self.directory} is not open")
        return self._marks

    def open(self) -> None:
        if self._segments is not None:
            return
        if self._mount is not None and not os.path.ismount(self._mount):
            raise TemporaryStoreError(
                f"nothing is mounted at {self._mount} any more, where {self.directory} was; mount its disk again"
            )
        try:
            lost = not self._documents.is_dir() and any(self.directory.glob("slots-*"))
            self._make_directory(self._documents)
        except OSError as error:
            raise store_error(error, f"cannot create {self.directory}") from error
        if lost:
            logger.warning(
                "%s is missing: every block that was stored in %s before is foreign", self._documents, self.directory
            )
        self._lock.acquire()
        try:
            self._compare_with_disk()
            self._warn_of_others()
            self._open_segments()
            self._mount = mount_point(self.directory)
            self._documents_opened = self._documents_found()
            self.bad_slots = self.read_document(self.geometry.bad_slots_document)
        except OSError as error:
            self.close()
            raise store_error(error, f"cannot open {self.directory}") from error
        except StoreError:
            self.close()
            raise

    def _compare_with_disk(self) -> None:
        """Warn of a capacity that the file system can never hold. The tier grows until the disk is full then."""
        size = self.files.size_of_disk(self.directory)
        if size < self.capacity:
            logger.warning(
                "%s: the capacity of %d bytes is above the %d bytes of its file system: "
                "the disk will be full before eviction begins; lower the capacity, or use a larger disk",
                self.directory,
                self.capacity,
                size,
            )

    def _make_directory(self, path: Path) -> None:
        """Create ``path`` and the missing directories above it, durably and for the owner only."""
        if path.is_dir():
            return
        self._make_directory(path.parent)
        path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        self.files.sync_directory(path.parent)

    def _warn_of_others(self) -> None:
        if self._lock.read_only:
            logger.warning(
                "%s: the file system is read-only; its blocks are served, and none are stored", self.directory
            )
        mode = stat.S_IMODE(self.directory.stat().st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not self._warned_of_mode:
            self._warned_of_mode = True
            logger.warning(
                "%s may be written by other users (mode %03o); they could remove or replace blocks: chmod go-w",
                self.directory,
                mode,
            )

    def _open_segments(self) -> None:
        read_only = self._lock.read_only
        segments = Segments(self.directory, self.geometry, self.files, read_only=read_only)
        adopted = segments.adopt()
        example = self.directory / self.geometry.segment_name(adopted[0]) if adopted else None
        segments.direct = self._try_direct and probe_direct(self.files, self.directory, example, read_only=read_only)
        if self._try_direct and not segments.direct:
            logger.warning(
                "%s does not take O_DIRECT; reads and writes go through the page cache and cost more CPU",
                self.directory,
            )
        if not read_only:
            segments.remove_leftovers()
            segments.trim(self.capacity)
        self._marks = WrittenMarks(self.directory, self.geometry, self.files, durable=self.durable)
        self.remembered, self.fresh = remember(segments, self._marks), []
        if not self.remembered.segments:
            # Very many other files are counted in the background later, before further segments are added.
            used = used_bytes_of_few(self.directory, _COUNTED_AT_ONCE) or 0
            if not segments.delete_strangers(used + self.geometry.segment_bytes - self.capacity):
                raise OutOfSpaceError(
                    f"{self.directory} holds other files, and a first segment of {self.geometry.segment_bytes} bytes "
                    f"does not fit into the capacity of {self.capacity} beside them; remove them, or raise the capacity"
                )
            self.fresh = self._create_first(segments)
        self._segments = segments

    def stop(self) -> None:
        """End a running :meth:`open` early: it creates no further first segments. Any thread may call."""
        self._stopping = True
        pace = self._first_pace
        if pace is not None:
            pace.abandon()

    def _create_first(self, segments: Segments) -> list[int]:
        """Create the first segments, at least one, and return their numbers.

        A small directory gets all of its segments now; the others are added later.
        """
        segment_bytes = self.geometry.segment_bytes
        pace = self._first_pace = Pace(share=1.0, pieces=_FIRST_BYTES // FILL_BYTES)
        created: list[int] = []
        used: int | None = None
        for _ in range(min(self.geometry.max_segments, max(1, _FIRST_BYTES // segment_bytes), _FIRST_SEGMENTS)):
            if created:
                if self._stopping:
                    break
                if used is None:
                    used = used_bytes_of_few(self.directory, _COUNTED_AT_ONCE)
                else:
                    used += segment_bytes
                if used is None:
                    break
                excess = used + segment_bytes - self.capacity
                if not segments.delete_strangers(excess):
                    break
                if excess > 0:
                    used = None  # files were deleted, so the directory is counted again
            number = segments.next_number(())
            if number is None:
                break
            try:
                segments.create(number, pace)
            except OSError as error:
                if not created:
                    raise store_error(error, self._no_first_segment()) from error
                logger.warning(
                    "%s: %s; beginning with %d segment(s)", self.directory, error.strerror or error, len(created)
                )
                break
            created.append(number)
        return created

    def _no_first_segment(self) -> str:
        room = os.statvfs(self.directory)
        return (
            f"cannot create a first segment of {self.geometry.segment_bytes} bytes in {self.directory}, where "
            f"{room.f_bavail * room.f_frsize} bytes are free; free some, or lower segment_size or the capacity"
        )

    def inspect(self) -> Inspection:
        """Compare the directory with the open store.

        Raises:
            StoreError: The directory cannot be inspected.
        """
        segments = self.segments
        try:
            moved = self._lock.lost() or self._documents_moved()
            if moved is not None:
                return Inspection(moved=moved)
            if segments.read_only and os.access(self.directory, os.W_OK):
                return Inspection(moved="can be written again", kept=True)
            return Inspection(segments.inspect())
        except OSError as error:
            raise store_error(error, f"cannot look into {self.directory}") from error

    def prepare(self, pace: Pace, taken: Collection[int] = ()) -> int | None:
        """Create one more segment and return its number; None if the capacity is used up.

        Args:
            pace: Speed and amount of the writes ahead.
            taken: Numbers not to use (default: none).

        Raises:
            StoreError: The segment cannot be created.
        """
        segments = self.segments
        try:
            number = segments.next_number(taken)
            if number is None or not segments.make_room(self.capacity, self.geometry.segment_bytes):
                return None
            # The checkpoint may name blocks of an earlier segment with this number.
            self.marks.mark(number)
            segments.create(number, pace)
        except OSError as error:
            raise store_error(error, f"cannot add a segment in {self.directory}") from error
        return number

    def tidy(self) -> None:
        """Delete segments that this engine cannot use until the directory is within the capacity.

        Raises:
            StoreError: The files in the directory cannot be counted or deleted.
        """
        try:
            if not self.segments.read_only:
                self.segments.make_room(self.capacity, 0)
        except OSError as error:
            raise store_error(error, f"cannot count what is in {self.directory}") from error

    def close(self) -> None:
        segments, self._segments = self._segments, None
        if segments is not None:
            segments.close()
        marks, self._marks = self._marks, None
        if marks is not None:
            marks.close()
        self._lock.release()

    # ------------------------------------------------------------------------------------------------------------- data

    def put_one(self, block: BlockIO) -> None:
        (outcome,) = self.put((block,))
        if isinstance(outcome, StoreError):
            raise outcome

    def get_one(self, block: BlockIO) -> Done:
        (outcome,) = self.get((block,))
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        outcomes: list[Outcome] = [Done.DONE] * len(blocks)
        runs = self._runs(blocks, outcomes)
        touched: dict[int, list[int]] = {}
        for run in runs:
            touched.setdefault(self.geometry.locate(_slot(blocks[run[0]]))[0], []).extend(run)
        tickets: dict[int, int] = {}
        if self.durable and self._segments is not None:
            tickets = {segment: self._segments.ledger(segment).begin_write() for segment in touched}
        for run in runs:
            self._put_run(blocks, run, outcomes)
        for segment, ticket in tickets.items():
            self._sync(segment, ticket, touched[segment], outcomes)
        return outcomes

    def _put_run(self, blocks: Sequence[BlockIO], run: list[int], outcomes: list[Outcome]) -> None:
        segment, offset = self.geometry.locate(_slot(blocks[run[0]]))
        try:
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
        return [] if self._segments is None else self._segments.take_suspects()

    def exercise(self, slot: int) -> None:
        """Write a pattern over the whole unused ``slot``, sync it and read it back.

        Raises:
            StoreError: The slot failed its trial.
        """
        segment, offset = self.geometry.locate(slot)
        memory = memoryview(mmap.mmap(-1, 2 * self.geometry.slot_bytes))
        written, back = memory[: self.geometry.slot_bytes], memory[self.geometry.slot_bytes :]
        # The header's page stays zero, so that the slot holds no valid block afterwards.
        np.frombuffer(written[PAGE:], np.uint8).fill(_PATTERN)
        segments = self.segments
        ledger = segments.ledger(segment)
        try:
            self.marks.mark(segment)
            ticket = ledger.begin_write()
            segments.write(segment, offset, [written])
            ledger.end_write(ticket, lambda: segments.sync(segment))
            segments.forget_cached(segment, offset, len(written))
            complete = segments.read(segment, offset, [back]) == len(back)
        except OSError as error:
            raise store_error(error, f"slot {slot} failed its trial") from error
        if not complete or not np.array_equal(np.frombuffer(written, np.uint8), np.frombuffer(back, np.uint8)):
            raise DeviceError(f"slot {slot} failed its trial: the bytes read differ from the bytes written")

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        outcomes: list[Outcome] = [Done.ABSENT] * len(blocks)
        for run in self._runs(blocks, outcomes):
            self._get_run(blocks, run, outcomes)
        return outcomes

    def _get_run(self, blocks: Sequence[BlockIO], run: list[int], outcomes: list[Outcome]) -> None:
        segment, offset = self.geometry.locate(_slot(blocks[run[0]]))
        try:
            filled = self.segments.read(segment, offset, _buffers(blocks, run))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            if len(run) > 1:
                for position in run:
                    self._get_run(blocks, [position], outcomes)
            else:
                outcomes[run[0]] = store_error(error, f"cannot read slot {blocks[run[0]].place}")
            return
        except StoreError as error:
            for position in run:
                outcomes[position] = error
            return
        for position in run:
            block = blocks[position]
            filled -= PAGE + len(block.payload)
            if filled >= 0 and any(block.header[:8]):
                block.filled = len(block.payload)
                outcomes[position] = Done.DONE

    def _runs(self, blocks: Sequence[BlockIO], outcomes: list[Outcome]) -> list[list[int]]:
        """Return positions in ``blocks`` in groups of neighbouring slots.

        Blocks without a valid place get their outcome here and are in no group.
        """
        row_bytes = self.geometry.slot_bytes - PAGE
        per_segment = self.geometry.slots_per_segment
        valid: list[int] = []
        for position, block in enumerate(blocks):
            place = block.place
            if not isinstance(place, int) or not 0 <= place < self.geometry.num_slots or len(block.payload) > row_bytes:
                outcomes[position] = PermanentStoreError(f"slot {place!r} does not hold {len(block.payload)} bytes")
            else:
                valid.append(position)
        valid.sort(key=lambda position: _slot(blocks[position]))
        runs: list[list[int]] = []
        previous = -2
        for position in valid:
            place = _slot(blocks[position])
            if place == previous + 1 and place % per_segment and 2 * len(runs[-1]) + 2 <= BUFFERS_PER_CALL:
                runs[-1].append(position)
            else:
                runs.append([position])
            # A shorter block leaves a gap behind it.
            previous = place if len(blocks[position].payload) == row_bytes else -2
        return runs

    # -------------------------------------------------------------------------------------------------------- documents

    @property
    def _documents(self) -> Path:
        return self.directory / "documents"

    def _document(self, name: str) -> Path:
        if not _DOCUMENT.fullmatch(name):
            raise PermanentStoreError(f"{name!r} cannot name a document; allowed are a-z, 0-9, '.' and '-'")
        return self._documents / name

    def read_document(self, name: str) -> bytes | None:
        path = self._document(name)
        try:
            return bytes(self.files.read_all(path, _DOCUMENT_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(error, f"cannot read {path}") from error

    def write_document(self, name: str, data: bytes) -> None:
        path = self._document(name)
        try:
            self._require_opened()
            if not self._documents.is_dir():
                # Another process has removed the directory of documents. If the tier's directory is gone too, this call
                # fails.
                with self._documents_guard:
                    self._documents.mkdir(mode=DIRECTORY_MODE)
                    self._documents_opened = self._documents_found()
                self.files.sync_directory(self.directory)
            try:
                self.files.replace(path, [data])
            except OSError as error:
                if not self._make_document_room(error):
                    raise
                self.files.replace(path, [data])
            self._gave_up = False
        except OSError as error:
            raise store_error(error, f"cannot write {path}") from error

    def list_documents(self, prefix: str) -> Iterable[str]:
        try:
            names = [path.name for path in self._documents.iterdir()]
        except OSError as error:
            raise store_error(error, f"cannot list {self._documents}") from error
        return [name for name in names if name.startswith(prefix) and _DOCUMENT.fullmatch(name)]

    def remove_document(self, name: str) -> None:
        path = self._document(name)
        try:
            # Also afterwards: the directory may be taken away in between.
            self._require_opened()
            remove_durably(self.files, path)
            self._require_opened()
        except OSError as error:
            raise store_error(error, f"cannot remove {path}") from error

    def _make_document_room(self, error: OSError) -> bool:
        """Give up a segment if ``error`` means a full disk: the tier needs its documents to enter service.

        If that did not help, another segment would not help either.
        """
        if not isinstance(store_error(error, ""), OutOfSpaceError) or self._gave_up or self.segments.read_only:
            return False
        self._gave_up = True
        return self.segments.give_up_one()

    def _require_opened(self) -> None:
        """Raise TemporaryStoreError unless documents are still in the directory that was opened.

        Another directory at the path may give way to the opened one again, with the documents that it held.
        """
        moved = self._lock.moved() or self._documents_moved()
        if moved is not None:
            raise TemporaryStoreError(f"{self.directory} {moved}")

    def _documents_found(self) -> tuple[int, int] | None:
        """Return the device and inode of the directory of documents; None if it is missing."""
        try:
            found = self._documents.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _documents_moved(self) -> str | None:
        """Return the reason why the documents are not those that were opened, or None."""
        with self._documents_guard:
            found = self._documents_found()
            if found is None or found == self._documents_opened:
                return None
        return f"holds another directory {self._documents.name} than the one that was opened"

    def delete(self, places: Sequence[Place]) -> None:
        """Do nothing: a slot is free when no index names it."""


def _slot(block: BlockIO) -> int:
    if not isinstance(block.place, int):
        raise PermanentStoreError(f"{block.place!r} is not a slot")
    return block.place


def _buffers(blocks: Sequence[BlockIO], run: Sequence[int]) -> list[memoryview]:
    return [part for position in run for part in (blocks[position].header, blocks[position].payload)]
