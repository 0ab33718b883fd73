"""The tiers of one engine in a process of their own: starts, ends by force, and words that do not fit."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.engines import PATIENCE, SmallEngine
from tiering import load_stack
from tiering.config import io_process
from tiering.config.io_process import IoProcess
from tiering.connector.stats import Increments
from tiering.errors import ConfigError, TierUnavailableError
from tiering.machine.tier import MachineTier
from tiering.testing.clock import until


def stack_of(path: Path, **words: Any) -> dict[str, Any]:
    disk = {"type": "local", "path": str(path), "capacity": "64MiB", **words.pop("tier", {})}
    return {"secondary": [disk], "io": "process", "machine": None, "open_deadline": "60s", **words}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., SmallEngine]]:
    made: list[SmallEngine] = []

    def make(**words: Any) -> SmallEngine:
        made.append(SmallEngine(None, **stack_of(tmp_path / "disk", **words)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def host_of(engine: SmallEngine) -> IoProcess:
    tier = engine.manager.secondary_tiers[0]
    assert isinstance(tier, MachineTier)
    assert isinstance(tier._host, IoProcess)
    return tier._host


def pidfd_of(host: IoProcess) -> int:
    assert host._child is not None
    return os.pidfd_open(host._child.pid)


def is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def test_blocks_are_those_of_a_stack_without_the_word(engine: Callable[..., SmallEngine]) -> None:
    """Both forms use the same directory, one after the other."""
    one = engine()
    assert one.manager.secondary_tiers[0].serving  # type: ignore[attr-defined]
    one.store(range(8))
    assert one.stored()
    one.close()
    two = engine(io="thread")
    assert two.load(range(8)) == (list(range(8)), [])
    two.close()
    three = engine()
    assert three.load(range(8)) == (list(range(8)), [])


def test_a_process_that_was_killed_is_a_miss_and_is_started_again(engine: Callable[..., SmallEngine]) -> None:
    one = engine()
    one.store(range(8))
    assert one.stored()
    one.forget_rows()
    host = host_of(one)
    assert host._child is not None
    host._child.kill()
    assert one.settle(lambda: not one.manager.secondary_tiers[0].serving)  # type: ignore[attr-defined]
    assert one.load(range(8)) == ([], [])
    assert one.serving()
    assert one.stat("io_restarts") == host.restarts >= 1
    one.store(range(20, 28))
    assert one.stored()
    one.forget_rows(20_000)
    found, wrong = one.load(range(20, 28))
    assert (found, wrong) == (list(range(20, 28)), [])


def test_counters_go_on_after_a_restart_of_the_process(engine: Callable[..., SmallEngine]) -> None:
    """A counter that fell would let the metrics count the engine's own ones of that tier again."""
    one = engine()
    one.store(range(8))
    assert one.stored()
    increments, seen = Increments(), dict.fromkeys(("cascades", "io_restarts", "written_bytes"), 0)

    def counted(name: str, least: int) -> bool:
        fields = increments.take({"local": one.manager.get_stats()["tiers"]["local"]})["local"]
        for each in seen:
            seen[each] += fields[each]
        return seen[name] >= least

    assert one.settle(lambda: counted("written_bytes", 1))
    host = host_of(one)
    assert host._child is not None
    host._child.kill()
    assert one.settle(lambda: counted("io_restarts", 1))
    assert one.serving()
    written = seen["written_bytes"]
    one.store(range(20, 28))
    assert one.stored()
    assert one.settle(lambda: counted("written_bytes", written + 1))
    assert seen["io_restarts"] == host.restarts
    assert seen["cascades"] == one.stat("cascades") == 16


def test_a_process_that_always_ends_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(io_process, "FIRST_RESTART", 0.001)
    monkeypatch.setattr(io_process, "MOST_RESTARTS", 3)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    host = IoProcess(load_stack({"primary": {"capacity": "1MiB"}, **stack_of(tmp_path)}).secondary, None, 5.0)
    host.start(PATIENCE)
    host._thread.join(PATIENCE)
    assert not host._thread.is_alive()
    assert host.restarts == 3
    assert "has ended with code 1, 4 times in a row" in caplog.text
    assert host.leave(5.0)


