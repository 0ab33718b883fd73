"""Administration of epochs: the beginning of new common ones, and the collection of abandoned ones."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tiering.api.namespace import Namespace, fingerprint_of
from tiering.errors import ConfigError
from tiering.secondary.service.common_epoch import begin_common
from tiering.secondary.service.epoch import EPOCHS, LEASES, PARAMETERS, EpochDocument
from tiers.s3.admin import DELETE_BATCH, BlockLister, Collected

if TYPE_CHECKING:
    from obstore import ObjectMeta

EPOCH_GRACE = 86400.0
"""Age in seconds below which blocks and leases are kept in any case. Engines renew leases every hour."""

_PLACE = re.compile(r"blocks/([0-9a-f]{32})/([0-9a-f]{32})/")


class EpochLister(BlockLister, Protocol):
    """The part of :class:`tiers.s3.store.S3Store` that collecting epochs needs."""

    def list_document_objects(self) -> Iterator[Sequence[ObjectMeta]]: ...

    def read_document(self, name: str) -> bytes | None: ...


class EpochStore(EpochLister, Protocol):
    """The part of :class:`tiers.s3.store.S3Store` that beginning epochs needs."""

    def create_document(self, name: str, data: bytes) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class BegunEpoch:
    """A common epoch that has begun."""

    namespace: str
    """The namespace, 32 hex digits."""
    parameters: str
    """The namespace's parameters, as JSON."""
    epoch: bytes
    """The epoch."""


def begin_epochs(store: EpochStore, namespaces: Collection[str] | None = None) -> list[BegunEpoch]:
    """Begin new common epochs: no process looks up blocks that were stored in the older ones.

    Running processes notice within a minute; their CPU tiers and disks keep their blocks until a ``reset_cache``.
    Processes in a private epoch, or in that of a revision, stay there. The blocks of the older epochs are collected by
    :func:`collect_epochs` after its grace time.

    Args:
        store: The open store.
        namespaces: The namespaces, as 32 hex digits each (default: all in the bucket).

    Raises:
        StoreError: A document cannot be read or written. The epochs that were begun before stay.
        ConfigError: The bucket lacks one of ``namespaces``.
    """
    begun: list[BegunEpoch] = []
    found = dict(_parameters(store))
    if missing := set(namespaces or ()) - found.keys():
        raise ConfigError(
            f"namespace {min(missing)} is not in this bucket; it holds {', '.join(sorted(found)) or 'none'}"
        )
    for directory, parameters in sorted(found.items()):
        if namespaces is None or directory in namespaces:
            common = begin_common(store, Namespace(parameters))
            if common.epoch is not None:
                begun.append(BegunEpoch(directory, parameters, common.epoch))
    return begun


def _parameters(store: EpochStore) -> Iterator[tuple[str, str]]:
    """Yield each namespace of the bucket with its parameters; damaged documents are left out."""
    for objects in store.list_document_objects():
        for item in objects:
            name = item["path"].rpartition("/")[2]
            if not name.startswith(PARAMETERS):
                continue
            content = store.read_document(name)
            text = "" if content is None else content.decode(errors="replace")
            directory = Namespace(text).directory
            if name == f"{PARAMETERS}{directory}.json":
                yield directory, text


def collect_epochs(
    store: EpochLister, *, grace: float = EPOCH_GRACE, now: datetime.datetime | None = None, dry_run: bool = False
) -> Collected:
    """Remove the blocks of epochs that no epoch document and no fresh lease names.

    The service's clock decides how old a block or lease is. An engine that returns to an epoch whose blocks were
    removed finds misses. Blocks that were removed before an error stay removed.

    Args:
        store: The open store to collect.
        grace: Age in seconds below which blocks and leases are kept (default: a day).
        now: The present time (default: this machine's clock).
        dry_run: Count only, remove nothing (default: False).

    Raises:
        StoreError: The bucket cannot be listed, or blocks cannot be deleted.
    """
    oldest_kept = (now or datetime.datetime.now(datetime.UTC)) - datetime.timedelta(seconds=grace)
    used = _epochs_in_use(store, oldest_kept)
    blocks = total = removed = removed_bytes = 0
    batch: list[str] = []
    for objects in store.list_objects():
        for item in objects:
            blocks += 1
            total += item["size"]
            place = _PLACE.search(item["path"])
            if place is None or place.groups() in used or item["last_modified"] >= oldest_kept:
                continue
            removed += 1
            removed_bytes += item["size"]
            batch.append(item["path"])
    if not dry_run:
        for start in range(0, len(batch), DELETE_BATCH):
            store.delete_objects(batch[start : start + DELETE_BATCH])
    return Collected(blocks, total, removed, removed_bytes)


def _epochs_in_use(store: EpochLister, oldest_kept: datetime.datetime) -> set[tuple[str, ...]]:
    """Return (namespace, fingerprint), in hexadecimal, of each epoch in use.

    Of the numbered epoch documents of a namespace, the highest valid one counts.
    """
    used: set[tuple[str, ...]] = set()
    common: dict[bytes, tuple[int, bytes]] = {}
    for objects in store.list_document_objects():
        for item in objects:
            name = item["path"].rpartition("/")[2]
            if name.startswith(EPOCHS):
                content = store.read_document(name)
                document = None if content is None else EpochDocument.parse(content)
                number = name.removeprefix(EPOCHS).partition("-")[2] or "0"
                if document is not None and number.isdecimal():
                    newest = (int(number), document.epoch)
                    common[document.base] = max(newest, common.get(document.base, newest))
            elif name.startswith(LEASES) and item["last_modified"] >= oldest_kept:
                used.add(tuple(name.removeprefix(LEASES).split("-")))
    used.update((base.hex(), fingerprint_of(base, epoch).hex()) for base, (_, epoch) in common.items())
    return used
