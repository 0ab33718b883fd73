"""``inspect``, ``gc``, ``clear`` and ``epoch new`` on real media, with and without running engines."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from tests.cli.conftest import WriteStack
from tests.cli.runner import kv_tiering, process, started
from tests.patience import PATIENT
from tests.servers import RawBucket, S3Endpoint
from tests.tiers.local.rig import LocalRig, segment_files
from tiering.cli import tiers as tiers_module
from tiering.cli.verify import ReadPace
from tiering.medium.files import Files
from tiering.medium.frame import MAGIC
from tiering.testing.clock import until
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.object import S3_TIER, S3Options

Make = Callable[..., TierRig]
OBJECTS = K[:6]


@pytest.fixture
def objects(write_stack: WriteStack, bucket: RawBucket, moto: S3Endpoint) -> Path:
    return write_stack(
        {"type": "s3", "bucket": bucket.name, "endpoint_url": moto.endpoint, "prefix": "prod", "compression": "zstd"}
    )


@pytest.fixture
def make_s3(bucket: RawBucket, moto: S3Endpoint) -> Iterator[Make]:
    rigs: list[TierRig] = []

    def build(model: str = "model-a") -> TierRig:
        options = S3Options(
            bucket=bucket.name, endpoint_url=moto.endpoint, prefix="prod", compression="zstd", **PATIENT
        )
        rigs.append(TierRig(lambda context: S3_TIER.build(options, context), group_bytes=(65536,), model=model))
        return rigs[-1].open()

    yield build
    for rig in rigs:
        rig.close()


DRY_RUN = "kv-tiering: dry run: nothing changed; repeat with --yes\n"


def report(name: str, *words: object, code: int = 0) -> Any:
    done = kv_tiering(name, *words, "--json")
    assert (done.code, done.err) == (code, DRY_RUN if code == 3 else "")
    return json.loads(done.out)


def flip(path: Path) -> None:
    """Flip one bit of the payload of the first block in a segment."""
    with path.open("r+b") as file:
        data = file.read()
        at = data.index(MAGIC) + 4096 + 77
        file.seek(at)
        file.write(bytes([data[at] ^ 4]))


def first_segment(directory: Path) -> Path:
    return next(path for path in segment_files(directory) if MAGIC in path.read_bytes())


# -------------------------------------------------------------------------------------------------------------- inspect


def test_a_directory_tells_namespaces_blocks_and_bytes(disk: Path, make_local: Callable[..., LocalRig]) -> None:
    for model, count in (("model-a", 3), ("model-b", 5)):
        rig = make_local(model)
        rig.store(K[:count])
        rig.close()
    found = report("inspect", disk)["local"]
    assert found["owner"] is None
    assert {(epoch["label"], epoch["state"], epoch["blocks"]) for epoch in found["epochs"]} == {
        ("model-a, bfloat16", "current", 3),
        ("model-b, bfloat16", "current", 5),
    }
    assert all(epoch["nbytes"] == epoch["blocks"] * (8192 + 4096) for epoch in found["epochs"])
    assert all(epoch["oldest"] <= epoch["newest"] <= time.time() for epoch in found["epochs"])
    assert list(found["differences"].values()) == [['model.name ("model-a" there, "model-b" here)']]


def test_a_bucket_tells_the_same(objects: Path, make_s3: Make) -> None:
    make_s3().store(OBJECTS)
    make_s3("model-b").store(OBJECTS[:2])
    (found,) = report("inspect", objects).values()
    assert {(epoch["label"], epoch["state"], epoch["blocks"]) for epoch in found["epochs"]} == {
        ("model-a, bfloat16", "current", 6),
        ("model-b, bfloat16", "current", 2),
    }
    verified = report("inspect", objects, "--verify")["s3"]["verified"]
    assert (verified["blocks"], verified["damaged"]) == (8, [])


def test_a_process_of_its_own_prints_lines_of_words_between_tabs(
    disk: Path, make_local: Callable[..., LocalRig]
) -> None:
    rig = make_local()
    rig.store(K[:3])
    done = process("inspect", disk)
    assert (done.code, done.err) == (0, "")
    (line,) = [line.split("\t") for line in done.out.splitlines()]
    assert (line[0], line[2], line[4], line[5]) == ("local", "model-a, bfloat16", "current", "3")


def test_a_directory_that_no_engine_has_used(disk: Path, tmp_path: Path) -> None:
    done = kv_tiering("inspect", disk)
    assert done.code == 1
    assert done.err == f"kv-tiering: local: {tmp_path / 'kv'} does not exist: no engine has used this tier yet\n"


@pytest.mark.parametrize("words", [("inspect",), ("gc", "--yes"), ("clear", "--all"), ("epoch", "new", "--all")])
@pytest.mark.parametrize("kind", ["file", "link", "below a file"])
def test_what_stands_in_the_place_of_a_directory_is_named(
    kind: str, words: tuple[str, ...], write_stack: WriteStack, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    if kind == "link":
        place.symlink_to(tmp_path / "gone")
    else:
        place.write_text("")
    path = place / "kv" if kind == "below a file" else place
    number = 2 if words[0] == "epoch" else 1
    stack = write_stack({"type": "local", "path": str(path), "capacity": "4MiB"})
    done = kv_tiering(*words[:number], stack, *words[number:])
    text = "is a symbolic link that leads nowhere; correct the link" if kind == "link" else "is not a directory; choose"
    assert (done.code, f"{place} {text}" in done.err, "does not exist" in done.err) == (1, True, False), done


def test_a_directory_under_two_names_is_noted(
    disk: Path, write_stack: WriteStack, tmp_path: Path, make_local: Callable[..., LocalRig]
) -> None:
    rig = make_local()
    rig.store(K[:3])
    rig.close()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    words = {"type": "local", "capacity": "4MiB", "segment_size": "512KiB"}
    stack = write_stack(*(words | {"path": str(tmp_path / place), "name": place} for place in ("kv", "link")))
    done = kv_tiering("inspect", stack)
    assert (done.code, done.err.count("counted twice")) == (0, 1)
    assert len(done.out.splitlines()) == 2


def test_a_tier_in_the_memory_of_its_engine_cannot_be_inspected(write_stack: WriteStack, tmp_path: Path) -> None:
    done = kv_tiering("inspect", write_stack({"type": "memory"}))
    assert (done.code, done.out) == (1, "")
    assert "cannot list its blocks" in done.err
    for words in (("clear",), ("epoch", "new")):
        done = kv_tiering(*words, tmp_path / "stack.yaml", "--all", "--yes")
        assert (done.code, done.out) == (1, "")
        assert "cannot list its blocks" in done.err


# --------------------------------------------------------------------------------------------------------------- verify


def test_a_flipped_bit_on_disk_is_found_while_the_engine_runs(
    disk: Path, tmp_path: Path, make_local: Callable[..., LocalRig]
) -> None:
    rig = make_local()
    rig.store(K[:5])
    flip(first_segment(tmp_path / "kv"))
    verified = report("inspect", disk, "--verify", code=1)["local"]["verified"]
    assert (verified["blocks"], [reason.rpartition(": ")[2] for _, reason in verified["damaged"]]) == (
        5,
        ["payload checksum"],
    )
    done = kv_tiering("inspect", disk, "--verify")
    assert done.code == 1
    assert "local\tdamaged\tslots-" in done.out


def test_slots_whose_headers_are_damaged_or_cannot_be_read_are_counted(
    disk: Path, tmp_path: Path, make_local: Callable[..., LocalRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_local()
    rig.store(K[:5])
    rig.close()
    segment = first_segment(tmp_path / "kv")
    data = bytearray(segment.read_bytes())
    first = data.index(MAGIC)
    data[first + 20] ^= 1
    segment.write_bytes(data)
    assert report("inspect", disk)["local"]["unreadable"] == 1
    second = data.index(MAGIC, first + 1)
    read = Files.preadv

    def fail(self: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == second and Path(f"/proc/self/fd/{fd}").readlink() == segment:
            raise OSError(errno.EIO, "injected")
        return read(fd, buffers, offset)

    monkeypatch.setattr(Files, "preadv", fail)
    found = report("inspect", disk, "--verify", code=1)["local"]
    assert (found["unreadable"], [epoch["blocks"] for epoch in found["epochs"]]) == (2, [3])
    assert found["verified"]["blocks"] == 3
    assert "local\tunreadable\t2 slots" in kv_tiering("inspect", disk).out


def test_flipped_and_swapped_objects_are_found(objects: Path, make_s3: Make, bucket: RawBucket) -> None:
    make_s3().store(OBJECTS)
    one, two, three = bucket.names("prod/blocks/")[:3]
    data = bucket.read(one) or b""
    bucket.write(one, data[:-1] + bytes([data[-1] ^ 1]))
    bucket.write(two, bucket.read(three) or b"")
    verified = report("inspect", objects, "--verify", code=1)["s3"]["verified"]
    assert sorted(reason.rpartition(": ")[2] for _, reason in verified["damaged"]) in (
        ["another block's key", "codec or malformed compressed data"],
        ["another block's key", "payload checksum"],
        ["another block's key", "unknown codec or malformed compressed data"],
    )


def test_a_verification_goes_on_where_it_was_interrupted(
    disk: Path, tmp_path: Path, make_local: Callable[..., LocalRig]
) -> None:
    rig = make_local()
    rig.store(K[:32])
    rig.close()
    flip(first_segment(tmp_path / "kv"))
    state = tmp_path / "state.json"
    words = ("inspect", disk, "--verify", "--concurrency", "1", "--rate", "50KiB", "--state", state)
    with started(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        until(lambda: state.exists() and json.loads(state.read_text())["tiers"]["local"]["blocks"] > 0, 60)
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
    assert (running.returncode, error.decode().strip()) == (130, "kv-tiering: interrupted")
    before = json.loads(state.read_text())["tiers"]["local"]
    assert 0 < before["blocks"] < 32
    verified = report("inspect", disk, "--verify", "--state", state, code=1)["local"]["verified"]
    assert (verified["blocks"], len(verified["damaged"])) == (32, 1)
    assert not state.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1, "stack": "another", "tiers": {}}', '{"tiers": 7}'])
def test_a_file_that_is_no_progress_is_refused_and_kept(text: str, disk: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text(text)
    done = kv_tiering("inspect", disk, "--verify", "--state", tmp_path / "notes")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert (tmp_path / "notes").read_text() == text


def test_words_that_need_verify_are_refused_without_it(disk: Path) -> None:
    assert kv_tiering("inspect", disk, "--rate", "1MB").code == 2


def test_a_rate_spreads_reads_over_time() -> None:
    now, slept = [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    async def read() -> None:
        pace = ReadPace(1000.0, lambda: now[0], sleep)
        for _ in range(4):
            await pace.take(500)
        now[0] += 60
        await pace.take(500)

    asyncio.run(read())
    assert slept == pytest.approx([0.5, 0.5, 0.5])


# ----------------------------------------------------------------------------------------------------- gc, clear, epoch


def total(tier: dict[str, Any]) -> int:
    return sum(epoch["blocks"] for epoch in tier["epochs"])


def test_a_directory_in_use_is_counted_and_not_changed(
    disk: Path, tmp_path: Path, make_local: Callable[..., LocalRig]
) -> None:
    rig = make_local()
    rig.store(K[:4])
    before = [path.stat().st_mtime_ns for path in segment_files(tmp_path / "kv")]
    for words in (("gc", disk, "--max-total", "1B"), ("clear", disk, "--all"), ("epoch", "new", disk, "--all")):
        done = kv_tiering(*words, "--yes")
        assert done.code == 1
        assert f"is in use by process {os.getpid()}" in done.err
    assert report("gc", disk, "--max-total", "1B", code=3)["local"]["dry_run"]
    assert [path.stat().st_mtime_ns for path in segment_files(tmp_path / "kv")] == before
    assert rig.load(K[:4]) == K[:4]


def test_gc_deletes_segments_of_abandoned_epochs(
    disk: Path, tmp_path: Path, make_local: Callable[..., LocalRig]
) -> None:
    rig = make_local()
    rig.store(K[:4])
    rig.close()
    assert report("gc", disk)["local"]["removed_blocks"] == 0
    assert kv_tiering("epoch", "new", disk, "--all", "--yes").code == 0
    counted = report("gc", disk, code=3)["local"]
    assert (counted["dry_run"], counted["removed_blocks"]) == (True, 4)
    assert total(report("inspect", disk)["local"]) == 4
    removed = report("gc", disk, "--yes")["local"]
    assert (removed["dry_run"], removed["removed_blocks"]) == (False, 4)
    assert total(report("inspect", disk)["local"]) == 0
    again = make_local()
    assert again.load(K[:4]) == []
    assert again.store(K[:4]) == K[:4]


def test_clearing_one_namespace_of_a_directory_leaves_the_other(
    disk: Path, make_local: Callable[..., LocalRig]
) -> None:
    for model in ("model-a", "model-b"):
        rig = make_local(model)
        rig.store(K[:4])
        name = rig.context.namespace.directory
        rig.close()
    assert kv_tiering("clear", disk, "--namespace", name[:8], "--yes").code == 0
    assert make_local("model-b").load(K[:4]) == []
    states = {epoch["label"]: epoch["blocks"] for epoch in report("inspect", disk)["local"]["epochs"]}
    assert states["model-a, bfloat16"] == 4


def test_gc_by_size_leaves_a_directory_that_the_engine_recovers(
    disk: Path, make_local: Callable[..., LocalRig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_local()
    rig.store(K[:32])
    rig.close()
    removed = report("gc", disk, "--max-total", "1MiB", "--yes")["local"]
    assert removed["removed_bytes"] > 0
    assert removed["nbytes"] - removed["removed_bytes"] <= 1 << 20
    again = make_local()
    left = total(report("inspect", disk)["local"])
    assert len(again.held(K[:32])) == left
    assert [record.message for record in caplog.records if "lost" in record.message] == []


def test_a_bucket_is_collected_and_cleared_while_engines_run(objects: Path, make_s3: Make, bucket: RawBucket) -> None:
    one, two = make_s3(), make_s3("model-b")
    one.store(OBJECTS)
    two.store(OBJECTS[:2])
    assert report("gc", objects, "--max-total", "1B", code=3)["s3"]["removed_blocks"] == 8
    assert len(bucket.names("prod/blocks/")) == 8
    dry = report("gc", objects, "--max-total", "1B", "--dry-run", code=3)["s3"]
    assert (dry["dry_run"], dry["removed_blocks"]) == (True, 8)
    assert kv_tiering("gc", objects, "--yes", "--dry-run").code == 2
    name = two.context.namespace.directory
    assert kv_tiering("clear", objects, "--namespace", name, "--yes").code == 0
    assert len(bucket.names("prod/blocks/")) == 6
    assert two.load(OBJECTS[:2]) == []
    assert two.store(OBJECTS[:2]) == OBJECTS[:2]
    assert one.load(OBJECTS) == OBJECTS


def test_objects_that_are_not_ours_stay_whatever_their_place_is(
    objects: Path, make_s3: Make, bucket: RawBucket
) -> None:
    rig = make_s3()
    rig.store(OBJECTS[:2])
    (name, *_) = bucket.names("prod/blocks/")
    foreign = ["notes.txt", "blocks/" + name.removeprefix("prod/blocks/"), "documents/epoch-" + "0" * 32, "a/b/c/d"]
    foreign += [f"{'0' * 32}/{'1' * 32}/zz/{'2' * 72}", f"{'0' * 32}/{'1' * 32}/not-a-key"]
    for place in foreign:
        bucket.write(f"prod/blocks/{place}", b"mine")
    found = report("gc", objects, "--max-total", "1B", "--older-than", "1ms", "--yes")["s3"]
    assert (found["blocks"], found["removed_blocks"]) == (2, 2)
    assert kv_tiering("clear", objects, "--all", "--yes").code == 0
    assert sorted(bucket.names("prod/blocks/")) == sorted(f"prod/blocks/{place}" for place in foreign)


def test_a_new_epoch_of_a_bucket_is_followed_and_its_old_blocks_go(
    objects: Path, make_s3: Make, bucket: RawBucket
) -> None:
    rig = make_s3()
    rig.store(OBJECTS)
    name = rig.context.namespace.directory
    dry = kv_tiering("epoch", "new", objects, "--namespace", name)
    assert (dry.code, "dry run" in dry.err) == (3, True)
    done = kv_tiering("epoch", "new", objects, "--namespace", name, "--yes")
    assert (done.code, "within a minute" in done.out) == (0, True)
    states = {epoch["state"]: epoch["blocks"] for epoch in report("inspect", objects)["s3"]["epochs"]}
    assert states == {"abandoned": 6, "current": 0}
    assert make_s3().load(OBJECTS) == []
    assert report("gc", objects, "--yes")["s3"]["removed_blocks"] == 0, "the grace time is a day"
    assert report("gc", objects, "--grace", "1us", "--yes")["s3"]["removed_blocks"] == 6
    assert bucket.names("prod/blocks/") == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("ab", "is too short"),
        ("abcdef01", "names none"),
        ("zz", "is not hexadecimal"),
        ("zzzzzz", "is not hexadecimal"),
    ],
)
def test_a_namespace_that_is_not_there_is_refused_with_those_that_are(
    name: str, fault: str, disk: Path, make_local: Callable[..., LocalRig]
) -> None:
    rig = make_local()
    rig.store(K[:1])
    rig.close()
    for words in (("clear", disk), ("epoch", "new", disk)):
        done = kv_tiering(*words, "--namespace", name, "--yes")
        assert (done.code, fault in done.err, "model-a, bfloat16" in done.err) == (2, True, True)
        assert kv_tiering(*words, "--yes").code == 2


@pytest.mark.parametrize(("answer", "left"), [(True, 0), (False, 4)])
def test_a_terminal_is_asked(
    answer: bool, left: int, disk: Path, make_local: Callable[..., LocalRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_local()
    rig.store(K[:4])
    rig.close()
    asked: list[str] = []

    def agree(question: str, **_: bool) -> int | None:
        asked.append(question)
        return None if answer else 0

    monkeypatch.setattr("tiering.cli.remove.unchanged", agree)
    assert kv_tiering("clear", disk, "--all").code == 0
    assert (asked, total(report("inspect", disk)["local"])) == (["Remove them?"], left)


def test_without_a_terminal_nobody_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click, "confirm", lambda *_args, **_words: pytest.fail("asked without a terminal"))
    assert tiers_module.unchanged("?", yes=False, dry_run=False) == 3
    assert tiers_module.unchanged("?", yes=True, dry_run=False) is None