def test_a_child_that_the_engine_forks_meanwhile_does_not_hold_up_the_process(
    engine: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has the other end of the process's standard input until it ends."""
    dumps, held = json.dumps, os.pipe()

    def forks(words: Any, **options: Any) -> str:
        if "parent" in words and not os.fork():
            os.close(held[1])
            os.read(held[0], 1)
            os._exit(0)
        return dumps(words, **options)

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", forks)
        one = engine(open_deadline="60s")
    try:
        assert one.manager.secondary_tiers[0].serving  # type: ignore[attr-defined]
    finally:
        os.close(held[1])
        os.wait()
        os.close(held[0])


def test_files_of_the_working_directory_are_not_those_of_python(
    engine: Callable[..., SmallEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    assert engine(open_deadline="60s").manager.secondary_tiers[0].serving  # type: ignore[attr-defined]


def test_without_a_process_an_engine_runs_and_a_required_tier_refuses(
    engine: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    one = engine(open_deadline="1s")
    assert one.store(range(4))
    assert one.load([50]) == ([], [])
    with pytest.raises(TierUnavailableError, match="is marked required"):
        engine(open_deadline="1s", tier={"required": True})


def test_the_process_ends_with_the_manager(engine: Callable[..., SmallEngine]) -> None:
    one = engine()
    host = host_of(one)
    pidfd = pidfd_of(host)
    one.store(range(8))
    one.close()
    assert is_dead(pidfd)
    assert host._child is not None
    assert host._child.returncode == 0
    os.close(pidfd)


def test_a_signal_to_all_processes_of_a_unit_leaves_the_engine_its_stores(engine: Callable[..., SmallEngine]) -> None:
    """The engine ends the process once it has nothing left to store."""
    one = engine()
    host = host_of(one)
    assert host._child is not None
    host._child.send_signal(signal.SIGTERM)
    host._child.send_signal(signal.SIGINT)
    one.store(range(8))
    assert one.stored()
    one.forget_rows()
    assert one.load(range(8)) == (list(range(8)), [])
    assert host.restarts == 0


@pytest.mark.parametrize("more", [[], [{"type": "memory", "name": "second", "capacity": "1MiB"}]])
def test_a_process_that_is_stopped_is_killed_at_the_end(
    tmp_path: Path, more: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its death releases the rows of the jobs that it has not ended, also those of a tier before the last."""
    words = stack_of(tmp_path, shutdown_deadline="1s")
    words["secondary"] += more
    one = SmallEngine(None, **words)
    host = host_of(one)
    assert host._child is not None
    host._child.send_signal(signal.SIGSTOP)
    one.store(range(8))
    one.close()
    assert host._child.returncode == -signal.SIGKILL
    assert "the process is killed" in caplog.text
    assert "a tier did not stop" not in caplog.text


def test_the_process_gets_what_is_left_of_the_time_of_a_shutdown(
    engine: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for jobs has used it up: a second one would delay the engine's end beyond the deadline."""
    given: list[float] = []
    close = IoProcess.close

    def noted(host: IoProcess, *seconds: float) -> bool:
        given.extend(seconds)
        return close(host, *seconds)

    monkeypatch.setattr(IoProcess, "close", noted)
    one = engine(shutdown_deadline="1s")
    host = host_of(one)
    assert host._child is not None
    host._child.send_signal(signal.SIGSTOP)
    one.store(range(8))
    one.close()
    assert [seconds < 0.5 for seconds in given] == [True]


def test_the_kernel_ends_it_with_an_engine_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import signal; from pathlib import Path; from tests.machine import test_io_process as t\n"
        f"one = t.SmallEngine(None, **t.stack_of(Path({str(tmp_path)!r})))\n"
        "print(t.host_of(one)._child.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pidfd = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    assert until(lambda: is_dead(pidfd), PATIENCE)
    os.close(pidfd)


@pytest.mark.parametrize(
    "words",
    [
        {"type": "local", "path": "/x", "capacity": "1GiB", "load_deadline": "3s", "max_inflight": 4},
        {"type": "memory", "name": "m", "capacity": "1GiB"},
        {"type": "object", "url": "s3://bucket/x", "max_inflight": "auto", "retries": {"attempts": 2}},
        {"type": "s3", "bucket": "bucket", "region": "x", "load_deadline": "2s"},
        {"type": "valkey", "url": "redis://h/0", "ttl": "1h"},
    ],
    ids=lambda words: words["type"],
)
def test_options_cross_the_border_whole(words: dict[str, Any]) -> None:
    (options,) = load_stack({"primary": {"capacity": "1MiB"}, "secondary": [words]}).secondary
    there = io_process.options_of(json.loads(json.dumps(io_process.words_of(options))))
    assert there == options


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"machine": {"socket": "/x/y", "tiers": ["a"]}, "secondary": []}, "io: has no meaning with machine"),
        ({"secondary": []}, "io: concerns secondary tiers, and there are none"),
        ({"tier": {"min_prefix_blocks": 3}}, "min_prefix_blocks: cannot be used with io: process"),
        ({"secondary": [{"type": "tests.tiers_for_tests:NONE"}]}, "type"),
        ({"mode": "simple", "secondary": []}, "io: has no meaning in mode simple"),
        ({"io": "fork"}, "io: "),
    ],
)
def test_words_that_do_not_fit_are_refused(tmp_path: Path, words: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_stack({"primary": {"capacity": "1MiB"}, **stack_of(tmp_path, **words)})
