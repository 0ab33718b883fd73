"""The floors of ``machine``: the same messages, reads, moves and notes with nothing else around them."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from xxhash import xxh3_128_digest

from tiering import OffloadKey, make_offload_key
from tiering.machine.presence import PresenceTable

MESSAGE_BYTES = 1400
"""Bytes of the message of a step with a load of 16 blocks and a notice."""

READERS = 8
"""Threads of the bare reads and moves, as many as a tier begins with."""

JOBS, TURN_SECONDS = 4, 0.005
"""Jobs of each direction that the bare moves have in flight, and the time between two looks at them."""


def _answer(peer: socket.socket) -> None:
    while message := peer.recv(1 << 16):
        peer.send(message[:60])


@contextmanager
def bare_peer() -> Iterator[socket.socket]:
    """Yield a socket to a process that answers each message, and does nothing else."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    ours.send(b"begin")
    ours.recv(1 << 16)
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def bare_message(peer: socket.socket) -> float:
    """Send a message, read the answer a millisecond later, and return the seconds of the sending."""
    message = bytes(MESSAGE_BYTES)
    begun = time.perf_counter()
    peer.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    taken = time.perf_counter() - begun
    time.sleep(0.001)
    peer.recv(1 << 16)
    return taken


class BareReads:
    """A file of blocks that threads read past the page cache, with a digest of each, and nothing else.

    Args:
        path: path of the file.
        blocks: rows whose bytes the file gets.
    """

    def __init__(self, path: Path, blocks: np.ndarray) -> None:
        self._path = path
        self._size = blocks.shape[1]
        self._count = len(blocks)
        path.write_bytes(blocks.tobytes())

    def read(self, rows: np.ndarray) -> None:
        """Read all blocks into ``rows``, whose addresses are those of pages."""
        handle = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        left, lock = iter(range(self._count)), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    at = next(left, None)
                if at is None:
                    return
                os.preadv(handle, [rows[at].data], at * self._size)
                xxh3_128_digest(rows[at].data)

        threads = [threading.Thread(target=work) for _ in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(handle)


class BareMoves:
    """A process that writes, reads and digests blocks at some rate, and does nothing else.

    What it costs an engine beside it, any process costs that does a service's work.

    Args:
        path: path of its file.
        size: bytes of a block.
        job: number of blocks that begin at once.
    """

    def __init__(self, path: Path, size: int, job: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=_move, args=(path, size, job, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._orders.recv()

    @contextmanager
    def moving(self, rate: float, reached: list[float]) -> Iterator[None]:
        """Move ``rate`` bytes/s while the context lasts, and append to ``reached`` how many it were."""
        self._orders.send(rate)
        try:
            yield
        finally:
            self._orders.send(None)
            reached.append(self._orders.recv())

    def close(self) -> None:
        """End the process."""
        self._orders.close()
        self._process.join()


def _move(path: Path, size: int, job: int, orders: Connection) -> None:
    """Move blocks as ordered: every other job writes its blocks, and the others read theirs."""
    rows = np.frombuffer(mmap.mmap(-1, 2 * JOBS * job * size), np.uint8).reshape(2 * JOBS * job, size)
    rows[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    path.write_bytes(rows.data)
    handle = os.open(path, os.O_RDWR | os.O_DIRECT)
    waiting: SimpleQueue[int] = SimpleQueue()
    ended: SimpleQueue[int] = SimpleQueue()

    def work() -> None:
        while True:
            at = waiting.get()
            if at // job % 2:
                os.preadv(handle, [rows[at].data], at * size)
                xxh3_128_digest(rows[at].data)
            else:
                xxh3_128_digest(rows[at].data)
                os.pwritev(handle, [rows[at].data], at * size)
            ended.put(at)

    for _ in range(READERS):
        threading.Thread(target=work, daemon=True).start()
    free, left = deque(range(2 * JOBS)), [0] * (2 * JOBS)

    def one_ended() -> int:
        number = ended.get() // job
        left[number] -= 1
        if not left[number]:
            free.append(number)
        return size

    rate, begun, moved = 0.0, time.monotonic(), 0
    orders.send(None)
    while True:
        while not ended.empty():
            moved += one_ended()
        for _ in range(2):
            if rate and free and moved + sum(left) * size <= rate * (time.monotonic() - begun):
                number = free.popleft()
                left[number] = job
                for at in range(number * job, (number + 1) * job):
                    waiting.put(at)
        if orders.poll(TURN_SECONDS if rate else None):  # idle, it takes nothing from the other variants
            try:
                wanted = orders.recv()
            except EOFError:
                return
            reached = moved / (time.monotonic() - begun)
            while any(left):
                one_ended()
            if wanted is None:
                orders.send(reached)
            rate, begun, moved = wanted or 0.0, time.monotonic(), 0


def notes(blocks: int) -> tuple[float, float, float]:
    """Return the microseconds of a note of a stored and a removed block, and the longest call in ms.

    Args:
        blocks: number of blocks, which are noted in calls of 256.
    """
    calls = [
        [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(first, first + 256)]
        for first in range(0, blocks, 256)
    ]
    with closing(PresenceTable("bench")) as table:
        stored, removed = ([_seconds(change, keys) for keys in calls] for change in (table.stored, table.removed))
    return 1e6 * sum(stored) / blocks, 1e6 * sum(removed) / blocks, 1e3 * max(stored)


def _seconds(change: Callable[[Sequence[OffloadKey]], None], keys: Sequence[OffloadKey]) -> float:
    begun = time.thread_time()
    change(keys)
    return time.thread_time() - begun
