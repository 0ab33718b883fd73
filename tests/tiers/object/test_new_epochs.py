"""A new common epoch of a bucket, while engines hold older blocks in their CPU tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.engine_side import EngineSide
from tests.fake_s3 import FakeS3
from tests.tiers.object.new_epoch import begin_epochs
from tests.tiers.object.rigs import Make, block_names, look_for_epoch, namespace_of
from tiering.api.keys import OffloadKey
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.waiting import wait_until_idle
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.testing.clock import until
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.memory import MEMORY_TIER, MemoryOptions
from tiers.object.store import ObjectStore

BLOCKS = K[:4]

Open = Callable[..., ObjectStore]


class Engine(EngineSide):
    """A manager over the rows of a rig, with the rig's tier and, if ``local``, a tier of its own."""

    def __init__(self, rig: TierRig, *, local: bool = False) -> None:
        self.rig = rig.open()
        tiers = [rig.tier]
        if local:
            options = MemoryOptions(type="memory", capacity=16 << 20)
            tiers.insert(0, MEMORY_TIER.build(options, replace(rig.context, name="memory")))
            assert tiers[0].open(time.monotonic() + 10)
        manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(rig.rows.data), tiers)
        super().__init__(manager, rig.rows, lambda key: np.frombuffer(rig.content(key), np.uint8))

    def find(self, keys: Sequence[OffloadKey]) -> int:
        """Return the number of leading blocks that a new request can load, and use them."""
        ctx = self.request()

        def decided() -> bool:
            self.manager.on_schedule_end()
            return not self.manager.match_prefix(keys, ctx).pending

        assert until(decided)
        hits = self.manager.match_prefix(keys, ctx).hits
        self.manager.touch(keys, ctx)
        self.manager.prepare_load(keys[:hits], ctx)
        self.manager.complete_load(keys[:hits], ctx)
        assert wait_until_idle(self.manager)
        return hits

    def step_into(self, epoch: bytes) -> None:
        """Let the time of a look come, and step until the engine's tier is in ``epoch``."""
        look_for_epoch(self.rig)

        def entered() -> bool:
            self.manager.on_schedule_end()
            return namespace_of(self.rig).epoch == epoch

        assert until(entered)


@pytest.fixture
def start(make: Make) -> Iterator[Callable[..., Engine]]:
    """Function that starts an engine on a machine of its own."""
    engines: list[Engine] = []

    def build(*, local: bool = False) -> Engine:
        engines.append(Engine(make(), local=local))
        return engines[-1]

    yield build
    for engine in engines:
        engine.manager.shutdown()


@pytest.mark.parametrize("local", [False, True], ids=["bucket alone", "with a tier of its own"])
def test_no_machine_finds_older_blocks_in_a_new_common_epoch(
    fake: FakeS3, start: Callable[..., Engine], open_store: Open, local: bool
) -> None:
    one, two = start(local=local), start(local=local)
    one.store(BLOCKS)
    assert (one.find(BLOCKS), two.find(BLOCKS)) == (4, 4)
    (begun,) = begin_epochs(open_store())
    for engine in (one, two):
        engine.step_into(begun)
    for engine in (one, two, start()):
        assert engine.find(BLOCKS) == 0
    assert len(block_names(fake)) == len(BLOCKS), "no machine has stored a block in the new epoch"
    one.store(K[4:6])
    assert two.find(K[4:6]) == 2
