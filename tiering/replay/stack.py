"""The real manager of a stack over simulated media."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from tiering.api.namespace import ModelIdentity, Namespace
from tiering.block_tier.tier import BlockTier
from tiering.config.registry import tier_definition
from tiering.config.stack_file import StackConfig
from tiering.errors import ConfigError
from tiering.index.shared import SharedIndex
from tiering.index.slots import SlotIndex
from tiering.index.tier_index import TierIndex
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.warm_start import WarmStartLimits
from tiering.medium.layers.breaker import BreakerState
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.replay.model import ReplayModel
from tiering.replay.simulated import SLOT_HEADER_BYTES, Clock, SimulatedIo, SimulatedStore
from tiering.secondary.contract import JobResult, TierContext
from tiering.secondary.options import (
    BlockTierOptions,
    CompressionOptions,
    SharedOptions,
    SlotOptions,
    TierOptions,
    TtlOptions,
)

MODEL = ModelIdentity(name="replay", weights="replay", dtype="replay", layout="replay")
"""Identity of the model in a replay; nothing is ever stored under this identity."""

_LARGER = "raise the capacity, or give the KV of a token with --kv-bytes-per-token"
"""Remedy for a tier without room for one block."""


class SimulatedTier(BlockTier):
    """A block tier over a simulated I/O side.

    Args:
        context: environment of the tier; its clock is that of ``io``.
        options: options of the tier.
        index: index of the blocks on the medium.
        io: the simulated I/O side.
    """

    io: SimulatedIo
    store: SimulatedStore

    def __init__(self, context: TierContext, options: BlockTierOptions, index: TierIndex, io: SimulatedIo) -> None:
        self._out_of_service = 0.0
        self._out_since: float | None = None
        super().__init__(context, options, io.store, index, place_prefix=lambda namespace: "", io=io)

    def get_finished(self) -> Iterable[JobResult]:
        finished, now = super().get_finished(), self._clock()
        if self.io.breakers.reads.state is not BreakerState.CLOSED:
            if self._out_since is None:
                self._out_since = now
        elif self._out_since is not None:
            self._out_of_service += now - self._out_since
            self._out_since = None
        return finished

    @property
    def out_of_service(self) -> float:
        """Number of seconds during which the tier answered no lookups, because its loads came too late."""
        since = self._out_since
        return self._out_of_service + (0.0 if since is None else self._clock() - since)


@dataclass(slots=True)
class SimulatedFleet:
    """The shared media of engines whose stacks are opened one after the other."""

    media: dict[str, SimulatedStore] = field(default_factory=dict)
    """The medium of each shared tier, by the tier's name."""
    engines: int = 0
    """Number of engines so far."""


@dataclass(frozen=True, slots=True)
class SimulatedStack:
    """A manager with its simulated tiers."""

    manager: TieringOffloadingManager
    tiers: tuple[SimulatedTier, ...]
    """The secondary tiers, fastest first."""
    clock: Clock
    """Simulated time of all of them."""
    block_bytes: int

    def next_answer(self) -> float:
        """Return the time at which the next load or probe of any tier ends; infinity if none is under way."""
        return min([tier.io.next_answer() for tier in self.tiers], default=math.inf)

    def next_end(self) -> float:
        """Return the time at which the next job or probe of any tier ends; infinity if none is under way."""
        return min([tier.io.next_end() for tier in self.tiers], default=math.inf)


