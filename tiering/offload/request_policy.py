"""The policy of an engine's request: its parameters, restricted by the kind of the request."""

from __future__ import annotations

from dataclasses import replace

from tiering.api.request_policy import RequestPolicy, parse_request_policy
from tiering.offload.protocols import EngineRequest


def policy_of(request: EngineRequest) -> RequestPolicy:
    """Return the policy of ``request``.

    Nothing is loaded for a request whose entire prompt must be computed, because loaded tokens have no hidden states.
    Such requests ask for logprobs of the prompt, or pool all tokens. vLLM before 0.31 would use a hit for such a
    request.

    Raises:
        ConfigError: a parameter of the request is invalid; the message names the field.
    """
    policy = parse_request_policy(getattr(request, "kv_transfer_params", None))
    return replace(policy, load=False) if getattr(request, "skip_reading_prefix_cache", False) else policy
