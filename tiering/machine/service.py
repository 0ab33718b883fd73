"""The service of a machine: one process and one thread that own the secondary tiers of all engines.

Each tier of an engine has a connection of its own. All engines of one namespace share the tiers of that namespace. The
thread waits for messages and announcements, and then runs a step of every tier, as a manager does.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import select
import selectors
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Self

from tiering.api.masking import mask_text
from tiering.api.namespace import Namespace
from tiering.api.units import format_bytes
from tiering.errors import ConfigError, TieringError
from tiering.machine.counts import EngineCounts, EngineOfTier, ServiceCounts, ServiceLook
from tiering.machine.listener import Listener
from tiering.machine.messages import MAX_MESSAGE, Kind, MessageError, Record, messages, pack, read
from tiering.machine.namespaces import CLOSE_AGAIN, HostedNamespace, TierBuilder, own_replica
from tiering.machine.peers import Peer
from tiering.machine.regions import MOST_REGIONS, Regions
from tiering.machine.users import UserThread, look_at, parameters_of, service_for
from tiering.machine.words import Greeting
from tiering.runtime.pool import ThreadPool
from tiering.runtime.ratelimit import RateLimit

_log = logging.getLogger("kv_tiering.machine")

MOST_CONNECTIONS = 256
"""Largest number of connections of all users, which have equal parts; a further one is refused."""

MOST_NAMESPACES = 16
"""Largest number of namespaces of all users, each with tiers of its own."""

MESSAGES_PER_TURN = 16
"""Messages that are read from one engine before the others have their turn."""

COPY_THREADS = 4
"""Threads that copy blocks from one engine's rows to another's."""

DRAIN_SHARE = 0.75
"""Share of the time for the end that the stores of engines may take; the tiers' own end has the rest."""

BUSY_SECONDS, IDLE_SECONDS = 0.02, 0.5
"""Longest wait while something is in flight, and otherwise."""

_LOG_SECONDS = 30.0
_MOST_FDS = 4


