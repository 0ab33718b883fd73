"""What a request asks of the tiers, and what its kind does not allow."""

from __future__ import annotations

from dataclasses import replace

from tiering.api.request_policy import RequestPolicy, parse_request_policy
from tiering.offload.protocols import EngineRequest


def policy_of(request: EngineRequest) -> RequestPolicy:
    """What ``request`` asks of the tiers.  Raises :class:`tiering.errors.ConfigError` naming the field that is wrong.

    Nothing is loaded for a request whose prompt must be computed (its logprobs are asked for, or all its tokens are
    pooled): what is loaded has no hidden states.  vLLM before 0.31 would take a hit for it.
    """
    policy = parse_request_policy(getattr(request, "kv_transfer_params", None))
    return replace(policy, load=False) if getattr(request, "skip_reading_prefix_cache", False) else policy
