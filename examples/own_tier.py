"""A complete tier in one file: blocks in a SQLite database.

A stack names it as ``type: examples.own_tier:SQLITE_TIER``. The file shows the options of a medium and the handful of
methods of its store. Retries, deadlines, the breaker, checksums, compression, admission and statistics come with
:class:`BlockTier`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np

from tiering import CorruptBlockError, PermanentStoreError, TemporaryStoreError
from tiering.tier import (
    BlockIO,
    BlockStore,
    BlockTier,
    BlockTierOptions,
    CompressionOptions,
    Done,
    Place,
    SharedIndex,
    SharedOptions,
    StoreProbe,
    StoreTraits,
    TierContext,
    TierDefinition,
)


class SQLiteOptions(BlockTierOptions, SharedOptions, CompressionOptions):
    """The words of the tier in a stack: those of its bases, and its own.

    All other common words are refused. ``unsupported`` gives a better reason where there is one.
    """

    unsupported: ClassVar[Mapping[str, str]] = {
        "capacity": "the tier does not count its bytes; delete the file when it is too large",
        "ttl": "it does not remember when a block was written",
    }

    path: Path
    """The file of the database."""


class SQLiteStore(BlockStore):
    """A table of (place, header, payload).

    A transaction makes a put atomic. The lock of the database lets several processes share the file.
    """

    traits = StoreTraits(medium="DISK", variable_size=True)

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        self.close()
        try:
            connection = sqlite3.connect(self._path, timeout=5.0, check_same_thread=False)
        except sqlite3.Error as error:
            raise PermanentStoreError(f"{self._path}: {error}") from error
        self._connection = connection
        with self._transaction() as cursor:
            cursor.execute(
                "CREATE TABLE IF NOT EXISTS blocks (place TEXT PRIMARY KEY, header BLOB, payload BLOB) WITHOUT ROWID"
            )
            cursor.execute("CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def put_one(self, block: BlockIO) -> None:
        with self._transaction() as cursor:
            cursor.execute("REPLACE INTO blocks VALUES (?, ?, ?)", (block.place, block.header, block.payload))

    def get_one(self, block: BlockIO) -> Done:
        with self._transaction() as cursor:
            found = cursor.execute("SELECT header, payload FROM blocks WHERE place = ?", (block.place,)).fetchone()
        if found is None:
            return Done.ABSENT
        header, payload = found
        if len(header) != len(block.header) or len(payload) > len(block.payload):
            raise CorruptBlockError(
                f"{block.place} holds {len(header)} and {len(payload)} bytes, which is no block of ours"
            )
        np.copyto(np.frombuffer(block.header, np.uint8), np.frombuffer(header, np.uint8))
        np.copyto(np.frombuffer(block.payload, np.uint8)[: len(payload)], np.frombuffer(payload, np.uint8))
        block.filled = len(payload)
        return Done.DONE

    def delete(self, places: Sequence[Place]) -> None:
        with self._transaction() as cursor:
            cursor.executemany("DELETE FROM blocks WHERE place = ?", [(place,) for place in places])

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        try:
            with self._transaction() as cursor:
                query = "SELECT 1 FROM blocks WHERE place = ?"
                return StoreProbe(tuple(cursor.execute(query, (place,)).fetchone() is not None for place in places))
        except (TemporaryStoreError, PermanentStoreError):
            return StoreProbe(tuple(None for _ in places))

    def read_document(self, name: str) -> bytes | None:
        with self._transaction() as cursor:
            found = cursor.execute("SELECT data FROM documents WHERE name = ?", (name,)).fetchone()
        return None if found is None else found[0]

    def write_document(self, name: str, data: bytes) -> None:
        with self._transaction() as cursor:
            cursor.execute("REPLACE INTO documents VALUES (?, ?)", (name, data))

    def create_document(self, name: str, data: bytes) -> bytes | None:
        with self._transaction() as cursor:
            cursor.execute("INSERT OR IGNORE INTO documents VALUES (?, ?)", (name, data))
        return self.read_document(name)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        """Run one transaction at a time, and turn SQLite's errors into errors of a store.

        An error is temporary if the same call may succeed later.
        """
        if self._connection is None:
            raise PermanentStoreError(f"{self._path} is not open")
        try:
            with self._lock, self._connection as connection:
                yield connection.cursor()
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorname in {"SQLITE_BUSY", "SQLITE_LOCKED"}
            raise (TemporaryStoreError if busy else PermanentStoreError)(f"{self._path}: {error}") from error
        except sqlite3.Error as error:
            raise PermanentStoreError(f"{self._path}: {error}") from error


def build(options: SQLiteOptions, context: TierContext) -> BlockTier:
    """Return the tier; the database is not opened here."""
    return BlockTier(context, options, SQLiteStore(options.path), SharedIndex.of(options))


SQLITE_TIER = TierDefinition(
    SQLiteOptions, build, persistent=True, location=lambda options: f"the file {options.path.absolute()}"
)
