"""The directory as a whole: removed, replaced, unmounted, read-only, crowded, taken by others."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from tests.device import FaultyDevice
from tests.tiers.local.rig import LocalRig, opened, segment_files
from tiering.errors import OutOfSpaceError, PermanentStoreError, TemporaryStoreError
from tiering.medium.files import Files
from tiering.testing.keys import key_of
from tiers.local import new_segments
from tiers.local import tier as local_tier
from tiers.local.checkpoint import CHECKPOINT_NAME, read_checkpoint
from tiers.local.layout import SegmentGeometry, used_bytes
from tiers.local.lock import LOCK_NAME, DirectoryLock
from tiers.local.new_segments import SegmentPace
from tiers.local.store import LocalStore

K = [key_of(number) for number in range(64)]
CAPACITY = 2 << 20
GEOMETRY = SegmentGeometry.plan(CAPACITY, 16 << 10, 512 << 10)
PROBES = {"breaker": {"probe_after": "10ms", "probe_max": "10ms"}}


@pytest.fixture(autouse=True)
def _inspects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_tier, "INSPECT_SECONDS", 0.0)
    monkeypatch.setattr(local_tier, "INSPECT_AT_ONCE_SECONDS", 0.0)


# ------------------------------------------------------------------------------------------------- removed and replaced


@pytest.mark.parametrize("how", ["removed", "made again", "moved away"])
def test_a_directory_that_went_away_is_made_again_and_what_it_held_is_told(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kv"
    with opened(path, events=True, **PROBES) as rig:
        rig.store(K[:8])
        list(rig.tier.take_events())
        path.rename(tmp_path / "elsewhere")
        if how != "moved away":
            shutil.rmtree(tmp_path / "elsewhere")
        if how == "made again":
            path.mkdir(mode=0o700)
        rig.store(K[8:12])
        rig.wait(lambda: rig.store(K[16:20]) == K[16:20] and segment_files(path))
        removed = {key for event in rig.tier.take_events() if event.removed for key in event.keys}
        assert removed >= set(K[:8])
        assert rig.load(K[:8]) == []
        assert rig.load(K[16:20]) == K[16:20]
        assert rig.tier.get_stats().blocks_lost >= 8
    assert "block(s) are lost" in caplog.text
    with opened(path) as rig:
        assert rig.load(K[16:20]) == K[16:20]


@pytest.mark.parametrize("repair", ["removed", "moved away"])
@pytest.mark.parametrize("document", ["namespace", "epoch"])
def test_a_directory_that_is_repaired_by_its_removal_is_made_again(tmp_path: Path, document: str, repair: str) -> None:
    path = tmp_path / "kv"
    with opened(path) as rig:
        rig.store(K[:4])
    (damaged,) = path.glob(f"documents/{document}-*")
    damaged.unlink()
    damaged.mkdir()
    rig = LocalRig(path, breaker=PROBES["breaker"])
    try:
        assert not rig.tier.open(rig.context.clock() + 10)
        if repair == "removed":
            shutil.rmtree(path)
        else:
            path.rename(tmp_path / "elsewhere")
        rig.wait(lambda: rig.store(K[:4]) == K[:4])
        assert rig.load(K[:4]) == K[:4]
        assert len(segment_files(path)) > 0
    finally:
        rig.close()


def test_after_a_reset_nothing_on_a_disk_that_takes_the_place_of_another_is_served(tmp_path: Path) -> None:
    path, other = tmp_path / "kv", tmp_path / "other"
    with opened(path) as rig:
        rig.store(K[:4])
    shutil.copytree(path, other)
    with opened(path, **PROBES) as rig:
        assert rig.tier.reset(rig.context.clock() + 20)
        path.rename(tmp_path / "gone")
        other.rename(path)
        rig.store(K[8:12])
        rig.wait(lambda: rig.store(K[16:20]) == K[16:20])
        assert rig.load(K[:4]) == []
    with opened(path) as rig:
        assert rig.load(K[:4]) == []


def test_without_a_reset_the_blocks_of_a_disk_that_comes_back_are_served(tmp_path: Path) -> None:
    path, away = tmp_path / "kv", tmp_path / "away"
    with opened(path, **PROBES) as rig:
        rig.store(K[:4])
        path.rename(away)
        path.mkdir(mode=0o700)
        rig.store(K[8:12])
        rig.wait(lambda: rig.store(K[16:20]) == K[16:20])
        path.rename(tmp_path / "elsewhere")
        away.rename(path)
        rig.store(K[20:24])
        rig.wait(lambda: rig.store(K[24:28]) == K[24:28] and not rig.tier.recovering and rig.held(K[:4]) == K[:4])
        assert rig.load(K[:4]) == K[:4]


def test_a_directory_is_not_made_again_below_a_disk_that_is_not_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    path = disk / "kv"
    mounted = [disk]
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in mounted or Path(path) == Path("/"))
    store = LocalStore(path, GEOMETRY, CAPACITY)
    store.open()
    store.close()
    mounted.clear()
    shutil.rmtree(path)
    with pytest.raises(TemporaryStoreError, match="nothing is mounted at"):
        store.open()
    assert not path.exists()
    mounted.append(disk)
    store.open()
    store.close()


def test_a_disk_that_is_replaced_while_recovery_fails_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with opened(path) as rig:
        rig.store(K[:8])
    (path / CHECKPOINT_NAME).unlink()
    device = FaultyDevice()
    device.direct = False
    rig = LocalRig(path, files=device, **PROBES)  # type: ignore[arg-type]
    device.errors = {"read": errno.EMFILE}
    rig.tier.open(rig.context.clock() + 20)
    rig.wait(lambda: rig.tier._feed.failing)
    path.rename(tmp_path / "elsewhere")
    rig.wait(lambda: path.is_dir() and not rig.tier.recovering)
    device.errors.clear()
    rig.wait(lambda: rig.store(K[16:24]) == K[16:24])
    assert rig.load(K[16:24]) == K[16:24]
    assert rig.lookup(K[:8]) == 0
    rig.close()


# --------------------------------------------------------------------------------------------------------------- owners


def test_a_removed_lock_lets_no_second_owner_in_and_is_made_again(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        (tmp_path / LOCK_NAME).unlink()
        with pytest.raises(PermanentStoreError, match="is in use by"):
            DirectoryLock(tmp_path).acquire()
        rig.store(K[:2])
        rig.wait(lambda: (tmp_path / LOCK_NAME).exists() and (tmp_path / LOCK_NAME).read_text())
        with pytest.raises(PermanentStoreError, match=f"is in use by process {os.getpid()}"):
            DirectoryLock(tmp_path).acquire()


def test_an_owner_whose_lock_was_taken_stops_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, **PROBES) as rig:
        rig.store(K[:4])
        # In one step: the tier would create a removed lock file again.
        thief = os.open(tmp_path / "stolen", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(thief, fcntl.LOCK_EX)
            (tmp_path / "stolen").rename(tmp_path / LOCK_NAME)
            rig.store(K[4:8])
            rig.wait(lambda: not rig.tier.get_stats().available)
            assert rig.store(K[8:12]) == []
        finally:
            os.close(thief)
        rig.wait(lambda: rig.store(K[12:16]) == K[12:16])
        rig.wait(lambda: not rig.tier.recovering)
        assert rig.held(K[:4]) == K[:4]
    assert "lost its lock file, and is in use by" in caplog.text


# --------------------------------------------------------------------------------------------- what a file system lacks


class ReadOnly(Files):
    """A file system that is mounted read-only."""

    def __init__(self) -> None:
        self.read_only = True

    def open(self, path: Path, flags: int) -> int:
        if self.read_only and flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return super().open(path, flags)


def test_a_directory_on_a_read_only_disk_is_served_and_written_again_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:8])
    files = ReadOnly()
    monkeypatch.setattr("tiers.local.lock._FILES", files)
    rig = LocalRig(tmp_path, files=files, **PROBES)  # type: ignore[arg-type]
    rig.open()
    assert rig.load(K[:8]) == K[:8]
    assert rig.store(K[8:12]) == []
    assert rig.load(K[:8]) == K[:8]
    files.read_only = False
    rig.wait(lambda: rig.store(K[16:20]) == K[16:20])
    rig.wait(lambda: not rig.tier.recovering)
    assert rig.load(K[:8]) == K[:8]
    assert rig.tier.get_stats().blocks_lost == 0
    rig.close()


class ErrorState(FaultyDevice):
    """ext4 after an error of its device: files can be opened and access() agrees, but every write fails."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = dict.fromkeys(("write", "allocate", "rename", "unlink", "sync"), errno.EROFS)

    def truncate(self, fd: int, length: int) -> None:
        self._try("write", Path())
        _TRUNCATE(fd, length)


