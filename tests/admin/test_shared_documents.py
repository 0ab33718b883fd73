"""Documents of a shared medium that are listed and cannot be read."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from tiering.admin.shared_admin import SharedAdmin
from tiering.epochs.documents import EPOCHS, LEASES, PARAMETERS
from tiering.errors import TemporaryStoreError
from tiering.medium.block_store import BlockStore
from tiering.secondary.options import TierOptions

NAMESPACE = "0" * 32
EPOCH = f"{EPOCHS}{NAMESPACE}"


class Documents:
    """The documents of a store; reading :attr:`hidden` finds nothing, and removes it if ``removes``."""

    def __init__(self, names: set[str], hidden: str, *, removes: bool) -> None:
        self.names, self.hidden, self.removes = names, hidden, removes

    def list_documents(self, prefix: str) -> list[str]:
        return sorted(name for name in self.names if name.startswith(prefix))

    def read_document(self, name: str) -> bytes | None:
        if name != self.hidden:
            return b""
        if self.removes:
            self.names.discard(name)
        return None


def namespaces(documents: Documents) -> None:
    admin = SharedAdmin(TierOptions(type="medium"), cast("BlockStore", documents))
    asyncio.run(admin.namespaces())


def names() -> set[str]:
    """Return the names of an epoch document, of parameters and of a lease."""
    return {EPOCH, f"{PARAMETERS}{NAMESPACE}.json", f"{LEASES}{NAMESPACE}-{'b' * 32}"}


def test_an_epoch_document_that_is_listed_and_cannot_be_read_stops_a_collection() -> None:
    """Its epoch would count as abandoned, and all blocks of the namespace would be removed."""
    with pytest.raises(TemporaryStoreError, match="is listed and cannot be read"):
        namespaces(Documents(names(), EPOCH, removes=False))


def test_one_that_was_removed_meanwhile_does_not() -> None:
    namespaces(Documents(names(), EPOCH, removes=True))
