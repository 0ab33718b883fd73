"""Files damaged, moved or removed under a live tier: no block is wrong, and no loss goes unreported."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest

from tests.table.looks import listed_rows
from tests.tiers.local.rig import LocalRig
from tests.tiers.local.vandal import Vandal
from tiering.api.keys import OffloadKey
from tiering.index.slots import SlotIndex
from tiering.testing.keys import key_of
from tiers.local import new_segments

KEYS = [key_of(number) for number in range(240)]


def assert_consistent(index: SlotIndex, note: str) -> None:
    """Raise unless every slot is in at most one state and every key leads to the slot that holds it."""
    table = index._table
    free = np.flatnonzero(table.free_rows.mask(0, table.num_rows)).tolist()
    assert len(free) == table.free, note
    assert sorted(listed_rows(table)) == [row for row in free if row < table.free_rows.swept], note
    held, written = list(table.readable.values()), list(table.pending.values())
    quarantined = list(table._quarantined)
    foreign = np.flatnonzero(index.states.is_foreign).tolist()
    assert len(foreign) == index.states.foreign, note
    states = free + held + written + quarantined + foreign
    assert len(states) == len(set(states)), note
    assert all(0 <= slot < index.num_slots for slot in states), note
    assert all(table.keys[slot] == key for key, slot in {**table.readable, **table.pending}.items()), note
    assert index.slots <= index.num_slots, note
    assert table.evictable == int(np.count_nonzero(table.refs[held] == 0)) if held else table.evictable == 0, note


class Life:
    """One process's use of a directory, with a consumer of its events."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = LocalRig(
            path,
            capacity="2MiB",
            segment_size="160KiB",
            events=True,
            checkpoint_interval=self.rng.choice([0.001, 300.0]),
            breaker={"probe_after": "1ms", "probe_max": "2ms"},
        )
        self.announced: set[OffloadKey] = set()

    def take_events(self) -> None:
        for event in self.rig.tier.take_events():
            if event.removed:
                self.announced -= set(event.keys)
            else:
                self.announced |= set(event.keys)

    def use(self) -> None:
        start = self.rng.randrange(len(KEYS))
        keys = KEYS[start : start + self.rng.randrange(1, 12)]
        if self.rng.random() < 0.6:
            self.rig.store(keys)
        else:
            self.rig.load(keys)
        self.take_events()

    def held(self) -> set[OffloadKey]:
        return set(self.rig.tier.index.held)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 200))])
def test_lives_among_vandals(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(new_segments, "FIRST_BYTES", 0)
    caplog.set_level(logging.INFO)
    path = tmp_path / "kv"
    remembered: set[OffloadKey] = set()
    for number in range(4):
        life = Life(path, seed * 100 + number)
        rig = life.rig.open()
        vandal = Vandal(rig, life.rng)
        note = f"seed {seed}, life {number}"
        index = rig.tier.index
        life.take_events()
        gone = remembered - life.held()
        told = "block(s) are lost" in caplog.text or "documents is missing: blocks that were stored" in caplog.text
        assert not gone or told, f"{note}: {len(gone)} of {len(remembered)} gone silently"
        caplog.clear()
        try:
            for _ in range(life.rng.randrange(10, 40)):
                life.use()
                if life.rng.random() < 0.15:
                    vandal.strike()
                    note = f"seed {seed}, life {number}: {vandal.acts}"
                assert_consistent(index, note)
            for key in sorted(life.held()):
                if not rig.load([key]):
                    assert key not in life.held(), note
            life.take_events()
            assert life.announced == life.held(), note
            assert not [record for record in caplog.records if record.levelno >= logging.CRITICAL]
        except Exception as error:
            raise AssertionError(note) from error
        finally:
            if life.rng.random() < 0.7:
                assert rig.close(), note
                remembered = life.held()
            else:
                rig.drop()
                # Losses since the last step were not reported.
                remembered = set()
