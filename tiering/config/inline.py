"""Stacks inside the dictionaries of vLLM's connectors and tiers, SGLang's backend, LMCache's adapter.

The dictionary has words of its own, and either ``config`` (a stack file, or its content as a mapping) or the stack's
own words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from tiering.api.units import parse_duration, parse_size
from tiering.config.problems import Problem, changed, refuse, refused, unknown_word
from tiering.config.stack_file import StackConfig, load_stack
from tiering.errors import ConfigError
from tiering.secondary.options import BlockTierOptions


class EngineClass(NamedTuple):
    """A class of this project that an engine loads."""

    name: str
    module: str
    """Module of the class, as the engine's dictionary has it (``module_path``)."""

    def is_named_by(self, given: Mapping[str, Any]) -> bool:
        """Return True if an engine's dictionary names the module."""
        return given.get("module_path") == self.module


TIER = EngineClass("KVTieringTier", "tiering.engines.vllm_tier")
"""The tier that vLLM's own tiering loads."""
STORAGE = EngineClass("KVTieringStorage", "tiering.engines.sglang")
"""The storage backend that SGLang loads."""
ADAPTER = EngineClass("KVTieringAdapter", "tiering.engines.lmcache")
"""The adapter that LMCache loads."""

TIER_TYPE = "kv_tiering"
"""Name of :data:`TIER` in vLLM's registry of tiers, in which its plugin enters it."""

_TIER_WORDS = frozenset({"type", "module_path", "locality", "backpressure"})
_LOCALITIES = ("LOCAL", "REMOTE")

CALL_DEADLINE = 4.0
"""Longest time in seconds that one of the engine's threads waits in a call, by default."""

_LONGEST_CALL = 4.5
"""Largest deadline: SGLang waits 10 s for the end of a thread, which makes two calls in a row."""

