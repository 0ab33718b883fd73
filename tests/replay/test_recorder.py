"""A recorded trace: what a replay reads from it, and failures that cost records and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiering.api.engine import TraceRecording
from tiering.api.keys import make_offload_key
from tiering.errors import ConfigError
from tiering.replay import recorder as recorder_module
from tiering.replay.readers import Trace
from tiering.replay.recorder import TraceRecorder
from tiering.replay.trace_files import TraceFiles
from tiering.testing.clock import until

KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(1, 9)]

CHILD = """
import sys, time
from pathlib import Path
from tiering.api.engine import TraceRecording
from tiering.api.keys import make_offload_key
from tiering.replay.recorder import TraceRecorder
recorder = TraceRecorder(TraceRecording(Path(sys.argv[1]), 1 << 30, 1 << 32), 16)
keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(8)]
while True:
    recorder.record(time.time(), 128, 1, keys)
    if recorder.written > 20:
        print("ready", flush=True)
"""

Make = Callable[..., TraceRecorder]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[TraceRecorder] = []

    def start(
        salt: str = "", max_bytes: int = 1 << 20, directory: str = "traces", max_total: int = 1 << 22
    ) -> TraceRecorder:
        made.append(TraceRecorder(TraceRecording(tmp_path / directory, max_bytes, max_total, 4096, salt), 16))
        return made[-1]

    yield start
    for recorder in made:
        end(recorder)


def end(recorder: TraceRecorder) -> None:
    recorder.stop()
    recorder.join(10)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("trace-*.jsonl"), key=lambda path: int(path.stem.rpartition("-")[2]))


def test_a_replay_reads_what_was_recorded(make: Make, tmp_path: Path) -> None:
    recorder = make()
    recorder.record(10.0, 100, 30, KEYS)
    recorder.record(11.0, 5, 1, [])
    end(recorder)
    (path,) = files(tmp_path / "traces")
    trace = Trace([path])
    first, second = trace
    assert (trace.info.block_tokens, trace.info.block_bytes) == (16, 4096)
    assert (first.time, first.input_tokens, first.output_tokens) == (10.0, 100, 30)
    assert first.hashes.tolist() == [number * 0x0101010101010101 for number in range(1, 7)], "the full prompt blocks"
    assert (second.time, second.input_tokens, len(second.hashes)) == (11.0, 5, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (recorder.written, recorder.dropped) == (2, 0)


def test_a_salt_keys_the_hashes_alike_in_all_engines_of_a_stack(make: Make, tmp_path: Path) -> None:
    read = {}
    for name, salt in {"plain": "", "one": "secret", "two": "secret", "other": "another"}.items():
        recorder = make(salt, directory=name)
        recorder.record(1.0, 16 * 200, 1, KEYS * 25)
        end(recorder)
        (request,) = Trace(files(tmp_path / name))
        read[name] = request.hashes.tolist()
    assert read["one"] == read["two"]
    assert len(read["one"]) == 200
    assert len(set(read["one"])) == len(set(read["plain"])) == 8
    assert len(set(read["one"]) | set(read["plain"]) | set(read["other"])) == 24


def test_a_full_queue_drops_requests_and_counts_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_WAITING_BLOCKS", 20)
    may_write, append = threading.Event(), TraceFiles.append

    def slow(self: TraceFiles, line: bytes) -> None:
        may_write.wait(10)
        append(self, line)

    monkeypatch.setattr(TraceFiles, "append", slow)
    recorder = make()
    for _ in range(10):
        recorder.record(1.0, 128, 1, KEYS)
    assert (recorder.written, recorder.dropped) == (0, 7)
    may_write.set()
    until(lambda: recorder.written == 3)
    recorder.record(1.0, 128, 1, KEYS)
    end(recorder)
    assert (recorder.written, recorder.dropped) == (4, 7)


def test_a_full_disk_drops_requests_and_leaves_no_part_of_a_line(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, full = os.write, threading.Event()

    def write_some(file: int, data: bytes) -> int:
        if not full.is_set():
            return write(file, data)
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, bytes(data[: len(data) - 50]))

    monkeypatch.setattr("tiering.replay.trace_files.os.write", write_some)
    recorder = make()
    recorder.record(1.0, 128, 1, KEYS)
    until(lambda: recorder.written == 1)
    full.set()
    for _ in range(3):
        recorder.record(2.0, 128, 1, KEYS)
    until(lambda: recorder.dropped == 3)
    full.clear()
    recorder.record(3.0, 128, 1, KEYS)
    end(recorder)
    assert [request.time for request in Trace(files(tmp_path / "traces"))] == [1.0, 3.0]
    assert len([line for line in caplog.records if "No space left" in line.getMessage()]) == 1


def test_a_directory_that_cannot_be_made_costs_records_only(make: Make, tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("a file is in the way")
    recorder = make()
    recorder.record(1.0, 128, 1, KEYS)
    end(recorder)
    assert (recorder.written, recorder.dropped) == (0, 1)


def test_the_oldest_file_makes_room_and_a_removed_file_is_replaced(make: Make, tmp_path: Path) -> None:
    recorder = make(max_bytes=8000)
    for number in range(200):
        recorder.record(float(number), 128, 1, KEYS)
    until(lambda: recorder.written == 200)
    paths = files(tmp_path / "traces")
    assert sum(path.stat().st_size for path in paths) <= 8000
    times = [request.time for request in Trace(paths)]
    assert len(paths) > 4
    assert times == [float(number) for number in range(200 - len(times), 200)]
    paths[-1].unlink()
    recorder.record(200.0, 128, 1, KEYS)
    end(recorder)
    assert [request.time for request in Trace(files(tmp_path / "traces")[-1:])] == [200.0]


def test_files_of_ended_processes_make_room_the_oldest_first(make: Make, tmp_path: Path) -> None:
    directory = tmp_path / "traces"
    directory.mkdir()
    for number in range(6):
        old = directory / f"trace-pod-{number}-7-1.jsonl"
        old.write_bytes(b"x" * 10_000)
        os.utime(old, (number, number))
    (directory / "notes.jsonl").write_bytes(b"x" * 100_000)
    (directory / "trace-folder-1-1.jsonl").mkdir()
    recorder = make(max_bytes=8000, max_total=32_000)
    for number in range(200):
        recorder.record(float(number), 128, 1, KEYS)
    end(recorder)
    left = sorted(path.name for path in directory.glob("trace-pod-*"))
    assert left == ["trace-pod-4-7-1.jsonl", "trace-pod-5-7-1.jsonl"]
    own = [path for path in files(directory) if path.is_file() and "pod" not in path.name]
    assert sum(path.stat().st_size for path in own) <= 8000
    assert (directory / "notes.jsonl").exists()
    assert (recorder.written, recorder.dropped) == (200, 0)


def test_a_process_whose_file_made_room_for_anothers_begins_a_new_one(make: Make, tmp_path: Path) -> None:
    one = make(max_bytes=80_000, max_total=80_000)
    one.record(1.0, 128, 1, KEYS)
    until(lambda: one.written == 1)
    (path,) = files(tmp_path / "traces")
    os.utime(path, (1, 1))
    removed = path.stat().st_ino
    other = make(max_bytes=80_000, max_total=80_000)
    (path.parent / "trace-pod-1-1.jsonl").write_bytes(b"x" * 70_000)
    other.record(2.0, 128, 1, KEYS)
    until(lambda: other.written == 1)
    assert removed not in {each.stat().st_ino for each in files(path.parent)}, "the name may be used again"
    one.record(3.0, 128, 1, KEYS)
    end(one)
    end(other)
    kept = [path for path in files(path.parent) if "pod" not in path.name]
    assert [request.time for request in Trace(kept)] == [2.0, 3.0]


def test_a_second_recorder_of_the_process_writes_to_a_file_of_its_own(make: Make, tmp_path: Path) -> None:
    for recorder in (make(), make()):
        recorder.record(1.0, 128, 1, KEYS)
        end(recorder)
    assert [len(list(Trace([path]))) for path in files(tmp_path / "traces")] == [1, 1]


def test_without_a_thread_nothing_is_recorded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    recorder = make()
    recorder.record(1.0, 128, 1, KEYS)
    end(recorder)
    assert (recorder.written, recorder.dropped) == (0, 1)


def test_a_forked_child_records_nothing(make: Make, tmp_path: Path) -> None:
    recorder = make()
    recorder.record(1.0, 128, 1, KEYS)
    child = os.fork()
    if not child:
        recorder.record(2.0, 128, 1, KEYS)
        recorder.stop()
        recorder.join(10)
        os._exit(recorder.dropped)
    assert os.waitpid(child, 0)[1] == 0
    recorder.record(3.0, 128, 1, KEYS)
    end(recorder)
    assert [request.time for request in Trace(files(tmp_path / "traces"))] == [1.0, 3.0]


def test_a_killed_process_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    (path,) = files(tmp_path)
    assert len(list(Trace([path]))) > 20


def test_an_incomplete_last_line_is_ignored_and_any_other_is_not(make: Make, tmp_path: Path) -> None:
    recorder = make()
    recorder.record(1.0, 128, 1, KEYS)
    recorder.record(2.0, 128, 1, KEYS)
    end(recorder)
    (path,) = files(tmp_path / "traces")
    whole = path.read_text()
    path.write_text(whole[:-9])
    assert [request.time for request in Trace([path])] == [1.0]
    path.write_text(whole[:-9] + "\n")
    with pytest.raises(ConfigError, match="line 3"):
        list(Trace([path]))
