"""``adopt`` gives directories of engines to the service of their machine, and removes the others."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import ROOT, Done, command, kv_tiering, process
from tests.machine.engines import SmallEngine
from tests.machine.hosts import ServiceProcess, service_process
from tests.machine.users import ANNA, needs_root
from tiering.errors import StoreError
from tiering.medium.files import Files
from tiers.local.lock import DirectoryLock

FEW, MANY = list(range(4)), list(range(40, 60))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def service(disk: Path) -> dict[str, object]:
    return {"type": "local", "path": str(disk), "capacity": "16MiB"}


@pytest.fixture
def stack(tmp_path: Path, service: dict[str, object]) -> Path:
    path = tmp_path / "stack.json"
    path.write_text(json.dumps({"primary": {"capacity": "64MiB"}, "secondary": [service]}))
    return path


def filled(path: Path, numbers: list[int], name: str = "model", capacity: str = "16MiB") -> Path:
    """Let an engine with a directory of its own store blocks there."""
    engine = SmallEngine(None, name=name, secondary=[{"type": "local", "path": str(path), "capacity": capacity}])
    assert engine.settle(lambda: engine.stat("available") == 1)
    engine.store(numbers)
    assert engine.stored()
    engine.close()
    return path


def found_by_a_service(tmp_path: Path, service: dict[str, object], name: str = "model") -> tuple[list[int], list[int]]:
    place = tmp_path / f"service-{name}"
    place.mkdir()
    with service_process(place, service) as running:
        engine = SmallEngine(running.socket, name=name)
        assert engine.serving()
        found = engine.load([*FEW, *MANY])
        engine.close()
        assert running.end() == 0
    return found


@pytest.mark.parametrize("form", ["replicas", "paths", "one"])
def test_the_fullest_directory_becomes_the_services_and_the_others_go(
    tmp_path: Path, disk: Path, stack: Path, service: dict[str, object], form: str
) -> None:
    full = {"replicas": disk / "replica-1", "paths": tmp_path / "b", "one": disk}[form]
    filled(full, MANY)
    old = {"replicas": [disk / "replica-0", full], "paths": [tmp_path / "a", full], "one": [full]}[form]
    for other in old[:-1]:
        filled(other, FEW, capacity="1MiB")
    roots = [disk] if form == "replicas" else old
    dry = kv_tiering("adopt", stack, *roots)
    assert (dry.code, dry.err) == (3, "kv-tiering: dry run: nothing changed; repeat with --yes\n")
    assert dry.out.count("becomes") == 1
    assert dry.out.count("is removed") == len(old) - 1
    assert all(path.exists() for path in old)
    done = kv_tiering("adopt", stack, *roots, "--yes")
    assert (done.code, done.err, done.out) == (0, "", dry.out)
    assert [path.name[:8] for path in disk.iterdir()] == ["replica-"]
    assert not any((path / "lock").exists() for path in old)
    again = kv_tiering("adopt", stack, *roots, "--yes")
    assert (again.code, again.out) == (0, "")
    assert found_by_a_service(tmp_path, service) == (MANY, [])


def test_blocks_of_other_models_go_to_places_of_their_own(
    tmp_path: Path, disk: Path, stack: Path, service: dict[str, object]
) -> None:
    filled(disk / "replica-0", MANY)
    filled(disk / "replica-1", FEW, "other")
    assert kv_tiering("adopt", stack, disk, "--yes").out.count("becomes") == 2
    assert found_by_a_service(tmp_path, service) == (MANY, [])
    assert found_by_a_service(tmp_path, service, "other")[0] == FEW


def test_what_an_engine_or_the_service_holds_stays(
    tmp_path: Path, disk: Path, stack: Path, service: dict[str, object]
) -> None:
    filled(disk / "replica-0", FEW)
    running: ServiceProcess
    with service_process(tmp_path, service) as running:
        engine = SmallEngine(running.socket)
        assert engine.serving()
        engine.store(MANY)
        assert engine.stored()
        owner = SmallEngine(None, secondary=[{"type": "local", "path": str(disk / "replica-1"), "capacity": "16MiB"}])
        assert owner.settle(lambda: owner.stat("available") == 1)
        done = kv_tiering("adopt", stack, disk, "--yes", "--json")
        fates = {Path(one["place"]).name: one["fate"] for one in json.loads(done.out)["local"]}
        assert fates["replica-0"] == "is removed"  # the service has blocks of its own
        assert fates["replica-1"].startswith(f"stays: in use by process {os.getpid()} ")
        assert len(fates) == 2
        engine.forget_rows()
        assert engine.load(MANY) == (MANY, [])
        owner.store(FEW)
        assert owner.stored()
        owner.close()
        engine.close()


def test_files_of_somebody_else_stay(disk: Path, stack: Path) -> None:
    filled(disk, FEW)
    (disk / "notes").write_text("mine")
    (disk / "documents-of-mine").mkdir()
    assert kv_tiering("adopt", stack, disk, "--yes").code == 0
    left = {path.name for path in disk.iterdir() if not path.name.startswith("replica-")}
    assert left == {"notes", "documents-of-mine"}
    assert (disk / "notes").read_text() == "mine"


def test_a_move_that_was_cut_off_is_ended_by_the_next_call(
    tmp_path: Path, disk: Path, stack: Path, service: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(disk / "replica-0", MANY)
    filled(disk / "replica-1", FEW, capacity="12MiB")  # has more than what the move leaves behind
    rename = Files.rename
    moved: list[Path] = []

    def cut(self: Files, source: Path, target: Path) -> None:
        if len(moved) == 4:
            raise StoreError("killed")
        moved.append(source)
        rename(self, source, target)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "rename", cut)
        assert kv_tiering("adopt", stack, disk, "--yes").code == 1
    assert kv_tiering("adopt", stack, disk, "--yes").code == 0
    assert found_by_a_service(tmp_path, service) == (MANY, [])


def test_another_file_system_is_named(disk: Path, stack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(disk, FEW)

    def refuse(self: Files, source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Files, "rename", refuse)
    assert kv_tiering("adopt", stack, disk, "--yes").out.rstrip().endswith("is on another file system")
    assert (disk / "documents").exists()


def test_a_terminal_is_asked(disk: Path, stack: Path) -> None:
    filled(disk, FEW)
    main, side = pty.openpty()
    with subprocess.Popen(command("adopt", stack, disk), cwd=ROOT, stdin=side, stdout=side, stderr=side) as process:
        os.write(main, b"y\n")
        assert process.wait(60) == 0
    os.close(side)
    os.close(main)
    assert not (disk / "documents").exists()


def test_a_tier_without_directories_says_so(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    path.write_text(
        json.dumps({"primary": {"capacity": "1MiB"}, "secondary": [{"type": "memory", "capacity": "1MiB"}]})
    )
    done = kv_tiering("adopt", path, tmp_path)
    assert (done.code, done.err) == (1, "kv-tiering: memory: the tier memory has no directory of each engine's own\n")
    assert kv_tiering("adopt", path, tmp_path, "--yes", "--dry-run").code == 2


@pytest.mark.parametrize("form", ["directory", "documents"])
def test_links_lead_the_command_to_no_files_elsewhere(tmp_path: Path, disk: Path, stack: Path, form: str) -> None:
    filled(disk / "replica-0", MANY)
    elsewhere = filled(tmp_path / "elsewhere", FEW, capacity="1MiB")
    (elsewhere / "documents" / "letter").write_text("mine")
    if form == "directory":
        (disk / "replica-1").symlink_to(elsewhere)
    else:
        (disk / "replica-1").mkdir()
        (disk / "replica-1" / "documents").symlink_to(elsewhere / "documents")
    before = sorted(elsewhere.rglob("*"))
    done = kv_tiering("adopt", stack, disk, "--yes")
    link = disk / "replica-1" if form == "directory" else disk / "replica-1" / "documents"
    assert f"{disk}/replica-1 stays: {link} is a symbolic link\n" in done.out
    assert (done.code, done.out.count("becomes"), done.out.count("is removed")) == (0, 1, 0)
    assert sorted(elsewhere.rglob("*")) == before


def at_the_lock(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen once, when the command has made its plan and takes its first lock."""
    acquire = DirectoryLock.acquire

    def late(self: DirectoryLock) -> None:
        monkeypatch.undo()
        act()
        acquire(self)

    monkeypatch.setattr(DirectoryLock, "acquire", late)


