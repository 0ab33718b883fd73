"""Bounds of files, sizes, durations and paths in a stack: any other value raises a ConfigError."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.config.stacks import FAKE, PRIMARY, Write, refusal
from tiering.config import yaml_text as config_yaml
from tiering.config.stack_file import load_stack
from tiering.secondary.options import SlotOptions


def tier(kind: str = FAKE, /, **words: object) -> dict[str, object]:
    return {"primary": PRIMARY, "secondary": [{"type": kind, **words}]}


def str_of(value: object) -> str:
    """Return a test's name for a value, because Python prints no integers of more than 4,300 digits."""
    return f"{value.bit_length()} bits" if isinstance(value, int) else str(value)[:20]


def str_of_ascii(value: str) -> str:
    return ascii(value)[:20]


def local(**words: object) -> dict[str, object]:
    return tier("local", **{"path": "/cache", "capacity": "1GiB", **words})


# ----------------------------------------------------------------------------------------------------- sizes, durations


@pytest.mark.parametrize(
    "capacity",
    [
        "10iB",
        "iB",
        "1.5.2GiB",
        "GiB",
        "0x10",
        "1e400",
        "1e3",
        "9" * 400 + "GiB",
        float("inf"),
        1.5,
        True,
        None,
        [],
        b"1GiB",
    ],
    ids=str_of,
)
def test_what_is_no_size_is_refused_with_examples(capacity: Any) -> None:
    assert "is not a size; write it like 8GiB, 500GB or a number of bytes" in refusal(
        {"primary": {"capacity": capacity}}
    )


@pytest.mark.parametrize("capacity", [10**30, 10**5000, -(10**5000), "2EiB", "9" * 30, (1 << 60) + 1], ids=str_of)
def test_a_size_beyond_all_media_is_refused(capacity: Any) -> None:
    assert "is out of range; the largest size is 1EiB" in refusal({"primary": {"capacity": capacity}})


@pytest.mark.parametrize("capacity", [-1, 0, "0GiB", "0.4B"])
def test_a_size_of_nothing_is_refused(capacity: Any) -> None:
    assert "it should be greater than 0" in refusal({"primary": {"capacity": capacity}})


@pytest.mark.parametrize(
    ("text", "size"), [("1EiB", 1 << 60), ("9007199254740993", 2**53 + 1), ("1.5 kib", 1536), (" 5 b ", 5)]
)
def test_sizes_are_exact(text: Any, size: Any) -> None:
    assert load_stack({"primary": {"capacity": text}}).primary.capacity == size


@pytest.mark.parametrize(
    "duration", [float("inf"), float("nan"), 1e300, 10**400, "9999999d", 3650 * 86400 + 1], ids=str_of
)
def test_a_duration_that_no_clock_can_wait_for_is_refused(duration: Any) -> None:
    assert "is out of range; the longest duration is 3650d" in refusal({"primary": PRIMARY, "open_deadline": duration})


@pytest.mark.parametrize("word", ["max_inflight", "min_prefix_blocks"])
def test_numbers_that_no_machine_can_count_are_refused(word: Any) -> None:
    assert f"secondary[0].{word}: " in refusal(tier(**{word: 10**5000}))


@pytest.mark.parametrize("kind", [FAKE, "valkey", "mooncake"])
@pytest.mark.parametrize("value", ["fast", "0", 129, True])
def test_a_wrong_number_of_transfers_is_one_problem(kind: str, value: Any) -> None:
    address = {"valkey": {"url": "valkey://cache:6379"}, "mooncake": {"master": "pool:50051"}}
    stack = tier(kind, max_inflight=value, **address.get(kind, {})) | {"revision": "1"}
    problem = refusal(stack)
    assert problem.startswith("stack: secondary[0].max_inflight: ")
    assert problem.endswith(" is not a number of transfers; write auto, or a number from 1 to 128")


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "stack.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_large_file_is_refused_unread(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(b"primary: {capacity: 1MiB}\n" + b"#" * (3 << 20))
    taken: list[int] = []
    read = os.read

    def counted(fd: int, count: int) -> bytes:
        taken.append(count)
        return read(fd, count)

    monkeypatch.setattr(os, "read", counted)
    assert "has more than 1 MiB: this is not a stack" in refusal(path)
    assert sum(taken) <= (1 << 20) + 1


