"""A warm start of the real engine: the first prompts hit a CPU tier that no request has filled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENT
from tests.servers import S3Endpoint
from tests.vllm.rig import (
    BLOCK,
    BLOCK_BYTES,
    Answer,
    Engine,
    answers_without_tiers,
    engine,
    prompt,
    whole_blocks,
    wrong,
)
from tiering.epochs.hot_keys import HOT

PROMPTS = [prompt(seed) for seed in (90, 91, 92)]
BLOCKS = whole_blocks(PROMPTS)
OLD_ENGINE = """
import json, sys
from tests.vllm.rig import engine, prepare_environment
prepare_environment()
model, stack, prompts = json.loads(sys.argv[1])
with engine(model, stack) as old:
    old.ask(prompts)
    old.settle()
"""


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, PROMPTS)


def stack_of(tier: dict[str, Any], **words: Any) -> dict[str, Any]:
    return {"primary": {"capacity": "64MiB"}, "secondary": [tier], **words}


def first_answers(new: Engine, name: str, expected: list[Answer]) -> tuple[int, int]:
    """Return the blocks that the tier delivered before the first requests, and while they ran."""
    new.settle()
    before = new.tier(name)["promotions"]
    answers, loaded = new.loaded(lambda: new.ask(PROMPTS))
    assert wrong(answers, expected) == []
    assert loaded == BLOCKS * BLOCK_BYTES
    return before, new.tier(name)["promotions"] - before


def test_a_new_process_hits_the_cpu_tier_from_its_first_request_on(
    llama: Path, expected: list[Answer], tmp_path: Path
) -> None:
    tier = {"type": "local", "path": str(tmp_path), "capacity": "64MiB"}
    warm = stack_of(tier, warm_start={})
    subprocess.run([sys.executable, "-c", OLD_ENGINE, json.dumps([str(llama), warm, PROMPTS])], check=True)
    with engine(llama, warm, disable_log_stats=False) as new:
        assert first_answers(new, "local", expected) == (BLOCKS, 0)
        assert new.came_from(host=BLOCKS * BLOCK)
        assert new.connector.scheduler_half.get_stats()["manager"]["warm_start_blocks"] == BLOCKS
    for document in (tmp_path / "documents").glob(f"{HOT}*"):
        document.unlink()
    with engine(llama, warm, disable_log_stats=False) as cold:
        assert first_answers(cold, "local", expected) == (0, BLOCKS)
        assert cold.came_from(disk=BLOCKS * BLOCK)


def test_a_new_machine_hits_the_cpu_tier_with_what_the_fleet_uses(
    llama: Path, expected: list[Answer], endpoint: S3Endpoint
) -> None:
    bucket = endpoint.make_bucket("kv-cache")
    tier = {"type": "s3", "bucket": bucket.name, "endpoint_url": endpoint.endpoint, "prefix": "kv/", **PATIENT}
    warm = stack_of(tier, warm_start={"bandwidth": "64MiB"})
    with engine(llama, warm) as old:
        old.ask(PROMPTS)
        old.settle()
    with engine(llama, warm, disable_log_stats=False) as new:
        assert first_answers(new, "s3", expected) == (BLOCKS, 0)
        assert new.came_from(host=BLOCKS * BLOCK)
