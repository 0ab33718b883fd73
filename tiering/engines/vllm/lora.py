"""The rules for requests with LoRA adapters, so that no adapter gets the KV of another one.

A block's hash covers the adapter's name (from vLLM 0.31 also its path), not its content. The workers report the
identity of an adapter's files around each of their loads (:mod:`tiering.engines.vllm.adapter_loads`). Until they have,
an adapter's requests load nothing.

In the tiering mode the identity becomes part of the names of an adapter's blocks, so that all tiers may hold them. The
first requests of an adapter wait a short time for a worker to read the files; what it loads then must be equal. An
adapter whose files are not known has an identity for each of its loads, and uses the CPU tier only. In the simple mode
a name that has stood for two adapters uses no tier. Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Container, Mapping
from itertools import chain
from typing import Any

from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.variants import Variant
from tiering.engines.vllm.adapter_loads import (
    MAX_ADAPTERS,
    UNREAD,
    AdapterFiles,
    RecentAdapters,
    is_private,
    key_of,
    name_of,
)
from tiering.engines.vllm.loads import ordered_loads
from tiering.simple.metadata import SimpleCPUOffloadMetadata

logger = logging.getLogger("kv_tiering.vllm")

Metadata = OffloadingConnectorMetadata | SimpleCPUOffloadMetadata

READ_PATIENCE = 1.0
"""Most seconds for which the first requests of an adapter wait for a worker to read its files."""

_NOTHING = {"load": False, "store": False}


class AdapterGuard:
    """The guard of an engine whose workers report no adapters: requests with adapters use no tier.

    The scheduler's thread calls all methods. Subclasses let adapters that the workers have reported use tiers.

    vLLM reads an adapter's files whenever it needs an adapter that it does not hold, also one that it held before.
    """

    def __init__(self) -> None:
        self._unknown: dict[str, str] = {}
        """Keys of adapters to ask the workers for, by the id of a request."""
        self._assumed: dict[str, tuple[str, str]] = {}
        """Key and identity of the adapter of each open request that may use tiers, by request id."""
        self._loaded: dict[str, set[int]] = {}
        """GPU blocks that loads fill, of requests in ``_assumed`` that have not been computed since."""

    def admit(self, request: Any) -> Any:
        """Return a new request in the form that the scheduler half should see.

        A request without an adapter is returned unchanged.
        """
        lora = getattr(request, "lora_request", None)
        return request if lora is None else self._admit(request, lora)

    def _admit(self, request: Any, lora: Any) -> RequestWithParams:
        """Return a request with the adapter ``lora`` in the form that the scheduler half should see."""
        return _without_tiers(request)

    def may_load(self, request_id: str) -> bool | None:
        """Return False if the adapter of a request is no longer the one that was assumed when it was admitted.

        None: not known yet, because a worker reads the adapter's files.
        """
        return True

    def report(self, adapters: Mapping[str, str]) -> None:
        """Process the workers' report.

        Args:
            adapters: identity of each adapter that was loaded, read or asked for, by key; "": not known, or not equal
                on all workers.
        """

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
        """Process a reset after which no block that was stored before is left."""


class AdapterVariants(AdapterGuard):
    """The guard of the tiering mode: the names of an adapter's blocks cover the identity of its files.

    Args:
        half: the scheduler half.
        clock: returns monotonic seconds; default: :func:`time.monotonic`.
    """

    def __init__(self, half: OffloadingConnectorScheduler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._half = half
        self._clock = clock
        self._to_read: dict[str, AdapterFiles] = {}
        self._read_by = RecentAdapters[float]()
        """Time until which requests wait for the files of an adapter, by its key."""
        self._variants = RecentAdapters[Variant]()
        """Variant of each adapter for its new requests, by key; the workers report a dropped one again."""
        self._waiting: dict[str, tuple[str, Variant]] = {}
        """Key and variant of the open requests whose adapter was not known at first, by request id."""

    def _admit(self, request: Any, lora: Any) -> RequestWithParams:
        key = key_of(lora)
        if (variant := self._variants.use(key)) is None:
            variant = self._new_variant(key)
            self._read_by.pop(key, None)
        if variant.is_void:
            return _without_tiers(request, variant)
        if variant.identity:
            self._assumed[request.request_id] = (key, variant.identity)
        else:
            self._unknown[request.request_id] = key
            self._waiting[request.request_id] = (key, variant)
            if key not in self._read_by:
                self._read_by.put(key, self._clock() + READ_PATIENCE, self._in_use)
                self._to_read[key] = (str(lora.lora_path), bool(getattr(lora, "is_3d_lora_weight", False)))
        params = request.kv_transfer_params
        return RequestWithParams(request, _in_memory(params) if is_private(variant.identity) else params, variant)

    def may_load(self, request_id: str) -> bool | None:
        if (waiting := self._waiting.get(request_id)) is None:
            return True
        key, variant = waiting
        if variant.identity or variant.is_void or self._clock() >= self._read_by[key]:
            return True
        state = self._half.states.get(request_id)
        return None if state is not None and state.may_load and state.request.block_hashes else True

    def with_checks(self, metadata: Metadata, scheduled: Container[str]) -> Metadata:
        metadata = super().with_checks(metadata, scheduled)
        if not self._to_read or isinstance(metadata, SimpleCPUOffloadMetadata):
            return metadata
        files, self._to_read = self._to_read, {}
        return dataclasses.replace(metadata, adapters_to_read=files)

    def _new_variant(self, key: str) -> Variant:
        """Return a variant for the new requests of an adapter; its identity is not known yet."""
        variant = Variant(self._half.events.own_hashes)
        self._variants.put(key, variant, self._in_use)
        return variant

    def _in_use(self) -> set[str]:
        """Return the keys of the adapters that have open requests."""
        return {key for key, _ in chain(self._assumed.values(), self._waiting.values())}

    def report(self, adapters: Mapping[str, str]) -> None:
        for key, identity in adapters.items():
            self._read_by.put(key, -math.inf, self._in_use)
            if identity == UNREAD:
                continue
            variant = self._variants.get(key)
            if variant is None or (variant.is_void and identity):
                variant = self._new_variant(key)
            elif variant.is_void or variant.identity == identity != "":
                continue
            elif variant.identity:
                self._replaced(variant, key)
                variant = self._new_variant(key)
            elif is_private(identity):
                # Requests that were admitted before the report might use tiers that outlive the engine.
                self._identify(variant, key, "")
                variant = self._new_variant(key)
            self._identify(variant, key, identity)

    def _identify(self, variant: Variant, key: str, identity: str) -> None:
        """Set the identity of a variant that had none."""
        if identity:
            variant.identify(identity)
            for req_id in [req_id for req_id, its_key in self._unknown.items() if its_key == key]:
                del self._unknown[req_id]
            waiting = [req_id for req_id, (_, its) in self._waiting.items() if its is variant]
            self._assumed |= dict.fromkeys(waiting, (key, identity))
        else:
            variant.is_void = True
        self._half.variant_changed(variant)

    def _replaced(self, variant: Variant, key: str) -> None:
        """Give up a variant, because the workers now hold another content for its key."""
        variant.is_void = True
        self._half.variant_changed(variant)
        logger.info(
            "the LoRA adapter %r was replaced: its open requests neither load nor store KV any more, and new requests "
            "use no block of the adapter before",
            name_of(key),
        )

    def drop(self, request_id: str) -> None:
        super().drop(request_id)
        self._waiting.pop(request_id, None)


@dataclasses.dataclass(slots=True)
class _Named:
    """The adapter that a name has stood for since the last reset."""

    key: str
    path: Any
    identity: str | None = None
    """Identity as the workers reported it; None: not yet, "": no tier may be used."""
    is_ambiguous: bool = False
    """True if the name has stood for another adapter, too."""


class AdapterNames(AdapterGuard):
    """The guard of the simple mode: the names of an adapter's blocks cover the adapter's name only.

    The CPU pool ends with the process. A name that has stood for two adapters uses it no more until a reset. As the
    pool may hold blocks of each name that was used, none is dropped before: beyond :data:`MAX_ADAPTERS` names, new ones
    use no tier.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held = RecentAdapters[str]()
        """Identity of each adapter as the workers reported it last, by key."""
        self._named: dict[str, _Named] = {}
        """Adapters by name."""
        self._is_full = False

    def _admit(self, request: Any, lora: Any) -> RequestWithParams:
        key, name, path = key_of(lora), str(lora.lora_name), getattr(lora, "lora_path", None)
        if (named := self._named.get(name)) is None:
            if len(self._named) >= MAX_ADAPTERS:
                self._refused()
                return _without_tiers(request)
            named = self._named[name] = _Named(key, path, self._held.use(key))
        if getattr(lora, "load_inplace", False) or (named.key, named.path) != (key, path):
            self._confused(named)
        if named.is_ambiguous or not named.identity:
            if named.identity is None:
                self._unknown[request.request_id] = key
            return _without_tiers(request)
        self._assumed[request.request_id] = (key, named.identity)
        return RequestWithParams(request, request.kv_transfer_params)

    def may_load(self, request_id: str) -> bool:
        if (assumed := self._assumed.get(request_id)) is None:
            return True
        named = self._named[name_of(assumed[0])]
        return not named.is_ambiguous and (named.key, named.identity) == assumed

    def report(self, adapters: Mapping[str, str]) -> None:
        for key, identity in adapters.items():
            self._held.put(key, identity)
            named = self._named.get(name_of(key))
            if named is None or named.key != key:
                continue
            if named.identity is None:
                named.identity = identity
            elif named.identity != identity:
                self._confused(named)

    def reset(self) -> None:
        """Let all names use tiers again, because no block that was stored before is left.

        A request that goes on after the reset stores blocks for the adapter that the workers hold then.
        """
        self._held.clear()
        self._loaded.clear()
        self._is_full = False
        going_on = {name_of(key) for key, _ in self._assumed.values()}
        self._named = {name: _Named(it.key, it.path) for name, it in self._named.items() if name in going_on}
        self._unknown.update((req_id, key) for req_id, (key, _) in self._assumed.items())

    def _confused(self, named: _Named) -> None:
        if not named.is_ambiguous:
            named.is_ambiguous = True
            logger.warning(
                "the LoRA adapter %r was replaced, but its blocks are identified by its name: its requests neither "
                "load nor store KV until the prefix cache is reset together with the connector's",
                name_of(named.key),
            )

    def _refused(self) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "LoRA adapters of %d names were used: requests with others neither load nor store KV until the prefix "
                "cache is reset together with the connector's",
                MAX_ADAPTERS,
            )


def _in_memory(params: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the parameters of a request with the CPU tier as the only one that it may use."""
    params = params or {}
    mine = params.get("kv_tiering")
    if mine is not None and not isinstance(mine, Mapping):
        return params  # invalid: the request uses no tier
    return {**params, "kv_tiering": {**(mine or {}), "tiers": []}}


def _without_tiers(request: Any, variant: Variant | None = None) -> RequestWithParams:
    return RequestWithParams(request, {**(request.kv_transfer_params or {}), "kv_tiering": _NOTHING}, variant)


class RequestWithParams:
    """A request with other ``kv_transfer_params``, and with a variant.

    All other attributes are read from the engine's object, so they stay current.
    """

    def __init__(self, request: Any, params: Mapping[str, Any] | None, variant: Variant | None = None) -> None:
        self._request = request
        self.kv_transfer_params = params
        """The parameters that replace those of the engine's request."""
        self.variant = variant
        """Content of the adapter that the request computes with; None if blocks are not named by it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
