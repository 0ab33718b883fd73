"""Two data-parallel engines of a real server on one service: one loads what the other has computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machine.hosts import service_process
from tests.vllm import shared_memory
from tests.vllm.rig import answers_without_tiers, prompt, whole_blocks, wrong
from tests.vllm.server import serve, until

PROMPTS = [prompt(seed) for seed in range(4)]


def test_data_parallel_engines_share_the_tiers_of_the_machine(llama: Path, tmp_path: Path) -> None:
    expected = answers_without_tiers(llama, PROMPTS)
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    blocks = whole_blocks(PROMPTS)
    with service_process(tmp_path, disk) as service:
        machine = {"socket": str(service.socket), "tiers": ["local"], "lookup_deadline": "10s"}
        stack = {"primary": {"capacity": "32MiB"}, "machine": machine}
        two = ("--data-parallel-size", "2")
        with serve(llama, stack, tmp_path / "log", *two, VLLM_CPU_OMP_THREADS_BIND="0|1") as server:

            def local(name: str, replica: int) -> float:
                server.ask([prompt(0, 8)], 1, replica=replica)
                return server.metric(f"kv_tiering_{name}", engine=str(replica), tier="local")

            for replica in range(2):
                until(lambda replica=replica: local("available", replica) == 1, 60, "the service")  # type: ignore[misc]
            assert wrong(server.ask(PROMPTS, replica=0), expected) == []
            until(lambda: local("cascades_total", 0) >= blocks, 60, "the cascade")
            assert wrong(server.ask(PROMPTS, replica=1), expected) == []
            assert local("promotions_total", 1) == blocks
            service.kill()
            until(lambda: local("available", 1) == 0, 60, "the end of the service")
            others = [prompt(seed) for seed in range(20, 22)]
            assert server.ask(others, replica=1) == server.ask(others, replica=0)
            service.restart()
            until(lambda: local("available", 1) == 1, 60, "the next service")
            assert wrong(server.ask(PROMPTS, replica=1), expected) == []
    assert shared_memory.is_clean()


@pytest.mark.slow
def test_data_parallel_engines_load_from_each_others_rows(llama: Path, tmp_path: Path) -> None:
    """The service's own tier has room for five blocks, so that the rows alone have the others."""
    expected = answers_without_tiers(llama, PROMPTS)
    tier = {"type": "memory", "name": "local", "capacity": "256KiB"}
    blocks = whole_blocks(PROMPTS)
    with service_process(tmp_path, tier) as service:
        machine = {"socket": str(service.socket), "tiers": ["peers", "local"], "keep_rows": True}
        stack = {"primary": {"capacity": "32MiB"}, "machine": machine}
        two = ("--data-parallel-size", "2")
        with serve(llama, stack, tmp_path / "log", *two, VLLM_CPU_OMP_THREADS_BIND="0|1") as server:

            def peers(name: str, replica: int) -> float:
                server.ask([prompt(0, 8)], 1, replica=replica)
                return server.metric(f"kv_tiering_{name}", engine=str(replica), tier="peers")

            for replica in range(2):
                until(lambda replica=replica: peers("available", replica) == 1, 60, "the service")  # type: ignore[misc]
            assert wrong(server.ask(PROMPTS, replica=0), expected) == []
            until(lambda: peers("blocks", 1) >= blocks, 60, "the report of the rows")
            assert wrong(server.ask(PROMPTS, replica=1), expected) == []
            assert peers("promotions_total", 1) == blocks
    assert shared_memory.is_clean()
