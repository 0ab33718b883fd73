"""The commands that generate and replay traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.runner import kv_tiering, process
from tiering.cli.app import OK, USAGE
from tiering.config.stack_file import load_stack


@pytest.fixture(name="trace")
def make_trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    assert kv_tiering("trace", "generate", "--kind", "chat=2", "--requests", 200, "-o", path).code == OK
    return path


@pytest.fixture(name="stack")
def make_stack(tmp_path: Path) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text("primary: {capacity: 4GiB}\nsecondary:\n  - {type: local, path: /nowhere/kv, capacity: 64GiB}\n")
    return path


def test_a_table_and_what_to_buy(trace: Path, stack: Path) -> None:
    done = kv_tiering("replay", trace, "--stack", stack, "--sweep", "primary.capacity=1GiB..4GiB")
    assert (done.code, done.err) == (OK, "")
    lines = done.out.splitlines()
    assert lines[0].split()[:4] == ["primary.capacity", "secondary", "cpu", "local"]
    assert [line.split()[0] for line in lines[1:7]] == ["1GiB", "2GiB", "4GiB"] * 2
    assert lines[7].split()[:3] == ["without", "tiers", "0.0%"]
    assert lines[7].split()[-3:] == ["$0", "$0", "$0"]
    assert "is the best buy" in done.out
    assert "blocks a second" in done.out
    file = done.out.rpartition("fill masked secrets in again:\n\n")[2]
    assert load_stack(yaml.safe_load(file)).primary.capacity in {1 << 30, 2 << 30, 4 << 30}


def test_json_has_the_model(trace: Path, stack: Path) -> None:
    done = kv_tiering("replay", trace, "--stack", stack, "--json", "--prefill-speed", 5000)
    assert done.code == OK
    found = json.loads(done.out)
    assert found["format"] == "kv-tiering-trace"
    assert found["model"]["prefill_tokens_per_second"] == 5000
    assert found["block_bytes"] == 256 * 128 * 1024
    assert 0 < found["results"][0]["hit_rate"] <= found["reuse"]


def test_speeds_and_prices_of_a_file(trace: Path, stack: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    model.write_text("prefill_tokens_per_second: 100\ndevice_dollars_per_hour: 9\n")
    done = kv_tiering("replay", trace, "--stack", stack, "--model", model, "--kv-bytes-per-token", "64KiB", "--json")
    found = json.loads(done.out)
    assert (found["model"]["device_dollars_per_hour"], found["block_bytes"]) == (9, 256 * 64 * 1024)
    model.write_text("prefill: 100\n")
    done = kv_tiering("replay", trace, "--stack", stack, "--model", model)
    assert done.code == USAGE
    assert f"{model}: prefill (line 1): unknown word" in done.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--sweep", "primary.capacity"], "write it like"),
        (["--kv-bytes-per-token", "many"], "'--kv-bytes-per-token': 'many' is not a size"),
        (["--device-cache", "90%"], "'--device-cache': '90%' is not a size"),
        (["--hints", "nan"], "'--hints': nan is not a finite number"),
        (["--prefill-speed", "0"], "'--prefill-speed': 0.0 is not in the range"),
    ],
)
def test_wrong_words_end_with_one_line(trace: Path, stack: Path, words: list[str], problem: str) -> None:
    done = kv_tiering("replay", trace, "--stack", stack, *words)
    assert done.code == USAGE
    assert problem in done.err
    assert done.out == ""


def test_a_rate_so_small_that_no_second_request_comes_is_refused() -> None:
    done = kv_tiering("trace", "generate", "--requests", "3", "--rate", "1e-320")
    assert done.code == USAGE
    assert "'--rate'" in done.err


@pytest.mark.parametrize("small", ["primary", "secondary"])
def test_a_capacity_below_one_block_is_refused_with_a_remedy(small: str, trace: Path, stack: Path) -> None:
    text = stack.read_text()
    stack.write_text(text.replace("4GiB" if small == "primary" else "64GiB", "2MiB"))
    done = kv_tiering("replay", trace, "--stack", stack)
    assert done.code == USAGE
    assert "raise the capacity, or give the KV of a token with --kv-bytes-per-token" in done.err


def test_one_request_takes_as_long_as_without_tiers(stack: Path, tmp_path: Path) -> None:
    trace = tmp_path / "one.jsonl"
    assert kv_tiering("trace", "generate", "--requests", 1, "-o", trace).code == OK
    done = kv_tiering("replay", trace, "--stack", stack)
    assert (done.code, "The mean time to first token stays at " in done.out) == (OK, True)


def test_a_file_that_is_no_trace_and_a_missing_stack(trace: Path, stack: Path, tmp_path: Path) -> None:
    done = kv_tiering("replay", stack, "--stack", stack)
    assert (done.code, "line 1: is not JSON" in done.err) == (USAGE, True)
    assert kv_tiering("replay", trace, "--stack", tmp_path / "none.yaml").code == USAGE


def test_generated_traces_go_through_a_pipe_and_depend_on_the_seed() -> None:
    words = ("trace", "generate", "--requests", "20", "--kind", "agents")
    one, other = process(*words), process(*words, "--seed", "2")
    assert (one.code, len(one.out.splitlines())) == (OK, 21)
    assert one.out.splitlines()[1:] != other.out.splitlines()[1:]
    wrong = kv_tiering("trace", "generate", "--kind", "chats=2")
    assert (wrong.code, wrong.out) == (USAGE, "")
    assert "--kind chats=2: 'chats' is not a kind of session; did you mean chat?; allowed are chat, " in wrong.err
    assert "is not a number" in kv_tiering("trace", "generate", "--kind", "chat=many").err


def test_a_share_of_nothing_is_refused() -> None:
    done = kv_tiering("trace", "generate", "--kind", "chat=0")
    assert (done.code, "--kind chat=0: the share must be above 0" in done.err) == (2, True)


@pytest.mark.parametrize("words", [("--kind", "cht"), ("--rate", "0")])
def test_wrong_words_leave_the_file_of_the_output_as_it_is(words: tuple[str, ...], trace: Path) -> None:
    before = trace.read_bytes()
    assert kv_tiering("trace", "generate", "-o", trace, *words).code == USAGE
    assert trace.read_bytes() == before
    nowhere = kv_tiering("trace", "generate", "-o", trace / "none", "--requests", 1)
    assert (nowhere.code, nowhere.err.endswith("Not a directory\n")) == (USAGE, True)
