"""KV-cache groups as keys, block tables and KV events see them, and the table of the kinds of groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tiering.api.engine import KVCacheGroup
from tiering.api.keys import GROUP_BYTES


class GroupKind(Enum):
    """The rule by which a token reads the earlier tokens of a KV-cache group."""

    FULL = "full"
    """Every token reads all earlier tokens: all blocks of a prefix matter."""
    WINDOW = "window"
    """A token reads the last ``sliding_window`` tokens."""
    STATE = "state"
    """The group keeps one state per sequence: only the last block of a prefix matters."""


KINDS = {
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.WINDOW,
    "sliding_window_mla": GroupKind.WINDOW,
    "mamba": GroupKind.STATE,
    "state_space": GroupKind.STATE,
    "short_conv": GroupKind.STATE,
    "linear_attention": GroupKind.STATE,
    "gdn_attention": GroupKind.STATE,
}
"""Kind of a group by the engine's name for the kind. Groups of all other names cannot be offloaded."""


def kind_of(group: KVCacheGroup) -> GroupKind | None:
    """Return the kind of ``group``; None if the group cannot be offloaded block by block."""
    return KINDS.get(group.kind)


class KVEventGroupSpec(NamedTuple):
    """Description of a KV-cache group in KV events."""

    kind: str
    """Kind of the group, as the engine calls it."""
    window: int | None
    """Sliding window in tokens; None for full attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """One KV-cache group; an offloaded block consists of one or several GPU blocks.

    The class fits the protocol :class:`tiering.offload.event_types.EventGroupConfig`.
    """

    group_idx: int
    """Index of the group in the engine's list of KV-cache groups."""
    gpu_block_size: int
    """Tokens in a GPU block."""
    offloaded_block_size: int
    """Tokens in an offloaded block."""
    hash_block_size_factor: int
    """Hash-blocks in an offloaded block."""
    sliding_window: int | None
    """Sliding window in tokens; None for full attention and states."""
    kv_event_group_spec: KVEventGroupSpec
    """Description of the group in KV events."""

    key_suffix: bytes = field(init=False)
    """Bytes that identify the group at the end of a key."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_suffix", self.group_idx.to_bytes(GROUP_BYTES, "big"))
