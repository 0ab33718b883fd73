"""The socket of an explainer: private, robust, and gone with its engine."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.explain.walk import make_explainer
from tiering.errors import TemporaryStoreError
from tiering.explain.explainer import Explainer, Missed
from tiering.explain.service import ExplainService, ask, runtime_directory, sockets
from tiering.testing.clock import until
from tiering.testing.keys import keys_of


@contextmanager
def service(explainer: Explainer, path: Path | None) -> Iterator[ExplainService]:
    made = ExplainService(explainer, path)
    try:
        yield made
    finally:
        made.stop(30)


def computed() -> Explainer:
    explainer = make_explainer()
    explainer.missed(Missed("a", 17, 0, 17, 16, keys_of(*range(4)), None))
    explainer.started("a", 0)
    return explainer


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "kv-tiering"


def test_an_engine_answers_on_a_socket_of_its_owner_alone(runtime: Path) -> None:
    with service(computed(), None) as one:
        assert sockets() == [one.path]
        assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        answer = ask(one.path, {"request": "a"})
    assert answer["computed_tokens"] == 17
    assert sockets() == []
    assert not one.path.exists()


def test_an_answer_follows_all_notes_before_the_question(tmp_path: Path) -> None:
    explainer = make_explainer()
    with service(explainer, tmp_path / "s") as one:
        explainer.missed(Missed("a", 17, 0, 17, 16, keys_of(*range(4)), None))
        assert ask(one.path, {"request": "a"}) == {"error": "request a has not begun to compute"}
        explainer.started("a", 0)
        assert ask(one.path, {"request": "a"})["computed_tokens"] == 17
        assert ask(one.path, {"top": True})["causes"][0] == {"cause": "new", "tier": "", "tokens": 16}


def test_an_unknown_request_is_named(tmp_path: Path) -> None:
    with service(computed(), tmp_path / "s") as one:
        error = ask(one.path, {"request": "b"})["error"]
    assert error == "request b is unknown, or is not among the last 1 requests; the latest: a"


def test_an_unknown_request_is_answered_with_the_latest_ones(tmp_path: Path) -> None:
    explainer = make_explainer()
    with service(explainer, tmp_path / "s") as one:
        assert (
            ask(one.path, {"request": "b\n"})["error"] == "request 'b\\n' is unknown: no request has begun to compute"
        )
        for name in ["first", "second", "third", "fourth\x1b[2J"]:
            explainer.missed(Missed(name, 17, 0, 17, 16, keys_of(*range(4)), None))
            explainer.started(name, 0)
        error = ask(one.path, {"request": "b"})["error"]
    assert error.endswith("among the last 4 requests; the latest: 'fourth\\x1b[2J', third, second")


@pytest.mark.parametrize(
    "question", [{}, {"request": 7}, {"top": False}, {"top": True, "minutes": 61}, {"top": True, "minutes": True}]
)
def test_a_wrong_question_gets_an_error(tmp_path: Path, question: dict[str, object]) -> None:
    with service(computed(), tmp_path / "s") as one:
        assert re.search("neither|minutes must be", ask(one.path, question)["error"])


@pytest.mark.parametrize("data", [b"", b"{\n", b"\xff\n", b"x" * (1 << 15), b"[" * 10_000 + b"\n"])
def test_a_client_that_talks_nonsense_does_not_end_the_service(tmp_path: Path, data: bytes) -> None:
    with service(computed(), tmp_path / "s") as one:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(one.path))
            client.sendall(data)
        assert ask(one.path, {"request": "a"})["computed_tokens"] == 17


def test_the_socket_of_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(TemporaryStoreError, match="no engine answers"):
        ask(path, {"top": True})
    with service(computed(), path) as one:
        assert ask(one.path, {"request": "a"})["computed_tokens"] == 17


def test_a_second_engine_does_not_take_the_socket_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with service(computed(), tmp_path / "s") as first:
        with caplog.at_level(logging.WARNING), service(make_explainer(), tmp_path / "s"):
            pass
        assert "another process listens" in caplog.text
        assert ask(first.path, {"request": "a"})["computed_tokens"] == 17


def test_a_socket_with_too_many_clients_is_not_taken_for_a_dead_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as client:
        busy.bind(str(tmp_path / "s"))
        busy.listen(0)
        client.connect(str(tmp_path / "s"))
        with pytest.raises(TemporaryStoreError, match="too many clients wait"):
            ask(tmp_path / "s", {"top": True})
        with caplog.at_level(logging.WARNING), service(make_explainer(), tmp_path / "s"):
            pass
        assert "another process listens" in caplog.text
        assert (tmp_path / "s").exists()


def test_a_client_that_sends_bytes_one_by_one_keeps_the_thread_for_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.explain.service._CLIENT_SECONDS", 0.5)
    sent = threading.Event()
    with service(computed(), tmp_path / "s") as one, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(one.path))

        def drip() -> None:
            with suppress(OSError):
                while not sent.wait(0.01):
                    client.sendall(b" ")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with socket.socket(socket.AF_UNIX) as other:
                other.settimeout(15)
                other.connect(str(one.path))
                other.sendall(b'{"request": "a"}\n')
                assert b"computed_tokens" in other.recv(1 << 16)
        finally:
            sent.set()
            dripping.join()


def test_a_thread_that_fails_leaves_no_notes_and_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    explainer = computed()
    monkeypatch.setattr(explainer, "settle", lambda: 1 // 0)
    with caplog.at_level(logging.WARNING), service(explainer, tmp_path / "s") as one:
        assert until(lambda: "no more misses are explained" in caplog.text)
        assert not one.path.exists()
        explainer.started("b", 0)
        assert not explainer._queue


def test_a_file_that_is_no_socket_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "s").write_text("mine")
    with caplog.at_level(logging.WARNING), service(make_explainer(), tmp_path / "s"):
        pass
    assert "is no socket" in caplog.text
    assert (tmp_path / "s").read_text() == "mine"


def test_a_runtime_directory_that_others_can_write_is_not_used(runtime: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime.mkdir()
    runtime.chmod(0o777)
    explainer = computed()
    with caplog.at_level(logging.WARNING), service(explainer, None):
        assert until(lambda: explainer.totals and sum(explainer.totals.values()) == 17)  # it counts without a socket
    assert "others may replace the socket" in caplog.text
    assert sockets() == []


def test_a_socket_that_is_named_may_lie_in_a_directory_of_others(tmp_path: Path) -> None:
    """As in a container, whose volume everybody may write to and lock."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o777)
    volume = os.open(tmp_path / "volume", os.O_RDONLY)
    fcntl.flock(volume, fcntl.LOCK_SH)
    try:
        with service(computed(), tmp_path / "volume" / "s") as one:
            assert ask(one.path, {"request": "a"})["computed_tokens"] == 17
            assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
    finally:
        os.close(volume)


def test_the_runtime_directory_without_a_session_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_directory().name == f"kv-tiering-{os.getuid()}"


def test_without_a_thread_nothing_is_noted_and_no_socket_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("no more threads")

    explainer = computed()
    monkeypatch.setattr("tiering.runtime.pool._thread.start_new_thread", refuse)
    with caplog.at_level(logging.WARNING):
        made = ExplainService(explainer, tmp_path / "s")
    assert "no misses are explained" in caplog.text
    assert not (tmp_path / "s").exists()
    explainer.started("a", 0)
    assert not explainer._queue
    made.stop(1)


def test_a_stop_wakes_the_thread_and_may_come_twice(tmp_path: Path) -> None:
    made = ExplainService(computed(), tmp_path / "s")
    made.stop(30)
    made.stop(30)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-tiering-why")]


def test_a_forked_child_notes_nothing_and_leaves_the_parents_socket(tmp_path: Path) -> None:
    explainer = computed()
    with service(explainer, tmp_path / "s") as one:
        child = os.fork()
        if not child:
            explainer.reset()
            one.stop(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert ask(one.path, {"request": "a"})["computed_tokens"] == 17
