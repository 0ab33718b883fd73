"""The KV-cache groups of vLLM that are offloaded, and the groups that are skipped.

A hit needs no blocks of a skipped group. These are groups whose blocks have no hashes, because a request makes their
content anew: rings that hold the last tokens before they are compressed, scratch memory, and windows that vLLM computes
again after each hit. vLLM's own prefix cache skips them too. Its hits end where all other groups have a border of
blocks, and so do the hits from tiers. Encoder-only attention keeps no KV at all.

Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tiering.copy.canonical import LayerCache

_NO_CACHE = "encoder_only_attention"
"""vLLM's name for the kind of groups without KV."""


def layer_specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers; one, if it is the same for all of them."""
    return list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]


def is_skipped(group: Any, kind_of: Callable[[Any], str]) -> bool:
    """Return True if a hit needs no blocks of vLLM's ``group``.

    Args:
        group: the group's specification.
        kind_of: vLLM's function that returns the kind of a KV-cache spec.
    """
    has_hashes = getattr(group.kv_cache_spec, "prefix_cacheable", True) and getattr(group, "enable_kv_transfer", True)
    return not has_hashes or kind_of(group.kv_cache_spec) == _NO_CACHE


class _View:
    """An object of vLLM's with some attributes replaced."""

    def __init__(self, of: Any, **replaced: Any) -> None:
        self._of = of
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class _Blocks:
    """Blocks that were allocated to a request, of the kept groups."""

    def __init__(self, tables: Sequence[list[int]]) -> None:
        self._tables = tuple(tables)

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the GPU blocks of each kept group."""
        return self._tables


class KeptGroups:
    """The kept groups of a model that has skipped ones; vLLM's objects are viewed without the others.

    Args:
        indexes: indexes of the kept groups in vLLM's list.
        skipped_layers: names of the layers of the skipped groups.
    """

    def __init__(self, indexes: Sequence[int], skipped_layers: Sequence[str]) -> None:
        self._indexes = tuple(indexes)
        self._places = {index: place for place, index in enumerate(indexes)}
        self._skipped_layers = frozenset(skipped_layers)

    def blocks(self, blocks: Any) -> _Blocks:
        """Return the blocks that vLLM has allocated to a request."""
        return _Blocks(self._tables(blocks.get_block_ids()))

    def caches(self, kv_caches: Mapping[str, LayerCache]) -> dict[str, LayerCache]:
        """Return the tensors of the layers."""
        return {layer: cache for layer, cache in kv_caches.items() if layer not in self._skipped_layers}

    def step(self, output: Any) -> Any:
        """Return the schedule of a step."""
        cached = output.scheduled_cached_reqs
        replaced = {
            "scheduled_new_reqs": [
                _View(new, block_ids=self._tables(new.block_ids)) for new in output.scheduled_new_reqs
            ],
            "scheduled_cached_reqs": _View(
                cached, new_block_ids=[None if ids is None else self._tables(ids) for ids in cached.new_block_ids]
            ),
        }
        state = getattr(output, "kv_connector_block_state", None)
        if offers := getattr(state, "boundary_state_offloads", None):
            handed = {name: self.handed(states) for name, states in offers.items()}
            replaced["kv_connector_block_state"] = _View(state, boundary_state_offloads=handed)
        return _View(output, **replaced)

    def handed(self, states: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return the states that vLLM hands over of a request: group, block and tokens."""
        return [(self._places[index], block, end) for index, block, end in states if index in self._places]

    def _tables(self, tables: Sequence[list[int]]) -> list[list[int]]:
        return [tables[index] for index in self._indexes]


def kept_groups(kv_cache_config: Any, kind_of: Callable[[Any], str]) -> KeptGroups | None:
    """Return the kept groups; None if no group is skipped.

    Args:
        kv_cache_config: vLLM's KV-cache configuration.
        kind_of: vLLM's function that returns the kind of a KV-cache spec.
    """
    groups = kv_cache_config.kv_cache_groups
    skipped = [index for index, group in enumerate(groups) if is_skipped(group, kind_of)]
    if not skipped:
        return None
    kept = [index for index in range(len(groups)) if index not in skipped]
    return KeptGroups(kept, [layer for index in skipped for layer in groups[index].layer_names])
