"""The simple scheduler in the mini engine with real KV: loads happen, and outputs are bit-identical."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from examples.mini_engine import Request
from examples.mini_engine.model import ModelConfig
from examples.mini_engine.request import Status
from examples.mini_engine.simple import SimpleEngine
from examples.mini_engine.tiers import copy_nothing
from tests.mini_engine.helpers import SMALL, WINDOWED, ask_all, options, prompt, reference, wrong_answers
from tiering.api.transfer import TransferSpec
from tiering.copy.contract import OffloadingHandler, TransferResult
from tiering.errors import ConfigError
from tiering.simple.scheduler import SimpleCPUOffloadScheduler
from tiering.simple.worker import SimpleCPUOffloadWorker

MODES = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
MODELS = pytest.mark.parametrize("model", [SMALL, WINDOWED], ids=["full", "windowed"])
PROMPTS = [prompt(seed, 70, shared=16) for seed in range(8)]


def simple(lazy: bool, capacity: str = "8MiB", **changes: Any) -> Any:
    stack = {"mode": "simple", "lazy_offload": lazy, "primary": {"capacity": capacity}}
    return options(**{"num_blocks": 44, "stack": stack, **changes})


def halves(engine: SimpleEngine) -> tuple[SimpleCPUOffloadScheduler, SimpleCPUOffloadWorker]:
    """Return the scheduler half and the worker half of the engine's connector."""
    tiers = engine.tiers
    assert tiers is not None
    assert isinstance(tiers.scheduler_half, SimpleCPUOffloadScheduler)
    assert isinstance(tiers.worker_half, SimpleCPUOffloadWorker)
    return tiers.scheduler_half, tiers.worker_half


def check_nothing_is_held(engine: SimpleEngine) -> None:
    assert engine.settle()
    assert len(engine.kv.pool.free) == engine.options.num_blocks - 1
    assert len(halves(engine)[0].cpu_block_pool.refs) == 0


@MODES
@MODELS
@pytest.mark.parametrize("kv_first", [False, True], ids=["blocks first", "kv first"])
def test_what_is_loaded_changes_no_bit_and_was_really_loaded(lazy: bool, model: ModelConfig, kv_first: bool) -> None:
    with SimpleEngine(simple(lazy, model=model, kv_first=kv_first)) as engine:
        assert wrong_answers(ask_all(engine, PROMPTS, "first"), PROMPTS, model=model) == []
        loaded = engine.loaded_bytes
        again = ask_all(engine, PROMPTS, "again")
        assert wrong_answers(again, PROMPTS, model=model) == []
        assert engine.loaded_bytes - loaded > 20 * engine.worker.cache.page_bytes
        assert sum(output.loaded_tokens for output in again) > 200
        check_nothing_is_held(engine)


@MODES
@MODELS
def test_loads_that_copy_nothing_are_noticed(lazy: bool, model: ModelConfig) -> None:
    with SimpleEngine(simple(lazy, model=model), copy_nothing) as engine:
        ask_all(engine, PROMPTS, "first")
        again = ask_all(engine, PROMPTS, "again")
        loaded = [number for number, output in enumerate(again) if output.loaded_tokens]
        assert loaded
        assert wrong_answers(again, PROMPTS, model=model) == loaded
        assert engine.loaded_bytes == 0


@MODES
def test_one_wrong_block_is_noticed(lazy: bool) -> None:
    with SimpleEngine(simple(lazy)) as engine:
        ask_all(engine, PROMPTS, "first")
        assert engine.settle()
        request = Request("", PROMPTS[0])
        request.update_hashes(8)
        pool = halves(engine)[0].cpu_block_pool
        key = next(key for key in pool.cached if key[:-4] == request.block_hashes[5])
        region = halves(engine)[1]._region
        assert region is not None
        rows = region.array.reshape(-1)
        size = len(rows) // 4096 * 4096 and engine.worker.cache.block_bytes
        rows[pool.cached[key] * size : (pool.cached[key] + 1) * size] = 0
        again = ask_all(engine, PROMPTS[:1], "again")
        assert again[0].loaded_tokens > 40
        assert wrong_answers(again, PROMPTS[:1]) == [0]


