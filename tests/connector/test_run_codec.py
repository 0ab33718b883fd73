"""Runs of described blocks as bytes."""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import Any

import pytest

from tiering.connector.run_codec import pack_runs, packed_size, unpack_runs
from tiering.connector.snapshots import Run


def make_run(first: int = 0, blocks: int = 3, **words: Any) -> Run:
    """Return a run of blocks of two hash-blocks of 4 tokens."""
    hashes = [bytes([first + number]) * 32 for number in range(2 * blocks)]
    return Run(
        **{
            "keys": [name + b"\0\0\0\1" for name in hashes[1::2]],
            "hashes": hashes,
            "parent": bytes([first - 1]) * 32 if first else None,
            "token_ids": array("q", range(first, first + 8 * blocks)),
            "extra_keys": None,
            "factor": 2,
            "block_size": 4,
            "lookahead": 0,
            "group_idx": 1,
            "kind": "sliding_window",
            "window": 64,
            "lora_id": None,
            "lora_name": None,
            **words,
        }
    )


def words_of(run: Run) -> dict[str, Any]:
    return {field.name: getattr(run, field.name) for field in fields(run) if field.name != "lasting"}


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"hashes": [2**64 - 1 - number for number in range(6)], "parent": 5},
        {"parent": b"p" * 32},
        {"kind": None, "window": None},
        {"lora_id": 7, "lora_name": "Papagei ä"},
        {"extra_keys": [None, ("salt",), (("image", -3), "salt"), (b"\xff\0",), None, None]},
        {"lookahead": 2, "token_ids": array("q", range(26))},
        {"token_ids": array("q", [2**32 - 1] * 24)},
    ],
    ids=["plain", "numbers", "parent", "no kind", "adapter", "extra keys", "lookahead", "largest token"],
)
def test_a_run_comes_back_as_it_was(words: dict[str, Any]) -> None:
    run = make_run(**words)
    (found,) = unpack_runs(pack_runs([run], 1 << 20))
    assert words_of(found) == words_of(run)


def test_a_session_does_not_come_back() -> None:
    (found,) = unpack_runs(pack_runs([make_run(session_id="chat")], 1 << 20))
    assert found.session_id is None


def test_the_leading_runs_that_fit_are_kept_and_the_estimate_of_their_size_suffices() -> None:
    runs = [make_run(10 * number) for number in range(1, 6)]
    size = len(pack_runs(runs[:1], 1 << 20))
    assert len(unpack_runs(pack_runs(runs, 3 * size + 20))) == 3
    assert size <= packed_size(runs[0]) < 2 * size


@pytest.mark.parametrize(
    "words", [{"token_ids": array("q", [-1] * 24)}, {"hashes": [b"a", 1] * 3}, {"extra_keys": [object()]}]
)
def test_what_has_no_form_as_bytes_is_left_out(words: dict[str, Any]) -> None:
    good = make_run()
    assert len(unpack_runs(pack_runs([make_run(**words), good], 1 << 20))) == 1


def test_damaged_bytes_are_refused_and_never_read_beyond() -> None:
    data = pack_runs([make_run()], 1 << 20)
    for end in range(1, len(data)):
        with pytest.raises(ValueError, match="is damaged"):
            unpack_runs(data[:end])
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x41
        try:
            runs = unpack_runs(bytes(changed))
        except ValueError:
            continue
        assert all(len(run.hashes) == len(run.keys) * run.factor for run in runs)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("group_idx", 1 << 70),
        ("group_idx", -1),
        ("lora_id", 1 << 70),
        ("window", 1.5),
        ("kind", 7),
        ("lora_name", ["x"]),
    ],
)
def test_words_that_no_publisher_could_send_are_refused(word: str, value: Any) -> None:
    data = pack_runs([make_run(**{word: value})], 1 << 20)
    with pytest.raises(ValueError, match="is damaged"):
        unpack_runs(data)


@pytest.mark.parametrize("key", [1 << 70, None, 1.5, {"hex": "x"}])
def test_extra_keys_that_no_engine_hashes_are_refused(key: Any) -> None:
    data = pack_runs([make_run(extra_keys=[(key,), *[None] * 5])], 1 << 20)
    with pytest.raises(ValueError, match="is damaged"):
        unpack_runs(data)
