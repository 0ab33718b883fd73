"""The spec of a stack of tiers, from which an engine's scheduler and workers build their halves."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from tiering.api.engine import (
    CanonicalKVCaches,
    EngineConfig,
    HeadShard,
    MissExplaining,
    OffloadingSpec,
    TraceRecording,
)
from tiering.api.keys import PRIMARY_TIER
from tiering.api.masking import shown_name
from tiering.api.namespace import KVLayout, ModelIdentity
from tiering.api.transfer import LoadStoreSpec
from tiering.config.inline import read_inline
from tiering.config.stack import make_rows, open_manager
from tiering.config.stack_file import StackConfig
from tiering.copy.contract import OffloadingHandler
from tiering.copy.handlers import make_handlers
from tiering.copy.layout import RowLayout
from tiering.copy.near import share_of
from tiering.errors import ConfigError, RegionError
from tiering.machine.options import PEERS_TYPE
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.memory.prefault import Share
from tiering.primary.memory.region import SharedRegion, row_stride
from tiering.primary.memory.side import RegionSide

logger = logging.getLogger("kv_tiering.stack")

_FLAGS = ("offload_prompt_only", "self_describing_kv_events")
_OWN_WORDS = frozenset({"block_size", "blocks_per_chunk", "sharer_wait", *_FLAGS})


class TieringOffloadingSpec(OffloadingSpec):
    """The spec that offloads to a stack of tiers.

    An engine without ``engine_id`` is one process, in which one spec serves the scheduler and the only worker. With an
    ``engine_id``, the scheduler and each of ``world_size`` workers build their own spec, in any processes. The rows are
    then shared memory of that name.

    Args:
        engine: the engine's configuration.
        extra_config: the connector's extra configuration. It contains either ``config`` (the path of the stack's YAML
            file, or its content as a mapping) or the stack's own words. Other words: ``offload_prompt_only``,
            ``block_size`` or ``blocks_per_chunk``, ``sharer_wait``, ``self_describing_kv_events``.
        model: identity of the model.
        group_bytes: size of an offloaded block in bytes per KV-cache group, without padding, all ranks together;
            default: the sizes in the model's :class:`KVLayout`.
        rank: rank of the worker that this spec serves; default 0.
        copies: number of neighbouring ranks that hold the same KV; default 1.
        stage_bytes: bytes of a GPU block on one rank of each pipeline stage, per KV-cache group; default: one stage.
        heads: this rank's KV heads, if rows hold the heads of all ranks in order (``layout: canonical``); default None.
        replica: name that tells data-parallel engines of one machine apart; default None.
        enable_events: True to collect events even if the stack does not ask for them; default False.
        clock: monotonic clock in seconds.

    Raises:
        ConfigError: the stack is invalid, a word is unknown, or sizes do not fit together. Nothing was opened.
    """

    def __init__(
        self,
        engine: EngineConfig,
        extra_config: Mapping[str, Any] | None = None,
        *,
        model: ModelIdentity,
        group_bytes: Sequence[int] | None = None,
        rank: int = 0,
        copies: int = 1,
        stage_bytes: tuple[tuple[int, ...], ...] = (),
        heads: HeadShard | None = None,
        replica: str | None = None,
        enable_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(engine, extra_config)
        self.stack = read_stack(self.extra_config)
        """The validated stack."""
        if (self.stack.layout == "canonical") != (heads is not None):
            raise ConfigError(
                f"layout: {self.stack.layout} is not the layout of this engine's rows; leave the word out, or give the "
                "spec the heads of its rank"
            )
        self.heads = heads
        self.model = model
        self.identify: Callable[[], ModelIdentity] | None = None
        """Returns the identity for tiers that outlive the process; None: :attr:`model`. See ``open_manager``."""
        self.mark: bytes | None = None
        """Mark of this worker, which the scheduler's side compares with its own; None: there is none."""
        self.group_bytes = _group_bytes(engine, model, group_bytes)
        """Size of an offloaded block in bytes per KV-cache group, without padding, all ranks together."""
        self.recording = _recording(self.stack, self.group_bytes)
        self.hints = self.stack.hints.bounds
        self.promotes_waiting = self.stack.primary.promote_waiting
        self.explaining = _explaining(self.stack, max(self.group_bytes))
        self.tenant_key = _tenant_key(self.stack)
        self._rank = rank
        self._copies = copies
        self._stage_bytes = stage_bytes
        self._replica = replica
        self._enable_events = enable_events
        self._clock = clock
        self._region: SharedRegion | None = None
        self._manager: TieringOffloadingManager | None = None
        self._is_closed = False

    def get_manager(self) -> TieringOffloadingManager:
        """Return the manager of the stack; the same one on every call. The manager owns the rows from now on.

        Raises:
            TieringError: the errors of :func:`tiering.config.stack.open_manager`.
        """
        if self._manager is None:
            region = self._open_region()
            file = self.extra_config.get("config")
            if isinstance(file, (str, os.PathLike)) and not Path(file).is_absolute():
                logger.info("the stack file %s is %s", shown_name(str(file)), Path(file).absolute())
            try:
                self._manager = open_manager(
                    self.stack,
                    self.group_bytes,
                    self.model,
                    replica=self._replica,
                    region=region,
                    enable_events=self._enable_events,
                    explains=self.explaining is not None,
                    one_thread=False,  # an engine may run its steps on changing threads, one at a time
                    identify=self.identify,
                    clock=self._clock,
                )
            except BaseException:
                self.close()
                raise
        return self._manager

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield the copies between ``kv_caches`` and the rows.

        Raises:
            ConfigError: the block sizes of the caches differ from ``group_bytes``, so scheduler and workers would
                disagree about the content of a row.
        """
        ranks = (self._rank, self.engine.world_size, self._copies, self._stage_bytes)
        layout = RowLayout.of(kv_caches, self.block_size_factor, *ranks)
        if layout.group_bytes != self.group_bytes:
            raise ConfigError(
                f"the KV caches have blocks of {layout.group_bytes} bytes per KV-cache group (all ranks), "
                f"the engine's configuration says {self.group_bytes}"
            )
        region = self._open_region(share_of(kv_caches, layout))
        preparation = region.preparation if region.in_background else None
        yield from make_handlers(kv_caches, region.view, layout, pageable=region.pageable, preparation=preparation)

    def worker_marks(self) -> list[bytes]:
        """Return the different marks of the workers that have mapped the rows: two at most.

        Raises:
            TieringError: the rows cannot be opened.
        """
        return self._open_region().marks

    @property
    def rows_are_shared(self) -> bool:
        """True if the scheduler and all workers have mapped the rows and see each other's writes."""
        return self._region is not None and self._region.is_complete

    @property
    def rows_are_prepared(self) -> bool:
        return self._region is not None and self._region.is_prepared

    def close(self) -> None:
        """Release the rows if no manager owns them: on a worker's side, or after a failed start.

        May be called twice. The spec cannot be used afterwards: new rows would not be the rows of the other half.
        """
        self._is_closed = True
        if self._region is not None and self._manager is None:
            self._region.close()

    def _open_region(self, share: Share | None = None) -> SharedRegion:
        if self._is_closed:
            raise RegionError("the spec is closed; build a new one for both halves of the connector")
        if self._region is None:
            row_bytes = max(self.group_bytes)
            rows = self.stack.primary.capacity // row_stride(row_bytes)
            if not rows:
                raise ConfigError(
                    f"primary.capacity: {self.stack.primary.capacity} bytes do not hold one block; "
                    f"a row takes {row_stride(row_bytes)} bytes (whole pages)"
                )
            engine = self.engine
            self._region = make_rows(
                self.stack,
                rows,
                self.model,
                self.group_bytes,
                name=engine.engine_id or None,
                side=RegionSide(engine.world_size + 1 if engine.engine_id else 1, self.mark, share, in_background=True),
            )
        return self._region


