"""KV-cache groups: accepted kinds, refused kinds, and the layout of keys."""

from __future__ import annotations

import dataclasses

import pytest

from tests.connector.fakes import FakeSpec, make_scheduler, make_spec
from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.api.keys import get_offload_group_idx
from tiering.connector.groups import build_groups, interleave, offload_groups
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.errors import ConfigError


def spec_of(kind: str, window: int | None = None) -> FakeSpec:
    groups = (KVCacheGroup(("a",), 4), KVCacheGroup(("b",), 4, window, kind))
    return FakeSpec(EngineConfig(block_sizes=(4, 4), hash_block_size=4, groups=groups))


@pytest.mark.parametrize("kind", ["mamba", "state_space", "linear_attention", "short_conv", "gdn_attention"])
def test_groups_of_states_need_a_group_with_full_attention(kind: str) -> None:
    full, state = build_groups(spec_of(kind))
    assert (full.is_full, state.is_state) == (True, True)
    alone = FakeSpec(EngineConfig(block_sizes=(4,), hash_block_size=4, groups=(KVCacheGroup(("b",), 4, None, kind),)))
    with pytest.raises(ConfigError, match="states are offloaded only beside a group with full attention"):
        OffloadingConnectorScheduler(alone)


def test_states_have_no_larger_offloaded_blocks() -> None:
    spec = spec_of("mamba")
    larger = FakeSpec(spec.engine, {"block_size": 8})
    with pytest.raises(ConfigError, match=r"block_size, .*cannot be used, KV-cache group 1 .*leave both out"):
        build_groups(larger)


@pytest.mark.parametrize("kind", ["cross_attention", "encoder_only_attention", "a_kind_of_tomorrow"])
def test_groups_whose_blocks_have_no_fixed_place_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="groups of this kind cannot be offloaded, only full_attention"):
        build_groups(spec_of(kind))


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local_attention"])
@pytest.mark.parametrize("window", [None, 0, -4])
def test_a_window_group_needs_a_window(window: int | None, kind: str) -> None:
    with pytest.raises(ConfigError, match="window"):
        build_groups(spec_of(kind, window))


def test_a_description_for_each_group_or_for_none() -> None:
    with pytest.raises(ConfigError, match="1 KV-cache groups are described"):
        build_groups(FakeSpec(EngineConfig(block_sizes=(4, 4), hash_block_size=4, groups=(KVCacheGroup(("a",), 4),))))
    assert len(build_groups(FakeSpec(EngineConfig(block_sizes=(4, 4), hash_block_size=4, groups=())))) == 2


@pytest.mark.parametrize("value", ["soon", -1, True])
def test_a_wrong_wait_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="sharer_wait"):
        make_scheduler(sharer_wait=value)


@pytest.mark.parametrize(
    ("window", "size", "blocks"), [(8, 4, 2), (5, 4, 1), (6, 4, 2), (1, 4, 0), (9, 8, 1), (128, 16, 8)]
)
def test_a_window_covers_the_tokens_that_the_next_one_sees(window: int, size: int, blocks: int) -> None:
    (group,) = build_groups(make_spec(window, gpu_block_size=size))
    assert group.window_blocks == blocks


@pytest.mark.parametrize(("computed", "skipped"), [(0, 0), (8, 0), (10, 0), (11, 1), (15, 2), (32, 6)])
def test_blocks_before_the_window_may_be_gone(computed: int, skipped: int) -> None:
    (group,) = build_groups(make_spec(8))
    assert group.skipped_blocks(computed) == skipped


@pytest.mark.parametrize(("computed", "skipped"), [(0, 0), (7, 0), (8, 2), (15, 2), (16, 4)])
def test_blocks_before_the_chunk_may_be_gone(computed: int, skipped: int) -> None:
    (group,) = build_groups(spec_of("chunked_local_attention", 8))[1:]
    assert group.skipped_blocks(computed) == skipped


def test_context_parallelism_makes_blocks_larger() -> None:
    engine = EngineConfig(block_sizes=(4,), hash_block_size=4, groups=(), context_parallel_size=2)
    (group,) = build_groups(FakeSpec(engine))
    assert (group.gpu_block_size, group.hash_block_size_factor) == (8, 2)


def test_heads_of_all_groups_come_first_in_a_prefix() -> None:
    assert interleave([[b"a0", b"a1"], [b"b0", b"b1"]]) == [b"a0", b"b0", b"a1", b"b1"]
    assert interleave([[b"a0", b"a1"], [b"b0"]]) == [b"a0", b"a1", b"b0"]


def test_a_group_is_immutable() -> None:
    (group,) = build_groups(make_spec())
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.group_idx = 3  # type: ignore[misc]


def test_keys_have_the_index_of_a_group_in_the_engines_list() -> None:
    (group,) = offload_groups([KVCacheGroup(("layer",), 4, engine_idx=2)], 4)
    assert (group.group_idx, group.engine_idx, get_offload_group_idx(b"hash" + group.key_suffix)) == (0, 2, 2)
