"""Client of a Mooncake pool: its options, its life, and the end of its transfers.

Mooncake's client is native code with threads of its own. Three of its properties need care:

- A call after its end crashes the process. So calls are counted, and the client ends when no call is under way.
- A transfer that makes slow progress fails after 60 seconds, and may go on writing into its memory. After a call that
  failed so late, the client ends before the call returns (:meth:`PoolClient.end_transfers`).
- It logs much, waits long and reads its settings from the environment. They are set before it is loaded, as far as the
  environment does not set them already.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from tiering import ConfigError, PermanentStoreError, StoreError, TemporaryStoreError
from tiering.tier import BlockTierOptions, Duration, SharedOptions, Size, Transfers

logger = logging.getLogger("kv_tiering.mooncake")

NO_MOONCAKE = (
    "the mooncake tier needs Mooncake's client; install kv-tiering with its extra mooncake (in a clone: "
    "pip install '.[mooncake]')"
)
"""Message about the missing package."""

HEADER_BYTES = 128
"""Bytes of one header on a page."""

PAGE_HEADERS = 512

LEAST_SEGMENT = 16 << 20
"""Smallest segment that Mooncake accepts, in bytes."""

_MASTER_EVICTS = "Mooncake's master evicts; set its eviction_high_watermark_ratio and eviction_ratio"

_LEAST_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"
"""Symbol of glog's variable with the lowest level that is logged."""

_FATAL = 3
_BUFFER_BYTES = 16 << 20
_EXIT_SECONDS = 10.0


def _metadata(address: str) -> str:
    if address != "P2PHANDSHAKE" and "://" not in address:
        raise ValueError("metadata is P2PHANDSHAKE or an address like http://host:8080/metadata or etcd://host:2379")
    return address


def _segment(size: int) -> int:
    if size < LEAST_SEGMENT:
        raise ValueError(f"segment_size {size} is below the {LEAST_SEGMENT >> 20} MiB of a segment; raise it")
    return size


class MooncakeOptions(BlockTierOptions, SharedOptions):
    """The options of the Mooncake tier.

    The stack also needs a ``revision``, because the pool keeps no documents.
    """

    unsupported: ClassVar[Mapping[str, str]] = {
        "capacity": "the pool is the sum of all machines' segments; segment_size is the part of this engine",
        "high_watermark": _MASTER_EVICTS,
        "low_watermark": _MASTER_EVICTS,
        "eviction": _MASTER_EVICTS,
        "ttl": "its blocks leave by eviction when room is needed",
        "compression": "reading from the pool is faster than zstd; use compression in an object store behind it",
    }

    type: str = "mooncake"
    """The tier's type in a stack file."""
    master: Annotated[str, Field(pattern=r"^[^\s/@:]+:\d{1,5}$|^\[[0-9a-fA-F:.]+\]:\d{1,5}$")]
    """Address of Mooncake's master, written like ``10.0.0.1:50051`` or ``[::1]:50051``."""
    metadata: Annotated[str, AfterValidator(_metadata)] = "P2PHANDSHAKE"
    """Address of Mooncake's metadata server; default "P2PHANDSHAKE": addresses are exchanged."""
    host: str | None = None
    """Name or address of this machine for the others; default: its address towards the master."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport of the blocks; default "tcp"."""
    devices: str = ""
    """Names of the RDMA devices, separated by commas; default: Mooncake's choice."""
    segment_size: Annotated[Size, AfterValidator(_segment)] | None = None
    """Memory that this engine gives to the pool, in bytes, at least 16 MiB; None (default): none.

    The memory is beside ``primary.capacity``, and its blocks are lost when the engine ends. Processes of
    ``mooncake_client`` can give memory that outlives engines.
    """
    replicas: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of machines that hold a block, if there are as many; default 1."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")] = "kv-tiering"
    """Beginning of all names in the pool, of letters, digits and ``._:/-``; default "kv-tiering".

    Several stacks can share a pool.
    """
    present_ttl: Duration = 30.0
    """Time for which a positive probe result stays valid; default 30."""
    lookup_deadline: Duration = 0.1
    """Seconds that a lookup may stay undecided before the answer is no; default 0.1."""
    load_deadline: Duration | None = 1.0
    """Seconds that a request waits for a load; default 1. Stores have ``deadline``.

    Blocks that arrive later are misses. The blocks in front of them that arrived in time count.
    """
    max_inflight: Transfers = 2
    """Number of calls, of up to 8 MiB each, at the same time (threads); default 2.

    Mooncake's client waits by polling: each call under way keeps a core busy.
    """
    request_timeout: Duration = Field(default=5.0, ge=1.0, le=30.0)
    """Seconds after which a call to the master or a transfer without progress fails; default 5.

    The longest is 30. The first Mooncake tier of a process decides for all. The variables MC_RPC_TIMEOUT_MS and
    MC_TCP_PROGRESS_TIMEOUT_SEC of the environment come first.
    """

    @property
    def location(self) -> str:
        """Master and prefix, as text for people."""
        return f"mooncake://{self.master} {self.prefix}"


