"""Slots with device errors: they are out of use, also after restarts, and are tried again rarely.

A trial writes a pattern over the whole slot, syncs it and reads it back. A slot that passes is free again; a slot that
fails is tried again after twice the time.

The list is kept in a document beside the blocks: a header, an entry per slot, and an xxh3-128 of both. A damaged
document is not used; new errors lead to its slots again.
"""

from __future__ import annotations

import logging
import mmap
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tiering import DeviceError, StoreError
from tiering.tier import Chore, Place, RateLimit, SealedLayout, store_errors
from tiers.local.layout import PAGE
from tiers.local.store import LocalParts, LocalStore

logger = logging.getLogger("kv_tiering.local")

FIRST_TRIAL_SECONDS = 3600.0
"""Seconds from an error of a slot to its first trial."""

LONGEST_WAIT_SECONDS = 7 * 86400.0
"""Longest wait between two trials of one slot, in seconds."""

TRIALS_AT_ONCE = 64

_RETRY_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_MOST_REMEMBERED = 50_000
_LOG_PERIOD = 30.0
_LAYOUT = SealedLayout(b"KVBADSL1", "Q")
_ENTRY = struct.Struct("<IId")
_PATTERN = 0x5A


@dataclass(slots=True)
class _BadSlot:
    """The state of one bad slot."""

    failures: int
    due: float
    """Time of the next trial, in monotonic seconds."""


def encode(entries: Iterable[tuple[int, int, float]]) -> bytes:
    """Return the document for ``entries``.

    An entry has the slot, its failures, and the time of the next trial (seconds since 1970).
    """
    parts = [_ENTRY.pack(slot, failures, due) for slot, failures, due in entries]
    return _LAYOUT.pack(len(parts), content=b"".join(parts))


def decode(document: bytes) -> list[tuple[int, int, float]] | None:
    """Return the entries of a document; None if the document is not entirely valid. Never raises."""
    if (found := _LAYOUT.parse(document)) is None:
        return None
    (count,), entries = found
    return list(_ENTRY.iter_unpack(entries)) if len(entries) == count * _ENTRY.size else None


def exercise(store: LocalStore, slot: int) -> None:
    """Write a pattern over the whole unused ``slot``, sync it and read it back.

    Raises:
        StoreError: the slot failed its trial.
    """
    segment, offset = store.geometry.locate(slot)
    memory = memoryview(mmap.mmap(-1, 2 * store.geometry.slot_bytes))
    written, back = memory[: store.geometry.slot_bytes], memory[store.geometry.slot_bytes :]
    # The header's page stays zero, so that the slot holds no valid block afterwards.
    np.frombuffer(written[PAGE:], np.uint8).fill(_PATTERN)
    segments = store.segments
    ledger = segments.ledger(segment)
    with store_errors(f"slot {slot} failed its trial"):
        store.marks.mark(segment)
        ticket = ledger.begin_write()
        segments.write(segment, offset, [written])
        ledger.end_write(ticket, lambda: segments.sync(segment))
        segments.drop_cached(segment, offset, len(written))
        complete = segments.read(segment, offset, [back]) == len(back)
    if not complete or not np.array_equal(np.frombuffer(written, np.uint8), np.frombuffer(back, np.uint8)):
        raise DeviceError(f"slot {slot} failed its trial: the bytes read differ from the bytes written")


