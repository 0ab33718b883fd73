"""The policy of one request, parsed from its ``kv_transfer_params``. No other module interprets them.

Invalid parameters have one meaning everywhere: the request neither loads nor stores (:data:`NEITHER`). The component
that admits the request logs the invalid field, and passes :data:`NEITHER_PARAMS` on so that the problem is logged once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tiering.api.masking import shown, shown_name
from tiering.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """The parsed form of ``kv_transfer_params={"kv_tiering": {...}}``."""

    load: bool = True
    """True if blocks may be loaded for the request."""
    store: bool = True
    """True if blocks of the request may be stored."""
    max_load_tokens: int | None = None
    """Number of leading tokens that may be loaded; None: all."""
    max_store_tokens: int | None = None
    """Number of leading tokens that may be stored; None: all."""
    tiers: frozenset[str] | None = None
    """Names of the secondary tiers that the request may use; None: all."""


DEFAULT_REQUEST_POLICY = RequestPolicy()
"""The policy of a request without parameters: no restriction."""

NEITHER = RequestPolicy(load=False, store=False, tiers=frozenset())
"""The policy of a request with invalid parameters."""

_KEY = "kv_tiering"

NEITHER_PARAMS: Mapping[str, Any] = MappingProxyType({_KEY: {"load": False, "store": False, "tiers": ()}})
"""Valid parameters that mean :data:`NEITHER`."""

_ALLOWED = ("load", "store", "max_load_tokens", "max_store_tokens", "tiers", "session_id", "hints")
"""The words of ``kv_tiering``; :mod:`tiering.api.hints` reads the last two."""


def parse_request_policy(kv_transfer_params: Mapping[str, Any] | None) -> RequestPolicy:
    """Parse a request's parameters.

    The fields are those of ``kv_tiering``, and the routers' ``max_load_tokens`` and ``max_offload_tokens`` (our
    ``max_store_tokens``) next to it. If both places give a number, the smaller one counts.

    Raises:
        ConfigError: a field is invalid; the message names it.
    """
    if kv_transfer_params is None:
        return DEFAULT_REQUEST_POLICY
    if not isinstance(kv_transfer_params, Mapping):
        raise ConfigError(f"kv_transfer_params: {shown(kv_transfer_params)} is not a mapping")
    max_load = _limit(kv_transfer_params, "max_load_tokens", "max_load_tokens")
    max_store = _limit(kv_transfer_params, "max_offload_tokens", "max_offload_tokens")
    params = kv_transfer_params.get(_KEY)
    if params is None:
        return RequestPolicy(max_load_tokens=max_load, max_store_tokens=max_store)
    if not isinstance(params, Mapping):
        raise ConfigError(f"kv_transfer_params.{_KEY}: {shown(params)} is not a mapping of {', '.join(_ALLOWED)}")
    for word in params:
        if word not in _ALLOWED:
            raise ConfigError(
                f"kv_transfer_params.{_KEY}.{shown_name(word)}: unknown; allowed are {', '.join(_ALLOWED)}"
            )
    tiers = params.get("tiers")
    if tiers is not None and not (
        isinstance(tiers, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in tiers)
    ):
        raise ConfigError(f"kv_transfer_params.{_KEY}.tiers: {shown(tiers)} is not a list of tier names")
    return RequestPolicy(
        load=_flag(params, "load"),
        store=_flag(params, "store"),
        max_load_tokens=_smaller(max_load, _limit(params, "max_load_tokens", f"{_KEY}.max_load_tokens")),
        max_store_tokens=_smaller(max_store, _limit(params, "max_store_tokens", f"{_KEY}.max_store_tokens")),
        tiers=None if tiers is None else frozenset(tiers),
    )


def _limit(params: Mapping[str, Any], word: str, where: str) -> int | None:
    value = params.get(word)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"kv_transfer_params.{where}: {shown(value)} is not a number of tokens (an integer >= 0)")
    return value


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


def _flag(params: Mapping[str, Any], word: str) -> bool:
    value = params.get(word, True)
    if not isinstance(value, bool):
        raise ConfigError(f"kv_transfer_params.{_KEY}.{word}: {shown(value)} is not true or false")
    return value
