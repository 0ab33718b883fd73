"""The simple scheduler's state of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiering.offload import requests


@dataclass(slots=True, eq=False)
class GroupState(requests.GroupState):
    """One KV-cache group of a request; compared by identity."""

    lost: set[int] = field(default_factory=set)
    """Indexes of blocks before ``cursor`` that the CPU pool has evicted since."""


@dataclass(slots=True, eq=False)
class RequestState(requests.TrackedRequest[GroupState]):
    """One request, as the simple scheduler sees it."""

    matched_at: int = 0
    """Computed tokens at the last match that found a hit."""
    may_load: bool = True
    """False after the engine has taken back blocks that were being loaded."""
    loading: int = 0
    """Number of loads that have not ended."""

    @property
    def is_withheld(self) -> bool:
        """True if no block of the request may be stored now."""
        return self.invalid_from is not None and self.request.num_computed_tokens > self.invalid_from

    def confirmed_tokens(self) -> int:
        """Return the number of tokens whose KV is computed and final; placeholders do not count."""
        return self.request.num_computed_tokens - int(getattr(self.request, "num_output_placeholders", 0))
