"""Recovery from a checkpoint, from headers, or from both; neither is trusted blindly."""

from __future__ import annotations

import logging
import os
import random
import struct
import threading
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from xxhash import xxh3_128

from tests.tiers.local.rig import BLOCK_BYTES, SLOT_BYTES, LocalRig, opened, segment_files, writes_checkpoint
from tiering.api.keys import OffloadKey
from tiering.index.slots import SlotIndex
from tiering.medium.files import Files
from tiering.medium.frame import HEADER_BYTES, SEQUENCE, FrameHeader, encode_header, parse_header
from tiering.testing.faults import flip_bit, overwrite
from tiering.testing.keys import key_of
from tiering.testing.tier_rig import REQUEST
from tiers.local import checkpoints as checkpoints_module
from tiers.local import tier as tier_module
from tiers.local.checkpoint import CHECKPOINT_NAME, Checkpoint, CheckpointWriter, read_checkpoint
from tiers.local.feed import RecoveryFeed
from tiers.local.layout import PAGE, SegmentGeometry
from tiers.local.segments import Segments

K = [key_of(number) for number in range(128)]


def header_at(rig: LocalRig, slot: int) -> FrameHeader:
    path, offset = rig.location(slot)
    header = parse_header(memoryview(path.read_bytes())[offset : offset + HEADER_BYTES])
    assert isinstance(header, FrameHeader)
    return header


def copy_block(rig: LocalRig, source: int, target: int, *, sequence: int, key: OffloadKey) -> None:
    """Write a valid copy of a block into another slot, as if a store with ``sequence`` had left it."""
    path, offset = rig.location(source)
    frame = bytearray(path.read_bytes()[offset : offset + SLOT_BYTES])
    before = header_at(rig, source)
    encode_header(
        memoryview(frame),
        key=key,
        fingerprint=before.fingerprint,
        sequence=sequence,
        raw_length=before.raw_length,
        digest=before.digest,
    )
    path, offset = rig.location(target)
    overwrite(path, offset, bytes(frame))


def remove_checkpoint(path: Path) -> None:
    (path / CHECKPOINT_NAME).unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------- what is found


def test_a_clean_restart_finds_everything_from_the_checkpoint_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:40])
    caplog.set_level(logging.INFO, "kv_tiering.local")
    with opened(tmp_path) as rig:
        assert rig.lookup(K[:41]) == 40
        assert rig.load(K[:40]) == K[:40]
    assert "reading all headers" not in caplog.text


def test_a_killed_engine_without_a_checkpoint_is_recovered_from_headers(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path).open()
    rig.store(K[:40])
    rig.drop()
    with opened(tmp_path) as rig:
        assert rig.lookup(K[:41]) == 40
        assert rig.load(K[:40]) == K[:40]


def test_what_was_written_after_the_checkpoint_is_found_beside_what_is_in_it(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path).open()
    rig.store(K[:20])
    rig.checkpoint()
    rig.store(K[20:40])
    rig.drop()
    with opened(tmp_path) as rig:
        assert rig.load(K[:40]) == K[:40]


def test_only_segments_written_since_the_checkpoint_are_read_again(tmp_path: Path) -> None:
    """The tier notices an altered header in an unwritten segment only when it reads the block."""
    rig = LocalRig(tmp_path).open()
    rig.store(K[:20])
    rig.checkpoint()
    path, offset = rig.location(rig.place(K[0]))
    rig.drop()
    before = path.stat()
    flip_bit(path, offset * 8)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with opened(tmp_path) as rig:
        assert rig.held(K[:1]) == K[:1]
        assert rig.load(K[:1]) == []
        assert rig.held(K[:1]) == []


def test_segments_that_somebody_changed_are_read_again_though_nobody_marked_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, segment_size="128KiB") as rig:
        rig.store(K[:20])
        one, other = rig.location(rig.place(K[0]))[0], rig.location(rig.place(K[19]))[0]
    assert one != other
    aside = tmp_path / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    with opened(tmp_path, segment_size="128KiB") as rig:
        assert rig.held(K[:20]) == K[:20]
        assert rig.load(K[:20]) == K[:20]
    assert "are not the files in the checkpoint" in caplog.text


