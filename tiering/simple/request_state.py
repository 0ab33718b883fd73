"""The simple scheduler's state of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiering.api.keys import GROUP_BYTES, OffloadKey
from tiering.api.request_policy import RequestPolicy
from tiering.offload.names import extend_names
from tiering.offload.protocols import EngineRequest

BlockIds = Sequence[Sequence[int]]
"""GPU block ids of one request, per KV-cache group, in their order."""


@dataclass(slots=True, eq=False)
class GroupState:
    """One KV-cache group of a request; compared by identity."""

    keys: list[OffloadKey] = field(default_factory=list)
    """Names of the request's full blocks in this group."""
    blocks: list[int] = field(default_factory=list)
    """GPU block ids of these blocks, as far as the engine has reported them."""
    cursor: int = 0
    """Index of the next block to store; all earlier blocks were stored, are held, or need no store."""
    lost: set[int] = field(default_factory=set)
    """Indexes of blocks before ``cursor`` that the CPU pool has evicted since."""


@dataclass(slots=True)
class RequestState:
    """One request, as the simple scheduler sees it."""

    request: EngineRequest
    policy: RequestPolicy
    """The request's own limits on loads and stores."""
    groups: list[GroupState]
    """State of each KV-cache group, in the engine's order."""
    next_store_at: int = 0
    """Number of confirmed tokens below which there is no new block to store."""
    found_tokens: int | None = None
    """Tokens in the engine's prefix cache at the last match; None if the blocks came without a match."""
    matched_at: int = 0
    """Computed tokens at the last match that found a hit."""
    touched: bool = False
    """True after the first match, which marks the request's blocks as recently used."""
    loading: int = 0
    """Number of loads that have not ended."""
    loaded_tokens: int = 0
    """Tokens of the last load, which follow ``found_tokens``."""
    allocated_at_step: int = -1
    """Step for which the request got its first blocks; -1: none."""
    scheduled: bool = False
    """True if tokens were computed on the present blocks; before, another connector may load into them."""
    invalid_from: int | None = None
    """First token whose KV may not be stored; None: all KV may be stored.

    A load did not fill the token's block, or the block is a suspect. No block of the request is stored until the engine
    goes back to that token.
    """

    @property
    def has_blocks(self) -> bool:
        """True if the request has GPU blocks."""
        return any(group.blocks for group in self.groups)

    @property
    def tables(self) -> list[list[int]]:
        """GPU blocks of each group. These lists do not change when the request loses its blocks."""
        return [group.blocks for group in self.groups]

    @property
    def is_withheld(self) -> bool:
        """True if no block of the request may be stored now."""
        return self.invalid_from is not None and self.request.num_computed_tokens > self.invalid_from

    def distrust(self, invalid_from: int) -> None:
        """Forbid stores of the KV from token ``invalid_from`` on, until the engine goes back to that token."""
        self.invalid_from = invalid_from if self.invalid_from is None else min(self.invalid_from, invalid_from)

    def lose_blocks(self) -> None:
        """Drop the state of the request's blocks, because the request ends or starts over."""
        for group in self.groups:
            group.blocks = []
        self.found_tokens, self.loaded_tokens = None, 0
        self.invalid_from, self.scheduled = None, False

    def confirmed_tokens(self) -> int:
        """Return the number of tokens whose KV is computed and final; placeholders do not count."""
        return self.request.num_computed_tokens - int(getattr(self.request, "num_output_placeholders", 0))

    def extend_keys(self, hashes_per_block: Sequence[int]) -> None:
        """Name the blocks whose hashes are new, and rename the blocks whose tokens were replaced.

        Args:
            hashes_per_block: number of hashes that make up a block, per group.
        """
        hashes = self.request.block_hashes
        for index, (group, factor) in enumerate(zip(self.groups, hashes_per_block, strict=True)):
            known = extend_names(group.keys, hashes, factor, index.to_bytes(GROUP_BYTES, "big"))
            group.cursor = min(group.cursor, known)

    def append_blocks(self, block_ids: BlockIds) -> None:
        """Append GPU blocks to the block tables of the groups."""
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.blocks += ids
