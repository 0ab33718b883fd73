"""The messages between an engine and the service: records whose bounds are checked before use.

A message is one packet of a SOCK_SEQPACKET socket: a header with magic, version and number, then records. The header
has the same form in all versions, so that a refusal can be read by an engine of another version.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from tiering.api.keys import GROUP_BYTES, OffloadKey
from tiering.errors import TieringError

VERSION = 4
"""Version of the messages; both sides must have the same one."""

MAX_MESSAGE = 60 << 10
"""Largest number of bytes of a message: well below the socket buffers of most machines."""

MAX_KEYS = 512
"""Largest number of keys of one record."""

MAX_KEY_BYTES = 100
"""Largest number of bytes of a key; :data:`MAX_KEYS` of them and their rows fit into one message."""

MAX_TEXT = 50 << 10
"""Largest number of bytes of a record's text."""

_MAGIC = b"KVMC"
_HEADER = struct.Struct("<4sHHQ")
_RECORD = struct.Struct("<BBHHHIQd")
_EMPTY = np.empty(0, np.uint32)


class MessageError(TieringError):
    """A message that is damaged, of another version, or beyond a bound."""


class Kind(IntEnum):
    """Kind of a record."""

    HELLO = 1
    """Engine: the first record of a connection; the text describes the engine's rows, tier and namespace."""
    LOOKUP = 2
    """Engine: how many leading keys are held?"""
    STORE = 3
    """Engine: a store of rows; the flag is 1 for blocks that were promoted from a slower tier."""
    LOAD = 4
    """Engine: a load into rows."""
    TOUCH = 5
    """Engine: a prefix was used (flag 1), or only stored (flag 0)."""
    USED = 6
    """Engine: blocks that are in use, which the tier may lack."""
    FINISHED = 7
    """Engine: a request has ended; the keys may be evicted first."""
    RESET = 8
    """Engine: blocks stored before are invalid; the text has the new state of the weights."""
    FOLLOWED = 9
    """Engine: the number names the generation that the engine's rows belong to."""
    CLAIM = 10
    """Engine: the first record of a process that maps rows of the service; the text describes them.

    With two descriptors, the rows and their words are those of an earlier service.
    """
    HELD = 11
    """Engine: rows that hold blocks; the text has a word per row, and the state of the weights."""
    USE = 12
    """Engine: a prefix that a request used, and that may be published."""
    GATHER = 13
    """Engine: which keys have engines published? ``seconds`` is the largest number of keys."""
    WELCOME = 20
    """Service: the answer to HELLO or CLAIM; the text names the instance."""
    REFUSED = 21
    """Service: the connection cannot be used; the text is the reason."""
    STATE = 22
    """Service: state of the tier, with its generation, its flags and a :class:`State` as text."""
    ANSWER = 23
    """Service: the number of held keys of a lookup, in ``seconds``; -1: not known."""
    RESULT = 24
    """Service: a job has ended; the text has a byte per key, 1 for success."""
    WANTED = 25
    """Service: keys that the tier lacks and would store."""
    KEPT = 27
    """Service: verified blocks in the rows that an earlier process has left; the text has a word per row."""
    COPIED = 30
    """Service: keys of blocks that another engine has got from the engine's rows."""
    HOT = 28
    """Service: a run of published keys, the flag is the number of its engine; without keys: the end."""
    REMOVED = 29
    """Service: keys of blocks that have left the tier, the flag is 1 for evictions.

    Without keys: any block may have left.
    """
    BYE = 26
    """Service: the last record; nothing touches the engine's rows any more."""


SERVING, STORING = 1, 2
"""Flags of a state: the tier answers lookups and loads, and takes stores."""


class Record(NamedTuple):
    """One record of a message."""

    kind: int
    """Kind of the record."""
    number: int = 0
    """Number of a job, lookup or generation."""
    flag: int = 0
    """Flag of the record, by kind."""
    seconds: float = 0.0
    """Seconds from the sending to the deadline, or another number, by kind."""
    text: bytes = b""
    """Text of the record."""
    keys: Sequence[OffloadKey] = ()
    """Keys, all of the same length."""
    rows: Sequence[int] = ()
    """Rows of the engine, one for each key, or none."""


