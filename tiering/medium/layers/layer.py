"""Base of all layers: a block store around a block store that delegates every operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiering.medium.block_store import BatchStore, BlockIO, BlockStore, Outcome, StoreTraits

Attempt = Callable[[Sequence[BlockIO]], list[Outcome]]
"""A put or get of several blocks."""


class StoreLayer(BatchStore):
    """Store that delegates every operation to ``inner``; most layers override :meth:`around` alone."""

    def __init__(self, inner: BlockStore) -> None:
        self.inner = inner

    @property
    def traits(self) -> StoreTraits:
        return self.inner.traits

    def around(self, attempt: Attempt, blocks: Sequence[BlockIO], *, load: bool) -> list[Outcome]:
        """Make an attempt to move ``blocks``, and return their outcomes.

        Args:
            attempt: the put or get of the inner store.
            blocks: the blocks.
            load: True for a get.
        """
        return attempt(blocks)

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self.around(self.inner.put, blocks, load=False)

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self.around(self.inner.get, blocks, load=True)


def _delegate(name: str) -> None:
    def call(self: StoreLayer, *arguments: Any) -> Any:
        return getattr(self.inner, name)(*arguments)

    setattr(StoreLayer, name, call)


for _name in (
    *("open", "close", "delete", "probe", "read_again", "delete_version", "settle", "prove_damage"),
    *("read_document", "write_document", "list_documents", "documents_beside", "create_document"),
    "remove_document",
):
    _delegate(_name)
