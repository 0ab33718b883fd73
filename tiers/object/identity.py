"""The identifier of a bucket, by which all machines name the bucket's directory alike.

One bucket has many spellings: an endpoint inside a private network and a public one, http and https, an endpoint from
the stack or from the environment. The identifier therefore lies in the bucket, as a document. The first machine that
coordinates writes it by a conditional put, and all read it back.

The document's time of writing, by the service's clock, is a part of the identifier. A copied or restored bucket holds
a copy of the document with another time, and thereby gets a directory of its own: that of the original would promise
blocks which the copy lacks. A damaged document is never replaced, because another machine may read it well; the
document of the next number stands in its place.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiering import PermanentStoreError, StoreError, TemporaryStoreError
from tiering.tier import Finding, SealedLayout, Severity
from tiers.object.bucket_options import IDENTITY

if TYPE_CHECKING:
    from tiers.object.store import ObjectStore

logger = logging.getLogger("kv_tiering.object")

MOST_DOCUMENTS = 8
"""Number of documents that are tried in turn; a bucket that has damaged all is not coordinated."""

REFUSED_SECONDS = 600.0
"""Seconds after a refused write for which this process only reads."""

SUBJECT = "bucket identifier"

_COMPARE = "all machines of a fleet must find the same: compare, if they do not share blocks"
_LAYOUT = SealedLayout(b"KVBUCKET\x01\x00", "6x16s")
_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifier of a bucket, as it lies there."""

    number: bytes
    """Random number of 16 bytes."""
    written: float
    """Time of the document's writing by the service's clock, in seconds since 1970."""
    damaged: int = 0
    """Number of damaged documents in front of this one; default 0."""

    @property
    def medium(self) -> bytes:
        """The identifier: number and time."""
        return b"%s@%d" % (self.number.hex().encode(), int(self.written))


def pack(number: bytes) -> bytes:
    """Return the bytes of a document."""
    return _LAYOUT.pack(number)


def parse(data: bytes) -> bytes | None:
    """Return the number in ``data``; None if ``data`` is not a valid document."""
    found = _LAYOUT.parse(data)
    return None if found is None or found[1] else bytes(found[0][0])


def find_identity(store: ObjectStore, create: Callable[[str], bool]) -> Identity | None:
    """Return the identifier of a bucket; None if it has none.

    Args:
        store: the open store.
        create: writes the document of this name unless there is one; returns False if this process must not write.

    Raises:
        TemporaryStoreError: a document was written, and is missing or damaged when it is read back.
        StoreError: a document cannot be read or written.
    """
    for damaged in range(MOST_DOCUMENTS):
        name = f"{IDENTITY}-{damaged}" if damaged else IDENTITY
        found = _read(store, name, damaged)
        if found is None and not create(name):
            return None
        if found is None:
            found = _read(store, name, damaged)
            if not isinstance(found, Identity):
                raise TemporaryStoreError(
                    f"documents/{name} was written, and is missing or damaged when it is read back"
                )
        if isinstance(found, Identity):
            return found
    raise PermanentStoreError(
        f"all of documents/{IDENTITY} to documents/{IDENTITY}-{MOST_DOCUMENTS - 1} read damaged; look for a proxy that "
        "changes what it passes on, and remove them if there is none"
    )


def probe_identity(store: ObjectStore) -> tuple[Finding, bytes]:
    """Return a finding about the identifier of a bucket, and the identifier; empty if there is none.

    Raises:
        StoreError: a document cannot be read.
    """
    found = find_identity(store, lambda name: False)
    if found is None:
        text = f"the bucket has no documents/{IDENTITY} yet; the first engine that coordinates and stores writes it"
        return Finding(Severity.INFO, SUBJECT, text), b""
    text = f"documents/{IDENTITY} is {found.medium.decode()}"
    if found.damaged:
        text = f"documents/{IDENTITY} reads damaged, and documents/{IDENTITY}-{found.damaged} counts in its place"
        remedy = f"{_COMPARE}; if others read it well, suspect a proxy or this machine's memory"
        return Finding(Severity.WARNING, SUBJECT, text, remedy), found.medium
    return Finding(Severity.OK, SUBJECT, text, _COMPARE), found.medium


def _read(store: ObjectStore, name: str, damaged: int) -> Identity | bytes | None:
    """Return an identifier, the document's bytes if two reads find it damaged, or None if there is none."""
    content = b""
    for _ in range(2):
        found = store.read_version(name)
        if found is None:
            return None
        number = parse(content := found.content)
        if number is not None:
            return Identity(number, found.modified, damaged)
    return content


class BucketIdentity:
    """The identifier of one process's bucket, written if it is missing. One thread calls it.

    Args:
        store: the open store.
        writes: True if this process may write.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, store: ObjectStore, *, writes: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._writes = writes
        self._clock = clock
        self._refused_until = float("-inf")
        self._refusal = ""
        self._known: Identity | None = None

    def medium(self) -> bytes:
        """Return the identifier.

        Raises:
            TemporaryStoreError: there is no identifier, and this process does not write one.
            StoreError: a document cannot be read or written.
        """
        found = find_identity(self._store, self._create)
        if found is None:
            raise TemporaryStoreError(
                f"the bucket has no documents/{IDENTITY}, by which its machines find one another, and this machine "
                f"cannot write it ({self._refusal or 'admission: none'}); the next machine that stores blocks will"
            )
        if found != self._known:
            self._log(found)
        self._known = found
        return found.medium

    def _create(self, name: str) -> bool:
        if not self._writes or self._clock() < self._refused_until:
            return False
        # A document that was lost comes back with its number, so the process that had it need not be the only one.
        number = secrets.token_bytes(_ID_BYTES) if self._known is None else self._known.number
        try:
            self._store.create_document(name, pack(number))
        except StoreError as error:
            if error.temporary:
                raise
            self._refused_until = self._clock() + REFUSED_SECONDS
            self._refusal = str(error)
            return False
        return True

    def _log(self, found: Identity) -> None:
        if self._known is not None and found.medium != self._known.medium:
            logger.warning(
                "the bucket has another documents/%s than before: it was emptied, copied or restored. Its machines "
                "follow within minutes, and fill their directory anew",
                IDENTITY,
            )
        if found.damaged:
            last = f"-{found.damaged - 1}" if found.damaged > 1 else ""
            logger.warning(
                "documents/%s%s reads damaged, and documents/%s-%d counts in its place. If other machines read it "
                "well, this one coordinates alone: suspect a proxy or this machine's memory",
                IDENTITY,
                last,
                IDENTITY,
                found.damaged,
            )
