"""All faults at once, repeatable from a seed: no output is wrong.

Copies that are refused, fail half way, or happen as late as the contract allows; a medium in memory that throttles,
hangs, flips bits, truncates and swaps; a disk that is full, reports errors and returns other sectors; aborts,
preemptions, new weights and a restart meanwhile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.mini_engine import Engine, EngineOptions
from tests.integration.test_engine_fuzz import play
from tests.mini_engine.bad_disk import BadDisk
from tests.mini_engine.chaos_tier import ChaosTier
from tests.mini_engine.helpers import SMALL, one_row, options
from tiering.api.engine import CanonicalKVCaches
from tiering.api.transfer import GPULoadStoreSpec, LoadStoreSpec, TransferSpec
from tiering.connector.worker import OffloadingConnectorWorker
from tiering.copy.contract import OffloadingHandler, TransferResult
from tiering.spec import TieringOffloadingSpec


class BadCopies(OffloadingHandler):
    """A handler whose transfers are refused, scribble and fail, or happen as late as possible.

    A transfer happens when a caller waits for it, or at a random later query for results. The first one fails; the
    others are chosen at random, and their number depends on the threads.
    """

    def __init__(
        self, inner: OffloadingHandler, dice: random.Random, scribble: Callable[[LoadStoreSpec], None]
    ) -> None:
        self.inner = inner
        self.dice = dice
        self.scribble = scribble
        self.failed = 0
        self.waited = 0
        self._began = False
        self._queued: dict[int, TransferSpec] = {}
        self._doomed: dict[int, LoadStoreSpec] = {}
        self._refused: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if self.dice.random() < 0.08:
            self.failed += 1
            return False
        self._queued[job_id] = spec
        if self.dice.random() < 0.08 or not self._began:
            self._doomed[job_id] = spec[1]
        self._began = True
        return True

    def _start(self, job_id: int) -> None:
        if not self.inner.transfer_async(job_id, self._queued.pop(job_id)):
            self._refused.append(TransferResult(job_id, False))

    def get_finished(self) -> list[TransferResult]:
        for job_id in list(self._queued):
            if self.dice.random() < 0.25:
                self._start(job_id)
        refused, self._refused = self._refused, []
        return refused + [self._result(result) for result in self.inner.get_finished()]

    def _result(self, result: TransferResult) -> TransferResult:
        destination = self._doomed.pop(result.job_id, None)
        if destination is None:
            return result
        self.failed += 1
        self.scribble(destination)
        return TransferResult(result.job_id, False)

    def wait(self, job_ids: Collection[int]) -> None:
        for job_id in job_ids:
            if job_id in self._queued:
                self.waited += 1
                self._start(job_id)
        self.inner.wait(job_ids)

    def shutdown(self) -> None:
        for job_id in list(self._queued):
            self._start(job_id)
        self.inner.shutdown()


@pytest.fixture
def bad_copies(monkeypatch: pytest.MonkeyPatch) -> list[BadCopies]:
    """Make every engine copy badly from now on; return the list of its handlers."""
    made: list[BadCopies] = []
    good = TieringOffloadingSpec.get_handlers

    def get_handlers(
        spec: TieringOffloadingSpec, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        def scribble(destination: LoadStoreSpec) -> None:
            if isinstance(destination, GPULoadStoreSpec):
                for tensor in kv_caches.tensors:
                    tensor.tensor[destination.block_ids] = 77

        for source, destination, handler in good(spec, kv_caches):
            made.append(BadCopies(handler, random.Random(len(made)), scribble))
            yield source, destination, made[-1]

    monkeypatch.setattr(TieringOffloadingSpec, "get_handlers", get_handlers)
    return made


def random_options(dice: random.Random, path: Path) -> EngineOptions:
    model = replace(SMALL, sliding_window=dice.choice([None, None, 12, 17, 20]))
    factor = dice.choice([1, 1, 2, 4])
    faults = {
        "TEMPORARY": 0.06,
        "PERMANENT": 0.03,
        "BIT_FLIP": 0.06,
        "TRUNCATE": 0.04,
        "SWAP": 0.06,
        "TORN": 0.05,
        "DELAY": 0.05,
    }
    small = {"attempts": 2, "backoff": "1ms", "backoff_max": "2ms"}
    secondary: list[dict[str, Any]] = [
        {
            "type": "tests.mini_engine.chaos_tier:CHAOS_TIER",
            "name": "chaos",
            "seed": dice.randrange(1000),
            "puts": {**faults, "OUT_OF_SPACE": 0.03, "HANG": 0.002},
            "gets": {**faults, "HANG": 0.004},
            "retries": small,
            "deadline": "150ms",
            "breaker": {"failures": 30, "probe_after": "10ms", "probe_max": "20ms"},
        },
        {
            "type": "tests.mini_engine.bad_disk:BAD_DISK",
            "name": "disk",
            "path": str(path / "disk"),
            "capacity": "8MiB",
            "segment_size": "2MiB",
            "retries": small,
            "breaker": {"failures": 30, "probe_after": "10ms", "probe_max": "20ms"},
        },
    ]
    dice.shuffle(secondary)
    return options(
        model=model,
        num_blocks=dice.choice([36, 50]),
        kv_first=dice.random() < 0.5,
        max_batch_tokens=dice.choice([20, 64]),
        max_running=dice.choice([2, 6]),
        stack={
            "primary": {
                "capacity": dice.choice([12, 40]) * one_row(model, factor=factor),
                "eviction": dice.choice(["lru", "arc"]),
            },
            "secondary": secondary,
            "reset_deadline": "300ms",
            "shutdown_deadline": "2s",
        },
        offload={"block_size": 8 * factor, "offload_prompt_only": dice.random() < 0.5, "sharer_wait": "20ms"},
    )


def check_nothing_is_held(engine: Engine, seed: int) -> None:
    """Check that after all hangs no row is missing and no tier was found to break its contract."""
    assert engine.tiers is not None
    manager = engine.tiers.scheduler_half.get_stats
    deadline = time.monotonic() + 10
    while manager()["manager"]["jobs_in_flight"]:
        assert time.monotonic() < deadline, f"seed {seed}: a job never ended"
        engine.step()
    stats = manager()["manager"]
    held = {word: stats[word] for word in ("rows_reserved", "rows_quarantined", "tiers_out_of_service") if stats[word]}
    assert held == {}, f"seed {seed}"
    assert stats["rows_free"] + stats["rows_evictable"] == stats["rows"], f"seed {seed}: rows were lost"


def check(seed: int, path: Path) -> None:
    """Run one seed's requests over faulty tiers; raise if an answer is wrong or a block is lost."""
    dice = random.Random(seed)
    BadDisk.seed, BadDisk.injected_in_all = seed, 0
    settings = random_options(dice, path)
    checked = 0
    for last_life in (False, True):
        with Engine(settings) as engine:
            try:
                checked += play(dice, engine, settings.model, may_change_weights=last_life)
            finally:
                # The negative controls leave here with a wrong answer; their hung threads must end, too.
                assert ChaosTier.latest is not None
                ChaosTier.latest.chaos.release()
            assert engine.settle(), f"seed {seed}: work never ended"
            assert len(engine.kv.pool.free) == settings.num_blocks - 1, f"seed {seed}: GPU blocks were lost"
            check_nothing_is_held(engine, seed)
    assert checked > 10, f"seed {seed}: hardly anything was answered"
    assert ChaosTier.latest is not None
    injected = sum(ChaosTier.latest.chaos.injected.values()) + BadDisk.injected_in_all
    assert injected > 0, f"seed {seed}: nothing went wrong"


def check_all(seeds: Iterable[int], path: Path) -> None:
    for seed in seeds:
        check(seed, path / str(seed))


@pytest.mark.parametrize("seed", range(12))
def test_no_fault_shows_in_an_answer(seed: int, tmp_path: Path, bad_copies: list[BadCopies]) -> None:
    check(seed, tmp_path)
    assert sum(copies.failed for copies in bad_copies) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_no_fault_shows_in_an_answer_for_long(seed: int, tmp_path: Path, bad_copies: list[BadCopies]) -> None:
    check(seed, tmp_path)


@pytest.mark.usefixtures("bad_copies")
def test_late_copies_show_if_nobody_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the fences, the same faults give wrong answers."""
    monkeypatch.setattr(OffloadingConnectorWorker, "handle_preemptions", lambda self, metadata: None)
    with pytest.raises(AssertionError, match=r"^r\d+"):
        check_all(range(9, 30), tmp_path)
