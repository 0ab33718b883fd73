"""The conformance suite of tiers over a local tier, through vLLM's interface of secondary tiers."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm_tier.double import FACTS, RequestContext, installed, spec_of
from tests.tiers.local.test_conformance import CAPACITY, _Raw
from tiering.api.keys import OffloadKey
from tiering.api.namespace import ModelIdentity
from tiering.api.request import ReqContext
from tiering.engines.vllm_tier.identity import Identified
from tiering.secondary.contract import (
    JobResult,
    PrefixAnswer,
    SecondaryTierManager,
    StepEnd,
    TierContext,
    TierTraits,
    TransferJob,
)
from tiering.secondary.tier_stats import TierStats
from tiering.testing.clock import until
from tiering.testing.keys import key_of
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import TierTests

NEWEST = "0.33.0"
K = [key_of(number) for number in range(32)]


class Weights:
    """The identification of a model's weights, which has ended."""

    def __init__(self, model: ModelIdentity) -> None:
        self._model = model

    def __call__(self) -> ModelIdentity:
        return self._model

    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass
class _Load:
    """A load; vLLM begins each of its blocks when the block is a hit."""

    job: TransferJob
    ctx: RequestContext
    left: dict[OffloadKey, int]
    running: dict[int, OffloadKey] = field(default_factory=dict)
    loaded: list[OffloadKey] = field(default_factory=list)


class Door(SecondaryTierManager):
    """vLLM's tier as a tier of this project: every call goes through vLLM's interface.

    A store has ended when the medium has its blocks, by the events. With ``keep_secondary``, the tier's own memory is
    then emptied, so that loads read the medium.

    Args:
        context: environment of the tier.
        factory: vLLM's factory of tiers.
        path: place of the local tier.
        keeps: True: a reset keeps the local tier.
    """

    def __init__(self, context: TierContext, factory: Any, path: Path, *, keeps: bool) -> None:
        self.name, self.traits = context.name, TierTraits(load_deadline=None)
        self._rows, self._keeps = np.asarray(context.primary_view), keeps
        self._make: Callable[[], Any] = lambda: factory.create_secondary_tier(
            {
                "type": "KVTieringTier",
                "module_path": "tiering.engines.vllm_tier",
                "primary": {"capacity": "8MiB"},
                "secondary": [{"type": "local", "path": str(path), "capacity": CAPACITY}],
                "shutdown_deadline": "20s",
                "keep_secondary": keeps,
            },
            context.primary_view,
            spec_of(2, events=True),
        )
        name = context.namespace.directory
        self._model = ModelIdentity(name, "w", "bfloat16", "rows of vLLM")
        self._held: set[OffloadKey] = set()
        self._found: dict[OffloadKey, bool] = {}
        self._asking: dict[OffloadKey, RequestContext] = {}
        self._stores: dict[int, tuple[Sequence[OffloadKey], Any]] = {}
        self._stored: list[tuple[Sequence[OffloadKey], JobResult]] = []
        self._loads: list[_Load] = []
        self._numbers = iter(range(1, 1 << 30))
        self._failed = 0
        self._values: dict[str, float] = {}
        self._ended = False

    def open(self, deadline: float) -> bool:
        module: Any = importlib.import_module("tiering.engines.vllm_tier.tier")
        weights: Any = Weights(self._model)
        module._identified = lambda *_: Identified(self._model, weights, "", frozenset(), None)
        self.tier: Any = self._make()
        return self._serves(deadline)

    def _serves(self, deadline: float) -> bool:
        """Wait until the local tier is in service."""
        self._values["available"] = 0.0

        def serves() -> float:
            self.tier.on_request_finished(self._begin("waits"))
            return self._counter("available")

        return until(serves, deadline - time.monotonic())

    def _counter(self, name: str) -> float:
        """Return a counter or gauge of the local tier, as vLLM gets it."""
        report = self.tier.get_stats()
        if report is not None:
            for (metric, labels), value in report.values.items():
                if labels == ("local",):
                    short = metric.removeprefix("kv_tiering_").removesuffix("_total")
                    grown = metric.endswith("_total")
                    self._values[short] = value + (self._values.get(short, 0.0) if grown else 0.0)
        return self._values.get(name, 0.0)

    def _begin(self, name: str) -> RequestContext:
        ctx = RequestContext(name)
        self.tier.on_new_request(ctx)
        return ctx

    # ----------------------------------------------------------------------------------------------------------- lookup

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        held, undecided = self.lookup_prefix((key,), req_context)
        return None if undecided else held == 1

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        for key in keys:
            if key in self._found:
                continue
            ctx = self._asking.get(key) or self._asking.setdefault(key, self._begin(f"asks {next(self._numbers)}"))
            answer = self.tier.lookup(key, ctx).name
            if answer != "RETRY":
                self._found[key] = answer == "HIT"
                self.tier.on_request_finished(self._asking.pop(key))
        if self._asking:
            return PrefixAnswer(0, True)
        found = [self._found[key] for key in keys]
        self._found.clear()
        return PrefixAnswer((*found, False).index(False), False)

    # ------------------------------------------------------------------------------------------------------------- jobs

    def _submit(self, keys: Sequence[OffloadKey], rows: Sequence[int], ctx: RequestContext, *, load: bool) -> int:
        number = next(self._numbers)
        words = {FACTS[NEWEST].rows: np.array(rows)}
        job = SimpleNamespace(job_id=number, keys=list(keys), is_promotion=load, req_context=ctx, **words)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return number

    def submit_store(self, job: TransferJob) -> None:
        ctx = self._begin(f"stores {job.job_id}")
        self._stores[self._submit(job.keys, list(job.block_ids), ctx, load=False)] = job.keys, (job.job_id, ctx)

    def submit_load(self, job: TransferJob) -> None:
        left = dict(zip(job.keys, list(job.block_ids), strict=True))
        self._loads.append(_Load(job, self._begin(f"loads {job.job_id}"), left))

    def get_finished(self) -> Iterable[JobResult]:
        ended = {result.job_id: result for result in self.tier.get_finished_jobs()}
        for event in self.tier.take_events():
            (self._held.difference_update if event.removed else self._held.update)(event.keys)
        for number in [number for number in self._stores if number in ended]:
            keys, (job_id, ctx) = self._stores.pop(number)
            self.tier.on_request_finished(ctx)
            given = ended[number]
            done = keys if given.success else given.successful_keys
            self._stored.append((keys, JobResult(job_id, bool(given.success), None if given.success else done)))
        done_stores = [
            item for item in self._stored if self._ended or not item[1].success or self._held.issuperset(item[0])
        ]
        for item in done_stores:
            self._stored.remove(item)
            if self._keeps and not self._ended:
                self.tier.drain_jobs()
            yield item[1]
        for load in list(self._loads):
            self._go_on(load, ended)
            if not load.left and not load.running:
                self._loads.remove(load)
                self.tier.on_request_finished(load.ctx)
                self._failed += len(load.job.keys) - len(load.loaded)
                arrived = [key for key in load.job.keys if key in load.loaded]
                yield JobResult(load.job.job_id, len(arrived) == len(load.job.keys), arrived)

    def _go_on(self, load: _Load, ended: dict[int, Any]) -> None:
        for number in [number for number in load.running if number in ended]:
            key = load.running.pop(number)
            load.loaded += [key] * bool(ended[number].success)
        for key in list(load.left):
            answer = self.tier.lookup(key, load.ctx).name
            if answer == "HIT":
                load.running[self._submit([key], [load.left.pop(key)], load.ctx, load=True)] = key
            elif answer == "MISS":
                del load.left[key]

    def on_schedule_end(self) -> StepEnd:
        self.tier.on_schedule_end(None)
        return StepEnd()

    def drain(self, deadline: float) -> bool:
        def ended() -> bool:
            list(self.get_finished())
            return not (self._stores or self._stored or self._loads)

        until(ended, deadline - time.monotonic())
        return True

    def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
        self.tier.drain_jobs()
        self._held.clear()
        self.tier.get_stats()  # may be of the time before
        return self._serves(deadline)

    def shutdown(self, deadline: float) -> bool:
        self.tier.shutdown()
        self._ended = True
        return True

    def get_stats(self) -> TierStats:
        counted = int(self._counter("corrupt_blocks"))
        return replace(TierStats(), promotions_failed=self._failed, corrupt_blocks=counted)


