"""``check`` finds each kind of defect in stacks, and disturbs nothing."""

from __future__ import annotations

import datetime
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.conftest import WriteStack
from tests.cli.runner import kv_tiering, process
from tests.fake_s3 import FakeS3
from tests.servers import RawBucket, S3Endpoint, rclone_server
from tests.tiers.local.rig import LocalRig
from tiering.admin.records import Finding, Severity
from tiering.admin.tier_admin import TierAdmin
from tiering.block_tier.definition import TierDefinition
from tiering.cli import check as check_module
from tiering.cli import machine
from tiering.cli.driver import TierDriver
from tiering.config.stack_file import StackConfig
from tiering.medium.files import Files
from tiering.testing.tier_tests import K
from tiers.local import probes
from tiers.local.local_options import LocalOptions
from tiers.memory import MEMORY_TIER
from tiers.object.s3.settings import clock_skew

Use = Callable[[Any], None]
BLOCK = "64KiB"


class Report(NamedTuple):
    """The report of a run of ``check``."""

    code: int
    findings: dict[tuple[str, str], dict[str, str]]

    def severity(self, tier: str, subject: str) -> str:
        return self.findings[tier, subject]["severity"]

    def text(self, tier: str, subject: str) -> str:
        found = self.findings[tier, subject]
        return f"{found['text']} -> {found['remedy']}"


def check(stack: Path, *words: str) -> Report:
    done = kv_tiering("check", stack, "--json", "--block-bytes", BLOCK, *words)
    assert done.err == ""
    found = json.loads(done.out)
    assert found["ok"] == (done.code == 0)
    return Report(done.code, {(item["tier"], item["subject"]): item for item in found["findings"]})


def local(path: Path, **words: object) -> dict[str, object]:
    return {"type": "local", "path": str(path), "capacity": "64MiB"} | words


def s3(bucket: str, endpoint: str, **words: object) -> dict[str, object]:
    return {"type": "s3", "bucket": bucket, "endpoint_url": endpoint, "prefix": "prod"} | words


# ---------------------------------------------------------------------------------------------------------- the machine


def test_a_sound_stack_passes_and_nothing_is_left_behind(write_stack: WriteStack, tmp_path: Path) -> None:
    stack = write_stack({"type": "memory", "capacity": "8MiB"}, local(tmp_path / "kv"))
    report = check(stack)
    assert report.code == 0
    assert "identical" in report.text("memory", "round trip")
    assert "identical" in report.text("local", "round trip")
    assert [path.name for path in tmp_path.iterdir()] == ["stack.yaml"]


