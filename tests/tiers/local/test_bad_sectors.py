"""Permanently bad sectors: they cost the blocks that lie on them, and nothing else."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.device import BadSectorDevice, FaultyDevice
from tests.tiers.local.rig import LocalRig, opened
from tiering.api.keys import OffloadKey
from tiering.errors import TemporaryStoreError
from tiering.testing.keys import key_of
from tiers.local import bad_slots
from tiers.local.bad_slots import decode, encode
from tiers.local.layout import PAGE
from tiers.local.store import LocalStore

K = [key_of(number) for number in range(64)]
FAST = {"breaker": {"probe_after": "10ms", "probe_max": "20ms"}}


def many(count: int, first: int = 1000) -> list[OffloadKey]:
    return [key_of(number) for number in range(first, first + count)]


def damage(rig: LocalRig, device: BadSectorDevice, slot: int, *, reads: bool = True, writes: bool = True) -> None:
    """Make one page in the middle of ``slot`` bad."""
    path, offset = rig.location(slot)
    device.damage(path, offset + PAGE, PAGE, reads=reads, writes=writes)


def damage_all(rig: LocalRig, device: BadSectorDevice, *, reads: bool = True, writes: bool = True) -> None:
    for slot in range(rig.tier.index.slots):
        damage(rig, device, slot, reads=reads, writes=writes)


def store_all(rig: LocalRig, keys: Sequence[OffloadKey], batch: int = 8) -> int:
    return sum(len(rig.store(keys[start : start + batch])) for start in range(0, len(keys), batch))


def next_slot(rig: LocalRig) -> int:
    """Return the slot that the next store will use."""
    rig.store(K[-1:])
    return rig.place(K[-1]) + 1


# --------------------------------------------------------------------------------------------------------- one bad slot


def test_stores_go_on_beside_a_bad_slot(tmp_path: Path) -> None:
    device = BadSectorDevice()
    with opened(tmp_path, files=device) as rig:
        damage(rig, device, next_slot(rig))
        keys = many(1900)
        assert store_all(rig, keys) >= 1899
        stats = rig.tier.get_stats()
        assert (stats.device_errors, stats.slots_retired, stats.breaker_opened) == (1, 1, 0)
        assert rig.load(keys[-8:]) == keys[-8:]


def test_a_block_that_cannot_be_read_is_written_elsewhere_and_all_prefixes_with_it_come_back(tmp_path: Path) -> None:
    device = BadSectorDevice()
    with opened(tmp_path, files=device) as rig:
        shared, tails = K[:1], many(40)
        assert rig.store(shared) == shared
        assert store_all(rig, tails) == 40
        bad = rig.place(shared[0])
        damage(rig, device, bad, writes=False)
        assert rig.load([*shared, tails[0]]) == [tails[0]]
        assert rig.held(shared) == []
        assert rig.store(shared) == shared
        assert rig.place(shared[0]) != bad
        complete = [
            tail for tail in tails if rig.lookup([*shared, tail]) == 2 and rig.load([*shared, tail]) == [*shared, tail]
        ]
        assert len(complete) == 40
        assert rig.tier.get_stats().breaker_opened == 0


def test_a_hot_bad_block_never_takes_the_tier_out_of_service(tmp_path: Path) -> None:
    """Each request misses the block, stores it again, perhaps in another bad slot, and reads it."""
    device = BadSectorDevice()
    with opened(tmp_path, files=device) as rig:
        good = K[1:9]
        rig.store(good)
        for slot in (20, 21, 40):
            damage(rig, device, slot, writes=False)
        served = 0
        for _ in range(490):
            if not rig.held(K[:1]):
                rig.store(K[:1])
            served += rig.load(K[:1]) == K[:1]
            assert rig.load(good[:1]) == good[:1]
            assert rig.tier.get_stats().available == 1
        assert served >= 487
        assert rig.tier.get_stats().breaker_opened == 0


def test_a_slot_that_others_read_when_it_turns_out_to_be_bad_is_retired_when_they_have_ended(tmp_path: Path) -> None:
    device = BadSectorDevice()
    with opened(tmp_path, files=device) as rig:
        rig.store(K[:1])
        slot = rig.place(K[0])
        damage(rig, device, slot)
        jobs = [rig.submit_load(K[:1], first_row=row) for row in range(40, 44)]
        assert [rig.result(job).successful_keys for job in jobs] == [[]] * 4
        stats = rig.tier.get_stats()
        assert (stats.device_errors, stats.slots_retired) == (4, 1)
        keys = many(rig.tier.index.slots + 10)
        assert store_all(rig, keys) == len(keys)
        assert slot not in {rig.place(key) for key in rig.held(keys)}


def test_the_log_tells_of_bad_slots_and_the_kernels_log_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = BadSectorDevice()
    with opened(tmp_path, files=device) as rig:
        for slot in range(10, 70, 6):
            damage(rig, device, slot)
        store_all(rig, many(200))
    lines = [record.getMessage() for record in caplog.records if "out of use" in record.getMessage()]
    assert len(lines) == 1
    assert "kernel's log" in lines[0]


# ---------------------------------------------------------------------------------------------------- everything is bad


def test_a_medium_whose_reads_all_fail_is_an_outage_and_comes_back_when_blocks_can_be_read(tmp_path: Path) -> None:
    """Documents stay readable and writable, so a probe of documents alone would call the medium healthy."""
    device = BadSectorDevice()
    with opened(tmp_path, files=device, **FAST) as rig:
        rig.store(K[:40])
        damage_all(rig, device, writes=False)
        for key in K[:8]:
            assert rig.load([key]) == []
        assert rig.tier.get_stats().available == 0
        opened_before = rig.tier.get_stats().breaker_opened
        probes = []
        device.fail = lambda operation, path: probes.append(path) if operation == "read" else None
        rig.wait(lambda: len(probes) > 30)
        assert rig.tier.get_stats().available == 0
        assert rig.tier.get_stats().breaker_opened == opened_before
        device.heal()
        rig.wait(lambda: rig.tier.get_stats().available)
        assert rig.load(K[8:40]) == K[8:40]


def test_a_medium_whose_writes_all_fail_serves_what_it_holds_and_takes_stores_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_slots, "_LOOK_SECONDS", 0.0)
    device = BadSectorDevice()
    with opened(tmp_path, files=device, **FAST) as rig:
        rig.store(K[:20])
        slots = rig.tier.index.slots
        damage_all(rig, device, reads=False)
        for key in many(8):
            assert rig.store([key]) == []
        stats = rig.tier.get_stats()
        assert (stats.available, stats.writable) == (1, 0)
        assert rig.load(K[:20]) == K[:20]
        failed = rig.tier.get_stats().device_errors
        assert store_all(rig, many(400, 3000)) == 0
        assert rig.tier.get_stats().device_errors == failed
        assert rig.load(K[:20]) == K[:20]
        device.heal()
        rig.wait(lambda: rig.tier.get_stats().writable)
        rig.wait(lambda: rig.tier.index.slots == slots)
        assert store_all(rig, many(40, 5000)) == 40


# ---------------------------------------------------------------------------------------------- remembered, tried again


@pytest.mark.parametrize("killed", [False, True])
def test_a_bad_slot_is_remembered_over_a_restart(tmp_path: Path, killed: bool) -> None:
    device = BadSectorDevice()
    rig = LocalRig(tmp_path, files=device).open()
    bad = next_slot(rig)
    damage(rig, device, bad)
    rig.store(many(8))
    rig.wait((tmp_path / "documents" / rig.tier.store.geometry.bad_slots_document).exists)
    rig.drop() if killed else rig.close()
    with opened(tmp_path, files=device) as rig:
        assert rig.tier.get_stats().slots_retired == 1
        keys = many(3 * rig.tier.index.slots, 4000)
        assert store_all(rig, keys) == len(keys)
        assert rig.tier.get_stats().device_errors == 0
        assert rig.tier.index.slots == rig.tier.store.geometry.num_slots - 1


def test_a_list_of_bad_slots_that_is_damaged_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:8])
        name = rig.tier.store.geometry.bad_slots_document
    document = bytearray(encode([(slot, 1, 0.0) for slot in range(40)]))
    document[20] ^= 1
    (tmp_path / "documents" / name).write_bytes(document)
    with opened(tmp_path) as rig:
        assert rig.tier.get_stats().slots_retired == 0
        assert rig.load(K[:8]) == K[:8]
    assert f"document {name} is damaged" in caplog.text


def test_a_document_of_bad_slots_is_read_as_it_was_written_and_no_other_is() -> None:
    entries = [(3, 1, 12.5), (70000, 4, 1e9)]
    document = encode(entries)
    assert decode(document) == entries
    assert decode(encode([])) == []
    for position in range(len(document)):
        changed = bytearray(document)
        changed[position] ^= 0x10
        assert decode(bytes(changed)) is None
        assert decode(document[:position]) is None


def test_a_bad_slot_is_tried_rarely_and_comes_back_when_it_can_be_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_slots, "FIRST_TRIAL_SECONDS", 0.005)
    monkeypatch.setattr(bad_slots, "_LOOK_SECONDS", 0.0)
    device = BadSectorDevice()
    with opened(tmp_path, files=device) as rig:
        slots, bad = rig.tier.index.slots, next_slot(rig)
        damage(rig, device, bad, writes=False)
        rig.store(K[:1])
        assert rig.place(K[0]) == bad
        assert rig.load(K[:1]) == []
        entry = rig.tier._bad_slots._slots[bad]
        rig.wait(lambda: entry.failures >= 3)
        failures, due = entry.failures, entry.due
        rig.wait(lambda: entry.failures > failures)
        assert rig.tier.get_stats().slots_retired == 1
        # A trial begins when it is due or later, so the pause behind it is at least this long on any machine.
        assert entry.due - due >= bad_slots.FIRST_TRIAL_SECONDS * 2**failures
        device.heal()
        rig.wait(lambda: rig.tier.get_stats().slots_retired == 0)
        assert rig.tier.index.slots == slots
        keys = many(slots)
        assert store_all(rig, keys) == slots
        assert bad in {rig.place(key) for key in rig.held(keys)}


def test_a_list_that_became_empty_is_written_again_after_its_write_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"FIRST_TRIAL_SECONDS": 0.005, "_LOOK_SECONDS": 0.0, "_RETRY_SECONDS": 0.0}.items():
        monkeypatch.setattr(bad_slots, name, seconds)
    refused: list[str] = []
    write = LocalStore.write_document

    def refuse_the_first_empty_list(store: LocalStore, name: str, document: bytes) -> None:
        if decode(document) == [] and not refused:
            refused.append(name)
            raise TemporaryStoreError("refused")
        write(store, name, document)

    monkeypatch.setattr(LocalStore, "write_document", refuse_the_first_empty_list)
    device = BadSectorDevice()
    with opened(tmp_path, files=device) as rig:
        path = tmp_path / "documents" / rig.tier.store.geometry.bad_slots_document
        damage(rig, device, next_slot(rig))
        rig.store(many(8))
        rig.wait(path.exists)
        device.heal()
        rig.wait(lambda: bool(refused) and decode(path.read_bytes()) == [])


# ----------------------------------------------------------------------------------------- media that refuse all writes


class RefusingDisk(FaultyDevice):
    """A disk that refuses to open files for writing while its operations fail because it is read-only."""

    def open(self, path: Path, flags: int) -> int:
        if errno.EROFS in self.errors.values() and flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, "refused")
        return super().open(path, flags)


@pytest.mark.parametrize(
    ("number", "operations", "word"),
    [
        (errno.ENOSPC, ("write",), "the file system is full"),
        (errno.EDQUOT, ("write",), "the quota is used up"),
        (errno.EROFS, ("write", "allocate", "rename", "unlink", "sync"), "read-only"),
    ],
)
def test_a_disk_that_refuses_writes_keeps_what_it_holds(
    tmp_path: Path, number: int, operations: tuple[str, ...], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A full copy-on-write disk refuses overwrites too, so evictions for its stores would gain nothing."""
    caplog.set_level(logging.WARNING)
    device = RefusingDisk()
    with opened(tmp_path, files=device, capacity="6MiB", **FAST) as rig:
        slots = rig.tier.store.geometry.num_slots
        rig.wait(lambda: rig.tier.index.slots == slots)
        assert slots >= 480
        keys = many(slots)
        assert store_all(rig, keys, 16) == slots
        device.errors = dict.fromkeys(operations, number)
        assert store_all(rig, many(2000, 9000), 16) == 0
        held = rig.held(keys)
        assert len(held) >= slots - 32
        assert rig.load(held[-16:]) == held[-16:]
        stats = rig.tier.get_stats()
        assert (stats.available, stats.writable) == (1, 0)
        assert word in caplog.text
        device.errors.clear()
        rig.wait(lambda: rig.tier.get_stats().writable)
        assert store_all(rig, many(16, 20000), 16) == 16


def test_segments_that_were_not_read_before_a_remount_can_be_read_after_it(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        assert store_all(rig, K) == len(K)
    device = RefusingDisk()
    with opened(tmp_path, files=device, **FAST) as rig:
        assert len(rig.tier.store.segments.existing()) > 2
        device.errors = dict.fromkeys(("write", "allocate", "rename", "unlink", "sync"), errno.EROFS)
        assert rig.load(K) == K
        assert rig.tier.get_stats().breaker_opened == 0
        assert rig.store(many(4)) == []
        assert rig.load(K) == K
        device.errors.clear()
        rig.wait(lambda: rig.tier.get_stats().writable)
        assert store_all(rig, many(4)) == 4