def pack(record: Record) -> bytes:
    """Return the bytes of a record.

    Raises:
        MessageError: the record is beyond a bound.
    """
    kind, number, flag, seconds, text, keys, rows = record
    length = len(keys[0]) if keys else 0
    if len(keys) > MAX_KEYS or len(text) > MAX_TEXT or [*map(len, keys)].count(length) != len(keys):
        raise MessageError(f"a record has {len(keys)} keys and {len(text)} bytes of text, or keys of several lengths")
    if (rows and len(rows) != len(keys)) or not (GROUP_BYTES < length <= MAX_KEY_BYTES or not keys):
        raise MessageError(f"a record has {len(rows)} rows for {len(keys)} keys of {length} bytes")
    head = _RECORD.pack(kind, flag, length, len(keys), len(rows), len(text), number, seconds)
    return b"".join((head, text, *keys, array("I", rows).tobytes()))


def one_message(records: Sequence[bytes], number: int) -> bytes:
    """Return a message of packed ``records``.

    Args:
        records: the records, which together are below :data:`MAX_MESSAGE`.
        number: number of the message.
    """
    return b"".join((_HEADER.pack(_MAGIC, VERSION, len(records), number), *records))


def messages(records: Iterable[bytes], first: int) -> Iterator[tuple[bytes, int]]:
    """Yield messages of packed ``records``, in order, each with the number of its records.

    Args:
        records: the records.
        first: number of the first message; the others follow.
    """
    batch: list[bytes] = []
    size = _HEADER.size
    for record in records:
        if batch and size + len(record) > MAX_MESSAGE:
            yield one_message(batch, first), len(batch)
            first, batch, size = first + 1, [], _HEADER.size
        batch.append(record)
        size += len(record)
    if batch:
        yield one_message(batch, first), len(batch)


def read(message: bytes, number: int) -> list[Record]:
    """Return the records of a message.

    Args:
        message: the packet.
        number: expected number of the message.

    Raises:
        MessageError: the message is damaged, of another version or number, or beyond a bound.
    """
    if len(message) < _HEADER.size:
        raise MessageError(f"a message has {len(message)} bytes")
    magic, version, count, found = _HEADER.unpack_from(message)
    if magic != _MAGIC:
        raise MessageError("a message is not one of kv-tiering")
    if version != VERSION:
        raise MessageError(f"the other side has version {version} of the messages, this one {VERSION}")
    if found != number:
        raise MessageError(f"message {found} came in place of {number}")
    records: list[Record] = []
    at = _HEADER.size
    for _ in range(count):
        record, at = _read_record(message, at)
        records.append(record)
    if at != len(message):
        raise MessageError(f"{len(message) - at} bytes follow the records of a message")
    return records


def _read_record(message: bytes, at: int) -> tuple[Record, int]:
    if len(message) - at < _RECORD.size:
        raise MessageError("a record is cut")
    kind, flag, length, num_keys, num_rows, text_bytes, number, seconds = _RECORD.unpack_from(message, at)
    at += _RECORD.size
    if num_keys > MAX_KEYS or text_bytes > MAX_TEXT or (num_rows and num_rows != num_keys):
        raise MessageError(f"a record has {num_keys} keys, {num_rows} rows and {text_bytes} bytes of text")
    if num_keys and not GROUP_BYTES < length <= MAX_KEY_BYTES:
        raise MessageError(f"a record has keys of {length} bytes")
    if not -1e9 < seconds < 1e9:
        raise MessageError(f"a record has {seconds} seconds")
    first_key = at + text_bytes
    first_row = first_key + num_keys * length
    end = first_row + 4 * num_rows
    if end > len(message):
        raise MessageError("a record is cut")
    keys = [message[start : start + length] for start in range(first_key, first_row, length or 1)]
    rows = np.frombuffer(message, np.uint32, num_rows, first_row) if num_rows else _EMPTY
    return Record(kind, number, flag, seconds, message[at:first_key], keys, rows.tolist()), end
