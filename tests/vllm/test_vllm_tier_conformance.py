"""The conformance suite of tiers over a local tier, behind vLLM's real manager of tiers."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from tests.engines.vllm_tier.double import spec_of
from tests.engines.vllm_tier.test_conformance import BlocksOnly, ResetsOnly, Weights
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

STEP = base.ScheduleEndContext((), ())


@dataclass
class _Load:
    """A load, block by block."""

    job: TransferJob
    ctx: Any
    left: dict[OffloadKey, int]
    loaded: list[OffloadKey] = field(default_factory=list)


class Managed(SecondaryTierManager):
    """vLLM's manager with our tier as a tier of this project: stores and loads pass vLLM's CPU rows.

    A store has ended when the medium has its blocks, by the events. With ``keep_secondary``, vLLM is reset once no
    store runs, which empties its rows and the tier's own memory, so that loads read the medium.

    Args:
        context: environment of the tier.
        path: place of the local tier.
        keeps: True: a reset keeps the local tier.
    """

    def __init__(self, context: TierContext, path: Path, *, keeps: bool) -> None:
        self.name, self.traits = context.name, TierTraits(load_deadline=None)
        self._rows, self._keeps = np.asarray(context.primary_view), keeps
        self._theirs = np.zeros((len(self._rows) + 32, self._rows.shape[1]), np.uint8)
        self._config = {
            "type": "KVTieringTier",
            "module_path": "tiering.engines.vllm_tier",
            "primary": {"capacity": "8MiB"},
            "secondary": [{"type": "local", "path": str(path), "capacity": CAPACITY}],
            "shutdown_deadline": "20s",
            "keep_secondary": keeps,
        }
        self._model = ModelIdentity(context.namespace.directory, "w", "bfloat16", "rows of vLLM")
        self._held: set[OffloadKey] = set()
        self._found: dict[OffloadKey, bool] = {}
        self._asking: dict[OffloadKey, Any] = {}
        self._stores: list[tuple[TransferJob, Any]] = []
        self._loads: list[_Load] = []
        self._numbers = iter(range(1, 1 << 30))
        self._failed = 0
        self._ended = False

    def open(self, deadline: float) -> bool:
        module: Any = importlib.import_module("tiering.engines.vllm_tier.tier")
        weights: Any = Weights(self._model)
        before = module._identified
        module._identified = lambda *_: Identified(self._model, weights, "", frozenset(), None)
        try:
            region: Any = SimpleNamespace(create_kv_memoryview=lambda: self._theirs.data, cleanup=lambda: None)
            primary = CPUPrimaryTierOffloadingManager(len(self._theirs), region)
            view, spec = primary.get_kv_memoryview(), spec_of(2, events=True)
            self.tier: Any = SecondaryTierFactory.create_secondary_tier(self._config, view, spec)
        finally:
            module._identified = before
        self.manager: Any = TieringOffloadingManager(primary, [self.tier])
        return self._serves(deadline)

    def _counter(self, name: str) -> float:
        return float(self.tier._thread.stats.get("tiers", {}).get("local", {}).get(name, 0))

    def _serves(self, deadline: float) -> bool:
        """Wait until the local tier is in service, by statistics that are read from now on."""
        self.tier._thread.stats = {}

        def serves() -> float:
            self.manager.on_request_finished(self._begin("waits"))
            self.on_schedule_end()
            return self._counter("available")

        return until(serves, deadline - time.monotonic())

    def _begin(self, name: str) -> Any:
        ctx = base.ReqContext(f"{name} {next(self._numbers)}")
        self.manager.on_new_request(ctx)
        return ctx

    # ----------------------------------------------------------------------------------------------------------- lookup

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        held, undecided = self.lookup_prefix((key,), req_context)
        return None if undecided else held == 1

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        for key in [] if self._ended else keys:
            if key in self._found:
                continue
            ctx = self._asking.get(key) or self._asking.setdefault(key, self._begin("asks"))
            answer = self.manager.lookup(key, ctx)
            if answer in (base.LookupResult.HIT, base.LookupResult.MISS):
                self._found[key] = answer is base.LookupResult.HIT
                self.manager.on_request_finished(self._asking.pop(key))
        if self._asking:
            return PrefixAnswer(0, True)
        found = [self._found.get(key, False) for key in keys]
        self._found.clear()
        return PrefixAnswer((*found, False).index(False), False)

    # ------------------------------------------------------------------------------------------------------------- jobs

    def submit_store(self, job: TransferJob) -> None:
        ctx = None
        if not self._ended:
            ctx = self._begin("stores")
            output = self.manager.prepare_store(list(job.keys), ctx)
            row_of = dict(zip(job.keys, list(job.block_ids), strict=True))
            chosen = list(output.keys_to_store)
            for theirs, key in zip(output.store_spec.chunk_ids, chosen, strict=True):
                self._theirs[theirs] = self._rows[row_of[key]]
            self.manager.complete_store(chosen, ctx)
            self.manager.on_request_finished(ctx)
        self._stores.append((job, ctx))

    def submit_load(self, job: TransferJob) -> None:
        left = dict(zip(job.keys, list(job.block_ids), strict=True))
        self._loads.append(_Load(job, None if self._ended else self._begin("loads"), left))

    def get_finished(self) -> Iterable[JobResult]:
        for event in [] if self._ended else self.manager.take_events():
            if event.medium is base.Medium.STORAGE:
                (self._held.difference_update if event.removed else self._held.update)(event.keys)
        for job, ctx in list(self._stores):
            stored = ctx is not None and self._held.issuperset(job.keys)
            if stored or self._ended:
                self._stores.remove((job, ctx))
                if self._keeps and not self._stores and not self._ended:
                    self._reset()
                yield JobResult(job.job_id, stored, None if stored else ())
        for load in list(self._loads):
            self._go_on(load)
            if not load.left or self._ended:
                self._loads.remove(load)
                self._failed += len(load.job.keys) - len(load.loaded)
                arrived = [key for key in load.job.keys if key in load.loaded]
                yield JobResult(load.job.job_id, len(arrived) == len(load.job.keys), arrived)

    def _go_on(self, load: _Load) -> None:
        for key in [] if self._ended else list(load.left):
            answer = self.manager.lookup(key, load.ctx)
            if answer is base.LookupResult.HIT:
                (theirs,) = self.manager.prepare_load([key], load.ctx).chunk_ids
                size = self._rows.shape[1]
                self._rows[load.left.pop(key)][:size] = self._theirs[theirs]
                self.manager.complete_load([key], load.ctx)
                load.loaded.append(key)
            elif answer is base.LookupResult.MISS:
                del load.left[key]
        if not load.left and not self._ended:
            self.manager.on_request_finished(load.ctx)

    def on_schedule_end(self) -> StepEnd:
        if not self._ended:
            self.manager.on_schedule_end(STEP)
        return StepEnd()

    def drain(self, deadline: float) -> bool:
        def ended() -> bool:
            self.on_schedule_end()
            list(self.get_finished())
            return not (self._stores or self._loads)

        until(ended, deadline - time.monotonic())
        return True

    def _reset(self) -> None:
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()  # vLLM 0.33

    def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
        self._reset()
        self._held.clear()
        return self._serves(deadline)

    def shutdown(self, deadline: float) -> bool:
        if not self._ended:
            self.manager.shutdown()
        self._ended = True
        return True

    def get_stats(self) -> TierStats:
        if not self._ended:
            self.tier._thread._stats_at = 0.0
        return replace(TierStats(), promotions_failed=self._failed, corrupt_blocks=int(self._counter("corrupt_blocks")))


class _BehindVllm(_Raw, TierTests):
    """The local tier behind vLLM's manager; a block is one row of vLLM's, whatever its group."""

    keeps = True

    @pytest.fixture(autouse=True)
    def _medium(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tiering.engines.mailbox.STATS_SECONDS", 0.0)
        self.path = tmp_path / "kv"

    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        return Managed(context, self.path, keeps=self.keeps)


class TestBlocksBehindVllm(BlocksOnly, _BehindVllm):
    """Blocks are read from the medium, because the memory above it is emptied after each store."""


class TestResetsBehindVllm(ResetsOnly, _BehindVllm):
    """vLLM's reset ends the epoch, and what was stored before."""

    keeps = False


def test_negative_control_rows_that_are_mixed_up_do_not_conform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.engines.mailbox.STATS_SECONDS", 0.0)

    class Mixed(Managed):
        def submit_store(self, job: TransferJob) -> None:
            super().submit_store(job)
            self._theirs[:] = np.roll(self._theirs, 1, axis=0)

    rig = TierRig(lambda context: Mixed(context, tmp_path / "kv", keeps=False), group_bytes=(64 << 10, 16 << 10)).open()
    keys = [key_of(number) for number in range(4)]
    rig.store(keys)
    with pytest.raises(AssertionError, match="WRONG KV"):
        rig.load(keys)
    rig.close()
