"""The beginning of new common epochs in a bucket, as ``kv-tiering epoch new`` does it."""

from __future__ import annotations

from tiering.admin.namespaces import namespace_of
from tiering.api.namespace import Namespace
from tiering.epochs.driver import begin_common
from tiers.object.store import ObjectStore


def begin_epochs(store: ObjectStore) -> list[bytes]:
    """Begin a new common epoch of each namespace in the bucket of an open store, and return the epochs."""
    namespaces = {name for document in store.list_documents("") if (name := namespace_of(document)) is not None}
    begun = [begin_common(store, Namespace.named(name)).epoch for name in sorted(namespaces)]
    return [epoch for epoch in begun if epoch is not None]
