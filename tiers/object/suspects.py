"""Objects that read corrupt, which are deleted only if two machines agree or a digest proves it.

A machine writes a *note* about an object that it reads corrupt twice, byte for byte the same. A second machine that
reads the same bytes of the same version, at least a minute later, confirms the note. What a digest of the service
proves needs no note. Either way a *settlement* is written before the object is deleted. All machines count the
settlements of the last hour, so that the whole fleet deletes no more than the budget. The times compared are those of
the service, in one listing of the documents; no machine's clock takes part.

::

    read corrupt -- no digest --> noted -- another machine, a minute later --> settlement --> deleted
         '--------- digest proves it ---------------------------------------------^   '- budget spent: released

A note that is damaged, or about another version, counts as none. Notes end after a day, settlements after an hour; the
next settlement or ``kv-tiering gc`` removes them.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from xxhash import xxh3_128

from tiering import PermanentStoreError
from tiering.tier import HOT, HOT_SECONDS, SPEED_SECONDS, SPEEDS, Place, RawBlock, SealedLayout, Settlement
from tiers.object.bucket_options import SETTLEMENTS, SUSPECTS

APART = 60.0
"""Seconds by the service's clock between a note and its confirmation, at least."""

NOTE_SECONDS = 86400.0
"""Seconds after which a note counts as none."""

HOUR = 3600.0
"""Seconds to which the budget applies."""

BUDGET = 16
"""Objects that all machines together delete per hour below one prefix."""

REST_SECONDS = 86400.0
"""Seconds for which this process settles nothing after the service has refused to write or delete."""

SPENT_SECONDS = 600.0
"""Seconds for which this process settles nothing after it has found the fleet's budget spent."""

MOST_NAMES = 3

MOST_BLOCKS = 64
"""Number of blocks of one process that have a second name.

A machine that damages all that it reads must not copy the bucket.
"""

SECOND_NAME_SECONDS = 3600.0
"""Seconds for which a second name is used."""

_LAYOUT = SealedLayout(b"KVSUSPCT\x01\x00", "6x16s16s16s8s8s8s")
_UNKNOWN = bytes(8)