_TRUNCATE = os.ftruncate


def test_a_file_system_in_an_error_state_is_served_and_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:8])
    disk = ErrorState()
    openings: list[LocalStore] = []
    monkeypatch.setattr("tiers.local.lock.os.ftruncate", disk.truncate)
    open_store = LocalStore.open

    def counted(store: LocalStore) -> None:
        openings.append(store)
        open_store(store)

    monkeypatch.setattr(LocalStore, "open", counted)
    rig = LocalRig(tmp_path, files=disk, **PROBES)  # type: ignore[arg-type]
    rig.open()
    for _ in range(50):
        assert rig.load(K[:8]) == K[:8]
        assert rig.store(K[8:12]) == []
    assert (len(openings), rig.tier.get_stats().reopened) == (1, 0)
    assert len(caplog.records) < 12
    disk.errors.clear()
    rig.wait(lambda: rig.store(K[16:20]) == K[16:20])
    assert rig.tier.get_stats().reopened == 1
    rig.wait(lambda: rig.load(K[:8]) == K[:8])
    rig.close()


class NoReservation(FaultyDevice):
    """A file system without fallocate, such as ext2 and ext3."""

    def allocate(self, fd: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_segments_are_written_where_the_file_system_reserves_no_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, files=NoReservation()) as rig:
        geometry = rig.tier.store.geometry
        assert rig.store(K[:8]) == K[:8]
        assert rig.load(K[:8]) == K[:8]
        for path in segment_files(tmp_path):
            assert path.stat().st_blocks * 512 >= geometry.segment_bytes
    assert caplog.text.count("reserves no space") == 1


