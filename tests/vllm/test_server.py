"""The HTTP server with two workers or two data-parallel engines: metrics, resets, pauses, sleep."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm import shared_memory
from tests.vllm.rig import BLOCK_BYTES, Answer, answers_without_tiers, prompt, whole_blocks, wrong
from tests.vllm.server import Server, serve, until

PROMPTS = [prompt(seed) for seed in range(4)]
ALL = whole_blocks(PROMPTS) * BLOCK_BYTES

MANY = [prompt(seed, 400) for seed in range(60, 66)]
LENGTHY = 60
"""Tokens to generate for ``MANY``, so that these requests run for a while, three at a time."""


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, PROMPTS)


@pytest.fixture(scope="module")
def expected_of_many(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, MANY, LENGTHY)


@pytest.fixture(scope="module", params=["tiering", "simple"])
def two_workers(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with two tensor-parallel workers, in both modes."""
    stack = {"mode": request.param, "primary": {"capacity": "32MiB"}}
    options = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(llama, stack, log, *options, SPAWN="1", VLLM_CPU_OMP_THREADS_BIND="0|1") as server:
        assert shared_memory.is_clean()
        yield server
    assert shared_memory.is_clean()


def loaded(server: Server) -> float:
    """Return the bytes loaded so far, after one more engine step."""
    server.ask([prompt(0, 8)], 1)
    return server.loaded()


def test_what_leaves_the_workers_comes_back_from_the_cpu_until_a_reset(
    two_workers: Server, expected: list[Answer]
) -> None:
    server = two_workers
    assert wrong(server.ask(PROMPTS), expected) == []
    until(lambda: server.stored() >= ALL, 60, "the store of all blocks")
    server.evict()
    assert wrong(server.ask(PROMPTS), expected) == []
    until(lambda: server.loaded() >= ALL, 60, "the report of the loads")
    assert loaded(server) == ALL
    server.reset(tiers=True)
    assert wrong(server.ask(PROMPTS), expected) == []
    assert loaded(server) == ALL


class Asking:
    """Requests for ``MANY`` in the background; one has its first token, others are in the queue."""

    def __init__(self, server: Server, **params: bool) -> None:
        self.answers: list[Answer] = []
        self._server, self._params = server, {"kv_tiering": params}
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        assert self._began.wait(60)

    def _ask(self) -> None:
        for answers in self._server.stream(MANY, LENGTHY, kv_transfer_params=self._params):
            self.answers = answers
            if any(answer.tokens for answer in answers):
                self._began.set()

    def is_complete(self) -> bool:
        return all(len(answer.tokens) == LENGTHY for answer in self.answers)

    def end(self) -> list[Answer]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.answers


def interrupted(server: Server, stop: str, resume: str, **params: bool) -> list[Answer]:
    """Stop and resume the answers to ``MANY`` in the middle; ``PROMPTS`` are only in the tiers by then."""
    for _ in range(8):  # on few processors the requests may end before the front end sees the pause
        server.ask(PROMPTS)
        server.evict()
        asking = Asking(server, **params)
        server.call(stop, {})
        in_the_middle = not asking.is_complete()
        server.call(resume, {})
        answers = asking.end()
        if in_the_middle:
            return answers
    pytest.fail("all requests ended before they could be stopped")


def test_a_pause_that_clears_nothing_changes_nothing(
    two_workers: Server, expected: list[Answer], expected_of_many: list[Answer]
) -> None:
    server = two_workers
    assert wrong(interrupted(server, "/pause?mode=keep&clear_cache=false", "/resume"), expected_of_many) == []
    server.evict()
    before = loaded(server)
    assert wrong(server.ask(PROMPTS), expected) == []
    assert loaded(server) == before + ALL


def test_what_runs_goes_on_after_a_sleep_that_emptied_the_tiers(
    two_workers: Server, expected: list[Answer], expected_of_many: list[Answer]
) -> None:
    server = two_workers
    answers = interrupted(server, "/sleep?mode=keep&level=1", "/wake_up")
    assert wrong(answers, expected_of_many) == []
    server.evict()
    before = loaded(server)
    assert wrong(server.ask(PROMPTS), expected) == []
    assert loaded(server) == before


def test_a_pause_that_aborts_what_runs_and_loads_empties_the_tiers(
    two_workers: Server, expected: list[Answer], expected_of_many: list[Answer]
) -> None:
    server = two_workers
    server.ask(MANY, 1)
    cut = interrupted(server, "/pause?mode=abort", "/resume")
    for answer, whole in zip(cut, expected_of_many, strict=True):
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
    before = loaded(server)
    assert wrong(server.ask(PROMPTS), expected) == []
    assert loaded(server) == before


def test_data_parallel_engines_have_tiers_of_their_own(llama: Path, expected: list[Answer], tmp_path: Path) -> None:
    tier = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack = {"primary": {"capacity": "32MiB"}, "secondary": [tier], "keep_secondary": True}
    replicas = range(2)
    with serve(llama, stack, tmp_path / "log", "--data-parallel-size", "2", VLLM_CPU_OMP_THREADS_BIND="0|1") as server:
        assert shared_memory.is_clean()
        for number in map(str, replicas):  # alerts need the counters before the first event
            for name in ("cpu", "local"):
                assert server.series("kv_tiering_corrupt_blocks_total", engine=number, tier=name) == [0.0]
                assert server.series("kv_tiering_device_errors_total", engine=number, tier=name) == [0.0]
            assert server.series("kv_tiering_stores_without_room_total", engine=number) == [0.0]
            assert server.series("kv_tiering_tiers_out_of_service_total", engine=number) == [0.0]

        def local(name: str, replica: int) -> float:
            server.ask([prompt(0, 8)], 1, replica=replica)
            return server.metric(f"kv_tiering_{name}", engine=str(replica), tier="local")

        assert wrong(server.ask(PROMPTS, replica=0), expected) == []
        until(lambda: local("cascades_total", 0) >= whole_blocks(PROMPTS), 60, "the cascade")
        assert local("occupancy_bytes", 0) >= ALL
        assert local("blocks", 1) == 0
        assert wrong(server.ask(PROMPTS, replica=1), expected) == []
        until(lambda: local("cascades_total", 1) >= whole_blocks(PROMPTS), 60, "the cascade of the other")

        server.evict(replicas)
        for replica in replicas:
            assert wrong(server.ask(PROMPTS, replica=replica), expected) == []
            assert local("read_bytes_total", replica) == 0
            assert server.loaded(engine=str(replica)) == ALL

        server.call("/pause?mode=wait", {})
        server.call("/resume", {})
        assert all(server.series("kv_tiering_rows", engine=str(replica))[0] > 0 for replica in replicas)
        for replica in replicas:
            assert wrong(server.ask(PROMPTS, replica=replica), expected) == []
            assert local("read_bytes_total", replica) >= ALL
            assert server.loaded(engine=str(replica)) == 2 * ALL
        assert sorted(folder.name for folder in (tmp_path / "disk").iterdir()) == ["replica-0", "replica-1"]
    assert shared_memory.is_clean()
