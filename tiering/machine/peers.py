"""The service's side of a connection."""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, replace

from tiering.machine.counts import EngineCounts, EngineOfTier
from tiering.machine.hosted import HostedTier
from tiering.machine.link import AT_ONCE, peer_credentials, peer_pidfd
from tiering.machine.messages import Record, messages, pack
from tiering.machine.namespaces import HostedNamespace
from tiering.machine.words import START

MOST_BEHIND = 100
"""Records that wait for an engine, beyond which it gets no states and wishes."""

NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Numbers of errors that pass once the machine has room again."""


class Peer:
    """One connection; see :class:`tiering.machine.hosted.Engine`."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.socket = connection
        """The connection, which does not block."""
        self.name = name
        self.pid, self.uid = peer_credentials(connection)
        """Process, or 0 if this process cannot see it, and user at the other end."""
        self.pidfd = peer_pidfd(connection)
        """Descriptor that is readable once the engine's process is dead; -1 if there is none."""
        self.hosted: HostedTier | None = None
        """The tier that the engine uses."""
        self.space: HostedNamespace | None = None
        """The engine's namespace."""
        self.file = (0, 0)
        """Device and inode of the rows."""
        self.tier = ""
        """Name of the tier."""
        self.first_row = self.num_rows = 0
        self.weights = START
        self.reset_at = 0.0
        self.generation = -1
        self.jobs = 0
        self.counts = EngineCounts()
        self.leaving = self.follows = False
        self.gone = False
        """True if nothing can be sent any more."""
        self.starved = False
        """True if the kernel had no memory for the last message; the next turn tries again."""
        self.received = self.sent = 0
        """Number of the next message from the engine, and to it."""
        self.out: deque[bytes] = deque()
        """Packed records that wait for room in the socket."""

    @property
    def behind(self) -> bool:
        return len(self.out) > MOST_BEHIND

    @property
    def paused(self) -> bool:
        """True while nothing is read from an engine that does not read itself: its answers would pile up."""
        return self.behind and not self.starved

    def add_counts(self, to: dict[EngineOfTier, EngineCounts]) -> None:
        """Add the counts to those of all connections of the same engine and tier."""
        if self.hosted is None or self.space is None:
            return
        name = self.space.name, self.tier, str(self.pid or self.name)
        attached = int(self.hosted.attached(self))
        stores, lookups = self.hosted.waiting(self)
        now = replace(
            self.counts,
            engine_connections=1,
            engine_rows=self.num_rows,
            engine_stores_waiting=stores,
            engine_lookups_waiting=lookups,
            engine_messages_received=self.received,
            engine_messages_sent=self.sent,
        )
        found = to.setdefault(name, EngineCounts(engine_attached=attached))
        for word in (each.name for each in fields(EngineCounts)):
            setattr(found, word, getattr(found, word) + getattr(now, word))
        found.engine_attached = min(found.engine_attached, attached)

    def send(self, record: Record) -> None:
        if not self.gone:
            self.out.append(pack(record))

    def flush(self) -> None:
        """Send what fits into the socket; a message that cannot be sent ends the connection, with a farewell."""
        self.starved = False
        out = list(self.out)
        for message, number in messages(out, self.sent):
            try:
                self.socket.send(message, AT_ONCE)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_ROOM:
                    self.starved = True
                    return
                # Without a farewell, the engine's rows stay out of use until this process ends.
                self.gone, self.leaving = self.leaving, True
                self.out.clear()
                return
            self.sent += 1
            for _ in range(number):
                self.out.popleft()


Stamp = tuple[HostedNamespace, str, tuple[int, ...]]
"""Namespace, state of the weights, and generations of the namespace's tiers."""


def stamp_of(peers: Mapping[int, Peer], file: tuple[int, int], tiers: int) -> Stamp | None:
    """Return what the blocks of an engine belong to; None if not all of its tiers have accepted its rows.

    Args:
        peers: all connections.
        file: device and inode of its rows.
        tiers: number of its tiers.
    """
    own = [peer for peer in peers.values() if peer.file == file and peer.hosted is not None]
    attached = {peer.tier for peer in own if peer.hosted is not None and peer.hosted.attached(peer)}
    if len(attached) != tiers or len(own) != tiers:
        return None
    space, weights = own[0].space, own[0].weights
    if space is None or any(peer.space is not space for peer in own):
        return None
    return present_stamp(space, weights)


def present_stamp(space: HostedNamespace, weights: str) -> Stamp:
    """Return what blocks belong to that are computed now, with these weights."""
    return space, weights, tuple(hosted.generation for hosted in space.tiers.values())