def test_a_directory_with_lost_and_found_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = tmp_path / "lost+found"
    lost.mkdir()
    scandir = os.scandir

    def refuse(path: str | Path) -> object:
        if str(path) == str(lost):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr("tiers.local.layout.os.scandir", refuse)
    with opened(tmp_path) as rig:
        assert rig.store(K[:4]) == K[:4]
    monkeypatch.undo()
    assert lost.is_dir()


def test_a_crowded_directory_is_opened_without_a_look_at_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:4])
    for number in range(2000):
        (tmp_path / f"stray-{number}").touch()
    counted: list[Path] = []

    def count(root: Path) -> int:
        counted.append(root)
        return used_bytes(root)

    monkeypatch.setattr("tiers.local.new_segments.used_bytes", count)
    store = LocalStore(tmp_path, rig.tier.store.geometry, rig.tier.store.capacity)
    store.open()
    assert counted == []
    assert store.remembered.segments
    store.tidy()
    assert counted == [tmp_path]
    store.close()


def test_the_first_segments_do_not_wait_for_a_count_of_very_many_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_segments, "COUNTED_AT_ONCE", 50)
    (tmp_path / "large").write_bytes(bytes(CAPACITY))
    with pytest.raises(OutOfSpaceError, match="holds other files"):
        LocalStore(tmp_path, GEOMETRY, CAPACITY).open()
    for number in range(100):
        (tmp_path / f"stray-{number}").touch()
    store = LocalStore(tmp_path, GEOMETRY, CAPACITY)
    store.open()
    assert store.fresh
    assert store.new_segments.add(SegmentPace(share=1.0)) is None
    store.close()


def test_a_disk_that_takes_no_writes_any_more_keeps_what_it_holds(tmp_path: Path) -> None:
    """A full copy-on-write disk refuses to overwrite even a slot that has been written before."""
    device = FaultyDevice()
    with opened(tmp_path, files=device) as rig:
        rig.wait(lambda: rig.tier.index.slots == rig.tier.store.geometry.num_slots)
        number = 0
        while rig.tier.index.blocks < rig.tier.index.slots:
            rig.store([key_of(1000 + number + position) for position in range(8)])
            number += 8
        held = rig.tier.index.blocks
        device.errors = {"write": errno.ENOSPC}
        for _ in range(100):
            rig.store([key_of(1000 + number + position) for position in range(8)])
            number += 8
        assert rig.tier.index.blocks >= held - 48
        assert rig.load([next(iter(rig.tier.index.held))])


def test_a_disk_with_room_for_some_of_the_first_segments_is_used_with_these(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = FaultyDevice()
    made: list[Path] = []

    def fail(operation: str, path: Path) -> None:
        if operation == "allocate":
            made.append(path)
            if len(made) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    device.fail = fail
    with opened(tmp_path, files=device) as rig:
        assert rig.store(K[:4]) == K[:4]
    assert "beginning with 1 segment(s)" in caplog.text


def test_a_disk_without_room_for_a_first_segment_is_told_with_what_it_has_and_what_it_takes(tmp_path: Path) -> None:
    device = FaultyDevice()
    device.errors = {"allocate": errno.ENOSPC}
    with pytest.raises(
        OutOfSpaceError, match=rf"first segment of {GEOMETRY.segment_bytes} bytes .* bytes are free; free some"
    ):
        LocalStore(tmp_path / "kv", GEOMETRY, CAPACITY, files=device).open()


# ------------------------------------------------------------------------------------------ other things in their place


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "socket"])
@pytest.mark.parametrize("name", [LOCK_NAME, CHECKPOINT_NAME, "documents/x", "segment"])
def test_nothing_but_a_plain_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    directory = tmp_path / "kv"
    store = LocalStore(directory, GEOMETRY, CAPACITY)
    store.open()
    store.write_document("x", b"ours")
    store.close()
    monkeypatch.chdir(directory)
    path = Path(GEOMETRY.segment_name(0) if name == "segment" else name)
    path.unlink(missing_ok=True)
    secret = tmp_path / "secret"
    secret.write_bytes(b"not ours")
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    if name == LOCK_NAME:
        with pytest.raises(PermanentStoreError, match="cannot lock"):
            store.open()
    elif name == CHECKPOINT_NAME:
        assert "cannot be read" in str(read_checkpoint(directory, GEOMETRY))
    else:
        store.open()
        if name == "segment":
            assert 0 not in store.segments.existing()
        else:
            with pytest.raises(PermanentStoreError, match="cannot read"):
                store.read_document("x")
        store.close()
    assert secret.read_bytes() == b"not ours"


