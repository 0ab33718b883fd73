"""Rows that the service has made, as the processes of an engine map them.

Each process that maps the rows claims them over a connection of its own, which stays open: the service hands the rows
to a later engine once all these processes are dead. All processes of an engine claim by one name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tiering.api.namespace import ModelIdentity
from tiering.errors import RegionError, TieringError
from tiering.machine.link import ServiceSocket, ask, connect
from tiering.machine.messages import Kind, Record, messages, pack, read
from tiering.machine.options import MachineOptions
from tiering.machine.rows import check_rows
from tiering.primary.memory.prefault import advise
from tiering.primary.memory.region import SharedRegion, row_stride
from tiering.primary.memory.room import check_room
from tiering.primary.memory.side import RegionSide

_log = logging.getLogger("kv_tiering.machine")

WORD_BYTES = 8
"""Bytes of a row's word: odd while the row's content does not count, another number after each change."""


class KeptRegion(SharedRegion):
    """Rows of the service, with a word per row."""

    __slots__ = ("claim", "connection", "is_left", "path", "user", "words", "words_fd")

    claim: bytes
    """Text of the claim."""
    path: str
    """Path of the service's socket."""
    user: str | None
    """Name or number of the service's user; None: this process's own."""
    connection: ServiceSocket
    """The connection of the claim, or a later one over which the rows were shown to another service."""
    is_left: bool
    """True once the rows are closed."""
    words_fd: int
    """Memory of the words."""
    words: NDArray[np.uint64]
    """A word per row."""

    @classmethod
    def mapped(
        cls,
        connection: ServiceSocket,
        fds: Sequence[int],
        num_rows: int,
        row_bytes: int,
        side: RegionSide,
    ) -> Self:
        """Map claimed rows.

        Args:
            connection: the connection of the claim, which the region owns from then on, also if this raises.
            fds: the descriptors that the service has sent, which are closed.
            num_rows: number of rows.
            row_bytes: size of a row in bytes.
            side: this claim among those of the engine.

        Raises:
            TieringError: the rows cannot be mapped, or are those of another engine.
        """
        own = -1
        try:
            if len(fds) != 2:
                raise RegionError(f"the service sent {len(fds)} descriptors")
            # Locks belong to an open description, which a descriptor that was sent shares with the service.
            own = os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR | os.O_CLOEXEC)
            if not os.fstat(own).st_blocks:
                check_room(num_rows * row_stride(row_bytes), None)
            check_rows(own, num_rows * row_stride(row_bytes))
            check_rows(fds[1], num_rows * WORD_BYTES)
            region = cls.join(own, num_rows, row_bytes, sides=side.sides, mark=side.mark)
            own = -1
            region.connection = connection
            words = mmap.mmap(fds[1], num_rows * WORD_BYTES)
            region.words = np.frombuffer(words, np.uint64)
            # A child that the engine forks could outlive it, and write into rows that another engine has by then.
            words.madvise(mmap.MADV_DONTFORK)
            if number := advise(region.address, num_rows * row_stride(row_bytes), mmap.MADV_DONTFORK):
                raise RegionError(f"the rows cannot be kept from children: {os.strerror(number)}")
            region.words_fd, region.is_left = os.dup(fds[1]), False
        except BaseException:
            connection.close()
            if own >= 0:
                os.close(own)
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return region.prepared(side.share, side.in_background)

    def shown(self, fds: Sequence[int]) -> ServiceSocket | None:
        """Show the rows to a service that has not made them, and return the connection; None if that failed.

        A thread of its own calls this method, because a service may take seconds to answer.

        Args:
            fds: descriptors of rows and words, which are closed.
        """
        try:
            connection, _ = _ask(self.path, self.user, self.claim, fds)
        except (OSError, TieringError) as error:
            _log.warning("machine.keep_rows: other engines do not find the blocks of this one: %s", error)
            return None
        finally:
            for fd in fds:
                os.close(fd)
        if self.is_left:
            connection.close()
            return None
        return connection

    def close(self) -> None:
        if not self.is_left:
            self.is_left = True
            os.close(self.words_fd)
        super().close()
        self.connection.close()


def _ask(path: str, user: str | None, text: bytes, shown: Sequence[int] = ()) -> tuple[ServiceSocket, list[int]]:
    """Claim rows, or show those of ``shown``; return the connection and the descriptors that came."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    fds: list[int] = []
    try:
        connect(peer, path, user)
        ((message, _),) = messages([pack(Record(Kind.CLAIM, text=text))], 0)
        answer, fds = ask(peer, message, shown, 2)
        if not answer:
            raise TieringError("the service hung up")
        (record,) = read(answer, 0)
        if record.kind != Kind.WELCOME:
            raise TieringError(record.text.decode(errors="replace"))
        peer.settimeout(None)
        connection = ServiceSocket(peer)
        connection.instance = record.text.decode(errors="replace").partition("\0")[0]
        connection.received = 1
    except BaseException as error:
        peer.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, ValueError):
            raise TieringError("the service sent another answer to a claim") from error
        raise
    return connection, fds


def describe(
    name: str, model: ModelIdentity, group_bytes: Sequence[int], words: Sequence[str | None], **numbers: int
) -> bytes:
    """Return the text of a claim.

    Args:
        name: name that all processes of the engine use.
        model: identity of the model; its weights may not be known yet, and do not count.
        group_bytes: bytes of a block, per KV-cache group.
        words: further words of the stack that engines with equal blocks have in common.
        numbers: ``rows``, ``stride``, ``sides`` and ``tiers``.
    """
    alike = json.dumps([model.name, model.dtype, repr(model.layout), list(group_bytes), *words]).encode()
    return json.dumps({"name": name, "alike": hashlib.sha256(alike).hexdigest(), **numbers}).encode()


def claim_rows(
    options: MachineOptions,
    name: str,
    model: ModelIdentity,
    group_bytes: Sequence[int],
    words: Sequence[str | None],
    num_rows: int,
    side: RegionSide,
) -> KeptRegion | None:
    """Return rows of the service; None, with a line in the log, if it cannot give any.

    Args:
        options: the stack's word ``machine``.
        name: name that all processes of the engine use.
        model: identity of the model.
        group_bytes: bytes of a block, per KV-cache group.
        words: further words of the stack that engines with equal blocks have in common.
        num_rows: number of rows.
        side: this claim among those of the engine.

    Raises:
        TieringError: the rows cannot be mapped, or are those of another engine: other rows would be no better.
    """
    row_bytes = max(group_bytes)
    path = str(Path(options.socket).expanduser())
    numbers = {"rows": num_rows, "stride": row_stride(row_bytes), "sides": side.sides, "tiers": len(options.tiers)}
    text = describe(name, model, group_bytes, words, **numbers)
    try:
        connection, fds = _ask(path, options.user, text)
    except (OSError, TieringError) as error:
        _log.warning("machine.keep_rows: the rows will not outlive this engine: %s", error)
        return None
    region = KeptRegion.mapped(connection, fds, num_rows, row_bytes, side)
    region.path, region.user, region.claim = path, options.user, text
    return region
