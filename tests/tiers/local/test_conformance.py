"""The conformance suites on the local tier; plain file operations read and alter its segment file."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.device import FaultyDevice
from tests.tiers.local.rig import segment_files
from tiering.medium.block_store import Place
from tiering.medium.frame import MAGIC
from tiering.secondary.contract import TierContext
from tiering.testing.store_tests import BlockStoreTests
from tiering.testing.tier_tests import TierTests
from tiers.local.layout import PAGE, SegmentGeometry
from tiers.local.local_options import LocalOptions
from tiers.local.store import LocalStore
from tiers.local.tier import LocalTier

CAPACITY = 16 << 20
BLOCK_BYTES = 64 << 10
SLOT_BYTES = BLOCK_BYTES + PAGE
GEOMETRY = SegmentGeometry.plan(CAPACITY, BLOCK_BYTES, 1 << 30)


class _Raw:
    path: Path

    def _locate(self, place: Place) -> tuple[Path, int]:
        segment, offset = GEOMETRY.locate(int(place))
        return self.path / GEOMETRY.segment_name(segment), offset

    def raw_read(self, place: Place) -> bytes:
        file, offset = self._locate(place)
        return file.read_bytes()[offset : offset + SLOT_BYTES]

    def raw_write(self, place: Place, data: bytes) -> None:
        path, offset = self._locate(place)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data.ljust(SLOT_BYTES, b"\0"))

    def raw_delete(self, place: Place) -> None:
        self.raw_write(place, b"")

    def raw_places(self) -> Sequence[Place]:
        found: list[Place] = []
        for path in segment_files(self.path):
            number = GEOMETRY.segment_number(path.name)
            assert number is not None
            data = path.read_bytes()
            found += [
                number * GEOMETRY.slots_per_segment + offset // SLOT_BYTES
                for offset in range(0, len(data), SLOT_BYTES)
                if data[offset:].startswith(MAGIC)
            ]
        return found


class _LocalStoreTests(_Raw, BlockStoreTests):
    @pytest.fixture(autouse=True)
    def _medium(self, tmp_path: Path) -> None:
        self.path = tmp_path / "kv"
        self.device = FaultyDevice()

    def break_medium(self) -> Callable[[], None]:
        self.device.errors = {"write": errno.EIO}
        return self.device.errors.clear


class TestLocalStore(_LocalStoreTests):
    def make_store(self) -> LocalStore:
        return LocalStore(self.path, GEOMETRY, CAPACITY, files=self.device)


class TestLocalStoreWithoutDirectIO(_LocalStoreTests):
    def make_store(self) -> LocalStore:
        self.device.direct = False
        return LocalStore(self.path, GEOMETRY, CAPACITY, files=self.device)


class TestLocalStoreWithFsync(_LocalStoreTests):
    def make_store(self) -> LocalStore:
        return LocalStore(self.path, GEOMETRY, CAPACITY, durable=True, files=self.device)


class TestLocalTier(_Raw, TierTests):
    @pytest.fixture(autouse=True)
    def _medium(self, tmp_path: Path) -> None:
        self.path = tmp_path / "kv"

    def make_tier(self, context: TierContext) -> LocalTier:
        return LocalTier(context, LocalOptions(type="local", path=str(self.path), capacity=CAPACITY))


class TestLocalTierWithEveryHeaderRead(TestLocalTier):
    """A tier that never finds a checkpoint, so it reads every header when it opens."""

    def make_tier(self, context: TierContext) -> LocalTier:
        for file in (self.path / "checkpoint", *self.path.glob("written-*")):
            file.unlink(missing_ok=True)
        return super().make_tier(context)


def test_a_directory_can_be_moved(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a", GEOMETRY, CAPACITY)
    store.open()
    store.write_document("x", b"kept")
    store.close()
    shutil.move(tmp_path / "a", tmp_path / "b")
    again = LocalStore(tmp_path / "b", GEOMETRY, CAPACITY)
    again.open()
    assert again.read_document("x") == b"kept"
    again.close()
