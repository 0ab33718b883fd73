"""Late stores of several KV-cache groups: every GPU block is copied into the row of its own name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.mini_engine.simple import MirroredPool
from tests.connector.fakes import (
    FakeManager,
    FakeRequest,
    FakeSpec,
    idle_step,
    make_spec,
    run_prompt,
    stored,
)
from tiering.api.keys import get_offload_group_idx
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.copy.layout import RowLayout, plan_pages

SIZES = (4, 8)
"""Tokens in a GPU block of each group."""
LAYOUT = RowLayout(((8, 8), (24,)))
NUM_BLOCKS, NUM_ROWS = 33, 64


class TwoGroups:
    """A connector beside a pool whose blocks hold their own names, and rows that the stores fill."""

    def __init__(self, *, feeds_tiers: bool) -> None:
        self.manager = FakeManager(NUM_ROWS)
        self.manager.exclusive, self.manager.feeds_tiers = True, feeds_tiers
        engine = make_spec(None, None, max_batch_tokens=8).engine
        spec = FakeSpec(replace(engine, block_sizes=SIZES), manager=self.manager)
        self.scheduler = OffloadingConnectorScheduler(spec, clock=lambda: 0.0)
        self.pool = MirroredPool(NUM_BLOCKS)
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.copied: dict[bytes, tuple[int, bytes | None]] = {}
        """Group and content of each name's row."""

    def run(self, request: FakeRequest) -> tuple[list[int], list[int]]:
        small, large = self.pool.take(len(request.block_hashes)), self.pool.take(len(request.block_hashes) // 2)
        for block, name in zip(small, request.block_hashes, strict=True):
            self.pool.name(block, (0, name))
        for block, name in zip(large, request.block_hashes[1::2], strict=True):
            self.pool.name(block, (1, name))
        ids = [block.block_id for block in small], [block.block_id for block in large]
        self.copy(run_prompt(self.scheduler, request, *ids))
        return ids

    def copy(self, meta: OffloadingConnectorMetadata) -> None:
        """Copy as a worker does: by the groups' sizes in the order, and their own pages."""
        names = {row: key for key, row in self.manager.rows.items()}
        for name in meta.reqs_to_store:
            source, destination = stored(meta, name)
            bounds = (NUM_BLOCKS,) * 2
            plan = plan_pages(LAYOUT, source, destination, num_blocks=bounds, num_rows=NUM_ROWS, store=True)
            for pages in plan:
                for block, row in zip(pages.gpu.tolist(), pages.rows.tolist(), strict=True):
                    self.copied[names[row]] = pages.group, self.pool.blocks[block].block_hash

    def check(self) -> int:
        """Check the content of all rows, and return their number by now."""
        assert self.copied.keys() == self.manager.rows.keys()
        for key, (group, content) in self.copied.items():
            assert (group, content) == (get_offload_group_idx(key), key)
        return len(self.copied)


@pytest.mark.parametrize("queue", ["by turns", "small ones first", "large ones first", "one group only"])
def test_late_stores_of_groups_with_other_block_sizes_copy_each_block_into_its_own_row(queue: str) -> None:
    bench, request = TwoGroups(feeds_tiers=False), FakeRequest("r1", [*range(16)])
    small, large = bench.run(request)
    orders = {
        "by turns": [small[3], large[1], small[2], small[1], large[0], small[0]],
        "small ones first": [*small[::-1], *large[::-1]],
        "large ones first": [*large[::-1], *small[::-1]],
        "one group only": large[::-1],
    }
    bench.scheduler.request_finished(request, [])
    bench.pool.free_blocks([bench.pool.blocks[block] for block in orders[queue]])
    others = bench.pool.take(NUM_BLOCKS - 1 - len(small) - len(large))
    other = FakeRequest("r2", [9] * 8 * len(others), kv_transfer_params={"kv_tiering": {"store": False}})
    bench.copy(run_prompt(bench.scheduler, other, [block.block_id for block in others], []))
    bench.copy(idle_step(bench.scheduler))
    assert bench.check() == len(orders[queue])


def test_blocks_of_several_groups_that_tiers_want_come_from_their_own_gpu_blocks() -> None:
    bench, request = TwoGroups(feeds_tiers=True), FakeRequest("r1", [*range(16)])
    bench.run(request)
    assert bench.check() == 6
    bench.manager.reset_cache()
    bench.manager.lost.clear()
    bench.copied.clear()
    keys = [*request.keys(0), *request.keys(1, factor=2)]
    bench.manager.wanted = [keys[number] for number in (5, 2, 4, 0)]
    bench.copy(idle_step(bench.scheduler))
    assert bench.check() == 4
