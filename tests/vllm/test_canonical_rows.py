"""Canonical blocks on a disk, which engines with other numbers of workers find after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm.models import write_gemma
from tests.vllm.rig import BLOCK_BYTES, Answer, Engine, answers_without_tiers, engine, prompt, whole_blocks, wrong
from tests.vllm.server import Server, serve, until
from tests.wrapped_handler import Wrapped
from tiering.api.transfer import CPULoadStoreSpec, TransferSpec
from tiering.copy.contract import OffloadingHandler

FIRST, SECOND, THIRD = ([prompt(seed) for seed in range(start, start + 3)] for start in (0, 10, 20))
ALL = whole_blocks(FIRST) * BLOCK_BYTES
"""Bytes of the whole blocks of each list of prompts, all workers together."""
LAYERS, HEADS = 3, 2
OMP_THREADS = {1: "0", 2: "0|1", 4: "0|1|0|1"}


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, [*FIRST, *SECOND, *THIRD])


def stack(path: Path) -> dict[str, Any]:
    local = {"type": "local", "path": str(path / "disk"), "capacity": "64MiB"}
    return {"primary": {"capacity": "64MiB"}, "secondary": [local], "layout": "canonical"}


@contextmanager
def workers(
    model: Path,
    path: Path,
    count: int,
    *more: str,
    tensor: int | None = None,
    words: dict[str, Any] | None = None,
    tier: str = "local",
) -> Iterator[Server]:
    """A server with ``count`` workers whose disk, or other tier, is open.

    Args:
        more: further options of the server.
        tensor: number of workers that share a layer; default: all.
        words: the stack; default: that of :func:`stack`.
        tier: name of the tier that must be open.
    """
    options = [
        "--tensor-parallel-size",
        str(tensor or count),
        "--distributed-executor-backend",
        "mp",
        "--shutdown-timeout",
        "60",
        *more,
    ]
    with serve(
        model, words or stack(path), path / f"log{count}", *options, VLLM_CPU_OMP_THREADS_BIND=OMP_THREADS[count]
    ) as server:
        until(lambda: step(server) and server.metric("kv_tiering_available", tier=tier) == 1, 120, "the tier")
        yield server


def step(server: Server) -> bool:
    """Let the engine make one step, which reports what was copied."""
    return bool(server.ask([FIRST[0][:8]], 1))


def stored(server: Server, tier: str = "local") -> float:
    step(server)
    return server.metric("kv_tiering_cascades_total", tier=tier)


class SwappedHeads(Wrapped):
    """A handler that loads rows whose two heads are in the wrong order."""

    def __init__(self, inner: OffloadingHandler, rows: np.ndarray) -> None:
        super().__init__(inner)
        self.rows = rows

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, _ = spec
        assert isinstance(source, CPULoadStoreSpec)
        for row in source.block_ids:
            pages = self.rows[row, :BLOCK_BYTES].reshape(LAYERS, HEADS, -1)
            pages[:] = pages[:, ::-1].copy()
        return self.inner.transfer_async(job_id, spec)


def test_one_two_and_four_workers_find_each_other_s_blocks_after_a_restart(
    llama: Path, expected: list[Answer], tmp_path: Path
) -> None:
    """Each number of workers loads what both others have stored; two of four workers hold each head."""
    first, second, third = (expected[place : place + 3] for place in (0, 3, 6))
    with workers(llama, tmp_path, 4) as four:
        store(four, FIRST, first)
    with engine(llama, stack(tmp_path)) as one:
        answers, loaded = one.loaded(lambda: one.ask(FIRST))
        assert wrong(answers, first) == []
        assert loaded == ALL
        assert wrong(one.ask(SECOND), second) == []
        one.settle()
    with workers(llama, tmp_path, 2) as two:
        assert wrong(two.ask([*FIRST, *SECOND]), [*first, *second]) == []
        step(two)
        assert two.loaded() == 2 * ALL
        store(two, THIRD, third)
    with engine(llama, stack(tmp_path)) as one:
        answers, loaded = one.loaded(lambda: one.ask(THIRD))
        assert wrong(answers, third) == []
        assert loaded == ALL
        negative_control(one, third)
    with workers(llama, tmp_path, 4) as four:
        assert wrong(four.ask([*SECOND, *THIRD]), [*second, *third]) == []
        step(four)
        assert four.loaded() == 2 * 2 * ALL


def store(server: Server, prompts: list[list[int]], right: list[Answer]) -> None:
    """Have the workers compute prompts, and wait until all blocks are on the disk."""
    before = stored(server)
    assert wrong(server.ask(prompts), right) == []
    until(lambda: stored(server) >= before + whole_blocks(prompts), 60, "the stores of the workers")


def test_windows_beside_full_attention_too(tmp_path: Path) -> None:
    """Each group has rows of its own."""
    model = write_gemma(tmp_path / "gemma")
    options = {"num_gpu_blocks_override": 80}
    answers = answers_without_tiers(model, FIRST, **options)
    with engine(model, stack(tmp_path), **options) as one:
        assert wrong(one.ask(FIRST), answers) == []
        one.evict()
        again, all_bytes = one.loaded(lambda: one.ask(FIRST))
        assert wrong(again, answers) == []
        assert all_bytes
    with workers(model, tmp_path, 2, "--num-gpu-blocks-override", "80") as two:
        assert wrong(two.ask(FIRST), answers) == []
        step(two)
        assert two.loaded() == all_bytes


def negative_control(one: Engine, right: list[Answer]) -> None:
    """Heads in the wrong order change the answers."""
    one.evict()
    rows = one.worker._spec._region.array
    with one.loads_through(lambda inner: SwappedHeads(inner, rows)):
        answers = one.ask(THIRD, params={"kv_tiering": {"store": False}})
    assert wrong(answers, right) == [0, 1, 2]


def test_plain_and_canonical_blocks_of_one_engine_are_apart(
    llama: Path, expected: list[Answer], tmp_path: Path
) -> None:
    with engine(llama, {**stack(tmp_path), "layout": "plain"}) as one:
        one.ask(FIRST)
        one.settle()
    with engine(llama, stack(tmp_path)) as one:
        answers, loaded = one.loaded(lambda: one.ask(FIRST))
    assert wrong(answers, expected[: len(FIRST)]) == []
    assert loaded == 0