_SGLANG_WORDS = frozenset(
    {
        *("backend_name", "module_path", "class_name", "interface_v1", "deadline"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        *("hicache_storage_pass_prefix_keys", "tp_lcm_size"),
    }
)
TASK_DEADLINE = 10.0
"""Longest time in seconds until the end of one of LMCache's tasks, by default."""

_LONGEST_TASK = 25.0
"""Largest deadline: LMCache waits 30 s for the tasks of an adapter that is removed."""

LARGEST_BLOCK = 2 << 20
"""Size in bytes of the largest blocks of LMCache's objects, by default."""

NO_EVENTS = "has no effect in vLLM: --kv-events-config decides"
"""Reason why vLLM refuses the word ``events`` of a stack."""

_STACK_WORDS = frozenset(StackConfig.model_fields)
_SEEN = {
    ("primary", "inclusion"): "the GPU's own cache",
    ("primary", "promote_waiting"): "the engine's queue",
    ("layout",): "where the engine has its blocks",
    ("record_trace",): "the prompts",
    ("explain",): "the requests",
    ("report_cached",): "the requests",
    ("hints",): "the sessions",
}
"""Words that only a connector of this project can honour, with what it sees that others do not."""


def read_inline(given: Mapping[str, Any], own_words: Collection[str]) -> StackConfig:
    """Return the stack that a dictionary names or contains. Opens nothing.

    Args:
        given: the dictionary.
        own_words: its words beside ``config`` and the words of a stack.

    Raises:
        ConfigError: a word is unknown or invalid, the stack is missing, or it is given twice.
    """
    allowed = sorted({"config", *own_words, *_STACK_WORDS})
    for word in sorted(map(str, given)):
        if word not in allowed:
            raise ConfigError(f"{word}: {unknown_word(word, allowed)}")
    inline = {word: value for word, value in given.items() if word in _STACK_WORDS}
    config = given.get("config")
    if config is None:
        if not inline:
            raise ConfigError(
                "config: missing; name the stack's YAML file, or write the stack (primary, secondary) in its place"
            )
        return load_stack(inline)
    if inline:
        raise ConfigError(f"{min(inline)}: is part of a stack, but config names one already; keep one of the two")
    return load_stack(config)


def read_tier(given: Mapping[str, Any]) -> StackConfig:
    """Return the stack of a dictionary in the ``secondary_tiers`` of vLLM's own tiering. Opens nothing.

    Raises:
        ConfigError: the dictionary is invalid, or the stack has a word that has no effect there.
    """
    stack = read_inline(given, _TIER_WORDS)
    locality = given.get("locality")
    if locality is not None and locality not in _LOCALITIES:
        raise ConfigError(f"locality: {locality!r} is not allowed: it should be LOCAL or REMOTE")
    if problems := list(_without_effect(stack, "vLLM", NO_EVENTS)):
        refuse("the tier of vLLM's own tiering", problems)
    return stack


def read_storage(given: Mapping[str, Any]) -> tuple[StackConfig, float]:
    """Return the stack of SGLang's dictionary, and the deadline of a call in seconds. Opens nothing.

    Raises:
        ConfigError: the dictionary is invalid, or the stack has a word that has no effect there.
    """
    stack = read_inline(given, _SGLANG_WORDS)
    deadline = _deadline(given, CALL_DEADLINE, _LONGEST_CALL)
    problems = list(_without_effect(stack, "SGLang", "has no effect in SGLang, which takes none from a backend"))
    if stack.keep_secondary:
        text = "would serve pages of older weights: SGLang resets only to clear, or for new weights; leave it out"
        problems.append(Problem(("keep_secondary",), text))
    if problems:
        refuse("the storage backend of SGLang", problems)
    return stack, deadline


def read_adapter(given: Mapping[str, Any]) -> tuple[StackConfig, float, int]:
    """Return the stack of LMCache's ``adapter_params``, a task's deadline, and the largest block's bytes.

    Opens nothing.

    Raises:
        ConfigError: the dictionary is invalid, or the stack has a word that has no effect there.
    """
    stack = read_inline(given, ("deadline", "block_bytes"))
    deadline = _deadline(given, TASK_DEADLINE, _LONGEST_TASK)
    try:
        block_bytes = parse_size(given.get("block_bytes", LARGEST_BLOCK))
    except ValueError as error:
        raise ConfigError(f"block_bytes: {error}") from error
    if block_bytes < 4096 or block_bytes % 4096:
        raise ConfigError(f"block_bytes: {block_bytes} is not allowed: a multiple of 4096")
    problems = list(_without_effect(stack, "LMCache", "has no effect in LMCache, which has events of its own"))
    text = "has no effect in LMCache, which resets no adapter; leave it out"
    problems += refused(stack, ("keep_secondary", "reset_deadline"), text)
    text = "hides a tier from LMCache, whose objects are looked up block by block; leave it out"
    problems += [
        Problem(("secondary", index, "min_prefix_blocks"), text)
        for index, tier in enumerate(stack.secondary)
        if getattr(tier, "min_prefix_blocks", 1) > 1
    ]
    if stack.revision is None:
        text = (
            "is missing: LMCache's keys have only the model's name, and weights change under a name; write a text that "
            "you change with the weights, the engine and its settings"
        )
        problems.append(Problem(("revision",), text))
    if problems:
        refuse("the L2 adapter of LMCache", problems)
    return stack, deadline, block_bytes


def _deadline(given: Mapping[str, Any], default: float, longest: float) -> float:
    """Return the deadline in a dictionary, in seconds."""
    try:
        deadline = parse_duration(given.get("deadline", default))
    except ValueError as error:
        raise ConfigError(f"deadline: {error}") from error
    if not 0.0 < deadline <= longest:
        raise ConfigError(f"deadline: {deadline:g} s is not allowed: above 0, and {longest:g} s at most")
    return deadline


def _without_effect(stack: StackConfig, engine: str, no_events: str) -> Iterator[Problem]:
    """Yield the words that only a connector of this project can honour, and the lack of a secondary tier.

    Args:
        stack: the stack.
        engine: name of the engine.
        no_events: what is wrong with the word ``events``.
    """
    if stack.mode != "tiering":
        yield Problem(("mode",), f"{stack.mode} needs the TieringConnector; leave it out")
        return
    if not stack.secondary:
        text = f"is missing: {engine} has a CPU tier of its own; name at least one slower tier"
        yield Problem(("secondary",), text)
    if stack.events:
        yield Problem(("events",), f"{no_events}; leave it out")
    for path, what in _SEEN.items():
        if path[-1] in changed(stack.primary if len(path) > 1 else stack):
            yield Problem(path, f"needs the TieringConnector, which sees {what}; leave it out")
    for index, tier in enumerate(stack.secondary):
        if isinstance(tier, BlockTierOptions) and tier.load_or_compute == "auto":
            text = "auto needs the TieringConnector, which measures the engine; write always or never"
            yield Problem(("secondary", index, "load_or_compute"), text)


def is_tier(given: Mapping[str, Any]) -> bool:
    """Return True if a dictionary in vLLM's ``secondary_tiers`` names the tier of this project."""
    return given.get("type") == TIER_TYPE or (given.get("type") == TIER.name and TIER.is_named_by(given))
