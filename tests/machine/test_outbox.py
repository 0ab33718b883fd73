"""The records of a step are sent in parts, and what finds no room waits: no job is lost."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tiering.machine.link import ServiceSocket
from tiering.machine.messages import MAX_MESSAGE, Kind, Record, read
from tiering.machine.outbox import Outbox
from tiering.testing.keys import key_of

JOBS, JOB_BLOCKS = 3000, 16


def load(number: int) -> Record:
    rows = range(JOB_BLOCKS * number, JOB_BLOCKS * (number + 1))
    return Record(Kind.LOAD, number, seconds=1.0, text=b"request", keys=[key_of(row) for row in rows], rows=rows)


@pytest.fixture
def pair() -> Iterator[tuple[ServiceSocket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    connection = ServiceSocket(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def taken(theirs: socket.socket, number: int) -> list[list[Record]]:
    """Return the records of each message that has come, from message ``number`` on."""
    found: list[list[Record]] = []
    while True:
        try:
            found.append(read(theirs.recv(MAX_MESSAGE + 1), number + len(found)))
        except BlockingIOError:
            return found


def test_a_step_of_many_times_the_sockets_buffer_arrives_whole_and_in_order(
    pair: tuple[ServiceSocket, socket.socket],
) -> None:
    connection, theirs = pair
    outbox = Outbox("local")
    assert all(outbox.add(load(number)) for number in range(JOBS))
    assert outbox.is_full
    found: list[Record] = []
    steps, parts = 0, connection.sent
    while outbox.records:
        outbox.send(connection)
        messages = taken(theirs, parts)
        assert messages, "nothing was sent"
        steps, parts = steps + 1, parts + len(messages)
        found += [record for message in messages for record in message]
    assert [record.number for record in found] == list(range(JOBS))
    assert [row for record in found for row in record.rows] == list(range(JOBS * JOB_BLOCKS))
    assert steps > 1
    assert not outbox.is_full


def test_behind_a_full_outbox_notices_are_dropped_and_jobs_and_resets_wait(
    pair: tuple[ServiceSocket, socket.socket],
) -> None:
    """The service would never learn of a reset that is dropped, and would not serve the tier again."""
    connection, theirs = pair
    outbox = Outbox("local")
    number = 0
    while not outbox.is_full:
        assert outbox.add(load(number := number + 1))
    notices = (Kind.TOUCH, Kind.USED, Kind.FINISHED, Kind.LOOKUP, Kind.USE, Kind.GATHER)
    assert not any(outbox.add(Record(kind, keys=[key_of(1)])) for kind in notices)
    assert outbox.add(Record(Kind.RESET, text=b"revision:2"))
    assert outbox.add(Record(Kind.FOLLOWED, 7))
    parts = connection.sent
    kinds: list[int] = []
    while outbox.records:
        outbox.send(connection)
        messages = taken(theirs, parts)
        parts += len(messages)
        kinds += [record.kind for message in messages for record in message]
    assert kinds == [Kind.LOAD] * number + [Kind.RESET, Kind.FOLLOWED]