def test_blocks_that_come_back_with_other_bytes_are_an_error(
    write_stack: WriteStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = TierDriver.move

    def flipping(driver: TierDriver, keys: Any, rows: Any, *, load: bool, timeout: float) -> Any:
        done = move(driver, keys, rows, load=load, timeout=timeout)
        driver.rows[rows[0], 0] ^= load
        return done

    monkeypatch.setattr(TierDriver, "move", flipping)
    report = check(write_stack({"type": "memory"}))
    assert (report.code, report.severity("memory", "round trip")) == (1, "error")
    assert "they differ" in report.text("memory", "round trip")


def test_on_pipes_each_finding_is_a_line_of_words_between_tabs(write_stack: WriteStack, tmp_path: Path) -> None:
    done = process("check", write_stack(local(tmp_path / "kv")), "--block-bytes", BLOCK)
    assert done.code == 0
    lines = [line.split("\t") for line in done.out.splitlines()]
    assert ["local", "ok", "round trip"] in [line[:3] for line in lines]


def test_an_invalid_stack_is_refused_before_anything_is_probed(write_stack: WriteStack, tmp_path: Path) -> None:
    done = kv_tiering("check", write_stack(local(tmp_path / "kv", capacty="1GiB")))
    assert (done.code, done.out) == (2, "")
    assert "did you mean capacity?" in done.err
    assert kv_tiering("check", tmp_path / "none.yaml").code == 2
    assert not (tmp_path / "kv").exists()


def test_a_tier_that_the_stack_does_not_have_is_refused(write_stack: WriteStack) -> None:
    done = kv_tiering("check", write_stack({"type": "memory"}), "--tier", "s3")
    assert (done.code, done.err) == (2, "kv-tiering: --tier: the stack has no tier 's3'; it has memory\n")


def test_a_primary_tier_that_no_machine_has_room_for(write_stack: WriteStack) -> None:
    report = check(write_stack(capacity="1PiB"))
    assert (report.code, report.severity("primary", "memory")) == (1, "error")
    assert "lower primary.capacity" in report.text("primary", "memory")


def test_too_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    (found,) = machine._probe_shared_memory(free * 2, tmp_path)
    assert (found.severity, "--shm-size" in found.remedy) == (Severity.WARNING, True)


def test_blocks_larger_than_the_primary_tier(write_stack: WriteStack) -> None:
    done = kv_tiering("check", write_stack(capacity="1MiB"), "--json", "--block-bytes", "2MiB")
    found = {item["subject"]: item["severity"] for item in json.loads(done.out)["findings"]}
    assert (done.code, found["capacity"]) == (1, "error")


def stack_findings(*tiers: dict[str, object], block: int = 4096, **words: object) -> dict[str, Finding]:
    words = {"primary": {"capacity": "8MiB"}, "secondary": list(tiers)} | words
    return {item.subject: item for item in machine.probe_machine(StackConfig.model_validate(words), block)}


@pytest.mark.parametrize(
    ("users", "parts", "is_short"), [((), 2, False), ((61001, 61002), 4, False), ((61001,), 1, True)]
)
def test_a_disk_has_room_for_the_capacity_of_each_user_of_a_service(
    tmp_path: Path, users: tuple[int, ...], parts: int, is_short: bool
) -> None:
    found = os.statvfs(tmp_path)
    capacity = found.f_blocks * found.f_frsize // parts - 4096
    findings = stack_findings(local(tmp_path / "not" / "made", capacity=capacity), users=users)
    assert ("capacity of local" in findings) == is_short
    if is_short:
        assert "for each of 2 users are" in findings["capacity of local"].text
        assert findings["capacity of local"].severity is Severity.WARNING


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_tier_below_one_block_is_one_error(kind: str, write_stack: WriteStack, tmp_path: Path) -> None:
    words = {"type": "memory", "capacity": "32KiB"} if kind == "memory" else local(tmp_path / "kv", capacity="32KiB")
    done = kv_tiering("check", write_stack(words), "--json", "--block-bytes", BLOCK)
    errors = [item for item in json.loads(done.out)["findings"] if item["severity"] == "error"]
    assert [(item["tier"], item["subject"]) for item in errors] == [(kind, "capacity")]
    assert errors[0]["remedy"].startswith("raise the capacity (a unit may be missing: 8GiB, not 8)")


def test_a_profile_that_does_not_exist(
    write_stack: WriteStack, bucket: RawBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check(write_stack(s3(bucket.name, "http://127.0.0.1:9", profile="nope")))
    assert report.severity("s3", "credentials") == "error"
    assert report.text("s3", "credentials").endswith("-> correct profile, AWS_PROFILE or ~/.aws/config")


@pytest.mark.parametrize(("capacity", "told"), [("4MiB", True), ("8MiB", True), ("16MiB", False)])
def test_capacities_that_may_be_swapped(capacity: str, told: bool, tmp_path: Path) -> None:
    found = stack_findings(local(tmp_path, capacity=capacity))
    assert ("capacity of local" in found) is told
    if told:
        assert found["capacity of local"].severity is Severity.WARNING
        assert "if the two capacities were swapped, swap them back" in found["capacity of local"].remedy


@pytest.mark.parametrize(
    ("cache", "inclusion", "told"),
    [("6MiB", "inclusive", True), ("5MiB", "inclusive", False), ("6MiB", "exclusive", False)],
)
def test_an_inclusive_cpu_tier_below_one_and_a_half_of_the_engines_cache(
    cache: str, inclusion: str, told: bool, write_stack: WriteStack
) -> None:
    stack = write_stack(primary={"capacity": "8MiB", "inclusion": inclusion})
    found = json.loads(kv_tiering("check", stack, "--json", "--device-cache", cache).out)["findings"]
    remedies = [item["remedy"] for item in found if item["subject"] == "inclusion"]
    assert remedies == ["set primary.inclusion: exclusive, or raise primary.capacity"] * told
    lost = [item["text"] for item in found if item["subject"] == "exclusive"]
    assert [text.partition(" is lost ")[0] for text in lost] == ["what only the engine's own cache holds"] * (
        inclusion == "exclusive"
    )


@pytest.mark.parametrize(("least", "prefetch", "told"), [(256, "1MiB", 0), (257, "1MiB", 1), (257, None, 0)])
def test_a_tier_that_asks_for_longer_prefixes_than_a_prefetch_looks_at(
    least: int, prefetch: object, told: int, write_stack: WriteStack, tmp_path: Path
) -> None:
    stack = write_stack(local(tmp_path, min_prefix_blocks=least), hints={"prefetch": prefetch})
    found = json.loads(kv_tiering("check", stack, "--json").out)["findings"]
    remedies = [item["remedy"] for item in found if item["subject"] == "prefetches from local"]
    assert remedies == ["lower secondary[0].min_prefix_blocks to 256, or leave hints.prefetch out"] * told


def test_a_tier_is_compared_with_the_largest_one_before_it(tmp_path: Path) -> None:
    found = stack_findings({"type": "memory", "capacity": "64MiB"}, local(tmp_path, capacity="32MiB"))
    assert "the tier memory before it has 64 MiB" in found["capacity of local"].text


def test_watermarks_that_are_swapped_are_refused_with_a_hint(write_stack: WriteStack, tmp_path: Path) -> None:
    done = kv_tiering("check", write_stack(local(tmp_path, low_watermark=0.9, high_watermark=0.5)))
    assert (done.code, "swap the two values" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "subject", "text"),
    [
        (
            {"retries": {"backoff": "5s", "backoff_max": "1s"}},
            "retries.backoff",
            "5 s is above retries.backoff_max, 1 s",
        ),
        ({"breaker": {"probe_after": "10min"}}, "breaker.probe_after", "10 min is above breaker.probe_max, 60 s"),
    ],
)
def test_a_wait_that_begins_above_its_bound(
    words: dict[str, object], subject: str, text: str, write_stack: WriteStack
) -> None:
    report = check(write_stack({"type": "memory", **words}), "--no-round-trip")
    assert (report.code, report.severity("memory", subject)) == (0, "warning")
    assert report.text("memory", subject).startswith(f"{text} -> swap the two values, or raise ")


@pytest.mark.parametrize(
    ("place", "severity", "text"),
    [
        ("traces", Severity.OK, "traces take up to 4 MiB"),
        ("file/traces", Severity.ERROR, "no traces can be recorded"),
        ("/proc/traces", Severity.ERROR, "the file system of /proc stores no files"),
    ],
)
def test_the_directory_of_traces(place: str, severity: Severity, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = stack_findings(record_trace={"path": str(tmp_path / place), "max_size": "1MiB"})["record_trace"]
    assert (found.severity, text in found.text) == (severity, True), found
    assert bool(found.remedy) == (severity is Severity.ERROR)
    assert not (tmp_path / "traces").exists()


def test_the_word_events_is_a_note_as_engines_refuse_it() -> None:
    found = stack_findings(events=True)["events"]
    assert (found.severity, "vLLM, SGLang and LMCache refuse the word" in found.text) == (Severity.INFO, True)
    assert "events" not in stack_findings()


def test_a_slow_tier_before_a_fast_one_is_a_warning(tmp_path: Path) -> None:
    stack = StackConfig.model_validate(
        {"primary": {"capacity": "1MiB"}, "secondary": [s3("kv-cache", "http://127.0.0.1:1"), local(tmp_path)]}
    )
    found = {finding.subject: finding.severity for finding in machine.probe_machine(stack, 4096)}
    assert found["order"] is Severity.WARNING


def test_warnings_fail_a_strict_check_only(
    write_stack: WriteStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "probe_direct", lambda *_args, **_words: False)
    stack = write_stack(local(tmp_path / "kv"))
    report = check(stack)
    assert (report.code, report.severity("local", "O_DIRECT")) == (0, "warning")
    assert check(stack, "--strict").code == 1


# ------------------------------------------------------------------------------------------------------------ directory


def test_a_path_that_is_a_file(write_stack: WriteStack, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    report = check(write_stack(local(tmp_path / "kv")))
    assert (report.code, report.severity("local", "directory")) == (1, "error")


def test_a_capacity_below_one_block(write_stack: WriteStack, tmp_path: Path) -> None:
    report = check(write_stack(local(tmp_path / "kv", capacity="64KiB")))
    assert (report.code, report.severity("local", "capacity")) == (1, "error")


def test_a_capacity_above_the_disk(write_stack: WriteStack, tmp_path: Path) -> None:
    report = check(write_stack(local(tmp_path / "kv", capacity="1EiB")))
    assert (report.code, report.severity("local", "free space")) == (1, "error")
    assert "lower capacity" in report.text("local", "free space")


def local_findings(path: Path) -> dict[str, Finding]:
    options = LocalOptions(type="local", path=str(path), capacity=64 << 20)
    return {item.subject: item for item in probes.probe_directory(options, path, 65536, Files())}


def test_a_path_below_a_directory_that_the_user_may_not_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(self: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "exists", exists)
    found = local_findings(tmp_path / "kv")["directory"]
    assert (found.severity, found.text) == ("error", f"{tmp_path / 'kv'} cannot be used: Permission denied")
    assert "x on those above" in found.remedy


def test_a_link_that_leads_nowhere_is_one_error(write_stack: WriteStack, tmp_path: Path) -> None:
    (tmp_path / "kv").symlink_to(tmp_path / "gone")
    report = check(write_stack(local(tmp_path / "kv")))
    assert report.code == 1
    assert [subject for tier, subject in report.findings if tier == "local"] == ["capacity", "directory"]
    assert "leads nowhere -> correct the link" in report.text("local", "directory")


def test_a_path_with_too_long_a_name_is_one_error_without_talk_of_rights(
    write_stack: WriteStack, tmp_path: Path
) -> None:
    report = check(write_stack(local(tmp_path / ("a" * 300))))
    assert [subject for tier, subject in report.findings if tier == "local"] == ["capacity", "directory"]
    assert report.text("local", "directory").endswith("File name too long -> choose another path")


@pytest.mark.parametrize(
    ("name", "severity"), [("lock", "error"), ("slots-69632-15-000000", "warning"), ("checkpoint", "warning")]
)
def test_a_directory_in_the_place_of_a_file_of_the_tier(
    name: str, severity: str, write_stack: WriteStack, tmp_path: Path
) -> None:
    (tmp_path / "kv" / name).mkdir(parents=True)
    report = check(write_stack(local(tmp_path / "kv")), "--no-round-trip")
    assert report.severity("local", "files") == severity
    assert f"{name} is no plain file" in report.text("local", "files")
    assert report.code == int(severity == "error")


def test_a_checkpoint_that_is_a_link_is_a_warning(write_stack: WriteStack, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / "kv" / "checkpoint").symlink_to(tmp_path / "elsewhere")
    report = check(write_stack(local(tmp_path / "kv")), "--no-round-trip")
    assert report.severity("local", "files") == "warning"
    assert "checkpoint is no plain file: a start reads the headers of all blocks" in report.text("local", "files")


@pytest.mark.parametrize("made", [True, False])
def test_one_directory_under_two_names_is_an_error(made: bool, write_stack: WriteStack, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    if made:
        (tmp_path / "disk" / "kv").mkdir()
    tiers = [local(tmp_path / place / "kv", name=place) for place in ("disk", "link")]
    report = check(write_stack(*tiers), "--no-round-trip")
    assert report.code == 1
    assert "is the same directory as" in kv_tiering("check", tmp_path / "stack.yaml", "--no-round-trip").out
    assert [tier for (tier, _), item in report.findings.items() if item["severity"] == "error"] == ["link"]


def test_one_directory_mounted_twice_is_an_error(
    write_stack: WriteStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bind mount has another path, and the device and inode of the directory."""
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    monkeypatch.setattr(Path, "samefile", lambda self, other: True)
    done = kv_tiering("check", write_stack(*(local(tmp_path / p, name=p) for p in "ab")), "--no-round-trip")
    assert (done.code, f"{tmp_path / 'b'} is the same directory as {tmp_path / 'a'}" in done.out) == (1, True)


def test_a_directory_within_another_tiers_by_a_link_is_an_error(write_stack: WriteStack, tmp_path: Path) -> None:
    (tmp_path / "disk" / "kv").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    stack = write_stack(local(tmp_path / "disk" / "kv", name="in"), local(tmp_path / "link", name="out"))
    done = kv_tiering("check", stack, "--no-round-trip")
    assert (done.code, "contains the other: an engine runs without this tier" in done.out) == (1, True)


def test_a_file_that_another_user_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "lock")
    assert "may not be read and written by user" in local_findings(tmp_path)["files"].text


def test_files_on_a_read_only_disk_need_not_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").write_text("")
    monkeypatch.setattr(os, "statvfs", lambda path: Room(f_flag=os.ST_RDONLY))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr(Files, "size_of_disk", lambda self, path: 1 << 40)
    found = local_findings(tmp_path)
    assert "files" not in found
    assert found["writable"].severity == "error"


def test_a_disk_without_room_for_a_scratch_place_is_a_warning(
    write_stack: WriteStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = write_stack(local(tmp_path / "kv"))
    monkeypatch.setattr(check_module, "_LEAST_SCRATCH", 1 << 60)
    report = check(stack)
    assert (report.code, report.severity("local", "round trip")) == (0, "warning")
    assert "no block was moved: the scratch place needs" in report.text("local", "round trip")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_needs_room_and_no_permission(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> bool:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(probes, "probe_direct", full)
    found = local_findings(tmp_path)["directory"]
    assert (found.severity, found.remedy) == ("error", "free some space, or raise the quota")


@pytest.mark.parametrize(
    ("free", "size", "severity", "remedy"),
    [
        (0, 1 << 40, Severity.ERROR, "free some space"),
        (0, 32 << 20, Severity.ERROR, "use a larger disk"),
        (32 << 20, 1 << 40, Severity.WARNING, "lower capacity to at most 30.4 MiB, or free some space"),
        (32 << 20, 32 << 20, Severity.ERROR, "lower capacity to at most 30.4 MiB, or use a larger disk"),
        (0, 0, Severity.ERROR, "choose a path on a disk"),
    ],
)
def test_a_capacity_is_proposed_only_if_it_holds_a_block(
    free: int, size: int, severity: Severity, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: Room(f_bavail=free // 4096))
    monkeypatch.setattr(Files, "size_of_disk", lambda self, path: size)
    found = local_findings(tmp_path)["free space"]
    assert (found.severity, found.remedy) == (severity, remedy)


class Room(NamedTuple):
    f_flag: int = 0
    f_bavail: int = 100
    f_frsize: int = 4096


@pytest.mark.parametrize(
    ("room", "subject", "severity"),
    [(Room(), "free space", "warning"), (Room(f_flag=os.ST_RDONLY), "writable", "error")],
)
def test_disks_that_are_full_or_read_only(
    room: Room, subject: str, severity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    monkeypatch.setattr(Files, "size_of_disk", lambda self, path: 1 << 40)
    found = local_findings(tmp_path)
    assert found[subject].severity == severity
    assert found[subject].remedy


@pytest.mark.parametrize(
    ("kind", "severity"),
    [("ext4", "ok"), ("nfs4", "warning"), ("fuse.sshfs", "warning"), ("tmpfs", "warning"), ("overlay", "warning")],
)
def test_file_systems_that_are_no_local_disk(
    kind: str, severity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "file_system", lambda path: (kind, "device"))
    (found,) = probes._probe_file_system(tmp_path)
    assert found.severity == severity


def test_the_file_system_of_a_path_is_the_mount_that_contains_it(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"20 1 {number} / / rw - ext4 /dev/root rw\n"
        f"21 20 {number} / {tmp_path} rw,relatime shared:1 - xfs /dev/nvme0n1 rw\n"
        f"22 21 0:99 / {tmp_path}/elsewhere rw - nfs4 server:/ rw\n"
    )
    assert probes.file_system(tmp_path, mounts) == ("xfs", "/dev/nvme0n1")
    assert probes.file_system(tmp_path, tmp_path / "none") == ("unknown", "?")


def test_a_directory_that_others_may_write_in(write_stack: WriteStack, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    assert check(write_stack(local(tmp_path / "kv"))).severity("local", "permissions") == "warning"


def state(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in [directory, *directory.rglob("*")]}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LocalRig]:
    rig = LocalRig(tmp_path / "kv", capacity="4MiB", segment_size="1MiB").open()
    yield rig
    rig.close()


def test_a_directory_in_use_is_only_read(write_stack: WriteStack, tmp_path: Path, live: LocalRig) -> None:
    live.store(K[:4])
    before = state(tmp_path / "kv")
    report = check(write_stack(local(tmp_path / "kv")))
    assert report.code == 0
    assert f"process {os.getpid()}" in report.text("local", "owner")
    assert "4 blocks read, intact" in report.text("local", "blocks")
    assert state(tmp_path / "kv") == before
    assert live.load(K[:4]) == K[:4]


def test_a_damaged_block_of_a_directory_in_use_is_found(
    write_stack: WriteStack, tmp_path: Path, live: LocalRig
) -> None:
    live.store(K[:1])
    (segment,) = [path for path in (tmp_path / "kv").glob("slots-*") if b"KVTIER" in path.read_bytes()]
    data = segment.read_bytes()
    at = data.index(b"\x89KVTIER\n") + 4096 + 10
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    report = check(write_stack(local(tmp_path / "kv")))
    assert (report.code, report.severity("local", "blocks")) == (1, "error")


def test_scratch_places_of_checks_that_were_killed_are_swept(write_stack: WriteStack, tmp_path: Path) -> None:
    old, young = (tmp_path / "kv" / f".kv-tiering-scratch-{name}" for name in ("old", "young"))
    for path in (old, young):
        (path / "documents").mkdir(parents=True)
    os.utime(old, (0, 0))
    check(write_stack(local(tmp_path / "kv")))
    assert [*(tmp_path / "kv").iterdir()] == [young], "another command may be using it"


# --------------------------------------------------------------------------------------------------------------- bucket


def test_a_sound_bucket_passes_and_nothing_is_left_in_it(
    write_stack: WriteStack, bucket: RawBucket, moto: S3Endpoint
) -> None:
    report = check(write_stack(s3(bucket.name, moto.endpoint)))
    assert report.code == 0
    for step in ("credentials", "list", "put", "head", "get", "conditional put", "delete", "clock", "round trip"):
        assert report.severity("s3", step) == "ok", step
    assert report.severity("s3", "block size") == "warning"
    assert report.severity("s3", "lifecycle") == "info"
    assert bucket.names() == []


def test_a_bucket_that_does_not_exist(write_stack: WriteStack, bucket: RawBucket, moto: S3Endpoint) -> None:
    report = check(write_stack(s3("nowhere", moto.endpoint)))
    assert (report.code, report.severity("s3", "list")) == (1, "error")
    assert "no such bucket" in report.text("s3", "list")


def test_an_endpoint_that_nobody_listens_at(write_stack: WriteStack, bucket: RawBucket) -> None:
    report = check(write_stack(s3(bucket.name, "http://127.0.0.1:9")))
    assert (report.code, report.severity("s3", "list")) == (1, "error")
    assert "endpoint_url" in report.text("s3", "list")


def test_missing_and_wrong_credentials(write_stack: WriteStack, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    with rclone_server() as server:
        server.make_bucket("kv-cache")
        use(server)
        stack = write_stack(s3("kv-cache", server.endpoint))
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        assert check(stack).severity("s3", "list") == "error"
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        report = check(stack)
    assert (report.code, report.severity("s3", "credentials")) == (1, "error")


def test_a_service_that_ignores_conditions_of_puts(write_stack: WriteStack, use: Use) -> None:
    with rclone_server() as server:
        server.make_bucket("kv-cache")
        use(server)
        report = check(write_stack(s3("kv-cache", server.endpoint)))
    assert (report.code, report.severity("s3", "conditional put")) == (0, "warning")
    assert "conditional_put: false" in report.text("s3", "conditional put")


@pytest.mark.parametrize(
    ("method", "subject", "needs"),
    [
        ("PUT", "put", "s3:PutObject"),
        ("HEAD", "head", "s3:GetObject"),
        ("POST", "delete", "s3:DeleteObject"),
    ],
)
def test_each_permission_that_is_missing_is_named(
    method: str, subject: str, needs: str, write_stack: WriteStack, fake: FakeS3
) -> None:
    fake.fail(403, method=method, times=1 << 30)
    report = check(write_stack(s3(fake.bucket, fake.endpoint)))
    assert (report.code, report.severity("s3", subject)) == (1, "error")
    assert needs in report.text("s3", subject)


def test_a_tier_that_is_only_read_needs_no_puts(write_stack: WriteStack, fake: FakeS3) -> None:
    fake.fail(403, method="PUT", times=1 << 30)
    report = check(write_stack(s3(fake.bucket, fake.endpoint, admission="none")), "--no-round-trip")
    assert (report.code, report.severity("s3", "put")) == (0, "info")


def test_versioning_and_a_missing_lifecycle_rule(write_stack: WriteStack, bucket: RawBucket, moto: S3Endpoint) -> None:
    bucket.client.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"})
    report = check(write_stack(s3(bucket.name, moto.endpoint, ttl="7d")))
    assert report.severity("s3", "versioning") == "warning"
    assert "install_lifecycle: true" in report.text("s3", "lifecycle")


def test_a_check_installs_no_lifecycle_rule(write_stack: WriteStack, bucket: RawBucket, moto: S3Endpoint) -> None:
    stack = write_stack(s3(bucket.name, moto.endpoint, ttl="7d", install_lifecycle=True))
    assert check(stack).severity("s3", "lifecycle") == "info"
    with pytest.raises(bucket.client.exceptions.ClientError):
        bucket.client.get_bucket_lifecycle_configuration(Bucket=bucket.name)


def test_proxies_and_authorities_of_the_environment(
    write_stack: WriteStack, bucket: RawBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:hunter2@127.0.0.1:9")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/opt/corporate.pem")
    report = check(write_stack(s3(bucket.name, "https://127.0.0.1:9", ca_file=None)), "--no-round-trip")
    assert "hunter2" not in str(report)
    assert report.severity("s3", "proxy") == "info"
    assert "AWS_CA_BUNDLE /opt/corporate.pem cannot be read" in report.text("s3", "certificates")


def test_clocks_that_differ() -> None:
    now = datetime.datetime(2026, 6, 1, 12, 0, 30, tzinfo=datetime.UTC)
    assert clock_skew({"date": "Mon, 01 Jun 2026 12:00:00 GMT"}, now) == 30
    assert clock_skew({}, now) is None
    assert clock_skew({"date": "yesterday"}, now) is None


# ----------------------------------------------------------------------------------------------------- own tiers


class BrokenAdmin(TierAdmin):
    def check(self, block_bytes: int) -> Iterator[Finding]:
        yield Finding(Severity.WARNING, "tape", f"{block_bytes} bytes are few")
        raise OSError("the robot is stuck")


PLAIN = TierDefinition(options=MEMORY_TIER.options, build=MEMORY_TIER.build, persistent=False)
BROKEN = TierDefinition(options=MEMORY_TIER.options, build=MEMORY_TIER.build, persistent=False, admin=BrokenAdmin)


def test_a_tier_without_an_administration_is_not_used(write_stack: WriteStack) -> None:
    report = check(write_stack({"type": "tests.cli.test_check:PLAIN"}))
    assert (report.code, report.severity("PLAIN", "round trip")) == (0, "info")


def test_a_probe_that_raises_is_a_finding(write_stack: WriteStack) -> None:
    report = check(write_stack({"type": "tests.cli.test_check:BROKEN"}))
    assert report.code == 1
    assert report.severity("BROKEN", "tape") == "warning"
    assert "the robot is stuck" in report.text("BROKEN", "probe")


def test_a_relative_path_is_a_warning_with_the_directory_it_means(
    write_stack: WriteStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stack = write_stack({"type": "local", "path": "kv", "capacity": "64MiB"})
    done = kv_tiering("check", stack, "--no-round-trip")
    assert done.code == 0
    assert (
        f"local\twarning\tpath\tkv is relative to the engine's working directory; from here it is {tmp_path}/kv"
        in done.out
    )