@pytest.mark.parametrize(("place", "what"), [("/dev/zero", "a device"), ("/", "a directory")])
def test_only_files_and_pipes_are_read(place: Any, what: Any) -> None:
    assert f"{place}: is {what}; a stack is read from a regular file or a pipe" in refusal(place)


def test_a_pipe_is_read_as_in_a_shells_process_substitution() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"primary: {capacity: 1MiB}\n")
    os.close(writer)
    try:
        assert load_stack(f"/dev/fd/{reader}").primary.capacity == 1 << 20
    finally:
        os.close(reader)


def test_a_pipe_that_delivers_nothing_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_yaml, "PIPE_SECONDS", 0.01)
    reader, writer = os.pipe()
    try:
        assert "the pipe did not deliver a stack within 0.01 s" in refusal(f"/dev/fd/{reader}")
    finally:
        os.close(reader)
        os.close(writer)


def test_a_pipe_without_a_writer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config_yaml, "PIPE_SECONDS", 0.01)
    os.mkfifo(tmp_path / "fifo")
    assert "the pipe did not deliver a stack within 0.01 s" in refusal(tmp_path / "fifo")


def test_a_pipe_without_end_is_cut_off() -> None:
    reader, writer = os.pipe()

    def pour() -> None:
        with os.fdopen(writer, "wb", buffering=0) as pipe:
            try:
                while True:
                    pipe.write(b"# " * 4096)
            except BrokenPipeError:
                return

    thread = threading.Thread(target=pour)
    thread.start()
    try:
        assert "has more than 1 MiB: this is not a stack" in refusal(f"/dev/fd/{reader}")
    finally:
        os.close(reader)
        thread.join()


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "/nowhere/at\nall"])
def test_a_path_that_cannot_be_is_refused(path: Any) -> None:
    assert "cannot be read" in refusal(path)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "{a: " * 5_000,
        "[" + "a, " * 200_000 + "]",
        "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n"
        + "".join(
            f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
            for before, name in zip("bcdefg", "cdefgh", strict=True)
        ),
        "a: &a {x: 1}\n"
        + "".join(f"k{n}: &k{n} {{<<: [{', '.join([f'*k{n - 1}' if n else '*a'] * 9)}]}}\n" for n in range(9)),
    ],
    ids=["depth", "mappings", "values", "aliases", "merges"],
)
def test_yaml_that_grows_without_end_is_refused_at_once(write: Write, text: Any) -> None:
    assert "this is not a stack" in refusal(write(text))


@pytest.mark.parametrize(
    "value",
    [
        *(
            "!!bool x",
            "!!int ''",
            "!!int abc",
            "!!float ''",
            "!!null x",
            "9" * 5000,
            "!!timestamp x",
            "!!binary x",
            "!!set {a}",
        ),
        *(
            "0001-01-01t00:00:00+23:59",
            "2001-99-99",
            "!!omap [a]",
            "{[a]: b}",
            "&a [*a]",
            '"\\uE0007\\uE001"',
            '"\\ud800"',
        ),
    ],
)
def test_a_value_that_yaml_cannot_read_or_a_stack_cannot_use_is_refused(write: Write, value: Any) -> None:
    text = refusal(write(f"primary: {{capacity: 1MiB}}\nmode: {value}\n"))
    assert len(text) < 400
    assert text.isascii()


@pytest.mark.parametrize(
    "kind", [":", ".x:y", "a\0:b", "tests.raises_at_import:TIER", "x" * 10_000 + ":y", "os:" + "\ud800"], ids=ascii
)
def test_a_type_that_cannot_be_imported_is_refused(kind: Any) -> None:
    assert "secondary[0].type: " in refusal(tier(kind))
    assert "secondary[0].eviction: " in refusal(tier(eviction=kind))


def test_what_a_tiers_own_validators_raise_is_a_problem_of_its_section() -> None:
    assert "secondary[0]: its options cannot be checked: ZeroDivisionError" in refusal(tier(divisor=0))
    assert "secondary[0]: its location cannot be determined: ZeroDivisionError" in refusal(tier(place_divisor=0))


