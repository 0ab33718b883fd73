"""The example of a user's own tier keeps verified blocks over a restart, apart by namespace."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.own_tier import SQLITE_TIER, SQLiteOptions, SQLiteStore
from tiering import ModelIdentity, ReqContext, load_prefix, load_stack, open_manager, store_prefix, wait_until_idle
from tiering.config.stack_file import StackConfig
from tiering.manager.prompts import Row
from tiering.testing.keys import keys_of
from tiering.testing.store_tests import BlockStoreTests
from tiering.testing.tier_tests import TierTests
from tiering.tier import Place, SecondaryTierManager, TierContext

BLOCK_BYTES = 16 << 10
MODEL = ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="own tier")
KEYS = keys_of(*range(8))
DATA = np.random.default_rng(3).integers(0, 4, (len(KEYS), BLOCK_BYTES), np.uint8)
CTX = ReqContext("a")

MakeStack = Callable[..., StackConfig]
"""Function that returns the stack with further words in the tier's section."""


@pytest.fixture
def stack(tmp_path: Path) -> MakeStack:
    def stack(**words: object) -> StackConfig:
        section = {
            "type": "examples.own_tier:SQLITE_TIER",
            "name": "sqlite",
            "path": str(tmp_path / "kv.sqlite"),
            "lookup_deadline": "20s",
        }
        return load_stack({"primary": {"capacity": "1MiB"}, "secondary": [section | words]})

    return stack


def fill(stack: StackConfig) -> None:
    with open_manager(stack, BLOCK_BYTES, MODEL) as manager:

        def write(position: int, row: Row) -> None:
            row[:BLOCK_BYTES] = DATA[position]

        assert store_prefix(manager, KEYS, CTX, write) == len(KEYS)
        assert wait_until_idle(manager)


def held(stack: StackConfig, model: ModelIdentity = MODEL) -> int:
    """Return the number of blocks that a new process finds; fails if one is not intact."""
    with open_manager(stack, BLOCK_BYTES, model) as manager:

        def read(position: int, row: Row) -> None:
            assert np.array_equal(row[:BLOCK_BYTES], DATA[position])

        return load_prefix(manager, KEYS, CTX, read)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_blocks_are_found_again_by_the_next_process(stack: MakeStack, compression: str) -> None:
    fill(stack(compression=compression))
    assert held(stack(compression=compression)) == len(KEYS)


def test_another_model_finds_nothing(stack: MakeStack) -> None:
    fill(stack())
    assert held(stack(), ModelIdentity(name="org/model", weights="1" * 40, dtype="bfloat16", layout="own tier")) == 0


def test_a_block_altered_behind_its_back_is_a_miss(stack: MakeStack, tmp_path: Path) -> None:
    fill(stack())
    database = sqlite3.connect(tmp_path / "kv.sqlite")
    with database:
        (place,) = [place for (place,) in database.execute("SELECT place FROM blocks") if place.endswith(KEYS[3].hex())]
        (payload,) = database.execute("SELECT payload FROM blocks WHERE place = ?", (place,)).fetchone()
        database.execute(
            "UPDATE blocks SET payload = ? WHERE place = ?", (payload[:-1] + bytes([payload[-1] ^ 1]), place)
        )
    database.close()
    assert held(stack()) == 3


def test_a_database_that_cannot_be_opened_does_not_stop_the_engine(stack: MakeStack, tmp_path: Path) -> None:
    assert held(stack(path=str(tmp_path / "no such directory" / "kv.sqlite"))) == 0


# --------------------------------------------------------------------------------------------------- the shipped suites


class _Raw:
    """Raw access to the database; ``header_bytes`` of a frame have a column of their own."""

    path: Path

    @pytest.fixture(autouse=True)
    def _medium(self, tmp_path: Path) -> None:
        self.path = tmp_path / "kv.sqlite"

    def _query(self, sql: str, *values: object) -> list[Any]:
        with closing(sqlite3.connect(self.path)) as database, database:
            return database.execute(sql, values).fetchall()

    def raw_places(self) -> Sequence[Place]:
        return [place for (place,) in self._query("SELECT place FROM blocks")]

    def raw_read(self, place: Place) -> bytes | None:
        found = self._query("SELECT header, payload FROM blocks WHERE place = ?", place)
        return b"".join(found[0]) if found else None

    def raw_write(self, place: Place, data: bytes) -> None:
        header = SQLiteStore.traits.header_bytes
        self._query("REPLACE INTO blocks VALUES (?, ?, ?)", place, data[:header], data[header:])

    def raw_delete(self, place: Place) -> None:
        self._query("DELETE FROM blocks WHERE place = ?", place)


class TestSQLiteStore(_Raw, BlockStoreTests):
    shared = True

    def make_store(self) -> SQLiteStore:
        return SQLiteStore(self.path)

    def break_medium(self) -> Callable[[], None]:
        self._query("ALTER TABLE blocks RENAME TO lost")

        def heal() -> None:
            self._query("ALTER TABLE lost RENAME TO blocks")

        return heal


class TestSQLiteTier(_Raw, TierTests):
    shared = True

    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        options = SQLiteOptions(type="examples.own_tier:SQLITE_TIER", path=self.path, lookup_deadline=20.0)
        return SQLITE_TIER.build(options, context)
