"""Reads of values over a connection, into memory that the caller provides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

_HEAD = 4096
"""Bytes of the first read of a reply: the line with its length, and the beginning of the value."""


def peek(connection: Any, key: str | bytes, limit: int) -> tuple[int, bytes]:
    """Return the length of a value, and its first ``limit`` bytes; see the client's ``peek``."""
    connection.send_command("STRLEN", key)
    length = connection.read_response()
    connection.send_command("GETRANGE", key, 0, limit - 1)
    return length, connection.read_response()


def read_value(connection: Any, parts: Sequence[memoryview], deadline: float) -> int | None:
    """Read the reply to a GET from the connection's socket; see the client's ``read_into``."""
    from valkey.exceptions import ConnectionError as Lost
    from valkey.exceptions import InvalidResponse
    from valkey.exceptions import TimeoutError as TimedOut

    # valkey-py has no call that reads into given memory, and its own copies of a value cost more than the network.
    receive = connection._sock.recv_into

    def fill(view: memoryview) -> None:
        done = 0
        while done < len(view):
            if time.monotonic() > deadline:
                raise TimedOut("Timeout reading from socket")
            count = receive(view[done:])
            if not count:
                raise Lost("Connection closed by server.")
            done += count

    head = memoryview(bytearray(_HEAD))
    have = end = 0
    try:
        while (end := bytes(head[:have]).find(b"\r\n")) < 0:
            count = receive(head[have:])
            if not count:
                raise Lost("Connection closed by server.")
            have += count
        line = bytes(head[:end])
        if line[:1] == b"-":
            raise connection._parser.parse_error(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise InvalidResponse(f"Protocol Error: {line[:40]!r}")
        length = int(line[1:])
        if length < 0:
            return None
        if length > sum(map(len, parts)):
            connection.disconnect()  # the rest of the value is not worth reading
            return length
        rest, left = head[end + 2 : have], length
        for part in parts:
            part = part[:left]
            early = min(len(part), len(rest))
            part[:early] = rest[:early]
            fill(part[early:])
            rest, left = rest[early:], left - len(part)
        fill(memoryview(bytearray(2 - len(rest))))
    except TimeoutError as error:
        raise TimedOut("Timeout reading from socket") from error
    except OSError as error:
        raise Lost(f"Error while reading from socket: {error}") from error
    return length
