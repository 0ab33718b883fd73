"""KV events as consumers know them, and what the tracker of events is told of the engine and its KV-cache groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from tiering.offload.protocols import EngineRequest
from tiering.offload.snapshots import ExternalHash, ExtraKeys


@dataclass(frozen=True, slots=True)
class OffloadingKVEventsConfig:
    """The engine's switch for KV events, and the user's opt-in to events that describe themselves."""

    enable_kv_cache_events: bool = False
    self_describing_kv_events: bool = False


class BlockStored(NamedTuple):
    """A block became readable in a tier.  The names are vLLM's."""

    block_hashes: list[ExternalHash]
    """The block's hashes, in their order; only the last one if nothing else is known of the block."""
    parent_block_hash: ExternalHash | None
    """The hash before the first one."""
    token_ids: list[int]
    """The block's tokens; none if only its hash is known."""
    block_size: int
    """Tokens per hash; 0 if only the hash is known."""
    lora_id: int | None
    """The adapter's number."""
    medium: str | None
    """"CPU" or "STORAGE"."""
    lora_name: str | None
    """The adapter's name."""
    extra_keys: list[ExtraKeys] | None = None
    """What the engine hashed beside the tokens, per hash."""
    group_idx: int | None = None
    """The KV-cache group."""
    kv_cache_spec_kind: str | None = None
    """The group's kind."""
    kv_cache_spec_sliding_window: int | None = None
    """The group's window in tokens."""
    locality: str | None = None
    """"LOCAL" or "REMOTE"."""
    ownership: str | None = None
    """The secondary tier's name; None for the primary tier."""
    lookahead_token_ids: list[list[int]] | None = None
    """Tokens behind each hash-block that its hash covers as well; None if hashes cover their own tokens only."""


class BlockRemoved(NamedTuple):
    """Blocks are gone from a tier."""

    block_hashes: list[ExternalHash]
    """The hashes that were announced with the blocks."""
    medium: str | None
    """"CPU" or "STORAGE"."""
    group_idx: int | None = None
    """The KV-cache group."""
    locality: str | None = None
    """"LOCAL" or "REMOTE"."""
    ownership: str | None = None
    """The secondary tier's name; None for the primary tier."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved

ExtraKeysOf: TypeAlias = Callable[[EngineRequest, int, int, int], Sequence[ExtraKeys] | None]
"""The engine's own function: (request, first hash-block, number of hash-blocks, tokens per hash-block) → one entry per hash-block."""


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """How the engine writes its own KV events."""

    external_hash: Callable[[bytes], ExternalHash] | None = None
    """Converts a block hash to its published form; None: published as it is."""
    extra_keys: ExtraKeysOf | None = None
    """Tells what the engine hashed beside the tokens; None: unknown."""
    lookahead_tokens: int = 0
    """Tokens behind a hash-block that its hash covers as well."""


class EventGroupConfig(Protocol):
    """What the tracker needs to know of a KV-cache group.

    ``sliding_window_size_in_blocks`` is not None also for state-space groups; ``kv_event_group_spec`` is (kind, window
    in tokens).
    """

    @property
    def group_idx(self) -> int: ...
    @property
    def offloaded_block_size(self) -> int: ...
    @property
    def hash_block_size_factor(self) -> int: ...
    @property
    def sliding_window_size_in_blocks(self) -> int | None: ...
    @property
    def kv_event_group_spec(self) -> tuple[str | None, int | None]: ...
