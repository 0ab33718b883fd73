"""The worker half: the starts of transfers, the waits for them, and the reports of their ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tiering.api.engine import CanonicalKVCaches, EngineConfig, KVCacheGroup, OffloadingSpec
from tiering.api.manager import OffloadingManager
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, TransferSpec
from tiering.connector.metadata import (
    NOTHING_TO_DO,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferOrder,
)
from tiering.connector.worker import OffloadingConnectorWorker
from tiering.copy.contract import OffloadingHandler, TransferError, TransferResult
from tiering.copy.handlers import make_handlers
from tiering.copy.layout import RowLayout
from tiering.errors import ConfigError

BLOCKS = 8


@dataclass
class FakeHandler(OffloadingHandler):
    """A handler that logs its calls; transfers end when the test says so or when a caller waits."""

    log: list[str]
    refuse: set[int] = field(default_factory=set)
    fail: set[int] = field(default_factory=set)
    running: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    submissions: list[list[int]] = field(default_factory=list)

    __hash__ = object.__hash__

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if job_id in self.refuse:
            return False
        self.log.append(f"start {job_id}")
        self.running.append(job_id)
        return True

    def transfer_all_async(self, jobs: Sequence[tuple[int, TransferSpec]]) -> list[int]:
        self.submissions.append([job_id for job_id, _ in jobs])
        return super().transfer_all_async(jobs)

    def end(self, *job_ids: int) -> None:
        for job_id in job_ids:
            self.running.remove(job_id)
            self.ended.append(job_id)

    def get_finished(self) -> list[TransferResult]:
        ended, self.ended = self.ended, []
        return [
            TransferResult(job_id, False)
            if job_id in self.fail
            else TransferResult(job_id, True, 100, 0.5, ("cpu", "gpu"))
            for job_id in ended
        ]

    def wait(self, job_ids: Collection[int]) -> None:
        for job_id in sorted(set(job_ids) & set(self.running)):
            self.log.append(f"wait {job_id}")
            self.end(job_id)

    def order_before_compute(self, job_ids: Collection[int]) -> None:
        self.log.append(f"compute after {sorted(job_ids)}")

    def shutdown(self) -> None:
        self.wait(list(self.running))
        self.log.append("shutdown")


class EndsAtTheSecondLook(FakeHandler):
    """A handler whose transfers have ended when somebody looks for the second time."""

    def get_finished(self) -> list[TransferResult]:
        results = super().get_finished()
        self.end(*self.running)
        return results


class Spec(OffloadingSpec):
    """A spec with one handler for both directions: a given one, or real host copies over ``rows``."""

    def __init__(self, handler: OffloadingHandler | None = None, groups: int = 1) -> None:
        names = [KVCacheGroup((f"l{group}",), 4) for group in range(groups)]
        super().__init__(EngineConfig((4,) * groups, 4, tuple(names)))
        self.handler = handler
        self.rows = np.zeros((16, 4096), np.uint8)
        self.canonical: CanonicalKVCaches | None = None

    def get_manager(self) -> OffloadingManager:
        raise AssertionError

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], Any]]:
        self.canonical = kv_caches
        if self.handler is None:
            yield from make_handlers(kv_caches, self.rows.data, RowLayout.of(kv_caches))
        else:
            yield GPULoadStoreSpec, CPULoadStoreSpec, self.handler
            yield CPULoadStoreSpec, GPULoadStoreSpec, self.handler


def store(job_id: int, *blocks: int) -> TransferOrder:
    gpu = GPULoadStoreSpec(blocks or [job_id], [len(blocks) or 1], [0])
    return TransferOrder(job_id, (gpu, CPULoadStoreSpec(gpu.block_ids)))


def load(job_id: int, *blocks: int) -> TransferOrder:
    return TransferOrder(job_id, store(job_id, *blocks).spec[::-1])


def meta(**parts: Any) -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata(**parts)


@pytest.fixture
def handler() -> FakeHandler:
    return FakeHandler([])


@pytest.fixture
def worker(handler: FakeHandler) -> OffloadingConnectorWorker:
    worker = OffloadingConnectorWorker(Spec(handler))
    worker.register_kv_caches({"l0": torch.zeros(BLOCKS, 16)})
    return worker


@dataclass
class Report:
    received: set[str]
    unfilled: set[int]
    meta: OffloadingWorkerMetadata | None
    stats: Any


def step(worker: OffloadingConnectorWorker, metadata: OffloadingConnectorMetadata | None = None) -> Report:
    """Run one engine step: the worker's calls in the engine's order."""
    metadata = metadata or meta()
    worker.handle_preemptions(metadata)
    worker.start_kv_transfers(metadata)
    worker.prepare_store_kv(metadata)
    return reports(worker)


def reports(worker: OffloadingConnectorWorker) -> Report:
    sent, received = worker.get_finished(set())
    assert sent == set()
    unfilled = worker.get_block_ids_with_load_errors()
    stats = worker.get_kv_connector_stats()
    return Report(received, unfilled, worker.build_connector_worker_meta(), stats)


# ---------------------------------------------------------------------------------------------------- when things start


def test_a_step_s_stores_start_with_the_next_step_before_its_loads(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, meta(reqs_to_store={"a": store(1)}, reqs_to_load={"b": load(2)}))
    assert handler.log == ["start 2"]
    step(worker, meta(reqs_to_load={"c": load(3)}))
    assert handler.log == ["start 2", "start 1", "start 3"]


def test_a_step_with_patience_waits_for_a_load_and_no_longer(handler: FakeHandler) -> None:
    patient = OffloadingConnectorWorker(Spec(EndsAtTheSecondLook(handler.log)))
    patient.register_kv_caches({"l0": torch.zeros(BLOCKS, 16)})
    patient.start_kv_transfers(meta(reqs_to_load={"a": load(1)}))
    assert patient.get_finished(set(), patience=float("inf")) == (set(), {"a"})
    patient.start_kv_transfers(meta(reqs_to_load={"b": load(2)}))
    assert patient.get_finished(set()) == (set(), set())


def test_no_step_waits_for_a_store(worker: OffloadingConnectorWorker, handler: FakeHandler) -> None:
    step(worker, meta(reqs_to_store={"a": store(1)}))
    step(worker)
    assert handler.running == [1]
    assert worker.get_finished(set(), patience=float("inf")) == (set(), set())


def test_deferred_stores_start_in_steps_without_work(worker: OffloadingConnectorWorker, handler: FakeHandler) -> None:
    step(worker, meta(reqs_to_store={"a": store(1)}))
    step(worker)
    assert handler.log == ["start 1"]


def test_steps_that_share_one_message_without_orders_start_each_deferred_store_once(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, NOTHING_TO_DO)
    step(worker, meta(reqs_to_store={"a": store(1)}))
    step(worker, NOTHING_TO_DO)
    assert handler.log == ["start 1"]
    step(worker, NOTHING_TO_DO)
    step(worker, meta(reqs_to_store={"a": store(2)}, reqs_to_load={"b": load(3)}))
    step(worker, NOTHING_TO_DO)
    assert handler.log == ["start 1", "start 3", "start 2"]
    assert meta() == NOTHING_TO_DO


def test_stores_too_large_to_make_at_once_start_with_the_next_step(handler: FakeHandler) -> None:
    handler.transfer_at_once = lambda jobs: [2]  # type: ignore[method-assign]
    worker = OffloadingConnectorWorker(Spec(handler))
    worker.register_kv_caches({"l0": torch.zeros(BLOCKS, 16)})
    step(worker, meta(reqs_to_store={"a": store(1), "b": store(2)}, states_to_store={"c": store(3)}))
    assert handler.log == []
    handler.ended.append(1)
    report = step(worker, meta(jobs_to_flush=frozenset({1, 2})))
    assert handler.log == ["start 2", "start 3", "wait 2"]
    assert report.meta == OffloadingWorkerMetadata({1: 1, 2: 1}, set())
    worker.shutdown()


def test_a_flush_starts_what_is_deferred_and_waits_for_the_named_jobs_only(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, meta(reqs_to_store={"a": store(1), "b": store(2)}, reqs_to_load={"c": load(3)}))
    worker.handle_preemptions(meta(jobs_to_flush=frozenset({2, 3})))
    assert handler.log == ["start 3", "start 1", "start 2", "wait 2", "wait 3"]
    assert handler.running == [1]


def test_stores_start_before_the_next_forward_pass_and_nothing_is_waited_for(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, meta(reqs_to_store={"a": store(1)}))
    assert handler.log == []
    worker.handle_preemptions(meta())
    assert handler.log == ["start 1"]


def test_stores_start_with_the_loads_if_the_engine_has_no_preemptions(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, meta(reqs_to_store={"a": store(1)}))
    worker.start_kv_transfers(meta(reqs_to_load={"b": load(2)}))
    assert handler.log == ["start 1", "start 2"]


def test_a_step_s_stores_are_one_submission_and_its_loads_another(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    stores = {f"r{job}": store(job) for job in range(16)}
    loads = {f"r{job}": load(job) for job in range(16, 20)}
    step(worker, meta(reqs_to_store=stores))
    step(worker, meta(reqs_to_load=loads))
    assert handler.submissions == [list(range(16)), list(range(16, 20))]


def test_a_drain_starts_what_is_deferred_and_ends_everything(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, meta(reqs_to_store={"a": store(1)}, reqs_to_load={"b": load(2)}))
    worker.drain()
    assert handler.log == ["start 2", "start 1", "wait 1", "wait 2"]
    assert handler.running == []


def test_an_engine_that_writes_to_new_blocks_early_computes_after_the_step_s_stores(handler: FakeHandler) -> None:
    worker = OffloadingConnectorWorker(Spec(handler), writes_early=True)
    worker.register_kv_caches({"l0": torch.zeros(BLOCKS, 16)})
    step(worker, meta(reqs_to_store={"a": store(1), "b": store(2)}, reqs_to_load={"c": load(3)}))
    assert handler.log == ["start 3", "start 1", "start 2", "compute after [1, 2]"]
    step(worker)
    assert len(handler.log) == 4


def test_copies_that_no_device_can_order_are_waited_for() -> None:
    rows = Spec()
    worker = OffloadingConnectorWorker(rows, writes_early=True)
    cache = torch.arange(BLOCKS * 16, dtype=torch.uint8).reshape(BLOCKS, 16)
    worker.register_kv_caches({"l0": cache})
    step(worker, meta(reqs_to_store={"a": store(1, 5)}))
    cache.zero_()
    assert rows.rows[5, :16].tolist() == list(range(80, 96))


def test_jobs_that_ended_before_the_flush_are_no_trouble(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, meta(reqs_to_load={"a": load(1)}))
    handler.end(1)
    report = step(worker, meta(jobs_to_flush=frozenset({1, 77})))
    assert report.received == {"a"}


def test_the_same_metadata_twice_orders_nothing_twice(worker: OffloadingConnectorWorker, handler: FakeHandler) -> None:
    metadata = meta(reqs_to_store={"a": store(1)}, reqs_to_load={"b": load(2)})
    step(worker, metadata)
    handler.end(2)
    worker.start_kv_transfers(metadata)
    worker.prepare_store_kv(metadata)
    step(worker)
    assert sorted(handler.log) == ["start 1", "start 2"]


def test_a_job_ordered_twice_runs_once(worker: OffloadingConnectorWorker, handler: FakeHandler) -> None:
    step(worker, meta(reqs_to_load={"a": load(1)}))
    step(worker, meta(reqs_to_load={"a": load(1)}))
    handler.end(1)
    assert step(worker).received == {"a"}
    assert handler.log == ["start 1"]


def test_what_a_step_needs_is_in_front_of_its_computation_and_of_its_other_loads(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, meta(reqs_to_store={"a": store(1)}))
    step(worker, meta(reqs_to_load={"c": load(3)}, loads_within_step={"b": load(2)}))
    assert handler.log == ["start 1", "start 2", "compute after [2]", "start 3"]


# -------------------------------------------------------------------------------------------------------------- reports


def test_a_load_within_the_step_is_reported_and_is_no_reception(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    metadata = meta(loads_within_step={"a": load(1)})
    assert step(worker, metadata) == Report(set(), set(), None, None)
    worker.start_kv_transfers(metadata)
    handler.end(1)
    report = step(worker)
    assert (report.received, report.unfilled) == (set(), set())
    assert report.meta == OffloadingWorkerMetadata({1: 1}, load_seconds={1: 0.5})
    assert handler.log == ["start 1", "compute after [1]"]


def test_a_step_without_what_it_needs_does_not_run(worker: OffloadingConnectorWorker, handler: FakeHandler) -> None:
    handler.refuse = {2}
    with pytest.raises(TransferError, match=r"copy jobs \[2\]"):
        worker.start_kv_transfers(meta(loads_within_step={"a": load(1), "b": load(2)}))
    other = TransferOrder(3, (GPULoadStoreSpec([1], [1], [0]), GPULoadStoreSpec([2], [1], [0])))
    with pytest.raises(TransferError, match="no copies"):
        worker.start_kv_transfers(meta(loads_within_step={"c": other}))


def test_what_a_step_has_computed_without_its_load_is_never_an_answer(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    handler.fail = {1}
    worker.start_kv_transfers(meta(loads_within_step={"a": load(1)}))
    handler.end(1)
    with pytest.raises(TransferError, match="copy job 1 failed"):
        worker.get_finished(set())


def test_a_load_that_ends_is_received_once_and_reported_to_the_scheduler(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    assert step(worker, meta(reqs_to_load={"a": load(1)})) == Report(set(), set(), None, None)
    handler.end(1)
    report = step(worker)
    assert report.received == {"a"}
    assert report.unfilled == set()
    assert report.meta == OffloadingWorkerMetadata({1: 1}, set(), load_seconds={1: 0.5})
    assert step(worker) == Report(set(), set(), None, None)


def test_a_store_that_ends_is_reported_and_is_no_reception(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, meta(reqs_to_store={"a": store(1)}))
    step(worker)
    handler.end(1)
    report = step(worker)
    assert report.received == set()
    assert report.meta == OffloadingWorkerMetadata({1: 1}, set())


def test_several_loads_of_a_request_are_received_together(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, meta(reqs_to_load={"a": load(1)}))
    step(worker, meta(reqs_to_load={"a": load(2)}))
    handler.end(2)
    assert step(worker).received == set()
    handler.end(1)
    assert step(worker).received == {"a"}


def test_transfers_are_counted_once(worker: OffloadingConnectorWorker, handler: FakeHandler) -> None:
    step(worker, meta(reqs_to_load={"a": load(1), "b": load(2)}))
    handler.end(1, 2)
    assert step(worker).stats.data == {"cpu_to_gpu": [{"op_size": 100, "op_time": 0.5}] * 2}
    assert step(worker).stats is None


# ------------------------------------------------------------------------------------------------------------- failures


def test_a_failed_load_names_exactly_its_blocks_and_is_received(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    handler.fail = {1}
    step(worker, meta(reqs_to_load={"a": load(1, 3, 4), "b": load(2, 5)}))
    handler.end(1, 2)
    report = step(worker)
    assert report.unfilled == {3, 4}
    assert report.received == {"a", "b"}
    assert report.meta == OffloadingWorkerMetadata({1: 1, 2: 1}, {1}, load_seconds={2: 0.5})
    assert report.stats.reduce()["cpu_to_gpu_total_bytes"] == 100


def test_a_load_that_cannot_start_has_failed(worker: OffloadingConnectorWorker, handler: FakeHandler) -> None:
    handler.refuse = {1}
    report = step(worker, meta(reqs_to_load={"a": load(1, 6, 7)}))
    assert report.unfilled == {6, 7}
    assert report.received == {"a"}
    assert report.meta == OffloadingWorkerMetadata({1: 1}, {1})
    assert step(worker) == Report(set(), set(), None, None)


def test_a_store_that_fails_or_cannot_start_is_reported_without_blocks(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    handler.refuse, handler.fail = {1}, {2}
    step(worker, meta(reqs_to_store={"a": store(1), "b": store(2)}))
    assert step(worker).meta == OffloadingWorkerMetadata({1: 1}, {1})
    handler.end(2)
    report = step(worker)
    assert report.meta == OffloadingWorkerMetadata({2: 1}, {2})
    assert report.unfilled == set()
    assert report.received == set()


def test_a_hit_that_is_gone_is_reported_in_the_same_step(worker: OffloadingConnectorWorker) -> None:
    report = step(worker, meta(failed_loads={"a": [2, 3]}))
    assert report.received == {"a"}
    assert report.unfilled == {2, 3}
    assert report.meta is None


def test_a_hit_that_has_shrunk_is_reported_with_the_rest_of_it(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    report = step(worker, meta(reqs_to_load={"a": load(1, 2)}, failed_loads={"a": [3]}))
    assert (report.received, report.unfilled) == (set(), set())
    handler.end(1)
    report = step(worker)
    assert (report.received, report.unfilled) == ({"a"}, {3})


def test_a_shrunk_hit_whose_rest_cannot_be_loaded_is_unfilled_altogether(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    handler.refuse = {1}
    report = step(worker, meta(reqs_to_load={"a": load(1, 2)}, failed_loads={"a": [3]}))
    assert (report.received, report.unfilled) == ({"a"}, {2, 3})


def test_results_of_unknown_jobs_are_logged_and_ignored(
    worker: OffloadingConnectorWorker, handler: FakeHandler, caplog: pytest.LogCaptureFixture
) -> None:
    step(worker, meta(reqs_to_load={"a": load(1)}))
    handler.ended = [55]
    assert step(worker) == Report(set(), set(), None, None)
    assert "did not order" in caplog.text


def test_copies_are_asked_for_results_only_while_some_are_in_flight(
    worker: OffloadingConnectorWorker, handler: FakeHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    collect = worker.copies.get_finished

    def asking() -> list[TransferResult]:
        asked.append(1)
        return collect()

    monkeypatch.setattr(worker.copies, "get_finished", asking)
    step(worker)
    assert not asked
    step(worker, meta(reqs_to_load={"a": load(1)}))
    handler.end(1)
    step(worker)
    assert asked == [1, 1]
    step(worker)
    assert asked == [1, 1]


# ------------------------------------------------------------------------------------------------- registration and end


def test_the_number_of_blocks_an_engine_says_is_used(handler: FakeHandler) -> None:
    spec = Spec(handler)
    OffloadingConnectorWorker(spec, num_blocks=4).register_kv_caches({"l0": torch.zeros(8, 16)})
    assert spec.canonical is not None
    assert spec.canonical.tensors[0].tensor.shape == (4, 128)


def test_a_kv_cache_over_all_layers_can_be_registered(handler: FakeHandler) -> None:
    spec = Spec(handler)
    OffloadingConnectorWorker(spec).register_cross_layers_kv_cache(torch.zeros(BLOCKS, 3, 16), object)
    assert spec.canonical is not None
    assert spec.canonical.group_data_refs[0][0].page_size_bytes == 3 * 16 * 4


def test_registering_twice_is_refused(worker: OffloadingConnectorWorker) -> None:
    with pytest.raises(ConfigError, match="already"):
        worker.register_kv_caches({"l0": torch.zeros(BLOCKS, 16)})


def test_shutdown_waits_for_what_runs_and_starts_nothing(
    worker: OffloadingConnectorWorker, handler: FakeHandler
) -> None:
    step(worker, meta(reqs_to_load={"a": load(1)}, reqs_to_store={"b": store(2)}))
    worker.shutdown()
    worker.shutdown()
    assert handler.log == ["start 1", "wait 1", "shutdown", "shutdown"]


def test_before_registration_every_transfer_fails_cleanly(handler: FakeHandler) -> None:
    worker = OffloadingConnectorWorker(Spec(handler))
    report = step(worker, meta(reqs_to_load={"a": load(1, 5)}))
    assert (report.received, report.unfilled) == ({"a"}, {5})


@pytest.mark.parametrize("shape", [(BLOCKS, 4, 8), (2, BLOCKS, 4, 4)])
def test_bytes_survive_the_way_to_the_rows_and_back(shape: tuple[int, ...]) -> None:
    cache = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    blocks = shape.index(BLOCKS)
    worker = OffloadingConnectorWorker(Spec())
    worker.register_kv_caches({"l0": cache})
    expected = cache.select(blocks, 2).clone()
    row = CPULoadStoreSpec([5])
    report = step(worker, meta(reqs_to_store={"a": TransferOrder(1, (GPULoadStoreSpec([2], [1], [0]), row))}))
    assert report.meta == OffloadingWorkerMetadata({1: 1}, set()), "a small store ends with its step"
    cache.zero_()
    step(worker, meta(reqs_to_load={"a": TransferOrder(2, (row, GPULoadStoreSpec([6], [1], [0])))}))
    assert step(worker, meta(jobs_to_flush=frozenset({2}))).received <= {"a"}
    worker.shutdown()
    assert torch.equal(cache.select(blocks, 6), expected)
