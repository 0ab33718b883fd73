"""A server is killed, and the next one gets its prompts from the rows that the service has kept."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.machine.hosts import service_process
from tests.vllm import shared_memory
from tests.vllm.rig import BLOCK_BYTES, answers_without_tiers, prompt, whole_blocks, wrong
from tests.vllm.server import Server, serve, until

PROMPTS = [prompt(seed) for seed in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_prompts_of_a_killed_server_come_from_its_rows(llama: Path, tmp_path: Path, keeps: bool) -> None:
    """The service's tier has room for five blocks, so that the rows alone have the others."""
    expected = answers_without_tiers(llama, PROMPTS)
    tier = {"type": "memory", "name": "local", "capacity": "256KiB"}
    with service_process(tmp_path, tier) as service:
        machine: dict[str, Any] = {"socket": str(service.socket), "tiers": ["local"], "keep_rows": keeps}
        stack = {"primary": {"capacity": "32MiB"}, "machine": machine}

        def joined(server: Server) -> None:
            def available() -> bool:
                server.ask([prompt(0, 8)], 1)
                return server.metric("kv_tiering_available", tier="local") == 1

            until(available, 60, "the service")

        with serve(llama, stack, tmp_path / "log") as server:
            joined(server)
            assert wrong(server.ask(PROMPTS), expected) == []
            server.ask([prompt(0, 8)], 1)
            server.end(signal.SIGKILL)
        with serve(llama, stack, tmp_path / "log") as server:
            joined(server)
            blocks = whole_blocks(PROMPTS) * keeps

            def inherited() -> bool:
                server.ask([prompt(0, 8)], 1)
                return server.metric("kv_tiering_inherited_blocks_total") == blocks

            until(inherited, 60, "the hand-over")
            loaded = server.loaded()
            assert wrong(server.ask(PROMPTS), expected) == []
            server.ask([prompt(0, 8)], 1)
            assert server.metric("kv_tiering_promotions_total", tier="local") <= 5 * (not keeps)
            moved = server.loaded() - loaded
            assert moved == blocks * BLOCK_BYTES if keeps else moved <= 5 * BLOCK_BYTES
    assert shared_memory.is_clean()
