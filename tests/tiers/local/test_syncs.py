"""Durable stores through the page cache; the kernel reports a failed write-back only once."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import BadSectorDevice
from tests.tiers.local.rig import BLOCK_BYTES, opened
from tiering.errors import DeviceError, OutOfSpaceError
from tiering.medium.block_store import Done, Outcome
from tiering.testing.frames import block_to_put
from tiering.testing.keys import key_of
from tiers.local import bad_slots
from tiers.local import segments as segments_module
from tiers.local.layout import PAGE, SegmentGeometry
from tiers.local.segments import SyncLedger
from tiers.local.store import LocalStore

GEOMETRY = SegmentGeometry.plan(1 << 20, BLOCK_BYTES, 1 << 20)
WRITERS = 20
K = [key_of(number) for number in range(64)]


class CachedDevice(BadSectorDevice):
    """A device with bad sectors under a file system without O_DIRECT."""

    def __init__(self) -> None:
        super().__init__()
        self.direct = False


@pytest.fixture
def device() -> CachedDevice:
    return CachedDevice()


@pytest.fixture
def store(tmp_path: Path, device: CachedDevice) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "kv", GEOMETRY, 1 << 20, durable=True, files=device)
    store.open()
    assert not store.segments.direct
    yield store
    device.fail = lambda operation, path: None
    store.close()


def bad_page(store: LocalStore, device: CachedDevice, slot: int) -> None:
    segment, offset = store.geometry.locate(slot)
    device.damage(store.directory / store.geometry.segment_name(segment), offset, PAGE)


def put_together(store: LocalStore, device: CachedDevice) -> list[Outcome]:
    """Write one block per thread, all before the first sync begins; return the outcomes."""
    slots = [slot for slot in range(GEOMETRY.slots_per_segment) if slot < WRITERS]
    outcomes: list[Outcome] = [Done.ABSENT] * len(slots)
    written, counted = threading.Semaphore(0), threading.Event()

    def note(operation: str, path: Path) -> None:
        if operation == "write" and path.name.startswith("slots-"):
            written.release()
        elif operation == "sync" and path.name.startswith("slots-") and not counted.is_set():
            for _ in slots:
                assert written.acquire(timeout=20)
            counted.set()

    device.fail = note

    def put(slot: int) -> None:
        (outcomes[slot],) = store.put([block_to_put(store, slot, BLOCK_BYTES, number=slot)])

    threads = [threading.Thread(target=put, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.fail = lambda operation, path: None
    return outcomes


def test_all_that_was_written_before_a_failed_sync_fails_with_it(store: LocalStore, device: CachedDevice) -> None:
    bad_page(store, device, 3)
    outcomes = put_together(store, device)
    assert [outcome for outcome in outcomes if not isinstance(outcome, DeviceError)] == []
    assert len(outcomes) == min(WRITERS, GEOMETRY.slots_per_segment)


def test_an_error_that_the_kernel_meets_by_itself_is_told_of_every_write_before_it(
    store: LocalStore, device: CachedDevice
) -> None:
    bad_page(store, device, 0)
    ledger = store.segments.ledger(0)
    ticket = ledger.begin_write()
    store.segments.write(0, 0, [memoryview(bytearray(PAGE))])
    device.write_back()
    assert isinstance(store.put([block_to_put(store, 1, BLOCK_BYTES)])[0], DeviceError)
    with pytest.raises(OSError, match="another write"):
        ledger.end_write(ticket, lambda: store.segments.sync(0))


def test_what_is_written_after_a_failed_sync_is_not_suspect(store: LocalStore, device: CachedDevice) -> None:
    bad_page(store, device, 3)
    assert isinstance(store.put([block_to_put(store, 3, BLOCK_BYTES)])[0], DeviceError)
    assert store.put([block_to_put(store, slot, BLOCK_BYTES) for slot in (1, 2, 4)]) == [Done.DONE] * 3


def test_a_sync_covers_those_that_had_written_before_it_began(store: LocalStore, device: CachedDevice) -> None:
    syncs: list[Path] = []
    assert put_together(store, device) == [Done.DONE] * min(WRITERS, GEOMETRY.slots_per_segment)
    device.fail = lambda operation, path: syncs.append(path) if operation == "sync" else None
    assert store.put([block_to_put(store, 1, BLOCK_BYTES)]) == [Done.DONE]
    assert len(syncs) == 1


class CountedLock:
    """A lock that tells how many threads have come to it."""

    def __init__(self) -> None:
        self.came = threading.Semaphore(0)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.came.release()
        self._lock.acquire()

    def __exit__(self, *failure: object) -> None:
        self._lock.release()


def test_a_ledger_asks_for_no_sync_that_another_has_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, lock, syncs = SyncLedger(), CountedLock(), 0
    monkeypatch.setattr(ledger, "_lock", lock)
    go = threading.Event()

    def sync() -> None:
        nonlocal syncs
        syncs += 1
        if syncs == 1:
            assert go.wait(20)

    threads = [threading.Thread(target=lambda: ledger.end_write(ledger.begin_write(), sync)) for _ in range(9)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert lock.came.acquire(timeout=20)
    go.set()
    for thread in threads:
        thread.join()
    assert syncs == 2, "the second sync begins after all writes, so that none of them needs a third"


def test_a_full_disk_at_write_back_is_no_error_of_a_slot(store: LocalStore, device: CachedDevice) -> None:
    device.errors = {"sync": errno.ENOSPC}
    assert isinstance(store.put([block_to_put(store, 1, BLOCK_BYTES)])[0], OutOfSpaceError)


@pytest.mark.parametrize("durability", ["fsync", "none"])
def test_a_tier_finds_the_bad_slot_among_those_that_a_failed_sync_makes_suspect(
    tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspect blocks are no longer held, although their stores were reported; good slots come back."""
    monkeypatch.setattr(bad_slots, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(segments_module, "_DROP_AFTER", 16 * (BLOCK_BYTES + PAGE))
    device = CachedDevice()
    with opened(tmp_path, files=device, durability=durability, max_inflight=1) as rig:
        slots = rig.tier.index.slots
        rig.store(K[:1])
        bad = rig.place(K[0]) + 3
        path, offset = rig.location(bad)
        device.damage(path, offset + PAGE, PAGE)
        stored = [key for start in range(1, 33, 8) for key in rig.store(K[start : start + 8])]
        rig.wait(lambda: rig.tier.index.slots == slots - 1)
        assert rig.tier.get_stats().slots_retired == 1
        held = rig.held(K)
        assert set(held) <= {K[0], *stored}
        assert rig.load(held) == held
        keys = [key_of(number) for number in range(100, 100 + 3 * slots)]
        assert sum(len(rig.store(keys[start : start + 8])) for start in range(0, len(keys), 8)) == len(keys)
        assert bad not in {rig.place(key) for key in rig.held(keys)}
        assert rig.tier.get_stats().breaker_opened == 0
