"""Traces: three formats, several files, and files that are no traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from tests.replay.traces import public_line, request, write_mooncake
from tiering.errors import ConfigError
from tiering.replay.readers import Trace, TraceInfo, in_order, own_lines
from tiering.replay.trace import TraceRequest, chained, keys_of


def test_mooncake_counts_milliseconds_and_512_tokens_a_block(tmp_path: Path) -> None:
    trace = Trace([write_mooncake(tmp_path / "t.jsonl", [[0, 1], [0, 2, 3]])])
    assert trace.info == TraceInfo("mooncake", 512)
    first, second = list(trace)
    assert (first.time, second.time, second.input_tokens, second.output_tokens) == (0.0, 1.0, 1536, 7)
    assert first.hashes[0] == second.hashes[0]
    assert first.hashes[1] != second.hashes[1]
    assert trace.bytes_read == trace.total_bytes


def test_bailian_counts_seconds_and_16_tokens_a_block(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(public_line(61.5, [4, 5], chat_id=1, parent_chat_id=-1, type="text", turn=1))
    trace = Trace([path])
    assert trace.info == TraceInfo("bailian", 16)
    assert [found.time for found in trace] == [61.5]


def test_own_format_gives_back_what_was_written_also_compressed(tmp_path: Path) -> None:
    written = [request(1.5, [1, 2, 3], output=9), request(2.0, [])]
    text = "\n".join(own_lines(written, 10, 4096))
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (plain, packed):
        trace = Trace([path])
        assert trace.info == TraceInfo("kv-tiering-trace", 10, 4096)
        found = list(trace)
        assert [(r.time, r.input_tokens, r.output_tokens) for r in found] == [(1.5, 30, 9), (2.0, 0, 1)]
        assert np.array_equal(found[0].hashes, written[0].hashes)


def test_blocks_are_equal_only_after_equal_prefixes() -> None:
    one, other = chained([1, 2, 3]), chained([9, 2, 3])
    assert not set(one.tolist()) & set(other.tolist())
    assert np.array_equal(chained([1, 2, 3, 4])[:3], one)
    long = chained(range(5000))
    assert np.array_equal(chained(range(6000))[:5000], long)
    assert len(set(keys_of(long))) == 5000


def test_requests_are_sorted_within_the_window_and_clamped_beyond() -> None:
    times = [3.0, 1.0, 2.0, 9.0, 8.0, 0.5]
    found = list(in_order([request(time, [1]) for time in times], window=2))
    assert [r.time for r in found] == [1.0, 2.0, 3.0, 3.0, 8.0, 9.0]


def test_a_file_is_read_as_a_stream(tmp_path: Path) -> None:
    trace = Trace([write_mooncake(tmp_path / "t.jsonl", [[n] for n in range(20_000)])])
    next(iter(trace))
    assert 0 < trace.bytes_read < (trace.total_bytes or 0) / 4


def test_several_files_are_merged_by_time(tmp_path: Path) -> None:
    one = write_mooncake(tmp_path / "a.jsonl", [[1], [2]], every_ms=2000)
    two = write_mooncake(tmp_path / "b.jsonl", [[1], [3]], every_ms=1000)
    assert [r.time for r in Trace([one, two])] == [0.0, 0.0, 1.0, 2.0]
    (tmp_path / "c.jsonl").write_text("\n".join(own_lines([request(0, [1])], 16)))
    with pytest.raises(ConfigError, match="blocks of different sizes"):
        Trace([one, tmp_path / "c.jsonl"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no request"),
        ("no json\n", "line 1: is not JSON"),
        ("[" * 100_000, "line 1: is not JSON: its values are nested too deeply"),
        (public_line(0, [1]) + "[" * 100_000, "line 2: .*nested too deeply"),
        ('{"some": "thing"}\n', "is not a known kind of trace"),
        (json.dumps({"format": "kv-tiering-trace", "version": 99, "block_tokens": 16}), "version 99"),
        (json.dumps({"format": "kv-tiering-trace", "version": 1, "block_tokens": 0}), "above 0"),
        (public_line(0, [1]) + '{"timestamp": 1}\n', "line 2: .* input_length is missing|line 2"),
        (public_line(0, [1]) + public_line(1, [-5]), "line 2"),
        (public_line(0, [1]) + public_line(float("nan"), [5]), "line 2"),
        ("\n".join(own_lines([request(float("nan"), [1])], 16)), "line 2"),
        (public_line(0, [1]) + public_line(1, [5], input_length=-5), "line 2: .*input_length -5 is not a number"),
        (public_line(0, [1]) + public_line(1, [5], input_length=10**30), r"line 2: .*input_length 1e\+30 is not"),
        (public_line(0, [1]) + public_line(1, [5], output_length=-1), "line 2: .*output_length -1 is not"),
        (
            public_line(0, [1]) + public_line(1, [1] * 16, input_length=6758, output_length=400),
            "line 2: .*16 hashes are more than the blocks of 512 tokens .* of 7,158 tokens; .* --block-tokens",
        ),
        (
            "\n".join(own_lines([request(0, [1]), TraceRequest(1.0, -1, 0, chained([]))], 10)),
            "line 3: .*input_tokens -1",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        list(Trace([path]))


def test_a_trace_may_name_the_blocks_of_answers_too(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(public_line(0, list(range(14)), input_length=6758, output_length=400))
    (found,) = Trace([path])
    assert len(found.hashes) == 14


def test_a_missing_file_and_a_cut_archive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Trace([tmp_path / "none.jsonl"])
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(public_line(0, [1]).encode() * 1000)[:-20])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(Trace([path]))
