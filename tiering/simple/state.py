"""The simple scheduler's state of requests, and of the copies that were ordered and have not ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from tiering.api.keys import OffloadKey
from tiering.connector import tracked
from tiering.connector.jobs import WorkerJob
from tiering.connector.protocols import EngineRequest
from tiering.simple.metadata import NOT_HELD

Blocks = tuple[list[int], list[int]]
"""A list of GPU blocks and a co-indexed list of CPU blocks."""

Offer = tuple[OffloadKey, int, EngineRequest | None, int, int]
"""A block to store: its name, GPU block, request, KV-cache group and place.

The group is an index, and the place is the block's index in the group. The request is None in the lazy mode, which
stores blocks whose request has ended.
"""


@dataclass(slots=True, eq=False)
class SimpleGroupState(tracked.GroupState):
    """One KV-cache group of a request; compared by identity."""

    lost: set[int] = field(default_factory=set)
    """Indexes of blocks before ``cursor`` that the CPU pool has evicted since."""


@dataclass(slots=True, eq=False, kw_only=True)
class SimpleRequestState(tracked.TrackedRequest[SimpleGroupState]):
    """One request, as the simple scheduler sees it."""

    rewinding: Callable[[Self], None]
    """Called before all blocks of the request are offered again."""
    loading: int = 0
    """Number of loads that have not ended."""

    def rewind(self) -> None:
        self.rewinding(self)
        super(SimpleRequestState, self).rewind()

    def storable_tokens(self) -> int:
        """Return the number of tokens that may be stored, because their KV is computed and final.

        Placeholders do not count.
        """
        confirmed = self.request.num_computed_tokens - int(getattr(self.request, "num_output_placeholders", 0))
        most = self.policy.max_store_tokens
        return confirmed if most is None else min(confirmed, most)


@dataclass(slots=True, kw_only=True)
class Load:
    """A load that was ordered and has not ended."""

    state: SimpleRequestState
    """The request whose blocks are loaded."""
    gpu_blocks: list[int]
    """GPU blocks that are filled."""
    cpu_blocks: list[int]
    """CPU blocks, co-indexed with ``gpu_blocks``; ``NOT_HELD`` for those evicted after the match."""
    issued: bool = False
    """True if a step's metadata has carried the load to the workers."""
    referenced: list[int] = field(init=False)
    """GPU blocks that the load holds references on."""

    def __post_init__(self) -> None:
        self.referenced = self.gpu_blocks

    @property
    def held(self) -> list[int]:
        """CPU blocks that the load holds references on."""
        return [block for block in self.cpu_blocks if block != NOT_HELD]

    def has_failed(self, invalid: set[int]) -> bool:
        """Return True if one of the GPU blocks ``invalid`` was to be filled from a CPU block."""
        pairs = zip(self.gpu_blocks, self.cpu_blocks, strict=True)
        return any(gpu in invalid and cpu != NOT_HELD for gpu, cpu in pairs)


@dataclass(slots=True)
class StepCopy(WorkerJob):
    """The store of a step, or the load that a step computes with, which not all workers have reported."""

    referenced: list[int]
    """GPU blocks that the copy holds references on."""
    cpu_blocks: list[int]
    """CPU blocks, co-indexed with ``referenced`` while the copy holds references on GPU blocks."""
