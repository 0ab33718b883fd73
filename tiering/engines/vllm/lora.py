"""Requests with LoRA adapters: a block's hash covers an adapter's name (from vLLM 0.31 on its path too), not its content.

So such a request may use no tier that outlives the process, and a name that has stood for two adapters may use none at
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
    """Says what a request with an adapter may use.  ``local_tiers``: names of the secondary tiers that end with the process."""

    def __init__(self, local_tiers: Iterable[str] = ()) -> None:
        self._local_tiers = tuple(local_tiers)
        self._known: dict[str, tuple[Any, Any]] = {}
        self._ambiguous: set[str] = set()

    def admit(self, request: Any) -> Any:
        """``request`` as the core is to see it when it is new: itself, if it has no adapter."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return request
        name = str(lora.lora_name)
        adapter = (lora.lora_int_id, getattr(lora, "lora_path", None))
        replaced = getattr(lora, "load_inplace", False) or self._known.setdefault(name, adapter) != adapter
        if replaced and name not in self._ambiguous:
            self._ambiguous.add(name)
            logger.warning(
                "the LoRA adapter %r was replaced under its name, which its blocks are known by: its requests neither load nor store KV "
                "until the prefix cache is reset together with the connector's",
                name,
            )
        if name in self._ambiguous:
            return RequestWithParams(request, {**(request.kv_transfer_params or {}), "kv_tiering": _NOTHING})
        return RequestWithParams(request, without_persistent(request.kv_transfer_params, self._local_tiers))

    def reset(self) -> None:
        """Nothing that was stored before is there any more."""
        self._known.clear()
        self._ambiguous.clear()


class RequestWithParams:
    """``request`` with other ``kv_transfer_params``; everything else is the engine's own and stays up to date."""

    def __init__(self, request: Any, params: Mapping[str, Any] | None) -> None:
        self._request = request
        self.kv_transfer_params = params

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def without_persistent(params: Mapping[str, Any] | None, tiers: Sequence[str]) -> Mapping[str, Any] | None:
    """``params`` without the tiers that are not among ``tiers``."""
    try:
        asked = parse_request_policy(params).tiers
    except ConfigError:
        return params  # the core says what is wrong with it, and neither loads nor stores
    allowed = [tier for tier in tiers if asked is None or tier in asked]
    return {**(params or {}), "kv_tiering": {**((params or {}).get("kv_tiering") or {}), "tiers": allowed}}