@MODES
def test_a_pool_that_is_too_small_only_costs_hits(lazy: bool) -> None:
    with SimpleEngine(simple(lazy, capacity="60KiB")) as engine:
        for turn in range(3):
            assert wrong_answers(ask_all(engine, PROMPTS, f"turn {turn}"), PROMPTS) == []
        check_nothing_is_held(engine)
        assert halves(engine)[0].cpu_block_pool.evictions > 0


class FailingLoads(OffloadingHandler):
    """A handler whose every second load fails without moving a byte."""

    def __init__(self, inner: OffloadingHandler) -> None:
        self._inner, self._count, self.failed = inner, 0, 0

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self._count += 1
        self.failed += self._count % 2
        return self._count % 2 == 0 and self._inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        return self._inner.get_finished()

    def wait(self, job_ids: Collection[int]) -> None:
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        self._inner.shutdown()


@MODES
@MODELS
def test_failed_loads_are_computed(lazy: bool, model: ModelConfig) -> None:
    made: list[FailingLoads] = []

    def failing(handler: OffloadingHandler) -> OffloadingHandler:
        made.append(FailingLoads(handler))
        return made[0]

    with SimpleEngine(simple(lazy, model=model), failing) as engine:
        for turn in range(3):
            assert wrong_answers(ask_all(engine, PROMPTS, f"turn {turn}"), PROMPTS, model=model) == []
        assert made[0].failed > 2
        assert engine.loaded_bytes > 0
        check_nothing_is_held(engine)


@MODES
def test_after_new_weights_nothing_old_is_served(lazy: bool) -> None:
    with SimpleEngine(simple(lazy)) as engine:
        ask_all(engine, PROMPTS, "first")
        assert engine.load_weights(1)
        other = replace(SMALL, seed=1)
        assert wrong_answers(ask_all(engine, PROMPTS, "again"), PROMPTS, model=other) == []
        assert wrong_answers(ask_all(engine, PROMPTS, "once more"), PROMPTS, model=other) == []
        assert engine.loaded_bytes > 0


def test_eager_works_without_prefix_caching() -> None:
    with SimpleEngine(simple(False, prefix_caching=False, model=WINDOWED)) as engine:
        for turn in range(2):
            assert wrong_answers(ask_all(engine, PROMPTS, f"turn {turn}"), PROMPTS, model=WINDOWED) == []
        assert engine.loaded_bytes > 0


def test_an_engine_without_the_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode"):
        SimpleEngine(options(stack={"primary": {"capacity": "1MiB"}}))


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_answers_are_right(seed: int) -> None:
    dice = random.Random(seed)
    model = replace(SMALL, sliding_window=dice.choice([None, 12, 17, 33]))
    settings = simple(
        seed % 2 == 1,
        dice.choice(["100KiB", "1MiB", "4MiB"]),
        model=model,
        num_blocks=dice.choice([36, 50]),
        max_batch_tokens=dice.choice([8, 20, 64]),
        kv_first=dice.random() < 0.5,
    )
    texts = [prompt(number, dice.randrange(9, 110), shared=dice.choice([0, 8, 40])) for number in range(6)]
    coming = [Request(f"r{number}", dice.choice(texts), dice.choice([1, 8])) for number in range(24)]
    asked = list(coming)
    with SimpleEngine(settings) as engine:
        while coming or engine.scheduler.requests:
            event = dice.random()
            if coming and event < 0.3:
                engine.add(coming.pop())
            elif engine.scheduler.requests and event < 0.34:
                engine.abort(dice.choice(sorted(engine.scheduler.requests)))
            engine.step()
        finished = [request for request in asked if request.status is Status.FINISHED]
        assert len(finished) > 10
        for request in finished:
            assert (request.output, request.logit_digests) == reference(
                request.prompt, request.max_tokens, model=model
            ), seed
        check_nothing_is_held(engine)
