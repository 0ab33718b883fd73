"""The parts of a block tier that write and read hints: hot keys, descriptions and speeds."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Generic, TypeVar

from tiering.api.descriptions import Described, Description, TierDescriptions
from tiering.api.keys import OffloadKey
from tiering.api.namespace import Namespace
from tiering.block_tier.parts import TierParts
from tiering.epochs import described, speeds
from tiering.epochs.hot_keys import MAX_BYTES, PackedRuns, hot_document, hot_documents, pack, parse, runs_of
from tiering.errors import StoreError
from tiering.medium.side import IoTask
from tiering.runtime.forks import inert_in_children
from tiering.runtime.hardware import hardware
from tiering.secondary.contract import MAX_ENGINES, TierHotKeys
from tiering.secondary.speeds import Speeds, TierSpeeds

_log = logging.getLogger("kv_tiering.tier")
_T = TypeVar("_T")

MOST_READ = 128
"""Largest number of documents that are read to find :data:`MAX_ENGINES` that count.

Each engine that has ended leaves a document, which stays until ``gc`` or a lifecycle rule removes it.
"""

CAPACITY_PART = 64
"""Quotient of the medium's capacity and the largest size of all descriptions together."""


class HintDocuments(ABC, Generic[_T]):
    """Writes and reads documents of hints on the I/O side; owned by the scheduler's thread.

    One writing and one reading run at a time. What was read counts in the epoch in which the reading began.

    Args:
        parts: parts of the tier.
        epoch: function that returns the namespace in the epoch that the tier serves; None: it does not serve yet.
        publishes: function that returns True if others could load what this engine stores.
    """

    task: ClassVar[str]
    """Name of the tasks."""
    acts: ClassVar[tuple[str, str]]
    """The writing and the reading, for log lines."""

    def __init__(self, parts: TierParts, epoch: Callable[[], Namespace | None], publishes: Callable[[], bool]) -> None:
        self.tier, self._shared = parts.context.name, parts.index.shared
        self._store, self._io, self._stats = parts.store, parts.io, parts.stats
        self._epoch = epoch
        self._publishes = publishes
        self._writing = self._reading = self._failed = False
        self._found: tuple[Namespace, list[_T]] | None = None

    @property
    def writing(self) -> bool:
        """True while documents are being written."""
        return self._writing

    @abstractmethod
    def _count(self, written: int, refused: int) -> None:
        """Count documents that were written, and those that were read and do not count."""

    def _write(self, write: Callable[[], int]) -> None:
        """Run ``write``, which returns the number of documents that it has written."""
        self._writing = True
        self._io.run(IoTask(self.task, write, self._written))

    def _written(self, written: int | None, error: BaseException | None) -> None:
        self._writing = False
        self._count(written or 0, 0)
        if error is not None and not self._failed:
            _log.warning("tier %s: cannot %s: %s", self.tier, self.acts[0], error)
        self._failed = error is not None

    def _gather(self, read: Callable[[Namespace], Iterable[_T | None]]) -> list[_T] | None:
        """Return what was read in the present epoch; begin to read, and return None, if that is not known.

        ``read`` returns the content of each document, None for one that does not count.
        """
        namespace = self._epoch()
        if namespace is None:
            return None
        if self._found is not None:
            (found_in, found), self._found = self._found, None
            if found_in == namespace:
                return found
        if not self._reading:
            self._reading = True
            ended = partial(self._read, namespace)
            self._io.run(IoTask(self.task, lambda: list(read(namespace)), ended, lookup=self._shared))
        return None

    def _read(self, namespace: Namespace, read: Sequence[_T | None] | None, error: BaseException | None) -> None:
        self._reading = False
        found = [content for content in read or () if content is not None]
        self._found = namespace, found
        self._count(0, len(read or ()) - len(found))
        if error is not None:
            _log.warning("tier %s: cannot %s: %s", self.tier, self.acts[1], error)

    def _parsed(self, name: str, longest: int, parse: Callable[[bytes], _T | None]) -> Iterator[_T | None]:
        """Yield the content of one document: None if it does not count, nothing at all if it is gone."""
        try:
            data = self._store.read_document(name)
            if data is None:
                return
            content = parse(bytes(data)) if len(data) <= longest else None
        except (StoreError, ValueError) as error:
            _log.debug("tier %s: %s", self.tier, error)
            content = None
        yield content


