"""The engine's connection to the service: a thread that connects, reads and proves deaths.

The thread connects again for as long as the engine runs. What it reads goes into a queue, which the scheduler's thread
empties. When a connection ends without a farewell, the service may still write into the engine's rows. The thread then
waits until the service's process is dead (its pidfd). Where the kernel gives none, the end of the socket is the proof:
it comes after the last thread of the process has left its memory.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import NamedTuple, Protocol

from tiering.errors import RegionError, StoreError, TieringError
from tiering.machine.messages import MAX_MESSAGE, Kind, MessageError, Record, messages, pack, read
from tiering.machine.presence import Presence
from tiering.machine.user_names import number_of

_log = logging.getLogger("kv_tiering.machine")

FIRST_RETRY, LONGEST_RETRY = 0.1, 2.0
"""Seconds before the first and between the later attempts to connect; the wait doubles."""

SOON_SECONDS = 10.0
"""Seconds after the end of a connection for which the wait stays that of the first attempt.

The service is started again then, or another one takes its place.
"""

HANDSHAKE_SECONDS = 5.0
"""Seconds that the service may take to answer a new connection."""

PROOF_SECONDS = 1.0
"""Seconds within which the link finds out that a process has died."""

SILENT_SECONDS = 5.0
"""Seconds after which a silent service counts as hanging; it sends a state every second."""

MOST_QUEUED = 8 << 20
"""Bytes of messages in the queue at which no more are read: an idle engine makes no step for hours."""

AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
"""Flags of a message that is sent without waiting, as a number: an enumeration takes more time."""

_LONGEST_WAIT = 0.02
_BYE = int(Kind.BYE)
_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("@iII")


class TierHost(Protocol):
    """A process that serves the tiers of one engine."""

    address: str
    """Address of its socket."""
    restarts: int
    """Number of its starts after the first."""

    def leave(self, seconds: float) -> bool:
        """End the process with the last tier, or if no time is left, and return True if it is dead.

        Args:
            seconds: time that is left for it, after which it is killed.
        """


class Happening(Enum):
    """Kind of an event of a connection."""

    UP = auto()
    """The service has taken the connection."""
    RECORDS = auto()
    """Records have come."""
    DOWN = auto()
    """No further record comes; the service may still touch the rows."""
    RELEASED = auto()
    """The service, or what was left of it, touches no row on behalf of this connection any more."""


class ServiceSocket:
    """One connection to the service.

    Args:
        peer: the connected socket.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        """The connected socket; the scheduler's thread sends, the link's thread receives."""
        self.sent = 1
        """Number of the next message to the service."""
        self.received = 0
        """Number of the next message from the service."""
        self.instance = ""
        """Name of the service's process, which no other has."""
        self.tiers: list[str] = []
        """Names of the service's tiers, fastest first."""
        self.pidfd = peer_pidfd(peer)
        """Descriptor that is readable once the service's process is dead; -1 if there is none."""
        self.released = False
        """True once the service has bidden farewell."""
        self.received_at = time.monotonic()
        """Time of the last message."""
        self.presence: Presence | None = None
        """The tier's blocks; None: the service has to be asked."""

    @property
    def is_silent(self) -> bool:
        """Return True if the service has sent nothing for so long that it hangs or is stopped."""
        return time.monotonic() > self.received_at + SILENT_SECONDS

    def send(self, message: bytes) -> bool:
        """Send a message without waiting, and return False if the socket is full."""
        try:
            self.socket.send(message, AT_ONCE)
        except BlockingIOError:
            return False
        except OSError:
            self.leave()  # it has ended, or else a message is lost: the service then reports all jobs, and hangs up
            return True
        self.sent += 1
        return True

    def close(self) -> None:
        """Close a connection that no link uses."""
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def leave(self) -> None:
        """Send nothing more; the service ends all I/O, and closes the connection."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            _log.debug("the connection has ended already: %s", error)


class LinkEvent(NamedTuple):
    """One thing that happened, for the scheduler's thread."""

    what: Happening
    connection: ServiceSocket
    records: Sequence[Record] = ()


def peer_credentials(peer: socket.socket) -> tuple[int, int]:
    """Return number and user of the process at the other end; number 0: this process cannot see it."""
    pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid), int(uid)


def peer_pidfd(peer: socket.socket) -> int:
    """Return a pidfd of the process at the other end; -1 if the kernel gives none."""
    try:
        return peer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return -1


