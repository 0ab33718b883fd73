"""Base of all layers: a block store around a block store that delegates every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiering.medium.block_store import (
    BatchStore,
    BlockIO,
    BlockStore,
    Outcome,
    Place,
    RawBlock,
    Settlement,
    StoreProbe,
    StoreTraits,
)

Attempt = Callable[[Sequence[BlockIO]], list[Outcome]]
"""A put or get of several blocks."""


class StoreLayer(BatchStore):
    """Store that delegates every operation to ``inner``; most layers override :meth:`around` alone."""

    def __init__(self, inner: BlockStore) -> None:
        self.inner = inner
        """The store inside this layer."""

    @property
    def traits(self) -> StoreTraits:
        return self.inner.traits

    def open(self) -> None:
        self.inner.open()

    def close(self) -> None:
        self.inner.close()

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

    def delete(self, places: Sequence[Place]) -> None:
        self.inner.delete(places)

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        return self.inner.probe(places)

    def read_again(self, place: Place, limit: int) -> RawBlock | None:
        return self.inner.read_again(place, limit)

    def delete_version(self, place: Place, version: str) -> bool:
        return self.inner.delete_version(place, version)

    def settle(self, place: Place, found: RawBlock) -> Settlement:
        return self.inner.settle(place, found)

    def read_document(self, name: str) -> bytes | None:
        return self.inner.read_document(name)

    def write_document(self, name: str, data: bytes) -> None:
        self.inner.write_document(name, data)

    def list_documents(self, prefix: str) -> Iterable[str]:
        return self.inner.list_documents(prefix)

    def create_document(self, name: str, data: bytes) -> bytes | None:
        return self.inner.create_document(name, data)

    def prove_damage(self, name: str, content: bytes) -> None:
        self.inner.prove_damage(name, content)

    def remove_document(self, name: str) -> None:
        self.inner.remove_document(name)

    def reclaim(self, place_prefix: str) -> int:
        return self.inner.reclaim(place_prefix)
