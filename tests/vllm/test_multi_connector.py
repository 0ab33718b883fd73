"""vLLM's ``MultiConnector`` with our connector and another one: statistics of the server, and states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.models import write_granite
from tests.vllm.rig import BLOCK_BYTES, engine, prompt, whole_blocks, wrong
from tests.vllm.server import Server, serve, until
from tests.vllm.test_startup import several
from tests.vllm.test_state_tails import LONGER, TAIL, UNIT, ask_evicted
from tests.vllm.test_state_tails import PROMPTS as TAILED
from tests.vllm.test_states import CPU, OPTIONS, plain_answers

PROMPTS = [prompt(seed) for seed in range(4)]
ALL = whole_blocks(PROMPTS) * BLOCK_BYTES


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    stack = {"primary": {"capacity": "32MiB"}, "secondary": [{"type": "memory", "capacity": "32MiB"}]}
    options = ("--kv-transfer-config", json.dumps(several(stack)))
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(llama, stack, log, *options, VLLM_LOG_STATS_INTERVAL="1") as running:
        yield running


def test_the_server_serves_and_reports_what_our_connector_did(server: Server) -> None:
    computed = server.ask(PROMPTS)
    until(lambda: server.stored() >= ALL, 60, "the store of all blocks")
    server.evict()
    assert wrong(server.ask(PROMPTS), computed) == []
    until(lambda: server.loaded() >= ALL, 60, "the report of the loads")
    server.ask([prompt(0, 8)], 1)
    assert server.metric("kv_tiering_cascades_total", tier="memory") >= whole_blocks(PROMPTS)
    until(lambda: "KV Transfer metrics: TieringConnector={" in server.log.read_text(), 60, "the statistics in the log")


def test_states_and_tails_are_stored_and_loaded_beside_another_connector(tmp_path: Path) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    model = write_granite(tmp_path)
    plain = plain_answers(model, [*TAILED, *LONGER])
    with engine(model, None, kv_transfer_config=several(CPU), **OPTIONS, prefix_match_unit=UNIT) as running:
        running.connector, _ = running.scheduler.connector.sub_connectors
        running.worker, _ = get_kv_transfer_group().sub_connectors
        assert wrong(running.ask(TAILED), plain[:3]) == []
        for prompts, right in ((TAILED, plain[:3]), (LONGER, plain[3:])):
            answers, cached = ask_evicted(running, prompts)
            assert wrong(answers, right) == []
            assert cached == [TAIL] * 3
        running.settle()
