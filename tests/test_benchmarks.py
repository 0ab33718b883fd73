"""The benchmarks' harness: comparisons, verdicts, and the places of results. No test measures time."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from benchmarks import bench_cuda, bench_mlperf_kv
from benchmarks.__main__ import found, main
from benchmarks.bench_control_plane import NoopTier
from benchmarks.bench_load_or_compute import Point, plot
from benchmarks.harness import (
    Bench,
    Sample,
    Spread,
    Stats,
    machine,
    open_tier,
    ratio,
    render_targets,
    show,
    spread,
    write_json,
    write_section,
)
from benchmarks.vllm_overhead import check_answers
from benchmarks.vllm_overhead_engine import Answered
from benchmarks.vllm_overhead_report import CPU, EMPTIED, LOCAL, NONE, NULL, PROCESS, THEIRS, report
from tests.copy.fake_cuda import FakeCuda


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench("subject", tmp_path, out=io.StringIO())


def counting(log: list[str], name: str, values: list[float]) -> Callable[[], Sample]:
    def run() -> Sample:
        log.append(name)
        return Sample(values[len([entry for entry in log if entry == name]) - 1], cpu=1.0, extra={"deep": 2.0})

    return run


def test_variants_alternate_and_the_warm_up_does_not_count(bench: Bench) -> None:
    log: list[str] = []
    stats = bench.compare(
        "c", {"a": counting(log, "a", [99, 1, 2, 3]), "b": counting(log, "b", [99, 4, 5, 9])}, repeats=3
    )
    assert log == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert (stats["a"].samples, stats["b"].samples) == ((1, 2, 3), (4, 5, 9))
    assert (stats["b"].median, stats["b"].low, stats["b"].high, stats["b"].cpu, stats["b"].extra) == (
        5,
        4,
        9,
        1.0,
        {"deep": 2.0},
    )


def test_a_ratio_is_taken_within_each_round() -> None:
    def stats(*samples: float) -> Stats:
        return Stats(0, 0, 0, samples, None, {})

    assert ratio(stats(1, 10, 100), stats(2, 10, 50)) == 1.0


def test_a_quick_run_does_one_round(tmp_path: Path) -> None:
    log: list[str] = []
    Bench("subject", tmp_path, quick=True, out=io.StringIO()).compare("c", {"a": counting(log, "a", [1])})
    assert log == ["a"]


@pytest.mark.parametrize(
    ("value", "direction", "ok"),
    [(1.0, "max", True), (1.1, "max", False), (1.0, "min", True), (0.9, "min", False), (None, "max", False)],
)
def test_a_target_is_reached_at_its_limit_and_not_beyond(
    bench: Bench, value: float | None, direction: Literal["max", "min"], ok: bool
) -> None:
    bench.target("t", value, 1.0, direction)
    assert bench.targets[0].ok is ok


@pytest.mark.parametrize(
    ("direction", "low", "high", "ok"),
    [("max", 0.1, 1.02, True), ("max", 0.1, 1.04, False), ("min", 0.98, 9.0, True), ("min", 0.96, 9.0, False)],
)
def test_an_estimate_reaches_a_target_if_its_far_end_does_but_for_the_tolerance(
    bench: Bench, direction: Literal["max", "min"], low: float, high: float, ok: bool
) -> None:
    bench.target("t", Spread(1.0, low, high), 1.0, direction)
    assert bench.targets[0].ok is ok
    assert f"({show(low)} to {show(high)})" in render_targets(bench.targets)


def test_the_interval_of_a_median_is_within_the_rounds_and_the_same_again() -> None:
    values = [1.0, 1.1, 0.9, 1.05, 5.0, 1.02, 0.97]
    found = spread(values)
    assert (found.middle, found) == (1.02, spread(values))
    assert 0.9 <= found.low < 1.02 < found.high < 5.0
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0)


def test_the_interval_of_a_median_covers_processes_that_differ_as_long_as_they_live() -> None:
    starts = [1.0, 1.01, 0.99, 1.1, 1.11, 1.09]  # two starts of three rounds
    apart, together = spread(starts * 4), spread(starts * 4, group=3)
    assert apart.middle == together.middle
    assert together.low <= 1.0
    assert together.high >= 1.1
    assert apart.high - apart.low < together.high - together.low


def answered(cached: int, answer: int = 7, children: float = 0.0) -> Answered:
    return Answered(1.0, 1.0, 0.0, 0.0, 0.0, children, 0.0, 1, 1, [0.1], [cached], [[answer]])


@pytest.mark.parametrize(
    ("again", "long", "fault"),
    [
        (answered(96), answered(4064), ""),
        (answered(64), answered(4064), "64"),
        (answered(96), answered(4032), "4032"),
        (answered(96, answer=8), answered(4064), "other answers"),
    ],
)
def test_a_round_of_the_overhead_counts_only_if_all_came_back_and_no_answer_is_wrong(
    again: Answered, long: Answered, fault: str
) -> None:
    new = {"new": answered(0), "long new": answered(0)}
    work = {"none": new, "ours, CPU": new | {"again": again, "long again": long}}
    if not fault:
        check_answers(work)
        return
    with pytest.raises(RuntimeError, match=fault):
        check_answers(work)


def test_a_round_in_which_the_tiers_process_took_no_cpu_does_not_count() -> None:
    new = {"new": answered(0), "long new": answered(0)}
    counted = {part: answered(0, children=0.1) for part in new}
    back = {"again": answered(96), "long again": answered(4064)}  # from the CPU tier: its process may have rested
    check_answers({"none": new, PROCESS: counted | back})
    with pytest.raises(RuntimeError, match="process was not counted"):
        check_answers({"none": new, PROCESS: counted | back | {"long new": answered(0)}})


def test_a_run_with_chosen_engines_judges_them_alone_and_shows_their_thread_beside_null(bench: Bench) -> None:
    parts = ("new", "long new", "again", "long again", "spins")
    full = {part: answered(0) for part in parts} | {part + EMPTIED: answered(0) for part in parts[2:]}
    new = {part: answered(0) for part in parts[:2]}
    dearer = full | {"new": replace(answered(0), thread=1.02)}
    report(bench, [{NONE: full, NULL: new, **dict.fromkeys(THEIRS, full), CPU: dearer}] * 2, 1)
    assert {target.name.partition(":")[0] for target in bench.targets} == {CPU}
    table = bench.tables[0]
    beyond = {row[0]: row[table.headers.index("beyond null")] for row in table.rows}
    assert beyond[CPU] == "0.5 (0.5 to 0.5)"
    assert (beyond[NONE], beyond[NULL]) == ("", "")
    assert "2 starts" in table.title
    assert LOCAL not in "".join(bench.notes)


def test_a_plot_has_a_mark_for_each_cell_and_shows_where_the_better_choice_is() -> None:
    cells = [("1", 1.0), ("1", 1.0), ("1", 0.5), ("0.1", 0.9), ("0.1", 0.1), ("0.1", 2.0)]
    _, axis, first, second, other, _ = plot(
        [Point(2000.0, *cell) for cell in cells] + [Point(50000.0, "1", 1.02)]
    ).split("\n")
    low, one = axis.index("0.3"), axis.index("1.0")
    assert {column: mark for column, mark in enumerate(first[low:], low) if mark != " "} == {low + 10: "1", one: "2"}
    assert {column for column, mark in enumerate(second) if mark == "1" and column >= low} == {low, one - 5, one + 5}
    assert (second[one], other[one : one + 2]) == ("|", "|1")
    assert [line.split()[0] for line in (first, second, other)] == ["2,000", "0.1", "50,000"]


def test_a_section_is_rewritten_in_place_and_the_others_stay(bench: Bench, tmp_path: Path) -> None:
    path, shape = tmp_path / "RESULTS.md", machine(tmp_path)
    path.write_text("# Results\n\nwords\n")
    other = Bench("other", tmp_path, out=io.StringIO())
    for round_, run in enumerate((bench, other, bench)):
        run.tables.clear()
        run.table("t", ["a"], [[f"round {round_}"]])
        write_section(path, run, shape, f"description of {run.name}")
    text = path.read_text()
    assert [text.count(words) for words in ("words", "round 0", "round 1", "round 2", "## subject", "## other")] == [
        1,
        0,
        1,
        1,
        1,
        1,
    ]
    assert text.index("## subject") < text.index("## other")
    assert str(shape.cores) in text


def test_results_are_written_for_programs_too(bench: Bench, tmp_path: Path) -> None:
    bench.compare("c", {"a": lambda: 2.0}, repeats=1)
    bench.target("t", 2.0, 3.0, "max", "x")
    write_json(bench, machine(tmp_path), tmp_path / "out" / "subject.json")
    data = json.loads((tmp_path / "out" / "subject.json").read_text())
    assert data["results"]["c"]["a"]["median"] == 2.0
    assert data["targets"] == [
        {"name": "t", "value": 2.0, "limit": 3.0, "direction": "max", "unit": "x", "ok": True, "spread": None}
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (1234.5, "1,234"), (1234567, "1,234,567"), (0.00001, "1.00e-05"), (0.0, "0"), ("x", "x")],
)
def test_numbers_are_shown_as_people_read_them(value: float | str, text: str) -> None:
    assert show(value) == text


@pytest.mark.parametrize("name", found())
def test_every_benchmark_says_what_it_measures_and_can_be_run(name: str) -> None:
    module = importlib.import_module(f"benchmarks.bench_{name}")
    assert callable(module.run)
    assert len(module.__doc__ or "") > 60


def test_a_benchmark_that_cannot_run_here_is_left_out_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.import_module("benchmarks.bench_cuda"), "lacks", lambda: "it needs the moon")
    assert main(["--quick", "--only", "cuda", "--out", str(tmp_path)]) == 0
    assert "Left out: it needs the moon." in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_benchmark_of_cuda_copies_moves_what_it_says(tmp_path: Path) -> None:
    bench = Bench("cuda", tmp_path, quick=True, out=io.StringIO())
    api = FakeCuda()
    bench_cuda.compare(bench, 1024, api.kernel, "cpu", api)
    assert set(bench.results) == {"store, pages of 1 KiB", "load, pages of 1 KiB"}
    assert [len(stats) for stats in bench.results.values()] == [3, 3]
    assert api.log.count("host waits for event") == 2
    assert not api.runtime.registered


def test_a_benchmark_that_breaks_does_not_stop_the_others_and_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: Bench) -> None:
        raise RuntimeError("no such device")

    def fine(bench: Bench) -> None:
        bench.target("reached", 1.0, 2.0)

    first, second = found()[:2]
    monkeypatch.setattr(importlib.import_module(f"benchmarks.bench_{first}"), "run", broken)
    monkeypatch.setattr(importlib.import_module(f"benchmarks.bench_{second}"), "run", fine)
    assert main(["--quick", "--only", first, second, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "no such device" in printed.err
    assert f"Did not run to the end: {first}" in printed.err
    assert "reached" in printed.out
    assert {path.name for path in tmp_path.iterdir()} == {f"{second}.quick.json"}


def test_a_benchmark_for_which_the_disk_has_too_little_room_says_so_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, wanted in (("machine", 1 << 60), ("local", 1)):
        module = importlib.import_module(f"benchmarks.bench_{name}")
        monkeypatch.setattr(module, "disk_bytes", lambda _, wanted=wanted: wanted)
        monkeypatch.setattr(module, "run", lambda _: print("it begins"))
    assert main(["--quick", "--only", "machine", "local", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"Too little room: {tmp_path} has " in printed
    assert printed.index("machine takes ") < printed.index("it begins")
    assert printed.count("Too little room") == 1


def test_a_tier_that_does_not_open_ends_the_benchmark_with_its_reason() -> None:
    class Full(NoopTier):
        open_error = OSError(28, "No space left on device")

        def open(self, deadline: float) -> bool:
            return False

    with pytest.raises(RuntimeError, match=r"the tier noop did not open: \[Errno 28\] No space left on device"):
        open_tier(Full(), 1.0)
    open_tier(NoopTier(), 1.0)


def test_chosen_engines_and_their_starts_reach_a_benchmark_that_has_a_choice_and_get_a_section_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Bench] = []
    first, second = found()[:2]
    module = importlib.import_module(f"benchmarks.bench_{first}")
    monkeypatch.setattr(module, "run", seen.append)
    monkeypatch.setattr(module, "CHOICES", {"cpu": "ours, CPU", "s3": "ours, CPU + S3"}, raising=False)
    monkeypatch.setattr(importlib.import_module(f"benchmarks.bench_{second}"), "run", seen.append)
    words = ["--quick", "--only", first, second, "--out", str(tmp_path), "--starts", "7"]
    assert main([*words, "--engines", "cpu", "s3"]) == 0
    assert [(run.name, run.engines, run.starts) for run in seen] == [(f"{first}_chosen", ["cpu", "s3"], 7)]
    assert {path.name for path in tmp_path.iterdir()} == {f"{first}_chosen.quick.json"}
    assert "Left out: the engines that it may choose are none." in capsys.readouterr().out
    assert main([*words, "--engines", "moon"]) == 0
    assert len(seen) == 1
    assert "Left out: the engines that it may choose are cpu s3." in capsys.readouterr().out


def test_the_workload_of_mlperf_keeps_the_published_ranges_and_reads_what_a_conversation_has_written() -> None:
    turns = bench_mlperf_kv.workload(users=12, turns=400, seed=1)
    assert turns == bench_mlperf_kv.workload(users=12, turns=400, seed=1)
    assert turns != bench_mlperf_kv.workload(users=12, turns=400, seed=2)
    ranges = bench_mlperf_kv.TEMPLATES.values()
    assert min(low for (low, _), _ in ranges) // 4 <= min(turn.tokens for turn in turns)
    assert max(turn.tokens for turn in turns) <= max(high for (_, high), _ in ranges)
    lengths = {len(turn.earlier) for turn in turns}
    assert {0, 1, 2, 3} <= lengths
    assert sum(not turn.earlier for turn in turns[12:]) == pytest.approx(0.2 * 388, rel=0.35)
    written = {turn.key: turn.tokens for turn in turns}
    assert all(written[key] == tokens for turn in turns for key, tokens in turn.earlier)


def test_a_cache_that_returns_other_bytes_ends_the_benchmark_of_mlperfs_workload(tmp_path: Path) -> None:
    class Wrong(bench_mlperf_kv.OwnTiers):
        def load(self, key: str, into: Any) -> int:
            count = super().load(key, into)
            into[-1] ^= 1
            return count

    turns = bench_mlperf_kv.workload(users=1, turns=3, seed=1, scale=50)
    data = bench_mlperf_kv.Data(bench_mlperf_kv.TINY, max(turn.tokens for turn in turns))
    with pytest.raises(RuntimeError, match="other bytes"):
        bench_mlperf_kv.play(Wrong(tmp_path / "wrong", 1 << 24, 1 << 24), turns, data)
    sample = bench_mlperf_kv.play(bench_mlperf_kv.OwnTiers(tmp_path / "right", 1 << 24, 1 << 24), turns, data)
    assert sample.extra["share of tokens found"] == 1


def test_mlperfs_own_tiers_move_the_oldest_turns_to_files_and_drop_them_beyond_the_capacity(tmp_path: Path) -> None:
    cache = bench_mlperf_kv.OwnTiers(tmp_path / "files", memory=100, disk=120)
    turns = {f"turn_{number}": np.full(40, number, np.uint8) for number in range(6)}
    for key, kv in turns.items():
        cache.store(key, kv)
    into = np.zeros(40, np.uint8)
    assert [cache.load(key, into) for key in turns] == [0, 40, 40, 40, 40, 40]
    assert sorted(path.stem for path in (tmp_path / "files").iterdir()) == ["turn_1", "turn_2", "turn_3"]
    assert cache.load("turn_5", into) == 40
    assert (into == 5).all()
