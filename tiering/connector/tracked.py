"""Requests of an engine, as the schedulers of both modes follow them: policy, keys and GPU blocks."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.api.request_policy import RequestPolicy, parse_request_policy
from tiering.connector.groups import OffloadGroup
from tiering.connector.protocols import EngineRequest
from tiering.connector.variants import Variant

NEVER = sys.maxsize
"""A number of tokens that no request reaches."""

BlockIds = Sequence[Sequence[int]]
"""GPU block ids of one request by KV-cache group, in logical order."""


def policy_of(request: EngineRequest) -> RequestPolicy:
    """Return the policy of ``request``.

    Nothing is loaded for a request whose entire prompt must be computed, because loaded tokens have no hidden states.
    Such requests ask for logprobs of the prompt, or pool all tokens. vLLM before 0.31 would use a hit for such a
    request.

    Raises:
        ConfigError: a parameter of the request is invalid; the message names the field.
    """
    policy = parse_request_policy(getattr(request, "kv_transfer_params", None))
    return replace(policy, load=False) if getattr(request, "skip_reading_prefix_cache", False) else policy


def extend_keys(keys: list[OffloadKey], hashes: Sequence[bytes], factor: int, suffix: bytes) -> int:
    """Bring the keys of a request's blocks up to date with its hashes.

    Only missing keys are built, and keys after a token that was replaced. A streaming session discards the token that
    was sampled last and continues with other tokens.

    Args:
        keys: keys of the blocks; changed in place.
        hashes: hashes of the request's full hash-blocks.
        factor: hashes per block; the last of them and ``suffix`` form the key.
        suffix: bytes that identify the KV-cache group.

    Returns:
        The number of leading keys that were correct and have stayed.
    """
    want = len(hashes) // factor
    known = min(len(keys), want)
    if known and keys[known - 1] != hashes[known * factor - 1] + suffix:
        # A hash covers all tokens before it: keys are correct up to some block, and wrong from that block on.
        known = bisect_left(
            range(known), True, key=lambda index: keys[index] != hashes[(index + 1) * factor - 1] + suffix
        )
    del keys[known:]
    if want > known:
        keys += [block_hash + suffix for block_hash in hashes[(known + 1) * factor - 1 : want * factor : factor]]
    return known


@dataclass(slots=True, eq=False)
class GroupState:
    """One KV-cache group of a request; compared by identity."""

    keys: list[OffloadKey] = field(default_factory=list)
    """Keys of the offloaded blocks in logical order, as far as their hashes exist."""
    block_ids: list[int] = field(default_factory=list)
    """GPU blocks in logical order, null blocks (0) included."""
    cursor: int = 0
    """Number of leading offloaded blocks that were offered for a store or need not be offered."""


Group = TypeVar("Group", bound=GroupState)


class Match(NamedTuple):
    """The last hit that was offered to the engine."""

    computed: int
    """Tokens that were computed when the hit was matched; the hit begins after them."""
    end: int
    """End of the hit in tokens."""
    is_within_step: bool = False
    """True if the hit is loaded within the step in which it was found; False (default): beside it."""


@dataclass(slots=True, eq=False)
class TrackedRequest(Generic[Group]):
    """One request, from the first call that names the request until the request ends."""

    request: EngineRequest
    """The engine's request."""
    policy: RequestPolicy
    """Parameters of the request: which tiers it may use, and how many tokens."""
    groups: list[Group]
    """State of each KV-cache group."""
    ctx: ReqContext
    """The request as the manager knows it."""
    keys: list[list[OffloadKey]] = field(init=False)
    """The key lists of ``groups``, shared with them."""
    variant: Variant | None = field(init=False)
    """Content that the request computes with beside the model; None if the engine's hashes cover all."""
    may_load: bool = True
    """True if the request may load."""
    match: Match | None = None
    """The last hit that was offered to the engine; None if the hit was loaded or nothing was offered."""
    open_question: tuple[int, int] | None = None
    """Computed tokens and known tokens at the last match, if that match was pending; None otherwise."""
    asked_blocks: int = 0
    """Blocks that the first match of the request probed and that no load has accounted for yet.

    The blocks are counted in the group that measures the length of a hit. A load accounts for them by the number of
    blocks that the primary tier had.
    """
    is_asked_early: bool = False
    """True if the request was looked up when it came, and the lookup was pending; default: False."""
    touched: bool = False
    """True after the first match, which marks the blocks of the request as recently used."""
    found_tokens: int | None = None
    """Leading tokens that the request found in the engine's prefix cache; None before a match."""
    filled_tokens: int = 0
    """Leading tokens that were found in the engine's prefix cache or loaded for the request."""
    parted_at: int = 0
    """Tokens up to which full attention was held at the last match, if windows cut the hit; else 0."""
    scheduled: bool = False
    """True if the request has computed tokens on its present blocks.

    Before, another connector may still load into the blocks.
    """
    invalid_from: int | None = None
    """First token whose KV must not be stored; None if all KV may be stored.

    A load did not fill the token's block, or the block is a suspect. Nothing of the request is stored until the engine
    goes back to this token.
    """
    allocated_at_step: int = -1
    """Step for which the request got its first blocks; default: -1."""
    next_store_at: int = 0
    """Number of computed tokens below which there are no new blocks to offer."""

    def __post_init__(self) -> None:
        self.keys = [group.keys for group in self.groups]
        self.variant = getattr(self.request, "variant", None)
        self.look_again()

    @property
    def has_blocks(self) -> bool:
        """True if the request holds GPU blocks."""
        return any(group.block_ids for group in self.groups)

    @property
    def tables(self) -> list[list[int]]:
        """GPU blocks of each group; the lists do not change when the request loses its blocks."""
        return [group.block_ids for group in self.groups]

    def extend_keys(self, layouts: Iterable[OffloadGroup]) -> None:
        """Append the keys of new hashes, and replace the keys of blocks whose tokens were replaced.

        Args:
            layouts: the KV-cache groups.
        """
        hashes = self.request.block_hashes
        if self.variant is not None:
            hashes = self.variant.names_of(hashes)
        for layout, group in zip(layouts, self.groups, strict=True):
            known = extend_keys(group.keys, hashes, layout.hash_block_size_factor, layout.key_suffix)
            group.cursor = min(group.cursor, known)

    def set_blocks(self, block_ids: BlockIds) -> None:
        """Replace the GPU blocks of the request."""
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.block_ids = list(ids)

    def append_blocks(self, block_ids: BlockIds) -> None:
        """Append GPU blocks to those of the request."""
        for group, ids in zip(self.groups, block_ids, strict=True):
            group.block_ids += ids

    def restart(self) -> None:
        """Forget the GPU blocks of the request and all state that depends on them."""
        for group in self.groups:
            group.block_ids = []
        self.found_tokens, self.filled_tokens, self.scheduled = None, 0, False
        self.invalid_from = self.match = None
        self.rewind()

    def distrust(self, invalid_from: int) -> None:
        """Do not store tokens from ``invalid_from`` on until the engine has gone back to them."""
        self.invalid_from = invalid_from if self.invalid_from is None else min(self.invalid_from, invalid_from)
        self.rewind()

    def rewind(self) -> None:
        """Offer all blocks of the request again."""
        for group in self.groups:
            group.cursor = 0
        self.look_again()

    def look_again(self) -> None:
        """Check at the next step for blocks to offer."""
        self.next_store_at = 0 if self.policy.store else NEVER
