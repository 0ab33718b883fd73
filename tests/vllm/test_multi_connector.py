"""vLLM's ``MultiConnector`` with our connector and another one, in the server with its statistics on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.rig import BLOCK_BYTES, prompt, whole_blocks, wrong
from tests.vllm.server import Server, serve, until
from tests.vllm.test_startup import several

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
