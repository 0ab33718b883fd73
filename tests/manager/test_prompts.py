"""A prompt's blocks are stored and loaded in one call each, as many as fit, and nothing stays pinned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import tiering

MODEL = tiering.ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="prompts")
BLOCK = 4096
TOKENS = list(range(200))
KEYS = tiering.prompt_keys(TOKENS, 16)

Row = NDArray[np.uint8]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tiering.TieringOffloadingManager]:
    """A manager with eight rows and a disk."""
    (tmp_path / "stack.yaml").write_text(
        f"primary: {{capacity: 32KiB}}\n"
        f"secondary: [{{type: local, path: {tmp_path}/kv, capacity: 16MiB, segment_size: 4MiB}}]\n"
    )
    with tiering.open_manager(tiering.load_stack(tmp_path / "stack.yaml"), BLOCK, MODEL) as manager:
        yield manager


def write(position: int, row: Row) -> None:
    row[:BLOCK] = position + 1


def load(manager: tiering.TieringOffloadingManager, keys: list[bytes]) -> list[int]:
    """Load, and return the first byte of each block."""
    found: list[int] = []

    def read(position: int, row: Row) -> None:
        assert len(set(row[:BLOCK].tolist())) == 1
        assert position == len(found)
        found.append(int(row[0]))

    assert tiering.load_prefix(manager, keys, tiering.ReqContext("load"), read) == len(found)
    return found


def test_keys_stand_for_the_whole_prefix() -> None:
    assert len(set(KEYS)) == len(KEYS) == 12
    assert tiering.prompt_keys(TOKENS[:50], 16) == KEYS[:3]
    assert not set(KEYS) & set(tiering.prompt_keys([7, *TOKENS[1:]], 16))
    assert not set(KEYS) & set(tiering.prompt_keys(TOKENS, 16, salt=b"tenant"))
    assert not set(KEYS) & set(tiering.prompt_keys(TOKENS, 8))
    assert not set(KEYS) & set(tiering.prompt_keys(TOKENS, 16, group_idx=1))


@pytest.mark.parametrize(
    ("tokens", "size", "message"), [([1], 0, "block_size"), ([-1], 1, "token"), ([2**32], 1, "token")]
)
def test_what_cannot_be_a_key_is_refused(tokens: list[int], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiering.prompt_keys(tokens, size)


def test_as_many_blocks_as_fit_are_stored(manager: tiering.TieringOffloadingManager) -> None:
    assert tiering.store_prefix(manager, KEYS, tiering.ReqContext("store"), write) == 6
    assert load(manager, KEYS) == [1, 2, 3, 4, 5, 6]


def test_blocks_that_left_the_cpu_tier_come_back(manager: tiering.TieringOffloadingManager) -> None:
    tiering.store_prefix(manager, KEYS[:4], tiering.ReqContext("store"), write)
    assert tiering.wait_until_idle(manager)
    manager.primary_tier.reset_cache()
    assert load(manager, KEYS) == [1, 2, 3, 4]


def test_held_blocks_are_not_written_again(manager: tiering.TieringOffloadingManager) -> None:
    tiering.store_prefix(manager, KEYS[:2], tiering.ReqContext("first"), write)
    positions: list[int] = []
    tiering.store_prefix(
        manager, KEYS[:3], tiering.ReqContext("second"), lambda position, row: positions.append(position)
    )
    assert positions == [2]


def test_a_failed_copy_to_the_rows_stores_nothing(manager: tiering.TieringOffloadingManager) -> None:
    def fail(position: int, row: Row) -> None:
        if position == 1:
            raise OSError("the device is gone")
        write(position, row)

    with pytest.raises(OSError, match="the device is gone"):
        tiering.store_prefix(manager, KEYS[:2], tiering.ReqContext("store"), fail)
    assert load(manager, KEYS) == []
    assert tiering.store_prefix(manager, KEYS[:8], tiering.ReqContext("store"), write) == 8


def test_a_failed_copy_from_the_rows_releases_them(manager: tiering.TieringOffloadingManager) -> None:
    def fail(position: int, row: Row) -> None:
        raise OSError("the device is gone")

    tiering.store_prefix(manager, KEYS[:4], tiering.ReqContext("store"), write)
    with pytest.raises(OSError, match="the device is gone"):
        tiering.load_prefix(manager, KEYS[:4], tiering.ReqContext("load"), fail)
    assert tiering.wait_until_idle(manager)
    others = tiering.prompt_keys(TOKENS, 16, salt=b"other")[:8]
    assert tiering.store_prefix(manager, others, tiering.ReqContext("store"), write) == 8


def test_many_prompts_load_at_once_in_asyncio(manager: tiering.TieringOffloadingManager) -> None:
    tiering.store_prefix(manager, KEYS[:4], tiering.ReqContext("store"), write)
    assert tiering.wait_until_idle(manager)
    manager.primary_tier.reset_cache()

    async def load_all() -> list[int]:
        requests = [tiering.ReqContext(f"load {number}") for number in range(5)]
        return await asyncio.gather(
            *(tiering.load_prefix_async(manager, KEYS[:4], context, lambda n, row: None) for context in requests)
        )

    assert asyncio.run(load_all()) == [4] * 5


def test_tensors_of_every_layout_come_back_from_a_row() -> None:
    row = np.zeros(4096, np.uint8)
    parts = [torch.arange(3, dtype=torch.uint8), torch.randn(4, 6).T, torch.randn(2, 3, 4).to(torch.bfloat16)[:, ::2]]
    tiering.pack_block(row, parts)
    back = [torch.empty_like(part) for part in parts]
    back[1] = torch.zeros(8, 8)[:6, 2:6]  # Not contiguous.
    tiering.unpack_block(row, back)
    assert all(torch.equal(part, came) for part, came in zip(parts, back, strict=True))


def test_tensors_larger_than_the_row_are_refused() -> None:
    with pytest.raises(ValueError, match="a block of 40 bytes does not fit a row of 39 bytes"):
        tiering.pack_block(np.zeros(39, np.uint8), [torch.zeros(10)])