def test_blocks_of_a_segment_that_is_gone_are_counted_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:20])
        path = rig.location(rig.place(K[0]))[0]
        there = [key for key in K[:20] if rig.location(rig.place(key))[0] == path]
    path.unlink()
    with opened(tmp_path) as rig:
        assert rig.held(K[:20]) == [key for key in K[:20] if key not in there]
        assert rig.tier.get_stats().blocks_lost == len(there)
    assert f"{len(there)} block(s) are lost" in caplog.text


def test_writes_during_recovery_are_marked_for_the_next_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:20])
    for start in (20, 30, 40):
        rig = LocalRig(tmp_path).open()
        rig.store(K[start : start + 10])
        rig.drop()
    with opened(tmp_path) as rig:
        assert rig.load(K[:50]) == K[:50]


def test_writes_before_recovery_has_begun_are_marked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, segment_size="128KiB") as rig:
        rig.store(K[:20])
    with monkeypatch.context() as patch:
        patch.setattr(tier_module, "OPEN_WAIT_SECONDS", 0.0)
        patch.setattr(RecoveryFeed, "_fetch", lambda feed: None)
        rig = LocalRig(tmp_path, capacity="2MiB", segment_size="128KiB")
        super(LocalRig, rig).open()
        rig.wait(lambda: rig.tier.index.free >= 10)
        assert rig.store(K[20:30]) == K[20:30]
        rig.drop()
    with opened(tmp_path, capacity="2MiB", segment_size="128KiB") as rig:
        assert rig.held(K[:30]) == K[:30]
        assert rig.load(K[:30]) == K[:30]


def test_a_tier_rests_only_when_all_recovered_blocks_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:20])
    monkeypatch.setattr(tier_module, "OPEN_WAIT_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryFeed, "_merge", lambda feed: None)
        rig = LocalRig(tmp_path)
        super(LocalRig, rig).open()
        rig.wait(lambda: rig.tier._feed._batches)
        assert rig.step().rest == 0
    rig.wait(lambda: not rig.tier.recovering)
    rig.wait(lambda: rig.step().rest > 0)
    rig.close()


def test_a_tier_rests_while_a_slice_of_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_module, "SLICE_SLOTS", 1)
    with opened(tmp_path) as rig:
        rig.store(K[:20])
        rig.wait(lambda: rig.step().rest > 0)
        rig.tier.checkpoints.request()
        assert rig.step().rest > 0
        rig.wait(lambda: not writes_checkpoint(rig.tier))
        checkpoint = read_checkpoint(tmp_path, rig.tier.store.geometry)
        assert isinstance(checkpoint, Checkpoint)
        assert len(checkpoint) == 20


def test_recency_survives_several_restarts_and_kills(tmp_path: Path) -> None:
    """This includes blocks in segments that were rewritten since the checkpoint because of other blocks."""
    rig = LocalRig(tmp_path).open()
    slots = rig.tier.store.geometry.num_slots
    keys = [key_of(number) for number in range(slots)]
    for start in range(0, slots, 8):
        rig.store(keys[start : start + 8])
    rig.tier.touch(keys[:8], REQUEST)
    rig.checkpoint()
    for start in range(0, 24, 8):
        rig.store([key_of(7000 + start + n) for n in range(8)])
    rig.drop()
    for _ in range(3):
        LocalRig(tmp_path).open().close()
    with opened(tmp_path) as rig:
        new = [key_of(5000 + number) for number in range(slots - 40)]
        for start in range(0, len(new), 8):
            rig.store(new[start : start + 8])
        assert rig.held(keys[:8]) == keys[:8]
        assert rig.held([key_of(7000 + n) for n in range(24)]) == [key_of(7000 + n) for n in range(24)]


def test_blocks_in_flight_while_the_checkpoint_is_taken_are_not_lost(tmp_path: Path) -> None:
    for _ in range(5):
        rig = LocalRig(tmp_path).open()
        for start in range(0, 60, 6):
            rig.submit_store(K[start : start + 6], first_row=start)
            rig.tier.checkpoints.request()
            rig.tier.on_schedule_end()
        rig.wait(partial(lambda tier: tier.idle and not writes_checkpoint(tier), rig.tier))
        stored = rig.held(K[:60])
        assert len(stored) > 30
        rig.drop()
        with opened(tmp_path) as again:
            assert again.held(K[:60]) == stored
            assert again.load(stored) == stored


