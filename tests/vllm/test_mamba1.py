"""Mamba 1 (Jamba) and short convolutions (LFM 2): byte for byte through vLLM's own block tables.

No CPU kernel computes the former. Of the latter, vLLM's CPU build answers a prompt otherwise beside other prompts or in
chunks, also without connector and cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    get_kv_cache_spec_kind,
)

from tests.connector.fakes import FakeBlocks, FakeConnectorOutput, FakeSchedulerOutput
from tests.connector.test_handed_states import output
from tests.vllm.test_block_tables import configuration, make_request
from tiering.api.namespace import ModelIdentity
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.worker import OffloadingConnectorWorker
from tiering.engines.vllm.geometry import read_geometry
from tiering.spec import TieringOffloadingSpec
from tiering.testing.clock import until

BLOCK, BLOCKS, TOKENS = 64, 40, 200
HELD = TOKENS // BLOCK * BLOCK
KINDS = {
    MambaAttentionBackendEnum.MAMBA1: MambaStateShapeCalculator.mamba1_state_shape(1, 256, 16, 4),
    MambaAttentionBackendEnum.SHORT_CONV: MambaStateShapeCalculator.short_conv_state_shape(1, 128, 3),
}
"""Shapes of a state by its kind."""
ATTENTION = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
PAGE = ATTENTION.page_size_bytes


class Machine:
    """One engine: vLLM's cache manager, both halves of the connector, and the memory of one worker."""

    def __init__(self, kind: MambaAttentionBackendEnum) -> None:
        config, _ = configuration([])
        shapes = KINDS[kind]
        state = MambaSpec(
            block_size=BLOCK,
            shapes=shapes,
            dtypes=(torch.float32,) * len(shapes),
            page_size_padded=PAGE,
            mamba_type=kind,
            mamba_cache_mode="align",
        )
        groups = [KVCacheGroupSpec(["a"], ATTENTION), KVCacheGroupSpec(["m"], state)]
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        config.speculative_config, config.num_prefill_lookahead_tokens = None, 0
        geometry = read_geometry(config, cache, lambda spec: get_kv_cache_spec_kind(spec).value, BLOCK)
        engine = geometry.engine.__class__(
            block_sizes=(BLOCK, BLOCK), hash_block_size=BLOCK, groups=geometry.engine.groups
        )
        model = ModelIdentity(name="jamba", weights="0", dtype="float32", layout="one layer of each kind")
        self.spec = TieringOffloadingSpec(
            engine, {"primary": {"capacity": "8MiB"}}, model=model, group_bytes=geometry.group_bytes
        )
        self.scheduler = OffloadingConnectorScheduler(self.spec)
        self.worker = OffloadingConnectorWorker(self.spec, BLOCKS)
        self.attention = torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)
        self.pages = torch.zeros(BLOCKS, PAGE // 4)
        self.states: list[torch.Tensor] = []
        self.content = 0
        """Numbers of a page that have content."""
        for shape in shapes:
            first, self.content = self.content, self.content + math.prod(shape)
            self.states.append(self.pages[:, first : self.content].view(BLOCKS, *shape))
        self.worker.register_kv_caches({"a": self.attention, "m": self.states})
        self.own = KVCacheManager(cache, 4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK)

    def step(self, schedule: FakeSchedulerOutput, compute: Any = lambda: None) -> OffloadingConnectorMetadata:
        """Run one step of both halves, with ``compute`` as the forward pass; return the scheduler's message."""
        metadata = self.scheduler.build_connector_meta(schedule)
        self.worker.handle_preemptions(metadata)
        self.worker.start_kv_transfers(metadata)
        compute()
        self.worker.prepare_store_kv(metadata)
        _, received = self.worker.get_finished(set())
        report = self.worker.build_connector_worker_meta()
        invalid = self.worker.get_block_ids_with_load_errors()
        self.scheduler.update_connector_output(FakeConnectorOutput(None, received, invalid, report))
        return metadata

    def prefill(self, request: Any) -> None:
        """Compute a prompt block by block: attention by position, the state by the number of tokens before it."""
        while request.num_computed_tokens < TOKENS:
            self.own.new_step_starts()
            start, tokens = request.num_computed_tokens, min(BLOCK, TOKENS - request.num_computed_tokens)
            new = self.own.allocate_slots(request, tokens)
            assert new is not None
            schedule = output(self.own.take_boundary_state_offloads())
            if start:
                schedule.cached(request, tokens, *new.get_block_ids())
            else:
                schedule.new(request, tokens, *self.own.get_block_ids(request.request_id))

            def compute(place: int = start // BLOCK, end: int = start + tokens) -> None:
                attention, states = self.own.get_block_ids(request.request_id)
                self.attention[attention[place]] = place + 1
                for part, tensor in enumerate(self.states):
                    tensor[states[place]] = end + 1000 * part

            self.step(schedule, compute)
            request.num_computed_tokens += tokens

    def settle(self) -> None:
        """Step until no copy is in flight."""

        def settled() -> bool:
            self.step(FakeSchedulerOutput())
            return not self.scheduler.has_pending_work()

        until(settled)


def values(tensor: torch.Tensor) -> list[float]:
    """Return the distinct numbers of ``tensor``."""
    return sorted(set(tensor.flatten().tolist()))


@pytest.fixture(params=list(KINDS), ids=lambda kind: str(kind.name))
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    machine = Machine(request.param)
    yield machine
    machine.worker.shutdown()
    machine.scheduler.shutdown()
    machine.spec.close()


@pytest.mark.parametrize("late", [False, True], ids=["handed over", "negative control: a step late"])
def test_all_parts_of_a_state_come_back_as_they_were_at_the_end_of_the_hit(
    machine: Machine, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, held = machine.own.take_boundary_state_offloads, dict[str, list[tuple[int, int, int]]]()

    def take_late() -> dict[str, list[tuple[int, int, int]]]:
        """Return the states of the step before, each with the block that the request's last state is in now."""
        due = {
            name: [(group, machine.own.get_block_ids(name)[group][-1], tokens) for group, _, tokens in handed]
            for name, handed in held.items()
        }
        held.clear()
        held.update(take())
        return due

    if late:
        monkeypatch.setattr(machine.own, "take_boundary_state_offloads", take_late)
    request = make_request("first", list(range(TOKENS)), BLOCK)
    machine.scheduler.on_new_request(request)
    machine.prefill(request)
    machine.scheduler.request_finished_all_groups(request, [])
    machine.settle()
    machine.own.free(request)
    assert machine.own.reset_prefix_cache()
    machine.attention.zero_()
    machine.pages.zero_()
    again = make_request("again", list(range(TOKENS)), BLOCK)
    assert machine.scheduler.get_num_new_matched_tokens(again, 0) == (HELD, True)
    assert machine.own.allocate_slots(again, 0, num_external_computed_tokens=HELD, delay_cache_blocks=True) is not None
    attention, states = machine.own.get_block_ids("again")
    machine.scheduler.update_state_after_alloc(again, FakeBlocks((attention, states)), HELD)
    machine.settle()
    assert [values(machine.attention[block]) for block in attention[: HELD // BLOCK]] == [[1], [2], [3]]
    (filled,) = (block for block in states if block)
    end = TOKENS if late else HELD
    assert [values(tensor[filled]) for tensor in machine.states] == [
        [end + 1000 * part] for part in range(len(machine.states))
    ]
    assert not machine.pages[:, machine.content :].any(), "no padding is written"
