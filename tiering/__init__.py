"""The public API of kv-tiering, a multi-tier KV-cache hierarchy for LLM inference.

Names that are not listed in ``__all__`` are private.
"""

from tiering.api.engine import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    EngineConfig,
    KVCacheGroup,
    OffloadingSpec,
)
from tiering.api.keys import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
    prompt_keys,
)
from tiering.api.manager import OffloadingEvent, OffloadingManager, PrefixMatch, PrepareStoreOutput
from tiering.api.namespace import KVLayout, ModelIdentity
from tiering.api.request import OffloadPolicy, ReqContext, RequestOffloadingContext
from tiering.api.transfer import BlockIDsLoadStoreSpec, CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec
from tiering.block_tier.definition import TierDefinition
from tiering.config.stack import open_manager
from tiering.config.stack_file import StackConfig, load_stack
from tiering.copy.contract import OffloadingHandler, TransferResult
from tiering.copy.tensors import pack_block, unpack_block
from tiering.errors import (
    ConfigError,
    CorruptBlockError,
    DeviceError,
    InUseError,
    NotReadableError,
    OutOfSpaceError,
    OverdueError,
    PermanentStoreError,
    PlaceLostError,
    ReadOnlyError,
    RegionError,
    StoreError,
    TemporaryStoreError,
    TieringError,
    TierUnavailableError,
    WritesRefusedError,
    WrongThreadError,
)
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.prompts import load_prefix, load_prefix_async, store_prefix
from tiering.manager.waiting import wait_for_prefix, wait_for_prefix_async, wait_until_idle, wait_until_idle_async
from tiering.medium.block_store import BlockIO, BlockStore, Done, StoreProbe
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.runtime.news import News
from tiering.secondary.contract import JobResult, PrefixAnswer, SecondaryTierManager, TierContext, TransferJob
from tiering.secondary.options import TierOptions
from tiering.table.policies.policy import EvictionPolicy

__version__ = "0.1.0"

__all__ = [
    "BlockIDsLoadStoreSpec",
    "BlockIO",
    "BlockStore",
    "CPULoadStoreSpec",
    "CPUPrimaryTierOffloadingManager",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "ConfigError",
    "CorruptBlockError",
    "DeviceError",
    "Done",
    "EngineConfig",
    "EvictionPolicy",
    "GPULoadStoreSpec",
    "InUseError",
    "JobResult",
    "KVCacheGroup",
    "KVLayout",
    "LoadStoreSpec",
    "ModelIdentity",
    "News",
    "NotReadableError",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingEvent",
    "OffloadingHandler",
    "OffloadingManager",
    "OffloadingSpec",
    "OutOfSpaceError",
    "OverdueError",
    "PermanentStoreError",
    "PlaceLostError",
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
    "TransferResult",
    "WritesRefusedError",
    "WrongThreadError",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "load_prefix",
    "load_prefix_async",
    "load_stack",
    "make_offload_key",
    "open_manager",
    "pack_block",
    "prompt_keys",
    "store_prefix",
    "unpack_block",
    "wait_for_prefix",
    "wait_for_prefix_async",
    "wait_until_idle",
    "wait_until_idle_async",
]
