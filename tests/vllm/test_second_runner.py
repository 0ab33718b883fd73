"""vLLM's second model runner without a GPU: its connector driver over our worker half and CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.worker.gpu import kv_connector as second_runner

from tiering.api.engine import CanonicalKVCaches, EngineConfig, KVCacheGroup, OffloadingSpec
from tiering.api.manager import OffloadingManager
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata, TransferOrder
from tiering.connector.worker import OffloadingConnectorWorker
from tiering.copy.handlers import HandlerEntry, make_handlers
from tiering.copy.layout import RowLayout
from tiering.engines.vllm.connector import TieringConnector
from tiering.engines.vllm.loads import LoadLedger

if not hasattr(second_runner.ActiveKVConnector, "finish_forward"):
    pytest.skip("vLLM's second model runner drives connectors in another way before 0.30", allow_module_level=True)

BLOCKS, PAGE = 8, 4096


class Spec(OffloadingSpec):
    """A spec with host copies to rows of its own."""

    def __init__(self) -> None:
        super().__init__(EngineConfig((16,), 16, (KVCacheGroup(("layer",), 16),)))
        self.rows = np.zeros((BLOCKS, PAGE), np.uint8)

    def get_manager(self) -> OffloadingManager:
        raise AssertionError

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        yield from make_handlers(kv_caches, self.rows.data, RowLayout.of(kv_caches), 1)


class Runner:
    """The parts of a step that concern the KV cache, in the second runner's order.

    The order is that of its ``execute_model`` and ``sample_tokens``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, writes_early: bool) -> None:
        self.spec = Spec()
        self.cache = torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)
        connector: Any = TieringConnector.__new__(TieringConnector)
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace())
        KVConnectorBase_V1.__init__(connector, config, KVConnectorRole.WORKER, SimpleNamespace())
        connector._several_groups, connector._may_rest, connector._ledger = False, False, LoadLedger()
        connector._loads_first = True
        connector.worker_half = OffloadingConnectorWorker(self.spec, BLOCKS, writes_early=writes_early)
        self.worker, self.connector = connector.worker_half, connector
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        monkeypatch.setattr(second_runner, "is_forward_context_available", lambda: True)
        monkeypatch.setattr(second_runner, "get_forward_context", lambda: None)
        self.driver = second_runner.ActiveKVConnector(config, {"layer": self.cache})

    def step(
        self,
        metadata: OffloadingConnectorMetadata,
        zeroed: int | None = None,
        computed: dict[int, int] | None = None,
        drafted: dict[int, int] | None = None,
    ) -> Any:
        """Run one step.

        Args:
            zeroed: a block that this step allocates anew, and therefore zeroes.
            computed: block → value that the forward pass writes.
            drafted: block → value that a draft model writes. From vLLM 0.33 on the draft model runs between the step's
                report and the step's end.
        """
        if zeroed is not None:
            self.cache[zeroed] = 0
        self.driver.pre_forward(SimpleNamespace(kv_connector_metadata=metadata, has_sync_kv_loads=False))
        for block, value in (computed or {}).items():
            self.cache[block] = value
        self.driver.finish_forward()
        if drafted is None:
            return self.driver.post_forward(set())
        if not hasattr(self.driver, "finalize_step"):  # vLLM before 0.33; its connector is called in the order of 0.33
            connector: Any = self.connector
            results = connector.get_transfer_results(set())
            output = SimpleNamespace(
                finished_recving=results.finished_recving,
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
        else:
            output = self.driver.post_forward(set(), defer_finalize=True)
        for block, value in drafted.items():
            self.cache[block] = value
        if hasattr(self.driver, "finalize_step"):
            self.driver.finalize_step()
        else:
            connector.wait_for_save()
            connector.clear_connector_metadata()
        return output


@pytest.fixture(params=[True, False], ids=["writes early", "does not say so"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    runner = Runner(monkeypatch, request.param)
    yield runner
    runner.worker.shutdown()


def orders(gpu_block: int, row: int, job_id: int) -> dict[str, TransferOrder]:
    return {"a": TransferOrder(job_id, (GPULoadStoreSpec([gpu_block], [1], [0]), CPULoadStoreSpec([row])))}


@pytest.mark.parametrize("orders_of", ["reqs_to_store", "states_to_store"])
def test_a_block_that_is_zeroed_for_its_next_user_was_stored_before(
    runner: Runner, request: pytest.FixtureRequest, orders_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the negative control: a worker that does not know of early writes stores the zeros.

    The stores are queued, as all are on a GPU.
    """
    monkeypatch.setattr(runner.worker.copies, "transfer_at_once", lambda jobs: {job_id for job_id, _ in jobs})
    metadata = OffloadingConnectorMetadata()
    setattr(metadata, orders_of, orders(3, 5, 1))
    runner.step(metadata, computed={3: 77})
    runner.step(OffloadingConnectorMetadata(jobs_to_flush=frozenset({1})), zeroed=3, computed={3: 99})
    expected = 77 if "writes early" in request.node.name else 0
    assert set(runner.spec.rows[5].tolist()) == {expected}


def test_what_a_step_orders_is_reported_by_a_later_one(runner: Runner) -> None:
    runner.spec.rows[2] = 55
    store, load = orders(3, 5, 1), orders(4, 2, 2)
    load["a"] = TransferOrder(2, load["a"].spec[::-1])
    outputs = [runner.step(OffloadingConnectorMetadata(reqs_to_store=store, reqs_to_load=load), computed={3: 77})]
    outputs += [runner.step(OffloadingConnectorMetadata(jobs_to_flush=frozenset({1, 2}))) for _ in range(2)]
    finished: dict[int, int] = {}
    for output in outputs:
        finished.update(output.kv_connector_worker_meta.finished if output.kv_connector_worker_meta else {})
    assert finished == {1: 1, 2: 1}
    assert [output.finished_recving for output in outputs if output.finished_recving] == [{"a"}]
    assert set(runner.cache[4].tolist()) == {55}
    assert set(runner.spec.rows[5].tolist()) == {77}


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_load_starts_before_the_model_unless_another_connector_may_read_its_blocks(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    load = orders(4, 2, 2)
    load["a"] = TransferOrder(2, load["a"].spec[::-1])
    if not is_alone:  # MultiConnector
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
    runner.connector.handle_preemptions(OffloadingConnectorMetadata(reqs_to_load=load))
    assert (2 in runner.worker._jobs) is is_alone


def test_what_a_draft_model_computes_after_the_step_has_reported_is_stored_too(runner: Runner) -> None:
    outputs = [
        runner.step(OffloadingConnectorMetadata(reqs_to_store=orders(3, 5, 1)), computed={3: 1}, drafted={3: 77})
    ]
    outputs += [runner.step(OffloadingConnectorMetadata(jobs_to_flush=frozenset({1}))) for _ in range(2)]
    finished = [output.kv_connector_worker_meta.finished for output in outputs if output.kv_connector_worker_meta]
    assert finished == [{1: 1}]
    assert set(runner.spec.rows[5].tolist()) == {77}


def test_what_was_queued_is_stored_before_the_engine_sleeps(runner: Runner) -> None:
    runner.step(OffloadingConnectorMetadata(reqs_to_store=orders(3, 5, 1)), computed={3: 77})
    runner.connector.unregister_kv_caches()
    runner.cache.zero_()
    runner.step(OffloadingConnectorMetadata())
    assert set(runner.spec.rows[5].tolist()) == {77}
