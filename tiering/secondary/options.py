"""Options that all tiers have in common, as written in a stack file.

The options of a medium are a subclass of :class:`TierOptions`. The subclass lists the options that the medium cannot
support, each with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from tiering.api.units import Duration, Share, Size, Strict


class RetryOptions(Strict):
    """Retries of temporary errors: retry n waits ``backoff`` · 2ⁿ with jitter, at most ``backoff_max``."""

    attempts: Annotated[int, Field(ge=1, le=20)] = 4
    """Number of attempts, including the first; 1 to 20, default 4."""
    backoff: Duration = 0.05
    """Base of the waiting time in seconds; default 0.05."""
    backoff_max: Duration = 2.0
    """Longest waiting time in seconds; default 2."""


class BreakerOptions(Strict):
    """Circuit breaker of a medium: after a row of failures, only single probes reach the medium."""

    failures: Annotated[int, Field(ge=1, le=1 << 30)] = 8
    """Number of failures in a row that open the breaker; default 8."""
    probe_after: Duration = 1.0
    """Seconds until the first probe; the interval doubles after each failed probe; default 1."""
    probe_max: Duration = 60.0
    """Longest interval between probes in seconds; default 60."""


class TierOptions(Strict):
    """Options common to all tiers.

    An option that is left out keeps its default. An option that the medium cannot support is refused with the reason.
    """

    unsupported: ClassVar[Mapping[str, str]] = {}
    """Options that this medium cannot support: option name → reason, as shown to the user."""

    type: str
    """Type of the tier: the name of a built-in tier, or ``module:Name``."""
    name: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")
    """Name of the tier, unique in the stack; default: the type, without its module."""
    capacity: Size | None = None
    """Bytes that the tier may use on the medium; None (default): not set."""
    high_watermark: Share = 1.0
    """Share of ``capacity`` at which eviction begins; default 1."""
    low_watermark: Share = 1.0
    """Share of ``capacity`` at which eviction ends; default: ``high_watermark``."""
    eviction: str = "lru"
    """Eviction policy: "lru" (default), "arc" or ``module:Class``."""
    admission: Literal["all", "second_touch", "none"] = "all"
    """Admission policy: "all" (default), "second_touch", or "none" for a tier that is only read."""
    ttl: Duration | None = None
    """Age in seconds at which stored blocks may expire; None (default): blocks do not expire."""
    fill: bool = True
    """True (default) if blocks promoted from a slower tier are offered to this tier."""
    compression: Literal["none", "zstd"] = "none"
    """Compression of the blocks on the medium; default none."""
    deadline: Duration = 30.0
    """Deadline of one job in seconds; default 30."""
    lookup_deadline: Duration = 0.25
    """Seconds that a shared medium may leave a lookup undecided before the answer is "no"; default 0.25."""
    retries: RetryOptions = RetryOptions()
    """Retries of temporary errors."""
    breaker: BreakerOptions = BreakerOptions()
    """Circuit breaker of the medium."""
    max_inflight: Annotated[int, Field(ge=1, le=128)] = 8
    """Number of blocks, or runs of neighbouring blocks, moved at the same time (threads); default 8."""
    max_queued: Size = 1 << 30
    """Bytes of stores that may wait or run; the tail of a larger store is dropped; default 1 GiB."""
    primary_share: Share = 0.5
    """Largest share of the primary rows that this tier's running loads may hold; default 0.5."""
    min_prefix_blocks: Annotated[int, Field(ge=1, le=1 << 30)] = 1
    """Length in blocks of the shortest run that is worth a load from this tier; default 1."""
    required: bool = False
    """True if the engine must not start without this tier; default False."""

    @classmethod
    def refused_words(cls, words: Mapping[Any, Any]) -> dict[str, str]:
        """Return the given options that this medium cannot support, with the reasons.

        An unsupported option that is set to its default is not refused.
        """
        return {
            word: reason
            for word, reason in cls.unsupported.items()
            if word in words and not (word in cls.model_fields and words[word] == cls.model_fields[word].default)
        }

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for word, reason in (cls.refused_words(data) if isinstance(data, Mapping) else {}).items():
            raise ValueError(f"{word} is not supported by this tier: {reason}")
        return data

    @model_validator(mode="after")
    def _check_watermarks(self) -> TierOptions:
        if "low_watermark" not in self.model_fields_set:
            object.__setattr__(self, "low_watermark", self.high_watermark)  # the model is frozen from here on
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark {self.low_watermark} is above high_watermark {self.high_watermark}; "
                "eviction would never end"
            )
        return self

    @property
    def tier_name(self) -> str:
        """Name of the tier in metrics, logs and requests."""
        return self.name or self.type.rpartition(":")[2]