def _recording(stack: StackConfig, group_bytes: Sequence[int]) -> TraceRecording | None:
    """Return the settings of the trace that the stack asks for."""
    options = stack.record_trace
    if options is None:
        return None
    return TraceRecording(
        Path(options.path).expanduser(),
        options.max_size,
        options.total,
        sum(group_bytes),
        stack.salt,
        stack.shutdown_deadline,
    )


def _explaining(stack: StackConfig, block_bytes: int) -> MissExplaining | None:
    """Return the settings of the explanation of misses that the stack asks for."""
    options = stack.explain
    if options is None:
        return None
    capacities = {PRIMARY_TIER: stack.primary.capacity // row_stride(block_bytes)}
    # Other engines' rows take no stores, and what leaves them is their engines' decision: no cause names them.
    stores = [tier for tier in stack.secondary if tier.type != PEERS_TYPE]
    capacities |= {tier.tier_name: (tier.capacity_bytes or 0) // block_bytes for tier in stores}
    socket = None if options.socket is None else Path(options.socket).expanduser()
    return MissExplaining(capacities, options.blocks, options.requests, socket, block_bytes)


def _tenant_key(stack: StackConfig) -> bytes | None:
    """Return the key of the tenants' names; without a salt in the stack, each process has its own."""
    if not stack.report_cached:
        return None
    return sha256(stack.salt.encode()).digest() if stack.salt else secrets.token_bytes(32)


def read_stack(extra: Mapping[str, Any]) -> StackConfig:
    """Return the stack that a connector's extra configuration names or contains. Opens nothing.

    Raises:
        ConfigError: a word is unknown or invalid, the stack is missing, or it is given twice.
    """
    for word in _FLAGS:
        if not isinstance(extra.get(word, True), bool):
            raise ConfigError(f"{word}: {extra[word]!r} is not true or false")
    return read_inline(extra, _OWN_WORDS)


def _group_bytes(engine: EngineConfig, model: ModelIdentity, group_bytes: Sequence[int] | None) -> tuple[int, ...]:
    if group_bytes is None:
        if not isinstance(model.layout, KVLayout):
            raise ConfigError(
                "group_bytes: missing; the model's layout is a text, so the bytes of a block must be given"
            )
        group_bytes = model.layout.group_bytes
    if len(group_bytes) != len(engine.block_sizes) or not all(size > 0 for size in group_bytes):
        raise ConfigError(
            f"group_bytes: {tuple(group_bytes)} is not a number of bytes for each of {len(engine.block_sizes)} "
            "KV-cache groups"
        )
    return tuple(group_bytes)
