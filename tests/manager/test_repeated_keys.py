"""Calls that name a key several times: the key counts once, and the table stays whole."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

CTX = ReqContext("r")
ROWS = 12


def make_primary(rows: int, eviction: str = "lru") -> CPUPrimaryTierOffloadingManager:
    return CPUPrimaryTierOffloadingManager(np.zeros((rows, 16), np.uint8).data, eviction)


def fill(primary: CPUPrimaryTierOffloadingManager, keys: list[OffloadKey]) -> None:
    output = primary.prepare_store(keys, CTX)
    assert output is not None
    primary.complete_store(output.keys_to_store, CTX)


@pytest.mark.parametrize("eviction", ["lru", "arc"])
@pytest.mark.parametrize("seed", range(12))
def test_no_call_raises_or_gives_a_row_away_that_is_being_read(seed: int, eviction: str) -> None:
    rnd = random.Random(seed)
    primary, tier = make_primary(ROWS, eviction), FakeTier()
    manager = TieringOffloadingManager(primary, [tier])
    requests = [ReqContext(f"r{number}") for number in range(3)]
    for ctx in requests:
        manager.on_new_request(ctx)
    stores: list[tuple[list[OffloadKey], ReqContext]] = []
    loads: list[tuple[list[OffloadKey], ReqContext, set[int]]] = []

    def pick(count: int) -> list[OffloadKey]:
        return keys_of(*(rnd.randrange(24) for _ in range(count)))

    for _ in range(400):
        ctx, action = rnd.choice(requests), rnd.randrange(6)
        if action == 0:
            keys = pick(rnd.randint(1, 4))
            output = manager.prepare_store(keys, ctx)
            if output is not None:
                assert len(set(output.keys_to_store)) == len(output.store_spec)
                for _, _, read in loads:
                    assert read.isdisjoint(output.store_spec.block_ids.tolist())
                stores.append((keys, ctx))
        elif action == 1 and stores:
            keys, ctx = stores.pop(0)
            manager.complete_store(keys, ctx, rnd.random() < 0.8)
        elif action == 2:
            readable = [key for key in pick(5) if key in primary.readable]
            spec = manager.prepare_load(readable, ctx)
            assert spec.block_ids.tolist() == [primary.readable[key] for key in readable]
            if readable:
                loads.append((readable, ctx, set(spec.block_ids.tolist())))
        elif action == 3 and loads:
            keys, ctx, _ = loads.pop(0)
            manager.complete_load(keys, ctx)
        elif action == 4:
            manager.touch(pick(5), ctx)
        else:
            manager.match_prefix(pick(4), ctx)
            tier.finish_all()
            manager.on_schedule_end()


@pytest.mark.parametrize("completed", [keys_of(0, 0, 1), keys_of(0, 1), keys_of(1, 0)])
def test_a_load_that_names_a_key_twice_pins_and_releases_its_row_once(completed: list[OffloadKey]) -> None:
    primary = make_primary(2)
    fill(primary, keys_of(0, 1))
    spec = primary.prepare_load(keys_of(0, 0, 1), CTX)
    assert spec.block_ids.tolist() == [primary.readable[key] for key in keys_of(0, 0, 1)]
    assert primary.room == 0
    primary.complete_load(completed, CTX)
    assert primary.readers(spec.block_ids).tolist() == [0, 0, 0]
    assert primary.room == 2


def test_a_load_from_a_slower_tier_that_names_a_key_again_and_again_leaves_all_rows_free() -> None:
    (key,) = keys_of(5)
    tier = FakeTier(held={key})
    rig = ManagerRig(4, [tier])
    assert rig.manager.lookup(key, rig.ctx) is None
    rig.step()
    tier.finish_all()
    assert rig.manager.lookup(key, rig.ctx) is True
    spec = rig.manager.prepare_load([key, key, key], rig.ctx)
    assert spec.block_ids.tolist() == [rig.primary.readable[key]] * 3
    rig.manager.complete_load([key, key, key], rig.ctx)
    assert rig.primary.readers(spec.block_ids).tolist() == [0, 0, 0]
    assert rig.primary.room == 4


def test_completions_one_by_one_do_not_turn_a_readable_row_into_one_that_is_written() -> None:
    primary = make_primary(2)
    fill(primary, keys_of(0))
    (key,) = keys_of(0)
    spec = primary.prepare_load([key, key], CTX)
    primary.complete_load([key], CTX)
    primary.complete_load([key], CTX)
    assert primary.readers(spec.block_ids).tolist() == [0, 0]
    assert primary.ignored_completions == 1


def test_a_lookup_that_names_readable_keys_again_and_again_waits_for_room() -> None:
    tier = FakeTier(held=set(keys_of(5)))
    rig = ManagerRig(2, [tier])
    rig.store(keys_of(0, 1))
    rig.manager.prepare_load(keys_of(1), rig.ctx)
    match = rig.manager.match_prefix(keys_of(0, 0, 0, 5), rig.ctx)
    assert match.hits == 3
    rig.step()
    assert not tier.loads
    assert rig.manager.lookup(keys_of(0)[0], rig.ctx) is True
