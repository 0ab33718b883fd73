"""Public API for authors of tiers: contracts, the generic tier, its indexes, and the common options.

A tier needs this module and :mod:`tiering` (whose errors it raises), and nothing else of the framework.
``docs/writing-a-tier.md`` is the guide, ``examples/own_tier.py`` is a complete tier, and :mod:`tiering.testing`
contains the conformance suites.
"""

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
from tiering.admin.tier_admin import TierAdmin
from tiering.api.keys import OffloadKey
from tiering.api.namespace import Namespace
from tiering.api.transfer import Rows
from tiering.api.units import Duration, Share, Size
from tiering.block_tier.definition import TierDefinition
from tiering.block_tier.tier import BlockTier
from tiering.index.shared import SharedIndex
from tiering.index.slots import SlotIndex
from tiering.index.tier_index import Probe, StorePlan, TierIndex
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
from tiering.medium.messages import IoTask
from tiering.secondary.contract import (
    JobResult,
    PrefixAnswer,
    SecondaryTierManager,
    StepEnd,
    TierContext,
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
    TtlOptions,
)
from tiering.secondary.tier_stats import TierStats

__all__ = [
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
    "Done",
    "Duration",
    "EpochState",
    "Finding",
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
    "RawBlock",
    "Rows",
    "SecondaryTierManager",
    "Settlement",
    "Severity",
    "Share",
    "SharedIndex",
    "SharedOptions",
    "Size",
    "SlotIndex",
    "SlotOptions",
    "StepEnd",
    "StorePlan",
    "StoreProbe",
    "StoreTraits",
    "StoredBlock",
    "TierAdmin",
    "TierContext",
    "TierDefinition",
    "TierIndex",
    "TierIntake",
    "TierOptions",
    "TierStats",
    "TierTraits",
    "TransferJob",
    "TtlOptions",
    "UnsupportedError",
]
