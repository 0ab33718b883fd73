"""What an engine tells about its KV cache: its configuration, its tensors, and the spec that offloads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiering.api.manager import OffloadingManager
from tiering.api.transfer import LoadStoreSpec
from tiering.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One KV-cache group of the engine: layers that share block tables.

    ``gpu_block_size``: tokens in one GPU block, context-parallel factor included.  ``sliding_window``: tokens, None for
    full attention.  ``kind``: "full_attention", "sliding_window", "mamba", ... as the engine calls it. ``is_eagle``: a
    speculative head has layers here.  ``retained_tokens``: tokens before a sliding window that the engine keeps
    besides.  ``volatile_tokens``: as many of the last computed tokens may be computed again while the request runs
    (default 0 each).
    """

    layer_names: tuple[str, ...]
    gpu_block_size: int
    sliding_window: int | None = None
    kind: str = "full_attention"
    is_eagle: bool = False
    retained_tokens: int = 0
    volatile_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine tells the framework about itself, once, at start.

    ``block_sizes``: tokens per GPU block for each group, before context parallelism; ``context_parallel_size`` is
    decode × prefill size.  ``hash_block_size``: tokens covered by one of ``request.block_hashes``.  ``world_size``:
    workers that hold KV side by side.
    """

    block_sizes: tuple[int, ...]
    hash_block_size: int
    groups: tuple[KVCacheGroup, ...]
    world_size: int = 1
    context_parallel_size: int = 1
    enable_prefix_caching: bool = True
    max_batch_tokens: int = 8192
    engine_id: str = ""


class OffloadingSpec(ABC):
    """How one engine offloads: built once on each side from the engine's configuration and the user's extra configuration.

    Raises :class:`ConfigError` for block sizes that do not fit together.
    """

    def __init__(self, engine: EngineConfig, extra_config: Mapping[str, Any] | None = None) -> None:
        extra = dict(extra_config or {})
        self.engine = engine
        self.extra_config: Mapping[str, Any] = extra
        self.offload_prompt_only: bool = bool(extra.get("offload_prompt_only", True))
        self.hash_block_size: int = engine.hash_block_size
        self.gpu_block_size: tuple[int, ...] = tuple(size * engine.context_parallel_size for size in engine.block_sizes)
        for group, size in enumerate(self.gpu_block_size):
            if size % self.hash_block_size:
                raise ConfigError(
                    f"KV-cache group {group}: the GPU block size {size} is not a multiple of the hash block size "
                    f"{self.hash_block_size}; give the engine a block size that is (for vLLM: --block-size)"
                )
        self.block_size_factor: int = self._block_size_factor(extra.get("block_size"))

    def _block_size_factor(self, block_size: object) -> int:
        if block_size is None:
            return 1
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size <= 0:
            raise ConfigError(f"block_size: {block_size!r} is not a number of tokens (a positive integer)")
        sizes = set(self.gpu_block_size)
        if len(sizes) != 1:
            raise ConfigError(
                f"block_size: {block_size} cannot be used, the KV-cache groups have different GPU block sizes {sorted(sizes)}; "
                "leave block_size out"
            )
        (gpu_size,) = sizes
        if block_size % gpu_size:
            raise ConfigError(f"block_size: {block_size} is not a multiple of the GPU block size {gpu_size}")
        return block_size // gpu_size

    @property
    def offloaded_block_size(self) -> tuple[int, ...]:
        """Tokens in one offloaded block, per KV-cache group."""
        return tuple(size * self.block_size_factor for size in self.gpu_block_size)

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """The scheduler's side.  Called once."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], Any]]:
        """The worker's side: (source spec class, destination spec class, :class:`tiering.copy.contract.OffloadingHandler`)."""


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """A KV tensor whose first dimension is ``num_blocks``: int8 of shape (num_blocks, page_size_bytes), padding included."""

    tensor: Any
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """One layer (or group of layers): which of the tensors, and its page size without padding, in bytes."""

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """The unique tensors, and for each KV-cache group the refs of its layers, in the order in which a row holds them."""

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_data_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...] = field(default=())
