"""The ends of a server over one local directory, five servers in a row.

Each end is followed by a restart: kill -9 in the middle of stores and right after a reset, SIGTERM with time to drain
and without.
"""

from __future__ import annotations

import http.client
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm import shared_memory
from tests.vllm.rig import BLOCK_BYTES, Answer, engine, prompt, whole_blocks, wrong
from tests.vllm.server import Server, serve, until

PROMPTS = [prompt(seed) for seed in range(4)]
MORE = [prompt(seed, 400) for seed in range(60, 66)]
ALL = whole_blocks(PROMPTS) * BLOCK_BYTES
FORGOTTEN = [prompt(seed, 400) for seed in range(90, 96)]

LAST = [prompt(seed, 400) for seed in range(70, 76)]
LENGTHY = 60
"""Tokens to generate for ``LAST``."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Answers without tiers."""

    prompts: list[Answer]
    more: list[Answer]
    forgotten: list[Answer]
    last: list[Answer]


@pytest.fixture(scope="module")
def expected(llama: Path) -> Expected:
    with engine(llama, None, enable_prefix_caching=False) as plain:
        return Expected(plain.ask(PROMPTS), plain.ask(MORE), plain.ask(FORGOTTEN), plain.ask(LAST, LENGTHY))


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive servers with one model and one directory."""

    model: Path
    directory: Path

    def serve(self, name: str, *options: str) -> AbstractContextManager[Server]:
        """Start the next server, whose local tier is in the same directory as before."""
        tier = {"type": "local", "path": str(self.directory / "disk"), "capacity": "64MiB"}
        stack = {"primary": {"capacity": "32MiB"}, "secondary": [tier]}
        return serve(self.model, stack, self.directory / f"{name}.log", *options)


@pytest.fixture(scope="module")
def row(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Row:
    return Row(llama, tmp_path_factory.mktemp("shutdown"))


class Asking:
    """Requests in the background; some of their blocks are stored already."""

    def __init__(self, server: Server, prompts: list[list[int]], max_tokens: int, timeout: float = 100.0) -> None:
        self.answers: list[Answer] = []
        self._lost = False
        self._server, self._request, self._timeout = server, (prompts, max_tokens), timeout
        self._thread = threading.Thread(target=self._ask)
        stored = server.stored()
        self._thread.start()
        until(lambda: server.stored() > stored, 60, "stores of the requests that run")

    def _ask(self) -> None:
        try:
            self.answers += self._server.ask(*self._request, timeout=self._timeout)
        except (OSError, http.client.HTTPException):
            self._lost = True

    def was_lost(self) -> bool:
        """Return True if the server ended without an answer, or with a truncated one."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self._lost or any(len(answer.tokens) < self._request[1] for answer in self.answers)


@pytest.fixture(scope="module")
def after_a_kill(row: Row, expected: Expected) -> Iterator[Server]:
    """A server over the directory of one that wrote ``PROMPTS`` and was killed during later stores."""
    with row.serve("first") as first:
        assert wrong(first.ask(PROMPTS), expected.prompts) == []
        until(lambda: cascaded(first) >= whole_blocks(PROMPTS), 60, "the cascade")
        asking = Asking(first, MORE, 200)
        first.end(signal.SIGKILL)
        assert asking.was_lost()
    assert shared_memory.is_clean()
    with row.serve("second") as second:
        yield second


@pytest.fixture(scope="module")
def after_a_reset(row: Row, after_a_kill: Server, expected: Expected) -> Iterator[Server]:
    """A server over the directory of one that was reset while it cascaded, and killed right afterwards."""
    assert wrong(after_a_kill.ask(PROMPTS), expected.prompts) == []
    assert wrong(after_a_kill.ask(FORGOTTEN), expected.forgotten) == []
    assert after_a_kill.reset(tiers=True)
    after_a_kill.end(signal.SIGKILL)
    assert shared_memory.is_clean()
    with row.serve("third", "--shutdown-timeout", "30") as third:
        yield third