def test_of_two_calls_at_once_one_moves_each_directory(
    tmp_path: Path, disk: Path, stack: Path, service: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(disk / "replica-0", MANY)
    filled(disk / "replica-1", FEW, capacity="1MiB")
    first: list[Done] = []
    at_the_lock(monkeypatch, lambda: first.append(process("adopt", stack, disk, "--yes")))
    second = kv_tiering("adopt", stack, disk, "--yes")
    assert (first[0].code, first[0].out.count("becomes"), first[0].out.count("is removed")) == (0, 1, 1)
    assert (second.code, second.err) == (0, "")
    assert second.out.count("is gone: another call has moved or removed it") == 2
    assert found_by_a_service(tmp_path, service) == (MANY, [])


def test_a_call_while_another_one_moves_leaves_all_alone(
    tmp_path: Path, disk: Path, stack: Path, service: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(disk / "replica-0", MANY)
    filled(disk / "replica-1", FEW, capacity="1MiB")
    rename = Files.rename
    other: list[Done] = []

    def renamed(self: Files, source: Path, target: Path) -> None:
        rename(self, source, target)
        if not other:
            other.append(Done(-1, "", ""))
            other.append(process("adopt", stack, disk, "--yes"))

    monkeypatch.setattr(Files, "rename", renamed)
    assert kv_tiering("adopt", stack, disk, "--yes").out.count("becomes") == 1
    assert (other[1].code, other[1].err) == (0, "")
    assert "is removed" not in other[1].out
    assert other[1].out.count("stays: ") == 2
    assert found_by_a_service(tmp_path, service) == (MANY, [])


def test_blocks_that_a_service_has_stored_since_the_plan_are_not_mixed_with_others(
    tmp_path: Path, disk: Path, stack: Path, service: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(disk / "replica-0", MANY)

    def serve() -> None:
        with service_process(tmp_path, service) as running:
            engine = SmallEngine(running.socket)
            assert engine.serving()
            engine.store(FEW)
            assert engine.stored()
            engine.close()
            assert running.end() == 0

    at_the_lock(monkeypatch, serve)
    done = kv_tiering("adopt", stack, disk, "--yes")
    assert (done.code, done.out.count("was changed meanwhile; repeat the command")) == (0, 1)
    assert (disk / "replica-0" / "documents").exists()
    assert found_by_a_service(tmp_path, service) == (FEW, [])


def test_a_service_that_was_started_too_early_and_has_stored_nothing_costs_no_directory(
    tmp_path: Path, disk: Path, stack: Path, service: dict[str, object]
) -> None:
    filled(disk / "replica-0", MANY)
    filled(disk / "replica-1", FEW, capacity="1MiB")
    with service_process(tmp_path, service) as running:
        engine = SmallEngine(running.socket)
        assert engine.serving()
        beside = kv_tiering("adopt", stack, disk, "--yes")
        assert (beside.code, beside.out.count("stays: "), beside.out.count("in use by process")) == (0, 2, 2)
        engine.close()
        assert running.end() == 0
    done = kv_tiering("adopt", stack, disk, "--yes")
    assert (done.code, done.out.count("becomes"), done.out.count("is removed")) == (0, 1, 1)
    assert found_by_a_service(tmp_path, service) == (MANY, [])


def test_a_service_that_starts_while_a_directory_moves_waits_for_it(
    tmp_path: Path, disk: Path, stack: Path, service: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(disk / "replica-0", MANY)
    rename = Files.rename
    engines: list[SmallEngine] = []
    with service_process(tmp_path, service) as running:

        def renamed(self: Files, source: Path, target: Path) -> None:
            rename(self, source, target)
            if not engines:
                engines.append(SmallEngine(running.socket))
                tier: Any = engines[0].manager.secondary_tiers[0]
                assert engines[0].settle(lambda: bool(tier.service))

        monkeypatch.setattr(Files, "rename", renamed)
        assert kv_tiering("adopt", stack, disk, "--yes").out.count("becomes") == 1
        (engine,) = engines
        assert engine.serving()
        assert engine.load([*FEW, *MANY]) == (MANY, [])
        engine.close()


def test_an_engine_that_opens_the_fullest_directory_keeps_it_and_the_next_is_not_removed(
    disk: Path, stack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(disk / "replica-0", MANY)
    filled(disk / "replica-1", FEW, capacity="1MiB")
    lock = DirectoryLock(disk / "replica-0")
    at_the_lock(monkeypatch, lock.acquire)
    done = kv_tiering("adopt", stack, disk, "--yes")
    lock.release()
    assert (done.code, done.out.count("stays: "), done.out.count("becomes"), "removed" in done.out) == (0, 1, 1, False)
    assert (disk / "replica-0" / "documents").exists()


@needs_root
def test_directories_of_other_users_stay(disk: Path, stack: Path) -> None:
    for path in (filled(disk / "replica-0", MANY), filled(disk / "replica-1", FEW, capacity="1MiB")):
        for each in (path, *path.rglob("*")):
            os.chown(each, ANNA if path.name == "replica-0" else 0, 0)
    done = kv_tiering("adopt", stack, disk, "--yes")
    assert f"replica-0 stays: it belongs to user {ANNA}, and this process runs as user 0\n" in done.out
    assert (done.code, done.out.count("becomes"), done.out.count("is removed")) == (0, 1, 0)
    assert (disk / "replica-0" / "documents").exists()


def test_a_directory_that_is_named_twice_is_moved_once(tmp_path: Path, disk: Path, stack: Path) -> None:
    filled(disk / "replica-0", MANY)
    (tmp_path / "link").symlink_to(disk / "replica-0")
    done = kv_tiering("adopt", stack, disk, disk / "replica-0", tmp_path / "link", "--yes")
    assert (done.code, done.err, done.out.count("becomes"), done.out.count("\n")) == (0, "", 1, 1)


def test_names_that_no_engine_gives_a_replica_are_not_read(disk: Path, stack: Path) -> None:
    filled(disk / "replica-0\n\x1b[2J", FEW)
    assert (done := kv_tiering("adopt", stack, disk, "--yes")).code == 0
    assert done.out == ""


def test_a_link_in_the_place_of_the_services_directory_takes_no_files(tmp_path: Path, disk: Path, stack: Path) -> None:
    filled(disk / "replica-0", MANY)
    target = kv_tiering("adopt", stack, disk).out.split("becomes ")[1].rstrip()
    (tmp_path / "elsewhere").mkdir()
    Path(target).symlink_to(tmp_path / "elsewhere")
    done = kv_tiering("adopt", stack, disk, "--yes")
    assert done.out.count("stays: ") == 2, done.out  # the link itself is below the directory
    assert [*(tmp_path / "elsewhere").iterdir()] == []
