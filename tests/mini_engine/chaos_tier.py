"""A memory tier with random, repeatable faults: ``type: tests.mini_engine.chaos_tier:CHAOS_TIER``."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from tiering.api.namespace import Namespace
from tiering.api.units import Size
from tiering.block_tier.definition import TierDefinition
from tiering.block_tier.tier import BlockTier
from tiering.index.slots import SlotIndex
from tiering.secondary.contract import TierContext
from tiering.secondary.options import BlockTierOptions, CapacityOptions
from tiering.testing.chaos import ChaosLayer, ChaosPlan, Fault
from tiers.memory import MemoryStore


class ChaosOptions(BlockTierOptions, CapacityOptions):
    """The options of the tier.

    Attributes:
        puts, gets: the fault's name → probability, per attempt on a block.
        delay: seconds of a fault that delays.
    """

    capacity: Size = 1 << 24
    seed: int
    puts: dict[str, float] = Field(default_factory=dict)
    gets: dict[str, float] = Field(default_factory=dict)
    delay: float = 0.005


class ChaosTier(BlockTier):
    """Slots in memory behind a :class:`ChaosLayer`."""

    index: SlotIndex
    latest: ClassVar[ChaosTier | None] = None
    """The tier that was built last."""
    built: ClassVar[dict[str, ChaosTier]] = {}
    """The tier of each name that was built last."""

    def __init__(self, options: ChaosOptions, context: TierContext) -> None:
        plan = ChaosPlan(
            puts={Fault[name]: chance for name, chance in options.puts.items()},
            gets={Fault[name]: chance for name, chance in options.gets.items()},
            delay=options.delay,
        )
        self.chaos = ChaosLayer(MemoryStore(), seed=options.seed, plan=plan)
        super().__init__(context, options, self.chaos, SlotIndex(options.capacity // max(context.group_bytes)))
        ChaosTier.latest = ChaosTier.built[self.name] = self

    def on_opened(self, namespace: Namespace) -> None:
        self.index.add_free(np.arange(self.index.num_slots))


CHAOS_TIER = TierDefinition(options=ChaosOptions, build=ChaosTier, persistent=False)
