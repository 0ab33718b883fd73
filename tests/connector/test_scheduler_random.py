"""Random walks with shared prefixes, preemptions, aborts, late and failing copies: KV is never wrong."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.connector.fakes import FakeManager
from tests.connector.simulation import Simulation, SimWorker, WrongKVError
from tiering.connector.engine_cache import EngineCache
from tiering.connector.jobs import NO_JOBS, BlockFences
from tiering.connector.requests import FencedTables
from tiering.connector.suspects import SuspectBlocks
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager

CASES = [
    pytest.param((None,), 1, 1, id="full attention"),
    pytest.param((None,), 2, 1, id="two GPU blocks in a block"),
    pytest.param((None,), 4, 1, id="four GPU blocks in a block"),
    pytest.param((None,), 1, 2, id="two workers"),
    pytest.param((None, 8), 1, 1, id="full attention and a window"),
    pytest.param((None, 9, 6), 1, 2, id="windows of odd sizes, two workers"),
    pytest.param((16,), 2, 1, id="a window only, two GPU blocks in a block"),
]


@pytest.mark.parametrize(("windows", "factor", "world_size"), CASES)
@given(seed=st.integers(0, 2**32 - 1), prompt_only=st.booleans())
@settings(max_examples=25)
def test_no_copy_ever_meets_a_block_of_another_owner(
    windows: tuple[int | None, ...], factor: int, world_size: int, prompt_only: bool, seed: int
) -> None:
    Simulation(seed, windows, factor=factor, world_size=world_size, prompt_only=prompt_only).run(60)


@pytest.mark.parametrize("exclusive", [False, True], ids=["inclusive", "exclusive"])
@pytest.mark.parametrize(("windows", "factor", "world_size"), CASES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_no_step_computes_without_what_it_loads(
    windows: tuple[int | None, ...], factor: int, world_size: int, exclusive: bool, seed: int
) -> None:
    words = {"prompt_only": False, "within_step": True, "exclusive": exclusive}
    walk = Simulation(seed, windows, factor=factor, world_size=world_size, **words)
    walk.run(60)
    if exclusive:
        walk.check_notes()


@pytest.mark.parametrize("feeds_tiers", [False, True], ids=["late stores only", "other tiers are fed"])
@pytest.mark.parametrize(("windows", "factor", "world_size"), CASES)
@given(seed=st.integers(0, 2**32 - 1), prompt_only=st.booleans())
@settings(max_examples=25)
def test_no_late_store_ever_meets_a_block_of_another_owner(
    windows: tuple[int | None, ...], factor: int, world_size: int, feeds_tiers: bool, prompt_only: bool, seed: int
) -> None:
    walk = Simulation(
        seed,
        windows,
        factor=factor,
        world_size=world_size,
        prompt_only=prompt_only,
        exclusive=True,
        feeds_tiers=feeds_tiers,
    )
    walk.run(60)
    walk.check_notes()


class RealManager(TieringOffloadingManager):
    """The exclusive manager itself, with the attributes that the simulation reads."""

    epochs_begun = 0

    def __init__(self, rows: int) -> None:
        buffer = np.zeros((rows, 16), np.uint8).data
        super().__init__(CPUPrimaryTierOffloadingManager(buffer), exclusive=True, one_thread=False)

    @property
    def rows(self) -> dict[bytes, int]:
        table = self.primary_tier._table
        return {key: row for key in table.keys.tolist() if key and (row := table.rows_of([key])[0]) is not None}

    @property
    def refs(self) -> dict[bytes, int]:
        return {key: int(self.primary_tier.readers(np.array([row]))[0]) for key, row in self.rows.items()}

    @property
    def live(self) -> list[str]:
        return [name for name, request in self._known.items() if not request.finished]

    @property
    def lost(self) -> int:
        return self.primary_tier.count_rows().quarantined


@pytest.mark.parametrize(("windows", "factor", "world_size"), CASES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_what_a_real_exclusive_manager_serves_is_right(
    windows: tuple[int | None, ...], factor: int, world_size: int, seed: int
) -> None:
    manager = RealManager(16 * len(windows))
    walk = Simulation(
        seed, windows, factor=factor, world_size=world_size, prompt_only=False, exclusive=True, manager=manager
    )
    walk.run(60)
    walk.check_notes()


def test_notes_that_outlive_their_blocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: late stores of blocks that the engine has used since."""
    monkeypatch.setattr(EngineCache, "_end", lambda self, keys, taken: None)
    monkeypatch.setattr(EngineCache, "_is_cached", lambda self, key, ids: True)
    walks = (Simulation(seed, (None,), factor=2, world_size=1, prompt_only=False, exclusive=True) for seed in range(20))
    with pytest.raises(WrongKVError):
        run_all(walks)


