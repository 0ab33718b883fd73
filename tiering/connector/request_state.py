"""What the scheduler half remembers of one request: its keys, its GPU blocks, and how far its blocks were offered."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.api.request_policy import RequestPolicy
from tiering.connector.groups import OffloadGroup
from tiering.connector.metadata import BlockIdsByGroup
from tiering.offload.names import extend_names
from tiering.offload.protocols import EngineRequest

NEVER = sys.maxsize
"""A number of tokens that no request reaches."""


class Match(NamedTuple):
    """The last hit that was offered to the engine: it covers the tokens from ``computed`` to ``end``."""

    computed: int
    end: int


@dataclass(slots=True)
class GroupState:
    """One KV-cache group of a request.

    ``keys[b]`` names offloaded block b, as far as hashes exist.  ``block_ids`` are the GPU blocks in logical order,
    null blocks (0) included.  ``cursor``: offloaded blocks below it were offered to the manager, or need not be.
    """

    keys: list[OffloadKey] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    cursor: int = 0


@dataclass(slots=True)
class RequestState:
    """One request from the moment it is seen until it ends.

    ``prompt_only``: only blocks that lie wholly in its prompt are stored, which grows in a streaming session.
    ``next_store_at``: computed tokens below which there is nothing new to offer. ``found_tokens``: leading tokens that
    it found in the engine's cache, None if it was not matched yet. ``filled_tokens``: these and those loaded for it.
    ``scheduled``: it has computed something on its present blocks; before, another connector may still load into them.
    ``invalid_from``: first token whose KV may not be stored (a load did not fill it, or its block is a suspect), until
    the engine goes back to it; nothing is stored meanwhile. ``generation`` counts its starts: what concerns blocks of
    an earlier generation is void.  ``allocated_at_step``: the step for which it got its first blocks.
    ``untouched_blocks`` were stored since its stored blocks were touched last. ``sources``: of its last load's blocks,
    how many were brought in for it, by medium; ``asked_blocks``: those that were asked for when it was matched first
    and of which no load has told yet how many the primary tier had; both of the group that tells how long a hit is.
    """

    request: EngineRequest
    ctx: ReqContext
    policy: RequestPolicy
    request_level: bool
    prompt_only: bool
    groups: list[GroupState]
    keys: list[list[OffloadKey]] = field(init=False)
    match: Match | None = None
    touched: bool = False
    asked_blocks: int = 0
    may_load: bool = True
    sharer_deadline: float | None = None
    found_tokens: int | None = None
    filled_tokens: int = 0
    scheduled: bool = False
    invalid_from: int | None = None
    generation: int = 0
    allocated_at_step: int = -1
    next_store_at: int = 0
    retry_at_step: int = 0
    backoff_steps: int = 1
    batch_tokens: int = NEVER
    untouched_blocks: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = [group.keys for group in self.groups]
        self.rewind()

    @property
    def store_limit(self) -> int:
        """Leading tokens that may be stored, of the prompt as it is now."""
        limit = self.request.num_prompt_tokens if self.prompt_only else NEVER
        most = self.policy.max_store_tokens
        return limit if most is None else min(limit, most)

    @property
    def has_blocks(self) -> bool:
        """Whether the request holds GPU blocks."""
        return any(group.block_ids for group in self.groups)

    @property
    def tables(self) -> list[list[int]]:
        """The GPU blocks of each group.  They stay as they are when the request loses its blocks."""
        return [group.block_ids for group in self.groups]

    def extend_keys(self, layouts: Sequence[OffloadGroup]) -> None:
        """Name the blocks whose hashes have appeared since the last call, and anew those whose tokens were replaced."""
        hashes = self.request.block_hashes
        for layout, group in zip(layouts, self.groups, strict=True):
            group.cursor = min(
                group.cursor, extend_names(group.keys, hashes, layout.hash_block_size_factor, layout.key_suffix)
            )

    def set_blocks(self, block_ids: BlockIdsByGroup) -> None:
        """These are all of the request's GPU blocks."""
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.block_ids = list(ids)

    def append_blocks(self, block_ids: BlockIdsByGroup) -> None:
        """These follow the request's GPU blocks."""
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.block_ids += ids

    def restart(self) -> None:
        """The request computes nothing yet and holds no GPU blocks: what is known of earlier ones is void.  Harmless if repeated."""
        for group in self.groups:
            group.block_ids = []
        self.match = None
        self.found_tokens, self.filled_tokens, self.scheduled = None, 0, False
        self.invalid_from = None
        self.generation += 1
        self.rewind()

    def preempted(self) -> None:
        """The request lost its GPU blocks; it may load again."""
        self.may_load = self.policy.load
        self.restart()

    def load_failed(self, invalid_from: int) -> None:
        """The tokens from ``invalid_from`` on were not filled.

        The request loads no more unless it is preempted, so that it cannot fail for ever.
        """
        self.distrust(invalid_from)
        self.may_load = False

    def distrust(self, invalid_from: int) -> None:
        """The KV of the tokens from ``invalid_from`` on may not be stored until the engine has gone back to them."""
        self.invalid_from = invalid_from if self.invalid_from is None else min(self.invalid_from, invalid_from)
        self.rewind()

    def note_stored(self, blocks: int) -> bool:
        """``blocks`` have become readable; whether it is time to touch all that is stored.

        Which is at the end of the prompt, and before whenever a quarter is new, so that a block is touched a few times
        at most.
        """
        stored = sum(group.cursor for group in self.groups)
        if blocks >= stored:
            return False  # one job, in its order
        self.untouched_blocks += blocks
        return self.next_store_at == NEVER or 4 * self.untouched_blocks >= stored

    def rewind(self) -> None:
        """Offer every block again."""
        for group in self.groups:
            group.cursor = 0
        self.look_again()

    def look_again(self) -> None:
        """The prompt may have grown: see at the next step whether there is something to offer."""
        self.next_store_at = 0 if self.policy.store else NEVER

    def schedule_next_store(self, layouts: Sequence[OffloadGroup]) -> None:
        """Note at how many computed tokens the next block of any group will be complete and may be stored."""
        ends = [
            ((group.cursor + 1) * layout.offloaded_block_size, layout.volatile_tokens)
            for layout, group in zip(layouts, self.groups, strict=True)
        ]
        self.next_store_at = min((end + volatile for end, volatile in ends if end <= self.store_limit), default=NEVER)
