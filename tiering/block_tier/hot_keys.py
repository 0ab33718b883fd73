"""The part of a block tier that writes and reads hot keys (:mod:`tiering.epochs.hot_keys`)."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections.abc import Callable, Sequence

from tiering.api.keys import OffloadKey
from tiering.api.namespace import Namespace
from tiering.block_tier.parts import TierParts
from tiering.epochs.hot_keys import MAX_BYTES, PackedRuns, hot_document, hot_documents, pack, parse, runs_of
from tiering.errors import StoreError
from tiering.medium.side import IoTask
from tiering.secondary.contract import MAX_ENGINES, TierHotKeys

_log = logging.getLogger("kv_tiering.tier")

MOST_READ = 128
"""Largest number of documents that are read to find :data:`MAX_ENGINES` that count.

Each engine that has ended leaves a document, which stays until ``gc`` or a lifecycle rule removes it.
"""


class HotKeys(TierHotKeys):
    """Publishes and gathers hot keys on the I/O side; owned by the scheduler's thread.

    Args:
        parts: parts of the tier.
        epoch: function that returns the namespace in the epoch that the tier serves; None: it does not serve yet.
        publishes: function that returns True if others could load what this engine stores.
        wall: function that returns seconds since 1970; default: ``time.time``.
    """

    def __init__(
        self,
        parts: TierParts,
        epoch: Callable[[], Namespace | None],
        publishes: Callable[[], bool],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._name, self._shared = parts.context.name, parts.index.shared
        self._store, self._io, self._stats = parts.store, parts.io, parts.stats
        self._epoch = epoch
        self._publishes = publishes
        self._wall = wall
        # A medium of one process has one document, which the next process replaces.
        self._engine = f"{socket.gethostname()} {parts.context.replica} {os.getpid()}" if self._shared else ""
        self.writing = False
        """True while a document is being written."""
        self._next: Sequence[Sequence[OffloadKey]] | None = None
        """Prefixes to publish when the present writing has ended."""
        self._reading = False
        self._failed = False
        self._found: tuple[Namespace, list[PackedRuns]] | None = None

    def publish(self, chains: Sequence[Sequence[OffloadKey]]) -> None:
        namespace = self._epoch()
        if self.writing:
            self._next = chains
        elif namespace is not None and self._publishes():
            self._write(namespace, chains)

    def _write(self, namespace: Namespace, chains: Sequence[Sequence[OffloadKey]]) -> None:
        def write() -> int:
            data = pack(namespace, self._wall(), runs_of(chains))
            if data:
                self._store.write_document(hot_document(namespace, self._engine), data)
            return bool(data)

        def ended(written: bool | None, error: BaseException | None) -> None:
            self.writing = False
            self._stats.hot_keys_written += written or 0
            if error is not None and not self._failed:
                _log.warning("tier %s: cannot publish the keys for a warm start: %s", self._name, error)
            self._failed = error is not None
            following, self._next = self._next, None
            if following is not None:
                self.publish(following)

        self.writing = True
        self._io.run(IoTask("hot-keys", write, ended))

    def gather(self) -> Sequence[PackedRuns] | None:
        namespace = self._epoch()
        if namespace is None:
            return None
        if self._found is not None:
            (found_in, found), self._found = self._found, None
            if found_in == namespace:
                return found
        if not self._reading:
            self._read(namespace)
        return None

    def _read(self, namespace: Namespace) -> None:
        def read() -> tuple[list[PackedRuns], int]:
            found: list[PackedRuns] = []
            refused = 0
            names = sorted(self._store.list_documents(hot_documents(namespace)))
            for name in random.sample(names, min(len(names), MOST_READ)):
                runs = self._read_one(name, namespace)
                if runs is None:
                    refused += 1
                    continue
                found.append(runs)
                if len(found) == MAX_ENGINES:
                    break
            return found, refused

        def ended(result: tuple[list[PackedRuns], int] | None, error: BaseException | None) -> None:
            self._reading = False
            found, refused = result or ([], 0)
            self._found = namespace, found
            self._stats.hot_keys_refused += refused
            if error is not None:
                _log.warning("tier %s: cannot read the keys for a warm start: %s", self._name, error)

        self._reading = True
        self._io.run(IoTask("hot-keys", read, ended, lookup=self._shared))

    def _read_one(self, name: str, namespace: Namespace) -> PackedRuns | None:
        """Return the runs of one document; None if it cannot be read or does not count."""
        try:
            data = self._store.read_document(name)
        except StoreError as error:
            _log.debug("tier %s: %s", self._name, error)
            return None
        return None if data is None or len(data) > MAX_BYTES else parse(bytes(data), namespace, self._wall())
