"""``gc``, ``clear`` and ``epoch new`` as processes of their own, on a terminal, and before a restart."""

from __future__ import annotations

import datetime
import errno
import json
import os
import pty
import select
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import Pool
from tests.cli.runner import ROOT, command, kv_tiering, process
from tests.fake_s3 import FakeS3
from tests.tiers.local.rig import LocalRig, opened
from tiering.admin import tier_admin
from tiering.admin.records import StoredBlock
from tiering.errors import TemporaryStoreError
from tiering.medium.files import Files
from tiering.testing.tier_tests import K
from tiers.local.checkpoint import CHECKPOINT_NAME
from tiers.object.command import ObjectAdmin

MakeLocal = Callable[..., LocalRig]
CTRL_C = b"\x03"


def held(disk: Path) -> int:
    found = json.loads(kv_tiering("inspect", disk, "--json").out)
    return sum(epoch["blocks"] for epoch in found["local"]["epochs"])


def filled(make_local: MakeLocal) -> str:
    """Fill a directory with 32 blocks, and return the namespace's name."""
    rig = make_local()
    rig.store(K)
    name: str = rig.context.namespace.directory
    rig.close()
    return name


def test_gc_in_a_process_of_its_own_counts_then_removes(disk: Path, make_local: MakeLocal) -> None:
    filled(make_local)
    dry = process("gc", disk, "--max-total", "1KiB")
    assert (dry.code, dry.err) == (3, "kv-tiering: dry run: nothing changed; repeat with --yes\n")
    assert dry.out.startswith("local\twould remove 32 of 32 blocks, ")
    assert held(disk) == 32
    done = process("gc", disk, "--max-total", "1KiB", "--yes")
    assert (done.code, done.err, done.out.partition(",")[0]) == (0, "", "local\tremoved 32 of 32 blocks")
    assert held(disk) == 0


def test_clear_in_a_process_of_its_own_removes_one_namespace(disk: Path, make_local: MakeLocal) -> None:
    name = filled(make_local)
    dry = process("clear", disk, "--namespace", name[:8])
    assert (dry.code, dry.out.partition(",")[0], held(disk)) == (3, "local\twould remove 32 of 32 blocks", 32)
    done = process("clear", disk, "--namespace", name[:8], "--yes")
    assert (done.code, done.err, done.out.partition(",")[0]) == (0, "", "local\tremoved 32 of 32 blocks")
    assert held(disk) == 0
    assert make_local().held(K) == []


def test_clear_all_also_removes_blocks_of_epochs_that_nothing_names_any_more(disk: Path, make_local: MakeLocal) -> None:
    filled(make_local)
    assert kv_tiering("epoch", "new", disk, "--all", "--yes").code == 0
    dry = kv_tiering("clear", disk, "--all")
    assert (dry.code, dry.out.partition(",")[0], held(disk)) == (3, "local\twould remove 32 of 32 blocks", 32)
    done = kv_tiering("clear", disk, "--all", "--yes")
    assert (done.code, done.out.partition(",")[0], held(disk)) == (0, "local\tremoved 32 of 32 blocks", 0)


def test_clear_all_counts_each_block_once(disk: Path, make_local: MakeLocal) -> None:
    filled(make_local)
    dry = kv_tiering("clear", disk, "--all")
    assert (dry.code, dry.out.partition(",")[0]) == (3, "local\twould remove 32 of 32 blocks")
    done = kv_tiering("clear", disk, "--all", "--yes")
    assert (done.code, done.out.partition(",")[0], held(disk)) == (0, "local\tremoved 32 of 32 blocks", 0)


