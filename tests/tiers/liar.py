"""A medium that answers with other bytes than were written, and an outage that ends in such answers."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.errors import StoreError, TemporaryStoreError
from tiering.medium.block_store import BlockIO, BlockStore, Done, Outcome
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K


class Liar:
    """Takes the place of a store's own methods for reads.

    Args:
        store: the store, whose methods are replaced.
    """

    def __init__(self, store: BlockStore) -> None:
        self.down = False
        """True: nothing is answered."""
        self.lies = False
        """True: whatever is read has a flipped bit."""
        self.told = 0
        """Number of lies."""
        self._get, self._read_document = store.get, store.read_document
        store.get, store.read_document = self.get, self.read_document  # type: ignore[method-assign]

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        if self.down:
            failures: list[Outcome] = [TemporaryStoreError("down") for _ in blocks]
            return failures
        outcomes = self._get(blocks)
        for block, outcome in zip(blocks, outcomes, strict=True):
            if self.lies and outcome is Done.DONE:
                block.payload[0] ^= 1
                self.told += 1
        return outcomes

    def read_document(self, name: str) -> bytes | None:
        if self.down:
            raise TemporaryStoreError("down")
        found = self._read_document(name)
        if found is None or not self.lies:
            return found
        self.told += 1
        return bytes([found[0] ^ 1, *found[1:]])


def lies_after_an_outage(rig: TierRig) -> None:
    """Let the medium of an open ``rig`` fail, then lie, then answer.

    Raises:
        AssertionError: the tier was in service while its medium lied, or is not when the medium answers again.
    """
    store = rig.tier._life._health._store  # type: ignore[attr-defined]
    breaker = rig.tier._life._io.breakers.reads  # type: ignore[attr-defined]
    liar = Liar(store)
    assert rig.store(K[:4]) == K[:4]
    assert rig.load(K[:4]) == K[:4]
    liar.down = True

    def fails() -> bool:
        rig.load(K[:4])
        return bool(breaker.state)

    rig.wait(fails)
    liar.lies, liar.down = True, False
    opened, before = breaker.opened, liar.told
    rig.wait(lambda: liar.told >= before + 12)
    assert (bool(breaker.state), breaker.opened) == (True, opened), "a lie has ended the outage"
    assert rig.load(K[:4]) == []
    liar.lies = False
    rig.wait(lambda: not breaker.state)
    assert rig.load(K[:4]) == K[:4]


class WrongWrites:
    """Takes the place of a store's ``get``, and returns zeros, as after writes that were lost.

    Args:
        store: the store, whose method is replaced.
    """

    def __init__(self, store: BlockStore) -> None:
        self.lies = True
        self.told = 0
        self._get = store.get
        store.get = self.get  # type: ignore[method-assign]

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        outcomes = self._get(blocks)
        for block, outcome in zip(blocks, outcomes, strict=True):
            if self.lies and not isinstance(outcome, StoreError):
                block.payload[:] = bytes(len(block.payload))
                self.told += 1
        return outcomes
