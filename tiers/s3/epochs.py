"""Collection of blocks of abandoned epochs, which have no epoch document and no fresh lease."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from tiering.api.namespace import fingerprint_of
from tiering.secondary.service.epoch import EPOCHS, LEASES, EpochDocument
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
    """Return (namespace, fingerprint), in hexadecimal, of each epoch in use."""
    used: set[tuple[str, ...]] = set()
    for objects in store.list_document_objects():
        for item in objects:
            name = item["path"].rpartition("/")[2]
            if name.startswith(EPOCHS):
                content = store.read_document(name)
                document = None if content is None else EpochDocument.parse(content)
                if document is not None:
                    used.add((document.base.hex(), fingerprint_of(document.base, document.epoch).hex()))
            elif name.startswith(LEASES) and item["last_modified"] >= oldest_kept:
                used.add(tuple(name.removeprefix(LEASES).split("-")))
    return used
