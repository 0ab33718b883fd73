"""Collection by age and total size: heads before tails, in memory that does not grow with the blocks."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.admin.ages import ERA, Ages
from tiering.admin.records import Collected, Limits, StoredBlock
from tiering.admin.tier_admin import TierAdmin
from tiering.errors import TemporaryStoreError
from tiering.secondary.options import TierOptions

HOUR = 3600.0
DAY = 24 * HOUR
START = 1_780_000_000.0 // ERA * ERA


class Medium(TierAdmin):
    """A medium whose blocks are in memory."""

    def __init__(self, blocks: Sequence[StoredBlock], now: float = START + 30 * DAY) -> None:
        super().__init__(TierOptions(type="medium"))
        self.held = {block.place: block for block in blocks}
        self.clock = lambda: now
        self.broken = False

    async def blocks(self, after: str = "") -> AsyncIterator[StoredBlock]:
        for place in sorted(self.held):
            yield self.held[place]

    async def remove(self, blocks: Sequence[StoredBlock]) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise TemporaryStoreError("no deletion")
        for block in blocks:
            self.held.pop(block.place, None)


def chains(count: int, length: int, begin: float, apart: float) -> list[StoredBlock]:
    """Return the blocks of prefixes that are stored one after the other, each from its head on."""
    names = random.Random(7)
    return [
        StoredBlock(begin + chain * apart + position // 4, f"{names.getrandbits(32):08x}-{chain}-{position}", 100)
        for chain in range(count)
        for position in range(length)
    ]


def reachable(medium: Medium) -> dict[int, int]:
    """Return how many leading blocks of each prefix are there."""
    positions: dict[int, set[int]] = {}
    for place in medium.held:
        _, chain, position = place.split("-")
        positions.setdefault(int(chain), set()).add(int(position))
    return {
        chain: next(position for position in range(len(held) + 1) if position not in held)
        for chain, held in positions.items()
    }


def collect(medium: Medium, *, dry_run: bool = False, **limits: object) -> Collected:
    return asyncio.run(medium.collect(Limits(**limits), dry_run=dry_run))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(chains(100, 20, START, 5.0), id="one after the other"),
        pytest.param(chains(100, 20, START, 600.0), id="over hours"),
        pytest.param(
            [StoredBlock(START + position * 30.0, f"{chain:08x}-{chain}-{position}", 100)
             for chain in range(100) for position in range(20)],
            id="all at once",
        ),
    ],
)  # fmt: skip
def test_a_collection_to_three_quarters_leaves_only_blocks_that_can_be_reached(blocks: list[StoredBlock]) -> None:
    medium = Medium(blocks)
    total = len(blocks) * 100
    done = collect(medium, max_total=total * 3 // 4)
    assert (done.blocks, done.removed_bytes) == (2000, total // 4)
    assert sum(reachable(medium).values()) >= 0.99 * len(medium.held)
    assert len(reachable(medium)) >= 75


def test_a_head_that_many_prefixes_share_stays_as_long_as_it_is_renewed() -> None:
    tails = chains(60, 20, START + 5 * DAY, HOUR)
    head = StoredBlock(START + 6 * DAY, "00000000-head-0", 100)
    medium = Medium([head, *tails])
    collect(medium, max_total=len(medium.held) * 75)
    assert head.place in medium.held


def test_whole_eras_go_the_oldest_first() -> None:
    old, new = chains(10, 10, START, 1.0), chains(10, 10, START + 10 * DAY, 1.0)
    medium = Medium([*new, *(StoredBlock(block.modified, f"old{block.place}", 100) for block in old)])
    collect(medium, max_total=100 * 100)
    assert all(not place.startswith("old") for place in medium.held)
    assert len(medium.held) == 100


def test_a_dry_run_counts_the_same_and_removes_nothing() -> None:
    medium = Medium(chains(50, 10, START, 900.0))
    counted = collect(medium, dry_run=True, max_total=20_000, older_than=29.9 * DAY)
    assert len(medium.held) == 500
    assert collect(medium, max_total=20_000, older_than=29.9 * DAY) == counted
    assert len(medium.held) == counted.blocks - counted.removed_blocks


def test_a_block_that_is_written_again_meanwhile_stays() -> None:
    renewed = "00000000-0-0"
    medium = Medium([StoredBlock(START, renewed, 100), *chains(10, 10, START, 1.0)])
    listings = 0
    listed = medium.blocks

    async def blocks(after: str = "") -> AsyncIterator[StoredBlock]:
        nonlocal listings
        listings += 1
        if listings == 2:
            medium.held[renewed] = StoredBlock(START + DAY, renewed, 100)
        async for block in listed(after):
            yield block

    medium.blocks = blocks  # type: ignore[method-assign]
    collect(medium, max_total=0)
    assert list(medium.held) == [renewed]


def test_a_failed_removal_ends_the_collection() -> None:
    medium = Medium(chains(300, 10, START, 1.0))
    medium.broken = True
    with pytest.raises(TemporaryStoreError, match="no deletion"):
        collect(medium, max_total=0)


def test_memory_does_not_grow_with_the_blocks() -> None:
    class Endless(Medium):
        async def blocks(self, after: str = "") -> AsyncIterator[StoredBlock]:
            for number in range(70_000):
                yield StoredBlock(START + number * 25.0, f"{number:032x}", 100)

        async def remove(self, blocks: Sequence[StoredBlock]) -> None:
            await asyncio.sleep(0)

    medium = Endless([])
    tracemalloc.start()
    try:
        done = collect(medium, max_total=1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert done.removed_blocks == 70_000 - 10
    assert peak < 16 << 20


def test_bins_are_bounded_and_lose_no_byte() -> None:
    ages = Ages(most_bins=64)
    for number in range(5000):
        ages.add(START + number * 977.0, 3)
    assert len(ages._bins) <= 64
    assert sum(ages._bins.values()) == ages.total == 15_000


def _times() -> Iterator[st.SearchStrategy[list[tuple[float, int]]]]:
    entry = st.tuples(st.floats(START, START + 3 * DAY), st.integers(1, 1000))
    yield st.lists(entry, min_size=1, max_size=60)


@given(blocks=next(_times()), share=st.floats(0, 1.2), most=st.sampled_from([4, 64, 1 << 16]))
def test_enough_goes_and_less_than_one_block_too_much(blocks: list[tuple[float, int]], share: float, most: int) -> None:
    ages = Ages(most_bins=most)
    for modified, nbytes in blocks:
        ages.add(modified, nbytes)
    bound = int(ages.total * share)
    cut = ages.cut(bound)
    gone = [nbytes for modified, nbytes in blocks if cut.takes(modified, nbytes)]
    assert ages.total - sum(gone) <= max(bound, 0)
    assert ages.total - sum(gone) > bound - 1000 or not gone
