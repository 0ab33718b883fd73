"""The check of the installed vLLM's connector interface, before :mod:`tiering.engines.vllm` uses it.

A vLLM that is newer than the tested versions is accepted with a warning, as long as its interface fits. Modules of
vLLM are imported by name, and only when they are checked.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from tiering.engines.vllm.lookup import StartupError

logger = logging.getLogger("kv_tiering.vllm")

OLDEST, NEWEST = (0, 29), (0, 33)
"""The tested versions, from the oldest to the newest."""

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"

NEEDED = (
    (f"{_V1}.base", "KVConnectorBase_V1 KVConnectorMetadata KVConnectorRole KVConnectorWorkerMetadata SupportsHMA"),
    (f"{_V1}.metrics", "KVConnectorStats"),
    ("vllm.distributed.kv_transfer", "get_kv_transfer_group"),
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory"),
    ("vllm.distributed.kv_events", "BlockStored BlockRemoved"),
    ("vllm.distributed.parallel_state", "get_pp_group"),
    ("vllm.platforms", "current_platform"),
    ("vllm.v1.core.kv_cache_utils", "DEFAULT_NONE_HASH_SEED maybe_convert_block_hash resolve_kv_cache_block_sizes"),
    ("vllm.v1.kv_cache_interface", "get_kv_cache_spec_kind"),
)
"""The modules of vLLM and the names that are imported from each."""

HOOKS = (
    "register_kv_caches",
    "handle_preemptions",
    "bind_connector_metadata",
    "clear_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "bind_gpu_block_pool",
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "take_events",
    "has_pending_push_work",
    "reset_cache",
    "shutdown",
    "build_kv_connector_stats",
    "build_prom_metrics",
)
"""The methods that vLLM must call. A renamed method would otherwise be missed silently."""


def _range() -> str:
    return f"vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def check_version(version: str) -> None:
    """Check vLLM's version, and warn of a version that was not tested.

    Raises:
        StartupError: the version is too old.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (number := (int(found[1]), int(found[2]))) == (0, 0):
        logger.warning("vLLM's version %r is not a number; this connector was tested with %s", version, _range())
    elif number < OLDEST:
        raise StartupError(f"vLLM {version} is too old: this connector works with {_range()}; upgrade vLLM")
    elif number > NEWEST:
        logger.warning(
            "vLLM %s is newer than the tested versions (%s); the connector works if vLLM's interface has not changed",
            version,
            _range(),
        )


def check_names(version: str) -> None:
    """Check that vLLM has every module and name of :data:`NEEDED`.

    Raises:
        StartupError: modules or names are missing.
    """
    _refuse(version, _missing_names())


def check_methods(version: str, connector: type, base: type) -> None:
    """Check that vLLM can call ``connector`` in every way that ``base`` describes.

    Args:
        version: vLLM's version, for the message.
        connector: the connector's class.
        base: vLLM's base class of connectors.

    Raises:
        StartupError: methods are missing or have other parameters.
    """
    _refuse(version, [*_missing_hooks(base), *_unfilled(connector), *_uncallable(connector, base)])


def _refuse(version: str, problems: Iterable[str]) -> None:
    if problems := list(problems):
        raise StartupError(
            f"vLLM {version} has another connector interface than the tested versions ({_range()}): "
            f"{'; '.join(problems)}; upgrade kv-tiering, or install one of these versions of vLLM"
        )


def _missing_names() -> Iterator[str]:
    for name, attributes in NEEDED:
        try:
            module: ModuleType = import_module(name)
        except ModuleNotFoundError as error:
            yield f"there is no module {error.name}"
            continue
        yield from (f"{name} has no {word}" for word in attributes.split() if not hasattr(module, word))


def _missing_hooks(base: type) -> Iterator[str]:
    return (f"{base.__name__} has no {name}" for name in HOOKS if not hasattr(base, name))


def _unfilled(connector: type) -> Iterator[str]:
    return (f"it needs a method {name}" for name in sorted(getattr(connector, "__abstractmethods__", ())))


def _uncallable(connector: type, base: type) -> Iterator[str]:
    own_classes = [owner for owner in connector.__mro__ if owner not in base.__mro__]
    methods = {name: own for owner in reversed(own_classes) for name, own in vars(owner).items()}
    for name, own in methods.items():
        expected = inspect.getattr_static(base, name, None)
        if name.startswith("_") or expected is None or isinstance(expected, property):
            continue
        parameters = list(inspect.signature(_function(expected)).parameters.values())
        positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        keywords = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        try:
            inspect.signature(_function(own)).bind(*positional, **dict.fromkeys(keywords))
        except TypeError as error:
            yield f"{name}: {error}"


def _function(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute
