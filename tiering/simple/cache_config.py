"""The geometry of the engine's KV cache, and that of the CPU pool that mirrors it."""

from __future__ import annotations

from dataclasses import dataclass

from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.errors import ConfigError

STATE_KINDS = frozenset({"mamba", "state_space", "short_conv", "linear_attention", "gdn_attention"})
"""Groups that keep one state per sequence; only the last block of a prefix matters."""

FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Groups in which every token sees all tokens before it, so that all blocks of a prefix matter."""

WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
"""Groups in which a token sees the last ``sliding_window`` tokens."""


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One tensor: ``size`` in bytes, over all blocks, and the layers that share it."""

    size: int
    shared_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """A KV cache: ``num_blocks`` blocks, each with a part of every tensor.  All sizes are one worker's."""

    num_blocks: int
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroup, ...]

    @property
    def total_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.size for tensor in self.kv_cache_tensors)

    @property
    def block_bytes(self) -> int:
        """Of one block, over all tensors."""
        return self.total_bytes // self.num_blocks


def is_state_space(group: KVCacheGroup) -> bool:
    """Whether ``group`` keeps a state instead of keys and values."""
    return group.kind in STATE_KINDS


def is_full_attention(group: KVCacheGroup) -> bool:
    """Whether every token of ``group`` sees all tokens before it."""
    return group.kind in FULL_KINDS


def derive_cpu_config(gpu: KVCacheConfig, cpu_capacity_bytes: int) -> KVCacheConfig:
    """The CPU pool for ``gpu``: the same groups, the same tensors for as many blocks as the capacity holds, at least one.

    Raises :class:`ConfigError` for a capacity or a KV cache that holds nothing.
    """
    if cpu_capacity_bytes < 1:
        raise ConfigError(
            f"cpu_capacity_bytes: {cpu_capacity_bytes} holds nothing; give the bytes of CPU memory to use per worker"
        )
    if gpu.num_blocks < 1 or gpu.total_bytes < gpu.num_blocks:
        raise ConfigError(f"kv_cache_config: {gpu.num_blocks} blocks of {gpu.total_bytes} bytes in all are no KV cache")
    num_blocks = max(1, gpu.num_blocks * cpu_capacity_bytes // gpu.total_bytes)
    tensors = tuple(KVCacheTensor(t.size // gpu.num_blocks * num_blocks, t.shared_by) for t in gpu.kv_cache_tensors)
    return KVCacheConfig(num_blocks, tensors, gpu.kv_cache_groups)


def check_engine(engine: EngineConfig, cache: KVCacheConfig) -> int:
    """The index of the first full-attention group.

    Raises :class:`ConfigError` for an engine that the simple scheduler cannot serve: groups of a kind it does not know,
    no full-attention group, context parallelism, or block sizes that the hashes do not fit.
    """
    if engine.context_parallel_size != 1:
        raise ConfigError(
            f"mode simple: context-parallel sizes of {engine.context_parallel_size} in all are not supported; use mode tiering"
        )
    _check_kinds(cache)
    for index, group in enumerate(cache.kv_cache_groups):
        if group.gpu_block_size < 1 or group.gpu_block_size % engine.hash_block_size:
            raise ConfigError(
                f"KV-cache group {index}: the block size {group.gpu_block_size} is not a multiple of the hash block size "
                f"{engine.hash_block_size}; give the engine a block size that is (for vLLM: --block-size)"
            )
    first = next((index for index, group in enumerate(cache.kv_cache_groups) if is_full_attention(group)), None)
    if first is None:
        kinds = ", ".join(group.kind for group in cache.kv_cache_groups) or "none"
        raise ConfigError(f"mode simple needs a KV-cache group with full attention; the model's groups are: {kinds}")
    return first


def _check_kinds(cache: KVCacheConfig) -> None:
    known = FULL_KINDS | WINDOW_KINDS | STATE_KINDS
    others = [
        f"{group.kind} (group {index})" for index, group in enumerate(cache.kv_cache_groups) if group.kind not in known
    ]
    if others:
        raise ConfigError(
            f"mode simple cannot offload KV-cache groups of the kind {', '.join(others)}; it knows {', '.join(sorted(known))}"
        )
    for index, group in enumerate(cache.kv_cache_groups):
        if group.kind in WINDOW_KINDS and (group.sliding_window is None or group.sliding_window < 1):
            raise ConfigError(
                f"KV-cache group {index} ({group.kind}): sliding_window {group.sliding_window} is no number of tokens"
            )
