"""The restriction of requests with LoRA adapters to tiers that cannot confuse two adapters.

A block's hash covers the adapter's name (from vLLM 0.31 also its path), not its content. A request with an adapter
therefore uses no tier that outlives the process. Requests whose adapter name has stood for two adapters use no tier at
all. Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiering.api.request_policy import parse_request_policy
from tiering.errors import ConfigError

logger = logging.getLogger("kv_tiering.vllm")

_NOTHING = {"load": False, "store": False}


class AdapterGuard:
    """The policy for requests with LoRA adapters.

    Args:
        local_tiers: names of the secondary tiers whose blocks end with the process; default none.
    """

    def __init__(self, local_tiers: Iterable[str] = ()) -> None:
        self._local_tiers = tuple(local_tiers)
        self._known: dict[str, tuple[Any, Any]] = {}
        self._ambiguous: set[str] = set()

    def admit(self, request: Any) -> Any:
        """Return a new request in the form that the scheduler half should see.

        A request without an adapter is returned unchanged; other requests get ``kv_transfer_params`` with restrictions.
        """
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return request
        name = str(lora.lora_name)
        adapter = (lora.lora_int_id, getattr(lora, "lora_path", None))
        replaced = getattr(lora, "load_inplace", False) or self._known.setdefault(name, adapter) != adapter
        if replaced and name not in self._ambiguous:
            self._ambiguous.add(name)
            logger.warning(
                "the LoRA adapter %r was replaced, but its blocks are identified by its name: its requests neither "
                "load nor store KV until the prefix cache is reset together with the connector's",
                name,
            )
        if name in self._ambiguous:
            return RequestWithParams(request, {**(request.kv_transfer_params or {}), "kv_tiering": _NOTHING})
        return RequestWithParams(request, without_persistent(request.kv_transfer_params, self._local_tiers))

    def reset(self) -> None:
        """Forget all adapters, because no block that was stored before is left."""
        self._known.clear()
        self._ambiguous.clear()


class RequestWithParams:
    """A request with other ``kv_transfer_params``.

    All other attributes are read from the engine's object, so they stay current.
    """

    def __init__(self, request: Any, params: Mapping[str, Any] | None) -> None:
        self._request = request
        self.kv_transfer_params = params
        """The parameters that replace those of the engine's request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def without_persistent(params: Mapping[str, Any] | None, tiers: Sequence[str]) -> Mapping[str, Any] | None:
    """Return ``params`` restricted to ``tiers``.

    Args:
        params: the request's ``kv_transfer_params``; invalid parameters are returned unchanged.
        tiers: names of the allowed secondary tiers.
    """
    try:
        asked = parse_request_policy(params).tiers
    except ConfigError:
        return params  # the scheduler half logs the problem; the request neither loads nor stores
    allowed = [tier for tier in tiers if asked is None or tier in asked]
    return {**(params or {}), "kv_tiering": {**((params or {}).get("kv_tiering") or {}), "tiers": allowed}}
