"""A medium in memory whose places are names: the smallest shared medium."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from tiering.block_tier.tier import BlockTier
from tiering.index.shared import SharedIndex
from tiering.medium.block_store import Place, RawBlock, StoreProbe, StoreTraits
from tiering.secondary.contract import TierContext
from tiering.secondary.options import BlockTierOptions
from tiers.memory import MemoryMedium, MemoryStore


class NamedMemoryStore(MemoryStore):
    traits = StoreTraits(medium="OBJECT")

    def delete(self, places: Sequence[Place]) -> None:
        with self.memory.lock:
            for place in places:
                self.memory.frames.pop(place, None)

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        with self.memory.lock:
            return StoreProbe(tuple(place in self.memory.frames for place in places))

    def read_again(self, place: Place, limit: int) -> RawBlock | None:
        with self.memory.lock:
            frame = self.memory.frames.get(place)
        if frame is None:
            return None
        data = frame.tobytes()
        return RawBlock(data if len(data) <= limit else b"", len(data), sha256(data).hexdigest(), proven=True)

    def delete_version(self, place: Place, version: str) -> bool:
        with self.memory.lock:
            frame = self.memory.frames.get(place)
            if frame is None or sha256(frame.tobytes()).hexdigest() != version:
                return False
            del self.memory.frames[place]
        return True


def make_named_tier(memory: MemoryMedium, context: TierContext, **options: object) -> BlockTier:
    """Return a tier on ``memory`` as a shared medium."""
    return BlockTier(
        context,
        BlockTierOptions.model_validate({"type": "named", **options}),
        NamedMemoryStore(memory),
        SharedIndex(absent_ttl=0.05, lookup_deadline=20.0),
        place_prefix=lambda namespace: f"{namespace.directory}/{namespace.epoch.hex()}/",
    )


class RawMemory:
    """Direct access to a memory medium, without a store, for the conformance suites."""

    memory: MemoryMedium

    def raw_places(self) -> Sequence[Place]:
        return list(self.memory.frames)

    def raw_read(self, place: Place) -> bytes | None:
        frame = self.memory.frames.get(place)
        return None if frame is None else frame.tobytes()

    def raw_write(self, place: Place, data: bytes) -> None:
        self.memory.frames[place] = np.frombuffer(data, np.uint8).copy()

    def raw_delete(self, place: Place) -> None:
        self.memory.frames.pop(place, None)