@dataclass(frozen=True, slots=True)
class Drained:
    """A server over the directory of one that got SIGTERM while it answered ``LAST`` and stored.

    Attributes:
        answers: the drained server's answers to ``LAST``.
        return_code: the drained server's exit status.
    """

    server: Server
    answers: list[Answer]
    return_code: int | None


@pytest.fixture(scope="module")
def after_a_drain(row: Row, after_a_reset: Server) -> Iterator[Drained]:
    asking = Asking(after_a_reset, LAST, LENGTHY)
    after_a_reset.end(signal.SIGTERM)
    assert not asking.was_lost()
    assert shared_memory.is_clean()
    with row.serve("fourth") as fourth:
        yield Drained(fourth, asking.answers, after_a_reset.process.returncode)


def cascaded(server: Server) -> float:
    """Return the number of blocks that the local tier has stored, after one more engine step."""
    server.ask([prompt(0, 8)], 1)
    return server.metric("kv_tiering_cascades_total", tier="local")


def read(server: Server) -> float:
    """Return the number of bytes that the local tier has read, after one more engine step."""
    server.ask([prompt(0, 8)], 1)
    return server.metric("kv_tiering_read_bytes_total", tier="local")


def known(server: Server) -> float:
    """Return the number of blocks that the local tier holds, after one more engine step."""
    server.ask([prompt(0, 8)], 1)
    return server.metric("kv_tiering_blocks", tier="local")


def test_what_was_written_is_there_after_a_kill_in_the_middle_of_stores(
    after_a_kill: Server, expected: Expected
) -> None:
    server = after_a_kill
    until(lambda: known(server) >= whole_blocks(PROMPTS), 60, "the recovery of the local tier")
    assert wrong(server.ask(PROMPTS), expected.prompts) == []
    assert wrong(server.ask(MORE), expected.more) == []
    assert read(server) >= ALL
    assert server.loaded() >= ALL


def test_nothing_from_before_a_reset_is_served_after_a_kill_and_a_restart(
    after_a_reset: Server, expected: Expected
) -> None:
    server = after_a_reset
    assert wrong(server.ask(PROMPTS), expected.prompts) == []
    assert wrong(server.ask(MORE), expected.more) == []
    assert wrong(server.ask(FORGOTTEN), expected.forgotten) == []
    assert read(server) == server.loaded() == 0


def test_sigterm_drains_requests_and_stores_and_what_was_stored_is_there_after_a_restart(
    after_a_drain: Drained, expected: Expected
) -> None:
    server = after_a_drain.server
    assert after_a_drain.return_code == 0
    assert [answer.tokens for answer in after_a_drain.answers] == [answer.tokens for answer in expected.last]
    assert wrong(server.ask(PROMPTS), expected.prompts) == []
    read_before, loaded_before = read(server), server.loaded()
    assert read_before >= ALL
    assert wrong(server.ask(LAST, LENGTHY), expected.last) == []
    assert read(server) - read_before >= whole_blocks(LAST) * BLOCK_BYTES
    assert server.loaded() - loaded_before >= whole_blocks(LAST) * BLOCK_BYTES


def test_sigterm_without_time_to_drain_ends_the_server_at_once_and_keeps_what_was_written(
    after_a_drain: Drained, row: Row, expected: Expected
) -> None:
    server = after_a_drain.server
    written = known(server)
    # after the engine's end, vLLM's front end may wait for clients that wait for an answer
    asking = Asking(server, [prompt(seed, 400) for seed in range(80, 86)], 200, timeout=8)
    server.end(signal.SIGTERM)
    assert asking.was_lost()
    assert shared_memory.is_clean()
    with row.serve("fifth") as fifth:
        until(lambda: known(fifth) >= written, 60, "the recovery of the local tier")
        assert wrong(fifth.ask(LAST, LENGTHY), expected.last) == []
        assert read(fifth) >= whole_blocks(LAST) * BLOCK_BYTES
        assert wrong(fifth.ask(MORE), expected.more) == []
    assert shared_memory.is_clean()
