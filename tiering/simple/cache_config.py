"""The geometry of the engine's KV cache and of the CPU pool that mirrors it."""

from __future__ import annotations

from dataclasses import dataclass

from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.connector.groups import GroupKind, OffloadGroup, kind_of, offload_groups
from tiering.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One tensor of a KV cache."""

    size: int
    """Bytes of the tensor, over all blocks."""
    shared_by: tuple[str, ...]
    """Names of the layers that share the tensor."""


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The geometry of one worker's KV cache."""

    num_blocks: int
    """Number of blocks; each has a part of every tensor."""
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroup, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.kv_cache_tensors)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all tensors."""
        return self.total_bytes // self.num_blocks


def derive_cpu_config(gpu: KVCacheConfig, cpu_capacity_bytes: int) -> KVCacheConfig:
    """Return the geometry of the CPU pool: that of ``gpu``, with as many blocks as the capacity holds.

    Args:
        gpu: geometry of the engine's KV cache.
        cpu_capacity_bytes: bytes of CPU memory of one worker; the pool has at least one block.

    Raises:
        ConfigError: the capacity is not positive, or the KV cache is empty.
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


def check_engine(engine: EngineConfig, cache: KVCacheConfig) -> tuple[OffloadGroup, ...]:
    """Return the KV-cache groups as they are offloaded.

    Raises:
        ConfigError: the simple scheduler cannot serve this engine. The engine uses context parallelism, groups of an
            unknown kind, no full-attention group, or block sizes that are not multiples of the hash block size.
    """
    if engine.context_parallel_size != 1:
        raise ConfigError(
            f"mode simple: context-parallel sizes of {engine.context_parallel_size} in all are not supported; "
            "use mode tiering"
        )
    for index, group in enumerate(cache.kv_cache_groups):
        if group.gpu_block_size < 1 or group.gpu_block_size % engine.hash_block_size:
            raise ConfigError(
                f"KV-cache group {index}: the block size {group.gpu_block_size} is not a multiple of the hash block "
                f"size {engine.hash_block_size}; give the engine a block size that is (for vLLM: --block-size)"
            )
    interval = engine.retention_interval
    groups = offload_groups(cache.kv_cache_groups, engine.hash_block_size, retention_interval=interval)
    if not any(group.is_full for group in groups):
        kinds = ", ".join(group.kind for group in cache.kv_cache_groups) or "none"
        raise ConfigError(f"mode simple needs a KV-cache group with full attention; the model's groups are: {kinds}")
    return groups


def check_options(engine: EngineConfig, cache: KVCacheConfig, lazy_offload: bool, describes_events: bool) -> None:
    """Check that the options of the simple mode fit the engine, and one another.

    Args:
        engine: the engine's configuration.
        cache: geometry of one worker's KV cache.
        lazy_offload: True in the lazy mode.
        describes_events: value of ``self_describing_kv_events``.

    Raises:
        ConfigError: they do not.
    """
    if lazy_offload and not engine.enable_prefix_caching:
        raise ConfigError("lazy_offload needs the engine's prefix caching: turn prefix caching on, or lazy_offload off")
    if (
        not lazy_offload
        and not engine.enable_prefix_caching
        and any(kind_of(group) is GroupKind.STATE for group in cache.kv_cache_groups)
    ):
        raise ConfigError(
            "mode simple stores only those states of state-space groups that the engine's prefix caching keeps: "
            "turn prefix caching on"
        )
    if lazy_offload and describes_events:
        raise ConfigError(
            "self_describing_kv_events: lazy_offload stores blocks after their requests have ended, when their "
            "tokens are unknown; turn one of the two options off"
        )
