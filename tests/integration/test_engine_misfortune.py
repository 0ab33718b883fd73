"""Preemptions, aborts, failed copies and broken media during stores and loads never change outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from examples.mini_engine import Engine, Request
from examples.mini_engine.request import Status
from tests.mini_engine.chaos_tier import ChaosTier
from tests.mini_engine.helpers import SMALL, WINDOWED, ask_all, one_row, options, prompt, reference, wrong_answers
from tests.wrapped_handler import Wrapped
from tiering.api.transfer import TransferSpec
from tiering.copy.contract import OffloadingHandler, TransferResult
from tiering.testing.chaos import Fault

PROMPTS = [prompt(seed, 77, shared=16) for seed in range(6)]
MODELS = pytest.mark.parametrize("model", [SMALL, WINDOWED], ids=["full", "windowed"])


def stack(rows: int, *secondary: dict[str, Any], model: Any = SMALL) -> dict[str, Any]:
    return {"primary": {"capacity": rows * one_row(model)}, "secondary": list(secondary)}


MEMORY = {"type": "memory", "capacity": "16MiB"}


@MODELS
def test_preemption_while_storing_and_loading(model: Any) -> None:
    with Engine(
        options(num_blocks=30 if model is SMALL else 50, model=model, stack=stack(200, MEMORY, model=model))
    ) as engine:
        preemptions = 0
        for turn in range(3):
            outputs = ask_all(engine, PROMPTS, f"turn {turn}", max_tokens=24, at_once=6)
            assert wrong_answers(outputs, PROMPTS, 24, model=model) == []
            preemptions += sum(output.preemptions for output in outputs)
        assert preemptions > 0
        assert engine.loaded_bytes > 0
        assert engine.settle()
        assert len(engine.kv.pool.free) == engine.options.num_blocks - 1


@MODELS
@pytest.mark.parametrize("seed", range(6))
def test_aborts_at_any_moment(model: Any, seed: int) -> None:
    dice = random.Random(seed)
    sized = stack(30, MEMORY, model=model)
    with Engine(options(num_blocks=40, model=model, stack=sized, max_batch_tokens=24)) as engine:
        requests = [Request(f"r{number}", PROMPTS[number % 6], 8) for number in range(18)]
        coming = list(requests)
        while coming or engine.scheduler.requests:
            if coming and dice.random() < 0.4:
                engine.add(coming.pop(0))
            if engine.scheduler.requests and dice.random() < 0.06:
                engine.abort(dice.choice(sorted(engine.scheduler.requests)))
            engine.step()
        assert engine.settle()
        assert len(engine.kv.pool.free) == 39
    finished = [request for request in requests if request.status is Status.FINISHED]
    assert 0 < len(finished) < len(requests)
    for request in finished:
        assert (request.output, request.logit_digests) == reference(request.prompt, model=model), f"seed {seed}"


class FailSome(Wrapped):
    """A handler whose every third transfer scribbles over its destination and reports a failure."""

    def __init__(self, inner: OffloadingHandler) -> None:
        super().__init__(inner)
        self.failed = 0
        self._doomed: set[int] = set()
        self._seen = 0

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self._seen += 1
        if self._seen % 3 == 1:
            self._doomed.add(job_id)
        return self.inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        results = []
        for result in self.inner.get_finished():
            if result.job_id in self._doomed:
                self.failed += 1
                self._doomed.discard(result.job_id)
                results.append(TransferResult(result.job_id, False))
            else:
                results.append(result)
        return results


class RefuseSome(Wrapped):
    """A handler that refuses to start every second transfer."""

    def __init__(self, inner: OffloadingHandler) -> None:
        super().__init__(inner)
        self.failed = 0
        self._seen = 0

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self._seen += 1
        if self._seen % 2:
            self.failed += 1
            return False
        return self.inner.transfer_async(job_id, spec)


@MODELS
@pytest.mark.parametrize("handler", [FailSome, RefuseSome])
def test_failed_loads_are_computed(model: Any, handler: Callable[[OffloadingHandler], FailSome]) -> None:
    made: list[FailSome] = []

    def replace_loads(inner: OffloadingHandler) -> OffloadingHandler:
        made.append(handler(inner))
        return made[-1]

    with Engine(options(num_blocks=40, model=model, stack=stack(200, model=model)), replace_loads) as engine:
        for turn in range(4):
            outputs = ask_all(engine, PROMPTS, f"turn {turn}")
            assert wrong_answers(outputs, PROMPTS, model=model) == []
        assert sum(replaced.failed for replaced in made) > 0
        assert engine.loaded_bytes > 0


class SkipFirstBlock(Wrapped):
    """A handler that leaves out the first block of each load and reports success."""

    def __init__(self, inner: OffloadingHandler, engine: list[Engine]) -> None:
        super().__init__(inner)
        self._engine = engine
        self._blocks: dict[int, int] = {}

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self._blocks[job_id] = int(spec[1].block_ids[0])  # type: ignore[attr-defined]
        return self.inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        results = self.inner.get_finished()
        for result in results:
            block = self._blocks.pop(result.job_id)
            for tensor in self._engine[0].worker.cache.tensors:
                tensor[block] = 0
        return results


def test_the_comparison_fails_if_one_block_of_a_load_is_wrong() -> None:
    made: list[Engine] = []
    with Engine(options(num_blocks=30, stack=stack(200)), lambda inner: SkipFirstBlock(inner, made)) as engine:
        made.append(engine)
        assert wrong_answers(ask_all(engine, PROMPTS, "computed"), PROMPTS) == []
        assert len(wrong_answers(ask_all(engine, PROMPTS, "loaded"), PROMPTS)) >= 3


@pytest.mark.parametrize("seed", range(8))
@MODELS
def test_faults_of_a_medium_do_not_show(model: Any, seed: int) -> None:
    faults = {
        "TEMPORARY": 0.1,
        "PERMANENT": 0.05,
        "BIT_FLIP": 0.1,
        "TRUNCATE": 0.05,
        "SWAP": 0.1,
        "TORN": 0.1,
        "DELAY": 0.1,
    }
    chaos = {
        "type": "tests.mini_engine.chaos_tier:CHAOS_TIER",
        "name": "chaos",
        "seed": seed,
        "puts": {**faults, "OUT_OF_SPACE": 0.03},
        "gets": faults,
        "retries": {"attempts": 2, "backoff": "1ms", "backoff_max": "2ms"},
        "breaker": {"failures": 50, "probe_after": "20ms"},
    }
    with Engine(options(num_blocks=40, model=model, stack=stack(40, chaos, model=model))) as engine:
        assert engine.tiers is not None
        for turn in range(16):
            outputs = ask_all(engine, PROMPTS, f"turn {turn}")
            assert wrong_answers(outputs, PROMPTS, model=model) == [], f"seed {seed}"
            assert engine.settle()
            # How many blocks are loaded depends on the threads. A few seeds rarely read a corrupt one in four turns.
            if turn >= 3 and engine.tiers.secondary_stats()["chaos"]["corrupt_blocks"]:
                break
        assert engine.tiers.secondary_stats()["chaos"]["corrupt_blocks"] > 0
        assert engine.tiers.secondary_stats()["chaos"]["read_bytes"] > 0
    assert ChaosTier.latest is not None
    assert all(ChaosTier.latest.chaos.injected[fault] for fault in (Fault.BIT_FLIP, Fault.SWAP, Fault.TORN))