def test_epoch_new_in_a_process_of_its_own_makes_the_next_start_empty(disk: Path, make_local: MakeLocal) -> None:
    name = filled(make_local)
    dry = process("epoch", "new", disk, "--namespace", name)
    assert (dry.code, dry.out) == (3, f"local\t{name[:8]} (model-a, bfloat16)\n")
    assert "dry run" in dry.err
    told = process("epoch", "new", disk, "--namespace", name, "--dry-run")
    assert (told.code, told.out, told.err) == (3, dry.out, dry.err)
    assert process("epoch", "new", disk, "--namespace", name, "--dry-run", "--yes").code == 2
    assert held(disk) == 32
    done = process("epoch", "new", disk, "--namespace", name, "--yes")
    assert (done.code, done.err) == (0, "")
    assert "the next engine that opens the directory begins empty" in done.out
    assert make_local().held(K) == []


@pytest.mark.parametrize("arguments", [("epoch", "new", "--all"), ("clear", "--all"), ("gc",), ("inspect",)])
def test_a_document_that_cannot_be_read_is_no_success(
    arguments: tuple[str, ...], tmp_path: Path, disk: Path, make_local: MakeLocal
) -> None:
    filled(make_local)
    (document,) = tmp_path.rglob("documents/epoch-*")
    document.rename(document.with_name("moved"))
    document.symlink_to("moved")
    word, *others = arguments
    done = kv_tiering(word, *others[:1], disk, *others[1:], *(() if word == "inspect" else ("--yes",)))
    assert (done.code, f"cannot read {document}" in done.err) == (1, True), done


def test_a_namespace_without_an_epoch_document_has_nothing_to_begin(
    tmp_path: Path, disk: Path, make_local: MakeLocal
) -> None:
    name = filled(make_local)
    (document,) = tmp_path.rglob("documents/epoch-*")
    document.unlink()
    done = kv_tiering("epoch", "new", disk, "--all", "--yes")
    assert (done.code, "a new epoch has begun" in done.out) == (0, False)
    assert f"{name[:8]}: has no epoch here, so there is nothing to begin" in done.out


def blocks_of(fake: FakeS3) -> list[str]:
    return fake.names("/blocks/")


@pytest.mark.parametrize("content", [b"garbage", b"host process 7 0a1b2c3d", b"\xff\x00"])
def test_clear_all_removes_nothing_while_a_lease_holds_it_off(content: bytes, pool: Pool) -> None:
    fake, stack, _ = pool
    fake.objects["prod/documents/gc-lease"] = content
    fake.modified["prod/documents/gc-lease"] = datetime.datetime.now(datetime.UTC)
    done = kv_tiering("clear", stack, "--all", "--yes", "--json")
    assert (done.code, len(blocks_of(fake))) == (1, 2)
    ours = b"process" in content
    assert ("another collection of" in done.err, "was written by another program" in done.err) == (ours, not ours)
    assert ours or "remove this object, or wait until 10 minutes after its last change" in done.err
    (found,) = json.loads(done.out).values()
    assert (found["removed_blocks"], found["removed_bytes"], found["dry_run"]) == (0, 0, False)
    assert "gc-lease" in found["error"] or "another collection" in found["error"]
    fake.modified["prod/documents/gc-lease"] -= datetime.timedelta(minutes=11)
    assert kv_tiering("clear", stack, "--all", "--yes").code == 0
    assert blocks_of(fake) == []