_MACHINE_FILES = ("/etc/machine-id", "/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Machine:
    """Identity of a machine: its machine id, the boot of its kernel, and its host name."""

    names: tuple[bytes, bytes, bytes]
    """Three digests of 8 bytes each; zeros: not known."""

    @classmethod
    def this(cls) -> Self:
        """Return the identity of the machine that this process runs on."""
        first, second = map(_content, _MACHINE_FILES)
        return cls.of(first, second, socket.gethostname())

    @classmethod
    def of(cls, machine: str, boot: str, name: str) -> Self:
        """Return the identity of a machine with these texts; an empty one is not known."""
        first, second, third = (_digest(text)[:8] if text else _UNKNOWN for text in (machine, boot, name))
        return cls((first, second, third))

    def differs(self, other: Machine) -> bool:
        """Return True if ``other`` is certainly another machine.

        A process that was started again, a machine that was booted again and a container on the same kernel each share
        one of the names. So do machines with a cloned image, which therefore never confirm one another.
        """
        pairs = [pair for pair in zip(self.names, other.names, strict=True) if _UNKNOWN not in pair]
        return len(pairs) > 1 and all(mine != theirs for mine, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Note:
    """Record of the bytes that one machine read of one object."""

    place: bytes
    """Digest of the object's name, which contains namespace, epoch and key; 16 bytes."""
    version: bytes
    """Digest of the object's version; 16 bytes."""
    content: bytes
    """Digest of the bytes that were read and of the object's length; 16 bytes."""
    machine: Machine

    @classmethod
    def of(cls, name: str, found: RawBlock, machine: Machine) -> Self:
        """Return the note of ``machine`` about the object ``name``."""
        content = xxh3_128(found.content)
        content.update(str(found.size).encode())
        return cls(_digest(name), _digest(found.version), content.digest(), machine)

    def pack(self) -> bytes:
        """Return the bytes of the document, with a checksum at the end."""
        return _LAYOUT.pack(self.place, self.version, self.content, *self.machine.names)

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Return the note in ``data``; None if ``data`` is not a valid note."""
        if (found := _LAYOUT.parse(data)) is None or found[1]:
            return None
        place, version, content, *names = found[0]
        return cls(place, version, content, Machine((names[0], names[1], names[2])))


class NoteStore(Protocol):
    """The part of :class:`tiers.object.store.ObjectStore` that notes need."""

    def read_document(self, name: str) -> bytes | None: ...

    def write_document(self, name: str, data: bytes) -> None: ...

    def create_document(self, name: str, data: bytes) -> bytes | None: ...

    def remove_documents(self, names: Sequence[str]) -> None: ...

    def document_times(self) -> Mapping[str, float]: ...


class Suspects:
    """The notes and settlements of one process. Threads of the I/O side call it.

    Args:
        store: the open store.
        delete: deletes a version of an object; returns False if the object is another version now.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self,
        store: NoteStore,
        delete: Callable[[str, str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._delete = delete
        self._machine: Machine | None = None
        self._clock = clock
        self._noted: deque[float] = deque(maxlen=BUDGET)
        self._rests_until = float("-inf")

    def settle(self, name: str, found: RawBlock) -> Settlement:
        """Delete the object ``name`` if that is proven or confirmed and the budget allows it.

        Returns:
            ``DELETED``, ``REPLACED``, or ``LEFT`` if it stays for the present.

        Raises:
            StoreError: a document could not be read or written, or the object not be deleted.
        """
        if not found.version or self._clock() < self._rests_until:
            return Settlement.LEFT
        if self._machine is None:
            self._machine = Machine.this()
        note = Note.of(name, found, self._machine)
        try:
            if found.proven or self._is_noted_elsewhere(note):
                return self._decide(name, found, note)
        except PermanentStoreError:
            # Without the permission to delete or to write, each further attempt would be as vain, and cost requests.
            self._rests_until = self._clock() + REST_SECONDS
            raise
        return Settlement.LEFT

    def _is_noted_elsewhere(self, note: Note) -> bool:
        """Return True if another machine has noted the same; write a note if there is none."""
        document = _note_name(note)
        data = self._store.read_document(document)
        known = None if data is None else Note.parse(data)
        if known is None or (known.place, known.version) != (note.place, note.version):
            if data is not None:
                self._store.remove_documents([document])
            self._write_note(document, note)
            return False
        return known.content == note.content and note.machine.differs(known.machine)

    def _write_note(self, document: str, note: Note) -> None:
        """Write a note, unless this process has written as many within an hour as the fleet may delete."""
        now, noted = self._clock(), self._noted
        if len(noted) == BUDGET and now - noted[0] < HOUR:
            return
        noted.append(now)
        self._store.create_document(document, note.pack())

    def _decide(self, name: str, found: RawBlock, note: Note) -> Settlement:
        """Write a settlement, and delete the object if all settlements and the note allow it.

        The settlement is written before the others are counted. Of machines that settle at once, at most as many as the
        budget allows can therefore find few enough others; all others release theirs.
        """
        document = _note_name(note)
        mine = f"{SETTLEMENTS}{note.place.hex()}-{secrets.token_hex(4)}"
        self._store.write_document(mine, note.pack())
        times = self._store.document_times()
        if not self._may_delete(times, mine, document, found):
            self._store.remove_documents([mine])
            if not found.proven and document in ended(times, times.get(mine, 0.0)):
                self._write_note(document, note)
            return Settlement.LEFT
        # If this fails, the settlement stays and counts: the object may have been deleted, and the answer lost.
        if not self._delete(name, found.version):
            self._store.remove_documents([mine])
            return Settlement.REPLACED
        if document in times:
            self._store.remove_documents([document])
        return Settlement.DELETED

    def _may_delete(self, times: Mapping[str, float], mine: str, document: str, found: RawBlock) -> bool:
        """Return True if the settlement ``mine`` is within the budget, and the note ``document`` has its age."""
        now, noted = times.get(mine), times.get(document)
        if now is None:
            return False
        self._store.remove_documents(ended(times, now))
        if sum(name.startswith(SETTLEMENTS) and now - at < HOUR for name, at in times.items()) > BUDGET:
            self._rests_until = self._clock() + SPENT_SECONDS
            return False
        return found.proven or (noted is not None and APART <= now - noted < NOTE_SECONDS)


class SecondNames:
    """The second names that one process uses for blocks whose first object is corrupt and stays.

    The process stores and looks for such a block as ``<name>.1``, and if that object reads corrupt too, as
    ``<name>.2``. It comes to a second name only by reading the first object corrupt itself, so sound blocks cost no
    further request. After an hour the first name is tried again: the object may have been deleted meanwhile. Threads of
    the I/O side call it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[Place, tuple[int, float]] = {}
        """The number of a block's name, and the time until which it is used, by place."""

    def suffix(self, place: Place) -> str:
        """Return the end of the name of the block at ``place``; empty for its first name."""
        if not self._used:
            return ""
        number, until = self._used.get(place, (0, 0.0))
        return f".{number}" if number and self._clock() < until else ""

    def add(self, place: Place) -> bool:
        """Use the next name for the block at ``place`` from now on.

        Returns:
            False if the block has had all its names, or too many blocks have a second name.
        """
        now = self._clock()
        number, until = self._used.get(place, (0, 0.0))
        if until <= now:
            number = 0
        if number == MOST_NAMES:
            return False
        if len(self._used) >= MOST_BLOCKS and place not in self._used:
            for old in [old for old, (_, ends) in list(self._used.items()) if ends <= now]:
                self._used.pop(old, None)
            if len(self._used) >= MOST_BLOCKS:
                return False
        self._used[place] = (number + 1, now + SECOND_NAME_SECONDS)
        return True


def _note_name(note: Note) -> str:
    return f"{SUSPECTS}{note.place.hex()}"


def ended(times: Mapping[str, float], now: float) -> list[str]:
    """Return the names of the notes, settlements, sets of hot keys and speeds that count no more.

    Args:
        times: time of the last write of each, in seconds since 1970.
        now: the present time in seconds since 1970.
    """
    ends = {SETTLEMENTS: 2 * HOUR, HOT: HOT_SECONDS, SPEEDS: SPEED_SECONDS, SUSPECTS: NOTE_SECONDS}
    return [
        name
        for name, at in times.items()
        for prefix, seconds in ends.items()
        if name.startswith(prefix) and now - at >= seconds
    ]


def _digest(text: str) -> bytes:
    return bytes(xxh3_128(text.encode()).digest())


def _content(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""
