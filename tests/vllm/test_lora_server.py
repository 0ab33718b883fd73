"""LoRA adapters behind a server with two workers and a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import S3Endpoint, moto_server
from tests.vllm.models import write_adapter
from tests.vllm.rig import Answer, engine, whole_blocks, wrong
from tests.vllm.server import Server, serve, until
from tests.vllm.test_lora import ALL, OPTIONS, PROMPTS, Asked, ask

TWO_WORKERS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp", "--shutdown-timeout", "60")
LORA = ("--enable-lora", "--max-loras", "1", "--max-cpu-loras", "4", "--max-lora-rank", "8")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[S3Endpoint]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="module")
def expected(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    directory = tmp_path_factory.mktemp("adapters")
    with engine(llama, None, enable_prefix_caching=False, **OPTIONS) as plain:
        return {
            name: ask(plain, Asked(name, number, write_adapter(directory / name, number)))
            for number, name in enumerate(("one", "two"), 1)
        }


def load(server: Server, path: Path) -> None:
    """Load the adapter at ``path`` under the name that all adapters here have."""
    server.call("/v1/load_lora_adapter", {"lora_name": "parrot", "lora_path": str(path)})


def hold(server: Server, path: Path) -> None:
    """Load the adapter at ``path``, and let the workers report it."""
    load(server, path)
    server.ask([PROMPTS[0][:8]], model="parrot")


def loaded(server: Server) -> float:
    """Return the bytes loaded so far, after one more engine step."""
    server.ask([PROMPTS[0][:8]], 1)
    return server.loaded()


def counted(server: Server, name: str) -> float:
    """Return a metric of the bucket, after one more engine step."""
    loaded(server)
    return server.metric(f"kv_tiering_{name}", tier="s3")


def test_two_workers_find_an_adapter_s_kv_in_a_bucket_after_a_restart_and_none_of_another_adapter_of_its_name(
    llama: Path, expected: dict[str, list[Answer]], endpoint: S3Endpoint, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "adapter", 1)
    bucket: dict[str, Any] = endpoint.words(endpoint.make_bucket("kv-cache").name)
    stack = {"primary": {"capacity": "64MiB"}, "secondary": [{**bucket, "lookup_deadline": "1m"}]}
    environment = {
        **endpoint.environment(),
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    }
    with serve(llama, stack, tmp_path / "first", *TWO_WORKERS, *LORA, **environment) as server:
        hold(server, path)
        assert wrong(server.ask(PROMPTS, model="parrot"), expected["one"]) == []
        blocks = whole_blocks(PROMPTS)
        until(lambda: counted(server, "cascades_total") >= blocks, 120, "the store of all blocks")
    with serve(llama, stack, tmp_path / "second", *TWO_WORKERS, *LORA, **environment) as server:
        until(lambda: counted(server, "available") == 1, 120, "the opening of the bucket")
        hold(server, path)
        assert wrong(server.ask(PROMPTS, model="parrot"), expected["one"]) == []
        assert loaded(server) == ALL
        server.evict()
        server.call("/v1/unload_lora_adapter", {"lora_name": "parrot"})
        write_adapter(path, 2)
        load(server, path)
        assert wrong(server.ask(PROMPTS, model="parrot"), expected["two"]) == []
        assert loaded(server) == ALL