@pytest.mark.parametrize("as_json", [False, True])
def test_what_a_removal_that_failed_has_removed_is_reported(
    as_json: bool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, stack, _ = pool
    monkeypatch.setattr(tier_admin, "BATCH", 1)
    remove, calls = ObjectAdmin.remove, 0

    async def fail_once(self: ObjectAdmin, blocks: Sequence[StoredBlock]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise TemporaryStoreError("the service is away")
        await remove(self, blocks)

    monkeypatch.setattr(ObjectAdmin, "remove", fail_once)
    done = kv_tiering("clear", stack, "--all", "--yes", *(["--json"] if as_json else []))
    assert (done.code, len(blocks_of(fake))) == (1, 1)
    assert "s3: removed 1 blocks, " in done.err
    assert "s3: the service is away" in done.err
    if as_json:
        (found,) = json.loads(done.out).values()
        assert (found["removed_blocks"], found["error"]) == (1, "the service is away")
        assert found["removed_bytes"] > 0


def test_segments_that_were_removed_before_a_failure_are_reported(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "kv", capacity="4MiB", segment_size="128KiB") as rig:
        rig.store(K)
    unlink, calls = Files.unlink, 0

    def fail_second(self: Files, path: Path) -> None:
        nonlocal calls
        calls += "slots-" in path.name
        if calls == 2:
            raise OSError(errno.EIO, "Input/output error")
        unlink(self, path)

    monkeypatch.setattr(Files, "unlink", fail_second)
    done = kv_tiering("clear", disk, "--all", "--yes", "--json")
    assert done.code == 1
    left = json.loads(done.out)["local"]["removed_blocks"]
    assert (0 < left < 32, held(disk)) == (True, 32 - left)
    assert f"local: removed {left} blocks, " in done.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_an_epoch_of_another_users_directory_is_no_success(tmp_path: Path, disk: Path, make_local: MakeLocal) -> None:
    filled(make_local)
    for path in tmp_path.rglob("*"):
        os.chown(path, 12345, 12345)
    done = kv_tiering("epoch", "new", disk, "--all", "--yes")
    assert (done.code, "belongs to user 12345" in done.err, "run as that user" in done.err) == (1, True, True), done


@pytest.mark.parametrize(("answer", "left"), [(b"y\n", 0), (b"\n", 32), (CTRL_C, 32)])
def test_a_terminal_is_asked_before_anything_is_removed(
    answer: bytes, left: int, disk: Path, make_local: MakeLocal
) -> None:
    filled(make_local)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvp("env", ["env", "--default-signal=INT", *command("clear", disk, "--all")])
    seen = b""
    while b"[y/N]" not in seen:
        seen += os.read(terminal, 65536)
    os.write(terminal, answer)
    try:
        while True:
            # Ctrl-C at the very start of a read is noticed with the next key only, so it is pressed again.
            waits = answer == CTRL_C and b"interrupted" not in seen
            if waits and not select.select([terminal], [], [], 0.5)[0]:
                os.write(terminal, CTRL_C)
            else:
                seen += os.read(terminal, 65536)
    except OSError:  # Linux's end of a terminal
        pass
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (130 if answer == CTRL_C else 0), seen
    assert b"would remove 32 of 32 blocks" in seen
    assert b"Traceback" not in seen
    assert (b"\tremoved 32" in seen.replace(b"        ", b"\t") or left > 0, held(disk)) == (True, left)


def test_blocks_removed_by_gc_are_not_reported_lost_at_the_next_start(
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "kv", capacity="4MiB", segment_size="128KiB") as rig:
        rig.store(K)
    assert (tmp_path / "kv" / CHECKPOINT_NAME).exists()
    assert process("gc", disk, "--max-total", "260KiB", "--yes").code == 0
    with opened(tmp_path / "kv", capacity="4MiB", segment_size="128KiB") as rig:
        left = rig.held(K)
        assert 0 < len(left) == held(disk) < 32
        assert rig.load(left) == left
        assert rig.tier.stats.blocks_lost == 0
    assert [record.message for record in caplog.records if "lost" in record.message] == []


def test_gc_of_an_abandoned_epoch_leaves_the_checkpoint(disk: Path, tmp_path: Path, make_local: MakeLocal) -> None:
    filled(make_local)
    assert kv_tiering("epoch", "new", disk, "--all", "--yes").code == 0
    rig = make_local()
    rig.close()
    assert process("gc", disk, "--yes").out.startswith("local\tremoved 32")
    assert (tmp_path / "kv" / CHECKPOINT_NAME).exists(), "the next start need not read all headers"


def test_a_process_that_is_asked_for_nothing_removes_nothing(disk: Path, make_local: MakeLocal) -> None:
    filled(make_local)
    done = subprocess.run(
        command("clear", disk, "--all"), cwd=ROOT, input="y\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, held(disk)) == (3, 32), "a yes in a pipe is no agreement"
