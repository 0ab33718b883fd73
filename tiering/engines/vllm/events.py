"""The conversion of KV events to vLLM's classes, with the extra keys that vLLM hashes.

Nothing here imports vLLM; its modules and objects are read by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from tiering.connector.event_types import BlockRemoved, BlockStored, EngineEvents, KVCacheEvent
from tiering.connector.snapshots import ExtraKeys

_SOURCES_OF_EXTRA_KEYS = ("lora_request", "mm_features", "cache_salt")


class EventConverter:
    """The conversion of events to vLLM's classes, limited to the fields that those classes have.

    Args:
        kv_events: vLLM's module of that name.
    """

    def __init__(self, kv_events: Any) -> None:
        self._stored = _make(kv_events.BlockStored, BlockStored)
        self._removed = _make(kv_events.BlockRemoved, BlockRemoved)

    def __call__(self, event: KVCacheEvent) -> Any:
        """Return ``event`` as an object of vLLM's class."""
        return self._stored(event) if isinstance(event, BlockStored) else self._removed(event)


def engine_events(kv_cache_utils: Any, vllm_config: Any) -> EngineEvents:
    """Return the helpers that write events as vLLM writes its own.

    Args:
        kv_cache_utils: vLLM's module of that name.
        vllm_config: vLLM's configuration.
    """
    lookahead = int(getattr(vllm_config, "num_hash_lookahead_tokens", 0) or 0)
    return EngineEvents(kv_cache_utils.maybe_convert_block_hash, _ExtraKeys(kv_cache_utils, lookahead), lookahead)


class _ExtraKeys:
    """The extra keys that vLLM hashed besides the tokens, in the form of vLLM's events.

    vLLM's own functions compute the keys.

    Args:
        kv_cache_utils: vLLM's module of that name.
        lookahead: number of tokens after a block that its hash also covers (from vLLM 0.33, with some speculative
            decoding).
    """

    def __init__(self, kv_cache_utils: Any, lookahead: int) -> None:
        self._generate = kv_cache_utils.generate_block_hash_extra_keys
        self._generate_ahead = getattr(kv_cache_utils, "generate_lookahead_block_hash_extra_keys", None)
        self._published = getattr(kv_cache_utils, "to_event_extra_keys", None)
        self._lookahead = lookahead

    def __call__(self, request: Any, first: int, count: int, size: int) -> Sequence[ExtraKeys] | None:
        plain = not any(getattr(request, name, None) for name in _SOURCES_OF_EXTRA_KEYS)
        if plain and getattr(request, "prompt_embeds", None) is None:
            return [None] * count
        found: list[Any] = []
        feature = 0
        for start in range(first * size, (first + count) * size, size):
            if self._lookahead and self._generate_ahead is not None:
                keys, feature = self._generate_ahead(
                    request, start, start + size, start + size + self._lookahead, feature
                )
            else:
                keys, feature = self._generate(request, start, start + size, feature)
            found.append(keys)
        published: Sequence[ExtraKeys] | None = found if self._published is None else self._published(found)
        return published


def _make(theirs: Any, ours: type[KVCacheEvent]) -> Callable[[KVCacheEvent], Any]:
    """Return a conversion to the class ``theirs``.

    The conversion works by position where the fields allow it, which takes half the time.
    """
    names = [name for name in theirs.__struct_fields__ if name in ours._fields]
    values = itemgetter(*map(ours._fields.index, names))

    def by_position(event: KVCacheEvent) -> Any:
        return theirs(*values(event))

    def by_name(event: KVCacheEvent) -> Any:
        return theirs(**dict(zip(names, values(event), strict=True)))

    return by_position if names == list(theirs.__struct_fields__[: len(names)]) else by_name
