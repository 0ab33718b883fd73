"""The claims of requests on rows: the loads and stores that no completion has released yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from tiering.api.keys import OffloadKey
from tiering.api.transfer import Rows

_NO_ROWS: Rows = np.empty(0, np.int64)


@dataclass(slots=True)
class _Claimed:
    """Claims of one request that no completion has released yet."""

    batches: list[tuple[list[OffloadKey], Rows]] = field(default_factory=list)
    """Whole batches: keys and their rows."""
    parts: dict[OffloadKey, list[int]] = field(default_factory=dict)
    """Rest of batches that were released in parts: key → rows, oldest claim first."""


class Claims:
    """The claimed keys of each request with their rows.

    A completion thus ends only its own request's transfers. The same key may be claimed more than once; the oldest
    claim is released first. A completion nearly always names the keys of one preparation in the same order, so batches
    are kept whole and cost next to nothing.
    """

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: dict[str, _Claimed] = {}

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def holds(self, req_id: str) -> Collection[OffloadKey]:
        """Return the keys that a request claims."""
        claimed = self._requests.get(req_id)
        return () if claimed is None else {*claimed.parts, *(key for keys, _ in claimed.batches for key in keys)}

    def add(self, req_id: str, keys: Sequence[OffloadKey], rows: Rows) -> None:
        """Record that a request claims ``keys`` at ``rows``.

        Args:
            req_id: the request.
            keys: distinct keys.
            rows: row of each key.
        """
        claimed = self._requests.get(req_id)
        if claimed is None:
            claimed = self._requests[req_id] = _Claimed()
        claimed.batches.append((list(keys), rows))

    def release(self, req_id: str, keys: Sequence[OffloadKey]) -> tuple[Sequence[OffloadKey], Rows]:
        """End one claim on each of ``keys``.

        Returns:
            The keys that were claimed, and their rows.
        """
        claimed = self._requests.get(req_id)
        if claimed is None:
            return (), _NO_ROWS
        wanted = keys if isinstance(keys, list) else list(keys)
        if claimed.parts or claimed.batches[0][0] != wanted:
            released = self._release_parts(claimed, wanted)
        else:
            released = claimed.batches.pop(0)
        if not claimed.batches and not claimed.parts:
            del self._requests[req_id]
        return released

    @staticmethod
    def _release_parts(claimed: _Claimed, keys: list[OffloadKey]) -> tuple[list[OffloadKey], Rows]:
        parts = claimed.parts
        for batch_keys, batch_rows in claimed.batches:
            for key, row in zip(batch_keys, batch_rows.tolist(), strict=True):
                parts.setdefault(key, []).append(row)
        claimed.batches.clear()
        known = [key for key in dict.fromkeys(keys) if key in parts]
        rows = np.fromiter((parts[key].pop(0) for key in known), np.int64, len(known))
        for key in known:
            if not parts[key]:
                del parts[key]
        return known, rows
