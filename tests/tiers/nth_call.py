"""One call to a medium fails, and a life of a tier goes on: the calls of each medium, and the life."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from valkey import exceptions
from valkey.connection import Connection

from examples.valkey_server import ValkeyServer
from tests.fake_s3 import FakeS3, Trouble
from tests.tiers.local.rig import writes_checkpoint
from tiering.api.keys import OffloadKey
from tiering.api.metric import declared_metrics
from tiering.block_tier.definition import TierDefinition
from tiering.errors import (
    DeviceError,
    OutOfSpaceError,
    PermanentStoreError,
    ReadOnlyError,
    StoreError,
    TemporaryStoreError,
)
from tiering.medium.files import Files
from tiering.secondary.tier_stats import TierStats
from tiering.testing.clock import SettableClock
from tiering.testing.frames import random_bytes
from tiering.testing.tier_rig import REQUEST, TierRig
from tiering.testing.tier_tests import K
from tiers.local import LOCAL_TIER
from tiers.local.tier import LocalTier
from tiers.memory import MEMORY_TIER, MemoryStore, drop_medium
from tiers.object import S3_TIER
from tiers.valkey import VALKEY_TIER
from tiers.valkey import client as valkey_client
from tiers.valkey.client import read_value

BLOCK = 8 << 10
COMMON: dict[str, Any] = {
    "deadline": "10h",
    "load_deadline": "10h",
    "max_inflight": 2,
    "breaker": {"failures": 2, "probe_after": "10ms", "probe_max": "20ms"},
    "retries": {"attempts": 2, "backoff": "1ms"},
}
"""Options of every tier: time passes on command, so deadlines are long, and retries come at once."""
SHARED = {"lookup_deadline": "10h", "absent_ttl": "20ms"}


class Call(NamedTuple):
    """One call of a life: the ``number``-th ``operation`` on a ``subject``, from 0."""

    operation: str
    subject: str
    number: int


class Calls:
    """Counts the calls to a medium, and fails one of them, or all from one on."""

    def __init__(self) -> None:
        self.seen: list[Call] = []
        """The calls so far, in order."""
        self.failed = 0
        """Number of calls that failed."""
        self.healed = False
        """True after :meth:`heal`."""
        self._counts: Counter[tuple[str, str]] = Counter()
        self._target: Call | None = None
        self._fault = ""
        self._lasting = False
        self._lock = threading.Lock()

    def fail(self, target: Call, fault: str, *, lasting: bool) -> None:
        """Fail the call ``target`` with ``fault``.

        Args:
            target: the call.
            fault: kind of the fault.
            lasting: True if all later calls of the same kind fail too, until :meth:`heal`.
        """
        self._target, self._fault, self._lasting = target, fault, lasting

    def heal(self) -> None:
        """Fail no call from now on, and let none count."""
        self._target, self.healed = None, True

    def fault(self, operation: str, subject: str) -> str:
        """Count a call, and return the fault with which it fails; empty: none."""
        with self._lock:
            if self.healed:
                return ""
            number = self._counts[operation, subject]
            self._counts[operation, subject] += 1
            self.seen.append(Call(operation, subject, number))
            target = self._target
            if target is None or (operation, subject) != target[:2]:
                return ""
            if number != target.number and not (self._lasting and number > target.number):
                return ""
            self.failed += 1
            return self._fault


class Life(TierRig):
    """A rig whose blocks depend on the weights, which change with each reset."""

    weights = 1

    def content(self, key: OffloadKey) -> bytes:
        return random_bytes(self.size(key), int.from_bytes(key[:6], "big") * 8 + self.weights).tobytes()


class World(ABC):
    """A medium, tiers on it one after another, and the calls to it."""

    faults: ClassVar[Sequence[str]]
    """The kinds of faults of this medium."""
    definition: ClassVar[TierDefinition]
    in_process: ClassVar[bool] = True
    """False if the medium is behind connections, which servers and clients close when they like."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.clock = SettableClock()

    @abstractmethod
    def words(self) -> dict[str, Any]:
        """Return the options of the tier."""

    @abstractmethod
    def watched(self) -> Any:
        """Return a context in which the calls are counted, and fail."""

    def start(self, revision: str | None, weights: int) -> Life:
        """Return a tier that is in service."""
        options = self.definition.options.model_validate({**COMMON, **self.words()})
        rig = Life(
            lambda context: self.definition.build(options, context),
            group_bytes=(BLOCK,),
            num_rows=16,
            revision=revision,
            clock=self.clock,
        )
        rig.weights = weights
        rig.tier.open(self.clock() + 3600)
        rig.tier.on_new_request(REQUEST)
        self.back(rig)
        return rig

    def back(self, rig: Life) -> None:
        """Let time pass until the tier serves and stores; a fault that lasts ends after a while."""
        patience = iter(range(20))

        def serves() -> bool:
            stats = rig.tier.get_stats()
            if stats.available and stats.writable:
                return True
            self.clock.advance(0.5)
            if next(patience, None) is None:
                self.calls.heal()
            return False

        rig.wait(serves)

    def live(self) -> None:
        """Live the life of all tests here: opening, stores, resets of both kinds, and a restart.

        Raises:
            AssertionError: a promise was broken.
        """
        first = self.start(None, 1)
        try:
            stored = self._store_and_load(first, K[:2])
            self._reset(first, None, stored)
            stored = self._store_and_load(first, K[1:3])
            self._reset(first, "step-3", stored)
            stored = self._store_and_load(first, K[:3])
            self.settle(first)
        finally:
            assert first.close()
        self._every_job_was_reported_once(first)
        second = self.start("step-3", first.weights)
        try:
            found = self._finds(second, stored)
            assert found == stored or trouble(first) + trouble(second), "a stored block is gone, and nothing is counted"
            self.calls.heal()
            self.back(second)
            second.wait(lambda: self._store_and_load(second, K[3:5]) == K[3:5])
            assert self._finds(second, [*found, *K[3:5]]) == [*found, *K[3:5]]
        finally:
            assert second.close()
        self._every_job_was_reported_once(second)

    def settle(self, rig: Life) -> None:
        """Let the work in the background be done that a shutdown would leave out."""

    def _store_and_load(self, rig: Life, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        stored = rig.stored(rig.submit_store(keys))
        rig.lookup([*keys, K[9]])
        rig.load(keys, 8)
        self.back(rig)
        return stored

    def _reset(self, rig: Life, revision: str | None, old: Sequence[OffloadKey]) -> None:
        rig.tier.reset(self.clock() + 3600, revision)
        rig.weights += 1
        assert rig.load(old, 8) == [], "a block from before the reset"
        self.back(rig)
        assert rig.load(old, 8) == [], "a block from before the reset"

    def _finds(self, rig: Life, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of ``keys`` that are found; a tier that has just been opened may still be looking."""
        left = iter(range(50))

        def found() -> bool:
            self.clock.advance(0.1)
            return rig.lookup(keys) == len(keys) or next(left, None) is None

        rig.wait(found)
        return [key for key in keys if rig.load([key], 8)]

    def _every_job_was_reported_once(self, rig: Life) -> None:
        rig.results += rig.tier.get_finished()
        assert dict(rig.reports()) == dict.fromkeys(range(1, rig._jobs + 1), 1)


def trouble(rig: TierRig) -> int:
    """Return the sum of the counters of trouble."""
    stats = rig.tier.get_stats()
    return sum(int(getattr(stats, metric.field)) for metric in declared_metrics(TierStats) if metric.is_trouble)


# ----------------------------------------------------------------------------------------------------------- local


_KINDS = (
    ("lock", r"lock"),
    ("epoch", r"documents/epoch-"),
    ("namespace", r"documents/namespace-"),
    ("lease", r"documents/lease-"),
    ("document", r"documents/."),
    ("documents", r"documents"),
    ("checkpoint", r"checkpoint"),
    ("mark", r"written-"),
    ("segment", r"slots-"),
    ("directory", r"$"),
)
_NAMED = ("open", "stat", "lstat", "mkdir", "rmdir", "unlink", "scandir", "listdir", "statvfs", "rename")
_DESCRIBED = ("close", "fstat", "pread", "preadv", "pwrite", "pwritev", "ftruncate", "fsync", "fdatasync")
_MOVES = frozenset({"pread", "preadv", "pwrite", "pwritev"})
_SYNCS = frozenset({"fsync", "fdatasync"})
"""Operations that only count and fail: no life loses power, and most of its time would go into these."""


class LocalWorld(World):
    """The local tier over the functions of ``os``."""

    faults = ("EIO", "ENOSPC", "EROFS", "EACCES", "ETIMEDOUT", "short")
    definition = LOCAL_TIER

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._directory = directory / "kv"
        self._patch = patch
        self._names: dict[int, str] = {}

    def words(self) -> dict[str, Any]:
        size = {"capacity": 16 * (BLOCK + 4096), "segment_size": 16 * (BLOCK + 4096)}
        return {"type": "local", "path": str(self._directory), "durability": "fsync", **size}

    def settle(self, rig: Life) -> None:
        tier = rig.tier
        assert isinstance(tier, LocalTier)
        tier.checkpoints.request()

        def written() -> bool:
            self.clock.advance(0.5)
            return not writes_checkpoint(tier)

        rig.wait(written)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._patch.context() as patch:
            for name in (*_NAMED, *_DESCRIBED):
                real = (lambda fd: None) if name in _SYNCS else getattr(os, name)
                patch.setattr(os, name, self._counted(name, real, 1 if name == "rename" else 0))
            patch.setattr(fcntl, "flock", self._counted("flock", fcntl.flock, 0))
            patch.setattr(Files, "pwritev", staticmethod(os.pwritev))
            patch.setattr(Files, "preadv", staticmethod(os.preadv))
            allocate = self._counted("allocate", lambda fd, files, length: _ALLOCATE(files, fd, length), 0)
            patch.setattr(Files, "allocate", lambda files, fd, length: allocate(fd, files, length))
            yield

    def _counted(self, name: str, real: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*words: Any, **more: Any) -> Any:
            where = self._where(words[at]) if len(words) > at else None
            if where is None:
                return real(*words, **more)
            fault = self.calls.fault(name, where)
            if fault == "short" and name in _MOVES:
                return real(words[0], _half(words[1]), *words[2:])
            if name == "close":
                self._names.pop(words[0], None)
                real(*words)
            if fault and fault != "short":
                number = getattr(errno, fault)
                raise OSError(number, os.strerror(number))
            if name == "close":
                return None
            result = real(*words, **more)
            if name == "open":
                self._names[result] = where
            return result

        return call

    def _where(self, place: Any) -> str | None:
        if isinstance(place, int):
            return self._names.get(place)
        path, root = os.fspath(place), str(self._directory)
        if not isinstance(path, str) or not (path == root or path.startswith(root + "/")):
            return None
        return next((kind for kind, pattern in _KINDS if re.match(pattern, path[len(root) + 1 :])), "other")


_ALLOCATE = Files.allocate


def _half(data: Any) -> Any:
    """Return the first half of the bytes or buffers of a write or read, as if it were short."""
    if isinstance(data, int):
        return max(1, data // 2)
    if isinstance(data, bytes):
        return data[: max(1, len(data) // 2)]
    left, parts = max(1, sum(map(len, data)) // 2), []
    for part in data:
        parts.append(part[:left])
        left -= len(parts[-1])
        if not left:
            break
    return parts


# ---------------------------------------------------------------------------------------------------------- memory


_STORE_ERRORS: dict[str, StoreError] = {
    "EIO": DeviceError("injected"),
    "ENOSPC": OutOfSpaceError("injected"),
    "EROFS": ReadOnlyError("injected"),
    "EACCES": PermanentStoreError("injected"),
    "ETIMEDOUT": TemporaryStoreError("injected"),
}


class MemoryWorld(World):
    """The memory tier over the methods of its store; documents are named by their kinds."""

    faults = tuple(_STORE_ERRORS)
    definition = MEMORY_TIER

    def __init__(self, name: str, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._name, self._patch = name, patch
        drop_medium(name)

    def words(self) -> dict[str, Any]:
        return {"type": "memory", "capacity": 8 * (BLOCK + 128), "share": self._name}

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._patch.context() as patch:
            for name in ("put_one", "get_one", "read_document", "write_document", "list_documents", "remove_document"):
                patch.setattr(MemoryStore, name, self._counted(name, getattr(MemoryStore, name)))
            yield
        drop_medium(self._name)

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: MemoryStore, about: Any, *words: Any) -> Any:
            fault = self.calls.fault(name, about.partition("-")[0] if isinstance(about, str) else "block")
            if fault:
                raise _STORE_ERRORS[fault]
            return real(store, about, *words)

        return call


# ---------------------------------------------------------------------------------------------------------- object


class ObjectWorld(World):
    """The object tier over HTTP, whose requests fail at a server in this process."""

    faults = ("reset", "lost answer", "403", "503", "507", "short")
    definition = S3_TIER
    in_process = False

    def __init__(self, server: FakeS3, number: int) -> None:
        super().__init__()
        self._server, self._prefix = server, f"life-{number}"

    def words(self) -> dict[str, Any]:
        place = {"bucket": self._server.bucket, "endpoint_url": self._server.endpoint, "prefix": self._prefix}
        return {"type": "s3", **place, **SHARED}

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._server.intercept = self._fault
        yield
        self._server.intercept = None
        with self._server.lock:
            self._server.objects.clear()

    def _fault(self, method: str, name: str) -> int | Trouble | None:
        subject = name.removeprefix(f"{self._prefix}/").removeprefix("documents/")
        fault = self.calls.fault(method, re.split("[-/]", subject)[0] or "bucket")
        return {"reset": Trouble.RESET, "lost answer": Trouble.LOST_ANSWER, "short": Trouble.CUT_BODY, "": None}.get(
            fault, int(fault) if fault.isdecimal() else None
        )


# ---------------------------------------------------------------------------------------------------------- Valkey


_REPLIES: dict[str, Exception] = {
    "full": exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    "read-only": exceptions.ReadOnlyError("You can't write against a read only replica."),
    "forbidden": exceptions.NoPermissionError("this user has no permissions"),
    "reset": exceptions.ConnectionError("Connection reset by peer"),
    "timeout": exceptions.TimeoutError("Timeout reading from socket"),
}


class ValkeyWorld(World):
    """The Valkey tier over the client library's connections."""

    faults = (*_REPLIES, "lost answer")
    definition = VALKEY_TIER
    in_process = False

    def __init__(self, server: ValkeyServer, number: int, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._server, self._prefix, self._patch = server, f"life-{number}", patch

    def words(self) -> dict[str, Any]:
        return {"type": "valkey", "url": self._server.url, "prefix": self._prefix, **SHARED}

    @contextmanager
    def watched(self) -> Iterator[None]:
        send, read = Connection.send_packed_command, Connection.read_response
        lost: set[int] = set()

        def sending(connection: Connection, command: Any, check_health: bool = True) -> Any:
            packed = b"".join(bytes(part[:200]) for part in ([command] if isinstance(command, bytes) else command))
            words = packed.split(b"\r\n")
            found = re.search(rb"/(blocks|leases|documents)(?:\r\n\$\d+\r\n([a-z]+)-)?", packed)
            subject = "server" if found is None else (found[2] or found[1]).decode()
            fault = self.calls.fault(words[2].decode(), subject)
            if fault in _REPLIES:
                raise _REPLIES[fault]
            if fault:
                lost.add(id(connection))
            return send(connection, command, check_health)

        def reading(connection: Connection, *words: Any, **more: Any) -> Any:
            reply = read(connection, *words, **more)
            if id(connection) in lost:
                lost.discard(id(connection))
                raise exceptions.ConnectionError("Connection closed by server.")
            return reply

        def reading_value(connection: Connection, parts: Any, end: float) -> Any:
            length = read_value(connection, parts, end)
            if id(connection) in lost:
                lost.discard(id(connection))
                raise exceptions.ConnectionError("Connection closed by server.")
            return length

        with self._patch.context() as patch:
            patch.setattr(Connection, "send_packed_command", sending)
            patch.setattr(Connection, "read_response", reading)
            patch.setattr(valkey_client, "read_value", reading_value)
            yield
