"""vLLM's objects as the connector sees them where the model has groups that are not offloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.fakes import FakeBlocks
from tiering.engines.vllm.kept_groups import kept_groups


def kind_of(spec: Any) -> str:
    return str(spec.kind)


def group(kind: str, layer: str, *, hashes: bool = True, transfer: bool = True) -> Any:
    spec = SimpleNamespace(kind=kind, prefix_cacheable=hashes)
    return SimpleNamespace(kv_cache_spec=spec, layer_names=[layer], enable_kv_transfer=transfer)


def configuration(*groups: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=list(groups))


RING = group("unknown", "ring", hashes=False)
FULL = group("full_attention", "full")
STATE = group("mamba", "state")


def test_a_model_whose_groups_all_have_hashes_has_no_view() -> None:
    assert kept_groups(configuration(FULL, STATE), kind_of) is None


@pytest.mark.parametrize(
    "skipped",
    [RING, group("full_attention", "replica", transfer=False), group("encoder_only_attention", "encoder")],
    ids=["ring", "not transferred", "encoder only"],
)
def test_tables_tensors_and_states_of_the_kept_groups_are_left(skipped: Any) -> None:
    kept = kept_groups(configuration(skipped, FULL, STATE), kind_of)
    assert kept is not None
    assert kept.blocks(FakeBlocks(([1], [2, 3], [4]))).get_block_ids() == ([2, 3], [4])
    tensors: dict[str, Any] = {skipped.layer_names[0]: 1, "full": 2, "state": 3}
    assert kept.caches(tensors) == {"full": 2, "state": 3}
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="r1", block_ids=([1], [2], [3]), num_computed_tokens=5)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["r2", "r3"], new_block_ids=[([6], [7], [8]), None], num_computed_tokens=[1, 2]
        ),
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads={"r1": [(2, 9, 64), (0, 1, 64)]}),
        num_scheduled_tokens={"r1": 3},
    )
    step = kept.step(output)
    (new,) = step.scheduled_new_reqs
    assert (new.req_id, new.block_ids, new.num_computed_tokens) == ("r1", [[2], [3]], 5)
    cached = step.scheduled_cached_reqs
    assert (cached.req_ids, cached.new_block_ids) == (["r2", "r3"], [[[7], [8]], None])
    assert step.kv_connector_block_state.boundary_state_offloads == {"r1": [(1, 9, 64)]}
    assert step.num_scheduled_tokens == {"r1": 3}
    assert output.scheduled_new_reqs[0].block_ids == ([1], [2], [3]), "vLLM's own object is unchanged"
