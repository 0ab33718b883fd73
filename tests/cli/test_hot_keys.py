"""The documents with hot keys and speeds in ``inspect``, ``gc`` and ``clear``; and ``check``."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Pool
from tests.cli.runner import kv_tiering
from tests.cli.test_check import stack_findings
from tests.fake_s3 import FakeS3
from tests.tiers.local.rig import LocalRig
from tiering.admin.records import Severity
from tiering.epochs.described import DESCRIBED
from tiering.epochs.hot_keys import HOT, HOT_SECONDS, hot_document
from tiering.epochs.speeds import SPEED_SECONDS, SPEEDS
from tiering.testing.tier_tests import K

OLD = HOT_SECONDS + 60
SCRATCH: dict[str, object] = {"type": "local", "path": "/nowhere", "capacity": "64MiB"}


def hot_files(directory: Path) -> list[Path]:
    return sorted((directory / "documents").glob(f"{HOT}*"))


@pytest.fixture
def published(make_local: Callable[..., LocalRig], tmp_path: Path) -> Path:
    """A directory with blocks of a namespace, and its hot keys."""
    rig = make_local()
    rig.store(K[:4])
    part = rig.tier.traits.hot_keys
    assert part is not None
    part.publish([tuple(K[:4])])
    rig.wait(lambda: hot_files(tmp_path / "kv"))
    rig.close()
    return tmp_path / "kv"


@pytest.fixture(name="hot_pool")
def make_hot_pool(pool: Pool) -> tuple[FakeS3, Path, str]:
    """The bucket with hot keys of its namespace, the stack, and the name of the document."""
    fake, stack, namespace = pool
    document = f"prod/documents/{hot_document(namespace, 'host')}"
    fake.objects[document] = b"keys"
    fake.modified[document] = datetime.datetime.now(datetime.UTC)
    return fake, stack, document


def test_inspect_counts_the_engines_that_publish(disk: Path, published: Path) -> None:
    assert json.loads(kv_tiering("inspect", disk, "--json").out)["local"]["hot_keys"] == 1
    assert "local\thot keys\t1 engines have published" in kv_tiering("inspect", disk).out


def test_gc_of_a_directory_removes_what_has_expired_and_only_that(disk: Path, published: Path) -> None:
    assert kv_tiering("gc", disk, "--yes").code == 0
    (document,) = hot_files(published)
    os.utime(document, (time.time() - OLD, time.time() - OLD))
    assert kv_tiering("gc", disk, "--dry-run").code == 0
    assert hot_files(published) == [document]
    assert kv_tiering("gc", disk, "--yes").code == 0
    assert hot_files(published) == []


def test_clear_of_a_directory_removes_those_of_the_namespace(disk: Path, published: Path) -> None:
    other = published / "documents" / f"{HOT}{'0' * 32}-{'1' * 16}"
    other.write_bytes(b"keys")
    (name,) = {path.name.split("-")[1] for path in hot_files(published)} - {"0" * 32}
    assert kv_tiering("clear", disk, "--namespace", name, "--yes").code == 0
    assert hot_files(published) == [other]


def test_descriptions_of_a_directory_are_counted_kept_while_an_engine_can_read_them_and_cleared(
    disk: Path, published: Path
) -> None:
    (name,) = {path.name.split("-")[1] for path in hot_files(published)}
    own = published / "documents" / f"{DESCRIBED}{name}-00"
    lost = published / "documents" / f"{DESCRIBED}{'0' * 32}-01"
    for path in (own, lost):
        path.write_bytes(b"runs")
    assert json.loads(kv_tiering("inspect", disk, "--json").out)["local"]["descriptions"] == 2
    assert "local\tdescriptions\t2 documents" in kv_tiering("inspect", disk).out
    assert kv_tiering("gc", disk, "--yes").code == 0
    assert (own.exists(), lost.exists()) == (True, False)
    assert kv_tiering("clear", disk, "--namespace", name, "--yes").code == 0
    assert not own.exists()


def test_inspect_and_gc_of_a_bucket_leave_fresh_ones_and_remove_expired_ones(
    hot_pool: tuple[FakeS3, Path, str],
) -> None:
    fake, stack, document = hot_pool
    assert json.loads(kv_tiering("inspect", stack, "--json").out)["s3"]["hot_keys"] == 1
    assert kv_tiering("gc", stack, "--yes").code == 0
    assert document in fake.objects
    fake.modified[document] -= datetime.timedelta(seconds=OLD)
    assert json.loads(kv_tiering("inspect", stack, "--json").out)["s3"]["hot_keys"] == 0
    assert kv_tiering("gc", stack, "--yes").code == 0
    assert document not in fake.objects
    assert [name for name in fake.objects if "/epoch-" in name]


def test_clear_of_a_bucket_removes_those_of_the_namespace(hot_pool: tuple[FakeS3, Path, str]) -> None:
    fake, stack, document = hot_pool
    other = f"prod/documents/{HOT}{'0' * 32}-{'1' * 16}"
    fake.objects[other] = b"keys"
    name = document.split("-")[1]
    assert kv_tiering("clear", stack, "--namespace", name, "--dry-run").code == 3
    assert document in fake.objects
    assert kv_tiering("clear", stack, "--namespace", name, "--yes").code == 0
    assert (document in fake.objects, other in fake.objects) == (False, True)


@pytest.mark.parametrize(
    ("words", "severity", "part"),
    [
        ({}, Severity.OK, "up to 8 MiB in 120 s"),
        ({"bandwidth": "64KiB", "seconds": 10}, Severity.INFO, "up to 640 KiB in 10 s, not 8 MiB"),
        ({"bytes": "1GiB"}, Severity.WARNING, "warm_start.bytes, 1 GiB, is more than the CPU tier"),
    ],
)
def test_check_says_how_much_a_warm_start_can_load(words: dict[str, object], severity: Severity, part: str) -> None:
    found = stack_findings(SCRATCH, warm_start=words)["warm start"]
    assert (found.severity, part in found.text) == (severity, True)


def test_check_says_nothing_about_a_warm_start_that_is_not_there() -> None:
    assert "warm start" not in stack_findings(SCRATCH)


def test_speeds_are_removed_when_they_have_expired_and_with_their_namespace(
    disk: Path, published: Path, hot_pool: tuple[FakeS3, Path, str]
) -> None:
    (name,) = {path.name.split("-")[1] for path in hot_files(published)}
    own, other, old = (published / "documents" / f"{SPEEDS}{of}-{'0' * 16}" for of in (name, "0" * 32, f"{'1' * 32}"))
    for path in (own, other, old):
        path.write_bytes(b"speeds")
    os.utime(old, (time.time() - SPEED_SECONDS, time.time() - SPEED_SECONDS))
    assert kv_tiering("gc", disk, "--yes").code == 0
    assert (own.exists(), other.exists(), old.exists()) == (True, True, False)
    assert kv_tiering("clear", disk, "--namespace", name, "--yes").code == 0
    assert (own.exists(), other.exists()) == (False, True)

    fake, stack, document = hot_pool
    name = document.split("-")[1]
    names = [f"prod/documents/{SPEEDS}{of}-{'0' * 16}" for of in (name, "0" * 32, "1" * 32)]
    for age, of in zip((0.0, 0.0, SPEED_SECONDS), names, strict=True):
        fake.objects[of] = b"speeds"
        fake.modified[of] = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)
    assert kv_tiering("gc", stack, "--yes").code == 0
    assert [of in fake.objects for of in names] == [True, True, False]
    assert kv_tiering("clear", stack, "--namespace", name, "--yes").code == 0
    assert [of in fake.objects for of in names] == [False, True, False]
