"""Types of KV events, and of the engine data that the events tracker needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tiering.connector.protocols import EngineRequest
from tiering.connector.snapshots import ExternalHash, ExtraKeys


@dataclass(frozen=True, slots=True)
class OffloadingKVEventsConfig:
    """Switches for KV events."""

    enable_kv_cache_events: bool = False
    """True if the engine publishes KV events; default: False."""
    self_describing_kv_events: bool = False
    """True if the user wants events with hashes and tokens; default: False."""


class BlockStored(NamedTuple):
    """Event: a block became readable in a tier; the field names are vLLM's."""

    block_hashes: list[ExternalHash]
    """Hashes of the block in order; only the last hash if nothing else is known about the block."""
    parent_block_hash: ExternalHash | None
    """The hash before the first hash of the block; None at the start of a prompt or if not known."""
    token_ids: list[int]
    """Tokens of the block; empty if only the hash is known."""
    block_size: int
    """Tokens per hash; 0 if only the hash is known."""
    lora_id: int | None
    """Number of the LoRA adapter; None without one."""
    medium: str | None
    """Medium of the tier: "CPU" or "STORAGE"."""
    lora_name: str | None
    """Name of the LoRA adapter; None without one."""
    extra_keys: list[ExtraKeys] | None = None
    """Keys that the engine hashed in addition to the tokens, one entry per hash; None if not known."""
    group_idx: int | None = None
    """Index of the KV-cache group."""
    kv_cache_spec_kind: str | None = None
    """Kind of the KV-cache group."""
    kv_cache_spec_sliding_window: int | None = None
    """Sliding window of the group in tokens; None without one."""
    locality: str | None = None
    """Location of the tier: "LOCAL" or "REMOTE"."""
    ownership: str | None = None
    """Name of the secondary tier; None for the primary tier."""
    session_id: str | None = None
    """Session of the request that stored or found the block; None if it is not known."""
    lookahead_token_ids: list[list[int]] | None = None
    """Tokens after each hash-block that its hash covers too; None if hashes cover no later tokens."""


class BlockRemoved(NamedTuple):
    """Event: blocks were removed from a tier."""

    block_hashes: list[ExternalHash]
    """Hashes that were announced for the blocks."""
    medium: str | None
    """Medium of the tier: "CPU" or "STORAGE"."""
    group_idx: int | None = None
    """Index of the KV-cache group."""
    locality: str | None = None
    """Location of the tier: "LOCAL" or "REMOTE"."""
    ownership: str | None = None
    """Name of the secondary tier; None for the primary tier."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved
"""An event that consumers receive."""

ExtraKeysOf: TypeAlias = Callable[[EngineRequest, int, int, int], Sequence[ExtraKeys] | None]
"""The engine's function that returns the extra keys of hash-blocks, one entry per hash-block.

Arguments: request, first hash-block, number of hash-blocks, tokens per hash-block.
"""


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """Form of the engine's own KV events."""

    external_hash: Callable[[bytes], ExternalHash] | None = None
    """Converts a block hash to its published form; default: None, hashes are published unchanged."""
    extra_keys: ExtraKeysOf | None = None
    """Returns the keys that the engine hashed in addition to the tokens; default: None, not known."""
    lookahead_tokens: int = 0
    """Tokens after a hash-block that its hash covers too; default: 0."""
