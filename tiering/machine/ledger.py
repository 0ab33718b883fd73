"""The engine's record of the blocks in rows that outlive it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.transfer import Rows
from tiering.machine.claim import WORD_BYTES, KeptRegion
from tiering.machine.link import AT_ONCE, ServiceSocket
from tiering.machine.messages import MAX_KEYS, MAX_MESSAGE, Kind, MessageError, Record, messages, pack, read
from tiering.machine.tier import MachineTier
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.agreement import EpochAgreement

_log = logging.getLogger("kv_tiering.machine")

MESSAGES_PER_STEP = 8
"""Largest number of messages that a step sends, and that it reads."""

MOST_PENDING = 1 << 16
"""Rows that wait to be reported, beyond which the oldest are not."""

SHOW_AGAIN, LONGEST_SHOW = 5.0, 600.0
"""Seconds between attempts to show the rows to one service that has not made them; the wait doubles."""

_ONE, _TWO = np.uint64(1), np.uint64(2)
_Words = NDArray[np.uint64]


class RowLedger:
    """Keeps the words of the rows, and reports their blocks to the service.

    The scheduler's thread calls all methods. A word is odd from the moment that a row is taken until it is written, so
    that a row whose engine died meanwhile does not count. The service computes a digest of each reported block, and
    compares the word before and after.

    If the service ends, the ledger shows the rows to the next one, once that serves all tiers, and reports their blocks
    again: other engines find them there. No later engine gets these rows.

    Args:
        region: the rows.
        primary: the CPU tier over them.
        tiers: the tiers of the service; blocks are reported while all of them have accepted the rows.
        agreement: agreement of the tiers, for which inherited blocks count as blocks of this engine.
        inherited: function that is called with each number of blocks that were inherited.
    """

    def __init__(
        self,
        region: KeptRegion,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[MachineTier],
        agreement: EpochAgreement,
        inherited: Callable[[int], object],
    ) -> None:
        self._region = region
        self._words: _Words = region.words
        self._connection: ServiceSocket | None = region.connection
        self._shown: deque[ServiceSocket | None] = deque()
        """The outcome of the attempt to show the rows, which a thread has put there."""
        self._showing = False
        self._service = ""
        """Name of the last service that had the rows, or was asked to take them."""
        self._show_due, self._show_wait = 0.0, SHOW_AGAIN
        self._reported = np.zeros(len(self._words), np.bool_)
        """The rows whose blocks were reported and have not been taken since."""
        self._again_at = len(self._words)
        """Row from which on blocks are to be reported again, to a service that has not made the rows."""
        self._primary = primary
        self._tiers = tiers
        self._agreement = agreement
        self._inherited = inherited
        self._pending: deque[tuple[Sequence[OffloadKey], Rows, _Words]] = deque()
        self._num_pending = 0
        self._unsent = [pack(Record(Kind.HELD))]
        """Packed records that have not been sent; the first names this connection as that of the manager."""

    def taken(self, rows: Rows) -> None:
        self._words[rows] = (self._words[rows] | _ONE) + _TWO
        self._reported[rows] = False

    def written(self, rows: Rows) -> None:
        self._words[rows] = (self._words[rows] | _ONE) + _ONE

    def report(self, keys: Sequence[OffloadKey], rows: Rows) -> None:
        self._reported[rows] = True
        if self._connection is None:
            return
        self._pending.append((keys, rows, self._words[rows]))
        self._num_pending += len(rows)
        while self._num_pending > MOST_PENDING:
            self._num_pending -= len(self._pending.popleft()[1])

    def cleared(self) -> None:
        np.bitwise_or(self._words, _ONE, out=self._words)
        np.add(self._words, _TWO, out=self._words)
        self._reported.fill(False)
        self._pending.clear()
        self._num_pending = 0

    def step(self) -> None:
        connection = self._connection or self._show()
        if connection is None:
            return
        try:
            self._read(connection)
            self._report(connection)
        except (OSError, MessageError) as error:
            _log.warning("machine.keep_rows: the rows will not outlive this engine: %s", error)
            connection.close()
            self._connection = None
            # The tiers may learn later that the service has ended; one that refuses the reports is not asked in a loop.
            self._service, self._show_due = connection.instance, time.monotonic() + self._show_wait
            self._unsent.clear()
            self._pending.clear()
            self._num_pending = 0

    def _show(self) -> ServiceSocket | None:
        """Return the connection to a service that has been shown the rows; None while there is none."""
        if self._shown:
            self._showing = False
            if (connection := self._shown.popleft()) is not None:
                self._region.connection = self._connection = connection
                self._unsent = [pack(Record(Kind.HELD))]
                self._again_at = 0
            return connection
        services = {each.service if each.settled_weights is not None else "" for each in self._tiers}
        if self._showing or len(services) > 1 or "" in services:
            return None
        now = time.monotonic()
        if self._service not in services:
            (self._service,) = services
            self._show_due, self._show_wait = now, SHOW_AGAIN
        if now >= self._show_due:
            self._showing, self._show_due = True, now + self._show_wait
            self._show_wait = min(2 * self._show_wait, LONGEST_SHOW)
            fds = os.dup(self._region.fd), os.dup(self._region.words_fd)
            region, shown = self._region, self._shown
            try:
                threading.Thread(target=lambda: shown.append(region.shown(fds)), name="kv-rows", daemon=True).start()
            except RuntimeError as error:
                _log.warning("machine.keep_rows: no thread can be started (%s); the next attempt follows", error)
                for fd in fds:
                    os.close(fd)
                self._showing = False
        return None

    def _report(self, connection: ServiceSocket) -> None:
        if not self._pending and self._again_at < len(self._words):
            first, self._again_at = self._again_at, self._again_at + MAX_KEYS
            rows = first + np.flatnonzero(self._reported[first : self._again_at])
            known = zip(rows.tolist(), self._primary.keys_of(rows), strict=True)
            held = {row: key for row, key in known if key is not None}
            self.report(list(held.values()), np.fromiter(held, np.int64, len(held)))
        if self._pending:
            weights = {tier.settled_weights for tier in self._tiers}
            if len(weights) == 1 and (found := weights.pop()) is not None:
                while self._pending and len(self._unsent) < MESSAGES_PER_STEP:
                    keys, rows, words = self._pending.popleft()
                    self._num_pending -= len(rows)
                    for first in range(0, len(rows), MAX_KEYS):
                        part = slice(first, first + MAX_KEYS)
                        text = words[part].tobytes() + found.encode()
                        self._unsent.append(
                            pack(Record(Kind.HELD, text=text, keys=keys[part], rows=rows[part].tolist()))
                        )
        sent = 0
        for message, count in messages(self._unsent, connection.sent):
            try:
                connection.socket.send(message, AT_ONCE)
            except BlockingIOError:
                break
            connection.sent += 1
            sent += count
        del self._unsent[:sent]

    def _read(self, connection: ServiceSocket) -> None:
        for _ in range(MESSAGES_PER_STEP):
            try:
                message = connection.socket.recv(MAX_MESSAGE + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not message:
                raise MessageError("the service has ended the connection")
            records = read(message, connection.received)
            connection.received += 1
            for record in records:
                if record.kind == Kind.KEPT:
                    self._inherit(record)
                elif record.kind == Kind.COPIED:
                    self._let_go(record.keys)

    def _let_go(self, keys: Sequence[OffloadKey]) -> None:
        """Evict blocks first that another engine has copied, until they are used again; hints keep theirs."""
        readable = self._primary.readable
        self._primary.release([key for key in keys if key in readable], kept=False)

    def _inherit(self, record: Record) -> None:
        """Make those blocks readable whose rows have not been used since their verification."""
        rows = np.asarray(record.rows, np.int64)
        if len(record.text) != WORD_BYTES * len(rows) or not len(rows) or int(rows.max()) >= len(self._words):
            raise MessageError("the service sent rows that are not the engine's")
        words = np.frombuffer(record.text, np.uint64)
        good = (self._words[rows] == words) & (words & _ONE == 0)
        chosen = dict(zip(compress(record.keys, good), rows[good].tolist(), strict=True))
        self._reported[rows[good]] = True
        # For a shared medium that is found later, the rows hold older blocks.
        self._agreement.in_use = True
        self._inherited(self._primary.inherit(list(chosen), np.fromiter(chosen.values(), np.int64, len(chosen))))
