"""The context of a request, and the policy that the manager returns for it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReqContext:
    """The identity of a request."""

    req_id: str
    """The engine's id of the request."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """The request's ``kv_transfer_params``; None if it has none."""


LATE_STORE = ReqContext("")
"""The context of late stores, whose blocks are about to leave the engine's cache; no request."""

WANTED_STORE = ReqContext("")
"""The context of stores of blocks that tiers want and only the engine's cache holds; no request."""


class OffloadPolicy(enum.Enum):
    """The blocks of a request that the connector offers to the manager."""

    BLOCK_LEVEL = "block_level"
    """Newly computed blocks."""
    REQUEST_LEVEL = "request_level"
    """All blocks of the request, including blocks that the primary tier already holds.

    At least one tier requires all blocks.
    """


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """The manager's reply to a new request."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
    """The blocks that the connector should offer for the request."""
