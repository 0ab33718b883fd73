"""The public API of kv-tiering, a multi-tier KV-cache hierarchy for LLM inference.

Names that are not imported here under their own name are private.
"""

import typing as _typing
from types import ModuleType as _ModuleType

from tiering.api.engine import CanonicalKVCacheRef as CanonicalKVCacheRef
from tiering.api.engine import CanonicalKVCaches as CanonicalKVCaches
from tiering.api.engine import CanonicalKVCacheTensor as CanonicalKVCacheTensor
from tiering.api.engine import EngineConfig as EngineConfig
from tiering.api.engine import KVCacheGroup as KVCacheGroup
from tiering.api.engine import OffloadingSpec as OffloadingSpec
from tiering.api.keys import OffloadKey as OffloadKey
from tiering.api.keys import get_offload_block_hash as get_offload_block_hash
from tiering.api.keys import get_offload_group_idx as get_offload_group_idx
from tiering.api.keys import make_offload_key as make_offload_key
from tiering.api.keys import prompt_keys as prompt_keys
from tiering.api.manager import OffloadingEvent as OffloadingEvent
from tiering.api.manager import OffloadingManager as OffloadingManager
from tiering.api.manager import PrefixMatch as PrefixMatch
from tiering.api.manager import PrepareStoreOutput as PrepareStoreOutput
from tiering.api.namespace import KVLayout as KVLayout
from tiering.api.namespace import ModelIdentity as ModelIdentity
from tiering.api.request import OffloadPolicy as OffloadPolicy
from tiering.api.request import ReqContext as ReqContext
from tiering.api.request import RequestOffloadingContext as RequestOffloadingContext
from tiering.api.transfer import BlockIDsLoadStoreSpec as BlockIDsLoadStoreSpec
from tiering.api.transfer import CPULoadStoreSpec as CPULoadStoreSpec
from tiering.api.transfer import GPULoadStoreSpec as GPULoadStoreSpec
from tiering.api.transfer import LoadStoreSpec as LoadStoreSpec
from tiering.block_tier.definition import TierDefinition as TierDefinition
from tiering.config.stack import open_manager as open_manager
from tiering.config.stack_file import StackConfig as StackConfig
from tiering.config.stack_file import load_stack as load_stack
from tiering.copy.contract import OffloadingHandler as OffloadingHandler
from tiering.copy.contract import TransferResult as TransferResult
from tiering.copy.tensors import pack_block as pack_block
from tiering.copy.tensors import unpack_block as unpack_block
from tiering.errors import ConfigError as ConfigError
from tiering.errors import CorruptBlockError as CorruptBlockError
from tiering.errors import DeviceError as DeviceError
from tiering.errors import InUseError as InUseError
from tiering.errors import NotReadableError as NotReadableError
from tiering.errors import OutOfSpaceError as OutOfSpaceError
from tiering.errors import OverdueError as OverdueError
from tiering.errors import PermanentStoreError as PermanentStoreError
from tiering.errors import PlaceLostError as PlaceLostError
from tiering.errors import ReadOnlyError as ReadOnlyError
from tiering.errors import RegionError as RegionError
from tiering.errors import StoreError as StoreError
from tiering.errors import TemporaryStoreError as TemporaryStoreError
from tiering.errors import TieringError as TieringError
from tiering.errors import TierUnavailableError as TierUnavailableError
from tiering.errors import WritesRefusedError as WritesRefusedError
from tiering.errors import WrongThreadError as WrongThreadError
from tiering.manager.manager import TieringOffloadingManager as TieringOffloadingManager
from tiering.manager.prompts import load_prefix as load_prefix
from tiering.manager.prompts import load_prefix_async as load_prefix_async
from tiering.manager.prompts import store_prefix as store_prefix
from tiering.manager.waiting import wait_for_prefix as wait_for_prefix
from tiering.manager.waiting import wait_for_prefix_async as wait_for_prefix_async
from tiering.manager.waiting import wait_until_idle as wait_until_idle
from tiering.manager.waiting import wait_until_idle_async as wait_until_idle_async
from tiering.medium.block_store import BlockIO as BlockIO
from tiering.medium.block_store import BlockStore as BlockStore
from tiering.medium.block_store import Done as Done
from tiering.medium.block_store import StoreProbe as StoreProbe
from tiering.primary.manager import CPUPrimaryTierOffloadingManager as CPUPrimaryTierOffloadingManager
from tiering.runtime.news import News as News
from tiering.secondary.contract import JobResult as JobResult
from tiering.secondary.contract import PrefixAnswer as PrefixAnswer
from tiering.secondary.contract import SecondaryTierManager as SecondaryTierManager
from tiering.secondary.contract import TierContext as TierContext
from tiering.secondary.contract import TransferJob as TransferJob
from tiering.secondary.options import TierOptions as TierOptions
from tiering.table.policies.policy import EvictionPolicy as EvictionPolicy

__version__ = "0.1.0"

if not _typing.TYPE_CHECKING:  # mypy would take the computed list for an empty one; it exports the names by their "as"
    __all__ = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _ModuleType)]
