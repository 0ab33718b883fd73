"""An exclusive CPU tier in vLLM: small tiers, another connector, preemptions, sleep and SIGTERM."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.servers import S3Endpoint
from tests.vllm import shared_memory
from tests.vllm.handlers import CopyNothing, OneWrongBlock
from tests.vllm.rig import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    Answer,
    Engine,
    answers_without_tiers,
    engine,
    prompt,
    whole_blocks,
    wrong,
)
from tests.vllm.server import serve, until
from tests.vllm.test_exclusive import PROMPTS, STEP, count, in_turn, stack
from tests.vllm.test_restarts import s3
from tests.vllm.test_shutdown import known, read
from tests.vllm.test_startup import several

MANY = [prompt(seed, 130) for seed in range(50, 58)]
LENGTHY = 60
"""Tokens to generate for ``MANY``, so that not all of these requests fit at once."""
MOST = 50 * BLOCK_BYTES
"""Bytes that a round of ``PROMPTS`` loads at least: of 60 blocks the GPU holds a few."""


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, PROMPTS)


@pytest.mark.parametrize("behind", ["small disk", "bucket", "small disk and bucket"])
def test_tiers_smaller_and_larger_than_the_cpu_tier_stand_behind_it(
    behind: str, llama: Path, expected: list[Answer], tmp_path: Path, endpoint: S3Endpoint
) -> None:
    tiers: list[dict[str, Any]] = []
    if "disk" in behind:
        tiers.append({"type": "local", "path": str(tmp_path), "capacity": 20 * (BLOCK_BYTES + 4096)})
    if "bucket" in behind:
        tiers.append(s3(endpoint, endpoint.make_bucket("kv-cache")))
    with engine(llama, {**stack("exclusive"), "secondary": tiers}, max_num_batched_tokens=STEP) as running:
        for _ in range(3):
            assert wrong(in_turn(running), expected) == []
        answers, loaded = running.loaded(lambda: in_turn(running))
        assert wrong(answers, expected) == []
        assert loaded >= MOST
        assert count(running, "late_stores") > 0
        assert sum(running.tier(tier["type"])["written_bytes"] for tier in tiers) > 0
        with running.loads_through(CopyNothing):
            assert wrong(in_turn(running), expected) != [], "what is loaded matters"
        running.settle()
        assert running.free_blocks() == NUM_BLOCKS - 1


def test_two_pools_hold_the_same_beside_another_connector(llama: Path, expected: list[Answer]) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    words = {"kv_transfer_config": several(stack("exclusive")), "max_num_batched_tokens": STEP}
    with engine(llama, None, **words) as running:
        running.connector, _ = running.scheduler.connector.sub_connectors
        running.worker, _ = get_kv_transfer_group().sub_connectors
        running.watch()
        for _ in range(2):
            assert wrong(in_turn(running), expected) == []
        answers, loaded = running.loaded(lambda: in_turn(running))
        assert wrong(answers, expected) == []
        assert loaded >= MOST
        assert count(running, "exclusive_losses") == 0
        with running.loads_through(CopyNothing):
            assert wrong(in_turn(running), expected) != [], "what is loaded matters"


@pytest.mark.parametrize("level", [0, 1, 2])
def test_an_engine_that_slept_answers_right(llama: Path, expected: list[Answer], level: int) -> None:
    with engine(llama, stack("exclusive"), max_num_batched_tokens=STEP) as running:
        core = running.llm.llm_engine.engine_core.engine_core
        for _ in range(2):
            in_turn(running)
        core.pause_scheduler(mode="abort", clear_cache=level > 0)  # all of a sleep but the memory of a GPU
        core.resume_scheduler()
        answers, loaded = running.loaded(lambda: in_turn(running))
        assert wrong(answers, expected) == []
        # Level 0 keeps both caches, the others empty both.
        assert loaded >= MOST if level == 0 else loaded == 0
        answers, loaded = running.loaded(lambda: in_turn(running))
        assert wrong(answers, expected) == []
        assert loaded >= MOST


def test_a_reset_of_the_engines_cache_alone_loses_what_only_it_held(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, stack("exclusive"), max_num_batched_tokens=STEP) as running:
        for _ in range(2):
            in_turn(running)
        assert running.llm.reset_prefix_cache()
        answers, loaded = running.loaded(lambda: in_turn(running))
        assert wrong(answers, expected) == []
        assert 0 < count(running, "exclusive_losses") <= NUM_BLOCKS
        assert loaded >= MOST - count(running, "exclusive_losses") * BLOCK_BYTES


def crowded(running: Engine, dice: random.Random, expected: list[Answer]) -> int:
    """Ask more together than fits, abort one request, and return the number of wrong answers."""
    chosen = dice.sample(range(len(MANY)), len(MANY))
    names = running.start([MANY[number] for number in chosen], LENGTHY)
    for _ in range(dice.randrange(1, 30)):
        running.step()
    running.llm.llm_engine.abort_request(names[-1:])
    return len(wrong(running.finish(names[:-1]), [expected[number] for number in chosen[:-1]]))


@pytest.mark.slow  # a minute
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_no_answer_of_requests_that_preempt_each_other_differs(asynchronous: bool, llama: Path) -> None:
    expected, dice = answers_without_tiers(llama, MANY, LENGTHY), random.Random(3)
    with engine(llama, stack("exclusive"), max_num_batched_tokens=STEP, async_scheduling=asynchronous) as running:
        failures, loaded = running.loaded(lambda: sum(crowded(running, dice, expected) for _ in range(20)))
        assert failures == 0
        assert loaded > MOST
        assert running.preempted >= 20
        assert count(running, "late_stores") > 20
        running.settle()
        assert running.free_blocks() == NUM_BLOCKS - 1
        with running.loads_through(OneWrongBlock):
            assert sum(crowded(running, dice, expected) for _ in range(10)) > 0, "what is loaded matters"


def test_requests_are_scheduled_and_preempted_as_beside_an_inclusive_tier(llama: Path) -> None:
    expected, policy = answers_without_tiers(llama, MANY, LENGTHY), {"kv_tiering": {"load": False}}
    steps = {}
    for inclusion in ("inclusive", "exclusive"):
        with engine(llama, stack(inclusion), max_num_batched_tokens=STEP) as running:
            for _ in range(2):
                assert wrong(running.ask(MANY, LENGTHY, policy), expected) == []
            assert running.preempted > 0
            running.settle()
            steps[inclusion] = (running.preempted, [tokens for tokens in running.scheduled if tokens])
    assert steps["inclusive"] == steps["exclusive"]


@pytest.mark.slow  # two servers
def test_what_was_computed_is_on_the_disk_after_sigterm(llama: Path, expected: list[Answer], tmp_path: Path) -> None:
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    tiers, step = {**stack("exclusive"), "secondary": [disk]}, ("--max-num-batched-tokens", str(STEP))
    with serve(llama, tiers, tmp_path / "first.log", *step, "--shutdown-timeout", "30") as first:
        assert wrong(first.ask(PROMPTS), expected) == []
        first.end(signal.SIGTERM)
        assert first.process.returncode == 0
    assert shared_memory.is_clean()
    with serve(llama, tiers, tmp_path / "second.log", *step) as second:
        until(lambda: known(second) >= whole_blocks(PROMPTS), 60, "the recovery of the local tier")
        assert wrong(second.ask(PROMPTS), expected) == []
        assert read(second) >= whole_blocks(PROMPTS) * BLOCK_BYTES
