"""kv-tiering: a multi-tier KV-cache hierarchy for LLM inference.  This is the public API; what is not named here is private."""

from tiering.base import (
    BlockIDsLoadStoreSpec,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    PrefixMatch,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from tiering.block_store import BlockIO, BlockStore, Done, StoreProbe
from tiering.config import StackConfig, load_stack
from tiering.definition import TierDefinition
from tiering.errors import (
    ConfigError,
    CorruptBlockError,
    DeviceError,
    NotReadableError,
    OutOfSpaceError,
    OverdueError,
    PermanentStoreError,
    ReadOnlyError,
    RegionError,
    StoreError,
    TemporaryStoreError,
    TieringError,
    TierUnavailableError,
    WrongThreadError,
)
from tiering.manager import TieringOffloadingManager
from tiering.namespace import KVLayout, ModelIdentity
from tiering.news import News
from tiering.options import TierOptions
from tiering.policies.base import EvictionPolicy
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.base import JobResult, PrefixAnswer, SecondaryTierManager, TierContext, TransferJob
from tiering.stack import open_manager
from tiering.waiting import wait_for_prefix, wait_for_prefix_async, wait_until_idle, wait_until_idle_async

__version__ = "0.1.0"

__all__ = [
    "BlockIDsLoadStoreSpec",
    "BlockIO",
    "BlockStore",
    "CPULoadStoreSpec",
    "CPUPrimaryTierOffloadingManager",
    "ConfigError",
    "CorruptBlockError",
    "DeviceError",
    "Done",
    "EvictionPolicy",
    "GPULoadStoreSpec",
    "JobResult",
    "KVLayout",
    "LoadStoreSpec",
    "ModelIdentity",
    "News",
    "NotReadableError",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingEvent",
    "OffloadingManager",
    "OffloadingSpec",
    "OutOfSpaceError",
    "OverdueError",
    "PermanentStoreError",
    "PrefixAnswer",
    "PrefixMatch",
    "PrepareStoreOutput",
    "ReadOnlyError",
    "RegionError",
    "ReqContext",
    "RequestOffloadingContext",
    "SecondaryTierManager",
    "StackConfig",
    "StoreError",
    "StoreProbe",
    "TemporaryStoreError",
    "TierContext",
    "TierDefinition",
    "TierOptions",
    "TierUnavailableError",
    "TieringError",
    "TieringOffloadingManager",
    "TransferJob",
    "WrongThreadError",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "load_stack",
    "make_offload_key",
    "open_manager",
    "wait_for_prefix",
    "wait_for_prefix_async",
    "wait_until_idle",
    "wait_until_idle_async",
]
