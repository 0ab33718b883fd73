"""The offloading spec: defaults, block sizes, and the configurations that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tiering.api.engine import CanonicalKVCaches, EngineConfig, OffloadingSpec
from tiering.api.manager import OffloadingManager
from tiering.api.transfer import LoadStoreSpec
from tiering.errors import ConfigError


class BareSpec(OffloadingSpec):
    """A spec without tiers."""

    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], Any]]:
        yield from ()


def engine(*block_sizes: int, hash_block_size: int = 16, context_parallel_size: int = 1) -> EngineConfig:
    return EngineConfig(block_sizes, hash_block_size, (), context_parallel_size=context_parallel_size)


def test_a_spec_offloads_gpu_blocks_of_the_prompt_unless_told_otherwise() -> None:
    spec = BareSpec(engine(16, 32, context_parallel_size=2))
    assert spec.offload_prompt_only
    assert spec.gpu_block_size == (32, 64)
    assert spec.block_size_factor == 1
    assert not BareSpec(engine(16), {"offload_prompt_only": False}).offload_prompt_only


def test_blocks_per_chunk_applies_to_each_group() -> None:
    spec = BareSpec(engine(16, 48), {"blocks_per_chunk": 4})
    assert (spec.block_size_factor, spec.offloaded_block_size) == (4, (64, 192))


@pytest.mark.parametrize(("block_size", "factor"), [(16, 1), (64, 4)])
def test_the_factor_is_the_offloaded_block_size_over_that_of_the_gpu(block_size: int, factor: int) -> None:
    spec = BareSpec(engine(16, 16), {"block_size": block_size})
    assert spec.block_size_factor == factor
    assert spec.offloaded_block_size == (block_size, block_size)


@pytest.mark.parametrize(
    ("extra", "config", "said"),
    [
        ({}, engine(16, 24), "group 1: the GPU block size 24 is not a multiple of the hash block size 16"),
        ({}, engine(16, hash_block_size=0), "hash block size 0"),
        ({}, engine(0), "positive sizes"),
        ({}, engine(-16), "positive sizes"),
        ({}, engine(), "at least one KV-cache group"),
        ({"block_size": 8}, engine(16), "not a multiple of the GPU block size 16"),
        ({"block_size": 40}, engine(16), "not a multiple of the GPU block size 16"),
        ({"block_size": 64}, engine(16, 32), "different GPU block sizes .*set blocks_per_chunk"),
        ({"block_size": 0}, engine(16), "not a number of tokens"),
        ({"block_size": True}, engine(16), "not a number of tokens"),
        ({"block_size": "64"}, engine(16), "not a number of tokens"),
        ({"blocks_per_chunk": 0}, engine(16), "blocks_per_chunk: 0 is not a number of GPU blocks"),
        ({"blocks_per_chunk": True}, engine(16), "not a number of GPU blocks"),
        ({"blocks_per_chunk": 2, "block_size": 32}, engine(16), "leave one out"),
        ({"offload_prompt_only": "false"}, engine(16), "'false' is not true or false"),
        ({"offload_prompt_only": None}, engine(16), "None is not true or false"),
    ],
)
def test_sizes_and_flags_that_cannot_be_used_are_refused(
    extra: dict[str, Any], config: EngineConfig, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        BareSpec(config, extra)
