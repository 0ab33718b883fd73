"""The worker half: real copies between a KV cache and the CPU blocks, and the reports about them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tiering.api.engine import CanonicalKVCaches, EngineConfig, KVCacheGroup
from tiering.api.transfer import TransferSpec
from tiering.copy.contract import OffloadingHandler, TransferError, TransferResult
from tiering.copy.handlers import HandlerEntry
from tiering.copy.layout import RowLayout
from tiering.errors import ConfigError
from tiering.simple.cache_config import KVCacheConfig, KVCacheTensor
from tiering.simple.metadata import NOT_HELD, SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from tiering.simple.worker import SimpleCPUOffloadWorker
from tiering.testing.clock import until

BLOCKS = 8
GROUPS = (KVCacheGroup(("a", "b"), 4), KVCacheGroup(("c",), 4, 8, "sliding_window"))
ENGINE = EngineConfig((4, 4), 4, GROUPS)

Caches = dict[str, torch.Tensor]
"""KV-cache tensors by the names of their layers."""


def caches(layout: str) -> Caches:
    """Return two tensors; layer c, of the other group, shares the memory of the first one."""
    shape = (2, BLOCKS, 4, 6) if layout == "kv first" else (BLOCKS, 2, 4, 6)
    first, second = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    return {"a": first, "b": second, "c": first}


def config(kv_caches: Caches) -> KVCacheConfig:
    size = kv_caches["a"].nbytes
    return KVCacheConfig(BLOCKS, (KVCacheTensor(size, ("a", "c")), KVCacheTensor(size, ("b",))), GROUPS)


class BrokenHandler(OffloadingHandler):
    """A handler that fails every copy: at its start, or when asked for its result."""

    def __init__(self, starts: bool) -> None:
        self.starts = starts
        self._results: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if self.starts:
            self._results.append(TransferResult(job_id, False))
        return self.starts

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: object) -> None:
        return None


class BrokenWorker(SimpleCPUOffloadWorker):
    starts = True

    def make_handlers(
        self, kv_caches: CanonicalKVCaches, rows: memoryview, layout: RowLayout
    ) -> Iterator[HandlerEntry]:
        for source, destination, handler in super().make_handlers(kv_caches, rows, layout):
            handler.shutdown()
            yield source, destination, BrokenHandler(self.starts)


@pytest.fixture(params=["kv first", "blocks first"])
def kv_caches(request: pytest.FixtureRequest) -> Caches:
    return caches(request.param)


@pytest.fixture
def worker(kv_caches: Caches) -> Iterator[SimpleCPUOffloadWorker]:
    subject = SimpleCPUOffloadWorker(ENGINE, config(kv_caches), config(kv_caches).total_bytes)
    subject.register_kv_caches(kv_caches)
    yield subject
    subject.shutdown()


def store(event: int, gpu: list[int], cpu: list[int]) -> SimpleCPUOffloadMetadata:
    return SimpleCPUOffloadMetadata(store_event=event, store_gpu_blocks=gpu, store_cpu_blocks=cpu)


def load(event: int, gpu: list[int], cpu: list[int], *req_ids: str) -> SimpleCPUOffloadMetadata:
    return SimpleCPUOffloadMetadata(event, gpu, cpu, {event: list(req_ids)})


def reported(worker: SimpleCPUOffloadWorker) -> dict[int, int]:
    report = worker.build_connector_worker_meta()
    return report.finished if report is not None else {}


def finish_store(worker: SimpleCPUOffloadWorker, event: int) -> None:
    def done() -> bool:
        worker.get_finished(())
        return event in reported(worker)

    until(done)


def finish_load(worker: SimpleCPUOffloadWorker) -> set[str]:
    received: set[str] = set()

    def done() -> bool:
        received.update(worker.get_finished(())[1])
        return bool(received)

    until(done)
    return received


def test_blocks_of_all_groups_come_back_in_other_places_byte_for_byte(
    worker: SimpleCPUOffloadWorker, kv_caches: Caches
) -> None:
    blocks_at = 1 if kv_caches["a"].shape[0] == 2 else 0
    before = {name: tensor.clone() for name, tensor in kv_caches.items()}
    worker.prepare_store_kv(store(0, [3, 1, 6], [5, 0, 2]))
    finish_store(worker, 0)
    for tensor in kv_caches.values():
        tensor.zero_()
    worker.start_kv_transfers(load(0, [7, 2], [2, 5], "r"))
    assert finish_load(worker) == {"r"}
    assert worker.get_block_ids_with_load_errors() == set()
    for name, tensor in kv_caches.items():
        for gpu, origin in ((7, 6), (2, 3)):
            assert torch.equal(tensor.select(blocks_at, gpu), before[name].select(blocks_at, origin))
        assert not tensor.select(blocks_at, 1).any()


def test_bytes_that_were_copied_are_counted(worker: SimpleCPUOffloadWorker, kv_caches: Caches) -> None:
    worker.prepare_store_kv(store(0, [3, 1], [0, 1]))
    finish_store(worker, 0)
    stats = worker.get_kv_connector_stats()
    assert stats is not None
    assert stats.reduce()["gpu_to_cpu_total_bytes"] == 2 * config(kv_caches).block_bytes
    assert worker.get_kv_connector_stats() is None


def test_the_same_metadata_again_does_nothing(worker: SimpleCPUOffloadWorker) -> None:
    metadata = store(0, [3], [0])
    worker.prepare_store_kv(metadata)
    worker.prepare_store_kv(metadata)
    finish_store(worker, 0)
    assert worker.get_finished(()) == (set(), set())
    assert reported(worker) == {}


def test_a_flush_waits_for_the_stores_that_run(worker: SimpleCPUOffloadWorker) -> None:
    for event in range(5):
        worker.prepare_store_kv(store(event, [3, 1, 6], [0, 1, 2]))
    worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=True))
    worker.get_finished(())
    assert reported(worker) == dict.fromkeys(range(5), 1)


def test_a_drain_waits_for_everything_that_runs(worker: SimpleCPUOffloadWorker) -> None:
    for event in range(5):
        worker.prepare_store_kv(store(event, [3, 1, 6], [0, 1, 2]))
    worker.start_kv_transfers(load(0, [7, 2], [2, 0], "r"))
    worker.drain()
    assert worker.get_finished(())[1] == {"r"}
    assert reported(worker) == dict.fromkeys(range(5), 1)


def within_step(number: int, gpu: list[int], cpu: list[int]) -> SimpleCPUOffloadMetadata:
    return SimpleCPUOffloadMetadata(within_step=(number, gpu, cpu))


def test_what_a_step_needs_is_there_when_the_call_returns(worker: SimpleCPUOffloadWorker, kv_caches: Caches) -> None:
    blocks_at = 1 if kv_caches["a"].shape[0] == 2 else 0
    before = {name: tensor.select(blocks_at, 3).clone() for name, tensor in kv_caches.items()}
    worker.prepare_store_kv(store(0, [3, 1], [5, 0]))
    finish_store(worker, 0)
    for tensor in kv_caches.values():
        tensor.zero_()
    metadata = within_step(1, [7], [5])
    worker.start_kv_transfers(metadata)
    assert all(torch.equal(tensor.select(blocks_at, 7), before[name]) for name, tensor in kv_caches.items())
    worker.start_kv_transfers(metadata)
    assert worker.get_finished(()) == (set(), set()), "no request waits for it"
    report = worker.build_connector_worker_meta()
    assert report is not None
    assert report.finished == {1: 1}
    assert report.load_seconds[1] > 0
    other = SimpleCPUOffloadWorkerMetadata({1: 1}, load_seconds={1: 9.0})
    assert report.aggregate(other).load_seconds == {1: 9.0}
    assert report.finished == {1: 2}


@pytest.mark.parametrize("starts", [True, False])
def test_a_step_does_not_run_without_what_it_needs(starts: bool) -> None:
    kv_caches = caches("blocks first")
    worker = BrokenWorker(ENGINE, config(kv_caches), config(kv_caches).total_bytes)
    worker.starts = starts
    worker.register_kv_caches(kv_caches)

    def step() -> None:
        worker.start_kv_transfers(within_step(0, [4], [0]))
        worker.get_finished(())

    with pytest.raises(TransferError, match="step"):
        step()
    worker.shutdown()


def test_blocks_that_are_not_held_any_more_are_reported_exactly(worker: SimpleCPUOffloadWorker) -> None:
    worker.prepare_store_kv(store(0, [1], [0]))
    finish_store(worker, 0)
    worker.start_kv_transfers(load(0, [4, 5, 6], [NOT_HELD, 0, NOT_HELD], "r"))
    assert finish_load(worker) == {"r"}
    assert worker.get_block_ids_with_load_errors() == {4, 6}
    assert worker.get_block_ids_with_load_errors() == set()


def test_a_load_of_which_nothing_is_held_ends_at_once(worker: SimpleCPUOffloadWorker) -> None:
    worker.start_kv_transfers(load(0, [4], [NOT_HELD], "r"))
    assert worker.get_finished(()) == (set(), {"r"})
    assert worker.get_block_ids_with_load_errors() == {4}


@pytest.mark.parametrize("starts", [True, False])
def test_failed_copies_are_reported(starts: bool) -> None:
    kv_caches = caches("blocks first")
    worker = BrokenWorker(ENGINE, config(kv_caches), config(kv_caches).total_bytes)
    worker.starts = starts
    worker.register_kv_caches(kv_caches)
    worker.start_kv_transfers(load(0, [4, 5], [0, NOT_HELD], "r"))
    worker.prepare_store_kv(store(0, [1], [0]))
    assert worker.get_finished(()) == (set(), {"r"})
    assert worker.get_block_ids_with_load_errors() == {4, 5}
    report = worker.build_connector_worker_meta()
    assert report is not None
    assert (report.finished, report.failed) == ({0: 1}, {0})
    worker.shutdown()


def test_reports_of_several_workers_add_up() -> None:
    one, other = SimpleCPUOffloadWorkerMetadata({1: 1, 2: 1}), SimpleCPUOffloadWorkerMetadata({2: 1, 3: 1}, {3})
    assert one.aggregate(other) == SimpleCPUOffloadWorkerMetadata({1: 1, 2: 2, 3: 1}, {3})


def test_the_cpu_memory_is_no_larger_than_its_blocks(worker: SimpleCPUOffloadWorker, kv_caches: Caches) -> None:
    assert worker._region is not None
    assert worker._region.row_bytes == config(kv_caches).total_bytes


def test_caches_larger_than_the_configuration_says_are_refused(kv_caches: Caches) -> None:
    small = KVCacheConfig(BLOCKS, (KVCacheTensor(kv_caches["a"].nbytes, ("a", "b", "c")),), GROUPS)
    with pytest.raises(ConfigError, match="the engine's configuration says"):
        SimpleCPUOffloadWorker(ENGINE, small, 10_000).register_kv_caches(kv_caches)


def test_caches_are_registered_once(worker: SimpleCPUOffloadWorker, kv_caches: Caches) -> None:
    with pytest.raises(ConfigError, match="already"):
        worker.register_kv_caches(kv_caches)
