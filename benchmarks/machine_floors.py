"""The floors of ``machine``: the same messages, reads and notes with nothing else around them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_digest

from tiering import OffloadKey, make_offload_key
from tiering.machine.presence import PresenceTable

MESSAGE_BYTES = 1400
"""Bytes of the message of a step with a load of 16 blocks and a notice."""

READERS = 8
"""Threads of the bare reads, as many as a tier begins with."""


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
