"""Options of secondary tiers, as written in a stack file.

The options of a tier are opt-in. :class:`TierOptions` has the words of every tier. The class of one tier adds words of
its own, and takes further common words by mix-ins:

- :class:`BlockTierOptions`: the words that :class:`tiering.block_tier.tier.BlockTier` honours by itself.
- :class:`CapacityOptions`: a bounded size.
- :class:`SlotOptions`: a bounded size and eviction, as a slot index has them.
- :class:`SharedOptions`: results of probes, as a shared index keeps them.
- :class:`TtlOptions`: an age at which blocks may expire.
- :class:`CompressionOptions`: compression, for stores that take blocks of any size.

A stack with a common word that the class does not name is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic.fields import FieldInfo

from tiering.api.masking import shown
from tiering.api.units import Duration, Share, Size, Strict
from tiering.runtime.depth import AUTO_DEPTH, DepthBounds, fixed_depth
from tiering.table.policies.builtin import load_policy


def known_policy(name: str) -> str:
    """Return ``name`` if it names an eviction policy.

    Raises:
        ConfigError: there is no such policy.
    """
    load_policy(name)
    return name


def _known_depth(value: object) -> object:
    """Return ``value`` as a number or "auto", so that a mistake is reported as one problem."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 4:
        value = int(value)
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 128):
        return value
    raise ValueError(f"{shown(value)} is not a number of transfers; write auto, or a number from 1 to 128")


Transfers: TypeAlias = Annotated[Literal["auto"] | Annotated[int, Field(ge=1, le=128)], BeforeValidator(_known_depth)]
"""A number of transfers at the same time, or "auto"."""


class RetryOptions(Strict):
    """Retries of temporary errors: retry n waits ``backoff`` · 2ⁿ with jitter, at most ``backoff_max``."""

    attempts: Annotated[int, Field(ge=1, le=20)] = 4
    """Number of attempts, including the first; default 4."""
    backoff: Duration = 0.05
    """Seconds before the first retry; default 0.05. The wait doubles for each further retry, with jitter."""
    backoff_max: Duration = 2.0
    """Longest wait before a retry, in seconds; default 2."""


class BreakerOptions(Strict):
    """Circuit breaker of a medium: after a row of failures, only single probes reach the medium."""

    failures: Annotated[int, Field(ge=1, le=1 << 30)] = 8
    """Number of failures in a row that open the breaker; default 8."""
    probe_after: Duration = 1.0
    """Seconds until the first probe; default 1.

    The interval doubles after each failed probe, and when the breaker opens again soon after it closed.
    """
    probe_max: Duration = 60.0
    """Longest interval between probes in seconds; default 60."""


class TierOptions(Strict):
    """Options of every tier, and the base of all mix-ins."""

    unsupported: ClassVar[Mapping[str, str]] = {}
    """Words that the tier refuses for a reason of its own: word → reason, as shown to the user."""

    type: str
    """Type of the tier: the name of a built-in tier, or ``module:Name``."""
    name: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")
    """Name of the tier: at most 32 small letters, digits, - and _; default: the type, without its module.

    Metrics, logs and a request's ``tiers`` use this name.

    The name is unique in the stack, and is not "cpu", the name of the primary tier.
    """
    required: bool = False
    """True if the engine must not start without this tier; default False."""

    @classmethod
    def refused_words(cls, words: Mapping[Any, Any]) -> dict[str, str]:
        """Return the given words that this tier does not honour, with the reasons.

        A word with its default value asks for nothing, and is not refused.
        """
        refused: dict[str, str] = {}
        for word, value in words.items():
            common, absence = _COMMON_WORDS.get(word, (None, ""))
            reason = cls.unsupported.get(word) or _REPLACED.get(word) or ("" if word in cls.model_fields else absence)
            field = cls.model_fields.get(word, common)
            if reason and (field is None or value != field.default):
                refused[word] = reason
        return refused

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        for word, reason in cls.refused_words(data).items():
            raise ValueError(f"{word} is not supported by this tier: {reason}")
        # The common words that remain, but are no fields of this class, have their default values.
        return {word: item for word, item in data.items() if word in cls.model_fields or word not in _COMMON_WORDS}

    @property
    def tier_name(self) -> str:
        """Name of the tier in metrics, logs and requests."""
        return self.name or self.type.rpartition(":")[2]

    @property
    def capacity_bytes(self) -> int | None:
        """Capacity of the tier in bytes; None if the stack does not bound it."""
        return None