# ---------------------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "/cache/$HOME",
            "secondary[0].path: '/cache/$HOME' holds '$HOME', which would not be expanded; write ${HOME} or",
        ),
        ("$KV_DISK/kv", "write ${KV_DISK} or ${KV_DISK:-default}"),
        (
            "/cache/${KV",
            "secondary[0].path: '/cache/${KV' holds an environment reference that is not closed; write ${NAME}",
        ),
        ("/cache/${A:-${B}}", "holds an environment reference that is not closed"),
        ("/cache/$${KV}", "secondary[0].path: '/cache/${KV}' holds '${', which would not be expanded"),
        ("/cache\0", "secondary[0].path: holds a NUL character"),
        ("", "secondary[0].path: "),
        ("~nobody-of-this-name/kv", "begins with the home directory of a user that is not known"),
    ],
)
def test_a_path_that_would_make_a_directory_of_a_strange_name_is_refused(path: Any, expected: Any) -> None:
    assert expected in refusal(local(path=path))


def test_a_variable_that_holds_an_unexpanded_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_DISK_PATH", "$HOME/kv")
    assert "holds '$HOME', which would not be expanded" in refusal(local(path="${KV_DISK_PATH}"))


@pytest.mark.parametrize("path", ["/cache/a$b-$5", "/cache/50$", "~/kv", "kv"])
def test_other_paths_are_taken_as_they_are(path: Any) -> None:
    expected = path
    if "$b" in path:
        assert "write ${b}" in refusal(local(path=path))
    else:
        assert load_stack(local(path=path)).secondary[0].path == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("ca_file", ["$HOME/ca.pem", "/ca\0.pem"])
def test_other_files_are_checked_too(ca_file: Any) -> None:
    assert "secondary[0].ca_file: " in refusal(tier("s3", bucket="abc", ca_file=ca_file))


# ---------------------------------------------------------------------------------------------------------------- words


def test_eviction_ends_where_it_begins_unless_a_stack_says_otherwise() -> None:
    def watermarks(**words: float) -> tuple[float, float]:
        (section,) = load_stack(tier(**words)).secondary
        assert isinstance(section, SlotOptions)
        return section.high_watermark, section.low_watermark

    assert watermarks(high_watermark=0.9) == (0.9, 0.9)
    assert watermarks(low_watermark=0.8) == (1.0, 0.8)
    assert watermarks(high_watermark=0.9, low_watermark=0.5) == (0.9, 0.5)
    assert watermarks() == (1.0, 1.0)


@pytest.mark.parametrize(
    ("word", "value", "expected"),
    [
        ("namespace", 2026, "namespace: is 2026, a number, and must be a text; write it in quotes"),
        ("namespace", 1.5, "namespace: is 1.5, a number, and must be a text; write it in quotes"),
        ("namespace", False, "namespace: is false, a truth value, and must be a text; write it in quotes"),
        ("salt", 12345678, "salt: is ***, and must be a text; write it in quotes"),
    ],
)
def test_a_text_that_yaml_takes_for_something_else_belongs_in_quotes(word: Any, value: Any, expected: Any) -> None:
    assert expected in refusal({"primary": PRIMARY, word: value})


def test_a_date_is_a_text(write: Write) -> None:
    assert load_stack(write("primary: {capacity: 1MiB}\nnamespace: 2026-11-21\n")).namespace == "2026-11-21"


@pytest.mark.parametrize(
    "word", ["secret_key", "access_key", "token", "aws_access_key_id", "api_key", "password", "credentials"]
)
@pytest.mark.parametrize(
    "kind", [{"type": "s3", "bucket": "abc"}, {"type": "local", "path": "/cache", "capacity": "1GiB"}, {}]
)
def test_credentials_in_a_stack_are_told_where_they_belong(word: Any, kind: Any) -> None:
    section = [{**kind, word: "hunter2"}] if kind else []
    text = refusal({"primary": PRIMARY, "secondary": section, **({} if kind else {word: "hunter2"})})
    assert (
        "credentials are not written into a stack: the s3 tier finds its own in the environment, a profile or the"
        in text
    )
    assert "hunter2" not in text
