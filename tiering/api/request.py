"""The context of a request, and what a request may ask of the tiers."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReqContext:
    """Who asks: the request's id and its ``kv_transfer_params``."""

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None


class OffloadPolicy(enum.Enum):
    """Which blocks of a request the connector offers to the manager."""

    BLOCK_LEVEL = "block_level"
    """Newly computed blocks."""
    REQUEST_LEVEL = "request_level"
    """All blocks of the request, also those that the primary tier holds already (some tier wants them all)."""


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """What the manager answers to a new request."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
