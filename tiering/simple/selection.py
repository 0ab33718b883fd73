"""The choice between the simple and the tiering mode, from the connector's extra configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiering.config.source import read_source
from tiering.config.stack_file import StackConfig, load_stack
from tiering.errors import ConfigError

_SELF_DESCRIBING = "self_describing_kv_events"
_MODE_WORDS = ("mode", "lazy_offload")
_OTHER_WORDS = frozenset({"block_size", "blocks_per_chunk", "sharer_wait", "offload_prompt_only"})
"""Words of the extra configuration that only the tiering mode has."""


@dataclass(frozen=True, slots=True)
class SimpleOptions:
    """The arguments of :class:`tiering.simple.scheduler.SimpleCPUOffloadScheduler` and its worker half."""

    cpu_capacity_bytes: int
    """Bytes of CPU memory of one worker."""
    lazy_offload: bool
    """Store blocks when they are about to leave the GPU, instead of when they are computed."""
    events: bool
    """Announce stored and removed blocks."""
    self_describing_kv_events: bool = False
    """Add tokens, parent and adapter to the events."""


def simple_options(extra_config: Mapping[str, Any], world_size: int = 1) -> SimpleOptions | None:
    """Return the options of the simple scheduler; None if the configuration selects the tiering mode.

    Nothing is opened. ``mode`` and ``lazy_offload`` stand in the stack, or beside ``config`` in the extra
    configuration, where they take precedence. ``self_describing_kv_events`` stands in the extra configuration.

    Args:
        extra_config: the connector's extra configuration.
        world_size: number of workers, which share the stack's ``primary.capacity``; default: 1.

    Raises:
        ConfigError: the stack is invalid, the simple mode cannot serve it, or ``mode: simple`` stands beside words of
            the tiering mode.
    """
    said = {word: extra_config[word] for word in _MODE_WORDS if word in extra_config}
    config = extra_config.get("config")
    if config is None:
        stack = {word: value for word, value in extra_config.items() if word in StackConfig.model_fields}
        if not stack:
            return None
        config = stack
    elif said:
        written = read_source(config).data
        if isinstance(written, Mapping):
            config = {**written, **said}
    read = load_stack(config)
    if read.mode != "simple":
        return None
    for word in sorted(_OTHER_WORDS & set(extra_config)):
        raise ConfigError(
            f"{word}: has no meaning in mode simple, which stores all confirmed blocks as they are; leave it out"
        )
    allowed = {"config", _SELF_DESCRIBING}
    unknown = sorted(set(extra_config) - allowed - set(StackConfig.model_fields))
    if unknown:
        raise ConfigError(
            f"{unknown[0]}: unknown; allowed are {', '.join(sorted({*allowed, *_MODE_WORDS, 'primary', 'events'}))}"
        )
    described = extra_config.get(_SELF_DESCRIBING, False)
    if not isinstance(described, bool):
        raise ConfigError(f"{_SELF_DESCRIBING}: {described!r} is not true or false")
    return SimpleOptions(max(1, read.primary.capacity // world_size), read.lazy_offload, read.events, described)
