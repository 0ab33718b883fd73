"""The demonstration: repeatable workload, comparison that can fail, tampering that hits only blocks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from examples.demo.act import ActSettings, perform
from examples.demo.display import Display
from examples.demo.report import ActResult, Check, write_report
from examples.demo.story import Story
from examples.demo.tamper import flip_blocks
from examples.demo.workload import Shape, Workload
from tiering.medium.frame import encode_header

TINY = Shape(documents=2, users=3, turns=2, document_tokens=160, answer_tokens=4)
KEY = bytes(range(36))


def settings(directory: Path, name: str, **changes: object) -> ActSettings:
    place = directory / name
    place.mkdir()
    act = ActSettings(
        name, str(place / "result"), str(directory / "seen"), str(place / "log"), shape=dataclasses.asdict(TINY)
    )
    return dataclasses.replace(act, num_blocks=32, **changes)  # type: ignore[arg-type]


def frame(key: bytes) -> bytes:
    header = bytearray(4096)
    encode_header(memoryview(header), key=key, fingerprint=bytes(16), sequence=1, raw_length=16384, digest=bytes(16))
    return bytes(header) + bytes(16384)


def test_the_workload_is_the_same_every_time() -> None:
    one, other = Workload(TINY), Workload(TINY)
    assert [(user.name, user.opening, user.questions) for user in one.users] == [
        (user.name, user.opening, user.questions) for user in other.users
    ]
    assert one.tokenizer.words == other.tokenizer.words


def test_users_of_one_document_share_its_beginning() -> None:
    ada, bo, chen = Workload(TINY).users
    assert ada.opening == chen.opening != bo.opening
    assert ada.questions != chen.questions


def test_an_act_with_tiers_answers_as_one_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack = {
        "primary": {"capacity": "16MiB"},
        "secondary": [{"type": "local", "path": str(tmp_path / "local"), "capacity": "64MiB"}],
    }
    first = perform(settings(tmp_path, "first"))
    (tmp_path / "seen").unlink()
    tiered = perform(settings(tmp_path, "tiered", stack=stack))
    restarted = perform(settings(tmp_path, "restarted", stack=stack))
    broken = perform(settings(tmp_path, "broken", stack=stack, broken_loads=True))
    assert tiered.same_as(first)
    assert restarted.same_as(first)
    assert not broken.same_as(first)
    assert restarted.hit_tokens_by_tier["local"] > 0
    assert restarted.computed_tokens < tiered.computed_tokens < first.computed_tokens
    assert [json.loads(line)["phase"] for line in capsys.readouterr().out.splitlines()].count("answer") == 4 * 6


def test_one_different_token_or_logit_is_a_difference() -> None:
    one = ActResult("one", answers={"a/1": [1, 2], "b/1": [3]}, digests={"a/1": [7, 8], "b/1": [9]})
    token = dataclasses.replace(one, answers={"a/1": [1, 3], "b/1": [3]})
    logit = dataclasses.replace(one, digests={"a/1": [7, 8], "b/1": [8]})
    missing = dataclasses.replace(one, answers={"a/1": [1, 2]})
    assert one.same_as(dataclasses.replace(one))
    assert [other.different_answers(one) for other in (token, logit, missing)] == [["a/1"], ["b/1"], ["b/1"]]
    assert not ActResult("empty").same_as(ActResult("empty"))


def test_tampering_flips_a_bit_of_each_copy_of_a_block(tmp_path: Path) -> None:
    (tmp_path / "segment").write_bytes(bytes(4096) + frame(bytes(36)) + frame(KEY) + frame(KEY))
    before = (tmp_path / "segment").read_bytes()
    assert flip_blocks(tmp_path, [KEY]) == 2
    after = (tmp_path / "segment").read_bytes()
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 2


def test_tampering_leaves_tables_of_keys_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(bytes(200) + KEY + bytes(20_000))
    assert flip_blocks(tmp_path, [KEY]) == 0


@pytest.mark.parametrize("held", [True, False])
def test_the_report_says_what_held(held: bool, tmp_path: Path) -> None:
    act = ActResult("1 no tiers", ttft_s=[0.1, 0.3])
    write_report(tmp_path / "out" / "report.json", [act], [], [Check("identical outputs", held, "")], 1.0)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["identical_outputs"] is held
    assert report["all_held"] is held
    assert report["acts"][0]["ttft_p50_s"] == pytest.approx(0.2)
    assert set(report["acts"][0]["hit_tokens_by_tier"]) == {"gpu", "cpu", "local", "s3"}


@pytest.mark.timeout(300)
def test_two_engines_share_a_machine_and_the_killed_one_comes_back_warm(tmp_path: Path) -> None:
    story = Story(tmp_path, Display(plain=True), shape=TINY, gpu_blocks=32)
    story.acts.append(story._run("1 no tiers", None, {}, None))
    story._share_a_machine()
    assert [(check.name, check.seen) for check in story.checks if not check.held] == []
    assert len(story.checks) == 4
    other = dataclasses.replace(story.acts[0], answers={**story.acts[0].answers, "Ada/1": [0]})
    assert not story.machine[0].agrees_with(other)