def test_the_walk_loads_what_late_stores_have_stored() -> None:
    walks = [
        Simulation(seed, (None, 8), factor=1, world_size=1, prompt_only=False, exclusive=True) for seed in range(5)
    ]
    for walk in walks:
        walk.run(80)
    counters = [walk.connector.get_stats()["connector"] for walk in walks]
    assert not any(walk.manager.offered for walk in walks)
    assert sum(counter["late_stores"] for counter in counters) > 50
    assert sum(walk.loaded_requests for walk in walks) > 10


def test_the_walk_loads_and_flushes() -> None:
    walks = [Simulation(seed, (None, 8), factor=1, world_size=1, prompt_only=False) for seed in range(5)]
    for walk in walks:
        walk.run(80)
    assert sum(walk.loaded_requests for walk in walks) > 20
    assert sum(walk.flushed for walk in walks) > 20


def run_all(walks: Iterable[Simulation]) -> None:
    """Run each walk for 80 steps."""
    for walk in walks:
        walk.run(80)


def test_without_fences_the_walk_finds_wrong_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without fences the same walks find wrong KV."""
    monkeypatch.setattr(BlockFences, "conflicts", lambda self, block_ids: NO_JOBS)
    walks = (Simulation(seed, (None,), factor=1, world_size=1, prompt_only=False) for seed in range(20))
    with pytest.raises(WrongKVError):
        run_all(walks)


def test_the_walk_loads_within_steps_and_beside_them() -> None:
    walks = [
        Simulation(seed, windows, factor=1, world_size=2, prompt_only=False, within_step=True)
        for seed in range(10)
        for windows in [(None,), (None, 8)]
    ]
    run_all(walks)
    assert min(sum(walk.loads_within_step for walk in half) for half in (walks[::2], walks[1::2])) > 5
    assert sum(walk.loaded_requests for walk in walks) > 3


def test_a_worker_that_loads_nothing_within_the_step_gives_wrong_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimWorker, "fills_within_step", False)
    with pytest.raises(WrongKVError):
        run_all(
            Simulation(seed, (None,), factor=1, world_size=1, prompt_only=False, within_step=True) for seed in range(20)
        )


def test_loads_within_the_step_need_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a load writes to a block that a store of its last owner still reads."""
    monkeypatch.setattr(FencedTables, "_take_unfilled", lambda self, block_ids, filled: None)
    walks = (
        Simulation(seed, (None,), factor=1, world_size=1, prompt_only=False, within_step=True) for seed in range(20)
    )
    with pytest.raises(WrongKVError):
        run_all(walks)


def test_without_suspects_the_walk_finds_kv_from_before_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control for resets that leave the engine's own cache as it is."""
    monkeypatch.setattr(SuspectBlocks, "reset", lambda self, pool: None)
    walks = (Simulation(seed, (None,), factor=1, world_size=1, prompt_only=False) for seed in range(20))
    with pytest.raises(WrongKVError):
        run_all(walks)


def test_a_connector_that_misses_a_new_common_epoch_stores_kv_from_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control for new common epochs, which the connector learns from the manager."""
    monkeypatch.setattr(FakeManager, "new_epochs", 0)
    monkeypatch.setattr(Simulation, "half_resets", 0.0)
    walks = (Simulation(seed, (None,), factor=1, world_size=1, prompt_only=False) for seed in range(20))
    with pytest.raises(WrongKVError):
        run_all(walks)