class _BehindVllm(_Raw, TierTests):
    """The local tier behind vLLM's interface; a block is one row of vLLM's, whatever its group."""

    keeps = True

    @pytest.fixture(autouse=True)
    def _medium(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr("tiering.engines.mailbox.STATS_SECONDS", 0.0)
        self.path = tmp_path / "kv"
        with installed(NEWEST) as self.factory:
            yield

    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        return Door(context, self.factory, self.path, keeps=self.keeps)


class BlocksOnly:
    """The suite without resets, which keep a tier's blocks here."""

    test_after_a_reset_nothing_stored_before_is_served: Any = None
    test_a_reset_holds_over_a_restart: Any = None
    test_what_is_stored_after_a_reset_and_a_restart_is_found_by_later_restarts: Any = None


class ResetsOnly:
    """The suite without altered blocks, which are not read because the memory above the medium has them."""

    test_a_flipped_bit_is_a_miss: Any = None
    test_a_truncated_block_is_a_miss: Any = None
    test_swapped_blocks_are_misses: Any = None
    test_a_foreign_models_block_is_a_miss: Any = None
    test_a_deleted_block_is_a_miss_and_the_others_arrive: Any = None


class TestBlocksBehindVllm(BlocksOnly, _BehindVllm):
    """Blocks are read from the medium, because the memory above it is emptied after each store."""


class TestResetsBehindVllm(ResetsOnly, _BehindVllm):
    """vLLM's reset ends the epoch, and what was stored before."""

    keeps = False


def test_negative_control_a_door_that_mixes_up_rows_does_not_conform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.engines.mailbox.STATS_SECONDS", 0.0)

    class Mixed(Door):
        def _submit(self, keys: Sequence[OffloadKey], rows: Sequence[int], ctx: RequestContext, *, load: bool) -> int:
            return super()._submit(keys, rows if load else [*rows[1:], rows[0]], ctx, load=load)

    with installed(NEWEST) as factory:
        rig = TierRig(
            lambda context: Mixed(context, factory, tmp_path / "kv", keeps=True), group_bytes=(64 << 10, 16 << 10)
        ).open()
        rig.store(K[:4])
        with pytest.raises(AssertionError, match="WRONG KV"):
            rig.load(K[:4])
        rig.close()
