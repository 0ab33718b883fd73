"""A model with sliding-window layers beside full attention: two KV-cache groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import CopyNothing, FailEverySecond, OneWrongBlock
from tests.vllm.models import WINDOW, write_gemma
from tests.vllm.rig import BLOCK, Answer, Engine, answers_without_tiers, engine, prompt, wrong
from tests.vllm.server import Server, serve, until

PROMPTS = [prompt(seed) for seed in range(4)]
PAGE = 2 * 2 * 32 * BLOCK * 4
"""Bytes of a block in one layer."""
LAYERS = 2
"""Number of layers of each group."""
WINDOW_BLOCKS = -(-(WINDOW - 1) // BLOCK)
ALL = len(PROMPTS) * LAYERS * PAGE * (200 // BLOCK + WINDOW_BLOCKS)
"""Bytes that the prompts' hits load."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def expected(gemma: Path) -> list[Answer]:
    changed = [*PROMPTS[0][:10], (PROMPTS[0][10] + 1) % 512, *PROMPTS[0][11:]]
    return answers_without_tiers(gemma, [*PROMPTS, changed], num_gpu_blocks_override=80)


@pytest.fixture(scope="module", params=["tiering", "simple"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tiered(gemma: Path, expected: list[Answer], mode: str) -> Iterator[Engine]:
    from tiering.engines.vllm.worker_side import TransferResults

    if TransferResults is None:
        pytest.skip("this vLLM cannot be told which requests' loads failed: several groups are refused")
    with engine(gemma, {"primary": {"capacity": "64MiB"}, "mode": mode}, num_gpu_blocks_override=80) as running:
        yield running
        running.settle()
        assert running.free_blocks() == 79


def test_the_models_output_depends_on_what_is_outside_the_window(expected: list[Answer]) -> None:
    assert not expected[4].matches(expected[0])


def test_a_hit_needs_all_blocks_of_full_attention_and_the_last_ones_of_the_window(
    tiered: Engine, expected: list[Answer]
) -> None:
    assert len(tiered.scheduler.kv_cache_config.kv_cache_groups) == 2
    assert wrong(tiered.ask(PROMPTS), expected[:4]) == []
    tiered.evict()
    answers, loaded = tiered.loaded(lambda: tiered.ask(PROMPTS))
    assert wrong(answers, expected[:4]) == []
    assert loaded == ALL


@pytest.mark.parametrize("lie", [CopyNothing, OneWrongBlock])
def test_negative_control_what_was_not_loaded_rightly_shows(tiered: Engine, expected: list[Answer], lie: Any) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    with tiered.loads_through(lie):
        answers = tiered.ask(PROMPTS, params={"kv_tiering": {"store": False}})
    assert wrong(answers, expected[:4]) == [0, 1, 2, 3]
    tiered.evict()
    assert wrong(tiered.ask(PROMPTS), expected[:4]) == []


@pytest.mark.parametrize("recompute", [True, False])
def test_a_failed_load_is_told_by_its_request(
    tiered: Engine, expected: list[Answer], mode: str, recompute: Any
) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    tiered.scheduler.recompute_kv_load_failures = recompute
    try:
        with tiered.loads_through(FailEverySecond) as handler:
            answers = tiered.ask(PROMPTS)
            assert handler.failed > 0
    finally:
        tiered.scheduler.recompute_kv_load_failures = True
    failed = {number for number, answer in enumerate(answers) if not answer.tokens}
    if mode == "tiering" or recompute:
        assert len(failed) == (0 if recompute else handler.failed)
    else:  # one load may serve several requests
        assert len(failed) >= handler.failed
    assert set(wrong(answers, expected[:4])) == failed
    tiered.evict()
    assert wrong(tiered.ask(PROMPTS), expected[:4]) == []


@pytest.mark.parametrize("two_workers_mode", ["tiering", "simple"])
def test_two_workers_load_the_same_blocks_also_after_a_restart(
    gemma: Path, expected: list[Answer], tmp_path: Path, two_workers_mode: str
) -> None:
    """Each worker has half of the heads."""
    options = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp", "--shutdown-timeout", "60"]
    options += ["--num-gpu-blocks-override", "80"]

    def counted(server: Server, name: str) -> float:
        server.ask([PROMPTS[0][:8]], 1)  # one more step reports what was copied
        return server.metric("vllm:kv_offload_total_bytes_total", transfer_type=name)

    stack: dict[str, Any] = {"primary": {"capacity": "64MiB"}, "mode": two_workers_mode}
    if two_workers_mode == "tiering":
        stack["secondary"] = [{"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with serve(gemma, stack, tmp_path / "log", *options, **environment) as server:
        assert wrong(server.ask(PROMPTS), expected[:4]) == []
        until(lambda: counted(server, "gpu_to_cpu") >= ALL, 60, "the store of all blocks")
        server.evict()
        assert wrong(server.ask(PROMPTS), expected[:4]) == []
        assert counted(server, "cpu_to_gpu") == ALL
        if two_workers_mode == "simple":
            return
    with serve(gemma, stack, tmp_path / "second", *options, **environment) as server:
        until(
            lambda: counted(server, "cpu_to_gpu") >= 0 and server.metric("kv_tiering_available", tier="local") == 1,
            120,
            "the opening of the disk",
        )
        assert wrong(server.ask(PROMPTS), expected[:4]) == []
        assert counted(server, "cpu_to_gpu") == ALL