def open_simulated(
    stack: StackConfig, block_bytes: int, model: ReplayModel, fleet: SimulatedFleet | None = None
) -> SimulatedStack:
    """Return the manager that ``stack`` describes, over media that are simulated.

    Primary tier, manager, policies, admission, budgets and indexes are those of an engine. Tiers whose options include
    :class:`~tiering.secondary.options.SlotOptions` have a slot index, all others a shared one.

    Args:
        stack: the validated stack, of mode tiering.
        block_bytes: bytes of one block.
        model: speed of the media.
        fleet: engines whose shared media the stack uses, and from whose published keys it starts warm if it has the
            word ``warm_start``; default: none, and the word has no effect.

    Raises:
        ConfigError: a tier has no room for one block, or the stack has no tiers to replay.
    """
    if stack.mode != "tiering":
        raise ConfigError(f"mode: is {stack.mode}; a replay needs a stack of mode tiering")
    rows = stack.primary.capacity // block_bytes
    if not rows:
        raise ConfigError(
            f"primary.capacity: {stack.primary.capacity} bytes do not hold one block of {block_bytes}; {_LARGER}"
        )
    clock, explains = Clock(), stack.explain is not None
    # Rows of one byte: blocks have no content here.
    view = np.zeros((rows, 1), np.uint8).data
    namespace = Namespace.build(MODEL, (block_bytes,))
    warm, words = None, stack.warm_start
    if fleet is not None and words is not None:
        blocks = rows if words.bytes is None else words.bytes // block_bytes
        warm = WarmStartLimits(blocks, words.seconds, words.bandwidth / block_bytes)
    fleet = SimulatedFleet() if fleet is None else fleet
    fleet.engines += 1
    context = TierContext(
        "", view, (block_bytes,), namespace, clock.read, enable_events=explains, replica=str(fleet.engines)
    )
    tiers = tuple(_tier(index, options, context, model, clock, fleet) for index, options in enumerate(stack.secondary))
    manager = TieringOffloadingManager(
        CPUPrimaryTierOffloadingManager(view, stack.primary.eviction, explains),
        tiers,
        explains,
        clock=clock.read,
        promotion_share=stack.primary.promotion_share,
        reservation_deadline=stack.primary.reservation_deadline,
        keep_secondary=stack.keep_secondary,
        exclusive=stack.primary.inclusion == "exclusive",
        warm_start=warm,
    )
    if explains:
        manager.keep_unstored()
    for index in range(len(tiers)):
        manager.open_tier(index, clock.now + stack.open_deadline)
    return SimulatedStack(manager, tiers, clock, block_bytes)


def _tier(
    index: int, options: TierOptions, context: TierContext, model: ReplayModel, clock: Clock, fleet: SimulatedFleet
) -> SimulatedTier:
    name, (block_bytes,) = options.tier_name, context.group_bytes
    if not isinstance(options, BlockTierOptions):
        raise ConfigError(f"secondary[{index}] ({name}): a replay simulates block tiers, and {options.type} is not one")
    named = not isinstance(options, SlotOptions)
    ttl = options.ttl if isinstance(options, TtlOptions) else None
    store = SimulatedStore(name, named=named, ttl=ttl, clock=clock)
    if named:
        store = fleet.media.setdefault(name, store)
    compresses = isinstance(options, CompressionOptions) and options.compression != "none"
    ratio = 1.0 / model.compression_ratio if compresses else 1.0
    context = replace(context, name=name, distance=tier_definition(options.type).distance)
    io = SimulatedIo(name, store, model.medium(options), options, ratio, clock)
    if not isinstance(options, SlotOptions):
        words = options if isinstance(options, SharedOptions) else SharedOptions(type=options.type)
        return SimulatedTier(context, options, SharedIndex.of(words), io)
    if options.capacity is None:
        raise ConfigError(f"secondary[{index}].capacity: is missing; a replay needs the size of the tier {name}")
    blocks = options.capacity // (block_bytes + SLOT_HEADER_BYTES)
    if not blocks:
        raise ConfigError(
            f"secondary[{index}].capacity: {options.capacity} bytes do not hold one block of {block_bytes} bytes; "
            f"{_LARGER}"
        )
    slots = SlotIndex(
        blocks,
        eviction=options.eviction,
        high_watermark=options.high_watermark,
        low_watermark=options.low_watermark,
    )
    slots.add_free(np.arange(blocks))
    return SimulatedTier(context, options, slots, io)
