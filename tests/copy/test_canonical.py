"""Every engine's tensors become int8 tensors (num_blocks, page bytes) in place, or are refused."""

from __future__ import annotations

import pytest
import torch

from tests.copy import kv
from tests.copy.kv import LAYERS, LAYOUTS, NUM_BLOCKS
from tiering.api.engine import KVCacheGroup
from tiering.copy.canonical import canonicalize, canonicalize_cross_layers
from tiering.errors import ConfigError


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_begin_with_the_blocks_and_are_int8(layout: str) -> None:
    for tensor in kv.canonical(layout).tensors:
        assert tensor.tensor.dtype == torch.int8
        assert tensor.tensor.shape == (NUM_BLOCKS, tensor.page_size_bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_s_pages_are_exactly_that_block_s_bytes(layout: str) -> None:
    """Setting a block through the canonical pages changes the engine's view of exactly this block."""
    tensors = LAYOUTS[layout]()
    canonical = canonicalize(tensors, kv.one_group(), NUM_BLOCKS)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for ref in canonical.group_data_refs[0]:
        canonical.tensors[ref.tensor_idx].tensor[5, : ref.page_size_bytes] ^= 0x55
    for name, tensor in tensors.items():
        blocks = next(dim for dim, size in enumerate(tensor.shape) if size % NUM_BLOCKS == 0)
        changed = (
            (tensor.view(torch.uint8) != before[name].view(torch.uint8)).movedim(blocks, 0).reshape(NUM_BLOCKS, -1)
        )
        assert changed[5].all(), name
        assert not changed[:5].any(), name
        assert not changed[6:].any(), name


@pytest.mark.parametrize(
    ("layout", "tensors", "page_bytes"),
    [
        ("block_first", 3, 160),
        ("split_kv", 6, 80),
        ("split_kv_blocks_outside", 3, 160),
        ("one_storage", 3, 84),
        ("padded", 3, 24),
        ("interleaved", 1, 108),
        ("interleaved_heads", 1, 3072),
        ("finer_kernel_blocks", 3, 24),
    ],
)
def test_refs_name_the_unpadded_pages(layout: str, tensors: int, page_bytes: int) -> None:
    canonical = kv.canonical(layout)
    assert len(canonical.tensors) == tensors
    assert [ref.page_size_bytes for ref in canonical.group_data_refs[0]] == [page_bytes] * tensors


def test_layers_that_are_no_neighbours_are_pages_of_their_own() -> None:
    tensors = kv.interleaved()
    canonical = canonicalize(tensors, [KVCacheGroup(("l0", "l2"), 16), KVCacheGroup(("l1",), 16)], NUM_BLOCKS)
    assert [[ref.page_size_bytes for ref in refs] for refs in canonical.group_data_refs] == [[36, 36], [36]]
    for group, layer in ((0, "l0"), (1, "l1")):
        assert kv.page(canonical, group, 0, 4) == tensors[layer][4].view(torch.uint8).numpy().tobytes()


def test_neighbours_are_joined_in_memory_s_order_whatever_the_group_s() -> None:
    tensors = kv.interleaved()
    canonical = canonicalize(tensors, [KVCacheGroup(("l2", "l0", "l1"), 16)], NUM_BLOCKS)
    whole = b"".join(tensors[layer][4].view(torch.uint8).numpy().tobytes() for layer in LAYERS)
    assert kv.gpu_block(canonical, 0, 4) == whole


def test_neighbours_in_memory_that_are_other_blocks_are_not_joined() -> None:
    """With one block, the second layer begins at the end of the first layer's only page."""
    pool = kv.fill(torch.empty(2, 1, 8, dtype=torch.uint8), 1)
    canonical = canonicalize({"l0": pool[0], "l1": pool[1]}, [KVCacheGroup(("l0", "l1"), 16)], 1)
    assert [ref.page_size_bytes for ref in canonical.group_data_refs[0]] == [8, 8]


def test_groups_that_share_blocks_share_what_begins_at_one_place() -> None:
    """Each block belongs to one group, so pages of different sizes may lie at the same place."""
    pool = kv.fill(torch.empty(NUM_BLOCKS, 80, dtype=torch.uint8), 1)
    tensors = {"a": pool[:, :40], "b": pool[:, 40:64], "c": pool[:, :48], "d": pool[:, 48:80]}
    canonical = canonicalize(tensors, [KVCacheGroup(("a", "b"), 16), KVCacheGroup(("c", "d"), 16)], NUM_BLOCKS)
    assert len(canonical.tensors) == 1
    assert [[ref.page_size_bytes for ref in refs] for refs in canonical.group_data_refs] == [[64], [80]]


def test_pages_of_a_group_that_overlap_are_copied_once() -> None:
    pool = kv.fill(torch.empty(NUM_BLOCKS, 80, dtype=torch.uint8), 1)
    tensors = {"a": pool[:, :40], "b": pool[:, 24:64], "c": pool[:, 30:36]}
    canonical = canonicalize(tensors, [KVCacheGroup(("a", "b", "c"), 16)], NUM_BLOCKS)
    assert [[ref.page_size_bytes for ref in refs] for refs in canonical.group_data_refs] == [[64]]


def test_padding_shows_in_the_tensor_s_page_size() -> None:
    assert {tensor.page_size_bytes for tensor in kv.canonical("padded").tensors} == {40}


def test_keys_come_before_values_of_a_split_layer() -> None:
    tensors = kv.split_kv()
    canonical = canonicalize(tensors, kv.one_group(), NUM_BLOCKS)
    assert kv.page(canonical, 0, 0, 3) == tensors["l0"][0, 3].view(torch.uint8).numpy().tobytes()
    assert kv.page(canonical, 0, 1, 3) == tensors["l0"][1, 3].view(torch.uint8).numpy().tobytes()


def test_groups_keep_their_layers_in_order() -> None:
    tensors = kv.block_first()
    groups = [KVCacheGroup(("l2",), 16), KVCacheGroup(("l1", "l0"), 16)]
    canonical = canonicalize(tensors, groups, NUM_BLOCKS)
    assert kv.page(canonical, 0, 0, 7) == tensors["l2"][7].view(torch.uint8).numpy().tobytes()
    assert kv.page(canonical, 1, 0, 7) == tensors["l1"][7].view(torch.uint8).numpy().tobytes()
    assert kv.page(canonical, 1, 1, 7) == tensors["l0"][7].view(torch.uint8).numpy().tobytes()


def test_a_layer_that_reuses_another_s_kv_is_held_once() -> None:
    tensors = kv.split_kv()
    tensors["reuser"] = tensors["l1"]
    canonical = canonicalize(tensors, [KVCacheGroup((*LAYERS, "reuser"), 16)], NUM_BLOCKS)
    assert len(canonical.tensors) == 6
    assert len(canonical.group_data_refs[0]) == 6


def test_a_reusing_layer_outside_the_groups_is_no_error() -> None:
    tensors = kv.block_first()
    tensors["reuser"] = tensors["l1"]
    assert len(canonicalize(tensors, kv.one_group(), NUM_BLOCKS).tensors) == 3


def test_groups_that_share_a_pool_share_a_tensor() -> None:
    canonical = kv.two_groups()
    (l0, _), (w0,) = canonical.group_data_refs
    assert l0.tensor_idx == w0.tensor_idx
    assert (l0.page_size_bytes, w0.page_size_bytes) == (48, 40)


@pytest.mark.parametrize("layout", ["block_first", "split_kv", "one_storage"])
def test_the_number_of_blocks_can_be_inferred(layout: str) -> None:
    assert canonicalize(LAYOUTS[layout](), kv.one_group()).tensors[0].tensor.shape[0] == NUM_BLOCKS


def test_one_tensor_over_all_layers() -> None:
    tensor = kv.fill(torch.empty(NUM_BLOCKS, 3, 2, 4, 5, dtype=torch.float16), 1)
    canonical = canonicalize_cross_layers(tensor, kv.one_group(), NUM_BLOCKS)
    assert len(canonical.tensors) == 1
    assert [ref.page_size_bytes for ref in canonical.group_data_refs[0]] == [240]
    assert kv.gpu_block(canonical, 0, 9) == tensor[9].view(torch.uint8).numpy().tobytes()


def test_one_tensor_whose_layers_lie_outside_is_split() -> None:
    tensor = kv.fill(torch.empty(3, NUM_BLOCKS, 8, dtype=torch.float16), 1)
    canonical = canonicalize_cross_layers(tensor, kv.one_group(), NUM_BLOCKS)
    assert [ref.page_size_bytes for ref in canonical.group_data_refs[0]] == [16, 16, 16]


@pytest.mark.parametrize(
    ("tensors", "num_blocks", "message"),
    [
        ({}, 4, "no KV-cache tensors"),
        ({"l0": "text"}, 4, "neither a tensor nor the tensors of a state"),
        ({"l0": []}, 4, "neither a tensor nor the tensors of a state"),
        ({"l0": [torch.zeros(2, 4)]}, 4, "the first dimension of a state is not the blocks"),
        ({"l0": torch.zeros(0, 2)}, 4, "empty"),
        ({"other": torch.zeros(4, 2)}, 4, "l0 of KV-cache group 0 has no KV-cache tensor"),
        ({"l0": torch.zeros(5, 3)}, 4, "neither of the first two dimensions is the 4 blocks"),
        ({"l0": torch.zeros(2, 2, 8)}, 2, "either of the first two"),
        ({"l0": torch.zeros(8, 4, 8)}, 4, "either of the first two"),
        ({"l0": torch.zeros(4, 2, 6)[:, :, ::2]}, 4, "not contiguous"),
        ({"l0": torch.zeros(4, 6, 8)[:, ::2]}, 4, "not contiguous"),
        ({"l0": torch.zeros(8, 6)[:, :3]}, 4, "parts of a block"),
        ({"l0": torch.zeros(1, 6).expand(4, 6)}, 4, "overlap|interleaved"),
        ({"l0": torch.zeros(4, 8).as_strided((4, 3, 3), (8, 2, 1))}, 4, "overlaps with itself"),
        ({"l0": torch.zeros(4, 2), "own": torch.zeros(4, 2)}, 4, "own has KV of its own but is in no KV-cache group"),
        ({"l0": torch.zeros(4, 2), "l1": torch.zeros(5, 2)}, None, "do not agree"),
        ({"l0": torch.zeros(4, 2)}, 0, "num_blocks 0"),
    ],
)
def test_what_cannot_be_canonical_is_refused_by_name(
    tensors: dict[str, torch.Tensor], num_blocks: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        canonicalize(tensors, [KVCacheGroup(("l0",), 16)], num_blocks)


def test_the_tensors_of_a_state_are_one_page_without_its_padding() -> None:
    memory = torch.zeros(4, 16)
    convolution, state = memory[:, :2].view(4, 2, 1), memory[:, 2:10].view(4, 2, 4)
    group = KVCacheGroup(("l0",), 16, None, "mamba")
    found = canonicalize({"l0": [convolution, state]}, [group], 4)
    ((ref,),) = found.group_data_refs
    assert (ref.page_size_bytes, len(found.tensors)) == (40, 1)
    memory[2] = torch.arange(16)
    page = found.tensors[0].tensor[2, :40].view(torch.float32)
    assert page.tolist() == list(range(10))


def test_one_tensor_over_all_layers_needs_one_group() -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        canonicalize_cross_layers(torch.zeros(4, 2), [KVCacheGroup(("a",), 16), KVCacheGroup(("b",), 16)], 4)
