"""The ends of a server over one local directory: kill -9 right after a reset, SIGTERM in the middle of stores.  Three servers in a row."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.rig import BLOCK_BYTES, Answer, answers_without_tiers, prompt, whole_blocks, wrong
from tests.vllm.server import Server, serve, until

PROMPTS = [prompt(seed) for seed in range(4)]
MORE = [prompt(seed, 400) for seed in range(60, 66)]
ALL = whole_blocks(PROMPTS) * BLOCK_BYTES

LAST = [prompt(seed, 400) for seed in range(70, 76)]
LENGTHY = 60
"""Tokens to generate for ``LAST``."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, PROMPTS + MORE) + answers_without_tiers(llama, LAST, LENGTHY)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shutdown")


@pytest.fixture(scope="module")
def stack(directory: Path) -> dict[str, Any]:
    tier = {"type": "local", "path": str(directory / "disk"), "capacity": "64MiB"}
    return {"primary": {"capacity": "32MiB"}, "secondary": [tier]}


@pytest.fixture(scope="module")
def after_a_reset(llama: Path, expected: list[Answer], stack: dict[str, Any], directory: Path) -> Iterator[Server]:
    """A server over the directory of one that was reset, while it cascaded, and killed as soon as it said that it was."""
    with serve(llama, stack, directory / "first.log") as first:
        assert wrong(first.ask(PROMPTS), expected[:4]) == []
        until(lambda: cascaded(first) >= whole_blocks(PROMPTS), 30, "the cascade")
        assert wrong(first.ask(MORE), expected[4:10]) == []
        assert first.reset(tiers=True)
        first.end(signal.SIGKILL)
    with serve(llama, stack, directory / "second.log", "--shutdown-timeout", "30") as second:
        yield second


def cascaded(server: Server) -> float:
    """Blocks that the local tier has stored, as of a step that this makes the engine take."""
    server.ask([prompt(0, 8)], 1)
    return server.metric("kv_tiering_cascades_total", tier="local")


def read(server: Server) -> float:
    """Bytes that the local tier has read, as of a step that this makes the engine take."""
    server.ask([prompt(0, 8)], 1)
    return server.metric("kv_tiering_read_bytes_total", tier="local")


def shared_memory() -> list[str]:
    return [file.name for file in Path("/dev/shm").glob("kv-tiering.*")]


def test_nothing_from_before_a_reset_is_served_after_a_kill_and_a_restart(after_a_reset, expected):
    server = after_a_reset
    assert shared_memory() == []
    assert wrong(server.ask(PROMPTS + MORE), expected[:10]) == []
    assert read(server) == server.loaded() == 0


def test_sigterm_drains_requests_and_stores_and_what_was_stored_is_there_after_a_restart(
    after_a_reset, llama, expected, stack, directory
):
    server, answers = after_a_reset, list[Answer]()
    stored = server.stored()
    asking = threading.Thread(target=lambda: answers.extend(server.ask(LAST, LENGTHY)))
    asking.start()
    until(lambda: server.stored() > stored, 30, "stores of the requests that run")
    server.end(signal.SIGTERM)
    asking.join(30)
    assert not asking.is_alive()
    assert server.process.returncode == 0
    assert shared_memory() == []
    with serve(llama, stack, directory / "third.log") as third:
        assert wrong(third.ask(PROMPTS + MORE), expected[:10]) == []
        read_before, loaded_before = read(third), third.loaded()
        assert read_before >= ALL
        assert wrong(third.ask(LAST, LENGTHY), expected[10:]) == []
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected[10:]]
        assert read(third) - read_before >= whole_blocks(LAST) * BLOCK_BYTES
        assert third.loaded() - loaded_before >= whole_blocks(LAST) * BLOCK_BYTES
        third.ask([prompt(seed, 500) for seed in range(80, 84)], 1)
    assert shared_memory() == []
