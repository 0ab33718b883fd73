"""Public API for authors of tiers: contracts, the generic tier, its indexes, and the common options.

A tier needs this module and :mod:`tiering` (whose errors it raises), and nothing else of the framework.
``docs/writing-a-tier.md`` is the guide, ``examples/own_tier.py`` is a complete tier, and :mod:`tiering.testing`
contains the conformance suites.
"""

from tiering.admin.namespaces import known_namespaces, namespace_of
from tiering.admin.records import (
    Collected,
    EpochState,
    Finding,
    KnownNamespace,
    Limits,
    Severity,
    StoredBlock,
    UnsupportedError,
)
from tiering.admin.shared_admin import SharedAdmin
from tiering.admin.tier_admin import TierAdmin
from tiering.api.keys import OffloadKey
from tiering.api.masking import mask_text, record_secrets
from tiering.api.namespace import Namespace
from tiering.api.transfer import Rows
from tiering.api.units import Directory, Duration, FilePath, Share, Size, format_bytes
from tiering.block_tier.definition import TierDefinition
from tiering.block_tier.tier import BlockTier
from tiering.epochs.described import DESCRIBED, described_namespace
from tiering.epochs.documents import EPOCHS, LEASES
from tiering.epochs.hot_keys import HOT, HOT_SECONDS, hot_namespace
from tiering.index.shared import SharedIndex, parse_place
from tiering.index.slots import SlotIndex, SlotsSlice
from tiering.index.tier_index import Hints, Probe, StorePlan, TierIndex
from tiering.medium.block_store import (
    BatchStore,
    BlockIO,
    BlockStore,
    Done,
    Outcome,
    Place,
    RawBlock,
    Settlement,
    StoreProbe,
    StoreTraits,
)
from tiering.medium.chore import Backoff, Chore
from tiering.medium.files import Files, fresh_name, store_error, store_errors
from tiering.medium.frame import HEADER_BYTES, SEQUENCE, CorruptReason, FrameHeader, parse_header
from tiering.medium.side import IoSide, IoTask
from tiering.runtime.flag import Flag
from tiering.runtime.pool import ThreadPool
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.contract import (
    JobResult,
    PrefixAnswer,
    SecondaryTierManager,
    StepEnd,
    TierContext,
    TierHotKeys,
    TierIntake,
    TierTraits,
    TransferJob,
)
from tiering.secondary.options import (
    BlockTierOptions,
    CapacityOptions,
    CompressionOptions,
    SharedOptions,
    SlotOptions,
    TierOptions,
    Transfers,
    TtlOptions,
)
from tiering.secondary.tier_stats import TierStats
from tiering.table.disposal import Table

__all__ = [
    "DESCRIBED",
    "EPOCHS",
    "HEADER_BYTES",
    "HOT",
    "HOT_SECONDS",
    "LEASES",
    "SEQUENCE",
    "Backoff",
    "BatchStore",
    "BlockIO",
    "BlockStore",
    "BlockTier",
    "BlockTierOptions",
    "CapacityOptions",
    "Chore",
    "Collected",
    "CompressionOptions",
    "CorruptReason",
    "Directory",
    "Done",
    "Duration",
    "EpochState",
    "FilePath",
    "Files",
    "Finding",
    "Flag",
    "FrameHeader",
    "Hints",
    "IoSide",
    "IoTask",
    "JobResult",
    "KnownNamespace",
    "Limits",
    "Namespace",
    "OffloadKey",
    "Outcome",
    "Place",
    "PrefixAnswer",
    "Probe",
    "RateLimit",
    "RawBlock",
    "Rows",
    "SecondaryTierManager",
    "Settlement",
    "Severity",
    "Share",
    "SharedAdmin",
    "SharedIndex",
    "SharedOptions",
    "Size",
    "SlotIndex",
    "SlotOptions",
    "SlotsSlice",
    "StepEnd",
    "StorePlan",
    "StoreProbe",
    "StoreTraits",
    "StoredBlock",
    "Table",
    "ThreadPool",
    "TierAdmin",
    "TierContext",
    "TierDefinition",
    "TierHotKeys",
    "TierIndex",
    "TierIntake",
    "TierOptions",
    "TierStats",
    "TierTraits",
    "TransferJob",
    "Transfers",
    "TtlOptions",
    "UnsupportedError",
    "described_namespace",
    "format_bytes",
    "fresh_name",
    "hot_namespace",
    "known_namespaces",
    "mask_text",
    "namespace_of",
    "parse_header",
    "parse_place",
    "record_secrets",
    "store_error",
    "store_errors",
]
