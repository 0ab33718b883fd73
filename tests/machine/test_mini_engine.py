"""Two mini engines on one service: one loads what the other has computed, with equal results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.mini_engine import Engine
from tests.machine.hosts import ServiceProcess, service_process
from tests.mini_engine.helpers import SMALL, ask_all, one_row, options, prompt, wrong_answers

PROMPTS = [prompt(seed, 77, shared=16) for seed in range(6)]


def engine(service: ServiceProcess) -> Engine:
    stack: dict[str, Any] = {
        "primary": {"capacity": 200 * one_row(SMALL)},
        "machine": {"socket": str(service.socket), "tiers": ["local"], "lookup_deadline": "10s"},
    }
    return Engine(options(stack=stack))


def test_two_engines_share_a_disk_and_survive_its_service(tmp_path: Path) -> None:
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    with service_process(tmp_path, disk) as service, engine(service) as one, engine(service) as two:
        assert wrong_answers(ask_all(one, PROMPTS, "first"), PROMPTS) == []
        assert one.settle()
        assert two.loaded_bytes == 0
        assert wrong_answers(ask_all(two, PROMPTS, "second"), PROMPTS) == []
        loaded = two.loaded_bytes
        assert loaded > 0
        service.kill()
        others = [prompt(seed, 77) for seed in range(50, 54)]
        assert wrong_answers(ask_all(two, others, "alone"), others) == []
        service.restart()
        with engine(service) as three:
            assert wrong_answers(ask_all(three, PROMPTS, "third"), PROMPTS) == []
            assert three.loaded_bytes > 0
