"""The restriction of requests with LoRA adapters to tiers that cannot confuse two adapters.

A block's hash covers the adapter's name (from vLLM 0.31 also its path), not its content. A request with an adapter
therefore uses no tier that outlives the process. The workers report the identity of an adapter's files around each of
their loads (:mod:`tiering.engines.vllm.adapter_loads`). A name that no worker has reported uses no tier, nor does a
name that has stood for two adapters. Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from tiering.api.request_policy import parse_request_policy
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.engines.vllm.adapter_loads import key_of, name_of
from tiering.engines.vllm.loads import ordered_loads
from tiering.errors import ConfigError
from tiering.simple.metadata import SimpleCPUOffloadMetadata

logger = logging.getLogger("kv_tiering.vllm")

Metadata = OffloadingConnectorMetadata | SimpleCPUOffloadMetadata

_NOTHING = {"load": False, "store": False}


class AdapterGuard:
    """The policy for requests with LoRA adapters; the scheduler's thread calls all methods.

    vLLM reads an adapter's files whenever it needs an adapter that it does not hold, also one that it held before. The
    first requests of a name are therefore computed without tiers, until the workers have reported what they hold.

    Args:
        local_tiers: names of the secondary tiers whose blocks end with the process; default none.
    """

    def __init__(self, local_tiers: Iterable[str] = ()) -> None:
        self._local_tiers = tuple(local_tiers)
        self._known: dict[str, tuple[Any, Any]] = {}
        self._held: dict[str, str] = {}
        """Identity of each adapter as the workers reported it last, by key; "": no tier may be used."""
        self._ambiguous: set[str] = set()
        self._unknown: dict[str, str] = {}
        """Keys of adapters to ask the workers for, by the id of a request."""
        self._assumed: dict[str, tuple[str, str]] = {}
        """Key and identity of the adapter of each open request that may use tiers, by request id."""
        self._loaded: dict[str, set[int]] = {}
        """GPU blocks that loads fill, of requests in ``_assumed`` that have not been computed since."""

    def admit(self, request: Any) -> Any:
        """Return a new request in the form that the scheduler half should see.

        A request without an adapter is returned unchanged; other requests get ``kv_transfer_params`` with restrictions.
        """
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return request
        key, name = key_of(lora), str(lora.lora_name)
        adapter = (lora.lora_int_id, getattr(lora, "lora_path", None))
        if getattr(lora, "load_inplace", False) or self._known.setdefault(name, adapter) != adapter:
            self._confused(name)
        identity = self._held.get(key)
        if identity is None:
            self._unknown[request.request_id] = key
        if name in self._ambiguous or not identity:
            return _without_tiers(request)
        self._assumed[request.request_id] = (key, identity)
        return RequestWithParams(request, without_persistent(request.kv_transfer_params, self._local_tiers))

    def may_load(self, request_id: str) -> bool:
        """Return False if the adapter of a request is no longer the one that was assumed when it was admitted."""
        if (assumed := self._assumed.get(request_id)) is None:
            return True
        key, identity = assumed
        return name_of(key) not in self._ambiguous and self._held.get(key) == identity

    def report(self, adapters: Mapping[str, str]) -> None:
        """Process the workers' report.

        Args:
            adapters: identity of each adapter that was loaded or asked for, by key; "": not known, or not equal on all
                workers.
        """
        for key, identity in adapters.items():
            if self._held.setdefault(key, identity) != identity:
                self._held[key] = identity
                self._confused(name_of(key))

    def with_checks(self, metadata: Metadata, scheduled: Container[str]) -> Metadata:
        """Return a step's message with the adapters that the workers must check in this step.

        A worker may read an adapter's files again in the step that computes a request. Only that step shows whether the
        loaded KV belongs to the adapter.

        Args:
            metadata: the scheduler half's message; it is not changed.
            scheduled: ids of the requests that the step computes.
        """
        if not (self._assumed or self._unknown):
            return metadata
        blocks, _ = ordered_loads(metadata)
        for req_id in blocks.keys() & self._assumed.keys():
            self._loaded.setdefault(req_id, set()).update(blocks[req_id])
        due = [req_id for req_id in self._loaded if req_id in scheduled]
        checks = [(*self._assumed[req_id], self._loaded.pop(req_id)) for req_id in due]
        asking = [req_id for req_id in self._unknown if req_id in scheduled]
        checks += [(self._unknown.pop(req_id), "", set()) for req_id in asking]
        return dataclasses.replace(metadata, adapter_checks=checks) if checks else metadata

    def drop(self, request_id: str) -> None:
        """Forget a request that has ended."""
        for requests in (self._assumed, self._unknown, self._loaded):
            requests.pop(request_id, None)

    def reset(self) -> None:
        """Let all names use tiers again, because no block that was stored before is left.

        A request that goes on after the reset stores blocks for the adapter that the workers hold then.
        """
        self._known.clear()
        self._ambiguous.clear()
        self._held.clear()
        self._loaded.clear()
        self._unknown.update((req_id, key) for req_id, (key, _) in self._assumed.items())

    def _confused(self, name: str) -> None:
        if name not in self._ambiguous:
            self._ambiguous.add(name)
            logger.warning(
                "the LoRA adapter %r was replaced, but its blocks are identified by its name: its requests neither "
                "load nor store KV until the prefix cache is reset together with the connector's",
                name,
            )


def _without_tiers(request: Any) -> RequestWithParams:
    return RequestWithParams(request, {**(request.kv_transfer_params or {}), "kv_tiering": _NOTHING})


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
