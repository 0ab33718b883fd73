"""The one vocabulary of policies for every tier, as people write it in a stack file.

A medium's options are a subclass of :class:`TierOptions`, which declares the words it cannot support, each with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tiering.masking import masked

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgtp]?i?b?)\s*$", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "p": 1000**5}
_SIZE_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgtp", start=1)}
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(us|ms|s|m|min|h|d|w)\s*$", re.IGNORECASE)
_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_size(value: object) -> int:
    """Bytes, from ``"8GiB"``, ``"500GB"``, ``"64 MiB"`` or a whole number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a size; write it like 8GiB, 500GB or a number of bytes")
    unit = match[2].lower().removesuffix("b")
    return int(float(match[1]) * _SIZE_UNITS[unit])


def parse_duration(value: object) -> float:
    """Seconds, from ``"7d"``, ``"500ms"``, ``"2m"`` or a number of seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a duration; write it like 500ms, 10s, 5m, 12h, 7d or a number of seconds")
    return float(match[1]) * _DURATION_UNITS[match[2].lower()]


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
"""A size in bytes, as people write it."""

Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]
"""A duration in seconds, as people write it."""

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Strict(BaseModel):
    """A part of the stack file: unknown words are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=False, hide_input_in_errors=True)

    def __repr_args__(self) -> Iterable[tuple[str | None, object]]:
        """What ``repr`` and ``str`` print: the fields, secrets masked."""
        return [(name, masked(name, value)) for name, value in self]


class RetryOptions(Strict):
    """Retries of temporary errors: ``attempts`` in all, waiting ``backoff`` · 2ⁿ with jitter, at most ``backoff_max``."""

    attempts: Annotated[int, Field(ge=1, le=20)] = 4
    backoff: Duration = 0.05
    backoff_max: Duration = 2.0


class BreakerOptions(Strict):
    """The circuit breaker: opens after ``failures`` in a row, lets one probe through after ``probe_after``, doubling to ``probe_max``."""

    failures: Annotated[int, Field(ge=1)] = 8
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
    """... and where it ends."""
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
    min_prefix_blocks: Annotated[int, Field(ge=1)] = 1
    required: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for word, reason in cls.unsupported.items():
                if word in data:
                    raise ValueError(f"{word} is not supported by this tier: {reason}")
        return data

    @model_validator(mode="after")
    def _check_watermarks(self) -> TierOptions:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark {self.low_watermark} is above high_watermark {self.high_watermark}; eviction would never end"
            )
        return self

    @property
    def tier_name(self) -> str:
        """The tier's name in metrics, logs and requests."""
        return self.name or self.type.rpartition(":")[2]
