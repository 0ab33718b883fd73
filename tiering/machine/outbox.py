"""The records of an engine that wait for room in the socket to the service."""

from __future__ import annotations

import logging

from tiering.machine.link import ServiceSocket
from tiering.machine.messages import MAX_MESSAGE, Kind, MessageError, Record, messages, one_message, pack

_log = logging.getLogger("kv_tiering.machine")

MOST_WAITING = 1 << 20
"""Bytes of records that wait for room in the socket, beyond which notices and questions are dropped."""

_ONE_MESSAGE = MAX_MESSAGE - 64
_KEPT = (Kind.LOAD, Kind.STORE, Kind.RESET, Kind.FOLLOWED)
"""Kinds that always wait: the rows bound the jobs, and the state of the weights must arrive."""


class Outbox:
    """The packed records of one tier of one engine, in their order.

    Args:
        tier: name of the tier.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self.records: list[bytes] = []
        """The records, oldest first."""
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """True if so much waits that no notice or question is taken."""
        return self._bytes > MOST_WAITING

    def add(self, record: Record) -> bool:
        """Append a record to the step's messages; return False if it cannot be sent."""
        if self._bytes > MOST_WAITING and record.kind not in _KEPT:
            return False
        try:
            packed = pack(record)
        except MessageError as error:
            _log.debug("tier %s: a record is not sent: %s", self._tier, error)
            return False
        self.records.append(packed)
        self._bytes += len(packed)
        return True

    def send(self, connection: ServiceSocket) -> None:
        """Send what fits into the socket, and keep the rest."""
        records = self.records
        if self._bytes < _ONE_MESSAGE:  # nearly always
            if records and connection.send(one_message(records, connection.sent)):
                self.clear()
            return
        sent = 0
        for message, count in messages(records, connection.sent):
            if not connection.send(message):
                break
            sent += count
        del records[:sent]
        self._bytes = sum(map(len, records))

    def clear(self) -> None:
        """Drop all records, because the connection has ended."""
        self.records.clear()
        self._bytes = 0