class HotKeys(HintDocuments[PackedRuns], TierHotKeys):
    """Publishes and gathers hot keys (:mod:`tiering.epochs.hot_keys`)."""

    task = "hot-keys"
    acts = ("publish the keys for a warm start", "read the keys for a warm start")

    def __init__(self, parts: TierParts, epoch: Callable[[], Namespace | None], publishes: Callable[[], bool]) -> None:
        super().__init__(parts, epoch, publishes)
        # A medium of one process has one document, which the next process replaces.
        self._engine = f"{socket.gethostname()} {parts.context.replica} {os.getpid()}" if self._shared else ""
        self._next: Sequence[Sequence[OffloadKey]] | None = None
        """Prefixes to publish when the present writing has ended."""

    def _count(self, written: int, refused: int) -> None:
        self._stats.hot_keys_written += written
        self._stats.hot_keys_refused += refused

    def publish(self, chains: Sequence[Sequence[OffloadKey]]) -> None:
        namespace = self._epoch()
        if self._writing:
            self._next = chains
        elif namespace is not None and self._publishes():
            self._write(partial(self._publish, namespace, chains))

    def _publish(self, namespace: Namespace, chains: Sequence[Sequence[OffloadKey]]) -> int:
        data = pack(namespace, time.time(), runs_of(chains))
        if data:
            self._store.write_document(hot_document(namespace, self._engine), data)
        return bool(data)

    def _written(self, written: int | None, error: BaseException | None) -> None:
        super()._written(written, error)
        following, self._next = self._next, None
        if following is not None:
            self.publish(following)

    def gather(self) -> Sequence[PackedRuns] | None:
        return self._gather(self._of_engines)

    def _of_engines(self, namespace: Namespace) -> Iterator[PackedRuns | None]:
        names, found = sorted(self._store.list_documents(hot_documents(namespace))), 0
        for name in random.sample(names, min(len(names), MOST_READ)):
            for runs in self._parsed(name, MAX_BYTES, lambda data: parse(data, namespace, time.time())):
                yield runs
                found += runs is not None
            if found == MAX_ENGINES:
                break


class SpeedDocuments(HintDocuments[Speeds], TierSpeeds):
    """Publishes and gathers speeds (:mod:`tiering.epochs.speeds`)."""

    task = "speeds"
    acts = ("publish the speeds of this engine", "read the speeds of the last engine")

    def _count(self, written: int, refused: int) -> None:
        """Count nothing: an engine that finds no valid document begins with the assumed speeds."""

    def publish(self, found: Speeds) -> None:
        namespace = self._epoch()
        if namespace is not None and not self._writing and self._publishes():
            self._write(partial(self._publish, namespace, found))

    def _publish(self, namespace: Namespace, found: Speeds) -> int:
        data = speeds.pack(namespace, hardware(), time.time(), found)
        self._store.write_document(speeds.speeds_document(namespace, hardware()), data)
        return 1

    def gather(self) -> Sequence[Speeds] | None:
        return self._gather(self._of_namespace)

    def _of_namespace(self, namespace: Namespace) -> Iterator[Speeds | None]:
        name = speeds.speeds_document(namespace, hardware())
        yield from self._parsed(
            name, speeds.DOCUMENT_BYTES, lambda data: speeds.parse(data, namespace, hardware(), time.time())
        )


class Descriptions(HintDocuments[Described[object]], TierDescriptions):
    """Writes and reads descriptions of the blocks (:mod:`tiering.epochs.described`)."""

    task = "describe"
    acts = ("write the descriptions of its blocks", "read the descriptions of its blocks")

    def __init__(self, parts: TierParts, epoch: Callable[[], Namespace | None], publishes: Callable[[], bool]) -> None:
        super().__init__(parts, epoch, publishes)
        largest = (parts.options.capacity_bytes or 0) // CAPACITY_PART // described.MAX_BYTES
        self.slots = max(2, min(described.MOST_SLOTS, largest))
        inert_in_children(self, TierDescriptions)

    def _count(self, written: int, refused: int) -> None:
        self._stats.descriptions_written += written
        self._stats.descriptions_refused += refused

    def write(self, documents: Sequence[Description]) -> bool:
        namespace = self._epoch()
        if namespace is None or self._writing or not self._publishes():
            return False
        self._write(partial(self._describe, namespace, documents))
        return True

    def _describe(self, namespace: Namespace, documents: Sequence[Description]) -> int:
        for slot, number, content in documents:
            data = described.pack(namespace, number, content()[: described.MAX_CONTENT])
            self._store.write_document(described.described_document(namespace, slot), data)
        return len(documents)

    def gather(self, read: Callable[[bytes], _T]) -> Sequence[Described[_T]] | None:
        return self._gather(partial(self._of_slots, read))  # type: ignore[return-value]

    def _of_slots(self, read: Callable[[bytes], object], namespace: Namespace) -> Iterator[Described[object] | None]:
        present = set(self._store.list_documents(f"{described.DESCRIBED}{namespace.directory}-"))
        for slot in range(described.MOST_SLOTS):
            if (name := described.described_document(namespace, slot)) in present:
                yield from self._parsed(name, described.MAX_BYTES, partial(_described, slot, namespace, read))


def _described(
    slot: int, namespace: Namespace, read: Callable[[bytes], object], data: bytes
) -> Described[object] | None:
    parsed = described.parse(data, namespace)
    return None if parsed is None else Described(slot, parsed[0], read(parsed[1]))
