"""The real engine beside a user whose part of the machine's service fails."""

from __future__ import annotations

from pathlib import Path

from tests.machine.failing_parts import failing_parts
from tests.machine.users import ANNA
from tests.vllm.handlers import CopyNothing
from tests.vllm.rig import BLOCK_BYTES, Engine, answers_without_tiers, engine, prompt, wrong
from tests.vllm.server import until

PROMPTS = [prompt(seed) for seed in range(6)]
FAULTS = ("error", "hang", "endless")


def settled(running: Engine) -> None:
    running.settle()
    assert running.llm.reset_prefix_cache()


def serving(running: Engine) -> bool:
    running.ask([prompt(7000, 8)], 1)
    return bool(running.tier("local")["available"])


def promoted(running: Engine) -> int:
    return int(running.tier("local")["promotions"])


def test_answers_stay_right_and_blocks_are_found_while_another_users_part_fails(llama: Path, tmp_path: Path) -> None:
    expected = answers_without_tiers(llama, PROMPTS)
    path, disk = tmp_path / "cache.sock", {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    machine = {"socket": str(path), "tiers": ["local"], "load_deadline": "2s"}
    stack = {"primary": {"capacity": 12 * BLOCK_BYTES}, "machine": machine}

    def ask(running: Engine) -> None:
        settled(running)
        assert wrong(running.ask(PROMPTS), expected) == []

    with failing_parts(path, disk, users=[ANNA]) as service, engine(llama, stack) as running:
        until(lambda: serving(running), 60, "the service")
        ask(running)
        ask(running)
        for fault in FAULTS:
            before = promoted(running)
            settled(running)
            names = running.start(PROMPTS[:3])
            running.step()
            service.do(fault, ANNA)
            assert wrong(running.finish(names), expected[:3]) == []
            until(lambda: service.do("trouble", ANNA), 60, "the fault")
            ask(running)
            assert promoted(running) > before
            if fault == "hang":
                service.do("go on", ANNA)
            if fault != "endless":
                until(lambda: not service.do("trouble", ANNA), 60, "the end of the fault")
        with running.loads_through(CopyNothing):
            settled(running)
            assert wrong(running.ask(PROMPTS), expected) != []
