"""A request that ends may release blocks, which every tier evicts first, or keep some for a time."""

from __future__ import annotations

from tests.manager_rig import ManagerRig
from tiering.api.hints import KeptBlocks
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

A, B, C, D, E, F = KEYS = keys_of(*range(6))


def held(rig: ManagerRig) -> list[bytes]:
    return [key for key in KEYS if key in rig.primary.readable]


def test_released_blocks_make_room_before_older_ones() -> None:
    rig = ManagerRig(4)
    rig.store([A, B])
    ctx = rig.request("r2")
    rig.store([C, D], ctx)
    rig.manager.on_request_finished(ctx, [C, D])
    rig.store([E])
    assert held(rig) == [A, B, C, E]
    assert rig.stat("blocks_released") == 2


def test_blocks_whose_store_ends_after_the_request_are_released_then() -> None:
    rig = ManagerRig(4)
    rig.store([A, B])
    ctx = rig.request("r2")
    output = rig.manager.prepare_store([C, D], ctx)
    assert output is not None
    rig.manager.on_request_finished(ctx, [C, D])
    assert rig.stat("blocks_released") == 0
    rig.manager.complete_store(output.keys_to_store, ctx)
    rig.store([E, F])
    assert held(rig) == [A, B, E, F]


def test_the_tiers_of_the_request_learn_which_blocks_it_releases() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    ctx = rig.request("r2")
    rig.manager.on_request_finished(ctx, [C, D])
    assert tier.released == [C, D]


def test_a_request_that_releases_nothing_changes_no_order() -> None:
    rig = ManagerRig(4)
    rig.store([A, B])
    ctx = rig.request("r2")
    rig.store([C, D], ctx)
    rig.manager.on_request_finished(ctx)
    rig.store([E])
    assert held(rig) == [A, C, D, E]


def test_others_make_room_before_blocks_that_a_request_keeps() -> None:
    for is_pin, word in ((False, "blocks_retained"), (True, "blocks_pinned")):
        rig = ManagerRig(4)
        ctx = rig.request("r2")
        rig.store([A, B], ctx)
        rig.manager.on_request_finished(ctx, (), [KeptBlocks([A, B], 10.0, 0.5, is_pin)])
        rig.store([C, D])
        rig.store([E])
        assert held(rig) == [A, B, C, E]
        assert rig.stat(word) == 2
        rig.clock.advance(10.0)
        for key in (C, D, F):
            if key not in rig.primary.readable:
                rig.store([key])
        assert not {A, B} <= set(held(rig))


def test_blocks_whose_store_ends_after_the_request_are_kept_then() -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    ctx = rig.request("r2")
    output = rig.manager.prepare_store([A, B], ctx)
    assert output is not None
    kept = KeptBlocks([A, B], 10.0, 0.5)
    rig.manager.on_request_finished(ctx, (), [kept])
    assert (rig.stat("blocks_retained"), tier.kept) == (0, [])
    rig.manager.complete_store(output.keys_to_store, ctx)
    rig.step()
    assert (rig.stat("blocks_retained"), tier.kept) == (2, [kept])


def test_a_reset_ends_what_was_kept() -> None:
    rig = ManagerRig(4)
    ctx = rig.request("r2")
    rig.store([A, B], ctx)
    rig.manager.on_request_finished(ctx, (), [KeptBlocks([A, B], 10.0, 0.5)])
    rig.manager.reset_cache()
    for key in (A, B, C, D, E):
        rig.store([key])
    assert held(rig) == [B, C, D, E]
