"""The spec of a stack of tiers: what an engine's scheduler and its workers build their halves from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tiering.api.engine import CanonicalKVCaches, EngineConfig, OffloadingSpec
from tiering.api.namespace import KVLayout, ModelIdentity
from tiering.api.transfer import LoadStoreSpec
from tiering.config.stack import open_manager
from tiering.config.stack_file import StackConfig, load_stack
from tiering.copy.contract import OffloadingHandler
from tiering.copy.handlers import make_handlers
from tiering.copy.layout import RowLayout
from tiering.errors import ConfigError, RegionError
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.memory.region import SharedRegion, row_stride

_STACK_WORDS = frozenset(StackConfig.model_fields)
_FLAGS = ("offload_prompt_only", "self_describing_kv_events")
_OWN_WORDS = frozenset({"config", "block_size", "sharer_wait", *_FLAGS})


class TieringOffloadingSpec(OffloadingSpec):
    """Offloading to a stack of tiers.

    ``extra_config`` says ``config``, the stack's YAML file or what it would hold; or it has the stack's own words
    beside the others: ``offload_prompt_only``, ``block_size``, ``sharer_wait``, ``self_describing_kv_events``.

    The rows: an engine without ``engine_id`` is one process, in which one spec serves the scheduler and the (single)
    worker.  With an ``engine_id``, the scheduler and each of ``world_size`` workers build a spec of their own, in
    whatever processes, and the rows are shared memory of that name.

    ``group_bytes``: bytes of an offloaded block of each KV-cache group without padding, all ranks side by side; by
    default what the model's :class:`KVLayout` says.  ``rank``: of the worker that this spec serves.  ``replicated``:
    all ranks hold the same KV. ``replica`` tells data-parallel engines of one machine apart.

    Raises :class:`ConfigError`, before anything is opened, for a wrong stack, unknown words and sizes that do not fit
    together.
    """

    def __init__(
        self,
        engine: EngineConfig,
        extra_config: Mapping[str, Any] | None = None,
        *,
        model: ModelIdentity,
        group_bytes: Sequence[int] | None = None,
        rank: int = 0,
        replicated: bool = False,
        replica: str | None = None,
        enable_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(engine, extra_config)
        self.stack = read_stack(self.extra_config)
        self.model = model
        self.group_bytes = _group_bytes(engine, model, group_bytes)
        self._rank = rank
        self._replicated = replicated
        self._replica = replica
        self._enable_events = enable_events
        self._clock = clock
        self._region: SharedRegion | None = None
        self._manager: TieringOffloadingManager | None = None
        self._is_closed = False

    def get_manager(self) -> TieringOffloadingManager:
        """The manager of the stack, which owns the rows from now on.  The same one if called again.

        Raises what :func:`tiering.config.stack.open_manager` does.
        """
        if self._manager is None:
            region = self._open_region()
            try:
                self._manager = open_manager(
                    self.stack,
                    self.group_bytes,
                    self.model,
                    replica=self._replica,
                    region=region,
                    enable_events=self._enable_events,
                    one_thread=False,  # an engine's steps may move from thread to thread, one at a time
                    clock=self._clock,
                )
            except BaseException:
                self.close()
                raise
        return self._manager

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """The copies between ``kv_caches`` and the rows.

        Raises :class:`ConfigError` if the caches' blocks are not as large as ``group_bytes`` says: scheduler and
        workers would disagree about what a row holds.
        """
        layout = RowLayout.of(kv_caches, self.block_size_factor, self._rank, self.engine.world_size, self._replicated)
        if layout.group_bytes != self.group_bytes:
            raise ConfigError(
                f"the KV caches have blocks of {layout.group_bytes} bytes per KV-cache group (all ranks), "
                f"the engine's configuration says {self.group_bytes}"
            )
        yield from make_handlers(kv_caches, self._open_region().view, layout)

    @property
    def rows_are_shared(self) -> bool:
        """Whether the scheduler and all workers have mapped the rows: what one of them writes, the others see."""
        return self._region is not None and self._region.is_complete

    def close(self) -> None:
        """Release the rows, where no manager does (on a worker's side, or if it could not be built).  Harmless if repeated.

        The spec cannot be used any more: other rows would not be those that the other half has.
        """
        self._is_closed = True
        if self._region is not None and self._manager is None:
            self._region.close()

    def _open_region(self) -> SharedRegion:
        if self._is_closed:
            raise RegionError("the spec is closed; build a new one for both halves of the connector")
        if self._region is None:
            row_bytes = max(self.group_bytes)
            rows = self.stack.primary.capacity // row_stride(row_bytes)
            if not rows:
                raise ConfigError(
                    f"primary.capacity: {self.stack.primary.capacity} bytes do not hold one block; a row takes {row_stride(row_bytes)} "
                    "bytes (whole pages)"
                )
            engine = self.engine
            self._region = (
                SharedRegion.open_shared(engine.engine_id, rows, row_bytes, sides=engine.world_size + 1)
                if engine.engine_id
                else SharedRegion.create(rows, row_bytes)
            )
        return self._region


def read_stack(extra: Mapping[str, Any]) -> StackConfig:
    """The stack that a connector's extra configuration ``extra`` names or holds.  Raises :class:`ConfigError`; opens nothing."""
    unknown = sorted(set(extra) - _OWN_WORDS - _STACK_WORDS)
    if unknown:
        allowed = ", ".join(sorted(_OWN_WORDS | _STACK_WORDS))
        raise ConfigError(f"{unknown[0]}: unknown; allowed are {allowed}")
    for word in _FLAGS:
        if not isinstance(extra.get(word, True), bool):
            raise ConfigError(f"{word}: {extra[word]!r} is not true or false")
    inline = {word: value for word, value in extra.items() if word in _STACK_WORDS}
    config = extra.get("config")
    if config is None:
        if not inline:
            raise ConfigError(
                "config: missing; name the stack's YAML file, or write the stack (primary, secondary) in its place"
            )
        return load_stack(inline)
    if inline:
        raise ConfigError(f"{min(inline)}: is part of a stack, but config names one already; keep one of the two")
    return load_stack(config)


def _group_bytes(engine: EngineConfig, model: ModelIdentity, group_bytes: Sequence[int] | None) -> tuple[int, ...]:
    if group_bytes is None:
        if not isinstance(model.layout, KVLayout):
            raise ConfigError(
                "group_bytes: missing; the model's layout is a text, so the bytes of a block must be given"
            )
        group_bytes = model.layout.group_bytes
    if len(group_bytes) != len(engine.block_sizes) or not all(size > 0 for size in group_bytes):
        raise ConfigError(
            f"group_bytes: {tuple(group_bytes)} is not a number of bytes for each of {len(engine.block_sizes)} KV-cache groups"
        )
    return tuple(group_bytes)
