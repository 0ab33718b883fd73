"""Deadlines: an overdue block is not attempted."""

from __future__ import annotations

from tests.medium.io_fakes import make_blocks, outcome_names
from tiering.medium.block_store import BlockIO, BlockStore, Done, StoreTraits
from tiering.medium.layers.attempts import DeadlineLayer
from tiering.testing.clock import FakeClock
from tiering.testing.faults import DictStore


def test_overdue_blocks_are_not_attempted() -> None:
    clock, store = FakeClock(), DictStore()
    layer = DeadlineLayer(store, clock=clock)
    assert outcome_names(layer.put(make_blocks(2, deadline=clock() + 1))) == ["DONE"] * 2
    assert outcome_names(layer.get(make_blocks(2, deadline=clock()))) == ["OverdueError"] * 2
    assert store.calls == [("put", (0, 1))]


class _Slow(BlockStore):
    """A store that takes a second for each block, one after the other."""

    traits = StoreTraits(medium="SLOW")

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def put_one(self, block: BlockIO) -> None:
        self.clock.advance(1.0)

    def get_one(self, block: BlockIO) -> Done:
        self.clock.advance(1.0)
        return Done.DONE


def test_the_clock_is_read_between_blocks_that_move_one_after_the_other() -> None:
    clock = FakeClock()
    layer = DeadlineLayer(_Slow(clock), clock=clock)
    outcomes = layer.get(make_blocks(4, deadline=clock() + 1.5))
    assert outcome_names(outcomes) == ["DONE", "DONE", "OverdueError", "OverdueError"]
