"""The kernel of CUDA copies, interpreted by Triton on the CPU, and compiled where there is a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.copy import kv
from tests.copy.fake_cuda import FakeCuda
from tiering.api.engine import CanonicalKVCaches, KVCacheGroup
from tiering.copy.canonical import canonicalize
from tiering.copy.layout import RowLayout
from tiering.copy.pages import DeviceGroup, PageKernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageKernel]:
    """The kernel; without a GPU, as Triton's interpreter runs it."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "tiering.copy.kernel", raising=False)
    yield importlib.import_module("tiering.copy.kernel").move_pages
    sys.modules.pop("tiering.copy.kernel", None)  # another module may need the compiled one


def random_cache(make: str) -> CanonicalKVCaches:
    if make in kv.LAYOUTS:
        cache = canonicalize(
            {name: tensor.to(DEVICE) for name, tensor in kv.LAYOUTS[make]().items()}, kv.one_group(), kv.NUM_BLOCKS
        )
    else:  # pages of several programs, of a part of a tile, and of an odd number of bytes
        sizes = {"long": 100 << 10, "short": 24, "odd": 5001}
        pages = {f"l{i}": torch.zeros(kv.NUM_BLOCKS, sizes[make], dtype=torch.uint8, device=DEVICE) for i in range(3)}
        cache = canonicalize(pages, [KVCacheGroup(tuple(pages), 16)], kv.NUM_BLOCKS)
    for part in cache.tensors:
        part.tensor.copy_(torch.randint(0, 256, part.tensor.shape, dtype=torch.uint8))
    return cache


@pytest.mark.parametrize("make", [*kv.LAYOUTS, "long", "short", "odd"])
def test_the_kernel_moves_what_the_fake_of_it_moves(kernel: PageKernel, make: str) -> None:
    """It writes the pages of its blocks and nothing else; the fake moves page by page."""
    cache = random_cache(make)
    group = DeviceGroup.of(cache, RowLayout.of(cache), 0)
    blocks = torch.randperm(kv.NUM_BLOCKS)[:3].to(DEVICE)
    staged, expected = (torch.full((4 * group.block_bytes,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    kernel(group, blocks, staged, store=True)
    if DEVICE == "cpu":
        FakeCuda().kernel(group, blocks, expected, store=True)
        assert torch.equal(staged, expected)
    assert bool((staged[3 * group.block_bytes :] == 7).all())
    assert not bool((staged[: 3 * group.block_bytes] == 7).all())
    before = [part.tensor.clone() for part in cache.tensors]
    for part in cache.tensors:
        part.tensor[blocks] = 0
    kernel(group, blocks, staged, store=False)
    for ref in cache.group_data_refs[0]:
        ours, theirs = (
            tensors[ref.tensor_idx][:, : ref.page_size_bytes]
            for tensors in ([part.tensor for part in cache.tensors], before)
        )
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("make", [*kv.LAYOUTS, "long", "short", "odd"])
def test_the_same_straight_to_rows_and_back(kernel: PageKernel, make: str) -> None:
    cache = random_cache(make)
    group = DeviceGroup.of(cache, RowLayout.of(cache), 0)
    blocks, order = torch.randperm(kv.NUM_BLOCKS)[:3].to(DEVICE), [2, 0, 1]
    stride = -(-group.block_bytes // 4096) * 4096
    rows, expected = (torch.full((4, stride), 7, dtype=torch.uint8, pin_memory=DEVICE == "cuda") for _ in range(2))
    targets = [
        torch.tensor([part.data_ptr() + row * stride for row in order], device=DEVICE) for part in (rows, expected)
    ]
    kernel(group, blocks, targets[0], store=True, direct=True)
    if DEVICE == "cpu":
        fake = FakeCuda()
        fake.runtime.registered[expected.data_ptr()] = expected.nbytes
        fake.kernel(group, blocks, targets[1], store=True, direct=True)
        assert torch.equal(rows, expected)
    else:
        torch.cuda.synchronize()
    assert bool((rows[3] == 7).all())
    before = [part.tensor.clone() for part in cache.tensors]
    for part in cache.tensors:
        part.tensor[blocks] = 0
    kernel(group, blocks, targets[0], store=False, direct=True)
    for ref in cache.group_data_refs[0]:
        ours, theirs = (
            tensors[ref.tensor_idx][:, : ref.page_size_bytes]
            for tensors in ([part.tensor for part in cache.tensors], before)
        )
        assert torch.equal(ours, theirs)