class BadSlots:
    """The bad slots of one local tier.

    Trials and writes of the document are tasks of the I/O side.
    """

    def __init__(self, parts: LocalParts) -> None:
        self._parts = parts
        self._name, self._index, self._clock = parts.name, parts.index, parts.clock
        self._slots: dict[int, _BadSlot] = {}
        self._document = parts.store.geometry.bad_slots_document
        self._unsaved = False
        self._saving = Chore("bad-slots", parts.io, parts.clock, self._write)
        self._trials = Chore("bad-slots", parts.io, parts.clock, self._try)
        self._saving.wake()
        self._writes_failed = False
        self._lines = RateLimit(_LOG_PERIOD, parts.clock)

    @property
    def busy(self) -> bool:
        """True while a trial or a write of the document is running."""
        return self._saving.running or self._trials.running

    def load(self, document: bytes | None) -> None:
        """Take the slots in ``document`` out of use.

        Args:
            document: the document as it was when the store was opened; None if there is none.
        """
        if document is None:
            return
        entries = decode(document)
        if entries is None:
            logger.warning(
                "tier %s: document %s is damaged; bad slots are detected again by new errors",
                self._name,
                self._document,
            )
            return
        now, wall = self._clock(), time.time()
        for slot, failures, due in entries:
            self._slots[slot] = _BadSlot(failures, now + min(max(due - wall, 0.0), LONGEST_WAIT_SECONDS))
        self._index.states.mark_bad(list(self._slots))
        self._trials.wake()
        if entries:
            logger.info("tier %s: %d slot(s) are out of use because of earlier device errors", self._name, len(entries))

    def add(self, places: Sequence[Place], *, suspect: bool = False) -> None:
        """Record ``places``, which the index has retired because of errors of the device.

        Args:
            places: the retired slots.
            suspect: True if one of the slots is bad, not known which one, so that all are tried at once; default:
                False.
        """
        now = self._clock()
        slots = [place for place in places if isinstance(place, int)]
        for slot in slots:
            entry = self._slots.get(slot)
            if entry is None:
                self._slots[slot] = _BadSlot(0 if suspect else 1, now if suspect else now + FIRST_TRIAL_SECONDS)
        self._unsaved = True
        self._trials.wake()
        if count := self._lines.admit(len(slots)):
            logger.warning(
                "tier %s: the device reported errors at %d slot(s), the last one slot %s: "
                "they are out of use; see the kernel's log",
                self._name,
                count,
                slots[-1] if slots else "unknown",
            )

    def tick(self, now: float) -> None:
        """Start the trials and the write of the document that are due."""
        writable = not self._parts.io.breakers.writes.state  # 0: the breaker is closed
        if self._writes_failed and writable:
            # An outage has ended. Slots that failed only once probably failed because of it.
            for entry in self._slots.values():
                entry.due = min(entry.due, now) if entry.failures <= 1 else entry.due
            self._trials.due = now
        self._writes_failed = not writable
        if not writable or self._parts.stop.is_set():
            return
        if self._unsaved:
            self._saving.tick(now)
        if now >= self._trials.due:
            self._trials.tick(now)

    def save(self) -> None:
        """Write the document if the list has changed."""
        if self._unsaved:
            self._saving.start()

    def _write(self) -> None:
        self._unsaved = False
        now, wall = self._clock(), time.time()
        document = encode(
            (slot, entry.failures, wall + entry.due - now)
            for slot, entry in sorted(self._slots.items())[:_MOST_REMEMBERED]
        )
        write = self._parts.store.write_document
        self._saving.run(lambda: write(self._document, document), self._saved)

    def _saved(self, result: None, error: BaseException | None) -> None:
        self._saving.wake(0.0 if error is None else _RETRY_SECONDS)
        if error is not None:
            self._unsaved = True
            if self._lines.admit():
                logger.warning(
                    "tier %s: the list of bad slots cannot be written yet; it is tried again: %s", self._name, error
                )

    def _try(self) -> None:
        now = self._clock()
        ripe = [slot for slot, entry in self._slots.items() if entry.due <= now]
        due = self._index.states.idle_bad(ripe)[:TRIALS_AT_ONCE]
        if not due:
            self._trials.due = now + _LOOK_SECONDS
            return
        outcomes: dict[int, StoreError | None] = {}

        def try_all() -> None:
            for slot in due:
                if self._parts.stop.is_set():
                    return
                try:
                    exercise(self._parts.store, slot)
                    outcomes[slot] = None
                except StoreError as error:
                    outcomes[slot] = error

        def ended(result: None, error: BaseException | None) -> None:
            self._tried(due, outcomes)

        self._trials.run(try_all, ended)
        self._trials.wake(_LOOK_SECONDS)

    def _tried(self, due: Sequence[int], outcomes: dict[int, StoreError | None]) -> None:
        now = self._clock()
        good = [slot for slot, error in outcomes.items() if error is None]
        self._index.states.restore(good)
        for slot in good:
            self._slots.pop(slot, None)
        for slot in due:
            entry = self._slots.get(slot)
            if entry is not None and isinstance(outcomes.get(slot), DeviceError):
                entry.failures += 1
                entry.due = now + min(FIRST_TRIAL_SECONDS * 2.0 ** (entry.failures - 1), LONGEST_WAIT_SECONDS)
            elif entry is not None:
                entry.due = now + _RETRY_SECONDS
        self._unsaved = self._unsaved or bool(outcomes)
        if good:
            logger.info(
                "tier %s: %d slot(s) could be written and read again, and are back in use", self._name, len(good)
            )

    def clear(self) -> None:
        """Drop all bad slots, because another directory is in place of the opened one."""
        self._slots.clear()
        self._unsaved = False

    def drop(self, start: int, stop: int) -> None:
        """Drop slots [start, stop), whose segment is gone. A new segment lies elsewhere on the device."""
        gone = [slot for slot in self._slots if start <= slot < stop]
        for slot in gone:
            del self._slots[slot]
        self._unsaved = self._unsaved or bool(gone)
