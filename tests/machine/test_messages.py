"""The messages: they come back as they were sent, and nothing else is read."""

from __future__ import annotations

import random
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.machine.link import Link, ServiceSocket
from tiering.machine.messages import (
    MAX_KEYS,
    MAX_MESSAGE,
    MAX_TEXT,
    VERSION,
    Kind,
    MessageError,
    Record,
    messages,
    pack,
    read,
)
from tiering.machine.words import Greeting, checked_weights, private_weights, read_state, revision_of, revision_weights

KEYS = st.integers(5, 100).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=20))


@st.composite
def records(draw: st.DrawFn) -> Record:
    keys = draw(KEYS)
    rows = [draw(st.integers(0, 2**32 - 1)) for _ in keys] if draw(st.booleans()) else []
    return Record(
        draw(st.sampled_from(list(Kind))),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 255)),
        draw(st.floats(-1e8, 1e8)),
        draw(st.binary(max_size=200)),
        keys,
        rows,
    )


@given(st.lists(records(), max_size=30), st.integers(0, 1 << 40))
def test_records_come_back(sent: list[Record], first: int) -> None:
    found: list[Record] = []
    for number, (message, count) in enumerate(messages(map(pack, sent), first)):
        assert len(message) <= MAX_MESSAGE
        part = read(message, first + number)
        assert len(part) == count
        found += part
    assert [(*record[:5], list(record.keys), list(record.rows)) for record in found] == [
        (*record[:5], list(record.keys), list(record.rows)) for record in sent
    ]


def test_the_largest_record_fits_into_a_message() -> None:
    largest = Record(Kind.STORE, text=b"x" * 1000, keys=[bytes(100)] * MAX_KEYS, rows=range(MAX_KEYS))
    ((message, _),) = messages([pack(largest)], 0)
    assert len(message) <= MAX_MESSAGE
    ((message, _),) = messages([pack(Record(Kind.STATE, text=b"x" * MAX_TEXT))], 0)
    assert len(message) <= MAX_MESSAGE


@pytest.mark.parametrize("seed", range(20))
def test_damaged_messages_are_refused_or_read_within_bounds(seed: int) -> None:
    """Any bytes give records within the bounds, or the one error."""
    rng = random.Random(seed)
    sent = [Record(Kind.LOAD, 7, 1, 2.0, b"request", [rng.randbytes(36) for _ in range(9)], range(9))] * 3
    ((good, _),) = messages(map(pack, sent), 4)
    refused = 0
    for _ in range(500):
        message = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            message[rng.randrange(len(message))] = rng.randrange(256)
        damaged = bytes(message[: rng.randrange(len(message) + 1)]) if rng.random() < 0.3 else bytes(message)
        try:
            for record in read(damaged, 4):
                assert len(record.keys) <= MAX_KEYS
                assert len(record.rows) in (0, len(record.keys))
                assert len({len(key) for key in record.keys}) <= 1
        except MessageError:
            refused += 1
    assert refused > 50


def test_another_version_and_another_number_are_refused() -> None:
    ((message, _),) = messages([pack(Record(Kind.HELLO))], 0)
    other = message[:4] + struct.pack("<H", VERSION + 1) + message[6:]
    with pytest.raises(MessageError, match=f"version {VERSION + 1} of the messages, this one {VERSION}"):
        read(other, 0)
    with pytest.raises(MessageError, match="message 0 came in place of 1"):
        read(message, 1)
    with pytest.raises(MessageError, match="not one of kv-tiering"):
        read(b"GET / HTTP/1.1\r\n\r\n", 0)


@pytest.mark.parametrize(
    "record",
    [
        Record(Kind.LOAD, keys=[bytes(36), bytes(37)], rows=[0, 1]),
        Record(Kind.LOAD, keys=[bytes(36)], rows=[0, 1]),
        Record(Kind.LOAD, keys=[bytes(4)]),
        Record(Kind.LOAD, keys=[bytes(101)]),
        Record(Kind.LOAD, keys=[bytes(36)] * (MAX_KEYS + 1)),
        Record(Kind.HELLO, text=bytes(MAX_TEXT + 1)),
    ],
)
def test_records_beyond_the_bounds_are_not_sent(record: Record) -> None:
    with pytest.raises(MessageError):
        pack(record)


def test_a_greeting_comes_back() -> None:
    greeting = Greeting("local", '{"a": 1}', (4096, 100), 10, 4096, revision_weights("step 1"))
    assert Greeting.of(greeting.text(), 4096) == greeting


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        Greeting("local").text(),
        Greeting("local", "{}", (8192,), 1, 4096).text(),
        Greeting("local", "{}", (4096,), 1, 4097).text(),
        Greeting("local", "{}", (4096,), 1 << 41, 4096).text(),
        Greeting("local", "{}", (0,), 1, 4096).text(),
        Greeting("local", "\ud800", (4096,), 1, 4096).text(),
        Greeting("local", "{}", (4096,), 1, 4096, "weights").text(),
        Greeting("local", "{}", (4096,), 1, 4096).text().replace(b"}", b', "more": 1}'),
        b'{"tier": "local", "group_bytes": [true], "rows": 1, "stride": 4096}',
        b"[" * 10_000,
    ],
)
def test_other_greetings_are_refused(text: bytes) -> None:
    with pytest.raises(MessageError):
        Greeting.of(text, 4096)


def test_weights_have_three_kinds() -> None:
    assert revision_of(checked_weights(revision_weights("7").encode())) == "7"
    assert revision_of(checked_weights(private_weights("ab").encode())) is None
    for text in (b"other", b"revision:\0", b"\xff", b"revision:" + bytes(2000)):
        with pytest.raises(MessageError):
            checked_weights(text)
    with pytest.raises(MessageError):
        read_state(b"start\0epoch")


def test_a_farewell_arrives_although_the_service_left_messages_unread() -> None:
    """The kernel reports the unread messages as an error before the farewell."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = ServiceSocket(ours)
    ours.send(b"unread")
    theirs.send(b"farewell")
    theirs.close()
    assert [Link._receive(connection) for _ in range(2)] == [b"farewell", b""]
    connection.close()
