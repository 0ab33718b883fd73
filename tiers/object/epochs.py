"""The beginning of new common epochs in a bucket."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tiering.admin.namespaces import namespace_of
from tiering.api.namespace import Namespace
from tiering.epochs.common_epoch import begin_common
from tiering.errors import ConfigError

if TYPE_CHECKING:
    from obstore import ObjectMeta


class EpochStore(Protocol):
    """The part of :class:`tiers.object.store.ObjectStore` that beginning epochs needs."""

    def list_document_objects(self) -> Iterator[Sequence[ObjectMeta]]: ...

    def read_document(self, name: str) -> bytes | None: ...

    def create_document(self, name: str, data: bytes) -> bytes | None: ...

    def list_documents(self, prefix: str) -> Iterable[str]: ...

    def prove_damage(self, name: str, content: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class BegunEpoch:
    """A common epoch that has begun."""

    namespace: str
    """The namespace, 32 hex digits."""
    epoch: bytes
    """The epoch."""


def begin_epochs(
    store: EpochStore, namespaces: Collection[str] | None = None, invalidation: bytes | None = None
) -> list[BegunEpoch]:
    """Begin new common epochs: no process looks up blocks that were stored in the older ones.

    Running engines notice within a minute, and then drop the blocks in their CPU tiers and on their disks as well.
    Processes in a private epoch, or in that of a revision, stay there. ``kv-tiering gc`` removes the blocks of the
    older epochs after its grace time.

    Args:
        store: the open store.
        namespaces: the namespaces, as 32 hex digits each; default: all in the bucket.
        invalidation: identifier of the invalidation, if it concerns several media; default: a new one.

    Raises:
        StoreError: a document cannot be read or written. The epochs that were begun before stay.
        ConfigError: the bucket lacks one of ``namespaces``.
    """
    found = set(_names(store))
    if missing := set(namespaces or ()) - found:
        raise ConfigError(
            f"namespace {min(missing)} is not in this bucket; it holds {', '.join(sorted(found)) or 'none'}"
        )
    begun: list[BegunEpoch] = []
    for name in sorted(found if namespaces is None else namespaces):
        # The name alone decides. A namespace whose parameters are damaged has blocks that engines serve, too.
        common = begin_common(store, Namespace.named(name), invalidation)
        if common.epoch is not None:
            begun.append(BegunEpoch(name, common.epoch))
    return begun


def _names(store: EpochStore) -> Iterator[str]:
    """Yield the name of a namespace for each document that is of one."""
    for objects in store.list_document_objects():
        for item in objects:
            if (name := namespace_of(item["path"].rpartition("/")[2])) is not None:
                yield name
