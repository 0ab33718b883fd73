"""Vectored calls that stop in the middle of several slots: never a wrong byte, an outcome per block."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.device import FaultyDevice
from tests.medium.io_fakes import LOAD, STORE, Primary, make_job, outcome_names
from tiering.medium.block_store import Done, Outcome
from tiering.medium.layers.breaker import Breakers
from tiering.medium.pipeline import Pipeline
from tiering.secondary.options import BreakerOptions
from tiering.testing.clock import FakeClock
from tiers.local.layout import PAGE, SegmentGeometry
from tiers.local.store import LocalStore

BLOCK_BYTES = 2 * PAGE
SLOT_PAGES = BLOCK_BYTES // PAGE + 1
CAPACITY = 1 << 20
GEOMETRY = SegmentGeometry.plan(CAPACITY, BLOCK_BYTES, 256 << 10)
COUNT = 4
"""Slots of a run."""


class Killed(BaseException):
    """The process dies here."""


class TearingDevice(FaultyDevice):
    """Real files with a write that stops in the middle, a bad slot, or an early end."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: int | None = None
        """Pages that the next write of a segment moves before :attr:`death`; None: all."""
        self.death: BaseException = OSError(errno.EIO, "torn")
        self.bad: int | None = None
        """Slot whose calls move one page and fail with EIO; None: none."""
        self.ends_at: int | None = None
        """Offset at which reads find the end of the file; None: its real end."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not self._paths[fd].name.startswith("slots-"):
            return super().pwritev(fd, buffers, offset)
        if self.pages is not None:
            self._move_pages(fd, buffers, offset, self.pages)
            self.pages = None
            raise self.death
        if self._meets_bad_slot(buffers, offset):
            self._move_pages(fd, buffers, offset, 1)
            raise OSError(errno.EIO, "bad sector")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._meets_bad_slot(buffers, offset):
            raise OSError(errno.EIO, "bad sector")
        if self.ends_at is not None:
            self.limit = max(0, self.ends_at - offset)
            if not self.limit:
                return 0
        return super().preadv(fd, buffers, offset)

    def _move_pages(self, fd: int, buffers: Sequence[memoryview], offset: int, pages: int) -> None:
        if pages:
            self.limit = pages * PAGE
            super().pwritev(fd, buffers, offset)
            self.limit = 0

    def _meets_bad_slot(self, buffers: Sequence[memoryview], offset: int) -> bool:
        start = None if self.bad is None else self.bad * GEOMETRY.slot_bytes
        return start is not None and offset <= start < offset + sum(map(len, buffers))


class Rig:
    """A store with a pipeline.

    Rows and keys 0 to 3 are old blocks, 4 to 7 new ones; 8 to 11 are rows to load into.
    """

    def __init__(self, directory: Path) -> None:
        self.device = TearingDevice()
        self.primary = Primary(3 * COUNT, BLOCK_BYTES)
        self.truth = [self.primary.block(row) for row in range(2 * COUNT)]
        self._directory = directory
        self.open()

    def open(self) -> None:
        self.store = LocalStore(self._directory, GEOMETRY, CAPACITY, files=self.device)
        self.store.open()
        clock = FakeClock()
        breakers = Breakers.build(BreakerOptions(), name="t", clock=clock)
        view = self.primary.rows.data
        self._pipeline = Pipeline(self.store, view, name="t", breakers=breakers, clock=clock)

    def put(self, first: int) -> list[Outcome]:
        """Store blocks ``first`` and the next ones into slots 0 to 3."""
        numbers = range(first, first + COUNT)
        return self._pipeline.run(make_job(self.primary, STORE, numbers, places=range(COUNT)), range(COUNT))

    def get(self, first: int) -> list[Outcome]:
        """Load the same blocks from slots 0 to 3, and check that those that arrive are right."""
        numbers, rows = range(first, first + COUNT), range(2 * COUNT, 3 * COUNT)
        job = make_job(self.primary, LOAD, numbers, rows=rows, places=range(COUNT))
        self.primary.rows[2 * COUNT :] = 0
        outcomes = self._pipeline.run(job, range(COUNT))
        for number, row, outcome in zip(numbers, rows, outcomes, strict=True):
            if outcome is Done.DONE:
                assert self.primary.block(row) == self.truth[number], f"WRONG BYTES of block {number}"
        return outcomes

    def served(self, first: int) -> list[int]:
        """Return the slots whose block of ``first`` and the next ones can be loaded."""
        return [slot for slot, outcome in enumerate(self.get(first)) if outcome is Done.DONE]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "kv")
    assert rig.put(0) == [Done.DONE] * COUNT
    yield rig
    rig.store.close()


@pytest.mark.parametrize("pages", range(COUNT * SLOT_PAGES + 1))
def test_a_process_that_dies_in_the_middle_of_a_run_leaves_old_or_new_blocks_or_none(rig: Rig, pages: int) -> None:
    rig.device.pages, rig.device.death = pages, Killed()
    with pytest.raises(Killed):
        rig.put(COUNT)
    rig.store.close()
    rig.open()
    whole, torn = divmod(pages, SLOT_PAGES)
    assert rig.served(COUNT) == list(range(whole))
    assert rig.served(0) == list(range(whole + (torn > 0), COUNT))


@pytest.mark.parametrize("pages", [0, 1, SLOT_PAGES, 2 * SLOT_PAGES + 1])
def test_a_run_that_failed_is_written_block_by_block(rig: Rig, pages: int) -> None:
    rig.device.pages = pages
    assert rig.put(COUNT) == [Done.DONE] * COUNT
    assert rig.served(COUNT) == list(range(COUNT))
    assert rig.served(0) == []


def test_a_slot_that_cannot_be_written_fails_alone_and_is_not_served(rig: Rig) -> None:
    rig.device.bad = 2
    outcomes = rig.put(COUNT)
    assert outcome_names(outcomes) == ["DONE", "DONE", "DeviceError", "DONE"]
    rig.device.bad = None
    assert rig.served(COUNT) == [0, 1, 3]
    assert rig.served(0) == [], "the old block is half overwritten"


def test_a_slot_that_cannot_be_read_fails_alone(rig: Rig) -> None:
    rig.device.bad = 1
    assert outcome_names(rig.get(0)) == ["DONE", "DeviceError", "DONE", "DONE"]


@pytest.mark.parametrize("pages", range(COUNT * SLOT_PAGES))
def test_a_run_behind_the_end_of_a_file_that_became_shorter_is_absent(rig: Rig, pages: int) -> None:
    rig.device.ends_at = pages * PAGE
    whole = pages // SLOT_PAGES
    assert outcome_names(rig.get(0)) == ["DONE"] * whole + ["ABSENT"] * (COUNT - whole)
