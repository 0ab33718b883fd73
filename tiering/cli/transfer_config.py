"""Stacks in the configuration of vLLM, SGLang or LMCache, whose file takes the place of a stack file.

vLLM's ``kv_transfer_config`` stands alone, as in the flag ``--kv-transfer-config``, or under that name in the file of
``vllm serve --config``. It names ``TieringConnector``, or ``OffloadingConnector`` whose ``secondary_tiers`` have a
dictionary for :mod:`tiering.engines.vllm_tier`. SGLang's dictionary is that of
``--hicache-storage-backend-extra-config``, alone or under that name in the file of ``--config``. LMCache's dictionary
is that of ``--l2-adapter``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tiering.api.masking import shown
from tiering.config.inline import ADAPTER, NO_EVENTS, STORAGE, TIER, is_tier, read_adapter, read_storage, read_tier
from tiering.config.source import read_plain
from tiering.config.stack_file import StackConfig, load_stack
from tiering.errors import ConfigError
from tiering.runtime.json_text import parse_json
from tiering.spec import read_stack

_FLAGS = ("kv-transfer-config", "kv_transfer_config")
_SGLANG_FLAGS = ("hicache-storage-backend-extra-config", "hicache_storage_backend_extra_config")


def stack_at(path: str) -> StackConfig:
    """Return the stack of a stack file, or of a file with the configuration of vLLM, SGLang or LMCache.

    Raises:
        ConfigError: the file cannot be read, its stack is invalid, or the configuration does not name exactly one.
    """
    data = read_plain(path).data
    if not isinstance(data, Mapping):
        return load_stack(path)
    try:
        storage = _flag(data, _SGLANG_FLAGS, "the words of a storage backend")
        if storage is not None or STORAGE.is_named_by(data):
            return _storage(data if storage is None else storage)
        if ADAPTER.is_named_by(data):
            return _adapter(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not (config := _configuration(data)):
        return load_stack(path)
    try:
        found = list(_stacks("", config))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if len(found) == 1:
        return found[0][1]
    if not found:
        raise ConfigError(
            f"{path}: names no stack; allowed are TieringConnector, and OffloadingConnector with a dictionary in "
            f"secondary_tiers whose type is {TIER.name} and whose module_path is {TIER.module}"
        )
    places = ", ".join(where for where, _ in found)
    raise ConfigError(f"{path}: names {len(found)} stacks ({places}); write all tiers into one stack")


def _configuration(data: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    """Return vLLM's configuration in a file's content, or None if it is a stack."""
    config = _flag(data, _FLAGS, "kv_connector")
    return data if config is None and "kv_connector" in data else config


def _flag(data: Mapping[Any, Any], names: Sequence[str], content: str) -> Mapping[str, Any] | None:
    """Return the mapping that a file has under one of the names of a flag; None if there is none.

    Args:
        data: the file's content.
        names: spellings of the flag.
        content: what the mapping should have, for the message.
    """
    for word in names:
        if word in data:
            given = data[word]
            try:
                config = parse_json(given) if isinstance(given, str) else given
            except ValueError as error:
                raise ConfigError(f"{word}: is no JSON: {error}") from error
            if not isinstance(config, Mapping):
                raise ConfigError(f"{word}: {shown(given)} is not a mapping with {content}")
            return config
    return None


def _storage(given: Mapping[str, Any]) -> StackConfig:
    """Return the stack in SGLang's dictionary."""
    if not STORAGE.is_named_by(given):
        raise ConfigError(f"module_path: {shown(given.get('module_path'))} is not {STORAGE.module}")
    if given.get("class_name") != STORAGE.name:
        raise ConfigError(f"class_name: {shown(given.get('class_name'))} is not {STORAGE.name}")
    return read_storage(given)[0]


def _adapter(given: Mapping[str, Any]) -> StackConfig:
    """Return the stack in LMCache's dictionary, whose other words are LMCache's own."""
    for word, allowed in (("type", "plugin"), ("class_name", ADAPTER.name)):
        if given.get(word) != allowed:
            raise ConfigError(f"{word}: {shown(given.get(word))} is not {allowed}, as {ADAPTER.module} needs")
    if given.get("serde"):
        raise ConfigError("serde: objects that LMCache has serialized are not found again; leave it out")
    if not isinstance(params := given.get("adapter_params"), Mapping):
        raise ConfigError(f"adapter_params: {shown(params)} is not a mapping with the words of a stack")
    stack: StackConfig = _read("adapter_params", read_adapter, params)[0]
    return stack


def _stacks(where: str, config: Mapping[str, Any]) -> Iterator[tuple[str, StackConfig]]:
    """Yield the place and the content of each stack that a connector's configuration names."""
    connector, extra = config.get("kv_connector"), config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{where}kv_connector_extra_config: {shown(extra)} is not a mapping")
    inside = f"{where}kv_connector_extra_config"
    if connector == "TieringConnector":
        yield inside, _read(inside, _connector, extra)
    elif connector == "OffloadingConnector":
        for number, tier in enumerate(_list(inside, extra, "secondary_tiers")):
            place = f"{inside}.secondary_tiers[{number}]"
            if is_tier(tier):
                yield place, _read(place, read_tier, tier)
            elif TIER.is_named_by(tier):
                name = shown(tier.get("type"))
                raise ConfigError(f"{place}.type: {name} is no class of {TIER.module}; it should be {TIER.name}")
    elif connector == "MultiConnector":
        for number, child in enumerate(_list(inside, extra, "connectors")):
            yield from _stacks(f"{inside}.connectors[{number}].", child)


def _connector(extra: Mapping[str, Any]) -> StackConfig:
    """Return the stack in the dictionary of ``TieringConnector``."""
    if (stack := read_stack(extra)).events:
        raise ConfigError(f"events: {NO_EVENTS}; leave it out")
    return stack


def _list(where: str, extra: Mapping[str, Any], word: str) -> Sequence[Mapping[str, Any]]:
    given = extra.get(word, [])
    if not isinstance(given, list) or not all(isinstance(item, Mapping) for item in given):
        raise ConfigError(f"{where}.{word}: {shown(given)} is not a list of mappings")
    return given


def _read(where: str, read: Any, given: Mapping[str, Any]) -> Any:
    try:
        return read(given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('stack: ')}") from error
