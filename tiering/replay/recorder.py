"""The recorder of a running engine's requests, in the project's own format of traces.

The scheduler's thread hands each finished request over as it is. A thread of the recorder turns its keys into hashes
and writes the line. A full queue and a failing disk cost records, which are counted, and never delay the engine.

A trace holds times, lengths and hashes, and no text. A hash is the leading 64 bits of the engine's own block hash.
Whoever can compute the engine's hashes can therefore recognise a known text in a trace. With a ``salt`` in the stack,
the hashes are keyed with it. The key is that of the stack, not random for each file, so that the files of engines with
the same stack can be merged.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tiering.api.engine import TraceRecording
from tiering.api.keys import OffloadKey
from tiering.replay.readers import header_line, request_line
from tiering.replay.trace import Hashes, TraceRequest
from tiering.replay.trace_files import TraceFiles
from tiering.runtime.forks import inert_in_children
from tiering.runtime.pool import ThreadPool
from tiering.runtime.ratelimit import LimitedWarning

logger = logging.getLogger("kv_tiering.trace")

PERIOD = 0.5
"""Seconds between two looks at the queue.

A thread that each request woke would cost the scheduler's thread more.
"""

MAX_WAITING_BLOCKS = 1 << 18
"""Largest number of blocks of the requests that wait to be written, about 20 MB of keys."""

_HASH_BYTES = 8
_PIECE = 64
"""Blocks hashed with a key before other threads may run."""


class _Finished(NamedTuple):
    """A finished request as the scheduler's thread hands it over."""

    arrived: float
    input_tokens: int
    output_tokens: int
    keys: Sequence[OffloadKey]


class TraceRecorder:
    """Recorder of one scheduler's requests. The scheduler's thread calls all methods.

    Args:
        recording: settings of the trace.
        block_tokens: tokens of one block.
    """

    def __init__(self, recording: TraceRecording, block_tokens: int) -> None:
        self.now = time.time
        """Function that returns the present time for :meth:`record`, which machines share."""
        self.written = 0
        self._block_tokens = block_tokens
        self._secret = hashlib.sha256(f"trace {recording.salt}".encode()).digest() if recording.salt else b""
        self._files = TraceFiles(
            recording.directory,
            recording.max_bytes,
            recording.max_total,
            header_line(block_tokens, recording.block_bytes).encode() + b"\n",
        )
        self._queue: deque[_Finished] = deque()
        self._stopped = threading.Event()
        self._handed_blocks = self._taken_blocks = 0
        self._refused = self._failed = 0
        self._warn = LimitedWarning(logger, time.monotonic)
        self._accepts, self._unserved = True, False
        self._threads = ThreadPool("kv-tiering-trace", 1)
        self._threads.run(self._serve, self._unstarted)
        inert_in_children(self, ("record", "stop", "join"))

    @property
    def dropped(self) -> int:
        """Number of requests that were not written: the queue was full, or the disk or the thread failed."""
        return self._refused + self._failed + (len(self._queue) if self._unserved else 0)

    def record(self, arrived: float, input_tokens: int, output_tokens: int, keys: Sequence[OffloadKey]) -> None:
        """Hand a finished request over to the recorder's thread.

        Args:
            arrived: time of arrival, from :attr:`now`.
            input_tokens: length of the prompt.
            output_tokens: length of the answer.
            keys: keys of the blocks, those of the answer included. The caller no longer changes the sequence.
        """
        if not self._accepts or self._handed_blocks - self._taken_blocks > MAX_WAITING_BLOCKS:
            self._refused += 1
            return
        self._handed_blocks += len(keys) + 1
        self._queue.append(_Finished(arrived, input_tokens, output_tokens, keys))

    def stop(self) -> None:
        """Accept no more requests, and let the thread end once it has written those that wait."""
        self._accepts = False
        self._stopped.set()
        self._threads.stop()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended after :meth:`stop`.

        Args:
            timeout: longest wait in seconds; a disk that hangs then keeps the thread, which does not keep the process.
        """
        self._threads.join(timeout)

    def _unstarted(self, error: BaseException) -> None:
        """Accept no requests, because the thread cannot be started."""
        self._accepts, self._unserved = False, True
        logger.warning("record_trace: no thread can be started, so no requests are recorded: %s", error)

    def _serve(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(PERIOD)
            while self._queue:
                self._write(self._queue.popleft())
        self._files.close()

    def _write(self, request: _Finished) -> None:
        try:
            self._files.append(self._line(request))
            self.written += 1
        except Exception as error:
            self._failed += 1
            self._warn("record_trace: a request could not be written: %s", error)
        self._taken_blocks += len(request.keys) + 1

    def _line(self, request: _Finished) -> bytes:
        keys = request.keys[: request.input_tokens // self._block_tokens]
        recorded = TraceRequest(request.arrived, request.input_tokens, request.output_tokens, self._hashes(keys))
        return request_line(recorded).encode() + b"\n"

    def _hashes(self, keys: Sequence[OffloadKey]) -> Hashes:
        data = b"".join(keys)
        width = len(keys[0]) if keys else 0
        if self._secret:
            data = b"".join(self._keyed(keys[at : at + _PIECE]) for at in range(0, len(keys), _PIECE))
        elif width >= _HASH_BYTES and len(data) == width * len(keys):
            data = np.frombuffer(data, np.uint8).reshape(len(keys), width)[:, :_HASH_BYTES].tobytes()
        else:
            data = b"".join(key[:_HASH_BYTES].ljust(_HASH_BYTES, b"\0") for key in keys)
        return np.frombuffer(data, ">u8").astype(np.uint64)

    def _keyed(self, keys: Sequence[OffloadKey]) -> bytes:
        """Return the keyed hashes of a few keys, after a moment in which the scheduler's thread may run."""
        time.sleep(0)
        blake, secret = hashlib.blake2b, self._secret
        return b"".join([blake(key, digest_size=_HASH_BYTES, key=secret).digest() for key in keys])
