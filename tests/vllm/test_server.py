"""The HTTP server in three processes and more: metrics, resets, kill -9, two tensor-parallel workers."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tests.vllm.rig import BLOCK_BYTES, Answer, answers_without_tiers, prompt, whole_blocks, wrong
from tests.vllm.server import Server, serve, until

PROMPTS = [prompt(seed) for seed in range(4)]
MORE = [prompt(seed, 400) for seed in range(60, 66)]
ALL = whole_blocks(PROMPTS) * BLOCK_BYTES

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, PROMPTS + MORE)


def shared_memory() -> list[str]:
    return [file.name for file in Path("/dev/shm").glob("kv-tiering.*")]


def back_from_the_cpu(server: Server, expected: list[Answer]) -> None:
    before = server.loaded()
    assert wrong(server.ask(PROMPTS), expected[:4]) == []
    until(lambda: server.stored() >= ALL, 30, "the store of all blocks")
    server.evict()
    assert wrong(server.ask(PROMPTS), expected[:4]) == []
    until(lambda: server.loaded() >= before + ALL, 10, "the report of the loads")
    assert server.loaded() == before + ALL


def test_three_processes_metrics_resets_and_a_kill_in_the_middle_of_stores(llama, expected, tmp_path):
    tier = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack = {"primary": {"capacity": "32MiB"}, "secondary": [tier]}
    with serve(llama, stack, tmp_path / "first.log") as first:
        assert shared_memory() == []
        back_from_the_cpu(first, expected)
        until(lambda: first.metric("kv_tiering_cascades_total", tier="local") >= whole_blocks(PROMPTS), 30, "the cascade")
        assert first.metric("kv_tiering_occupancy_bytes", tier="local") >= ALL
        assert first.metric("kv_tiering_read_bytes_total", tier="local") == 0

        stored = first.stored()
        asking = threading.Thread(target=_ask_and_lose, args=(first,))
        asking.start()
        until(lambda: first.stored() > stored, 30, "stores of the requests that run")
        first.end(signal.SIGKILL)
        asking.join(30)
        assert not asking.is_alive()
    assert shared_memory() == []
    with serve(llama, stack, tmp_path / "second.log") as second:
        until(lambda: blocks_known(second) >= whole_blocks(PROMPTS), 30, "the recovery of the local tier")
        assert wrong(second.ask(PROMPTS + MORE), expected) == []
        until(lambda: second.metric("kv_tiering_read_bytes_total", tier="local") >= ALL, 10, "the report of the reads")
        loaded = second.loaded()
        assert loaded >= ALL
        second.reset(tiers=True)
        assert wrong(second.ask(PROMPTS), expected[:4]) == []
        assert second.loaded() == loaded
    assert shared_memory() == []


def blocks_known(server: Server) -> float:
    """Blocks that the local tier holds, as of a step that this makes the engine take."""
    server.ask([prompt(0, 8)], 1)
    return server.metric("kv_tiering_blocks", tier="local")


def _ask_and_lose(server: Server) -> None:
    try:
        server.ask(MORE, 200)
    except OSError:
        return
    pytest.fail("the server answered although it was to be killed in the middle")


def test_two_tensor_parallel_workers(llama, expected, tmp_path):
    stack = {"primary": {"capacity": "32MiB"}}
    options = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    with serve(llama, stack, tmp_path / "tp.log", *options, VLLM_CPU_OMP_THREADS_BIND="0|1") as server:
        assert shared_memory() == []
        back_from_the_cpu(server, expected)
    assert shared_memory() == []


def test_the_simple_scheduler_in_processes_of_their_own(llama, expected, tmp_path):
    stack = {"mode": "simple", "primary": {"capacity": "32MiB"}}
    options = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    with serve(llama, stack, tmp_path / "simple.log", *options, VLLM_CPU_OMP_THREADS_BIND="0|1") as server:
        back_from_the_cpu(server, expected)
        loaded = server.loaded()
        server.reset(tiers=True)
        assert wrong(server.ask(PROMPTS), expected[:4]) == []
        assert server.loaded() == loaded
    assert shared_memory() == []