def test_files_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "kv", GEOMETRY, CAPACITY)
    store.open()
    store.close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermanentStoreError, match="it belongs to user"):
        store.open()


def test_a_checkpoint_longer_than_any_of_this_shape_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT_NAME
    path.touch()
    os.truncate(path, 3 << 30)
    assert "are more than the" in str(read_checkpoint(tmp_path, GEOMETRY))


def test_a_document_longer_than_any_is_refused_unread(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "kv", GEOMETRY, CAPACITY)
    store.open()
    store.write_document("x", bytes(2 << 20))
    with pytest.raises(PermanentStoreError, match="are more than the"):
        store.read_document("x")
    store.close()


@pytest.mark.parametrize("name", [LOCK_NAME, "segment"])
def test_a_hard_link_is_not_written(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "kv"
    store = LocalStore(directory, GEOMETRY, CAPACITY)
    store.open()
    store.close()
    path = directory / (GEOMETRY.segment_name(0) if name == "segment" else name)
    path.unlink(missing_ok=True)
    precious = tmp_path / "precious"
    precious.write_bytes(b"not ours" * 1000)
    os.link(precious, path)
    if name == LOCK_NAME:
        with pytest.raises(PermanentStoreError, match="it is a hard link, one of 2 names"):
            store.open()
    else:
        store.open()
        store.close()
    assert precious.read_bytes() == b"not ours" * 1000


def test_a_segment_with_another_name_is_replaced_and_the_other_name_keeps_its_content(tmp_path: Path) -> None:
    """A copy by hard links (cp -al, rsnapshot) stays what it was."""
    directory = tmp_path / "kv"
    with opened(directory) as rig:
        assert rig.store(K[:8]) == K[:8]
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in directory.iterdir():
        if path.is_file() and path.name != LOCK_NAME:
            os.link(path, copy / path.name)
    assert len(list(copy.iterdir())) > len(segment_files(directory)), "the checkpoint and its marks, too"
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    with opened(directory) as rig:
        assert rig.held(K[:8]) == []
        assert rig.store(K[8:40]) == K[8:40]
        assert rig.load(K[8:40]) == K[8:40]
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_a_link_in_the_way_of_a_new_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"not ours")
    path = tmp_path / "file"
    path.with_name("file.new").symlink_to(target)
    Files().replace(path, [b"ours"])
    assert path.read_bytes() == b"ours"
    assert target.read_bytes() == b"not ours"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_may_write_gets_one_warning(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kv"
    path.mkdir()
    path.chmod(mode)
    store = LocalStore(path, GEOMETRY, CAPACITY)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            store.open()
            store.close()
    assert caplog.text.count("may be written by other users") == 1


@pytest.mark.parametrize("name", ["{}.bak", "{}0", "0{}", "slots-{}"])
def test_a_copy_of_a_segment_under_another_name_is_neither_used_nor_deleted(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as rig:
        rig.store(K[:4])
        segment = rig.location(rig.place(K[0]))[0]
    copy = tmp_path / name.format(segment.name)
    if name == "{}0":
        copy = segment.with_name(segment.name[:-6] + "0")
    shutil.copy2(segment, copy)
    with opened(tmp_path) as rig:
        assert rig.load(K[:4]) == K[:4]
        rig.tier.store.tidy()
    assert copy.exists()


def test_blocks_of_a_copied_segment_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_segments, "FIRST_BYTES", 0)
    with opened(tmp_path) as rig:
        rig.store(K[:8])
        geometry = rig.tier.store.geometry
    copy = tmp_path / geometry.segment_name(geometry.max_segments - 1)
    copy.unlink(missing_ok=True)
    shutil.copy2(tmp_path / geometry.segment_name(0), copy)
    with opened(tmp_path) as rig:
        assert rig.tier.index.blocks == 8
        assert rig.load(K[:8]) == K[:8]
        assert rig.tier.index.slots <= geometry.num_slots