HeaderPage = NDArray[np.uint8]
"""Headers of one call, in memory that the client may access, shape (PAGE_HEADERS, HEADER_BYTES)."""


class Connection:
    """One native client, from its setup to its end.

    Args:
        native: the native client, set up.

    Attributes:
        native: the native client.
    """

    def __init__(self, native: Any) -> None:
        self.native = native
        self._changed = threading.Condition()
        self._calls = 0
        self._ending = False
        self._ended = False
        self._pages: list[HeaderPage] = []

    def begin_call(self) -> bool:
        """Begin a call; return False if the client is ending."""
        with self._changed:
            if self._ending:
                return False
            self._calls += 1
            return True

    def end_call(self) -> None:
        """End a call."""
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def end(self, timeout: float = math.inf) -> bool:
        """End the client when no call is under way; return False if calls are, or the end takes too long."""
        end = time.monotonic() + timeout
        with self._changed:
            first, self._ending = not self._ending, True
            while self._calls if first else not self._ended:
                left = end - time.monotonic()
                if left <= 0:
                    self._ending = not first
                    return False
                self._changed.wait(None if math.isinf(left) else left)
            if not first:
                return True
        self.native.close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        return True

    @contextlib.contextmanager
    def page(self) -> Iterator[HeaderPage]:
        """Lend a page for headers to one call."""
        with self._changed:
            page = self._pages.pop() if self._pages else None
        if page is None:
            page = np.frombuffer(mmap.mmap(-1, PAGE_HEADERS * HEADER_BYTES), np.uint8).reshape(-1, HEADER_BYTES)
            register(self.native, page.ctypes.data, page.nbytes, "headers")
        yield page
        # After an exception, the page is not used again: something may still write to it.
        with self._changed:
            self._pages.append(page)


