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


def is_unprepared(running: Engine) -> bool:
    """Return True while the memory is not prepared."""
    stats = running.connector.scheduler_half.get_stats()
    if "manager" in stats:
        return bool(stats["manager"]["rows_unprepared"])
    return not stats["tiers"]["cpu"]["available"]


@pytest.mark.parametrize(("mode", "fails"), [("tiering", False), ("tiering", True), ("simple", False)])
def test_requests_are_computed_until_the_tier_joins_and_for_good_if_it_cannot(
    llama: Path, expected: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, fails: bool
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
    stack = {"mode": mode, "primary": {"capacity": "64MiB"}, **({"secondary": [disk]} if mode == "tiering" else {})}
    with engine(llama, stack) as running:
        assert is_unprepared(running)
        answers, loaded = running.loaded(lambda: running.ask(PROMPTS))
        assert (wrong(answers, expected), loaded, running.moved) == ([], 0, {})
        go.set()
        for thread in threading.enumerate():
            if thread.name == "kv-tiering-prepare":
                thread.join(60)
        running.ask([PROMPTS[0][:8]], 1)  # a step in which the worker reports
        assert running.llm.reset_prefix_cache()
        assert wrong(running.ask(PROMPTS), expected) == []
        running.evict()
        answers, loaded = running.loaded(lambda: running.ask(PROMPTS))
        assert wrong(answers, expected) == []
        assert loaded == (0 if fails else whole_blocks(PROMPTS) * BLOCK_BYTES)
        assert is_unprepared(running) is fails