def connect(peer: socket.socket, path: str, user: str | None) -> None:
    """Connect to the service at ``path``, and wait from now on for no longer than it may take to answer.

    Args:
        peer: socket that is not connected.
        path: path of the service's socket.
        user: name or number of the service's user; None: this process's own.

    Raises:
        TieringError: the socket belongs to another user, or there is no such user.
        OSError: nothing answers at ``path``.
    """
    wanted = os.geteuid() if user is None else number_of(user)
    peer.settimeout(HANDSHAKE_SECONDS)
    peer.connect(path)
    if (uid := peer_credentials(peer)[1]) != wanted:
        named = "the engine's own, and machine.user names no other" if user is None else f"{user}, as machine.user says"
        raise TieringError(f"{path} belongs to the user {uid}, not to {named}")


def greet(path: str, text: bytes, fds: Sequence[int], user: str | None = None) -> ServiceSocket:
    """Connect to the service at ``path``, and return the connection that it has taken.

    Args:
        path: path of the service's socket.
        text: text of the greeting.
        fds: descriptors that go with it.
        user: name or number of the service's user; default: this process's own.

    Raises:
        TieringError: the service has another version or user, or refuses the connection; the text says why.
        OSError: nothing answers at ``path``.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection = None
    try:
        connect(peer, path, user)
        connection = ServiceSocket(peer)
        ((message, _),) = messages([pack(Record(Kind.HELLO, text=text))], 0)
        answer, found = ask(peer, message, fds, 1)
        if found:
            connection.presence = _presence(found)
        if not answer:
            raise ConnectionResetError("the service closed the connection")
        records = read(answer, 0)
        if not records or records[0].kind not in (Kind.WELCOME, Kind.REFUSED):
            raise MessageError("the service did not answer the greeting")
        words = records[0].text.decode(errors="replace")
        if records[0].kind == Kind.REFUSED:
            raise TieringError(words)
        connection.instance, _, names = words.partition("\0")
        connection.tiers = names.split(", ")
        connection.received = 1
        peer.settimeout(None)
    except BaseException:
        if connection is None:
            peer.close()
        else:
            connection.close()
        raise
    return connection


def ask(peer: socket.socket, message: bytes, fds: Sequence[int], most_fds: int) -> tuple[bytes, list[int]]:
    """Send a first message to a service, and return its answer; empty if the service hung up without one.

    A service that refuses a connection sends the reason and hangs up without reading. Sending fails then, or the first
    attempt to read: the kernel reports the unread message before it hands over the answer.

    Args:
        peer: the connection.
        message: the message.
        fds: descriptors that go with it.
        most_fds: largest number of descriptors that come with the answer.
    """
    with suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(peer, [message], list(fds))
    try:
        answer, found, _, _ = socket.recv_fds(peer, MAX_MESSAGE + 1, most_fds, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        answer, found, _, _ = socket.recv_fds(peer, MAX_MESSAGE + 1, most_fds, socket.MSG_CMSG_CLOEXEC)
    return answer, found


def _presence(fds: Sequence[int]) -> Presence | None:
    """Map what a service has sent, and close the descriptors; None if this version cannot read it."""
    try:
        return Presence(fds[0])
    except (OSError, RegionError, ValueError) as error:
        _log.warning("the blocks of the service's tier cannot be read, only asked for: %s", error)
        return None
    finally:
        for fd in fds:
            os.close(fd)


class Link:
    """Keeps a connection to the service, as long as it runs.

    Args:
        path: path of the service's socket.
        name: name of the tier, for the log.
        greeting: returns the text and the descriptors of a greeting; raises a StoreError while they are not known.
        announce: function that is called whenever something is in the queue.
        ended: function that is called once nothing greets a service any more.
        user: name or number of the service's user; None: this process's own.
    """

    def __init__(
        self,
        path: str,
        name: str,
        greeting: Callable[[], tuple[bytes, Sequence[int]]],
        announce: Callable[[], None],
        ended: Callable[[], object],
        user: str | None,
    ) -> None:
        self.queue: deque[LinkEvent] = deque()
        """The events, oldest first; only the scheduler's thread takes from the queue."""
        self.arrived = threading.Event()
        """Set whenever something is put into the queue; who waits clears it first."""
        self.tried = threading.Event()
        """Set once the first attempt to connect has ended."""
        self._path = path
        self._name = name
        self._greeting = greeting
        self._announce = announce
        self._ended = ended
        self._user = user
        self._stopping = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._dying: list[ServiceSocket] = []
        """Connections that ended without a farewell, and whose service lives."""
        self._current: ServiceSocket | None = None
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}-link", daemon=True)

    def start(self) -> None:
        """Start the thread; without one, the tier stays out of service.

        Once it has been started, the call does nothing.
        """
        if self._thread.ident is None:
            try:
                self._thread.start()
            except (RuntimeError, MemoryError) as error:
                _log.error(
                    "tier %s: no thread can be started (%s); the engine runs without the tier", self._name, error
                )
                self.tried.set()

    def stop(self) -> None:
        """Make no further connection; the thread ends once the service has let go of all rows."""
        if self._stopping.is_set():
            return
        os.write(self._wake_write, b"x")  # first, because the thread closes the pipe at its end
        self._stopping.set()
        if (connection := self._current) is not None:
            connection.leave()
        if self._thread.ident is None:
            self._ended()
            self._close()

    def _close(self) -> None:
        os.close(self._wake_read)
        os.close(self._wake_write)

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait at most ``seconds`` until ``done()``, which is asked whenever something has arrived."""
        end = time.monotonic() + seconds
        while not done():
            if (left := end - time.monotonic()) <= 0:
                return False
            self.arrived.clear()
            if not done():
                self.arrived.wait(min(left, _LONGEST_WAIT))
        return True

    # ------------------------------------------------------------------------------------------------------- the thread

    def _put(self, what: Happening, connection: ServiceSocket, records: Sequence[Record] = ()) -> None:
        self.queue.append(LinkEvent(what, connection, records))
        self.arrived.set()
        self._announce()

    def _run(self) -> None:
        wait, soon_until = FIRST_RETRY, 0.0
        while not self._stopping.is_set():
            connection = self._connect()
            self.tried.set()
            if connection is not None:
                self._serve(connection)
                wait, soon_until = FIRST_RETRY, time.monotonic() + SOON_SECONDS
            self._sleep(wait)
            if time.monotonic() >= soon_until:
                wait = min(2 * wait, LONGEST_RETRY)
        self._ended()
        while self._dying:
            self._sleep(LONGEST_RETRY)
        self._close()

    def _connect(self) -> ServiceSocket | None:
        try:
            connection = greet(self._path, *self._greeting(), self._user)
        except (OSError, TieringError) as error:
            shown = self._path.replace("\0", "@")
            text = f"{shown}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
            quiet = isinstance(error, StoreError)  # the weights are not known yet
            if text != self._last_error and not quiet:
                _log.warning(
                    "tier %s: no service; the engine runs without the tier, and tries again: %s", self._name, text
                )
                self._last_error = text
            return None
        _log.info("tier %s: connected to the service at %s", self._name, self._path.replace("\0", "@"))
        self._last_error = ""
        return connection

    def _serve(self, connection: ServiceSocket) -> None:
        """Read until the connection ends."""
        self._current = connection
        if self._stopping.is_set():
            connection.leave()
        self._put(Happening.UP, connection)
        damaged, queued = False, 0
        poll = select.poll()
        poll.register(connection.socket, select.POLLIN)
        while True:
            if queued > MOST_QUEUED and self.queue and not self._stopping.is_set():
                self._bury(select.poll(), FIRST_RETRY)
                connection.received_at = time.monotonic()  # nothing is read until the engine makes a step
                continue
            if self._dying:
                self._bury(poll, None)
            message = self._receive(connection)
            connection.received_at = time.monotonic()
            queued = queued * bool(self.queue) + len(message)
            if not message:
                break
            if damaged:
                continue
            try:
                records = read(message, connection.received)
            except MessageError as error:
                _log.error("tier %s: the service's messages cannot be read: %s", self._name, error)
                damaged = True
                connection.leave()
                continue
            connection.received += 1
            connection.released = any(record.kind == _BYE for record in records)
            self._put(Happening.RECORDS, connection, records)
        self._current = None
        self._put(Happening.DOWN, connection)
        if connection.released or connection.pidfd < 0:
            self._release(connection)
        else:
            self._dying.append(connection)

    @staticmethod
    def _receive(connection: ServiceSocket) -> bytes:
        for _ in range(2):
            try:
                return connection.socket.recv(MAX_MESSAGE + 1)
            except ConnectionResetError:
                continue  # the service left messages unread when it closed; its own last ones follow the error
            except OSError:
                break
        return b""

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        if not self._stopping.is_set():
            poll.register(self._wake_read, select.POLLIN)
        self._bury(poll, seconds)

    def _bury(self, poll: select.poll, seconds: float | None) -> None:
        """Wait for a descriptor of ``poll``, and release the connections whose service has died meanwhile."""
        for connection in self._dying:
            poll.register(connection.pidfd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if seconds is None else 1000 * seconds)}
        dead = [connection for connection in self._dying if connection.pidfd in ready]
        for connection in dead:
            poll.unregister(connection.pidfd)
            self._dying.remove(connection)
            self._release(connection)

    def _release(self, connection: ServiceSocket) -> None:
        if connection.pidfd >= 0:
            os.close(connection.pidfd)
            connection.pidfd = -1
        self._put(Happening.RELEASED, connection)
