"""The part of a block tier that writes and reads descriptions (:mod:`tiering.epochs.described`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from tiering.api.descriptions import Described, Description, TierDescriptions
from tiering.api.namespace import Namespace
from tiering.block_tier.parts import TierParts
from tiering.epochs.described import (
    DESCRIBED,
    MAX_BYTES,
    MAX_CONTENT,
    MOST_SLOTS,
    described_document,
    pack,
    parse,
)
from tiering.errors import StoreError
from tiering.medium.side import IoTask
from tiering.runtime.forks import inert_in_children

_log = logging.getLogger("kv_tiering.tier")
_T = TypeVar("_T")

CAPACITY_PART = 64
"""Quotient of the medium's capacity and the largest size of all documents together."""


class Descriptions(TierDescriptions):
    """Writes and reads descriptions on the I/O side; owned by the scheduler's thread.

    Args:
        parts: parts of the tier.
        epoch: function that returns the namespace in the epoch that the tier serves; None: it does not serve yet.
        publishes: function that returns True if the next process could load what this engine stores.
    """

    def __init__(self, parts: TierParts, epoch: Callable[[], Namespace | None], publishes: Callable[[], bool]) -> None:
        self.tier, self._store, self._io, self._stats = parts.context.name, parts.store, parts.io, parts.stats
        self._epoch = epoch
        self._publishes = publishes
        self.slots = max(2, min(MOST_SLOTS, (parts.options.capacity_bytes or 0) // CAPACITY_PART // MAX_BYTES))
        self._writing = False
        self._failed = False
        self._reading = False
        self._found: tuple[Namespace, list[Described[object]]] | None = None
        inert_in_children(self, TierDescriptions)

    @property
    def writing(self) -> bool:
        return self._writing

    def write(self, documents: Sequence[Description]) -> bool:
        namespace = self._epoch()
        if namespace is None or self._writing or not self._publishes():
            return False
        held = namespace

        def write() -> int:
            for slot, number, content in documents:
                data = pack(held, number, content()[:MAX_CONTENT])
                self._store.write_document(described_document(held, slot), data)
            return len(documents)

        def ended(written: int | None, error: BaseException | None) -> None:
            self._writing = False
            self._stats.descriptions_written += written or 0
            if error is not None and not self._failed:
                _log.warning("tier %s: cannot write the descriptions of its blocks: %s", self.tier, error)
            self._failed = error is not None

        self._writing = True
        self._io.run(IoTask("describe", write, ended))
        return True

    def gather(self, read: Callable[[bytes], _T]) -> Sequence[Described[_T]] | None:
        namespace = self._epoch()
        if namespace is None:
            return None
        if self._found is not None:
            (found_in, found), self._found = self._found, None
            if found_in == namespace:
                return found  # type: ignore[return-value]
        if not self._reading:
            self._read(namespace, read)
        return None

    def _read(self, namespace: Namespace, read: Callable[[bytes], object]) -> None:
        def run() -> tuple[list[Described[object]], int]:
            found: list[Described[object]] = []
            refused = 0
            present = set(self._store.list_documents(f"{DESCRIBED}{namespace.directory}-"))
            for slot in range(MOST_SLOTS):
                name = described_document(namespace, slot)
                if name not in present:
                    continue
                described = self._read_one(name, slot, namespace, read)
                if described is None:
                    refused += 1
                else:
                    found.append(described)
            return found, refused

        def ended(result: tuple[list[Described[object]], int] | None, error: BaseException | None) -> None:
            self._reading = False
            found, refused = result or ([], 0)
            self._found = namespace, found
            self._stats.descriptions_refused += refused
            if error is not None:
                _log.warning("tier %s: cannot read the descriptions of its blocks: %s", self.tier, error)

        self._reading = True
        self._io.run(IoTask("described", run, ended))

    def _read_one(
        self, name: str, slot: int, namespace: Namespace, read: Callable[[bytes], object]
    ) -> Described[object] | None:
        """Return one document; None if it cannot be read or does not count."""
        try:
            data = self._store.read_document(name)
            parsed = None if data is None or len(data) > MAX_BYTES else parse(bytes(data), namespace)
            return None if parsed is None else Described(slot, parsed[0], read(parsed[1]))
        except (StoreError, ValueError) as error:
            _log.debug("tier %s: %s", self.tier, error)
            return None