class MachineService:
    """Hosts tiers for the engines of a machine; :meth:`run` is its thread.

    Args:
        path: path of the socket.
        builders: function that builds each tier, by the tier's name, fastest first.
        most_bytes: largest number of bytes of the rows of one engine.
        shutdown_seconds: seconds that the end may take.
        keep_seconds: seconds for which rows of an engine that has ended wait for the next one.
        replica_of: returns the replica whose directories the tiers of a namespace use; default: one per namespace.
        user: name of the user whose engines it serves; default: the process's own.
        users: further users by their numbers, each with a service of its own; default: none.
        parts: number of users that have equal parts of all limits; default 1.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        builders: dict[str, TierBuilder],
        *,
        most_bytes: int,
        shutdown_seconds: float = 30.0,
        keep_seconds: float = 600.0,
        replica_of: Callable[[Namespace], str | None] = own_replica,
        user: str = "",
        users: Mapping[int, UserThread] = MappingProxyType({}),
        parts: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        """Path of the socket."""
        self._builders = builders
        self._most_bytes = most_bytes
        self._shutdown_seconds = shutdown_seconds
        self._replica_of = replica_of
        self._user = user
        self._users = users
        self._most_connections = MOST_CONNECTIONS // parts
        self._most_namespaces = MOST_NAMESPACES // parts
        self._clock = clock
        self.instance = secrets.token_hex(8)
        """Name of this process, which no other has."""
        self._generations = count(1)
        self._peers: dict[int, Peer] = {}
        self._namespaces: dict[str, HostedNamespace] = {}
        self._numbers = count(1)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for pipe in (self._wake_read, self._wake_write):  # not earlier: any thread may wake this one until its end
            weakref.finalize(self, os.close, pipe)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wakes)
        self._refusals = RateLimit(_LOG_SECONDS, clock)
        self._refused = 0
        self._looks: deque[Future[ServiceLook]] = deque()
        self.counts = ServiceCounts()
        """Counts at the last look."""
        self._copiers = ThreadPool("kv-machine-copy", COPY_THREADS)
        self.regions = Regions(
            self._copiers, self.wake, clock, most_bytes, keep_seconds, self._peers, MOST_REGIONS // parts
        )
        """The rows that outlive engines."""
        self.stopping = self._hurried = False
        """True once :meth:`stop` was called."""
        self._listener: Listener | None = None
        self._arrived: deque[Peer] = deque()
        """Connections that the service of another user has taken for this one."""

    def listen(self, listener: socket.socket | None = None) -> None:
        """Take connections of this user, and of those that were named.

        Args:
            listener: socket that listens; default: a new one at the path.

        Raises:
            ConfigError: another service listens there, or the directory is not private.
        """
        mode = 0o660 if self._users else 0o600
        self._listener = Listener(self.path, listener, mode, self._selector, self._admit, self._refusals, self._clock)
        for user in self._users.values():
            user.start()
        _log.info("serving %s at %s", ", ".join(self._builders), self.path)

    def wake(self) -> None:
        """Wake the service's thread; any thread may call."""
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def look(self, seconds: float) -> ServiceLook:
        """Return the counts, or those of the last look if no answer comes within ``seconds``.

        Counters must not go back: a rise after the hang would count what was counted before. Any thread but the
        service's may call.
        """
        return look_at(self, self._users, seconds)

    def ask(self) -> Future[ServiceLook]:
        look: Future[ServiceLook] = Future()
        self._looks.append(look)
        self.wake()
        return look

    def _counted(self) -> ServiceLook:
        spaces = self._namespaces.values()
        tiers = {(space.name, name): each.stats for space in spaces for name, each in space.tiers.items()}
        engines: dict[EngineOfTier, EngineCounts] = {}
        for peer in self._peers.values():
            peer.add_counts(engines)
        self.counts = ServiceCounts(
            service_responsive=1,
            service_connections=len(self._peers),
            service_refusals=self._refused,
            service_orphaned_rows=sum(peer.counts.engine_rows_busy for peer in self._peers.values() if peer.leaving),
            **self.regions.counts(),
        )
        return ServiceLook(self.counts, tiers, engines)

    def stop(self) -> None:
        """Let :meth:`run` end all I/O and return; any thread, or a signal's handler, may call.

        A second call lets it wait for no more stores; engines offer those to the next service.
        """
        self._hurried, self.stopping = self.stopping, True
        for user in self._users.values():
            user.stop()
        self.wake()

    def run(self, beat: Callable[[], object] = lambda: None) -> bool:
        """Serve until :meth:`stop`, and return True if nothing touches the engines' rows any more.

        Args:
            beat: function that is called after each turn, several times a second, while engines are connected; default:
                nothing is.
        """
        self._copiers.start()
        while not self.stopping:
            self.turn()
            beat()
            for user in self._users.values():
                user.step()
        return self._close(beat)

    def turn(self) -> None:
        """Wait for messages or announcements, and run one step."""
        if self._listener is not None:
            self._listener.step()
        busy = any(tier.busy for space in self._namespaces.values() for tier in space.tiers.values())
        for key, _ in self._selector.select(BUSY_SECONDS if busy else IDLE_SECONDS):
            key.data()
        while self._arrived:
            self._take_in(self._arrived.popleft())
        for space in self._namespaces.values():
            space.step()
        self.regions.step()
        while self._looks:
            if (look := self._looks.popleft()).set_running_or_notify_cancel():
                look.set_result(self._counted())
        for peer in list(self._peers.values()):
            if peer.out:
                peer.flush()
            if peer.leaving:
                self._leave(peer)
            else:
                self._watch(peer)

    def _close(self, beat: Callable[[], object]) -> bool:
        """End all I/O, and let go of the engines."""
        deadline = self._clock() + self._shutdown_seconds
        self._drain(self._clock() + DRAIN_SHARE * self._shutdown_seconds, beat)
        for peer in list(self._peers.values()):
            peer.leaving = True
            self._leave(peer)  # before the next step, which would begin with further stores
        while self._peers and self._clock() < deadline:
            self.turn()
            beat()
        ended = self._end_io(deadline) and not self._peers
        waits = [user.ends(deadline - self._clock(), beat) for user in self._users.values()]
        ended = all(waits) and ended
        self._selector.close()
        if self._listener is not None:
            self._listener.close()  # not earlier: another process would serve beside this one, which still writes
        return self._free(ended)

    def abort(self) -> bool:
        """End all I/O after an error, let go of the engines once it has ended, and return as :meth:`run` does."""
        ended = False
        try:
            for space in self._namespaces.values():
                space.fail()
            for peer in self._peers.values():
                peer.flush()
            ended = self._end_io(self._clock() + self._shutdown_seconds)
            woken = select.poll()  # select() refuses descriptors from 1024 on
            woken.register(self._wake_read, select.POLLIN)
            while not ended and not self.stopping:
                woken.poll(1000 * CLOSE_AGAIN)
                self._drain_wakes()
                ended = self._end_io(self._clock())
        except Exception:
            _log.exception("the tiers cannot be closed")
        for peer in self._peers.values():
            if ended:  # else their rows are free once the process has ended
                peer.send(Record(Kind.BYE))
            peer.flush()
            self._hang_up(peer)
        self._selector.close()
        return self._free(ended)

    def _end_io(self, deadline: float) -> bool:
        closed = [space.close_tiers(deadline) for space in self._namespaces.values()]
        self._copiers.stop()
        return self._copiers.join(max(0.0, deadline - self._clock())) and all(closed)

    def _free(self, ended: bool) -> bool:
        """Give back the memory if all I/O has ended, and return ``ended``."""
        if ended:
            self.regions.close()
            for space in self._namespaces.values():
                space.close()
        else:
            _log.error("some I/O did not end in time; the end of the process ends it")
        return ended

    def take_over(self, failed: Self) -> None:
        """Take the connections that wait for a service that has failed, and go on with its counters."""
        self._arrived, self._refused = failed._arrived, failed._refused
        self.regions.handed_over = failed.regions.handed_over

    def _drain(self, deadline: float, beat: Callable[[], object]) -> None:
        """Let the stores end that engines have sent; the engines keep the others, and loads go on."""
        tiers = [tier for space in self._namespaces.values() for tier in space.tiers.values()]
        for tier in tiers:
            tier.ending = True
        self.wake()
        self.turn()  # reads what was sent before
        while (left := sum(tier.stores_left for tier in tiers)) and self._clock() < deadline and not self._hurried:
            self.turn()
            beat()
        if left:
            _log.error("%d block(s) are not stored in time; their engines offer them to the next service", left)

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _admit(self, connection: socket.socket) -> None:
        peer = Peer(connection, f"engine-{next(self._numbers)}")
        service, reason = service_for(peer.uid, self, self._users)
        if service is not None:
            service.hand_over(peer)
        else:
            self._refuse(peer, reason)
            peer.flush()
            self._hang_up(peer)

    @property
    def is_full(self) -> bool:
        return len(self._peers) + len(self._arrived) >= self._most_connections

    def hand_over(self, peer: Peer) -> None:
        self._arrived.append(peer)
        self.wake()

    def _take_in(self, peer: Peer) -> None:
        self._peers[peer.socket.fileno()] = peer
        self._selector.register(peer.socket, selectors.EVENT_READ, lambda: self._receive(peer))
        if peer.pidfd >= 0:
            self._selector.register(peer.pidfd, selectors.EVENT_READ, lambda: self._died(peer))

    def _watch(self, peer: Peer) -> None:
        """Wait for messages, and for room in the socket while something is to be sent."""
        wanted = selectors.EVENT_READ * (not peer.paused) | selectors.EVENT_WRITE * bool(peer.out and not peer.starved)
        key = self._selector.get_key(peer.socket)
        if key.events != wanted:
            self._selector.modify(peer.socket, wanted, key.data)

    def _died(self, peer: Peer) -> None:
        """End the connection of a dead process, whose children may hold the socket."""
        self._selector.unregister(peer.pidfd)
        peer.leaving = peer.gone = True
        peer.out.clear()

    def _receive(self, peer: Peer) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if peer.leaving or peer.paused:
                return
            try:
                message, fds, _, _ = socket.recv_fds(peer.socket, MAX_MESSAGE + 1, _MOST_FDS, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                message, fds = b"", []
            try:
                if not message:
                    peer.leaving = True
                    return
                records = read(message, peer.received)
                peer.received += 1
                for record in records:
                    self._take(peer, record, fds)
            except (TieringError, OSError, MemoryError) as error:
                self._refuse(peer, str(error))
            finally:
                for fd in fds:
                    os.close(fd)

    def _refuse(self, peer: Peer, reason: str) -> None:
        self._refused += 1
        if number := self._refusals.admit():
            _log.warning("%d connection(s) refused or ended; the last, %s: %s", number, peer.name, reason)
        peer.send(Record(Kind.REFUSED, text=mask_text(reason).encode(errors="replace")[:4000]))
        peer.leaving = True

    def _take(self, peer: Peer, record: Record, fds: Sequence[int]) -> None:
        if peer.hosted is not None and peer.space is not None:
            if peer.tier not in peer.space.broken:
                peer.space.guarded(peer.hosted, partial(peer.hosted.take, peer, record))
        elif peer in self.regions:
            self.regions.take(peer, record)
        elif record.kind == Kind.CLAIM and peer.received == 1:
            if fds:
                self.regions.show(peer, record.text, fds)
            self._welcome(peer, () if fds else self.regions.claim(peer, record.text))
        elif record.kind != Kind.HELLO or peer.received != 1:
            raise MessageError("a connection began without a greeting")
        else:
            self._greet(peer, Greeting.of(record.text, mmap.PAGESIZE), fds)

    def _greet(self, peer: Peer, greeting: Greeting, fds: Sequence[int]) -> None:
        """Take an engine in.

        Raises:
            TieringError: it cannot be served; the text says why.
        """
        if greeting.tier:
            if greeting.tier not in self._builders:
                raise ConfigError(f"the service has no tier {greeting.tier!r}; it has {', '.join(self._builders)}")
            if len(fds) != 1:
                raise MessageError(f"a greeting came with {len(fds)} descriptors")
            nbytes = greeting.rows * greeting.stride
            if nbytes > self._most_bytes:
                raise ConfigError(
                    f"the engine's CPU tier has {format_bytes(nbytes)}, and primary.capacity in the service's stack "
                    f"allows {format_bytes(self._most_bytes)}; raise it there"
                )
            space, found = self._namespace(greeting), os.fstat(fds[0])
            peer.file = (found.st_dev, found.st_ino)
            peer.first_row = space.rows.add(fds[0], greeting.rows)
            peer.num_rows, peer.tier, peer.space = greeting.rows, greeting.tier, space
            peer.weights, peer.follows = greeting.weights, greeting.follows
            peer.hosted = space.tiers[greeting.tier]
            peer.hosted.engines.append(peer)
            space.peers.append(peer)
            _log.info("%s uses the tier %s, namespace %s", peer.name, peer.tier, space.name)
            if (presence := space.presence.get(peer.tier)) is not None:
                self._welcome(peer, (presence.fd,))
                return
        self._welcome(peer, ())

    def _welcome(self, peer: Peer, fds: Sequence[int]) -> None:
        """Send the answer to a greeting or a claim, a message of its own: a state would be lost in it."""
        text = f"{self.instance}\0{', '.join(self._builders)}".encode()
        ((message, _),) = messages([pack(Record(Kind.WELCOME, text=text))], peer.sent)
        socket.send_fds(peer.socket, [message], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        peer.sent += 1

    def _leave(self, peer: Peer) -> None:
        """Let go of an engine once none of its jobs runs."""
        if peer.space is not None:
            for hosted in peer.space.tiers.values():  # another tier may have its loads
                hosted.leave(peer)
        self.regions.leave(peer)
        if peer.jobs:
            with suppress(KeyError):
                self._selector.unregister(peer.socket)
            return
        if peer.space is not None:
            peer.space.rows.remove(peer.first_row)
            peer.space.peers.remove(peer)
            peer.space = peer.hosted = None
            peer.send(Record(Kind.BYE))
        peer.flush()
        if peer.out:  # its last records wait for room
            with suppress(KeyError):
                self._selector.unregister(peer.socket)
            if not peer.starved:
                self._selector.register(peer.socket, selectors.EVENT_WRITE, lambda: None)
            return
        self._peers.pop(peer.socket.fileno(), None)
        self._hang_up(peer)

    def _hang_up(self, peer: Peer) -> None:
        for handle in (peer.socket, peer.pidfd):
            with suppress(KeyError, ValueError):
                self._selector.unregister(handle)
        peer.socket.close()
        if peer.pidfd >= 0:
            os.close(peer.pidfd)
            peer.pidfd = -1

    def _namespace(self, greeting: Greeting) -> HostedNamespace:
        """Return the tiers of a namespace, built if it is new.

        Raises:
            TieringError: a tier cannot be built, or the engine's geometry is another one.
        """
        parameters = parameters_of(self._user, greeting.parameters)  # two spellings of one open its directory once
        space = self._namespaces.get(parameters)
        if space is None:
            if len(self._namespaces) >= self._most_namespaces:
                raise ConfigError(f"the service has {self._most_namespaces} namespaces of this user already")
            namespace = Namespace(parameters)
            space = HostedNamespace(
                namespace,
                greeting.group_bytes,
                greeting.stride,
                self._builders,
                self._copiers,
                self.wake,
                self._clock,
                self._generations,
                self._replica_of(namespace),
            )
            try:
                space.build(greeting.weights)
            except BaseException:
                space.close()
                raise
            self._namespaces[parameters] = space
        elif (space.groups, space.rows.stride) != (greeting.group_bytes, greeting.stride):
            raise ConfigError("another engine of this namespace has blocks of other sizes")
        return space
