"""The local tier as a whole: capacity, growth, full disks, other namespaces, late I/O, options."""

from __future__ import annotations

import errno
import logging
import os
import threading
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.device import FaultyDevice
from tests.tiers.local.rig import BLOCK_BYTES, CAPACITY, SLOT_BYTES, LocalRig, make_options, opened, segment_files
from tiering.api.keys import OffloadKey
from tiering.api.namespace import Namespace
from tiering.errors import ConfigError
from tiering.medium.frame import HEADER_BYTES, FrameHeader, parse_header
from tiering.secondary.contract import TierContext
from tiering.testing.clock import SettableClock
from tiering.testing.keys import key_of
from tiering.testing.tier_rig import make_namespace
from tiers.local import LOCAL_TIER, growth, new_segments
from tiers.local.layout import used_bytes
from tiers.local.tier import LocalTier

K = [key_of(number) for number in range(64)]


def many(count: int, first: int = 1000) -> list[OffloadKey]:
    return [key_of(number) for number in range(first, first + count)]


def store_all(rig: LocalRig, keys: list[OffloadKey]) -> list[OffloadKey]:
    return [key for start in range(0, len(keys), 16) for key in rig.store(keys[start : start + 16])]


# ------------------------------------------------------------------------------------------------------------- capacity


def test_the_directory_stays_within_the_capacity_however_much_is_stored(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        slots = rig.tier.store.geometry.num_slots
        for start in range(0, 3 * slots, 16):
            rig.store(many(16, start))
            rig.tier.checkpoints.request()
            assert used_bytes(tmp_path) <= CAPACITY
        assert rig.tier.index.blocks == slots
        assert rig.tier.get_stats().evictions >= 2 * slots - 16
    assert used_bytes(tmp_path) <= CAPACITY


def test_blocks_of_other_namespaces_are_overwritten_before_our_own(tmp_path: Path) -> None:
    with opened(tmp_path) as other:
        slots = other.tier.store.geometry.num_slots
        store_all(other, many(slots // 2))
    with opened(tmp_path, model="model-b") as rig:
        keys = many(slots, 5000)
        assert store_all(rig, keys) == keys
        assert rig.tier.get_stats().evictions == 0
        assert rig.held(keys) == keys
    assert used_bytes(tmp_path) <= CAPACITY


def test_another_block_size_takes_the_place_of_the_old_segments_when_it_needs_their_room(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        store_all(rig, many(40))
        old = segment_files(tmp_path)
    for number, path in enumerate(old):
        os.utime(path, (number, number))
    with opened(tmp_path, group_bytes=(3 * BLOCK_BYTES,)) as rig:
        keys = many(2 * rig.tier.store.geometry.num_slots, 1000)
        assert rig.held(many(40)) == []
        left = len(old)
        for key in keys:
            assert rig.store([key]) == [key]
            assert used_bytes(tmp_path) <= CAPACITY
            there = [path for path in old if path.exists()]
            assert there == old[len(old) - len(there) :], "the oldest goes first"
            assert len(there) in {left, left - 1}
            left = len(there)
        assert not left
        assert rig.tier.index.slots == rig.tier.store.geometry.num_slots
        assert rig.tier.get_stats().evictions > 0


def test_two_block_sizes_in_turn_find_their_blocks_while_the_directory_has_room_for_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kv_tiering.local")
    size, keys = 3 * BLOCK_BYTES, many(24)
    with opened(tmp_path) as rig:
        assert store_all(rig, keys) == keys
    for _ in range(2):
        with opened(tmp_path, group_bytes=(size,)) as rig:
            rig.wait(lambda: not rig.tier.recovering)
            assert store_all(rig, keys[:4]) == keys[:4]
        with opened(tmp_path) as rig:
            assert rig.load(keys) == keys
    assert "segment(s) of another shape" in caplog.text


def test_segments_are_added_until_the_capacity_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_segments, "FIRST_BYTES", 0)
    with opened(tmp_path) as rig:
        geometry = rig.tier.store.geometry
        assert len(segment_files(tmp_path)) == 1
        stored: list[OffloadKey] = []
        for start in range(0, geometry.num_slots, 4):
            stored += rig.store(many(4, start))
            rig.wait(lambda: rig.tier.index.free >= 4 or rig.tier.index.slots == geometry.num_slots)
        assert len(segment_files(tmp_path)) == geometry.max_segments
        assert rig.load(stored[:16]) == stored[:16]


# ------------------------------------------------------------------------------------------------------------ full disk


def test_a_disk_too_full_for_another_segment_leaves_a_smaller_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(new_segments, "FIRST_BYTES", 0)
    device = FaultyDevice()
    with opened(tmp_path, files=device) as rig:
        slots = rig.tier.index.slots
        device.errors = {"allocate": errno.ENOSPC}
        with caplog.at_level(logging.WARNING, "kv_tiering.local"):
            store_all(rig, many(3 * slots))
            rig.wait(lambda: "the file system is full" in caplog.text)
        assert rig.tier.index.slots == slots
        assert rig.load(many(3 * slots)[-4:]) == many(3 * slots)[-4:]
        assert caplog.text.count("cannot add a segment") == 1
        assert not list(tmp_path.glob("*.new"))


def test_slots_that_the_disk_had_no_space_for_are_used_again_when_it_has(tmp_path: Path) -> None:
    device, clock = FaultyDevice(), SettableClock()
    with opened(tmp_path, files=device, clock=clock, breaker={"probe_after": "10ms", "probe_max": "10ms"}) as rig:
        rig.store(K[:4])
        slots = rig.tier.index.slots
        device.errors = {"write": errno.ENOSPC}
        assert rig.store(K[4:12]) == []
        assert rig.tier.get_stats().cascades_failed == 8
        assert rig.load(K[:4]) == K[:4]
        device.errors.clear()
        clock.advance(growth.RETRY_SPACE_SECONDS)
        rig.wait(lambda: rig.tier.get_stats().writable)
        keys = many(slots + 40)
        store_all(rig, keys)
        assert rig.tier.index.slots == slots


def test_a_disk_that_stays_full_is_tried_ever_less_often_and_said_once_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(new_segments, "FIRST_BYTES", 0)
    device, clock = FaultyDevice(), SettableClock()
    with opened(tmp_path, files=device, clock=clock) as rig:
        device.errors = {"allocate": errno.ENOSPC}
        device.calls.clear()
        for number in range(300):
            rig.store(many(4, 4 * number))
            rig.wait(lambda: not rig.tier._growth.running)
            clock.advance(60)
        attempts = sum(operation == "allocate" for operation, _ in device.calls)
        lines = [line for line in caplog.messages if "cannot add a segment" in line]
        assert 20 <= attempts <= 30, "five hours, and at last a quarter of an hour between two attempts"
        assert 4 <= len(lines) <= 6
        wanted = rig.tier.store.geometry.segment_bytes
        assert f"cannot add a segment of {wanted} bytes in {tmp_path}, which has 1 of 4, where " in lines[0]
        assert "bytes are free: No space left on device (the file system is full); going on with" in lines[0]
        device.errors.clear()
        clock.advance(growth.RETRY_SPACE_MOST)
        rig.store(K[:4])
        rig.wait(lambda: len(segment_files(tmp_path)) > 1)


def writable(rig: LocalRig, clock: SettableClock) -> bool:
    """Return True if the tier takes stores; let time pass, in which the tier tries."""
    clock.advance(0.1)
    return bool(rig.tier.get_stats().writable)


def has_segments(rig: LocalRig, count: int, clock: SettableClock) -> bool:
    """Return True if the tier uses ``count`` segments; let time pass, in which it may drop some."""
    clock.advance(1.0)
    return len(rig.tier.store.segments.existing()) == count


class Quota(FaultyDevice):
    """A file system that writes every block anew (copy on write), with a quota for segments."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        """The quota."""
        self.fail = self._charge

    def allocate(self, fd: int, length: int) -> None:
        self._require(length)
        super().allocate(fd, length)

    def _charge(self, operation: str, path: Path) -> None:
        # The first write into a segment takes no space beyond its own.
        if operation == "write" and (path.name == "trial.new" or (path.name.startswith("slots-") and not path.suffix)):
            self._require(SLOT_BYTES)

    def _require(self, length: int) -> None:
        (directory,) = {path.parent for _, path in self.calls if path.name.startswith("slots-")}
        if sum(path.stat().st_blocks * 512 for path in segment_files(directory)) + length > self.bytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_tier_that_has_filled_its_quota_drops_segments_until_writes_succeed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device, clock = Quota(), SettableClock()
    rig = LocalRig(tmp_path, files=device, clock=clock, breaker={"probe_after": "10ms", "probe_max": "10ms"})
    size = rig.tier.store.geometry.segment_bytes
    device.bytes = 3 * size + SLOT_BYTES // 2
    rig.open()
    assert rig.store(K[:8]) == []
    assert (rig.tier.index.blocks, rig.tier.get_stats().writable) == (0, 0)
    for keys in (many(8), many(200, 2000), many(200, 3000)):
        clock.advance(growth.RETRY_SPACE_SECONDS)
        rig.wait(lambda: writable(rig, clock))
        rig.wait(lambda: not rig.tier._growth.running)
        assert store_all(rig, keys) == keys
    assert rig.tier.index.slots == 2 * rig.tier.store.geometry.slots_per_segment
    assert rig.tier.index.blocks > rig.tier.index.slots // 2
    assert rig.load(keys[-8:]) == keys[-8:]
    assert caplog.text.count("was dropped to make room") == 1
    stats = rig.tier.get_stats()
    assert stats.blocks_lost == 0
    rig.close()
    with opened(tmp_path, files=device) as again:
        assert again.load(keys[-8:]) == keys[-8:]


def test_segments_are_dropped_only_while_the_disk_refuses_writes(tmp_path: Path) -> None:
    device, clock = Quota(), SettableClock()
    device.bytes = 1 << 30
    with opened(tmp_path, files=device, clock=clock, breaker={"probe_after": "10ms", "probe_max": "10ms"}) as rig:
        keys = store_all(rig, many(rig.tier.store.geometry.num_slots))
        size, there = rig.tier.store.geometry.segment_bytes, len(segment_files(tmp_path))
        device.bytes = (there - 2) * size
        assert store_all(rig, many(32, 9000)) == []
        held = rig.held(keys)
        assert len(held) >= len(keys) - 32
        assert rig.load(held[-8:]) == held[-8:]
        for left in range(there - 1, there - 4, -1):
            rig.wait(partial(has_segments, rig, left, clock))
        rig.wait(lambda: writable(rig, clock))
        more = many(100, 12000)
        assert store_all(rig, more) == more
        assert len(rig.tier.store.segments.existing()) == there - 3
        device.bytes, since = 1 << 30, clock()

        def has_grown() -> bool:
            clock.advance(60)
            rig.store(many(2, int(clock())))
            return len(rig.tier.store.segments.existing()) == there

        rig.wait(has_grown)
        assert clock() - since >= growth.AFTER_DROP_SECONDS


def test_a_disk_that_is_full_at_the_start_leaves_the_tier_out_of_service_until_it_is_not(tmp_path: Path) -> None:
    device = FaultyDevice()
    device.errors = {"allocate": errno.ENOSPC}
    rig = LocalRig(tmp_path, files=device, breaker={"probe_after": "10ms", "probe_max": "10ms"})
    assert not rig.tier.open(rig.context.clock() + 20)
    assert rig.store(K[:2]) == []
    device.errors.clear()
    rig.wait(lambda: rig.store(K[:2]) == K[:2])
    assert rig.load(K[:2]) == K[:2]
    rig.close()


def test_a_full_disk_does_not_keep_what_is_there_from_being_served(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:8])
    device = FaultyDevice()
    device.errors = {"write": errno.ENOSPC, "allocate": errno.ENOSPC, "rename": errno.ENOSPC}
    with opened(tmp_path, files=device) as rig:
        assert rig.load(K[:8]) == K[:8]


def test_a_checkpoint_that_cannot_be_written_is_tried_again_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = FaultyDevice()
    rig = LocalRig(tmp_path, files=device).open()
    rig.store(K[:8])
    rig.checkpoint()
    rig.store(K[8:16])
    device.errors = {"rename": errno.ENOSPC}
    with caplog.at_level(logging.WARNING, "kv_tiering.local"):
        rig.checkpoint()
    assert "a restart would read more headers" in caplog.text
    rig.store(K[16:24])
    device.errors.clear()
    rig.drop()
    with opened(tmp_path) as again:
        assert again.load(K[:24]) == K[:24]


# ------------------------------------------------------------------------------------------------------- the direct way


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = FaultyDevice()
    device.direct = False
    with caplog.at_level(logging.WARNING, "kv_tiering.local"), opened(tmp_path, files=device) as rig:
        assert rig.store(K[:8]) == K[:8]
        assert rig.load(K[:8]) == K[:8]
    assert "does not take O_DIRECT" in caplog.text
    with opened(tmp_path) as rig:
        assert rig.load(K[:8]) == K[:8]


def test_every_block_on_the_disk_is_framed(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:4])
        for key in K[:4]:
            path, offset = rig.location(rig.place(key))
            frame = path.read_bytes()[offset : offset + SLOT_BYTES]
            header = parse_header(memoryview(frame)[:HEADER_BYTES])
            assert isinstance(header, FrameHeader)
            assert (header.key, header.raw_length) == (key, BLOCK_BYTES)
            assert rig.tier.namespace is not None
            assert header.fingerprint == rig.tier.namespace.fingerprint
            assert not any(frame[HEADER_BYTES:4096])
            assert frame[4096:] == rig.content(key)


# ------------------------------------------------------------------------------------------------------------- late I/O


def test_a_slot_with_a_read_that_hangs_is_not_reused_and_its_job_is_reported_when_it_ends(tmp_path: Path) -> None:
    device = FaultyDevice()
    go, hanging = threading.Event(), threading.Event()

    def hang(operation: str, path: Path) -> None:
        if operation == "read" and not go.is_set():
            hanging.set()
            go.wait(120)

    clock = SettableClock()
    with opened(tmp_path, files=device, clock=clock, max_inflight=2, primary_share=1.0) as rig:
        assert rig.store(K[:2]) == K[:2]
        slot = rig.place(K[0])
        device.fail = hang
        try:
            job = rig.submit_load(K[:1])
            assert hanging.wait(20)
            clock.advance(rig.local_options.deadline)
            rig.wait(lambda: rig.tier.get_stats().loads_overdue == 1)
            slots = rig.tier.index.slots
            for start in range(0, 2 * slots, 8):
                keys = many(8, 1000 + start)
                rig.wait(partial(lambda keys: set(rig.store(keys)) == set(keys), keys))
                assert slot not in {rig.place(key) for key in keys}
            assert not any(result.job_id == job for result in rig.results)
            go.set()
            assert rig.result(job).job_id == job
            assert (rig.rows[:16, :BLOCK_BYTES] != 0xEE).any()
        finally:
            go.set()


# -------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("word", "value", "reason"),
    [
        ("compression", "zstd", "one size"),
        ("ttl", "7d", "eviction"),
        ("lookup_deadline", "1s", "from memory"),
    ],
)
def test_words_it_does_not_support_are_refused_with_the_reason(
    tmp_path: Path, word: str, value: str, reason: str
) -> None:
    with pytest.raises(ValidationError, match=f"{word} is not supported by this tier.*{reason}"):
        make_options(tmp_path, **{word: value})


def test_path_and_capacity_are_required() -> None:
    with pytest.raises(ValidationError) as refused:
        LOCAL_TIER.options.model_validate({"type": "local"})
    assert {error["loc"] for error in refused.value.errors()} == {("path",), ("capacity",)}


def test_a_capacity_below_one_block_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with pytest.raises(ConfigError, match=r"tier conformance: capacity: .* below one block"):
        LocalRig(path, capacity="8KiB")
    assert not path.exists()


def test_building_a_tier_opens_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    rig = LocalRig(path)
    assert not path.exists()
    rig.close()


def test_the_definition_builds_a_persistent_tier(tmp_path: Path) -> None:
    assert LOCAL_TIER.persistent
    rig = LocalRig(tmp_path)
    tier = LOCAL_TIER.build(make_options(tmp_path), rig.context)
    assert isinstance(tier, LocalTier)
    assert tier.traits.medium == "DISK"
    tier.shutdown(rig.context.clock())
    rig.close()


def test_each_replica_has_a_tier_of_its_own(tmp_path: Path) -> None:
    def context(replica: str, rig: LocalRig) -> TierContext:
        namespace: Namespace = make_namespace("model-a", (BLOCK_BYTES,))
        return TierContext("local", rig.context.primary_view, (BLOCK_BYTES,), namespace, replica=replica)

    rig = LocalRig(tmp_path)
    tiers = [LocalTier(context(replica, rig), make_options(tmp_path)) for replica in ("0", "1")]
    try:
        assert all(tier.open(rig.context.clock() + 20) for tier in tiers)
        assert len(list(tmp_path.glob("replica-*/slots-*"))) >= 2
    finally:
        for tier in tiers:
            tier.shutdown(rig.context.clock() + 20)
    rig.close()


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_eviction_policies_keep_the_tier_full_and_right(tmp_path: Path, eviction: str) -> None:
    with opened(tmp_path, eviction=eviction, high_watermark=0.9, low_watermark=0.8) as rig:
        slots = rig.tier.index.slots
        store_all(rig, many(3 * slots))
        assert slots * 0.7 < rig.tier.index.blocks <= slots * 0.9 + 1
        held = rig.held(many(3 * slots))
        assert rig.load(held[:16]) == held[:16]
