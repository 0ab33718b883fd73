"""A CPU tier whose memory is prepared beside the start of the real engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.rig import BLOCK_BYTES, Answer, Engine, answers_without_tiers, engine, prompt, whole_blocks, wrong
from tiering.errors import RegionError
from tiering.primary.memory import region

PROMPTS = [prompt(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, PROMPTS)


def unprepared(running: Engine) -> int:
    """Return the number of rows whose memory is not prepared."""
    return int(running.connector.scheduler_half.get_stats()["manager"]["rows_unprepared"])


@pytest.mark.parametrize("fails", [False, True])
def test_requests_are_computed_until_the_tier_joins_and_for_good_if_it_cannot(
    llama: Path, expected: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    go = threading.Event()

    def prefault(flat: object, fd: int, *, share: object, is_over: Callable[[], bool]) -> None:
        while not go.wait(0.01) and not is_over():
            pass
        if fails:
            raise RegionError("there is no memory")

    monkeypatch.setattr(region, "PREPARED_AT_ONCE", 0)
    monkeypatch.setattr(region, "prefault", prefault)
    disk = {"type": "local", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    with engine(llama, {"primary": {"capacity": "64MiB"}, "secondary": [disk]}) as running:
        assert unprepared(running) > 0
        answers, loaded = running.loaded(lambda: running.ask(PROMPTS))
        assert (wrong(answers, expected), loaded, running.moved) == ([], 0, {})
        go.set()
        for thread in threading.enumerate():
            if thread.name == "kv-tiering-prepare":
                thread.join(60)
        assert running.llm.reset_prefix_cache()
        assert wrong(running.ask(PROMPTS), expected) == []
        running.evict()
        answers, loaded = running.loaded(lambda: running.ask(PROMPTS))
        assert wrong(answers, expected) == []
        assert loaded == (0 if fails else whole_blocks(PROMPTS) * BLOCK_BYTES)
        assert (unprepared(running) > 0) is fails