class PoolClient:
    """Connection of one tier to its pool, made when needed. Any thread may call.

    Args:
        options: options of the tier.
        rows: the primary rows, which the client may access directly.
        make: function that returns a native client that is not set up; default: Mooncake's.

    Raises:
        ConfigError: Mooncake's package is missing.
    """

    def __init__(self, options: MooncakeOptions, rows: memoryview, make: Callable[[], Any] | None = None) -> None:
        self._options = options
        array = np.asarray(rows)
        self._rows, self._row_bytes = int(array.ctypes.data), array.nbytes
        self._make = make or load(options)
        self._opening = threading.Lock()
        self._connection: Connection | None = None
        self._wanted = False

    def open(self) -> None:
        """Connect to the pool.

        Raises:
            StoreError: the master cannot be reached, or refuses this machine.
        """
        with self._opening:
            if not self._wanted:
                atexit.register(self._end_at_exit)
            self._wanted = True
            self._connect()

    def close(self) -> None:
        """End the connection when no call is under way; may be called twice."""
        with self._opening:
            self._wanted = False
            connection, self._connection = self._connection, None
            atexit.unregister(self._end_at_exit)
        if connection is not None:
            connection.end()

    @contextlib.contextmanager
    def use(self) -> Iterator[Connection]:
        """Lend the connection to one call.

        Raises:
            StoreError: there is no connection, and none can be made.
        """
        connection = self._connection
        if connection is None or not connection.begin_call():
            with self._opening:
                if not self._wanted:
                    raise PermanentStoreError(f"{self._options.location} is not open")
                connection = self._connect()
                if not connection.begin_call():
                    raise TemporaryStoreError(f"{self._options.location} is being closed")
        try:
            yield connection
        finally:
            connection.end_call()

    def end_transfers(self, connection: Connection) -> None:
        """End a connection, whose transfers may go on after their calls; blocks until none of them runs.

        The next call connects again.
        """
        with self._opening:
            if self._connection is connection:
                self._connection = None
        connection.end()

    def _connect(self) -> Connection:
        """Return the connection, made anew unless there is one."""
        if self._connection is not None:
            return self._connection
        options = self._options
        host = options.host or _address_towards(options)
        native = self._make()
        silence()
        code = native.setup(
            host,
            options.metadata,
            options.segment_size or 0,
            _BUFFER_BYTES,
            options.protocol,
            options.devices,
            options.master,
        )
        if code != 0:
            raise TemporaryStoreError(
                f"Mooncake's client cannot be set up (code {code}); look at the master {options.master}, at metadata, "
                f"protocol and devices, and whether this machine has the memory of segment_size"
            )
        connection = Connection(native)
        try:
            if self._row_bytes:
                register(native, self._rows, self._row_bytes, "the primary rows")
        except StoreError:
            connection.end()
            raise
        self._connection = connection
        return connection

    def _end_at_exit(self) -> None:
        """End the client before the interpreter does: the native threads would abort the process."""
        self._wanted = False
        connection = self._connection
        if connection is not None and not connection.end(_EXIT_SECONDS):
            logger.warning("%s: calls hang at the end of the process", self._options.location)


def load(options: MooncakeOptions) -> Callable[[], Any]:
    """Load Mooncake's client, and return the function that makes one.

    Raises:
        ConfigError: the package is missing.
    """
    settings = {
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_TIMEOUT_MS": str(round(options.request_timeout * 1000)),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(math.ceil(options.request_timeout)),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(math.ceil(options.request_timeout)),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(f"{NO_MOONCAKE}: {error}") from error
    make: Callable[[], Any] = MooncakeDistributedStore
    return make


def silence() -> None:
    """Keep Mooncake from writing about ten lines to standard error for each block that fails.

    The outcomes of the blocks have the same reasons. A level in the environment variable MC_LOG_LEVEL is kept.
    """
    if "MC_LOG_LEVEL" in os.environ:
        return
    with contextlib.suppress(OSError, ValueError):
        libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libglog" in line}
        for library in libraries:
            ctypes.c_int.in_dll(ctypes.CDLL(library), _LEAST_LEVEL).value = _FATAL


def register(native: Any, address: int, nbytes: int, what: str) -> None:
    """Let the native client access memory directly.

    Raises:
        PermanentStoreError: the client refuses the memory.
    """
    code = native.register_buffer(address, nbytes)
    if code != 0:
        raise PermanentStoreError(
            f"Mooncake cannot register {what} of {nbytes} bytes (code {code}); with RDMA, raise ulimit -l"
        )


def _address_towards(options: MooncakeOptions) -> str:
    """Return this machine's address on the way to the master; setup would wait much longer for a master.

    Raises:
        TemporaryStoreError: the master cannot be reached.
    """
    host, _, port = options.master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), options.request_timeout) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise TemporaryStoreError(f"Mooncake's master at {options.master} cannot be reached: {error}") from error
