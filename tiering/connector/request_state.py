"""State of a request in the scheduler half: its keys, its GPU blocks, and its progress of storing."""

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
    """The last hit that was offered to the engine."""

    computed: int
    """Tokens that were computed when the hit was matched; the hit begins after them."""
    end: int
    """End of the hit in tokens."""


@dataclass(slots=True)
class GroupState:
    """One KV-cache group of a request."""

    keys: list[OffloadKey] = field(default_factory=list)
    """Keys of the offloaded blocks in logical order, as far as their hashes exist."""
    block_ids: list[int] = field(default_factory=list)
    """GPU blocks in logical order, null blocks (0) included."""
    cursor: int = 0
    """Number of leading offloaded blocks that were offered to the manager or need not be offered."""


@dataclass(slots=True)
class RequestState:
    """One request, from the first call that names the request until the request ends."""

    request: EngineRequest
    """The engine's request."""
    ctx: ReqContext
    """The request as the manager knows it."""
    policy: RequestPolicy
    """Parameters of the request: which tiers it may use, and how many tokens."""
    request_level: bool
    """True if the manager handles the request with the policy ``REQUEST_LEVEL``."""
    prompt_only: bool
    """True if only blocks that lie entirely in the prompt are stored.

    The prompt grows in a streaming session.
    """
    groups: list[GroupState]
    """State of each KV-cache group."""
    keys: list[list[OffloadKey]] = field(init=False)
    """The key lists of ``groups``, shared with them."""
    match: Match | None = None
    """The last hit that was offered to the engine; None if the hit was loaded or nothing was offered."""
    touched: bool = False
    """True if the request was matched before."""
    asked_blocks: int = 0
    """Blocks that the first match of the request probed and that no load has accounted for yet.

    The blocks are counted in the group that measures the length of a hit. A load accounts for them by the number of
    blocks that the primary tier had.
    """
    may_load: bool = True
    """True if the request may load."""
    sharer_deadline: float | None = None
    """Monotonic time in seconds until which the request waits for loads of other requests.

    None before the first wait.
    """
    found_tokens: int | None = None
    """Leading tokens that the request found in the engine's prefix cache; None before a match."""
    filled_tokens: int = 0
    """Leading tokens that were found in the engine's prefix cache or loaded for the request."""
    scheduled: bool = False
    """True if the request has computed tokens on its present blocks.

    Before, another connector may still load into the blocks.
    """
    invalid_from: int | None = None
    """First token whose KV must not be stored; None if all KV may be stored.

    A load did not fill the token's block, or the block is a suspect. Nothing of the request is stored until the engine
    goes back to this token.
    """
    generation: int = 0
    """Number of times that the request has started; events about blocks of an earlier generation are void."""
    allocated_at_step: int = -1
    """Step for which the request got its first blocks; default: -1."""
    next_store_at: int = 0
    """Number of computed tokens below which there are no new blocks to offer."""
    retry_at_step: int = 0
    """First step at which blocks are offered again after an offer found no room."""
    backoff_steps: int = 1
    """Pause in steps after the next offer that finds no room."""
    batch_tokens: int = NEVER
    """Largest number of tokens in one offer."""
    untouched_blocks: int = 0
    """Blocks that were stored since the stored blocks of the request were touched last."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Blocks of the last load that were promoted for the request, by medium.

    The blocks are counted in the group that measures the length of a hit.
    """

    def __post_init__(self) -> None:
        self.keys = [group.keys for group in self.groups]
        self.rewind()

    @property
    def store_limit(self) -> int:
        """Leading tokens of the request that may be stored, for the prompt as it is now."""
        limit = self.request.num_prompt_tokens if self.prompt_only else NEVER
        most = self.policy.max_store_tokens
        return limit if most is None else min(limit, most)

    @property
    def has_blocks(self) -> bool:
        """True if the request holds GPU blocks."""
        return any(group.block_ids for group in self.groups)

    @property
    def tables(self) -> list[list[int]]:
        """GPU blocks of each group; the lists do not change when the request loses its blocks."""
        return [group.block_ids for group in self.groups]

    def extend_keys(self, layouts: Sequence[OffloadGroup]) -> None:
        """Append the keys of new hashes, and replace the keys of blocks whose tokens were replaced.

        Args:
            layouts: the KV-cache groups.
        """
        hashes = self.request.block_hashes
        for layout, group in zip(layouts, self.groups, strict=True):
            group.cursor = min(
                group.cursor, extend_names(group.keys, hashes, layout.hash_block_size_factor, layout.key_suffix)
            )

    def set_blocks(self, block_ids: BlockIdsByGroup) -> None:
        """Replace the GPU blocks of the request."""
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.block_ids = list(ids)

    def append_blocks(self, block_ids: BlockIdsByGroup) -> None:
        """Append GPU blocks to those of the request."""
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.block_ids += ids

    def restart(self) -> None:
        """Forget the GPU blocks of the request and all state that depends on them.

        Used when the request has not computed anything yet. Repeated calls are harmless.
        """
        for group in self.groups:
            group.block_ids = []
        self.match = None
        self.found_tokens, self.filled_tokens, self.scheduled = None, 0, False
        self.invalid_from = None
        self.generation += 1
        self.rewind()

    def preempted(self) -> None:
        """Restart the request after it lost its GPU blocks; the request may load again."""
        self.may_load = self.policy.load
        self.restart()

    def load_failed(self, invalid_from: int) -> None:
        """Record that a load did not fill the tokens from ``invalid_from`` on.

        The request loads no more unless it is preempted, so that a request cannot fail to load for ever.
        """
        self.distrust(invalid_from)
        self.may_load = False

    def distrust(self, invalid_from: int) -> None:
        """Do not store tokens from ``invalid_from`` on until the engine has gone back to them."""
        self.invalid_from = invalid_from if self.invalid_from is None else min(self.invalid_from, invalid_from)
        self.rewind()

    def note_stored(self, blocks: int) -> bool:
        """Record that blocks have become readable; return True if all stored blocks are to be touched now.

        Stored blocks are touched at the end of the prompt, and earlier when a quarter of them is new. Each block is
        therefore touched a few times at most.

        Args:
            blocks: number of blocks that one store has made readable.
        """
        stored = sum(group.cursor for group in self.groups)
        if blocks >= stored:
            return False  # one job has stored all blocks, already in the right order
        self.untouched_blocks += blocks
        return self.next_store_at == NEVER or 4 * self.untouched_blocks >= stored

    def rewind(self) -> None:
        """Offer all blocks of the request again."""
        for group in self.groups:
            group.cursor = 0
        self.look_again()

    def look_again(self) -> None:
        """Check at the next step for blocks to offer, because the prompt may have grown."""
        self.next_store_at = 0 if self.policy.store else NEVER

    def schedule_next_store(self, layouts: Sequence[OffloadGroup]) -> None:
        """Compute ``next_store_at``: the number of computed tokens at which the next block may be stored."""
        ends = [
            ((group.cursor + 1) * layout.offloaded_block_size, layout.volatile_tokens)
            for layout, group in zip(layouts, self.groups, strict=True)
        ]
        self.next_store_at = min((end + volatile for end, volatile in ends if end <= self.store_limit), default=NEVER)
