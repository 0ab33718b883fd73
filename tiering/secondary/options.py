"""The one vocabulary of policies for every tier, as people write it in a stack file.

A medium's options are a subclass of :class:`TierOptions`, which declares the words it cannot support, each with the
reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from tiering.api.units import Duration, Share, Size, Strict


class RetryOptions(Strict):
    """Retries of temporary errors: ``attempts`` in all, waiting ``backoff`` · 2ⁿ with jitter, at most ``backoff_max``."""

    attempts: Annotated[int, Field(ge=1, le=20)] = 4
    backoff: Duration = 0.05
    backoff_max: Duration = 2.0


class BreakerOptions(Strict):
    """The circuit breaker: opens after ``failures`` in a row, lets one probe through after ``probe_after``, doubling to ``probe_max``."""

    failures: Annotated[int, Field(ge=1, le=1 << 30)] = 8
    probe_after: Duration = 1.0
    probe_max: Duration = 60.0


class TierOptions(Strict):
    """The vocabulary.  A word left out keeps its default; a word that a medium cannot support is refused with the reason."""

    unsupported: ClassVar[Mapping[str, str]] = {}
    """Word → why this medium cannot support it."""

    type: str
    name: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")
    """Unique in the stack; the type by default."""
    capacity: Size | None = None
    high_watermark: Share = 1.0
    """Share of ``capacity`` at which eviction begins ..."""
    low_watermark: Share = 1.0
    """... and where it ends; ``high_watermark`` if left out."""
    eviction: str = "lru"
    """"lru", "arc" or ``module:Class``."""
    admission: Literal["all", "second_touch", "none"] = "all"
    ttl: Duration | None = None
    fill: bool = True
    compression: Literal["none", "zstd"] = "none"
    deadline: Duration = 30.0
    """Of one job, in seconds."""
    lookup_deadline: Duration = 0.25
    """How long a shared medium may leave a lookup open before the answer is "no"."""
    retries: RetryOptions = RetryOptions()
    breaker: BreakerOptions = BreakerOptions()
    max_inflight: Annotated[int, Field(ge=1, le=128)] = 8
    """Blocks, or runs of neighbouring blocks, that are moved at the same time (threads)."""
    max_queued: Size = 1 << 30
    """Bytes of stores that may wait or run; the tail of what exceeds it is dropped."""
    primary_share: Share = 0.5
    min_prefix_blocks: Annotated[int, Field(ge=1, le=1 << 30)] = 1
    required: bool = False

    @classmethod
    def refused_words(cls, words: Mapping[Any, Any]) -> dict[str, str]:
        """Return the words that this medium cannot support, with the reasons; a default that is written out is no such word."""
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
                f"low_watermark {self.low_watermark} is above high_watermark {self.high_watermark}; eviction would never end"
            )
        return self

    @property
    def tier_name(self) -> str:
        """The tier's name in metrics, logs and requests."""
        return self.name or self.type.rpartition(":")[2]
