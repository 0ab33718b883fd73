"""What the simple scheduler knows of one request."""

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
    """One KV-cache group of a request.  Two are the same only if they are one object.

    ``keys``: names of its full blocks; ``blocks``: their GPU block ids, as far as the connector was told; ``cursor``:
    blocks before it were stored, are held, or need not be; ``lost``: those before it that the CPU pool has forgotten
    since.
    """

    keys: list[OffloadKey] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cursor: int = 0
    lost: set[int] = field(default_factory=set)


@dataclass(slots=True)
class RequestState:
    """One request.

    ``next_store_at``: confirmed tokens below which there is nothing new to store.  ``found_tokens``: of the engine's
    prefix cache, when it was last asked for, None if it was not since it got its blocks; ``loaded_tokens``: those of
    its load behind them.  ``matched_at``: computed tokens when it was last matched. ``allocated_at_step``: the step for
    which it got its first blocks.  ``loading``: a load of it has not ended.  ``scheduled``: it has computed something
    on its present blocks; before, another connector may still load into them.  ``invalid_from``: first token whose KV
    may not be stored (a load did not fill it, or its block is a suspect), until the engine goes back to it; nothing is
    stored meanwhile.
    """

    request: EngineRequest
    policy: RequestPolicy
    groups: list[GroupState]
    next_store_at: int = 0
    found_tokens: int | None = None
    matched_at: int = 0
    touched: bool = False
    loading: int = 0
    loaded_tokens: int = 0
    allocated_at_step: int = -1
    scheduled: bool = False
    invalid_from: int | None = None

    @property
    def has_blocks(self) -> bool:
        """Whether GPU blocks are known to be its."""
        return any(group.blocks for group in self.groups)

    @property
    def tables(self) -> list[list[int]]:
        """The GPU blocks of each group.  They stay as they are when the request loses its blocks."""
        return [group.blocks for group in self.groups]

    @property
    def is_withheld(self) -> bool:
        """True if nothing of the request may be stored now."""
        return self.invalid_from is not None and self.request.num_computed_tokens > self.invalid_from

    def distrust(self, invalid_from: int) -> None:
        """The KV of the tokens from ``invalid_from`` on may not be stored until the engine has gone back to them."""
        self.invalid_from = invalid_from if self.invalid_from is None else min(self.invalid_from, invalid_from)

    def lose_blocks(self) -> None:
        """The request ends or starts over: what is known of its blocks is void."""
        for group in self.groups:
            group.blocks = []
        self.found_tokens, self.loaded_tokens = None, 0
        self.invalid_from, self.scheduled = None, False

    def confirmed_tokens(self) -> int:
        """Tokens whose KV is computed and final: no placeholders."""
        return self.request.num_computed_tokens - int(getattr(self.request, "num_output_placeholders", 0))

    def extend_keys(self, hashes_per_block: Sequence[int]) -> None:
        """Name the blocks whose hashes have come since the last call, and anew those whose tokens were replaced."""
        hashes = self.request.block_hashes
        for index, (group, factor) in enumerate(zip(self.groups, hashes_per_block, strict=True)):
            known = extend_names(group.keys, hashes, factor, index.to_bytes(GROUP_BYTES, "big"))
            group.cursor = min(group.cursor, known)

    def append_blocks(self, block_ids: BlockIds) -> None:
        """More GPU blocks, behind the others."""
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.blocks += ids
