"""The namespace of blocks that come from vLLM's own rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiering.api.engine import KVCacheGroup
from tiering.api.namespace import KVLayout, ModelIdentity, Namespace
from tiering.engines.vllm_tier.identity import identify, unidentified
from tiering.engines.vllm_tier.interface import facts, groups_of
from tiering.errors import PermanentStoreError

LAYOUT = KVLayout(
    kv_dtype="bfloat16",
    layer_names=("a",),
    groups=("full",),
    gpu_block_size=(16,),
    block_size_factor=1,
    group_bytes=(4096,),
    memory_order="NHD",
    parallel_sizes=(("tensor", 1),),
    hash_algorithm="sha256",
    hash_seed="0",
    hash_block_size=16,
)
MODEL = ModelIdentity("org/model", "f" * 40, "bfloat16", LAYOUT)
GROUPS = (
    KVCacheGroup(("a",), 16),
    KVCacheGroup(("b",), 16, 64, "sliding_window"),
    KVCacheGroup(("c",), 16, kind="mamba"),
)
GEOMETRY: Any = SimpleNamespace(engine=SimpleNamespace(groups=GROUPS), replica="1")


def config(**changed: Any) -> Any:
    parallel = {"world_size": 2, "tp_size": 2, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    words = {"worker_kv_bytes_per_block": 2048, "replicated_layout": False, "canonical_layout": False}
    groups = changed.pop("groups", [SimpleNamespace(tokens_per_block=16, layer_names=("a",), group_id=0)])
    return SimpleNamespace(
        groups=groups,
        parallel=SimpleNamespace(**{word: changed.pop(word, value) for word, value in parallel.items()}),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=changed.pop("blocks_per_chunk", 1)),
        **{**words, **changed},
    )


def directory(described: list[str]) -> str:
    found = identify(SimpleNamespace(lora_config=None), None, GEOMETRY, MODEL, "; ".join(described))
    return Namespace.build(found.model, (4096,)).directory


def test_whatever_changes_a_row_changes_the_namespace_and_equal_engines_share_one() -> None:
    known = directory([*facts(config(), 4096)])
    assert directory([*facts(config(), 4096)]) == known
    others = [
        facts(config(), 8192),
        facts(config(tp_size=1, world_size=1), 4096),
        facts(config(replicated_layout=True), 4096),
        facts(config(canonical_layout=True), 4096),
        facts(config(blocks_per_chunk=2), 4096),
        facts(config(groups=[SimpleNamespace(tokens_per_block=16, layer_names=("b",), group_id=0)]), 4096),
    ]
    assert len({known, *(directory([*other]) for other in others)}) == len(others) + 1


def test_blocks_are_never_shared_with_the_connector() -> None:
    assert directory([]) != Namespace.build(MODEL, (4096,)).directory


def test_only_groups_with_full_attention_are_of_use_up_to_the_first_miss() -> None:
    found = identify(SimpleNamespace(lora_config=None), None, GEOMETRY, MODEL, "rows")
    assert found.prefix_groups == {0}
    assert found.replica == "1"


def test_adapters_keep_blocks_from_tiers_that_outlive_the_process() -> None:
    found = identify(SimpleNamespace(lora_config=object()), None, GEOMETRY, MODEL, "rows")
    assert found.identification is None
    with pytest.raises(PermanentStoreError, match=r"LoRA adapters are on, .*no tier that outlives the process is used"):
        found()


def test_unknown_models_of_two_engines_share_nothing() -> None:
    first, second = (unidentified(name, ["row 4096"], "nothing is known") for name in ("a", "b"))
    assert Namespace.build(first.model, (1,)).directory != Namespace.build(second.model, (1,)).directory
    with pytest.raises(PermanentStoreError, match="nothing is known"):
        first()


def test_keys_may_have_the_index_of_a_group_that_vllm_has_left_out_of_others() -> None:
    chosen = [SimpleNamespace(group_id=0), SimpleNamespace(group_id=3)]
    assert groups_of(SimpleNamespace(groups=chosen)) == 4
    assert groups_of(SimpleNamespace(groups=[SimpleNamespace(), SimpleNamespace()])) == 2