class BlockTierOptions(TierOptions):
    """Options that every block tier honours, on any medium."""

    admission: Literal["all", "second_touch", "none"] = "all"
    """Admission policy: "all" (default), "second_touch" or "none".

    "second_touch" stores a block when it is used again; a tier with "none" is only read.
    """
    fill: Literal["second_touch", "all", "none"] | bool = "second_touch"
    """Blocks from slower tiers that this tier stores: "second_touch" (default), "all" or "none".

    "second_touch" stores a promoted block when it is used again, "all" at its first promotion. No tier stores more of
    them than ``admission`` admits. ``true`` and ``false`` mean "all" and "none".
    """
    deadline: Duration = 30.0
    """Deadline of one job in seconds; default 30."""
    load_deadline: Duration | None = None
    """Seconds that a request waits for a load; default: ``deadline``.

    Blocks that arrive later are misses. The blocks in front of them that arrived in time count.
    """
    retries: RetryOptions = RetryOptions()
    """Retries of temporary errors."""
    breaker: BreakerOptions = BreakerOptions()
    """Circuit breaker of the medium; reads and writes have one each."""
    max_inflight: Transfers = "auto"
    """Number of blocks, or runs of neighbouring blocks, moved at the same time (threads); default "auto".

    "auto" begins with 8. For loads and for stores, it then finds the number beyond which they no longer become faster,
    from 2 to 32.
    """
    primary_share: Share = 0.5
    """Largest share of the primary rows that this tier's running loads may hold; default 0.5.

    Overdue loads count as running.
    """
    min_prefix_blocks: Annotated[int, Field(ge=1, le=1 << 30)] = 1
    """Length in blocks of the shortest run that is worth a load from this tier; default 1."""

    load_or_compute: Literal["auto", "always", "never"] = "always"
    """Rule by which requests load or compute the blocks of this tier; default "always".

    "auto" computes the blocks of a request if that takes less time than their load, by what the tier and the engine
    have taken lately. With "never", the tier only stores, and serves warm starts.
    """

    @property
    def longest_load(self) -> float:
        """Seconds that a request waits for a load."""
        return self.deadline if self.load_deadline is None else min(self.load_deadline, self.deadline)

    @property
    def depth(self) -> DepthBounds:
        """Bounds of the number of units that run at the same time, for each direction."""
        return AUTO_DEPTH if self.max_inflight == "auto" else fixed_depth(self.max_inflight)

    @property
    def fill_policy(self) -> Literal["second_touch", "all", "none"]:
        """The admission policy that ``fill`` names."""
        if isinstance(self.fill, bool):
            return "all" if self.fill else "none"
        return self.fill


class CapacityOptions(TierOptions):
    """Mix-in for tiers that keep within a number of bytes."""

    capacity: Size | None = None
    """Bytes that the tier may use on the medium; None (default): no bound."""

    @property
    def capacity_bytes(self) -> int | None:
        return self.capacity


class SlotOptions(CapacityOptions):
    """Mix-in for tiers with a slot index, which evicts blocks."""

    high_watermark: Share = 1.0
    """Share of ``capacity`` at which eviction begins; default 1."""
    low_watermark: Share = 1.0
    """Share of ``capacity`` at which eviction ends; default: ``high_watermark``."""
    eviction: Annotated[str, AfterValidator(known_policy)] = "lru"
    """Eviction policy: "lru" (default), "arc" or ``module:Class``."""

    @model_validator(mode="after")
    def _check_watermarks(self) -> SlotOptions:
        if "low_watermark" not in self.model_fields_set:
            object.__setattr__(self, "low_watermark", self.high_watermark)  # the model is frozen from here on
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark {self.low_watermark} is above high_watermark {self.high_watermark}; "
                "eviction would never end: swap the two values, or leave low_watermark out"
            )
        return self


class SharedOptions(TierOptions):
    """Mix-in for tiers with a shared index, which probes the medium."""

    present_ttl: Duration = 300.0
    """Time for which a positive probe result stays valid; default 300."""
    absent_ttl: Duration = 10.0
    """Time for which a negative probe result stays valid; default 10."""
    lookup_deadline: Duration = 0.25
    """Seconds that a shared medium may leave a lookup undecided before the answer is no; default 0.25."""


class TtlOptions(TierOptions):
    """Mix-in for tiers whose blocks may expire."""

    ttl: Duration | None = None
    """Age at which stored blocks may expire; None (default): blocks do not expire."""


class CompressionOptions(TierOptions):
    """Mix-in for tiers whose store accepts blocks of any size; their I/O side then compresses."""

    compression: Literal["none", "zstd"] = "none"
    """Compression of the blocks on the medium; default none."""


_REPLACED: Mapping[str, str] = {"max_queued": "replaced by credit; delete the line"}
"""Words of the version before that are refused, with the reasons."""


_ABSENCES: Sequence[tuple[type[TierOptions], str]] = (
    (BlockTierOptions, "it has an I/O side of its own, which does not take this word"),
    (SlotOptions, "it does not evict blocks"),
    (CapacityOptions, "it does not bound the bytes that it uses"),
    (SharedOptions, "it does not probe a shared medium"),
    (TtlOptions, "its blocks do not expire by age"),
    (CompressionOptions, "it does not compress blocks"),
)

_COMMON_WORDS: Mapping[str, tuple[FieldInfo, str]] = {
    word: (field, absence)
    for mixin, absence in _ABSENCES
    for word, field in mixin.model_fields.items()
    if word not in TierOptions.model_fields
}
"""Common word of the mix-ins → its field, and why a tier without the mix-in refuses the word."""