def test_an_evicted_block_does_not_come_back_in_place_of_the_one_that_took_its_slot(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path).open()
    rig.store(K[:10])
    rig.checkpoint()
    slots = rig.tier.store.geometry.num_slots
    many = [key_of(1000 + number) for number in range(slots)]
    for start in range(0, slots, 16):
        rig.store(many[start : start + 16])
    assert rig.held(K[:10]) == []
    rig.drop()
    with opened(tmp_path) as rig:
        assert rig.held(K[:10]) == []
        assert rig.load(many[-32:]) == many[-32:]


def test_recency_survives_in_the_checkpoint(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        slots = rig.tier.store.geometry.num_slots
        keys = [key_of(number) for number in range(slots)]
        for start in range(0, slots, 16):
            rig.store(keys[start : start + 16])
        rig.tier.touch(keys[:8], REQUEST)
    with opened(tmp_path) as rig:
        new = [key_of(5000 + number) for number in range(slots // 2)]
        for start in range(0, len(new), 16):
            rig.store(new[start : start + 16])
        assert rig.held(keys[:8]) == keys[:8]
        assert rig.held(keys[8:16]) == []


def test_recency_survives_one_restart_after_another(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        slots = rig.tier.store.geometry.num_slots
        keys = [key_of(number) for number in range(slots)]
        for start in range(0, slots, 16):
            rig.store(keys[start : start + 16])
        by_slot = sorted(keys, key=rig.place)
        for used in (by_slot[-8:], by_slot[:8]):
            rig.tier.touch(used, REQUEST)
    for number in range(3):
        with opened(tmp_path) as rig:
            assert rig.store([key_of(4000 + number)])
    with opened(tmp_path) as rig:
        new = [key_of(5000 + number) for number in range(slots // 2)]
        for start in range(0, len(new), 16):
            rig.store(new[start : start + 16])
        assert rig.held(by_slot[-8:]) == by_slot[-8:]
        assert rig.held(by_slot[:8]) == by_slot[:8]


def test_recovered_blocks_are_announced(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:5])
    with opened(tmp_path, events=True) as rig:
        announced = [key for event in rig.tier.take_events() if not event.removed for key in event.keys]
        assert sorted(announced) == sorted(K[:5])


# ---------------------------------------------------------------------------------------------- duplicates and the torn


@pytest.mark.parametrize("newer", [True, False])
def test_of_two_copies_of_a_block_the_higher_sequence_wins(tmp_path: Path, newer: bool) -> None:
    rig = LocalRig(tmp_path).open()
    rig.store(K[:2])
    original, other = rig.place(K[0]), rig.place(K[1])
    sequence = header_at(rig, original).sequence + (1000 if newer else -1000)
    rig.drop()
    copy_block(rig, original, other, sequence=sequence, key=K[0])
    with opened(tmp_path) as rig:
        assert rig.place(K[0]) == (other if newer else original)
        assert rig.held(K[1:2]) == []
        assert rig.load(K[:1]) == K[:1]


def test_a_copy_written_after_the_checkpoint_wins_over_the_checkpoint_and_an_older_one_does_not(tmp_path: Path) -> None:
    for later in (True, False):
        path = tmp_path / str(later)
        rig = LocalRig(path).open()
        geometry = rig.tier.store.geometry
        rig.store(K[:1])
        rig.checkpoint()
        # The following stores mark a segment other than the block's.
        filler = [key_of(100 + number) for number in range(geometry.slots_per_segment + 4)]
        for start in range(0, len(filler), 16):
            rig.store(filler[start : start + 16])
        original = rig.place(K[0])
        target = next(
            rig.place(key) for key in filler if geometry.locate(rig.place(key))[0] != geometry.locate(original)[0]
        )
        sequence = SEQUENCE.take(1) if later else header_at(rig, original).sequence - 1
        rig.drop()
        # Remove the mark of the first segment, which was written before and after the checkpoint.
        (marks,) = path.glob("written-*")
        data = marks.read_bytes()
        overwrite(marks, len(data) - geometry.max_segments + geometry.locate(original)[0], b"\0")
        copy_block(rig, original, target, sequence=sequence, key=K[0])
        with opened(path) as again:
            assert again.place(K[0]) == (target if later else original)
            assert again.load(K[:1]) == K[:1]


def test_a_torn_block_is_a_miss_and_its_slot_is_used_again(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path).open()
    rig.store(K[:3])
    path, offset = rig.location(rig.place(K[1]))
    rig.drop()
    overwrite(path, offset + PAGE + BLOCK_BYTES // 2, bytes(BLOCK_BYTES // 2))
    with opened(tmp_path) as rig:
        assert rig.load(K[:3]) == [K[0], K[2]]
        assert rig.tier.get_stats().corrupt_blocks == 1
        assert rig.store(K[:3]) == K[:3]
        assert rig.load(K[:3]) == K[:3]


def test_a_torn_header_is_a_free_slot(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path).open()
    rig.store(K[:3])
    path, offset = rig.location(rig.place(K[1]))
    rig.drop()
    overwrite(path, offset + 40, bytes(40))
    with opened(tmp_path) as rig:
        assert rig.held(K[:3]) == [K[0], K[2]]
        assert rig.tier.index.slots == rig.tier.store.geometry.num_slots


# ----------------------------------------------------------------------------------------- checkpoints that are no good


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "foreign text", "missing"])
def test_a_damaged_checkpoint_is_not_used_and_headers_are_read(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:30])
    path = tmp_path / CHECKPOINT_NAME
    data = path.read_bytes()
    if damage == "flipped":
        flip_bit(path, len(data) * 4)
    else:
        path.write_bytes(
            {"truncated": data[: len(data) // 2], "empty": b"", "foreign text": b"x" * 4096, "missing": b""}[damage]
        )
    if damage == "missing":
        path.unlink()
    with opened(tmp_path) as rig:
        assert rig.load(K[:30]) == K[:30]


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_without_the_marks_the_checkpoint_is_not_used(tmp_path: Path, damage: str) -> None:
    rig = LocalRig(tmp_path).open()
    rig.store(K[:10])
    rig.checkpoint()
    rig.store(K[10:20])
    rig.drop()
    (marks,) = tmp_path.glob("written-*")
    if damage == "missing":
        marks.unlink()
    else:
        marks.write_bytes(marks.read_bytes()[:10] if damage == "truncated" else b"y" * 100)
    with opened(tmp_path) as rig:
        assert rig.load(K[:20]) == K[:20]


def test_a_checkpoint_older_than_the_last_one_still_holds_with_the_marks_since(tmp_path: Path) -> None:
    """The engine was killed after the new generation began and before its checkpoint was in place."""
    rig = LocalRig(tmp_path).open()
    rig.store(K[:10])
    rig.checkpoint()
    rig.store(K[10:20])
    rig.tier.store.marks.begin()
    rig.store(K[20:30])
    rig.drop()
    with opened(tmp_path) as rig:
        assert rig.load(K[:30]) == K[:30]


def test_a_checkpoint_of_another_namespace_is_not_used(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:10])
    with opened(tmp_path, model="model-b") as rig:
        assert rig.held(K[:10]) == []
        rig.store(K[10:20])
    with opened(tmp_path) as rig:
        assert rig.held(K[:20]) == K[:10]
        assert rig.load(K[:10]) == K[:10]


def test_a_lost_segment_loses_its_blocks_and_nothing_else(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        slots = rig.tier.store.geometry.num_slots
        keys = [key_of(number) for number in range(slots)]
        for start in range(0, slots, 16):
            rig.store(keys[start : start + 16])
        gone, _ = rig.location(rig.place(keys[0]))
        kept = [key for key in keys if rig.location(rig.place(key))[0] != gone]
    gone.unlink()
    with opened(tmp_path) as rig:
        assert rig.held(keys) == kept
        assert rig.load(kept[:20]) == kept[:20]


# ---------------------------------------------------------------------------------------------------- in the background


def test_the_tier_serves_while_it_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "OPEN_WAIT_SECONDS", 0.0)
    with opened(tmp_path, segment_size="128KiB") as rig:
        rig.store(K[:30])
    remove_checkpoint(tmp_path)
    go = threading.Event()

    class SlowFiles(Files):
        def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
            if threading.current_thread().name.startswith("kv-scan"):
                go.wait(20)
            return super().preadv(fd, buffers, offset)

    rig = LocalRig(tmp_path, files=SlowFiles(), capacity="2MiB", segment_size="128KiB")
    try:
        super(LocalRig, rig).open()
        rig.wait(lambda: rig.tier.index.free > 0)
        assert rig.tier.recovering
        assert rig.held(K[:30]) == []
        assert rig.store([K[0], K[50]]) == [K[0], K[50]]
        written = rig.place(K[0])
        go.set()
        rig.wait(lambda: not rig.tier.recovering)
        assert rig.held(K[:30]) == K[:30]
        assert rig.place(K[0]) == written
        assert rig.load([*K[:30], K[50]]) == [*K[:30], K[50]]
    finally:
        go.set()
        rig.close()


def test_a_reset_during_recovery_lets_nothing_old_in(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:30])
    remove_checkpoint(tmp_path)
    rig = LocalRig(tmp_path)
    rig.tier.open(rig.context.clock() + 20)
    assert rig.tier.reset(rig.context.clock() + 20)
    rig.wait(lambda: not rig.tier.recovering)
    assert rig.held(K[:30]) == []
    assert rig.tier.index.slots == rig.tier.store.geometry.num_slots
    assert rig.store(K[:3]) == K[:3]
    rig.close()


# ------------------------------------------------------------------------------------------------------ the file itself


def test_keys_of_different_lengths_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    keys = [b"a\0\0\0\0", b"much longer than the others\0\0\0\1", b"\0" * 40]
    index = SlotIndex(16)
    index.add_free(np.arange(16))
    plan = index.plan_store(keys, 0.0)
    index.end_store(keys, plan.places, [True] * 3, 0.0)
    geometry = SegmentGeometry(SLOT_BYTES, 16, 1)
    writer = CheckpointWriter(Segments(tmp_path, geometry, Files()), bytes(16), 1, 7)
    for start in range(0, 16, 5):
        writer.add(index.slice(start, min(start + 5, 16)))
    writer.finish({})
    checkpoint = read_checkpoint(tmp_path, geometry)
    assert not isinstance(checkpoint, str)
    found = {
        key: slot for batch, slots in checkpoint.key_batches(2) for key, slot in zip(batch, slots.tolist(), strict=True)
    }
    assert found == dict(zip(keys, plan.places, strict=True))


class _Written:
    """An index of 64 slots with 40 blocks in the order of their use, and the parts of its checkpoint."""

    geometry = SegmentGeometry(SLOT_BYTES, 16, 4)
    modified: ClassVar = {number: (number + 7, 1_000_000_007 * number) for number in range(4)}

    def __init__(self) -> None:
        rng = random.Random(5)
        self.index = index = SlotIndex(64)
        index.add_free(np.array(rng.sample(range(60), 60)))
        index.states.add_foreign(np.array([62, 61]))
        keys = [key_of(number) for number in range(40)]
        plan = index.plan_store(keys, 0.0)
        index.end_store(keys, plan.places, [True] * len(keys), 0.0)
        for _ in range(20):
            index.touch(rng.sample(keys, 3))
        self.written = sorted(map(int, index.plan_store([key_of(number) for number in range(100, 103)], 0.0).places))
        self.slot_of = dict(zip(keys, map(int, plan.places), strict=True))
        self.keys = sorted(keys, key=self.used)
        """The held keys, the least recently used first."""

    def used(self, key: bytes) -> int:
        return int(self.index.slice(slot := self.slot_of[key], slot + 1).used[0])

    def header(self, version: int, *counts: int) -> bytes:
        return struct.pack("<8sIQIQ16sQQQQQ", b"KVTCKPT1", version, SLOT_BYTES, 16, 3, bytes(range(16)), 7, *counts)

    def segments(self) -> bytes:
        numbers, states = list(self.modified), list(self.modified.values())
        return np.array(numbers, np.int32).tobytes() + np.array(states, np.uint64).tobytes()

    def block_arrays(self, keys: list[bytes]) -> tuple[bytes, bytes]:
        slots = np.array([self.slot_of[key] for key in keys], np.int32)
        return slots.tobytes(), np.array([len(key) for key in keys], np.uint16).tobytes() + b"".join(keys)

    def check(self, checkpoint: object) -> None:
        assert isinstance(checkpoint, Checkpoint)
        found = [
            (key, slot)
            for keys, slots in checkpoint.key_batches(7)
            for key, slot in reversed(list(zip(keys, slots.tolist(), strict=True)))
        ]
        assert found == [(key, self.slot_of[key]) for key in self.keys]
        assert (checkpoint.generation, checkpoint.sequence, checkpoint.fingerprint) == (3, 7, bytes(range(16)))
        assert (checkpoint.written.tolist(), checkpoint.foreign.tolist()) == (self.written, [61, 62])
        assert checkpoint.modified == self.modified


def test_a_checkpoint_is_written_in_pieces_that_are_read_in_the_order_of_use(tmp_path: Path) -> None:
    world = _Written()
    writer = CheckpointWriter(Segments(tmp_path, world.geometry, Files()), bytes(range(16)), 3, 7)
    body = b""
    for start in range(0, 64, 10):
        writer.add(world.index.slice(start, start + 10))
        inside = range(start, start + 10)
        keys = sorted((key for key in world.keys if world.slot_of[key] in inside), key=world.slot_of.__getitem__)
        written, foreign = ([slot for slot in slots if slot in inside] for slots in (world.written, (61, 62)))
        slots, rest = world.block_arrays(keys)
        body += struct.pack("<III", len(keys), len(written), len(foreign)) + slots
        body += np.array([world.used(key) for key in keys], np.int64).tobytes() + rest
        body += np.array(written + foreign, np.int32).tobytes()
    assert not (tmp_path / CHECKPOINT_NAME).exists(), "not before it is complete"
    assert writer.finish(world.modified) == 40
    header = world.header(3, 40, 7, 0, 4)
    body += world.segments()
    assert (tmp_path / CHECKPOINT_NAME).read_bytes() == header + xxh3_128(body + header).digest() + body
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT_NAME]
    world.check(read_checkpoint(tmp_path, world.geometry))


def _version_2(world: _Written, version: int = 2) -> bytes:
    header = world.header(version, 40, len(world.written), 2, 4)
    slots, rest = world.block_arrays(world.keys)
    body = slots + rest + np.array([*world.written, 61, 62], np.int32).tobytes() + world.segments()
    return header + xxh3_128(header + body).digest() + body


def test_a_checkpoint_of_the_version_before_is_read_and_one_of_the_version_after_is_not(tmp_path: Path) -> None:
    world, path = _Written(), tmp_path / CHECKPOINT_NAME
    path.write_bytes(_version_2(world))
    world.check(read_checkpoint(tmp_path, world.geometry))
    path.write_bytes(_version_2(world, 4))
    assert read_checkpoint(tmp_path, world.geometry) == "it is of another version"


@pytest.mark.parametrize(
    "counts", [(41, 7, 0, 4), (40, 8, 0, 4), (40, 7, 0, 5), (40, 6, 0, 4), (40, 0, 0, 4), (40, 7, 0, 3)]
)
def test_a_checkpoint_whose_counts_are_wrong_is_not_used(tmp_path: Path, counts: tuple[int, ...]) -> None:
    world, path = _Written(), tmp_path / CHECKPOINT_NAME
    writer = CheckpointWriter(Segments(tmp_path, world.geometry, Files()), bytes(range(16)), 3, 7)
    for start in range(0, 64, 10):
        writer.add(world.index.slice(start, start + 10))
    writer.finish(world.modified)
    header = world.header(3, *counts)
    body = path.read_bytes()[len(header) + 16 :]
    path.write_bytes(header + xxh3_128(body + header).digest() + body)
    assert read_checkpoint(tmp_path, world.geometry) == "its parts do not fit together"


def test_an_empty_checkpoint_is_read_as_such(tmp_path: Path) -> None:
    geometry = SegmentGeometry(SLOT_BYTES, 16, 1)
    writer = CheckpointWriter(Segments(tmp_path, geometry, Files()), bytes(16), 1, 7)
    writer.add(SlotIndex(16).slice(0, 16))
    assert writer.finish({}) == 0
    checkpoint = read_checkpoint(tmp_path, geometry)
    assert not isinstance(checkpoint, str)
    assert len(checkpoint) == 0
    assert list(checkpoint.key_batches(10)) == []


def test_what_an_interrupted_process_left_half_made_is_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:3])
    half = tmp_path / (segment_files(tmp_path)[0].name + ".new")
    half.write_bytes(b"x")
    with opened(tmp_path) as rig:
        assert not half.exists()
        assert rig.load(K[:3]) == K[:3]
